"""Ctrl-C at every line of ours: nothing is left on, and the next step is right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import remat
from remat.engines.torch.recording.threads import recorder_of_this_thread

OURS = str(Path(remat.__file__).parent)


class _InterruptAt:
    """Raises KeyboardInterrupt at the n-th line of remat that runs."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.has_come = False

    def __enter__(self) -> _InterruptAt:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            if self.left == 0:
                self.has_come = True
                sys.settrace(None)
                raise KeyboardInterrupt
            self.left -= 1
        return self.trace


def hooks_that_are_set() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def segments(x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return remat.checkpoint(lambda y: y.sin().sin(), x * 2.0).t()

    return remat.checkpoint(inner, x).sin()


def inside_of_hooks(x: Tensor) -> Tensor:
    """The program's own hooks lie above those of the outer segment."""

    def outer(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return remat.checkpoint(lambda y: y.sin().sin(), x * 2.0)

    return remat.checkpoint(outer, x).sin()


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = remat.checkpoint(torch.sin, x)
    return x * y


@pytest.mark.parametrize("step", [segments, inside_of_hooks, without_grad])
def test_an_interrupt_at_every_line(step: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(-1.0, 1.0, 6).view(2, 3).requires_grad_()
    expected = torch.autograd.grad(step(x).sum(), x)[0]
    recorder = recorder_of_this_thread()
    line, wrong = 0, []
    while True:
        with suppress(KeyboardInterrupt), _InterruptAt(line) as interrupt:
            torch.autograd.grad(step(x).sum(), x)
        if not interrupt.has_come:
            break
        left = _get_current_dispatch_mode_stack() or hooks_that_are_set()
        if left or recorder.opened or recorder.idle:
            wrong.append(line)
            recorder.unwind(0, 0)
        elif not torch.equal(torch.autograd.grad(step(x).sum(), x)[0], expected):
            wrong.append(line)
        line += 1
    assert line > 40
    assert not wrong
