"""The simulator, on schedules written out by hand."""

import pytest

from remat.schedules import (
    Advance,
    Backward,
    Drop,
    IllegalMoveError,
    Mixed,
    Restore,
    Revolve,
    Save,
    Schedule,
    Sizes,
    Tape,
    Tier,
    Uniform,
    simulate,
)

CALLER, MEMORY, DISK, TAPE = Tier.CALLER, Tier.MEMORY, Tier.DISK, Tier.TAPE

ILLEGAL = {
    "advances from elsewhere": (3, [Advance(1, 2)], "the working state is at 0"),
    "advances after a step back": (
        *(2, [Advance(0, 1), Backward(1), Advance(0, 1)]),
        "the working state is at None",
    ),
    "advances by nothing": (3, [Advance(0, 0)], "steps left end at 3"),
    "advances to before": (3, [Advance(0, 2), Advance(2, 1)], "steps left end at 3"),
    "advances past the end": (3, [Advance(0, 4)], "steps left end at 3"),
    "advances over what is done": (
        *(3, [Advance(0, 2), Backward(2), Restore(0, CALLER), Advance(0, 3)]),
        "steps left end at 2",
    ),
    "saves another state": (3, [Advance(0, 1), Save(2)], "the working state is at 1"),
    "saves after a step back": (
        *(2, [Advance(0, 1), Backward(1), Save(1)]),
        "the working state is at None",
    ),
    "saves with the caller": (3, [Advance(0, 1), Save(1, CALLER)], "this tier has no slots"),
    "saves in a tape": (3, [Advance(0, 1), Save(1, TAPE)], "this tier has no slots"),
    "saves twice": (3, [Advance(0, 1), Save(1), Save(1)], "this state is held there already"),
    "saves twice on disk": (
        *(3, [Advance(0, 1), Save(1, DISK), Save(1, DISK)]),
        "this state is held there already",
    ),
    "restores what was never saved": (3, [Restore(1)], "no such state is held there"),
    "restores the start from memory": (3, [Restore(0)], "no such state is held there"),
    "restores a later state from the caller": (
        *(3, [Advance(0, 1), Save(1), Restore(1, CALLER)]),
        "no such state is held there",
    ),
    "restores from the other tier": (
        *(3, [Advance(0, 1), Save(1, MEMORY), Restore(1, DISK)]),
        "no such state is held there",
    ),
    "restores from no tape": (
        *(3, [Advance(0, 1), Save(1), Restore(1, TAPE)]),
        "no such state is held there",
    ),
    "restores a tape's input": (3, [Tape(0), Tape(1), Restore(3, TAPE)], "no such state"),
    "restores what was dropped": (
        *(3, [Advance(0, 1), Save(1), Drop(1), Restore(1)]),
        "no such state is held there",
    ),
    "restores what a tape used up": (
        *(3, [Advance(0, 1), Save(1), Tape(1), Restore(1)]),
        "no such state is held there",
    ),
    "restores what a step back used up": (
        *(2, [Advance(0, 1), Save(1), Backward(1), Restore(1)]),
        "no such state is held there",
    ),
    "restores the output of a used tape": (
        *(2, [Tape(0), Tape(1), Backward(1), Backward(0), Restore(1, TAPE)]),
        "no such state is held there",
    ),
    "drops what is not held": (3, [Drop(1)], "no such slot is held"),
    "drops from the other tier": (
        *(3, [Advance(0, 1), Save(1), Drop(1, DISK)]),
        "no such slot is held",
    ),
    "drops the caller's state": (3, [Drop(0, CALLER)], "no such slot is held"),
    "drops a tape's output": (3, [Tape(0), Drop(1, TAPE)], "no such slot is held"),
    "tapes past the end": (1, [Advance(0, 1), Tape(1)], "steps left end at 1"),
    "tapes what is done": (2, [Tape(0), Tape(1), Backward(1), Tape(1)], "steps left end at 1"),
    "tapes twice": (3, [Tape(0), Tape(0)], "this tape is held already"),
    "tapes from nowhere": (3, [Tape(1)], "neither its tape nor the state before it is here"),
    "goes back too early": (3, [Backward(0)], "the next step back is 2"),
    "goes back twice": (2, [Advance(0, 1), Backward(1), Backward(1)], "the next step back is 0"),
    "goes back past the start": (1, [Backward(0), Backward(-1)], None),
    "goes back from nowhere": (
        *(3, [Backward(2)]),
        "neither its tape nor the state before it is here",
    ),
    "goes back from past the step": (
        *(2, [Advance(0, 2), Backward(1)]),
        "neither its tape nor the state before it is here",
    ),
    "goes back without having saved": (
        *(3, [Advance(0, 2), Backward(2), Backward(1)]),
        "neither its tape nor the state before it is here",
    ),
    "stops at once": (2, [], "stops with steps 0 to 1 still ahead"),
    "stops half way": (2, [Advance(0, 1), Backward(1)], "stops with steps 0 to 0 still ahead"),
    "leaves a state in memory": (
        *(1, [Advance(0, 1), Save(1), Restore(0, CALLER), Backward(0)]),
        r"leaves \[1\] held",
    ),
    "leaves a state on disk": (
        *(1, [Advance(0, 1), Save(1, DISK), Restore(0, CALLER), Backward(0)]),
        r"leaves \[1\] held",
    ),
}


@pytest.mark.parametrize(("steps", "actions", "why"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_refuses_a_schedule_that(steps: int, actions: list, why: str | None) -> None:
    with pytest.raises(IllegalMoveError, match=why):
        simulate(actions, steps)


def test_says_which_action_was_illegal() -> None:
    with pytest.raises(
        IllegalMoveError, match=r"^action 1, Restore\(step=3, tier=MEMORY\): no such state"
    ):
        simulate([Advance(0, 1), Restore(3)], 5)


def test_refuses_what_is_no_action() -> None:
    with pytest.raises(IllegalMoveError, match="this is no action"):
        simulate([("Advance", 0, 1)], 1)


TWO_SLOTS = [
    *(Advance(0, 1), Save(1), Advance(1, 2), Save(2), Advance(2, 3)),
    *(Backward(3), Backward(2), Backward(1), Backward(0)),
]
TWO_ON_DISK = [a._replace(tier=DISK) if isinstance(a, Save) else a for a in TWO_SLOTS]
TWO_TAPES = [Tape(0), Tape(1), Backward(2), Backward(1), Backward(0)]


@pytest.mark.parametrize(
    ("actions", "steps", "limit"),
    [
        (TWO_SLOTS, 4, {"memory": 2}),
        (TWO_ON_DISK, 4, {"memory": 0, "disk": 2}),
        (TWO_TAPES, 3, {"memory": 2, "disk": 0}),
        (TWO_SLOTS, 4, {"memory": 10, "sizes": Sizes(5, 7, 0)}),
        (TWO_ON_DISK, 4, {"disk": 10, "sizes": Sizes(5, 7, 0)}),
        (TWO_TAPES, 3, {"memory": 10, "sizes": Sizes(2, 7, 2)}),
    ],
)
def test_accepts_what_just_fits(actions: list, steps: int, limit: dict) -> None:
    account = simulate(actions, steps, **limit)
    assert account.peak_memory == limit.get("memory", 0)
    assert account.peak_disk == limit.get("disk", 0)


@pytest.mark.parametrize(
    ("actions", "steps", "limit", "why"),
    [
        (TWO_SLOTS, 4, {"memory": 1}, "action 3, .*: 2 held in memory, room 1"),
        (TWO_SLOTS, 4, {"memory": 0}, "action 1, .*: 1 held in memory, room 0"),
        (TWO_ON_DISK, 4, {"disk": 1}, "action 3, .*: 2 held in disk, room 1"),
        (TWO_TAPES, 3, {"memory": 1}, "action 1, .*: 2 held in memory, room 1"),
        (TWO_SLOTS, 4, {"memory": 9, "sizes": Sizes(5, 7, 0)}, "10 held in memory, room 9"),
        (TWO_ON_DISK, 4, {"disk": 9, "sizes": Sizes(5, 7, 0)}, "10 held in disk, room 9"),
        (TWO_TAPES, 3, {"memory": 9, "sizes": Sizes(2, 7, 2)}, "10 held in memory, room 9"),
    ],
)
def test_refuses_what_exceeds_the_room(actions: list, steps: int, limit: dict, why: str) -> None:
    with pytest.raises(IllegalMoveError, match=why):
        simulate(actions, steps, **limit)


@pytest.mark.parametrize(
    ("actions", "steps", "evaluations"),
    [
        ([], 0, 0),
        ([Backward(0)], 1, 1),
        ([Tape(0), Backward(0)], 1, 1),
        ([Advance(0, 1), Restore(0, CALLER), Backward(0)], 1, 2),
        (TWO_TAPES, 3, 3),
        (TWO_SLOTS, 4, 7),
        ([Advance(0, 2), Backward(2), Tape(0), Backward(1), Backward(0)], 3, 5),
    ],
)
def test_counts_evaluations(actions: list, steps: int, evaluations: int) -> None:
    assert simulate(actions, steps).evaluations == evaluations


def test_counts_peaks_of_each_tier() -> None:
    actions = [
        *(Advance(0, 1), Save(1, DISK), Advance(1, 2), Save(2), Advance(2, 3), Save(3)),
        *(Advance(3, 4), Backward(4), Backward(3), Backward(2), Backward(1), Backward(0)),
    ]
    account = simulate(actions, 5, sizes=Sizes(3, 4, 0))
    assert (account.steps, account.peak_memory, account.peak_disk) == (5, 6, 3)


def test_a_dropped_state_no_longer_counts() -> None:
    actions = [
        *(Advance(0, 1), Save(1), Drop(1), Advance(1, 2), Save(2)),
        *(Backward(2), Tape(0), Backward(1), Backward(0)),
    ]
    assert simulate(actions, 3, memory=1).peak_memory == 1


def test_counts_writes_of_each_tier() -> None:
    actions = [
        *(Advance(0, 1), Save(1), Save(1, DISK), Advance(1, 2), Save(2, DISK)),
        *(Backward(2), Backward(1), Backward(0)),
    ]
    assert simulate(actions, 3).writes == {CALLER: 0, MEMORY: 1, DISK: 2, TAPE: 0}


@pytest.mark.parametrize("tier", [MEMORY, DISK])
def test_counts_a_restore_as_a_read(tier: Tier) -> None:
    actions = [
        *(Advance(0, 1), Save(1, tier), Advance(1, 2), Backward(2)),
        *(Restore(1, tier), Backward(1), Restore(0, CALLER), Backward(0)),
    ]
    assert simulate(actions, 3).reads == dict.fromkeys(Tier, 0) | {tier: 1, CALLER: 1}


@pytest.mark.parametrize("tier", [MEMORY, DISK])
def test_counts_a_step_back_from_a_slot_as_a_read(tier: Tier) -> None:
    actions = [Advance(0, 1), Save(1, tier), Advance(1, 2), Backward(2), Backward(1), Backward(0)]
    assert simulate(actions, 3).reads == dict.fromkeys(Tier, 0) | {tier: 1, CALLER: 1}


def test_counts_a_step_back_from_a_tapes_output_as_a_read() -> None:
    actions = [Tape(0), Advance(1, 2), Backward(2), Backward(1), Backward(0)]
    assert simulate(actions, 3).reads == dict.fromkeys(Tier, 0) | {TAPE: 1}


def test_reads_from_memory_what_is_on_disk_as_well() -> None:
    actions = [
        *(Advance(0, 1), Save(1), Save(1, DISK), Advance(1, 2)),
        *(Backward(2), Backward(1), Backward(0)),
    ]
    assert simulate(actions, 3).reads == dict.fromkeys(Tier, 0) | {MEMORY: 1, CALLER: 1}


def test_reads_nothing_where_the_working_state_is_at_hand() -> None:
    actions = [Advance(0, 1), Save(1), Backward(1), Backward(0)]
    assert simulate(actions, 2).reads == dict.fromkeys(Tier, 0) | {CALLER: 1}


SIZES = Sizes(state=2, tape=5, tape_input=1)


@pytest.mark.parametrize(
    ("start", "held"),
    [
        ([Tape(0)], 4),  # its input is the caller's
        ([Advance(0, 1), Tape(1)], 5),  # its input is held by nobody else
        ([Tape(0), Tape(1)], 4 + 4),  # its input is the output of the tape before
        ([Tape(0), Advance(1, 2), Tape(2)], 4 + 5),
        ([Advance(0, 1), Save(1), Tape(1)], 5),  # the slot is freed
        ([Advance(0, 1), Save(1, DISK), Tape(1)], 5),
        ([Advance(0, 1), Save(1), Tape(1), Restore(0, CALLER), Advance(0, 1), Save(1)], 2 + 4),
        ([Advance(0, 1), Tape(1), Restore(0, CALLER), Advance(0, 1), Save(1, DISK)], 5),
    ],
)
def test_pays_a_tapes_input_once(start: list, held: int) -> None:
    way_back = [
        *(Restore(0, CALLER), Advance(0, 3), Backward(3)),
        *(Restore(0, CALLER), Advance(0, 2), Backward(2)),
        *(Restore(0, CALLER), Advance(0, 1), Backward(1), Backward(0)),
    ]
    assert simulate([*start, *way_back], 4, sizes=SIZES).peak_memory == held


WITHOUT_WASTE = [
    Revolve(9, 2),
    Revolve(5, 0),
    Uniform(9, 2),
    Mixed(9, 2),
    Mixed(7, 3, Sizes(1, 3, 0)),
]


@pytest.mark.parametrize(
    ("schedule", "number"), [(s, i) for s in WITHOUT_WASTE for i in range(len(list(s)))]
)
def test_a_schedule_without_any_one_of_its_actions_is_refused(
    schedule: Schedule, number: int
) -> None:
    actions = list(schedule)
    del actions[number]
    with pytest.raises(IllegalMoveError):
        simulate(actions, schedule.steps)
