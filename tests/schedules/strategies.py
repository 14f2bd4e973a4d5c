"""What hypothesis draws: schedules of every class, with the room that each may take."""

from itertools import pairwise
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st

from remat.schedules import (
    Blocks,
    Disk,
    Given,
    Mixed,
    Multistage,
    Online,
    Revolve,
    Schedule,
    Sizes,
    Staged,
    StoreAll,
    Uniform,
)

# Why no deadline? How long one example takes says nothing about the schedule.
thorough = settings(deadline=None)

steps = st.integers(0, 80)
slots = st.integers(0, 12)
costs = st.sampled_from([0, 0.25, 1, 1.5, 3, 10])
disks = st.builds(Disk, st.integers(0, 5), costs, costs)


class Limited(NamedTuple):
    """A schedule and the room that it promised to keep to."""

    schedule: Schedule
    memory: int
    disk: int = 0
    sizes: Sizes = Sizes()


@st.composite
def unlike_sizes(draw: st.DrawFn) -> Sizes:
    state = draw(st.integers(1, 4))
    tape = draw(st.integers(state, 9))
    return Sizes(state, tape, draw(st.integers(0, min(state, tape - 1))))


@st.composite
def mixed(draw: st.DrawFn) -> Limited:
    sizes, room = draw(unlike_sizes()), draw(st.integers(0, 60))
    return Limited(Mixed(draw(steps), room, sizes), room, sizes=sizes)


@st.composite
def blocks(draw: st.DrawFn) -> Limited:
    sizes = draw(unlike_sizes())
    schedule = Blocks(draw(steps), draw(st.integers(1, 12)), draw(slots))
    return Limited(schedule, schedule.peak(sizes), sizes=sizes)


@st.composite
def at_given_positions(draw: st.DrawFn) -> Limited:
    n = draw(steps)
    positions = tuple(sorted(draw(st.sets(st.integers(1, n - 1))))) if n > 1 else ()
    parts = [b - a for a, b in pairwise((0, *positions, n))]
    # With part p taped (but for its last step), the states before it are held, and those only.
    most = max(number + max(0, part - 1) for number, part in enumerate(parts))
    return Limited(Given(n, positions), max(most, len(positions)))


@st.composite
def multistage(draw: st.DrawFn) -> Limited:
    memory, disk = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    return Limited(Multistage(draw(steps), memory, disk, draw(costs), draw(costs)), memory, disk)


@st.composite
def staged(draw: st.DrawFn) -> Limited:
    sizes = draw(unlike_sizes())
    part, block = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    schedule = Staged(draw(steps), part, block, draw(st.integers(int(part > block), 4)))
    return Limited(schedule, schedule.peak(sizes), schedule.disk_slots, sizes)


# What never uses a disk: its room is left at 0.
in_memory = st.one_of(
    st.builds(lambda n, s: Limited(Revolve(n, s), s), steps, slots),
    st.builds(lambda n, s: Limited(Uniform(n, s), s), steps, slots),
    st.builds(lambda n, s: Limited(Online(s).run(n), s), steps, slots),
    st.builds(lambda n: Limited(StoreAll(n), max(0, n - 1)), steps),
    st.builds(lambda n, s: Limited(Mixed(n, s), s), steps, slots),
    mixed(),
    blocks(),
    at_given_positions(),
)
any_schedule = st.one_of(in_memory, multistage(), staged())
