"""Plain Python loops that checkpoint themselves."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar, get_args

from ..engines.compiling import is_compiling
from ..engines.locate import is_torch_module
from ..engines.values import LoadedValues
from ..errors import LoopTransformError, RematWarning
from ..loops import LoopOptions, MemorySize, ScheduleName
from ..schedules.check import one_of, options_by_name, whole_number
from ..sizes import did_you_mean, shown
from ..source import Items, IterableWithOptions, Options, transform
from ..stores import Store, find_store
from .gradients import grad
from .loops import checkpointed_loop, checkpointed_scan, checkpointed_while

__all__ = ["checkpoint_loops", "grad_with_checkpointing", "steps"]

_VALUES = LoadedValues()
_MIN_STEPS = 8
_SLOTS = 32  # for a loop whose length shows at its end, if no number is given

F = TypeVar("F", bound=Callable[..., Any])


@options_by_name
def checkpoint_loops(
    f: Any = None,
    num_checkpoints: int | None = None,
    *,
    memory_budget: MemorySize | None = None,
    schedule: ScheduleName = "auto",
    store: str | Store = "memory",
    min_steps: int = _MIN_STEPS,
    strict: bool = False,
) -> Any:
    """Return `f` with its plain Python loops checkpointed; also a decorator.

    Each `for` and `while` loop that carries something differentiated from turn to turn becomes a
    step function over its variables, run by the loop runner: its activations are discarded in the
    forward pass and recomputed in backward. Results, gradients and exceptions are those of `f`.
    A loop that is not differentiated, and a short one, runs in its own code.

    Args:
        f: A function of NumPy arrays or tensors, a method, or an `nn.Module`: then its `forward`
            is replaced on this instance, and the module itself is returned.
        num_checkpoints: How many states each loop may hold; see `checkpointed_loop`.
        memory_budget: The peak of each loop instead.
        schedule: See `checkpointed_loop`.
        store: See `checkpointed_loop`.
        min_steps: Loops with fewer turns stay plain.
        strict: Raise `LoopTransformError` for a loop that cannot be transformed. By default it
            stays plain, with a `RematWarning`.

    Returns:
        The function; `.transformed_source` is its code, to read.

    >>> import numpy as np
    >>> @checkpoint_loops
    ... def power(x, n=100):
    ...     y = x
    ...     for i in range(n):
    ...         y = np.tanh(y) * 1.1
    ...     return y
    >>> power(np.ones(2)).shape
    (2,)
    """
    options = _options(
        num_checkpoints=num_checkpoints,
        memory_budget=memory_budget,
        schedule=schedule,
        store=store,
        min_steps=min_steps,
    )
    if f is None:
        return functools.partial(_transformed, options=options, strict=strict)
    return _transformed(f, options, strict=strict)


def grad_with_checkpointing(
    f: Callable[..., Any],
    wrt: int | tuple[int, ...] = 0,
    num_checkpoints: int | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Return a function that computes the gradient of `f`, whose loops are checkpointed.

    It is `grad(checkpoint_loops(f, …), wrt)`, with the options of both.

    >>> import numpy as np
    >>> def rnn_model(x, W, b):
    ...     state = x
    ...     for i in range(1000):
    ...         state = np.tanh(state @ W + b)
    ...     return state
    >>> df = grad_with_checkpointing(rnn_model, num_checkpoints=31)
    >>> df(np.ones(3), np.eye(3), np.zeros(3)).shape
    (3,)
    """
    return grad(checkpoint_loops(f, num_checkpoints, **options), wrt)


def steps(iterable: Iterable[Any], **options: Any) -> Iterable[Any]:
    """Iterate over something, with options for this loop: those of `checkpoint_loops`.

    Outside of a transformed function it just iterates.

    >>> [i for i in steps(range(3), num_checkpoints=10)]
    [0, 1, 2]
    """
    if is_compiling():
        return iterable
    # (A transformed function has made `Items` of zip, enumerate or reversed.)
    if not isinstance(iterable, Iterable | Items) and not hasattr(iterable, "__getitem__"):
        raise TypeError(f"iterable must be something to iterate over, got {shown(iterable)}")
    for name in sorted(options.keys() - set(Options.names())):
        known = Options.names()
        raise TypeError(
            f"options of steps must be of {', '.join(known)}, got {name}{did_you_mean(name, known)}"
        )
    checked = _options(**options)
    return IterableWithOptions(iterable, {name: getattr(checked, name) for name in options})


steps.makes_steps = True  # type: ignore[attr-defined]


def _options(
    *,
    num_checkpoints: int | None = None,
    memory_budget: MemorySize | None = None,
    schedule: Any = "auto",
    store: str | Store = "memory",
    min_steps: int = _MIN_STEPS,
) -> Options:
    found = find_store(store)
    one_of(schedule, "schedule", get_args(ScheduleName))  # a schedule object has a number of steps
    LoopOptions(1, num_checkpoints, memory_budget, schedule, found)  # which checks them
    whole_number(min_steps, "min_steps")
    return Options(num_checkpoints, memory_budget, schedule, found, min_steps)


def _transformed(f: Any, options: Options, *, strict: bool) -> Any:
    if is_torch_module(f):
        method = _transformed(f.forward, options, strict=strict)
        f.forward = method
        return f
    if isinstance(f, staticmethod | classmethod):
        return type(f)(_transformed(f.__func__, options, strict=strict))
    if isinstance(f, MethodType):
        return MethodType(_transformed(f.__func__, options, strict=strict), f.__self__)
    if isinstance(f, functools.partial):
        return functools.partial(
            _transformed(f.func, options, strict=strict), *f.args, **f.keywords
        )
    if not callable(f):
        raise TypeError(f"f must be a function, got {shown(f)}")
    if not isinstance(f, FunctionType):
        return _of_object(f, options, strict=strict)
    return _of_function(f, options, strict=strict)


def _of_function(f: FunctionType, options: Options, *, strict: bool) -> Any:
    inner = getattr(f, "__wrapped__", None)
    if isinstance(inner, FunctionType):
        return _inside_of_wrapper(f, inner, options, strict=strict)
    return transform(f, options, _VALUES, _PublicLoops(), strict=strict)


def _inside_of_wrapper(f: FunctionType, inner: Any, options: Options, *, strict: bool) -> Any:
    """Transform what another decorator has wrapped, and keep its wrapper around it."""
    cells = list(f.__closure__ or ())
    places = [i for i, cell in enumerate(cells) if _holds(cell, inner)]
    if not places:
        return _refuse(f, "another decorator hides it: apply checkpoint_loops first", strict=strict)
    new = _transformed(inner, options, strict=strict)
    for place in places:
        cells[place] = CellType(new)
    wrapper = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, tuple(cells))
    wrapper.__kwdefaults__ = f.__kwdefaults__
    functools.update_wrapper(wrapper, f)
    wrapper.__wrapped__ = new  # type: ignore[attr-defined]
    wrapper.transformed_source = getattr(new, "transformed_source", "")  # type: ignore[attr-defined]
    return wrapper


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # a name that has no value yet
        return False


def _of_object(f: Any, options: Options, *, strict: bool) -> Any:
    call = inspect.getattr_static(type(f), "__call__", None)
    if isinstance(f, type) or not isinstance(call, FunctionType):
        return _refuse(f, "it is no Python function, so it has no source", strict=strict)
    return MethodType(_of_function(call, options, strict=strict), f)


def _refuse(f: Any, reason: str, *, strict: bool) -> Any:
    name = getattr(f, "__qualname__", None) or type(f).__qualname__
    words = f"{name}: its loops cannot be checkpointed: {reason}"
    if strict:
        raise LoopTransformError(words)
    warnings.warn(f"{words}; they run without checkpoints", RematWarning, stacklevel=4)
    return f


class _PublicLoops:
    """Runs the steps of transformed loops: with the loops of the public API."""

    def loop(self, step: Callable[..., Any], state: Any, steps: int, options: Options) -> Any:
        return checkpointed_loop(step, state, steps, **_known(options))[0]

    def scan(
        self, step: Callable[..., Any], state: Any, xs: Any, options: Options
    ) -> tuple[Any, Any]:
        return checkpointed_scan(step, state, xs, **_known(options))

    def loop_while(
        self,
        goes_on: Callable[[Any], bool],
        step: Callable[..., Any],
        state: Any,
        longest: int | None,
        options: Options,
    ) -> Any:
        given = _known(options)
        del given["schedule"]
        if given["num_checkpoints"] is None and given["memory_budget"] is None:
            given["num_checkpoints"] = _SLOTS if longest is None else max(1, math.isqrt(longest))
        return checkpointed_while(goes_on, step, state, **given)[0]

    def can_run_while(self, options: Options) -> str | None:
        if options.schedule != "auto":
            return (
                f"it may end before its last turn, and schedule={options.schedule!r} needs their "
                'number; use schedule="auto"'
            )
        if isinstance(options.memory_budget, float):
            return (
                f"it may end before its last turn, and memory_budget={options.memory_budget!r}, a "
                "fraction, needs their number; give bytes"
            )
        return None


def _known(options: Options) -> dict[str, Any]:
    return {
        "num_checkpoints": options.num_checkpoints,
        "memory_budget": options.memory_budget,
        "schedule": options.schedule,
        "store": options.store,
    }
