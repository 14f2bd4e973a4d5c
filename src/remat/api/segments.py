"""Segments: calls whose activations are dropped and recomputed in backward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

from ..engines.compiling import compiled_segment, is_compiling, is_selective_policy
from ..engines.locate import engine_for, engine_of_call, engine_of_module, is_torch_module
from ..plans.policy import as_policy, refuse_makers
from ..segments import ContextPolicy, SegmentOptions
from ..sizes import did_you_mean, parse_bytes, shown
from .wrapped import CheckpointedFunction, refuse_module_class

__all__ = [
    "adaptive_checkpoint",
    "check_option",
    "check_policy",
    "checkpoint",
    "checkpoint_segment",
    "refuse_reentrant",
    "run_segment",
    "wrap",
]

P = ParamSpec("P")
R = TypeVar("R")
_PLAIN = SegmentOptions()


@overload
def checkpoint(
    fn: Callable[P, R], /, *, preserve_rng_state: bool = True, policy: Any = None
) -> Callable[P, R]: ...
@overload
def checkpoint(
    fn: Callable[..., R],
    first: Any,
    /,
    *inputs: Any,
    preserve_rng_state: bool = True,
    policy: Any = None,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Any] | None = None,
    determinism_check: str | None = None,
    debug: bool | None = None,
    early_stop: bool | None = None,
    **kwargs: Any,
) -> R: ...
@overload
def checkpoint(
    fn: None = None, /, *, preserve_rng_state: bool = True, policy: Any = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def checkpoint(fn: Any, /, *inputs: Any, **kwargs: Any) -> Any: ...
def checkpoint(
    fn: Any = None,
    /,
    *inputs: Any,
    preserve_rng_state: bool = True,
    policy: Any = None,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Any] | None = None,
    determinism_check: str | None = None,
    debug: bool | None = None,
    early_stop: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run `fn(*inputs, **kwargs)`; keep its inputs, drop its activations, recompute in backward.

    Inputs and outputs can be any pytree. Gradients also reach what `fn` closes over. Without inputs
    the wrapped function is returned, so this is also a decorator, with or without options. A
    `functools.partial` with all arguments bound, and a call with one of torch's own options, is
    run.

    Args:
        fn: The function. With a tensor instead, inside a scope or a segment: drop this tensor, and
            recompute it when it is needed.
        inputs: Its arguments.
        preserve_rng_state: True, the default: backward draws the same random numbers again. False:
            the random numbers are kept.
        policy: What is kept inside, see `remat.policies`. Default: only the inputs.
        use_reentrant: False is accepted, as in torch. True is a ValueError.
        context_fn: Accepted if it is `create_selective_checkpoint_contexts` with a policy.
        determinism_check: Accepted as in torch. Shapes and dtypes are always compared.
        debug: Accepted as in torch. Errors always name the op and where it was called.
        early_stop: Accepted as in torch. Only the ops that are needed are recomputed.
        kwargs: Keyword arguments of `fn`. If `fn` has an argument with one of the names above, bind
            it with `functools.partial` or in a lambda.

    >>> import numpy as np
    >>> import remat
    >>> @remat.checkpoint
    ... def layer(x, W):
    ...     return np.tanh(x @ W)
    >>> remat.grad(lambda x: np.sum(layer(x, np.eye(2))))(np.zeros(2))
    array([1., 1.])
    """
    if kwargs and not is_compiling():
        _refuse_misspelled(fn, kwargs)
    if isinstance(fn, type):
        refuse_module_class(fn, "fn")
    options = _PLAIN
    of_torch = (use_reentrant, context_fn, determinism_check, debug, early_stop)
    is_torch_call = of_torch != _UNSET
    if is_torch_call:
        policy = _policy_of_torch_call(policy, *of_torch)
    if policy is not None or preserve_rng_state is not True:
        check_option("preserve_rng_state", preserve_rng_state)
        options = SegmentOptions(preserve_rng_state, policy=policy)
    if inputs and callable(fn):
        return run_segment(fn, inputs, kwargs, options)
    check_policy(policy)  # not when the function is called, which may be much later
    run = is_torch_call or _has_all_arguments(fn)
    return _run_or_wrap(options, fn, inputs, kwargs, run=run)


def adaptive_checkpoint(
    fn_or_tensor: Any = None,
    /,
    *inputs: Any,
    threshold: int | str,
    preserve_rng_state: bool = True,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Checkpoint a call, but only if it would keep more than `threshold`.

    `threshold` is bytes, or text such as "10KB". Up to it everything is kept and nothing is
    recomputed. Without inputs this is a decorator. The keywords `threshold`, `preserve_rng_state`
    and `use_reentrant` are options and do not reach `fn`: bind those of `fn` with
    `functools.partial` or in a lambda.

    >>> import numpy as np
    >>> import remat
    >>> def wave(x):
    ...     return np.sum(np.sin(np.exp(x)))
    >>> def small_is_held(x):
    ...     return remat.adaptive_checkpoint(wave, x, threshold="10KB")
    >>> bool(remat.grad(small_is_held)(np.zeros(2))[0] == np.cos(1.0))
    True
    """
    if kwargs and not is_compiling():
        _refuse_misspelled(fn_or_tensor, kwargs)
    if use_reentrant:
        refuse_reentrant()
    check_option("preserve_rng_state", preserve_rng_state)
    # A compiler does not know in advance what a segment would keep, and cannot trace strings.
    limit = 0 if is_compiling() else parse_bytes(threshold, name="threshold")
    options = SegmentOptions(preserve_rng_state, limit)
    run = use_reentrant is not None or _has_all_arguments(fn_or_tensor)
    return _run_or_wrap(options, fn_or_tensor, inputs, kwargs, run=run)


def checkpoint_segment(
    fn: Callable[[Sequence[Any]], R],
    inputs: Sequence[Any],
    *,
    preserve_rng_state: bool = True,
    policy: Any = None,
    use_reentrant: bool | None = None,
) -> R:
    """Run `fn(inputs)` as a checkpointed segment: `fn` gets the whole sequence of inputs.

    >>> import numpy as np
    >>> import remat
    >>> def product(inputs):
    ...     return np.sum(inputs[0] * inputs[1])
    >>> def f(x, y):
    ...     return remat.checkpoint_segment(product, [x, y])
    >>> remat.grad(f, wrt=(0, 1))(np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    (array([3., 4.]), array([1., 2.]))
    """
    if use_reentrant:
        refuse_reentrant()
    check_option("preserve_rng_state", preserve_rng_state)
    if not callable(fn):
        raise TypeError(f"fn must be a function of a sequence, got {shown(fn)}")
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Sequence):
        raise TypeError(
            f"inputs must be a list or tuple, got {shown(inputs)}; write [x] for a single x"
        )
    if not inputs:
        raise ValueError("inputs must not be empty: a segment starts from at least one input")
    given = inputs if isinstance(inputs, list | tuple) else list(inputs)
    options = SegmentOptions(preserve_rng_state, policy=policy)
    result: R = run_segment(fn, (given,), {}, options)
    return result


def _run_or_wrap(
    options: SegmentOptions, fn: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], *, run: bool
) -> Any:
    """Run a call, return a wrapped function or a decorator, or drop a tensor."""
    if callable(fn):
        if inputs or kwargs or run:
            return run_segment(fn, inputs, kwargs, options)
        return wrap(fn, _SegmentRunner(options))
    if not inputs and not kwargs:
        if fn is None:
            return functools.partial(_decorate, options)
        if hasattr(fn, "dtype") and hasattr(fn, "shape"):
            return engine_for([fn]).checkpoint_tensor(fn, options.threshold)
    raise TypeError(
        f"fn must be a function, got {shown(fn)}; to checkpoint a computation pass the "
        "function that does it: remat.checkpoint(fn, x)"
    )


def _decorate(options: SegmentOptions, fn: Any, /, *inputs: Any, **kwargs: Any) -> Any:
    """The decorator that `checkpoint` with options only returns."""
    return _run_or_wrap(options, fn, inputs, kwargs, run=False)


def _has_all_arguments(fn: Any) -> bool:
    """Return whether a partial has all arguments bound, as in Hugging Face's layers.

    The signature of a module is that of its `forward`.
    """
    if not isinstance(fn, functools.partial):
        return False
    try:
        inspect.signature(_called(fn.func)).bind(*fn.args, **fn.keywords)
    except (TypeError, ValueError):  # arguments are missing, or there is no signature
        return False
    return True


def _called(fn: Any) -> Any:
    """Return the function whose signature says what a call takes."""
    owner: Any = getattr(fn, "__self__", fn)
    return owner.forward if is_torch_module(owner) else fn


_OPTIONS = ("preserve_rng_state", "policy", "use_reentrant", "context_fn", "determinism_check")


@functools.lru_cache(maxsize=256)
def _near_option(name: str) -> str:
    return did_you_mean(name, (*_OPTIONS, "threshold"))


def _refuse_misspelled(fn: Any, kwargs: dict[str, Any]) -> None:
    """Raise for a keyword that `fn` does not take, and that is nearly one of our options."""
    for name in kwargs:
        if not _near_option(name) or not callable(fn):
            continue
        try:
            known = inspect.signature(_called(fn)).parameters
        except (TypeError, ValueError):
            return
        if name not in known and all(p.kind is not p.VAR_KEYWORD for p in known.values()):
            raise TypeError(
                f"{name} must be an option, or an argument of {shown(fn)}{_near_option(name)}"
            )


def run_segment(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: SegmentOptions
) -> Any:
    # First, because a compiler can only trace what it knows.
    if is_compiling():
        return compiled_segment(fn, args, kwargs, options)
    return engine_of_call(fn, args, kwargs).run_segment(fn, args, kwargs, options)


@dataclass(frozen=True, slots=True)
class _SegmentRunner:
    """Runs functions as segments with the same options."""

    options: SegmentOptions

    def __call__(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run_segment(fn, args, kwargs, self.options)


def wrap(fn: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn`, a function or module, with calls replaced by `run(fn, args, kwargs)`."""
    if is_torch_module(fn):
        module: Callable[..., Any] = engine_of_module(fn).checkpointed_module(fn, run)
        return module
    return CheckpointedFunction(fn, run)


_UNSET = (None,) * 5


def _policy_of_torch_call(
    policy: Any,
    use_reentrant: bool | None,
    context_fn: Callable[[], Any] | None,
    determinism_check: str | None,
    debug: bool | None,
    early_stop: bool | None,
) -> Any:
    """Check the options of torch's `checkpoint`; return the policy that they contain."""
    if use_reentrant:
        refuse_reentrant()
    for name, value in (("debug", debug), ("early_stop", early_stop)):
        if value is not None:
            check_option(name, value)
    if determinism_check not in (None, "default", "none"):
        raise ValueError(
            f'determinism_check must be "default" or "none", got {shown(determinism_check)}'
        )
    if context_fn is None:
        return policy
    if policy is not None:
        raise ValueError("pass policy or context_fn, not both: each says what is kept")
    if not callable(context_fn):
        raise TypeError(f"context_fn must be a function, got {shown(context_fn)}")
    return ContextPolicy(context_fn)


def check_option(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")


def check_policy(policy: Any) -> None:
    """Raise if something is no policy: of remat, a function, or one of torch."""
    refuse_makers(policy)
    is_of_torch = isinstance(policy, ContextPolicy) or is_selective_policy(policy)
    if policy is not None and not is_of_torch:
        as_policy(policy)


def refuse_reentrant() -> None:
    raise ValueError(
        "use_reentrant=True is not supported: reentrant checkpointing loses gradients of "
        "closed-over tensors and cannot be nested; leave it out or pass False"
    )
