"""What planners ask of a trace again and again, found once."""

from __future__ import annotations

from collections.abc import Iterable

from .trace import Kind, Trace

__all__ = ["Facts"]


class Facts:
    """Plain lists over the ops and values of a trace.

    Planners work with a backward that goes through the ops in reverse. Where the recorded one does
    not, what they predict is only a guess, and the simulator decides.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        ops, values = trace.ops, trace.values
        self.count = len(ops)
        self.nbytes = [0 if value.kind.is_external else value.nbytes for value in values]
        self.is_external = [value.kind.is_external for value in values]
        self.is_fixed = [value.kind is Kind.FIXED for value in values]
        self.made_by = [-1 if value.made_by is None else value.made_by for value in values]
        self.outlives = [
            value.freed_after is None and not value.kind.is_external for value in values
        ]
        self.seconds = [op.seconds for op in ops]
        self.reads = [self._own(op.reads) for op in ops]
        self.makes = [op.makes for op in ops]
        self.saves = [self._own(op.saves) for op in ops]
        self.readers: list[list[int]] = [[] for _ in values]
        self.users: list[list[int]] = [[] for _ in values]  # the ops whose backward uses it
        for number in range(self.count):
            for read in self.reads[number]:
                self.readers[read].append(number)
            for saved in self.saves[number]:
                self.users[saved].append(number)
        self.overwriter: dict[int, int] = {}  # the op that writes over a value
        self.forward_end = self._find_forward_ends()
        self._add_up_gradients()
        # Bytes that go when a value is no longer held; those of an output never do.
        self.held_bytes = [
            0 if outlives else n for n, outlives in zip(self.nbytes, self.outlives, strict=True)
        ]
        # What is kept whatever a plan says: it costs nothing, or it cannot be computed again.
        self.is_bound = [
            bool(self.readers[v] or self.users[v]) and (self.is_fixed[v] or self.outlives[v])
            for v in range(len(values))
        ]

    def _own(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return values that are the pass's own, each once."""
        return tuple(dict.fromkeys(n for n in numbers if not self.is_external[n]))

    def _find_forward_ends(self) -> list[int]:
        """Return the last op at which the program holds each value."""
        last = self.count - 1
        ends = [last if v.freed_after is None else v.freed_after for v in self.trace.values]
        for value in self.trace.values:
            if value.overwrites is not None and value.made_by is not None:
                self.overwriter[value.overwrites] = value.made_by
                ends[value.overwrites] = min(ends[value.overwrites], value.made_by - 1)
        return ends

    def _add_up_gradients(self) -> None:
        """Add up what backward holds at each op that no plan can change.

        `base_at[i]` is held while the backward of op i runs, `base_before[i]` just before it.
        """
        values = self.trace.values
        outliving = sum(
            n for n, outlives in zip(self.nbytes, self.outlives, strict=True) if outlives
        )
        self.base_at = [outliving] * self.count
        self.base_before = [outliving] * self.count
        alive: set[int] = set()
        total, last = outliving, self.count
        for number in self.trace.backward_order:
            op = self.trace.ops[number]
            for skipped in range(number + 1, last):
                self.base_at[skipped] = self.base_before[skipped] = total
            last = min(last, number)
            self.base_before[number] = total
            only_here = op.workspace_bytes
            for value in dict.fromkeys((*op.makes, *op.reads)):
                if not values[value].requires_grad:
                    continue
                if values[value].kind is Kind.PARAMETER:
                    only_here += values[value].nbytes
                elif value not in alive:
                    alive.add(value)
                    total += values[value].nbytes
            self.base_at[number] = total + only_here
            for made in alive.intersection(op.makes):
                alive.discard(made)
                total -= values[made].nbytes
        self.gradient_bytes = [level - outliving for level in self.base_at]
