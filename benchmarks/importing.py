"""What `import remat` costs beyond numpy and autograd."""

from __future__ import annotations

import subprocess
import sys

from .measure import Result

PEERS = ("autograd", "optree")
_CODE = """
import time, numpy, autograd
start = time.perf_counter()
import remat
print(time.perf_counter() - start)
"""


def run() -> list[Result]:
    seconds = min(_seconds() for _ in range(10))
    figure = "seconds for `import remat` beyond numpy and autograd, in a fresh process"
    return [Result.at_most("import", figure, seconds, 0.3)]


def _seconds() -> float:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    return float(done.stdout)
