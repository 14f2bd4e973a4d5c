"""Cases that several processes run together, through gloo on the CPU.

A file of tests has `CASES`, functions of rank and number of processes that raise if something is
wrong. `results_of` runs them all in fresh processes; each file is also their program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 3600  # much more than it takes, however busy the machine is
Case = Callable[[int, int], None]


def results_of(module: str, world: int) -> dict[str, str]:
    """Return what went wrong in each case, on any process; "" if nothing did."""
    path = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), str(world), folder],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            errors = [process.communicate(timeout=SECONDS)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        found: dict[str, str] = {}
        for rank, text in enumerate(errors):
            file = Path(folder, f"{rank}.json")
            assert file.exists(), text
            for name, problem in json.loads(file.read_text()).items():
                found[name] = found.get(name, "") + (f"rank {rank}: {problem}" if problem else "")
        return found


def main(cases: dict[str, Case]) -> None:
    """Run all cases as one of the processes."""
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=Path(folder, "store").as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=SECONDS // 2),
    )
    found = {}
    for name, case in cases.items():
        try:
            case(rank, world)
            found[name] = ""
        except BaseException:  # (what pytest raises is no Exception)
            found[name] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def expect_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {number} of {len(found)} differs"
