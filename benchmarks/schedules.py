"""Planning, beside the `checkpoint-schedules` package.

Its snapshots include the initial state, our slots do not: the caller holds it. So the same plan is
`slots - 1` of ours. Its mixed planner is compiled with numba if that is installed, before anything
is timed.
"""

from __future__ import annotations

import inspect
import time
import tracemalloc
import warnings
from collections import deque
from collections.abc import Iterable
from unittest.mock import patch

import checkpoint_schedules as theirs
from checkpoint_schedules import StorageType
from checkpoint_schedules import multistage as their_multistage
from checkpoint_schedules.mixed import mixed_step_memoization

from remat.schedules import Mixed, Multistage, Revolve, Sizes, Tier, mixed, multistage, simulate

from .measure import Result, interleaved

__all__ = ["PEERS", "run"]

PEERS = ("checkpoint_schedules", "numba")

# A tape of three states that contains its input: for a peer that knows equal sizes only, the
# nearest problem there is.
_UNEQUAL = Sizes(state=1, tape=3, tape_input=1)
_DISK_COST = 2.0  # in forward steps, a write as much as a read: the default of its HRevolve


def run() -> list[Result]:
    with warnings.catch_warnings():
        # "Numba not available -- using memoization": the results say whether it is there.
        warnings.simplefilter("ignore", RuntimeWarning)
        compiling = _compile_theirs()
        return [
            *_revolve_speed(1_000_000, 30),
            _revolve_memory(1_000_000, 30),
            *_mixed_speed(1000, 31, compiling),
            *_mixed_seconds(10_000, 100),
            *_two_tier_speed(1000, 31, 31),
        ]


def _revolve_speed(steps: int, slots: int) -> list[Result]:
    def their(trajectory: str) -> theirs.MultistageCheckpointSchedule:
        return theirs.MultistageCheckpointSchedule(steps, slots, 0, trajectory=trajectory)

    # Why not compiled? A call from its interpreted loop into numba takes longer than the function.
    compiled = their_multistage.n_advance
    with patch.object(their_multistage, "n_advance", getattr(compiled, "py_func", compiled)):
        best = interleaved(
            {
                "ours": lambda: _exhaust(Revolve(steps, slots - 1)),
                "ours, one slot more": lambda: _exhaust(Revolve(steps, slots)),
                "theirs": lambda: _exhaust(their("maximum")),
                "theirs, trajectory='revolve'": lambda: _exhaust(their("revolve")),
            },
            rounds=7,
        )
    fastest_of_theirs = min(best["theirs"], best["theirs, trajectory='revolve'"])
    slowest_of_ours = max(best["ours"], best["ours, one slot more"])
    name = f"revolve ({steps}, {slots})"
    return [
        Result.at_least(
            name,
            "the whole schedule at least 4x faster",
            fastest_of_theirs / slowest_of_ours,
            4.0,
            seconds=best,
        ),
        Result.at_most(
            name,
            "no more evaluations than theirs",
            simulate(Revolve(steps, slots - 1), steps, memory=slots - 1).evaluations,
            _their_account(their("maximum"))[0],
        ),
    ]


def _revolve_memory(steps: int, slots: int) -> Result:
    tracemalloc.start()
    try:
        _exhaust(Revolve(steps, slots))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return Result.at_most(
        f"revolve ({steps}, {slots})",
        "MB at the peak of the whole schedule (tracemalloc): below 1",
        peak / 1e6,
        1.0,
    )


def _mixed_speed(steps: int, slots: int, compiling: float) -> list[Result]:
    best = interleaved(
        {
            "ours": lambda: _plan_mixed(Mixed(steps, slots)),
            "ours, unequal sizes": lambda: _plan_mixed(Mixed(steps, slots, _UNEQUAL)),
            "theirs": lambda: next(_their_mixed(steps, slots)),
        },
        rounds=5,
        before=_forget_plans,
    )
    name = f"mixed ({steps}, {slots})"
    return [
        Result.at_least(
            name,
            "planned at least 50x faster, tapes of a state's size",
            best["theirs"] / best["ours"],
            50.0,
            seconds=best,
            seconds_of_their_first_call=compiling,
        ),
        Result.information(
            name,
            "how many times faster, unequal sizes (theirs: equal sizes)",
            best["theirs"] / best["ours, unequal sizes"],
            sizes=_UNEQUAL._asdict(),
        ),
        Result.at_most(
            name,
            "no more evaluations than theirs",
            simulate(Mixed(steps, slots - 1), steps, memory=slots - 1).evaluations,
            _their_account(_their_mixed(steps, slots))[0],
        ),
    ]


def _mixed_seconds(steps: int, slots: int) -> list[Result]:
    name = f"mixed ({steps}, {slots})"
    equal, unequal = Mixed(steps, slots), Mixed(steps, slots, _UNEQUAL)
    best = interleaved(
        {"equal": lambda: _plan_mixed(equal), "unequal": lambda: _plan_mixed(unequal)},
        rounds=3,
        before=_forget_plans,
    )
    return [
        Result.at_most(
            name, "seconds to plan, tapes of a state's size: at most two", best["equal"], 2.0
        ),
        Result.information(
            name,
            "seconds to plan, unequal sizes, the exact programme",
            best["unequal"],
            sizes=_UNEQUAL._asdict(),
        ),
    ]


def _two_tier_speed(steps: int, memory: int, disk: int) -> list[Result]:
    def ours() -> Multistage:
        return _two_tiers(steps, memory, disk)

    best = interleaved(
        {
            "ours, first action": lambda: (ours().cost, next(iter(ours()))),
            "ours": lambda: (ours().cost, _exhaust(ours())),
            "theirs": lambda: next(theirs.HRevolve(steps, memory, disk)),
        },
        rounds=5,
        before=_forget_plans,
    )
    name = f"two tiers ({steps}, {memory} + {disk})"
    return [
        Result.at_least(
            name,
            # Why every action of ours? Its planner makes the whole list before the first one.
            "planned at least 10x faster",
            best["theirs"] / best["ours"],
            10.0,
            seconds=best,
        ),
        _two_tier_cost(name, steps, memory, disk),
    ]


def _two_tier_cost(name: str, steps: int, memory: int, disk: int) -> Result:
    """Compare what is planned; we have a slot less in the tier where theirs puts the start."""
    start_on_disk = next(theirs.HRevolve(steps, memory, disk)).storage is StorageType.DISK
    memory_left, disk_left = memory - (not start_on_disk), disk - start_on_disk
    account = simulate(
        _two_tiers(steps, memory_left, disk_left), steps, memory=memory_left, disk=disk_left
    )
    transfers = account.writes[Tier.DISK] + account.reads[Tier.DISK]
    evaluations, their_transfers = _their_account(theirs.HRevolve(steps, memory, disk))
    return Result.at_most(
        name,
        "no more time than theirs, in forward steps",
        account.evaluations + _DISK_COST * transfers,
        evaluations + _DISK_COST * their_transfers,
        slots={"ours": f"{memory_left} + {disk_left}", "theirs": f"{memory} + {disk}"},
        evaluations={"ours": account.evaluations, "theirs": evaluations},
        disk_transfers={"ours": transfers, "theirs": their_transfers},
    )


# --- both sides ---------------------------------------------------------------------------------


def _plan_mixed(schedule: Mixed) -> tuple[int, object]:
    return schedule.evaluations, next(iter(schedule))


def _two_tiers(steps: int, memory: int, disk: int) -> Multistage:
    return Multistage(steps, memory, disk, write_cost=_DISK_COST, read_cost=_DISK_COST)


def _their_mixed(steps: int, slots: int) -> theirs.MixedCheckpointSchedule:
    return theirs.MixedCheckpointSchedule(steps, slots, storage=StorageType.RAM)


def _compile_theirs() -> float:
    """Let numba, if it is there, compile; return how long their first mixed plan took."""
    start = time.perf_counter()
    _exhaust(_their_mixed(10, 3))
    return time.perf_counter() - start


def _forget_plans() -> None:
    """Make planning start from nothing, on both sides."""
    mixed._latest.clear()
    multistage._programme.cache_clear()
    multistage._Programme.decide.cache_clear()
    inspect.getclosurevars(mixed_step_memoization).nonlocals["_cache"].clear()


def _exhaust(actions: Iterable[object]) -> deque[object]:
    return deque(actions, maxlen=0)


def _their_account(actions: Iterable[object]) -> tuple[int, int]:
    """Return how many steps are run, and how often a state goes to the disk or comes from it."""
    evaluations = transfers = 0
    for action in actions:
        if isinstance(action, theirs.Forward):
            evaluations += int(action.n1 - action.n0)
            transfers += action.write_ics and action.storage is StorageType.DISK
        elif isinstance(action, theirs.Copy | theirs.Move):
            transfers += action.from_storage is StorageType.DISK
    return evaluations, transfers
