"""Tables as text and as HTML; the oracle reads cells back from what is drawn."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from remat.demo import compare
from remat.reports.memory import MeasuredPass
from remat.schedules import Disk, plan_loop
from remat.tables import Table, as_html, as_text


def rows(text):
    """Return the cells of each line that has some, by the name in its first column."""
    lines = [line.split("│")[1:-1] for line in text.splitlines() if "│" in line]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_the_best_schedule_is_marked_and_comes_first():
    plan = plan_loop(1000, slots=31)
    found = rows(plan.table(plan.reason).text())
    assert list(found) == ["* revolve", "uniform"]
    assert found["* revolve"] == ["3,405", "3.40", "3,405", "32 states"]


def test_every_schedule_has_a_row_with_its_numbers():
    plan = plan_loop(500, memory_bytes="40MB", state_bytes="1MB", tape_bytes="3MB")
    found = rows(plan.table(plan.reason).text())
    for option in (plan.best, *plan.alternatives):
        cells = found[f"* {option.name}" if option is plan.best else option.name]
        assert cells[0] == f"{option.evaluations:,}"
        assert cells[3] == f"{option.peak_bytes / 1e6:.1f} MB"


@pytest.mark.parametrize(("disk", "shown"), [(None, False), (Disk(20), True)])
def test_the_disk_has_a_column_if_it_is_used(disk, shown):
    plan = plan_loop(300, slots=5, disk=disk)
    assert ("on disk" in plan.table("").text()) == shown


def test_no_steps_divide_nothing_by_zero():
    assert "0.00" in plan_loop(0, slots=0).table("").text()


def test_two_passes_side_by_side():
    plain = MeasuredPass("plain", 4.0, 500_000_000)
    other = MeasuredPass("checkpointed", 6.0, 10_000_000)
    facts, table = compare(plain, other, "checkpointed", [("gradient", "", "0", "relative")])
    found = rows(table.text())
    assert found["peak memory"] == ["500.0 MB", "10.0 MB", "2.0%"]
    assert found["time"] == ["4.00 s", "6.00 s", "1.50 x"]
    assert found["gradient"] == ["", "0", "relative"]
    assert facts["memory_ratio"] == 0.02
    assert facts["checkpointed"] == {"peak_bytes": 10_000_000, "seconds": 6.0}


RAGGED = Table(
    ["name", "bytes", "note"],
    [["a<b", "1"], ["long\nname", "22222", "x & y"]],
    "Title",
    ["all", "22223", ""],
    ["a note"],
    names=2,
)


def test_cells_of_several_lines_and_rows_that_are_short():
    lines = RAGGED.text().splitlines()
    assert lines[0] == "Title"
    assert lines[-1] == "a note"
    assert len({len(line) for line in lines[1:-1]}) == 1
    assert lines[2] == "┃ name ┃ bytes ┃  note ┃"
    assert lines[4:] == [
        "│ a<b  │ 1     │       │",
        "│ long │ 22222 │ x & y │",
        "│ name │       │       │",
        "├──────┼───────┼───────┤",
        "│ all  │ 22223 │       │",
        "└──────┴───────┴───────┘",
        "a note",
    ]


def test_no_rows_and_no_title():
    lines = Table(["", "bytes"], []).text().splitlines()
    assert [len(line) for line in lines] == [12] * 4


def test_a_page_has_the_same_words_as_text_and_as_html():
    page = ["1 < 2", RAGGED, "end"]
    root = ElementTree.fromstring(f"<div>{as_html(page)}</div>")
    assert [part.tag for part in root] == ["p", "table", "p", "p"]
    assert [[cell.text for cell in row] for row in root.iter("tr")] == [
        ["name", "bytes", "note"],
        ["a<b", "1"],
        ["long\nname", "22222", "x & y"],
        ["all", "22223", None],
    ]
    assert root.find("table/caption").text == "Title"
    assert as_text(page).splitlines()[0] == "1 < 2"
    assert as_text(page).splitlines()[-2:] == ["a note", "end"]
