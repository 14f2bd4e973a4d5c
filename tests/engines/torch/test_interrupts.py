"""Ctrl-C at every line of ours: nothing is left on, and the next step is right."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import remat
from remat.engines.torch.recording.threads import recorder_of_this_thread
from remat.observers import observers
from remat.plans import Plan, Trace

from .random_plans import keep_nothing

OURS = str(Path(remat.__file__).parent)
PURE = str(Path(OURS, "plans"))  # planners switch nothing on
FEW = 16  # of the lines of a program are interrupted without --all


class _Lines:
    """Counts the lines of remat that run; raises KeyboardInterrupt at one of them."""

    def __init__(self, stop: int = -1) -> None:
        self.stop = stop
        self.lines: list[tuple[str, int]] = []
        self._before: dict[FrameType, int] = {}  # the line that ran before in a frame

    def __enter__(self) -> _Lines:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        self._before.clear()

    @property
    def has_come(self) -> bool:
        return len(self.lines) == self.stop + 1

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(OURS) or file.startswith(PURE):
            return None
        if event == "line":
            before, line = self._before.get(frame, 0), frame.f_lineno
            self._before[frame] = line
            if not _cannot_be_protected(frame, before):
                self.lines.append((file, line))
                if self.has_come:
                    sys.settrace(None)
                    raise KeyboardInterrupt
        elif event == "return":
            self._before.pop(frame, None)
        return self.trace


def _cannot_be_protected(frame: FrameType, before: int) -> bool:
    """Return whether a line begins the way out of a `with` block.

    Nothing protects the first line of a Python `__exit__`, which is called once. Neither can the
    end of a block be protected, where the `with` line runs again to call `__exit__`; but there only
    a trace function may raise: Python looks for signals after calls and at jumps back.
    """
    if frame.f_code.co_name == "__exit__":
        return not before
    line = frame.f_lineno
    text = linecache.getline(frame.f_code.co_filename, line)
    return before > line and text.lstrip().startswith("with ")


Step = Callable[[], list[Tensor]]  # returns gradients


def _inputs() -> Tensor:
    return torch.linspace(-1.0, 1.0, 6).view(2, 3).requires_grad_()


def _step_of(function: Callable[[Tensor], Tensor]) -> Step:
    return lambda: list(torch.autograd.grad(function(x := _inputs()).sum(), x))


def segments() -> Step:
    def inner(x: Tensor) -> Tensor:
        return remat.checkpoint(lambda y: y.sin().sin(), x * 2.0).t()

    return _step_of(lambda x: remat.checkpoint(inner, x).sin())


def inside_of_hooks() -> Step:
    """The program's own hooks lie above those of the outer segment."""

    def outer(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return remat.checkpoint(lambda y: y.sin().sin(), x * 2.0)

    return _step_of(lambda x: remat.checkpoint(outer, x).sin())


def without_grad() -> Step:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = remat.checkpoint(torch.sin, x)
        return x * y

    return _step_of(function)


def loop_in_a_segment() -> Step:
    def function(x: Tensor) -> Tensor:
        y = (x * 2.0).sin()
        return remat.checkpointed_loop(torch.sin, y.sin(), 3)[0]

    return _step_of(lambda x: remat.checkpoint(function, x))


def _net() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.SiLU(), nn.SiLU(), nn.SiLU())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).view_as(parameter))
    return net


def _train(net: nn.Module) -> list[Tensor]:
    net.zero_grad()
    net(x := _inputs()).sum().backward()
    return [tensor.grad for tensor in (x, *net.parameters())]


def plain_net() -> Step:
    net = _net()
    return lambda: _train(net)


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that recompute, at once and whatever the budget: to search for one is not at issue."""
    monkeypatch.setattr("remat.api.budgets._plans_of", _KeepsNothing)


class _KeepsNothing:
    memory_bytes = 0

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def plan(self, memory_budget: int) -> Plan:
        return replace(keep_nothing(self._trace, memory_budget), extra_seconds=1.0)


def managed() -> Step:
    net, manager = _net(), remat.CheckpointManager(memory_budget=0.9)

    def step() -> list[Tensor]:
        with manager:
            return _train(net)

    return step


def automatic() -> Step:
    net = remat.auto_checkpoint(_net(), 0.9)
    return lambda: _train(net)


def scope_and_profiler() -> Step:
    net = _net()
    scope, profiler = remat.CheckpointScope("net"), remat.CheckpointProfiler()

    def step() -> list[Tensor]:
        net.zero_grad()
        x = _inputs()
        with profiler:
            with scope:
                y = net(x)
            y.sum().backward()
        return [tensor.grad for tensor in (x, *net.parameters())]

    return step


def warm(make: Callable[[], Step]) -> Callable[[], Step]:
    """Return a step that has run before: it has plans."""
    step = make()
    for _ in range(5):
        step()
    return lambda: step


def _left_on() -> list[str]:
    recorder = recorder_of_this_thread()
    left = {
        "modes": _get_current_dispatch_mode_stack(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "regions": recorder.opened or recorder.idle,
        "observers": observers(),
        "grad mode": not torch.is_grad_enabled(),
    }
    return [name for name, value in left.items() if value]


def _in_a_thread(step: Step) -> list[Tensor]:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(step()), daemon=True)
    thread.start()
    thread.join(60)
    return found


def _is_equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def _what_is_wrong(step: Step, make: Callable[[], Step], expected: list[Tensor]) -> list[str]:
    """Return what an interrupt has left behind."""
    wrong = _left_on()
    try:
        torch.randn(3)
        again = {"the same": step(), "in a thread": _in_a_thread(step), "a new one": make()()}
    except Exception as error:
        return [*wrong, str(error)]
    return wrong + [name for name, found in again.items() if not _is_equal(found, expected)]


PROGRAMS = {
    "segments": segments,
    "inside_of_hooks": inside_of_hooks,
    "without_grad": without_grad,
    "loop_in_a_segment": loop_in_a_segment,
    "managed": managed,
    "managed, planned": lambda: warm(managed),
    "automatic": automatic,
    "automatic, planned": lambda: warm(automatic),
    "scope_and_profiler": scope_and_profiler,
}


# Python itself drops an interrupt that comes in a finalizer, and warns.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_interrupt_at_every_line(name: str, request: pytest.FixtureRequest) -> None:
    make: Any = PROGRAMS[name]
    if "planned" in name:
        make = make()
    step = make()
    expected = [gradient.clone() for gradient in step()]
    with _Lines() as run:
        make()()
    # Each line the last time that it runs, and with --all the first time, too.
    last = sorted({line: number for number, line in enumerate(run.lines)}.values())
    stops = last[:: max(1, len(last) // FEW)]
    if request.config.getoption("--all"):
        numbers = range(len(run.lines) - 1, -1, -1)
        stops = sorted({*last, *{run.lines[number]: number for number in numbers}.values()})
    wrong = {}
    for stop in stops:
        step = make()
        with suppress(KeyboardInterrupt), _Lines(stop) as interrupt:
            step()
        if interrupt.has_come and (found := _what_is_wrong(step, make, expected)):
            file, line = interrupt.lines[-1]
            wrong[stop] = f"{Path(file).relative_to(OURS)}:{line}: {found}"
            _clean_up()
    assert stops
    assert not wrong


def _clean_up() -> None:
    recorder = recorder_of_this_thread()
    recorder.unwind(0, 0)
    while _get_current_dispatch_mode_stack():
        torch._C._pop_torch_dispatch_stack(None)
