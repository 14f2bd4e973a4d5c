"""What the backward of an op allocates for itself is part of the plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat
from remat.engines.torch.budget.manager import TorchBudget, run_within

from .networks import ResNet, UNet
from .oracles import planning

ROWS, WIDTH = 512, 64
NBYTES = ROWS * WIDTH * 4


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(6))
    )


def by_standard_deviation(x):
    return x / x.std(1, keepdim=True)


# Temporaries as torch's derivative formulas have them: grad * (2 * x), -grad * x / (y * y), ...
ENDS = {
    "square": lambda x: x.square(),
    "cube": lambda x: x**3,
    "in place": lambda x: (x * 2).square_(),
    "quotient": lambda x: x / (x + 4),
    "rsqrt": lambda x: (x + 4).rsqrt(),
    "standard deviation": by_standard_deviation,
    "none": lambda x: x * 2,
    "parts": lambda x: torch.cat([x[:256] ** 2, x[256:].t().contiguous().t() ** 2]),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_first_plan_knows_what_a_backward_allocates(end) -> None:
    model = blocks()
    x = torch.randn(ROWS, WIDTH)
    with remat.CheckpointManager(memory_budget=0.7) as manager:
        for _ in range(2):  # the second pass follows the plan of the first
            end(model(x)).sum().backward()
    record = manager.last_pass
    assert record.followed
    assert record.measured_peak <= record.plan.peak_bytes + NBYTES // 16


def trace_of(function, *inputs):
    trace = None

    def plan(recorded, _):
        nonlocal trace
        trace = recorded
        return remat.plans.Plan(frozenset(recorded.saved))

    run_within(TorchBudget("1TB", planning(plan)), function, inputs)
    return trace


def workspace(function, *inputs) -> int:
    """Return the most bytes that a trace says the backward of an op takes."""
    return max(op.workspace_bytes for op in trace_of(function, *inputs).ops)


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (lambda x: x.square(), 2),  # x ** 1, and 2 times that
        (lambda x: x.rsqrt(), 2),  # result ** 3, and -0.5 times grad
        (lambda x: x.tanh(), 0),
        (nn.functional.gelu, 0),
        (lambda x: x @ x.detach().t(), 0),
        (lambda x: nn.functional.layer_norm(x, (256,)), 0),
    ],
    ids=["square", "rsqrt", "tanh", "gelu", "matmul", "layer norm"],
)
def test_bytes_are_those_of_the_formula(function, tensors) -> None:
    x = torch.randn(256, 256, requires_grad=True)
    assert workspace(function, x) == tensors * x.nbytes


def test_measuring_runs_no_code_of_the_program() -> None:
    ran = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ran.append("forward")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            ran.append("backward")
            return gradient

    x = torch.randn(64, 64, requires_grad=True)
    workspace(lambda x: nn.functional.dropout(Counted.apply(x)).square(), x)
    assert ran == ["forward"]
    assert x.grad is None


class Residual(nn.Module):
    """What a relu gives is saved twice: for its own backward, and for that of the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x):
        y = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        return torch.relu(x + y)


def test_a_result_that_is_saved_twice_is_saved_for_both() -> None:
    model = nn.Sequential(Residual(), Residual())
    recorded = trace_of(model, torch.randn(4, 8, 16, 16))
    convolutions = [op for op in recorded.ops if op.name == "aten.convolution.default"]
    assert len(convolutions) == 4
    assert all(op.reads[0] in op.saves for op in convolutions[1:])  # the first reads the input
    relus = [op for op in recorded.ops if op.name == "aten.relu.default"]
    assert len(relus) == 4
    assert all(op.makes[0] in op.saves for op in relus)


def with_noise(x):
    return nn.functional.rrelu(x * 1, training=True, inplace=True)


UNARY = {
    **{name: getattr(torch, name) for name in ("exp", "tanh", "sigmoid", "relu", "sqrt", "rsqrt")},
    **{name: getattr(torch, name) for name in ("reciprocal", "tan", "sinh", "celu", "selu")},
    "square": torch.square,
    "power of a number": lambda x: 2.0**x,
    "power": lambda x: x**x,
    "softmax": lambda x: x.softmax(1),
    "cumprod": lambda x: x.cumprod(0),
    "elu": nn.functional.elu,
    "elu in place": lambda x: nn.functional.elu_(x * 1),
    "leaky relu in place": lambda x: nn.functional.leaky_relu_(x * 1),
    "hardtanh": nn.functional.hardtanh,
    "softplus": nn.functional.softplus,
    "random relu in place": with_noise,
    "pool": lambda x: nn.functional.max_pool2d(x[None], 3, 1, 1)[0],
}


@pytest.mark.parametrize("function", UNARY.values(), ids=UNARY)
def test_what_is_saved_belongs_to_the_op_that_autograd_saves_it_for(function) -> None:
    x = torch.rand(16, 16) + 0.5
    weight = torch.rand(16, 16, requires_grad=True)
    node = function(x * weight).grad_fn
    saves_result = hasattr(node, "_saved_result") and isinstance(node._saved_result, torch.Tensor)
    ops = trace_of(lambda: function(x * weight) @ weight).ops
    assert ops[-1].name == "aten.mm.default"
    (made,) = (read for op in ops[-2:-1] for read in op.makes[:1])
    assert made in ops[-1].reads
    assert made in ops[-1].saves
    assert (made in ops[-2].saves) == saves_result


# -- what kernels allocate, as the allocator of PyTorch tells it -----------------------------------


def peak_of_allocator(function) -> int:
    """Return the most bytes that PyTorch allocates at a time, those of kernels included."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


SMALL_NETS = {
    "unet": (lambda: UNet(8), lambda: UNet.inputs(4, 32)),
    "resnet": (lambda: ResNet(3, 16), lambda: ResNet.inputs(4, 32)),
    "pooled": (
        lambda: nn.Sequential(
            *(
                layer
                for number, width in enumerate((16, 32, 64))
                for layer in (
                    nn.Conv2d(width // 2 if number else 3, width, 3, padding=1),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                    nn.MaxPool2d(2),
                )
            )
        ),
        lambda: (torch.randn(4, 3, 32, 32),),
    ),
}


@pytest.mark.parametrize("share", [0.8, 0.9])
@pytest.mark.parametrize(("make", "inputs"), SMALL_NETS.values(), ids=SMALL_NETS)
def test_small_nets_keep_to_their_budget_from_the_first_pass_on(make, inputs, share) -> None:
    model, given = make(), inputs()

    def step() -> None:
        model(*given).square().mean().backward()

    step()  # from now on gradients are there
    with remat.CheckpointManager(memory_budget=share) as manager:
        peaks = [peak_of_allocator(step) for _ in range(3)]
    record = manager.last_pass
    assert max(peaks) <= 1.02 * record.budget
    assert record.measured_peak <= 1.01 * record.budget
    assert peaks[-1] >= 0.85 * record.plan.peak_bytes
