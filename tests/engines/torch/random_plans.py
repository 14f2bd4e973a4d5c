"""Plans for tests: nothing, everything, and plans without reason."""

from __future__ import annotations

import random

from remat.plans import Kind, Plan, Stage, Trace

__all__ = ["RandomPlans", "computed", "keep_everything", "keep_nothing"]


def keep_everything(trace: Trace, budget: int) -> Plan:
    return Plan(frozenset(computed(trace, trace.saved)), memory_budget=budget)


def keep_nothing(trace: Trace, budget: int) -> Plan:
    """Recompute op by op: a stage each, so that much is recomputed often."""
    return Plan(frozenset(), tuple(Stage(number) for number in range(0, len(trace.ops), 5)))


class RandomPlans:
    """Plans without reason: they are executed all the same."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def __call__(self, trace: Trace, budget: int) -> Plan:
        rng, count = self.rng, len(trace.ops)
        values = computed(trace, range(len(trace.values)))
        share = rng.choice([0.0, 0.1, 0.5, 0.9])
        keep = frozenset(number for number in values if rng.random() < share)
        starts = sorted({0, *(rng.randrange(count) for _ in range(rng.randrange(8)))})
        stages = []
        for start, end in zip(starts, [*starts[1:], count], strict=True):
            earlier = [n for n in values if _made_by(trace, n) < end and n not in keep]
            stages.append(Stage(start, frozenset(n for n in earlier if rng.random() < 0.2)))
        return Plan(keep, tuple(stages))


def computed(trace: Trace, numbers) -> list[int]:
    return [n for n in numbers if trace.values[n].kind is Kind.COMPUTED]


def _made_by(trace: Trace, number: int) -> int:
    made_by = trace.values[number].made_by
    assert made_by is not None
    return made_by
