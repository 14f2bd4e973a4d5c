"""Random programs with and without remat, bit for bit; `make fuzz N=10000` runs more of them."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from . import compare, drafts, kit, programs, run, shrink  # noqa: E402 (they need torch)

BATCHES, SIZE = 15, 20


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_programs_give_the_bits_of_plain_autograd(batch):
    tally = run.Tally()
    for _ in run.run(range(batch * SIZE, (batch + 1) * SIZE), tally):
        pass
    reports = [run.explain(seed, verdict) for seed, verdict in tally.failures.items()]
    assert not reports, "\n\n".join(reports)
    assert tally.verdicts["same"] >= 0.75 * SIZE, tally.verdicts
    assert tally.verdicts["refused"] <= 1, tally.verdicts


@pytest.mark.parametrize("batch", range(5))
def test_random_programs_give_the_bits_of_plain_autograd_whatever_the_plan(batch):
    tally = run.Tally()
    seeds = range(batch * SIZE, (batch + 1) * SIZE)
    for _ in run.run(seeds, tally, compare.check_within_a_budget):
        pass
    assert not tally.failures
    assert tally.verdicts["same"] >= 0.75 * SIZE, tally.verdicts
    assert tally.verdicts["refused"] <= 1, tally.verdicts


# The fuzzer itself.


def test_a_seed_stands_for_one_program():
    assert drafts.draw(3) == drafts.draw(3)
    assert drafts.draw(3) != drafts.draw(4)


def test_what_was_drawn_is_forgotten():
    def there():
        gc.collect()
        return sum(type(thing) is drafts.Draft for thing in gc.get_objects())

    before = there()  # of other tests: plain torch itself never frees some graphs
    drafts.draw(3)
    assert there() == before


@pytest.mark.filterwarnings("ignore")
def test_what_is_printed_can_be_run():
    program = drafts.draw(3)
    names = {}
    exec(programs.text_of(program), names)
    assert len(names["outs"]) == len(program.outputs)


def test_shrinking_leaves_what_fails_and_what_it_needs():
    program = drafts.draw(0)
    line = [item for item in programs.walk(program.items) if isinstance(item, programs.Line)][7]

    def fails(smaller):
        runs = compare.check(smaller).kind == "same"
        return runs and line.text in programs.text_of(smaller)

    small = shrink.shrink(program, fails, seconds=600)
    assert fails(small)
    assert len(list(programs.walk(small.items))) <= 4, programs.text_of(small)


def test_what_is_wrong_is_found(monkeypatch):
    """A `remat` whose marks cut gradients off is caught, with the program that shows it."""
    wrong = SimpleNamespace(**vars(kit.plain))
    wrong.mark_checkpoint = torch.detach
    monkeypatch.setattr(compare, "remat", wrong)
    tally = run.Tally()
    seed = next(seed for seed in run.run(range(100), tally) if seed in tally.failures)
    report = run.explain(seed, tally.failures[seed])
    assert f"seed {seed} differs" in report
    assert "mark_checkpoint" in report


def kills_its_process_once(program):
    if program.seed == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return compare.Verdict("same")


def test_a_program_that_kills_its_process_is_named_and_the_others_are_run(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # the processes import this file
    tally = run.Tally()
    done = sorted(run.in_processes(range(8), 2, tally, kills_its_process_once))
    assert done == list(range(8))
    assert tally.failures == {3: compare.Verdict("dies", "SIGKILL")}
    assert tally.verdicts == {"same": 7, "dies": 1}
    report = run.explain(3, tally.failures[3])
    assert report == f"seed 3 dies of SIGKILL\n\n{programs.text_of(drafts.draw(3))}"
