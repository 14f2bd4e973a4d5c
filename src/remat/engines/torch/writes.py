"""Writes: what is overwritten is copied before if it is needed and cannot be computed again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .books import Books, key_of, whole_of
from .kinds import Kind, is_ordinary
from .records import Op, State, alias, fresh_copy, parts_of, version_of
from .replay import flat
from .sharing import overlap
from .watch import nbytes_of

__all__ = ["Writes"]


class Writes(Books):
    """Books that follow what ops write to."""

    def _before_writes(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[tuple[Any, int], Tensor, State]]:
        targets = _targets(kind, args, kwargs)
        alone = len(targets) == 1 and not kind.fresh
        return [
            (key, tensor, self._before_write(kind, tensor, alone=alone)) for key, tensor in targets
        ]

    def _before_writes_to_twins(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> set[int]:
        """Save what other storages over the same memory hold of it, and return their keys.

        DLPack and NumPy make such storages; they count by themselves, so a write to one is none
        to the other.
        """
        tensors = [tensor for _, tensor in _targets(kind, args, kwargs)]
        tensors += [args[number] for number in kind.writes_in_secret(args)]
        found: set[int] = set()
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not is_ordinary(tensor):
                continue
            storage = tensor.untyped_storage()
            if self._shared or not storage.resizable():
                self._encode([*args, *kwargs.values()])  # so that all is known
                found |= self._twins(storage)
        for key in found:
            state = self._states[key]
            for region in self.opened:
                if region.room is not None:
                    region.before_write(state)
            for sibling in state.family():
                self._let_go_of_memory(sibling, tensors)
        return found

    def _twins(self, storage: Any) -> set[int]:
        """Return the keys of other storages over the same memory, and of those nobody can find."""
        own = key_of(storage)
        keys = self._shared & self._states.keys() if storage.resizable() else self._states.keys()
        return {key for key in keys if key != own and _may_be_over(self._states[key], storage)}

    def _let_go_of_memory(self, state: State, written: list[Any]) -> None:
        held = state.held
        if held is None or not is_ordinary(held):
            return
        self._outside.pop(id(held), None)
        if any(overlap(held.untyped_storage(), t.untyped_storage()) for t in written):
            if state.op is not None:
                state.held = None
            else:
                state.hold_a_copy()

    def _before_write(self, kind: Kind, tensor: Tensor, *, alone: bool) -> State:
        """Save what is overwritten. If it is all that the op makes, the op is never run again."""
        state = self._known(tensor)
        if state is None:
            if not is_ordinary(tensor):
                self._before_write_to_parts(kind, tensor)
            met = self._meet(tensor)
            state = met if type(met) is State else met.state
        if state.blank:
            if kind.fills and _covers(tensor):
                state.blank = False  # from here on it can be computed
            else:
                self.piece(tensor)  # it is read, so it is held
        for region in self.opened:
            if region.room is not None:
                region.before_write(state)
        for sibling in state.family():
            if sibling.held is not None:
                self._outside.pop(id(sibling.held), None)
                if sibling.op is not None or (sibling.outside and not sibling.read and alone):
                    sibling.held = None
                elif not sibling.copied and version_of(sibling.held) == sibling.held_version:
                    sibling.hold_a_copy()  # or it is one already, or stale
                    self._dead += nbytes_of(sibling.held)
        piece = self.piece(tensor)
        state = piece if type(piece) is State else piece.state
        if kind.uncounted and state.held is not None:
            state.hold_a_copy()  # nobody will see that it was written to
        return state

    def _before_write_to_parts(self, kind: Kind, tensor: Tensor) -> None:
        """Save what a tensor consists of; whoever reads that again meets it anew."""
        for part in parts_of(tensor):
            self._before_write(kind, part, alone=False)
            if is_ordinary(part):
                self._forget(part.untyped_storage())

    def _after_write(self, op: Op, key: Any, tensor: Tensor, before: State, *, keep: bool) -> State:
        if op.kind.reseats and is_ordinary(tensor):
            known = self._states.get(key_of(tensor.untyped_storage()))
            if known is not None:
                known.has_views()
                return known  # its bytes are as they were, and it counts their writes by itself
        # Autograd counts the write when we are done, but not that to what it has saved already.
        to_come = not (op.kind.counts or (op.kind.saved_early and key[0] == _NOISE))
        whole = whole_of(tensor) if before.outside else tensor
        after = State(whole, version_of(tensor) + to_come)
        after.outside, after.leaf, after.shared = before.outside, before.leaf, before.shared
        if before.outside or keep:
            if is_ordinary(whole):
                after.has_views()
            after.hold(alias(whole))
            after.held_version = after.version
            after.fragile = before.leaf
        else:
            after.op = op
            after.argument = key
            after.tensor = before.tensor
            after.viewed = before.viewed
            if after.viewed:
                after.copy_geometry(before)
        if is_ordinary(tensor):
            if op.kind.uncounted:
                self._forget(tensor.untyped_storage())
            else:
                self._note(tensor.untyped_storage(), after)
        return after

    def _without_hidden(self, kind: Kind, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments without those that are written to in secret and not read.

        What was read from them before is copied; whoever reads them again meets them anew.
        """
        numbers = kind.writes_in_secret(args)
        for number in numbers:
            if isinstance(args[number], Tensor) and self._known(args[number]) is not None:
                self._before_write(kind, args[number], alone=False)
                self._forget(args[number].untyped_storage())
        return tuple(
            _instead(arg, args[0]) if number in numbers else arg for number, arg in enumerate(args)
        )


_NOISE = 1  # the argument of rrelu_with_noise


def _targets(
    kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[tuple[Any, int], Tensor]]:
    """Return the tensors that an op writes to, with the arguments that they are."""
    named = [(k, kwargs.get(k) if isinstance(k, str) else args[k : k + 1]) for k in kind.writes]
    return [
        ((key, number), tensor)
        for key, target in named
        for number, tensor in enumerate(flat(target))
        if isinstance(tensor, Tensor)
    ]


def _may_be_over(state: State, storage: Any) -> bool:
    """Return whether a state is one of the same memory, or of memory that is not known."""
    made: Any = state.tensor()
    if not isinstance(made, Tensor):
        made = state.held
    if made is None or state.copied:
        return True
    return not is_ordinary(made) or overlap(made.untyped_storage(), storage)


def _instead(statistics: Any, values: Tensor) -> State | None:
    """Return what a replay gives in place of statistics: nothing, or a copy if types are mixed."""
    if not isinstance(statistics, Tensor) or statistics.dtype is values.dtype:
        return None
    state = State(statistics, 0)
    state.outside = state.leaf = True
    state.hold(fresh_copy(statistics))
    return state


def _covers(tensor: Tensor) -> bool:
    """Return whether a tensor lies over all bytes of its storage."""
    if tensor.nbytes != tensor.untyped_storage().nbytes():
        return False
    distance = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != distance:
            return False  # some elements lie upon one another
        distance *= size
    return True
