import copy
import pickle
from itertools import combinations

import pytest

from remat.schedules import Advance, Backward, Drop, Restore, Save, Sizes, Tape, Tier

KINDS = [Advance(1, 2), Save(1), Restore(1), Drop(1), Tape(1), Backward(1)]


@pytest.mark.parametrize(("one", "other"), [*combinations([Save(1), Restore(1), Drop(1)], 2)])
def test_kinds_with_the_same_fields_are_not_equal(one: Save, other: Save) -> None:
    assert tuple(one) == tuple(other)
    assert one != other
    assert not one == other  # noqa: SIM201  (both operators are our own)
    assert hash(one) != hash(other)


def test_tape_and_backward_of_a_step_are_not_equal() -> None:
    assert Tape(3) != Backward(3)
    assert len({Tape(3), Backward(3)}) == 2


@pytest.mark.parametrize("action", KINDS, ids=repr)
def test_an_action_is_not_equal_to_its_bare_tuple(action: Save) -> None:
    assert action != tuple(action)
    assert tuple(action) != action


@pytest.mark.parametrize("action", KINDS, ids=repr)
def test_an_action_equals_its_copies_and_hashes_with_them(action: Save) -> None:
    for duplicate in (
        type(action)(*action),
        copy.deepcopy(action),
        pickle.loads(pickle.dumps(action)),
    ):
        assert duplicate == action
        assert not duplicate != action  # noqa: SIM202  (both operators are our own)
        assert hash(duplicate) == hash(action)


def test_fields_matter() -> None:
    assert Save(1) != Save(2)
    assert Save(1, Tier.MEMORY) != Save(1, Tier.DISK)
    assert Advance(0, 1) != Advance(0, 2)


@pytest.mark.parametrize("action", KINDS, ids=repr)
def test_actions_cannot_be_changed(action: Save) -> None:
    with pytest.raises(AttributeError):
        setattr(action, action._fields[0], 5)


def test_they_read_well() -> None:
    assert repr(Save(3, Tier.DISK)) == "Save(step=3, tier=DISK)"
    assert repr(Advance(0, 5)) == "Advance(start=0, stop=5)"


def test_states_are_held_in_memory_unless_said_otherwise() -> None:
    assert Save(1).tier is Restore(1).tier is Drop(1).tier is Tier.MEMORY


def test_by_default_a_state_and_a_tape_take_a_slot_each() -> None:
    assert Sizes() == (1, 1, 0)
