"""Scopes: checkpointed blocks of code, and tensors that are marked or named in them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from .. import trees
from ..engines.compiling import is_compiling
from ..engines.locate import OpenScope, engine_in_use
from ..errors import RematError, UnsupportedError
from ..policies import save_everything
from ..schedules.check import options_by_name
from ..sizes import counted, format_bytes, shown
from .segments import check_option, check_policy

__all__ = ["CheckpointNode", "CheckpointScope", "is_checkpoint", "mark_checkpoint", "name"]


class CheckpointNode:
    """A region of a scope: what it holds, and how to recompute the rest.

    `CheckpointScope.nodes` has one node for each time that the scope was entered, until its
    backward pass has run. A node can also be used by hand: give it tensors to hold and functions
    that recompute others, in order.

    >>> node = CheckpointNode()
    >>> node.save_activations(3.0)
    >>> node.add_recompute_function(lambda: [x * x for x in node.saved_activations])
    >>> node.recompute()
    [9.0]
    >>> node
    <CheckpointNode: 1 activation held in 0 B, 1 recompute function>
    >>> node.clear_saved_activations()
    >>> node.saved_activations
    []
    """

    def __init__(
        self, output: Any = None, *, is_checkpoint: bool = True, region: OpenScope | None = None
    ) -> None:
        self.output = output
        self.is_checkpoint = is_checkpoint
        self._saved: list[Any] = []
        self._functions: list[Callable[[], Any]] = []
        self._region = region

    @property
    def saved_activations(self) -> list[Any]:
        """What is held: what was saved by hand, and what the region holds of its activations."""
        return [*self._saved, *(self._region.held() if self._region is not None else ())]

    @property
    def recompute_functions(self) -> list[Callable[[], Any]]:
        """The functions that recompute what is not held."""
        own = [self._region.recompute] if self._region is not None and self._region.is_alive else []
        return [*own, *self._functions]

    def save_activations(self, *activations: Any) -> None:
        """Hold these activations."""
        self._saved += activations

    def add_recompute_function(self, function: Callable[[], Any]) -> None:
        """Add a function for `recompute` to call. It returns an array or a pytree of arrays."""
        if not callable(function):
            raise TypeError(f"function must be a function, got {shown(function)}")
        self._functions.append(function)

    def recompute(self) -> list[Any]:
        """Call the functions in order, and return all arrays that they compute."""
        return [
            leaf for function in self.recompute_functions for leaf in trees.flatten(function())[0]
        ]

    def clear_saved_activations(self) -> None:
        """Drop what is held; a region recomputes it when it is needed."""
        self._saved.clear()
        if self._region is not None:
            self._region.drop()

    def __repr__(self) -> str:
        held = self.saved_activations
        amount = format_bytes(sum(getattr(array, "nbytes", 0) for array in held))
        functions = counted(len(self.recompute_functions), "recompute function")
        region = self._region
        owner = "" if region is None else f" of scope {region.name!r}"
        done = "" if region is None or region.is_alive else ", its backward pass is done"
        kind = "" if self.is_checkpoint else ", everything is kept"
        return (
            f"<CheckpointNode{owner}: {counted(len(held), 'activation')} held in {amount}, "
            f"{functions}{kind}{done}>"
        )


class CheckpointScope:
    """A `with` block that is one checkpointed region, with no function to wrap.

    >>> import torch
    >>> x = torch.ones(3, requires_grad=True)
    >>> with CheckpointScope("encoder") as scope:
    ...     y = torch.sin(torch.exp(x))
    >>> len(scope.nodes)
    1
    >>> y.sum().backward()

    On NumPy it works inside of a function that is being differentiated:

    >>> import numpy as np, remat
    >>> def f(x):
    ...     with CheckpointScope("encoder"):
    ...         return np.sum(np.sin(np.exp(x)))
    >>> remat.grad(f)(np.zeros(2)).round(3)
    array([0.54, 0.54])

    With `enabled=False` it has no effect. With `use_recomputation=False` it keeps what plain
    autograd keeps, and accounts for it: profilers see it, and `checkpoint(tensor)` drops single
    tensors. A `policy` says what is kept inside (`remat.policies`). Scopes nest, can be entered
    again, and work in several threads at the same time.
    """

    @options_by_name
    def __init__(
        self,
        name: str,
        enabled: bool = True,
        use_recomputation: bool = True,
        *,
        policy: Any = None,
    ) -> None:
        _refuse_compiler()
        if not isinstance(name, str):
            raise TypeError(f"name must be text, got {shown(name)}")
        check_option("enabled", enabled)
        check_option("use_recomputation", use_recomputation)
        self.name = name
        self.is_enabled = enabled
        self.use_recomputation = use_recomputation
        check_policy(policy)
        self.policy = policy
        self._nodes: list[CheckpointNode] = []
        self._entered = threading.local()

    @property
    def nodes(self) -> list[CheckpointNode]:
        """One node for each time it was entered, until its backward has run; the latest last."""
        return list(self._nodes)

    def __enter__(self) -> Self:
        _refuse_compiler()
        stack = self._entered.__dict__.setdefault("stack", [])
        depth = len(stack)
        try:
            self._open(stack)
            return self
        except BaseException:
            if len(stack) > depth:
                self._leave(quiet=True)
            raise

    def _open(self, stack: list[OpenScope | None]) -> None:
        if not self.is_enabled:
            stack.append(None)
            return
        engine = engine_in_use()
        # In one line: no interrupt comes between, and what is open is always on the stack.
        stack.append(engine.open_scope(self.name, policy=self._policy()))
        region = stack[-1]
        assert region is not None
        self._nodes = [n for n in self._nodes if n._region is not None and n._region.is_alive]
        if region.records:
            self._nodes.append(CheckpointNode(is_checkpoint=self.use_recomputation, region=region))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:  # an interrupt at this very line leaves it open: Python calls `__exit__` once
            self._leave(quiet=error is not None)
        except BaseException:
            if self._entered.__dict__.get("stack"):  # where `_leave` did not reach its end
                self._leave(quiet=True)
            raise

    def _leave(self, *, quiet: bool) -> None:
        stack: list[OpenScope | None] | None = self._entered.__dict__.get("stack")
        if not stack:
            raise RematError(
                f"the scope {self.name!r} was left more often than it was entered in this thread; "
                "write `with scope:`, which leaves it once"
            )
        if stack[-1] is not None:
            stack[-1].close(quiet=quiet)
        stack.pop()

    def _policy(self) -> Any:
        return self.policy if self.use_recomputation else save_everything

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(type(self), policy=self.policy)
        return make, (self.name, self.is_enabled, self.use_recomputation)

    def __repr__(self) -> str:
        return (
            f"CheckpointScope({self.name!r}, enabled={self.is_enabled}, "
            f"use_recomputation={self.use_recomputation})"
        )


def _refuse_compiler() -> None:
    if is_compiling():
        raise UnsupportedError(
            "CheckpointScope does not work inside of torch.compile; wrap the code in a function "
            "and use remat.checkpoint(fn, *inputs), which the compiler understands, or put the "
            "scope around the call of the compiled function"
        )


def mark_checkpoint(tensor: Any) -> Any:
    """Keep this tensor: recomputation of what follows starts from it. Return it.

    For use inside a scope or segment. Outside, tensors are kept anyway; it is only marked.

    >>> import torch
    >>> x = torch.ones(3, requires_grad=True)
    >>> with CheckpointScope("encoder") as scope:
    ...     h = mark_checkpoint(torch.exp(x))
    ...     y = torch.cos(torch.sin(h))
    >>> len(scope.nodes[0].saved_activations)
    1

    >>> import numpy as np, remat
    >>> def f(x):
    ...     with CheckpointScope("encoder") as scope:
    ...         h = mark_checkpoint(np.exp(x))
    ...         y = np.cos(np.sin(h))
    ...     print(len(scope.nodes[0].saved_activations))
    ...     return np.sum(y)
    >>> remat.grad(f)(np.zeros(2)).round(3)
    1
    array([-0.403, -0.403])
    """
    return engine_in_use(tensor).mark(tensor)


def name(tensor: Any, name: str) -> Any:
    """Name a tensor for policies and reports. Return it.

    >>> import torch
    >>> import remat
    >>> def block(x):
    ...     attention = remat.name(torch.exp(x), "attn")
    ...     return torch.cos(torch.sin(attention))
    >>> x = torch.ones(3, requires_grad=True)
    >>> y = remat.checkpoint(block, x, policy=remat.policies.save_names("attn"))
    >>> y.sum().backward()  # recomputes the sine from the kept exponential
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be text, got {shown(name)}")
    return engine_in_use(tensor).name_tensor(tensor, name)


def is_checkpoint(tensor: Any) -> bool:
    """Return whether `mark_checkpoint` was called on this tensor.

    >>> import torch
    >>> is_checkpoint(torch.ones(3)), is_checkpoint(mark_checkpoint(torch.ones(3)))
    (False, True)
    """
    return engine_in_use(tensor).is_marked(tensor)
