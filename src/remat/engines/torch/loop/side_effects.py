"""What steps do beside returning a state: writes to tensors from outside, and random numbers.

What steps write to (the statistics of batch normalisation, say) is part of the state, although
nobody says so; the same goes for tensors that they put into the place of a module's buffer, and for
the generators that they draw from. The first step is watched op
by op. So are the others on the way ahead, if the step reaches modules with buffers; if not, the
versions of tensors in reach tell at the end whether something was missed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ....errors import UnsupportedError
from ..memory.tensors import is_plain
from ..randomness import generator_of
from ..replay import flat
from ..schema import OpTraits, traits_of
from .reach import Reach

__all__ = ["SideEffects", "Snapshot", "StepMonitor"]


class Snapshot(NamedTuple):
    """What belongs to a state although the step does not say so."""

    generators: dict[Source, Any]  # where they stand
    written: dict[int, Tensor]  # the bytes of memory from outside, by its address
    buffers: list[dict[str, Tensor | None]]  # of modules in reach


class SideEffects:
    """Generators and tensors from outside that the steps of a loop use."""

    def __init__(self, reach: Reach) -> None:
        self.monitors_all_steps = reach.has_buffers
        self._generators = _default_generators()
        self._written: dict[int, Tensor] = {}
        self._counters: list[Tensor] = []  # over the same memory, which count writes to it
        self._modules = reach.modules
        self._first = Snapshot({}, {}, [])  # what each was before any step touched it
        self._known = Snapshot({}, {}, [])  # what each was when it was last looked at
        self._versions = [(tensor, tensor._version) for tensor in reach.tensors]
        self.snapshot()

    @property
    def is_random(self) -> bool:
        return bool(self._generators)

    def record_effects(self, watch: StepMonitor) -> None:
        """Take note of what a step has shown."""
        for key, (memory, before, counter) in watch.written.items():
            if key not in self._written:
                self._written[key] = memory
                self._counters.append(counter)
                self._first.written[key] = self._known.written[key] = before
        for generator, state in watch.generators.items():
            if generator not in self._generators:
                self._generators.append(generator)
                self._first.generators[generator] = state
                self._known.generators[generator] = state

    def complete(self, began: Snapshot) -> None:
        """Take note that all steps have been run; leave alone what none has touched."""
        for tensor, version in self._versions:
            if tensor._version != version and _address(tensor) not in self._written:
                raise UnsupportedError(
                    f"a step wrote to a tensor of shape {list(tensor.shape)} that it closes over, "
                    "which step 0 did not do, so that its earlier values are lost. Keep it in the "
                    "state, register it as a buffer of a module, or write to it in step 0, too"
                )
        self._versions = []
        self.snapshot()
        now, then = self._known.generators, {**self._first.generators, **began.generators}
        self._generators = [g for g in self._generators if now[g] is not then[g]]
        self._known = Snapshot({g: now[g] for g in self._generators}, self._known.written, [])

    def snapshot(self) -> Snapshot:
        """Return how all of it is now; what did not change is the same object as before."""
        generators, written, _ = self._known
        for generator in self._generators:
            state = generator.get_state()
            if generator not in generators or not _same(state, generators[generator]):
                generators[generator] = state
        for key, memory in self._written.items():
            if not torch.equal(memory, written[key]):
                written[key] = memory.clone()
        buffers = [dict(module._buffers) for module in self._modules]
        return Snapshot(dict(generators), dict(written), buffers)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Run steps again; afterwards all of it is as it was, and no write is counted."""
        now = self.snapshot()
        with _unsafe_preserve_version_counter(tuple(self._counters)):
            try:
                yield
            finally:
                self.restore(now)

    def restore(self, around: Snapshot) -> None:
        """Set all of it as it was then."""
        generators, written, _ = self._known
        for generator in self._generators:
            state = around.generators.get(generator)
            state = self._first.generators[generator] if state is None else state
            generator.set_state(state)
            generators[generator] = state
        for key, memory in self._written.items():
            value = around.written.get(key)
            value = self._first.written[key] if value is None else value
            memory.copy_(value)
            written[key] = value
        for module, buffers in zip(self._modules, around.buffers, strict=True):
            module._buffers.update(buffers)


class StepMonitor(TorchDispatchMode):
    """Watches a step op by op: memory that it makes, what it writes to and draws from."""

    supports_higher_order_operators = True

    def __init__(self, given: Iterable[Any]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.writes_in_place = False  # on what it was given
        # By address: memory, what it was, and a tensor that counts writes to it.
        self.written: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.generators: dict[torch.Generator, Tensor] = {}  # and where they stood
        self._given = {_address(value) for value in given}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}  # by address: a storage, its bytes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the compiler would be loaded, to switch it off for each op

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @property
    def live_bytes(self) -> int:
        """Weigh what was made and is still there."""
        self._made = {k: made for k, made in self._made.items() if not made[0].expired()}
        return sum(nbytes for _, nbytes in self._made.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        traits = traits_of(func)
        self._before(traits, args, kwargs)
        out = traits.call(*args, **kwargs)
        known = {_NOWHERE, *(_address(value) for value in flat((*args, *kwargs.values())))}
        for tensor in flat(out):
            if isinstance(tensor, Tensor) and (address := _address(tensor)) not in known:
                storage = tensor.untyped_storage()
                self._made[address] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return out

    def _before(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if traits.is_random and traits.draws(args, kwargs):
            generator = generator_of(args, kwargs)
            if generator not in self.generators:
                self.generators[generator] = generator.get_state()
        for key in (*traits.writes, *traits.hidden_targets(args)):
            value = kwargs.get(key) if isinstance(key, str) else args[key : key + 1]
            for tensor in flat(value):
                if isinstance(tensor, Tensor):
                    self._before_write(tensor)

    def _before_write(self, tensor: Tensor) -> None:
        address = _address(tensor)
        made = self._made.get(address)
        if made is not None and not made[0].expired():
            return
        if address in self._given:
            self.writes_in_place = True
        elif address != _NOWHERE and address not in self.written:
            memory = _bytes_of(tensor)
            self.written[address] = memory, memory.clone(), tensor


_NOWHERE = 0


def _address(value: Any) -> int:
    """Return where the storage of a tensor is."""
    if not isinstance(value, Tensor) or not is_plain(value):
        return _NOWHERE
    address: int = value.untyped_storage()._cdata
    return address


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return all of the memory that a tensor lies over; it counts writes by itself."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


Source = torch.Generator | type["_Python"] | type["_NumPy"]


class _Python:
    """The random numbers of Python's own module."""

    get_state = staticmethod(random.getstate)
    set_state = staticmethod(random.setstate)


class _NumPy:
    """The random numbers of `numpy.random`."""

    get_state = staticmethod(partial(np.random.get_state, legacy=False))
    set_state = staticmethod(np.random.set_state)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_same(one[key], other[key]) for key in one)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def _default_generators() -> list[Source]:
    """Return those of the devices in use, of NumPy and of Python."""
    found: list[Source] = [torch.default_generator, _Python, _NumPy]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += torch.cuda.default_generators
    return found
