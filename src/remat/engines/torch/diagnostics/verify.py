"""`verify`: runs a function with and without checkpointing, and compares bit for bit."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import trees
from ....core.accounting import Accounting
from ....core.records import Made, Op, Value
from ....errors import RecomputeMismatchError
from ....segments import SegmentOptions
from ....verification import Verification
from ..adapter import TORCH
from ..memory.tensors import flat
from ..modes import ObservingMode
from ..op_facts import FACTS
from ..randomness import Generators
from ..referenced_tensors import referenced_tensors
from ..schema import SchemaTraits
from ..segment import close_region, open_region
from ..selective import torch_policy
from ..source_location import SourceLocation, caller, describe

__all__ = ["left_as_found", "verify"]

Buffers = Mapping[str, Tensor]
_UNKNOWN = "Every op gives the same result in forward and when recomputed: please report this"


class RunResult(NamedTuple):
    """The results of a run, as fingerprints by name."""

    outputs: dict[str, bytes]
    gradients: dict[str, bytes]
    buffers: dict[str, bytes]
    random: dict[str, bytes]


def verify(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SegmentOptions,
) -> Verification:
    """Compare outputs, gradients, buffers and random state; raise at the first difference.

    The function is called on copies of its inputs. Buffers, gradients and random state are
    restored.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    owned = referenced_tensors(function)
    call = _CopiedCall(function, args, kwargs)
    sources = {n: t for n, t in (call.inputs | owned.sources).items() if _takes_gradient(t)}
    if not sources:
        raise ValueError(
            f"verify({name}) has no gradient to compare: none of its inputs, parameters and "
            "closed-over tensors requires grad; call requires_grad_() on one"
        )
    checker = Checker()
    with left_as_found(owned.buffers):
        plain = _run(call, sources, owned.buffers)
    with left_as_found(owned.buffers):
        checked = _run(partial(call.in_region, options, checker), sources, owned.buffers)
    difference = _difference(plain, checked)
    if difference:
        with left_as_found(owned.buffers):
            cause = _first_difference(call, owned.buffers) or checker.found or _UNKNOWN
        raise RecomputeMismatchError(f"{name}: {difference}. {cause}")
    return Verification(
        name,
        outputs=len(plain.outputs),
        gradients=len(plain.gradients),
        buffers=len(plain.buffers),
        ops=checker.compared,
    )


class _CopiedCall:
    """A call of a function on copies of its inputs. Each run may write to its own."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        leaves, self._structure = trees.flatten((args, kwargs))
        self._function = function
        self.inputs = {f"input {n}": _copy(leaf) for n, leaf in enumerate(leaves)}

    def __call__(self) -> Any:
        args, kwargs = self._arguments()
        return self._function(*args, **kwargs)

    def in_region(self, options: SegmentOptions, checker: Checker) -> Any:
        args, kwargs = self._arguments()  # before the region, which would record the copies
        region = open_region(
            options.name,
            preserve_rng_state=options.preserve_rng_state,
            policy=torch_policy(options.policy),
            observer=checker,
        )
        try:
            return self._function(*args, **kwargs)
        finally:
            close_region(region, None)

    def _arguments(self) -> Any:
        copies = [t.clone() if isinstance(t, Tensor) else t for t in self.inputs.values()]
        return trees.unflatten(self._structure, copies)


def _difference(plain: RunResult, checked: RunResult) -> str:
    """Say what differs between two runs; an empty text if they are the same."""
    for what, before, after in zip(RunResult._fields, plain, checked, strict=True):
        different = [key for key in before if before[key] != after.get(key)]
        if different or before.keys() != after.keys():
            named = ", ".join(different) or "another number of them"
            return f"{what} differ with and without checkpointing: {named}"
    return ""


def _run(call: Callable[[], Any], sources: Buffers, buffers: Buffers) -> RunResult:
    results, _ = trees.flatten(call())
    outputs = {f"output {n}": _fingerprint(result) for n, result in enumerate(results)}
    ends = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if ends:
        gradients = torch.autograd.grad(
            ends, list(sources.values()), [torch.ones_like(end) for end in ends], allow_unused=True
        )
    found = {n: _fingerprint(g) for n, g in zip(sources, gradients, strict=False) if g is not None}
    kept = {n: _fingerprint(buffer) for n, buffer in buffers.items()}
    return RunResult(outputs, found, kept, _random_states())


def _random_states() -> dict[str, bytes]:
    states = Generators(only_torch=True).snapshot().values()
    return {f"generator {n}": _fingerprint(state) for n, state in enumerate(states)}


class Checker(Accounting):
    """Compares the output of every recomputed op with its first run.

    A difference alone is no error: some kernels leave parts of a workspace uninitialized. It
    explains why results differ, if they do.
    """

    def __init__(self) -> None:
        super().__init__("", (), TORCH, FACTS)
        self.compared = 0  # ops that gave the same result
        self.found = ""  # the first op that gave another result
        self._expected: dict[Value, tuple[Op, bytes]] = {}
        self._checked: set[Value] = set()

    def ran(self, op: Op, made: Made, seconds: float, *, has_grad: bool) -> None:
        super().ran(op, made, seconds, has_grad=has_grad)
        if op.traits.leaves_uninitialized:
            return  # uninitialized memory cannot be compared
        for value, _ in made:
            tensor = value.tensor()
            if isinstance(tensor, Tensor) and value.op is not None:
                self._expected[value] = op, _fingerprint(tensor)

    def replaying(self, values: Mapping[Value, Tensor]) -> None:
        super().replaying(values)
        for value in values.keys() - self._checked:
            self._checked.add(value)
            if value not in self._expected:
                continue
            op, expected = self._expected[value]
            if _fingerprint(values[value]) == expected:
                self.compared += 1
            elif not self.found:
                self.found = (
                    f"{op.traits.func} gave another value when it was recomputed. It was called by "
                    f"{describe(op.location)}. Likely causes: it draws random numbers that remat "
                    "cannot see, an input was modified through .data or shared memory, or the op "
                    "is not deterministic"
                )


class _OpLog(ObservingMode):
    """Records a fingerprint of every op's output."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, SourceLocation, list[bytes]]] = []

    def ran(
        self, traits: SchemaTraits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if not traits.leaves_uninitialized:
            prints = [_fingerprint(t) for t in flat(out) if isinstance(t, Tensor)]
            self.seen.append((str(traits.func), caller(sys._getframe(2)), prints))


def _first_difference(call: Callable[[], Any], buffers: Buffers) -> str:
    """Run a function twice more, and name the first op that differs between the runs."""
    logs = []
    for _ in range(2):
        with left_as_found(buffers), _OpLog() as log:
            call()
        logs.append(log.seen)
    for first, second in zip(*logs, strict=False):
        if (first[0], first[2]) != (second[0], second[2]):
            return (
                f"The function is not deterministic: the first op that differs is {first[0]}, "
                f"called by {describe(first[1])}"
            )
    if len(logs[0]) != len(logs[1]):
        return f"The function is not deterministic: it ran {len(logs[0])} ops, then {len(logs[1])}"
    return ""


@contextmanager
def left_as_found(buffers: Buffers) -> Iterator[None]:
    """Restore buffers and random states."""
    values = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    generators = Generators(only_torch=True)
    states = generators.snapshot()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        generators.restore(states)


def _takes_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _fingerprint(value: Any) -> bytes:
    """Return a digest of the bytes, shape and dtype of a value."""
    if not isinstance(value, Tensor):
        return repr(value).encode()
    with torch.no_grad():
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        flat_bytes = dense.resolve_conj().resolve_neg().cpu().contiguous().view(-1)
        # Not through NumPy: that would mark the memory as shared.
        raw = ctypes.string_at(flat_bytes.data_ptr(), flat_bytes.nbytes)
    mark = f"{value.dtype}{list(value.shape)}".encode()
    return hashlib.blake2b(mark + raw, digest_size=16).digest()
