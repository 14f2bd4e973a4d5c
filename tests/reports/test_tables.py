import io

import pytest
from rich.console import Console

from remat.reports.memory import MeasuredPass
from remat.reports.tables import comparison_table, plan_table
from remat.schedules import Disk, plan_loop


def text(table):
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()


def rows(table):
    """Return the cells of each line that has some, by the name in its first column."""
    lines = [line.split("│")[1:-1] for line in text(table).splitlines() if "│" in line]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_the_best_schedule_is_marked_and_comes_first():
    plan = plan_loop(1000, slots=31)
    found = rows(plan_table(plan))
    assert list(found) == ["* revolve", "uniform"]
    assert found["* revolve"] == ["3,405", "3.40", "3,405", "32 states"]


def test_every_schedule_has_a_row_with_its_numbers():
    plan = plan_loop(500, memory_bytes="40MB", state_bytes="1MB", tape_bytes="3MB")
    found = rows(plan_table(plan))
    for option in (plan.best, *plan.alternatives):
        cells = found[f"* {option.name}" if option is plan.best else option.name]
        assert cells[0] == f"{option.evaluations:,}"
        assert cells[3] == f"{option.peak_bytes / 1e6:.1f} MB"


@pytest.mark.parametrize(("disk", "shown"), [(None, False), (Disk(20), True)])
def test_the_disk_has_a_column_if_it_is_used(disk, shown):
    plan = plan_loop(300, slots=5, disk=disk)
    assert ("on disk" in text(plan_table(plan))) == shown


def test_no_steps_divide_nothing_by_zero():
    assert "0.00" in text(plan_table(plan_loop(0, slots=0)))


@pytest.mark.parametrize(("difference", "words"), [(0.0, "0"), (1.23e-14, "1.2e-14")])
def test_two_passes_side_by_side(difference, words):
    plain = MeasuredPass("plain", 4.0, 500_000_000)
    checkpointed = MeasuredPass("checkpointed", 6.0, 10_000_000)
    found = rows(comparison_table(plain, checkpointed, difference))
    assert found["peak memory"] == ["500.0 MB", "10.0 MB", "2.0%"]
    assert found["time"] == ["4.0 s", "6.0 s", "1.50 x"]
    assert found["gradient difference"] == ["", words, "relative"]
