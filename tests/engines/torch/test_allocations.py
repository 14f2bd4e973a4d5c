"""What the profiler counts beside regions: gradients and activations that move the peak."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

import remat

# A pyramid, as ResNets are: at first large activations and small weights, at last the reverse. When
# gradients are yet to be allocated, the peak is early in a plain backward pass and late in a
# checkpointed one, at the stem, which is no region. No convolutions: what they allocate for
# themselves is not to be seen from Python.
PYRAMID = """
import gc, json, sys, torch, remat
torch.set_num_threads(1)
torch.manual_seed(0)

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = torch.nn.Linear(width, width, bias=False)
        self.second = torch.nn.Linear(width, width, bias=False)
    def forward(self, x):
        return torch.tanh(x + self.second(torch.tanh(self.first(x))).exp().cos())

class Pyramid(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        widths = [width << stage for stage in range(4) for _ in range(2)]
        self.blocks = torch.nn.ModuleList(map(Block, widths))
    def forward(self, x, call):
        x = x.sin().exp().tanh().cos().sin()  # the stem
        for number, block in enumerate(self.blocks):
            x = call(block, x)
            if number % 2:
                x = x[: len(x) // 4].repeat(1, 2)
        return x.square().mean()

def status(name):
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def run(side, model, x):
    call = remat.checkpoint if side != "plain" else lambda block, x: block(x)
    model(x, call).backward()

side, rows = sys.argv[1], int(sys.argv[2])
run(side, Pyramid(8), torch.randn(256, 8, requires_grad=True))
model, x = Pyramid(128), torch.randn(rows, 128, requires_grad=True)
gc.collect()
if side == "profiled":
    with remat.CheckpointProfiler() as profiler:
        run(side, model, x)
    print(json.dumps(profiler.memory_saved()))
else:
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    run(side, model, x)
    print(json.dumps(status("VmHWM") - before))
"""


def measured(side: str, rows: int) -> int:
    """Run a pass in a process whose allocator gives back what is freed; return bytes."""
    path = str(Path(remat.__file__).parents[1])
    give_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", PYRAMID, side, str(rows)],
        env={**os.environ, **give_back, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
    )
    found: int = json.loads(done.stdout)
    return found


def high_water_is_told() -> bool:
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    return os.access(clear, os.W_OK) and "VmHWM:" in status.read_text()


@pytest.mark.slow
@pytest.mark.skipif(not high_water_is_told(), reason="needs the system's high-water mark")
@pytest.mark.parametrize("rows", [4096, 8192])
def test_memory_saved_is_what_the_system_measures_though_gradients_are_yet_to_come(rows) -> None:
    saved = measured("plain", rows) - measured("checkpointed", rows)
    assert measured("profiled", rows) == pytest.approx(saved, rel=0.1)


def peaks(profiler) -> tuple[int, int]:
    return profiler._accounting.plain_peak, profiler._accounting.held_peak


def test_what_is_allocated_counts_until_it_is_freed_and_views_do_not() -> None:
    given = torch.ones(1000)
    with remat.CheckpointProfiler() as profiler:
        view = given.view(10, 100).t()[2:]
        view += 1
        assert peaks(profiler) == (0, 0)
        first = given * 2
        second = first.view(-1).exp_()
        assert peaks(profiler) == (4000, 4000)
        del first, second
        gc.collect()
        torch.ones(900)
        assert peaks(profiler) == (4000, 4000)
        assert profiler._accounting.curve[-1] == (0, 0)


def test_gradients_count_from_their_birth_to_zero_grad() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with remat.CheckpointProfiler() as profiler:
        for _ in range(3):
            (weight * 2).sum().backward()
            gc.collect()
            assert profiler._accounting.curve[-1] == (4000, 4000)
            weight.grad = None
        assert profiler._accounting.curve[-1] == (0, 0)


def test_what_a_region_drops_counts_for_the_plain_pass_alone() -> None:
    x = torch.ones(1000, requires_grad=True)
    with remat.CheckpointProfiler() as profiler:
        y = remat.checkpoint(lambda x: x.exp().sin().exp(), x)
        gc.collect()
        # Plain autograd saves what exp gives, which is what sin gets; y is there in any case.
        assert profiler._accounting.curve[-1] == (2 * 4000, 4000)
        del y
        gc.collect()
        assert profiler._accounting.curve[-1] == (0, 0)


class Looks(TorchDispatchMode):
    remat_looks_on = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_it_is_switched_off_in_whatever_order() -> None:
    profiler = remat.CheckpointProfiler()
    profiler.start_tracking()
    with Looks() as mode:
        profiler.stop_tracking()
        assert _get_current_dispatch_mode_stack() == [mode]
    with pytest.raises(RuntimeError, match="on purpose"), profiler:
        raise RuntimeError("on purpose")
    assert _get_current_dispatch_mode_stack() == []
    with remat.CheckpointScope("part"):
        profiler.start_tracking()
        y = torch.ones(3, requires_grad=True).exp().sin()
    profiler.stop_tracking()
    assert _get_current_dispatch_mode_stack() == []
    y.sum().backward()


def test_tensors_without_memory_are_left_alone() -> None:
    with remat.CheckpointProfiler() as profiler:
        torch.ones(1000, device="meta").exp()
        with FakeTensorMode():
            torch.ones(1000).exp()
        torch.vmap(lambda x: x.new_empty(()).fill_(0) + x)(torch.ones(0))
        torch.eye(0).to_sparse()
    assert peaks(profiler) == (0, 0)


def test_a_loop_is_not_counted_twice() -> None:
    """It tells by itself what it holds: 5 states of 40, and a few steps on the way back."""
    x = torch.ones(1000, requires_grad=True)
    with remat.CheckpointProfiler() as profiler:
        y, _ = remat.checkpointed_loop(lambda x: x.sin().exp().cos(), x, 40, 5, schedule="revolve")
        y.sum().backward()
    _, held = peaks(profiler)
    assert held < 20 * x.nbytes


def test_compiled_code_runs_under_a_profiler() -> None:
    compiled = torch.compile(lambda x: x.exp().sin(), backend="eager")
    x = torch.ones(3, requires_grad=True)
    with remat.CheckpointProfiler() as profiler:
        remat.checkpoint(lambda x: compiled(x).cos(), x).sum().backward()
    y = torch.ones(3, requires_grad=True)
    y.exp().sin().cos().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert profiler.checkpoint_count() == 1


def test_bytes_per_region_are_what_it_drops_and_what_it_keeps() -> None:
    x = torch.ones(1000, requires_grad=True).exp()  # no leaf: it is there for backward alone

    def named(run, name):
        with remat.CheckpointScope(name) as scope:
            result = run(x)
        assert scope.nodes
        return result

    with remat.CheckpointProfiler() as profiler:
        kept = [
            named(lambda x: x.sin().exp().cos(), "saves"),
            named(lambda x: x.sin().exp(), "swaps"),
            named(lambda x: remat.mark_checkpoint(x.sin().exp()).cos().sin(), "marked"),
        ]
        sum(y.sum() for y in kept).backward()
    found = {totals.name: (totals.plain_bytes, totals.held_bytes) for totals in profiler.regions}
    assert found == {
        "saves": (2 * 4000, 4000),  # x for sin, and what exp gives; x alone is kept
        "swaps": (2 * 4000, 4000),  # its result stays with the caller
        "marked": (3 * 4000, 2 * 4000),  # also what cos gives, for sin; x and the mark are kept
    }


def test_writes_to_lists_of_views_are_counted_as_without_a_profiler() -> None:
    """In a dispatch mode, PyTorch switches off the layer that counts them."""

    def gradient() -> torch.Tensor:
        x = torch.ones(1, 3, requires_grad=True)
        y = (x * 3.0).clone().view(1, -1)
        torch._foreach_mul_([y], 0.8)
        return torch.autograd.grad(y.sum(), x)[0]

    with remat.CheckpointProfiler():
        found = gradient()
    assert torch.equal(found, gradient())


@pytest.mark.parametrize("around", [remat.CheckpointProfiler, lambda: remat.CheckpointScope("s")])
def test_tensors_of_zeros_that_have_no_memory(around) -> None:
    """Autograd makes them in double backward."""
    shared = torch.from_numpy(np.ones(5, dtype=np.float32))

    def second_derivative() -> torch.Tensor:
        x = torch.linspace(-1.0, 1.0, 5).requires_grad_()
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        zeros = torch._efficientzerotensor((5,))
        shared.mul_(1.0)
        (second,) = torch.autograd.grad((first * (zeros + x) * shared).sum(), x)
        return second

    expected = second_derivative()
    with around():
        found = second_derivative()
    assert torch.equal(found, expected)
