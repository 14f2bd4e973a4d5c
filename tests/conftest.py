"""What holds for all tests."""

import gc
import os
import signal
import sys
from collections import defaultdict
from hashlib import sha256

import pytest
from hypothesis import settings

# How long one example takes says nothing on a shared machine.
settings.register_profile("all", parent=settings.default, deadline=None)
settings.register_profile(
    "sample", parent=settings.get_profile("all"), max_examples=30, derandomize=True, database=None
)

# On some virtual machines PyTorch itself dies of an illegal instruction: oneDNN believes that there
# is AMX. It is read when oneDNN is first used, so this is early enough. (The Makefile has it, too.)
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


@pytest.fixture
def interruptible():
    """Let SIGINT interrupt this process and those that it starts, for a test.

    A run that was started with `nohup` or `&` ignores it, and what it starts inherits that. A
    handler is not inherited: a new process begins with the default.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# -- what `make test` runs, and `make test-all` ----------------------------------------------------

MATRIX, SHARE = 48, 8  # of a test with more parameter sets than 48, one in 8 is run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run slow tests too, and all parameter sets of matrices"
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("all" if config.getoption("--all") else "sample")
    config.addinivalue_line("markers", "slow: left to `pytest --all`, or run by its node id")
    config.pluginmanager.register(_Collector())


@pytest.hookimpl(trylast=True)  # of what `-k` and `-m` leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests and most of large matrices: `make test-all` and node ids have them."""
    if config.getoption("--all") or any("::" in argument for argument in config.args):
        return
    matrices = defaultdict(list)
    for item in items:
        matrices[item.nodeid.partition("[")[0]].append(item)
    chosen = {item for matrix in matrices.values() for item in _sample(matrix)}
    chosen -= {item for item in chosen if item.get_closest_marker("slow")}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _sample(matrix: list[pytest.Item]) -> list[pytest.Item]:
    """Choose by a hash of the name, so that the same ones are run everywhere and always.

    Every value of every argument occurs, unless an argument has more values than half the number of
    sets: of a table of programs times ways to run them, each program is run, and each way.
    """
    if len(matrix) <= MATRIX:
        return matrix
    numbers = {item: int(sha256(item.nodeid.encode()).hexdigest(), 16) for item in matrix}
    values = {item: set(_arguments(item).items()) for item in matrix}
    arguments = defaultdict(set)
    for argument, value in set().union(*values.values()):
        arguments[argument].add(value)
    wanted = {
        (argument, value)
        for argument, found in arguments.items()
        if 2 * len(found) <= len(matrix)
        for value in found
    }
    chosen = []
    for item in sorted(matrix, key=numbers.__getitem__):
        if numbers[item] % SHARE == 0 or values[item] & wanted or len(chosen) < 4:
            chosen.append(item)
            wanted -= values[item]
    return chosen


def _arguments(item: pytest.Item) -> dict[str, object]:
    """Return what tells the values of each argument of a test apart."""
    found = item.callspec.params  # type: ignore[attr-defined]
    plain = (str, int, float, bool, type(None))
    return {name: v if isinstance(v, plain) else id(v) for name, v in found.items()}


class _Collector:
    """Hides what stays from the garbage collector: with PyTorch, a full collection takes 0.3 s."""

    def __init__(self) -> None:
        self.tests = self.modules = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        # PyTorch loads its compiler when it is first needed; reports of tests stay, and much else.
        if self.tests % 50 == 0 or len(sys.modules) > self.modules + 100:
            gc.collect()
            gc.freeze()
            self.modules = len(sys.modules)
        self.tests += 1
