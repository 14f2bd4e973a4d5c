"""The example, with torchrun, as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys

from .processes import ROOT, SECONDS


def test_the_example_with_torchrun() -> None:
    path = os.pathsep.join(filter(None, sys.path))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "examples/distributed.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, *losses = done.stdout.strip().splitlines()
    assert first.startswith("2 process(es)")
    assert len({line.split(":")[1].strip() for line in losses}) == 1
