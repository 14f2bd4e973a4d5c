"""What a disk costs is measured anew in every pass, and leads to the same plan nevertheless."""

import pytest

from remat.loops.lengths import _about


@pytest.mark.parametrize("cost", [0.01, 0.3, 1.0, 7.0, 450.0])
def test_costs_that_scatter_by_a_tenth_are_few(cost: float) -> None:
    measured = [cost * (0.9 + 0.002 * i) for i in range(101)]
    rounded = {_about(value) for value in measured}
    assert len(rounded) <= 2
    assert all(value / 1.2 < _about(value) < 1.2 * value for value in measured)


def test_a_disk_that_takes_no_time_has_a_cost_all_the_same() -> None:
    assert 0 < _about(0.0) < 1e-5
