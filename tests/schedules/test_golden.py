"""The exact order of actions, for cases small enough to follow by hand."""

from itertools import islice

import pytest

from remat.schedules import (
    Advance,
    Backward,
    Blocks,
    Drop,
    Given,
    Mixed,
    Multistage,
    Online,
    Restore,
    Revolve,
    Save,
    Schedule,
    Sizes,
    StoreAll,
    Tape,
    Tier,
    Uniform,
)

CALLER, DISK = Tier.CALLER, Tier.DISK

ORDERS = [
    (
        Given(6, (1, 4)),  # the last part is taped at once, the others when it is their turn
        [
            *(Advance(0, 1), Save(1), Advance(1, 4), Save(4)),
            *(Tape(4), Backward(5), Backward(4)),
            *(Tape(1), Tape(2), Backward(3), Backward(2), Backward(1)),
            Backward(0),
        ],
    ),
    (Given(3, ()), list(StoreAll(3))),
    (Revolve(1, 3), [Backward(0)]),
    (
        Revolve(3, 0),  # nothing can be held: from the start again, each time
        [
            *(Advance(0, 2), Backward(2)),
            *(Restore(0, CALLER), Advance(0, 1), Backward(1)),
            Backward(0),
        ],
    ),
    (
        Revolve(4, 2),  # one sweep is enough
        [
            *(Advance(0, 1), Save(1), Advance(1, 2), Save(2), Advance(2, 3)),
            *(Backward(3), Backward(2), Backward(1), Backward(0)),
        ],
    ),
    (
        Revolve(5, 1),  # the one slot is used twice
        [
            *(Advance(0, 3), Save(3), Advance(3, 4), Backward(4), Backward(3)),
            *(Restore(0, CALLER), Advance(0, 1), Save(1), Advance(1, 2), Backward(2), Backward(1)),
            Backward(0),
        ],
    ),
    (
        Revolve(7, 1),
        [
            *(Advance(0, 4), Save(4), Advance(4, 6), Backward(6)),
            *(Restore(4), Advance(4, 5), Backward(5), Backward(4)),
            *(Restore(0, CALLER), Advance(0, 2), Save(2), Advance(2, 3), Backward(3), Backward(2)),
            *(Restore(0, CALLER), Advance(0, 1), Backward(1), Backward(0)),
        ],
    ),
    (
        Uniform(6, 1),  # the slot that falls free in the middle serves the first half
        [
            *(Advance(0, 3), Save(3), Advance(3, 5), Backward(5)),
            *(Restore(3), Advance(3, 4), Backward(4), Backward(3)),
            *(Restore(0, CALLER), Advance(0, 1), Save(1), Advance(1, 2), Backward(2), Backward(1)),
            Backward(0),
        ],
    ),
    (
        Uniform(7, 2),  # parts of 2, 2 and 3
        [
            *(Advance(0, 2), Save(2), Advance(2, 4), Save(4), Advance(4, 6), Backward(6)),
            *(Restore(4), Advance(4, 5), Backward(5), Backward(4)),
            *(Restore(2), Advance(2, 3), Backward(3), Backward(2)),
            *(Restore(0, CALLER), Advance(0, 1), Backward(1), Backward(0)),
        ],
    ),
    (StoreAll(1), [Backward(0)]),
    (StoreAll(3), [Tape(0), Tape(1), Backward(2), Backward(1), Backward(0)]),
    (
        Blocks(5, block=2, slots=1),  # blocks of 2, 2 and 1
        [
            *(Advance(0, 2), Save(2), Advance(2, 4), Backward(4)),
            *(Tape(2), Backward(3), Backward(2)),
            *(Tape(0), Backward(1), Backward(0)),
        ],
    ),
    (
        Blocks(4, block=2, slots=0),  # the second block's tape stands for the state before it
        [
            *(Advance(0, 2), Tape(2), Backward(3), Backward(2)),
            *(Tape(0), Backward(1), Backward(0)),
        ],
    ),
    (
        Mixed(4, 1),  # one tape at a time, each one step before Revolve's place for a state
        [
            *(Advance(0, 2), Tape(2), Backward(3), Backward(2)),
            *(Tape(0), Backward(1), Backward(0)),
        ],
    ),
    (
        Mixed(5, 3, Sizes(state=1, tape=2, tape_input=0)),  # step 3 runs from the tape's output
        [
            *(Advance(0, 2), Tape(2), Advance(3, 4), Backward(4)),
            *(Backward(3), Backward(2)),
            *(Tape(0), Backward(1), Backward(0)),
        ],
    ),
    (
        Mixed(7, 3, Sizes(state=1, tape=3, tape_input=0)),  # state 2's slot is given up for a tape
        [
            *(Advance(0, 2), Save(2), Advance(2, 4), Save(4), Advance(4, 5), Save(5)),
            *(Advance(5, 6), Backward(6), Backward(5), Backward(4)),
            *(Tape(2), Backward(3), Backward(2)),
            *(Tape(0), Backward(1), Backward(0)),
        ],
    ),
    (
        Multistage(4, slots=0, disk_slots=1, write_cost=0.25, read_cost=0.5),
        [
            *(Advance(0, 2), Save(2, DISK), Advance(2, 3), Backward(3), Backward(2)),
            *(Restore(0, CALLER), Advance(0, 1), Backward(1), Backward(0)),
        ],
    ),
    (
        Multistage(7, slots=1, disk_slots=1, write_cost=0, read_cost=1),  # state 2 is lifted
        [
            *(Advance(0, 2), Save(2, DISK), Advance(2, 4), Save(4), Advance(4, 6), Backward(6)),
            *(Restore(4), Advance(4, 5), Backward(5), Backward(4)),
            *(Restore(2, DISK), Save(2), Drop(2, DISK), Advance(2, 3), Backward(3), Backward(2)),
            *(Restore(0, CALLER), Advance(0, 1), Backward(1), Backward(0)),
        ],
    ),
    (
        Online(0).run(2),
        [Advance(0, 2), Restore(0, CALLER), Advance(0, 1), Backward(1), Backward(0)],
    ),
    (
        Online(3).run(2),  # it ends before the slots are full
        [Advance(0, 1), Save(1), Advance(1, 2), Backward(1), Backward(0)],
    ),
    (
        Online(2).run(5),  # state 1 is given up for state 4
        [
            *(Advance(0, 1), Save(1), Advance(1, 2), Save(2)),
            *(Advance(2, 4), Drop(1), Save(4), Advance(4, 5), Backward(4)),
            *(Restore(2), Advance(2, 3), Backward(3), Backward(2)),
            *(Restore(0, CALLER), Advance(0, 1), Backward(1), Backward(0)),
        ],
    ),
]


@pytest.mark.parametrize(("schedule", "actions"), ORDERS, ids=[repr(s) for s, _ in ORDERS])
def test_the_order_is(schedule: Schedule, actions: list) -> None:
    assert list(schedule) == actions


def test_a_loop_of_unknown_length_goes_on_without_end() -> None:
    assert list(islice(Online(1).forward(), 8)) == [
        *(Advance(0, 1), Save(1)),
        *(Advance(1, 3), Drop(1), Save(3)),
        *(Advance(3, 7), Drop(3), Save(7)),
    ]
