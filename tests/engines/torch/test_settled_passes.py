"""A plan that fits is followed again without being measured: exact, in the budget, and cheap."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn

import remat
from remat.core.passes import PassRegion

from .networks import GPT, ResNet, UNet
from .oracles import assert_same_bits
from .test_workspace import peak_of_allocator

pytestmark = pytest.mark.filterwarnings("ignore:a pass takes")  # what is this small
NETWORKS = {"gpt": GPT, "resnet": ResNet, "unet": UNet}
SETTLED_AFTER = 3  # one that is recorded, one that is warm, one that is measured


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What settled passes did: "settled" and "left", in order."""
    found: list[str] = []
    settle, leave = PassRegion.settle, PassRegion.leave_plan

    def settled(region, rest) -> None:
        found.append("settled")
        settle(region, rest)

    def left(region) -> None:
        found.append("left")
        leave(region)

    monkeypatch.setattr(PassRegion, "settle", settled)
    monkeypatch.setattr(PassRegion, "leave_plan", left)
    return found


def gradients(model: nn.Module, *inputs, number: int = 0, run=None) -> list:
    torch.manual_seed(number)
    model.zero_grad(set_to_none=True)
    loss = (run or model)(*inputs)
    loss = loss if loss.dim() == 0 else loss.square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def assert_all_same(found, expected, what="") -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(one, other, f"{what} {number}")


@pytest.mark.parametrize("way", ["model", "manager"])
@pytest.mark.parametrize("budget", [0.8, 1.0])
@pytest.mark.parametrize("network", NETWORKS)
def test_settled_passes_give_the_plain_gradients(network, budget, way, events) -> None:
    torch.manual_seed(0)
    plain = NETWORKS[network]()
    model, inputs = copy.deepcopy(plain), plain.inputs()
    if way == "model":
        remat.auto_checkpoint(model, memory_budget=budget)
    expected = [gradients(plain, *inputs, number=step) for step in range(6)]
    with remat.CheckpointManager(memory_budget=budget) if way == "manager" else nullcontext():
        for step in range(6):
            assert_all_same(gradients(model, *inputs, number=step), expected[step], f"step {step}")
    if way == "manager" or budget < 1.0:
        assert events == ["settled"] * (6 - SETTLED_AFTER)


def deep(width: int = 128, layers: int = 10) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(0.1)]
    return nn.Sequential(*(copy.deepcopy(part) for _ in range(layers) for part in parts))


@pytest.mark.parametrize("budget", [0.35, 0.6])
def test_the_allocator_sees_the_same_peak_in_settled_passes(budget, events) -> None:
    model, x = deep(), torch.randn(1024, 128)
    remat.auto_checkpoint(model, memory_budget=budget)
    model(x).sum().backward()  # gradients are there
    peaks = [peak_of_allocator(lambda: model(x).sum().backward()) for _ in range(5)]
    assert events == ["settled"] * 3
    assert max(peaks[2:]) <= 1.01 * peaks[1]


def calls_in(function) -> int:
    count = 0

    def note(frame, event, argument) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_settled_pass_makes_few_python_calls(events) -> None:
    """Counted, not timed; `benchmarks.torch_budget` has the calls per op."""
    model, x = deep(16, layers=20), torch.randn(128, 16)
    remat.auto_checkpoint(model, memory_budget=0.5)
    counts = [calls_in(lambda: model(x).sum().backward()) for _ in range(5)]
    assert events == ["settled"] * 2
    assert counts[4] <= 0.7 * counts[2]


# -- the ordinary life of a training script: each in the fifth step of eight ---------------------


def as_ever(model, x):
    return model(x).square().mean()


def one_op_more(model, x):
    return (model[:8](x) * 1.5 + model[8:](model[:8](x))).square().mean()


def fewer_ops(model, x):
    return model[:12](x).square().mean()


def another_shape(model, x):
    return model(x[:7]).square().mean()


def another_shape_inside(model, x):
    y = model[:8](x)
    return model[8:](torch.cat([y, y])).square().mean()


def another_dtype(model, x):
    with torch.autocast("cpu"):
        return model(x).float().square().mean()


def in_eval_mode(model, x):
    model.eval()
    try:
        return model(x).square().mean()
    finally:
        model.train()


def with_a_mark(model, x):
    return model[8:](remat.mark_checkpoint(model[:8](x))).square().mean()


def with_a_name(model, x):
    return model[8:](remat.name(model[:8](x), "middle")).square().mean()


def with_a_segment(model, x):
    return model[8:](remat.checkpoint(model[:8])(x)).square().mean()


def with_torchs_segment(model, x):
    first = torch.utils.checkpoint.checkpoint(model[:8], x, use_reentrant=False)
    return model[8:](first).square().mean()


def with_a_write(model, x):
    y = model[:8](x)
    y = y.clone().mul_(2)
    return model[8:](y).square().mean()


def with_a_write_through_a_view(model, x):
    y = model[:8](x) * 1
    y.t()[1:].add_(1.0)
    return model[8:](y).square().mean()


def with_a_gradient_inside(model, x):
    x = x.clone().requires_grad_()
    y = model[:8](x)
    (penalty,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return model[8:](y).square().mean() + penalty.square().mean()


def with_an_unrelated_gradient_inside(model, x):
    y = model[:8](x)
    w = torch.ones(3, requires_grad=True)
    torch.autograd.grad((w * 2).sum(), w)
    return model[8:](y).square().mean()


def with_a_metric(model, x):
    y = model[:8](x)
    with torch.no_grad():
        float(y.abs().max())
    return model[8:](y).square().mean()


def with_a_hook(model, x):
    y = model[:8](x)
    y.register_hook(lambda gradient: gradient * 2)
    return model[8:](y).square().mean()


def frozen(model, x):
    model[0].requires_grad_(requires_grad=False)
    try:
        return model(x).square().mean()
    finally:
        model[0].requires_grad_(requires_grad=True)


def with_random_numbers(model, x):
    return model(x + torch.rand(())).square().mean()


STEPS = [
    one_op_more,
    fewer_ops,
    another_shape,
    another_shape_inside,
    another_dtype,
    in_eval_mode,
    with_a_mark,
    with_a_name,
    with_a_segment,
    with_torchs_segment,
    with_a_write,
    with_a_write_through_a_view,
    with_a_gradient_inside,
    with_an_unrelated_gradient_inside,
    with_a_metric,
    with_a_hook,
    frozen,
    with_random_numbers,
]


@pytest.mark.parametrize("way", ["forward", "manager"])
@pytest.mark.parametrize("other", STEPS, ids=[f.__name__ for f in STEPS])
def test_a_step_that_differs_gives_the_plain_gradients(other, way, events) -> None:
    plain, x = deep(16, 8), torch.randn(128, 16)
    model = copy.deepcopy(plain)
    steps = [other if number in (4, 5, 8) else as_ever for number in range(10)]
    expected = [
        gradients(plain, plain, x, number=number, run=step) for number, step in enumerate(steps)
    ]
    if way == "forward":
        budgeted = remat.auto_checkpoint(copy.deepcopy(Program(model)), memory_budget=0.7)
        model, run = budgeted.model, lambda step: lambda _, x: budgeted(x, step)
    else:
        run = lambda step: step  # noqa: E731
    with remat.CheckpointManager(memory_budget=0.7) if way == "manager" else nullcontext():
        for number, step in enumerate(steps):
            found = gradients(model, model, x, number=number, run=run(step))
            assert_all_same(found, expected[number], f"step {number}")
    assert "settled" in events


class Program(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, step):
        return step(self.model, x)


def test_other_uses_of_a_graph(events) -> None:
    """Two backwards of one graph, accumulation, an exception, a graph that is dropped."""
    plain, x = deep(16, 8).eval(), torch.randn(128, 16)
    model = copy.deepcopy(plain)

    def twice(model) -> None:
        loss = as_ever(model, x)
        loss.backward(retain_graph=True)
        loss.backward()

    def in_two_parts(model) -> None:
        y = model[:8](x)
        (y.sum() * 0.1).backward(retain_graph=True)
        model[8:](y).square().mean().backward()

    def both_first(model) -> None:
        losses = [as_ever(model, x), as_ever(model, x * 2)]
        losses[0].backward()
        losses[1].backward()

    def fails(model) -> None:
        with suppress(RuntimeError):
            model[8:](model[:8](x) @ torch.ones(5, 5))
        as_ever(model, x).backward()

    def drops(model) -> None:
        as_ever(model, x)
        with torch.no_grad():
            as_ever(model, x)
        as_ever(model, x).backward()

    def after(model, use, number) -> list:
        model.zero_grad(set_to_none=True)
        (use if number >= 4 else lambda m: as_ever(m, x).backward())(model)
        return [p.grad.clone() for p in model.parameters()]

    uses = [
        (use, number)
        for use in (twice, in_two_parts, both_first, fails, drops)
        for number in range(6)
    ]
    expected = [after(plain, *each) for each in uses]
    with remat.CheckpointManager(memory_budget=0.8):
        for (use, number), gradients_of_plain in zip(uses, expected, strict=True):
            assert_all_same(
                after(model, use, number), gradients_of_plain, f"{use.__name__} {number}"
            )
    assert "settled" in events


def test_a_write_between_forward_and_backward_is_an_error_as_ever(events) -> None:
    model, x = deep(16, 8), torch.randn(128, 16, requires_grad=True)  # all weights are needed
    remat.auto_checkpoint(model, memory_budget=0.7)
    for _ in range(5):
        as_ever(model, x).backward()
    assert events[-1] == "settled"
    for number in range(0, len(model), 4):
        loss = as_ever(model, x)
        with torch.no_grad():
            model[number].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_program_that_leaves_its_plan_is_measured_longer_each_time(events) -> None:
    model, x = deep(16, 8), torch.randn(128, 16)
    with remat.CheckpointManager(memory_budget=0.8):
        for number in range(40):
            (fewer_ops if number % 4 == 3 else as_ever)(model, x).backward()
    assert events.count("left") < 8
