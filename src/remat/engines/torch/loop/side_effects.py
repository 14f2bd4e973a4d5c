"""Side effects of steps: writes to external tensors, replaced buffers, and random numbers.

What steps write to (the running statistics of batch normalization) is part of the state of a loop
although the step does not return it. So are tensors that replace a module's buffer, and the states
of generators that steps draw from. The first step is monitored op by op. All others in the forward
pass are, too, if the step reaches modules with buffers; if not, version counters of the tensors in
reach tell at the end whether a write was missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ....errors import UnsupportedError
from ..backend import preserve_version_counter
from ..memory.tensors import flat, is_plain
from ..modes import ObservingMode
from ..randomness import Generators, GeneratorStates, Unrepeatable, draw, generator_of
from ..schema import SchemaTraits
from .reach import Reach

__all__ = ["SideEffects", "Snapshot", "StepMonitor"]


class Snapshot(NamedTuple):
    """What belongs to a state of a loop although the step does not return it."""

    generators: GeneratorStates
    written: Mapping[int, Tensor]  # the bytes of external storages, by address
    buffers: list[dict[str, Tensor | None]]  # of modules in reach


class SideEffects:
    """Generators, external tensors and buffers that the steps of a loop use or change."""

    def __init__(self, reach: Reach) -> None:
        self.monitors_all_steps = reach.has_buffers
        self._generators = Generators()
        self._written: dict[int, Tensor] = {}  # the bytes of external storages, by address
        self._counters: list[Tensor] = []  # tensors whose version counters count writes to them
        self._modules = reach.modules
        self._first: dict[int, Tensor] = {}  # values before any step wrote
        self._latest: dict[int, Tensor] = {}  # values in the latest snapshot
        self._versions = [(tensor, tensor._version) for tensor in reach.tensors]

    @property
    def is_random(self) -> bool:
        return self._generators.is_used

    def add(self, monitor: StepMonitor) -> None:
        """Note what a step that was monitored wrote to and drew from."""
        for address, (memory, before, counter) in monitor.written.items():
            if address not in self._written:
                self._written[address] = memory
                self._counters.append(counter)
                self._first[address] = before
                self._latest = {**self._latest, address: before}
        for generator, state in monitor.generators.items():
            self._generators.add_generator(generator, state)

    def complete(self, initial: Snapshot) -> None:
        """Check the writes after all steps have run; ignore generators that none drew from."""
        for tensor, version in self._versions:
            if tensor._version != version and _address(tensor) not in self._written:
                raise UnsupportedError(
                    f"a step wrote to a tensor of shape {list(tensor.shape)} that it closes over, "
                    "which step 0 did not do, so that its earlier values are lost. Keep it in the "
                    "state, register it as a buffer of a module, or write to it in step 0, too"
                )
        self._versions = []
        self._generators.ignore_unused(initial.generators)

    def snapshot(self) -> Snapshot:
        """Return the present values; what did not change is shared with earlier snapshots."""
        changed = {
            address: memory.clone()
            for address, memory in self._written.items()
            if not torch.equal(memory, self._latest[address])
        }
        if changed:
            self._latest = {**self._latest, **changed}
        buffers = [dict(module._buffers) for module in self._modules]
        return Snapshot(self._generators.snapshot(), self._latest, buffers)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Run steps again; afterwards side effects are undone, and no write is counted."""
        now = self.snapshot()
        with preserve_version_counter(tuple(self._counters)):
            try:
                yield
            finally:
                self.restore(now)

    def restore(self, snapshot: Snapshot) -> None:
        """Set everything to its value in a snapshot; what it lacks was not written to by then."""
        self._generators.restore(snapshot.generators)
        latest = {}
        for address, memory in self._written.items():
            value = snapshot.written.get(address)
            latest[address] = self._first[address] if value is None else value
            memory.copy_(latest[address])
        self._latest = latest
        for module, buffers in zip(self._modules, snapshot.buffers, strict=True):
            module._buffers.update(buffers)


class StepMonitor(ObservingMode):
    """Observes the ops of a step: storages that it makes, what it writes to and draws from."""

    def __init__(self, given: Iterable[Any]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.writes_in_place = False  # to its state or its input
        # By address: the bytes, their values before, and a tensor that counts writes to them.
        self.written: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.generators: dict[torch.Generator, Tensor] = {}  # with their states before
        self._given = {_address(value) for value in given}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}  # by address: a storage, its bytes

    @property
    def live_bytes(self) -> int:
        """The bytes of storages that were made and still exist."""
        self._made = {k: made for k, made in self._made.items() if not made[0].expired()}
        return sum(nbytes for _, nbytes in self._made.values())

    def call(self, traits: SchemaTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._before(traits, args, kwargs)
        if traits.is_random and traits.draws(args, kwargs):
            return self._draw(traits, args, kwargs)
        return super().call(traits, args, kwargs)

    def ran(
        self, traits: SchemaTraits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        known = {_NO_STORAGE, *(_address(value) for value in flat((*args, *kwargs.values())))}
        for tensor in flat(out):
            if isinstance(tensor, Tensor) and (address := _address(tensor)) not in known:
                storage = tensor.untyped_storage()
                self._made[address] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _before(self, traits: SchemaTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for key in (*traits.writes, *traits.hidden_targets(args)):
            value = kwargs.get(key) if isinstance(key, str) else args[key : key + 1]
            for tensor in flat(value):
                if isinstance(tensor, Tensor):
                    self._before_write(tensor)

    def _draw(self, traits: SchemaTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an op that draws random numbers; note the generator, and its state before."""
        generator = generator_of(args, kwargs)
        out, drawn = draw(generator, partial(traits.call, *args, **kwargs))
        if isinstance(drawn, Unrepeatable):
            raise UnsupportedError(
                f"{traits.func} in a step of a loop draws random numbers that cannot be drawn "
                "again: no generator that PyTorch knows of its device has moved. A step is run "
                "again in backward; draw the numbers before the loop and pass them as its inputs"
            )
        self.generators.setdefault(drawn.generator, drawn.before)
        return out

    def _before_write(self, tensor: Tensor) -> None:
        address = _address(tensor)
        made = self._made.get(address)
        if made is not None and not made[0].expired():
            return
        if address in self._given:
            self.writes_in_place = True
        elif address != _NO_STORAGE and address not in self.written:
            memory = _bytes_of(tensor)
            self.written[address] = memory, memory.clone(), tensor


_NO_STORAGE = 0


def _address(value: Any) -> int:
    """Return an identifier of the storage of a tensor; 0 if it has none."""
    if not isinstance(value, Tensor) or not is_plain(value):
        return _NO_STORAGE
    address: int = value.untyped_storage()._cdata
    return address


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes, with a version counter of its own."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
