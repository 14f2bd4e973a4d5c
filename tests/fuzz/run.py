"""Long runs: `python -m tests.fuzz.run --count 10000`; one program: `--show SEED`.

Of three programs one is checked as it is, one under a random policy, one within a budget.

Programs run in processes of their own, so that one which kills its process is named and the rest
go on.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from signal import Signals

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .compare import Verdict, check, check_in_turn
from .drafts import draw
from .programs import Block, Program, text_of, walk
from .shrink import shrink

__all__ = ["Tally", "explain", "in_processes", "main", "run"]


@dataclass
class Tally:
    """What was run, and how it fared."""

    programs: int = 0
    ops: int = 0
    regions: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # what was written to
    failures: dict[int, Verdict] = field(default_factory=dict)  # by seed

    def add(self, program: Program, verdict: Verdict) -> None:
        self.programs += 1
        for item in walk(program.items):
            if isinstance(item, Block):
                self.regions += item.is_region
            else:
                self.ops += 1
        self.verdicts[verdict.kind] += 1
        if verdict.kind == "refused":
            self.refused[verdict.what] += 1
        if verdict.is_failure:
            self.failures[program.seed] = verdict


def run(
    seeds: Iterable[int], tally: Tally, judge: Callable[[Program], Verdict] = check
) -> Iterator[int]:
    """Run the programs of some seeds; yield each seed when it is done."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: more threads take longer, and add in any order
    try:
        for seed in seeds:
            program = draw(seed)
            tally.add(program, judge(program))
            yield seed
    finally:
        torch.set_num_threads(threads)


# Processes.


def in_processes(
    seeds: range, jobs: int, tally: Tally, judge: Callable[[Program], Verdict] = check
) -> Iterator[int]:
    """Run the programs of some seeds in several processes; yield each seed when it is done.

    Every process takes each `jobs`-th seed, so the same call runs the same programs one after the
    other: what kills a process may have been done by a program before.
    """
    workers = [_Worker(seeds[number::jobs], judge) for number in range(jobs)]
    try:
        while workers := [worker for worker in workers if worker.seeds]:
            for ready in wait([worker.answers for worker in workers]):
                worker = next(worker for worker in workers if worker.answers is ready)
                seed, worker.seeds = worker.seeds[0], worker.seeds[1:]
                try:
                    verdict = worker.answers.recv()
                except EOFError:
                    verdict = Verdict("dies", worker.end())
                    worker.start()
                tally.add(draw(seed), verdict)
                yield seed
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.end()


class _Worker:
    """A process that runs the programs of some seeds, one after the other."""

    def __init__(self, seeds: range, judge: Callable[[Program], Verdict]) -> None:
        self.seeds = seeds  # that are to come; the first one runs now
        self.judge = judge
        self.start()

    def start(self) -> None:
        context = get_context("spawn")
        self.answers, answers = context.Pipe(duplex=False)
        work = (self.seeds, self.judge, answers)
        self.process = context.Process(target=_work, args=work, daemon=True)
        self.process.start()
        answers.close()  # only the other end is left, so that we are told when it is gone

    def end(self) -> str:
        """Wait for the end of the process; return what it died of."""
        self.answers.close()
        self.process.join()
        code = self.process.exitcode or 0
        return Signals(-code).name if code < 0 else f"exit code {code}"


def _work(seeds: range, judge: Callable[[Program], Verdict], answers: Connection) -> None:
    faulthandler.enable()
    tally = Tally()
    for _ in run(seeds, tally, judge=lambda program: _answered(answers, judge(program))):
        pass


def _answered(answers: Connection, verdict: Verdict) -> Verdict:
    answers.send(verdict)
    return verdict


def explain(
    seed: int,
    verdict: Verdict,
    seconds: float = 20.0,
    judge: Callable[[Program], Verdict] = check,
) -> str:
    """Return what fails, and the smallest program that was found for it."""
    if verdict.kind == "dies":  # so would we
        return f"seed {seed} dies of {verdict.what}\n\n{text_of(draw(seed))}"
    small = shrink(draw(seed), lambda program: judge(program).way == verdict.way, seconds)
    found = judge(small)
    return f"seed {seed} {found.kind}: {found.what}\n\n{text_of(small)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many programs")
    parser.add_argument("--seed", type=int, help="of the first one; random if not given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many processes")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one program and run it")
    given = parser.parse_args(arguments)
    faulthandler.enable()
    console = Console()
    if given.show is not None:
        return _show(given.show)
    start = random.SystemRandom().randrange(10**9) if given.seed is None else given.seed
    console.print(f"{given.count} programs from seed {start}, in {given.jobs} processes")
    tally = Tally()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("fuzzing", total=given.count)
        seeds = range(start, start + given.count)
        for seed in in_processes(seeds, given.jobs, tally, check_in_turn):
            progress.update(task, advance=1, description=f"seed {seed}")
            if seed in tally.failures:
                report = explain(seed, tally.failures[seed], judge=check_in_turn)
                progress.print(report, markup=False, highlight=False)
    console.print(_summary(tally))
    return 1 if tally.failures else 0


def _show(seed: int) -> int:
    program = draw(seed)
    sys.stdout.write(text_of(program))
    verdict = check_in_turn(program)
    sys.stdout.write(f"# {verdict.kind}: {verdict.what}\n")
    return int(verdict.is_failure)


def _summary(tally: Tally) -> Table:
    table = Table("", "count", title="remat and plain autograd, bit for bit")
    table.add_row("programs", str(tally.programs))
    table.add_row("ops", str(tally.ops))
    table.add_row("regions", str(tally.regions))
    for what, count in tally.refused.items():
        table.add_row(f"  refused: a tensor {what}", str(count))
    for kind, meaning in _MEANINGS.items():
        table.add_row(f"{kind}: {meaning}", str(tally.verdicts[kind]))
    return table


_MEANINGS = {
    "same": "nothing differs",
    "plain raises": "plain autograd cannot run the backward pass either",
    "refused": "what a region had used was written to after it",
    "torch differs": "a dispatch mode that does nothing gives what remat gives",
    "discarded": "plain torch cannot run the program",
    "unsteady": "plain torch differs from itself",
    "differs": "FAILURE",
    "raises": "FAILURE",
    "dies": "FAILURE: the process is gone",
}


if __name__ == "__main__":
    sys.exit(main())
