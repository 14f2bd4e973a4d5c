"""Policies: which values a checkpointed region keeps, and which it recomputes in backward.

A policy gets a value and returns KEEP or RECOMPUTE. It is asked when an op has computed the value,
again if autograd saves it for backward, and again if the program names it. One KEEP is enough.
Policies are small named objects that can be compared, printed, pickled and composed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ..sizes import format_bytes, shown

__all__ = [
    "ByFunction",
    "Candidate",
    "Decision",
    "Either",
    "Policy",
    "SaveBelow",
    "SaveEverything",
    "SaveNames",
    "SaveNothing",
    "SaveOps",
    "as_policy",
    "refuse_makers",
]

Shape = tuple[int, ...]


class Decision(Enum):
    """What happens to a value between forward and backward."""

    RECOMPUTE = "recompute"
    KEEP = "keep"


class Candidate(NamedTuple):
    """What a policy knows about a value."""

    op: str  # the op that computed it, such as "aten.mm.default"
    shapes: tuple[Shape, ...]  # of the value, then of the op's inputs
    nbytes: int
    name: str = ""  # given with `remat.name`
    is_saved: bool = False  # whether autograd is saving it for backward


_NONE: Any = None  # where a policy was called by hand, as if it made one


class Policy:
    """Decides about one value at a time."""

    __slots__ = ()

    def __call__(self, candidate: Candidate, /) -> Decision:
        raise NotImplementedError


def _keep(condition: bool) -> Decision:
    return Decision.KEEP if condition else Decision.RECOMPUTE


@dataclass(frozen=True, slots=True)
class SaveNothing(Policy):
    """Recompute everything: the default of `checkpoint`."""

    def __call__(self, candidate: Candidate = _NONE, /) -> Decision:
        _refuse_call(self, candidate)
        return Decision.RECOMPUTE

    def __repr__(self) -> str:
        return "save_nothing"


@dataclass(frozen=True, slots=True)
class SaveEverything(Policy):
    """Keep everything that plain autograd saves."""

    def __call__(self, candidate: Candidate = _NONE, /) -> Decision:
        _refuse_call(self, candidate)
        return _keep(candidate.is_saved)

    def __repr__(self) -> str:
        return "save_everything"


@dataclass(frozen=True, slots=True)
class SaveBelow(Policy):
    """Keep saved tensors that are smaller than `nbytes`."""

    nbytes: int

    def __call__(self, candidate: Candidate, /) -> Decision:
        return _keep(candidate.is_saved and candidate.nbytes < self.nbytes)

    def __repr__(self) -> str:
        return f"save_below({format_bytes(self.nbytes)!r})"


@dataclass(frozen=True, slots=True)
class SaveOps(Policy):
    """Keep the outputs of ops by name; a name without overload means all overloads."""

    names: frozenset[str]
    label: str = field(default="", compare=False)

    def __call__(self, candidate: Candidate = _NONE, /) -> Decision:
        _refuse_call(self, candidate)
        return _keep(candidate.op in self.names or _base_name(candidate.op) in self.names)

    def __repr__(self) -> str:
        return self.label or _call("save_ops", sorted(self.names))


@dataclass(frozen=True, slots=True)
class SaveNames(Policy):
    """Keep tensors that were named with `remat.name`."""

    names: frozenset[str]

    def __call__(self, candidate: Candidate, /) -> Decision:
        return _keep(candidate.name in self.names)

    def __repr__(self) -> str:
        return _call("save_names", sorted(self.names))


@dataclass(frozen=True, slots=True)
class Either(Policy):
    """Keep what at least one of several policies keeps."""

    policies: tuple[Policy, ...]

    def __call__(self, candidate: Candidate, /) -> Decision:
        return _keep(any(policy(candidate) is Decision.KEEP for policy in self.policies))

    def __repr__(self) -> str:
        return _call("either", self.policies)


@dataclass(frozen=True, slots=True)
class ByFunction(Policy):
    """Ask a plain function of an op's name, shapes, bytes and the tensor's name."""

    function: Callable[[str, tuple[Shape, ...], int, str], Any]

    def __call__(self, candidate: Candidate, /) -> Decision:
        answer = self.function(candidate.op, candidate.shapes, candidate.nbytes, candidate.name)
        return answer if isinstance(answer, Decision) else _keep(bool(answer))


def as_policy(policy: Any) -> Policy:
    """Return a policy unchanged, or wrap a plain function of four arguments.

    >>> large = as_policy(lambda op, shapes, nbytes, name: nbytes > 10)
    >>> large(Candidate("mm", (), 100))
    <Decision.KEEP: 'keep'>
    """
    if isinstance(policy, Policy):
        return policy
    refuse_makers(policy)
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            "policy must be one of remat.policies or a function (op_name, shapes, bytes, name) -> "
            f"bool, got {shown(policy)}"
        )
    try:
        inspect.signature(policy).bind("op", (), 0, "name")
    except TypeError:
        raise TypeError(
            "policy must be a function of (op_name, shapes, bytes, name), which "
            f"{shown(policy)} is not; a policy for torch's selective checkpointing takes (ctx, op, "
            "*args, **kwargs)"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    return ByFunction(policy)


_MAKERS = {"save_names": '"attn"', "save_ops": '"mm"', "save_below": '"1MB"', "either": "p, q"}


def refuse_makers(policy: Any) -> None:
    """Raise for `policies.save_names`, which was not called, so that it is no policy yet."""
    name = getattr(policy, "__name__", "")
    if name in _MAKERS and getattr(policy, "__module__", "") == "remat.policies":
        raise TypeError(
            f"policy must be what policies.{name} returns, got policies.{name} itself; call it: "
            f"policies.{name}({_MAKERS[name]})"
        )


def _refuse_call(policy: Policy, candidate: object) -> None:
    """Raise for `policies.save_matmuls()`: it is a policy, and a region calls it."""
    if type(candidate) is not Candidate:
        raise TypeError(
            f"policies.{policy!r} is a policy, and no function that makes one; pass it without "
            f"parentheses: policy=policies.{policy!r}"
        )


def _call(name: str, arguments: Iterable[Any]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


def _base_name(op: str) -> str:
    """Return "mm" for "aten.mm.default", and "tanh" for "numpy.tanh"."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op
