"""Budgets as users give them: auto_checkpoint, CheckpointManager, frontier, memory_report."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch
from torch import nn

import remat

from .networks import GPT, ResNet, UNet

NETWORKS = {"gpt": GPT, "resnet": ResNet, "unet": UNet}


def passes(model: nn.Module, inputs, count: int = 3) -> list[list[torch.Tensor]]:
    found = []
    for step in range(count):
        torch.manual_seed(step)
        model.zero_grad()
        loss = model(*inputs)
        loss.backward()
        buffers = [buffer.clone() for buffer in model.buffers()]
        found.append([loss.detach(), *[p.grad.clone() for p in model.parameters()], *buffers])
    return found


def assert_same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("budget", [0.8, 0.9])
def test_gradients_are_those_of_the_plain_model(network, budget) -> None:
    plain = NETWORKS[network]()
    model = remat.auto_checkpoint(copy.deepcopy(plain), memory_budget=budget)
    assert_same(passes(model, plain.inputs()), passes(plain, plain.inputs()))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("budget", [0.85, 0.95])
def test_the_same_inside_of_a_manager(network, budget) -> None:
    plain = NETWORKS[network]()
    model = copy.deepcopy(plain)
    with remat.CheckpointManager(memory_budget=budget) as manager:
        found = passes(model, plain.inputs())
    assert_same(found, passes(plain, plain.inputs()))
    assert "predicted peak" in manager.report()


@pytest.mark.parametrize("share", [0.6, 0.75])
def test_the_budget_is_kept_from_the_first_pass_on(share) -> None:
    model, inputs = GPT(6, 64, 0.0), GPT.inputs(4, 64)
    peaks = []
    with remat.CheckpointManager(memory_budget=share) as manager:
        for _ in range(3):
            model(*inputs).backward()
            model.zero_grad()
            record = manager.last_pass
            peaks.append(record.measured_peak / record.budget)
    assert peaks[0] <= 1.15
    assert max(peaks[1:]) <= 1.05


@pytest.mark.parametrize("last", [nn.ReLU(inplace=True), nn.ELU(inplace=True), nn.Sigmoid()])
def test_a_large_budget_keeps_what_the_last_op_saves_of_itself(last) -> None:
    model = remat.auto_checkpoint(nn.Sequential(nn.Linear(8, 8), last), memory_budget=1.0)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
    record = model.forward.budget.last
    assert record.recomputed_ops == 0
    assert len(record.trace.ops) - 1 in [n for n, op in enumerate(record.trace.ops) if op.saves]


def test_a_smaller_budget_holds_less_and_recomputes_more() -> None:
    found = []
    for budget in (0.9, 0.6):
        model = remat.auto_checkpoint(GPT(4, 64, 0.0), memory_budget=budget)
        passes(model, GPT.inputs(4, 64))
        record = model.forward.budget.last
        found.append((record.measured_peak, record.recomputed_ops))
    assert found[0][0] > found[1][0]
    assert found[0][1] < found[1][1]


def test_a_budget_that_is_too_small_says_which_one_works() -> None:
    model = remat.auto_checkpoint(GPT(dropout=0.0), memory_budget=1000)
    with pytest.raises(remat.BudgetTooSmallError, match=r"at least (\d+) bytes") as error:
        model(*GPT.inputs())
    assert all(p.grad is None for p in model.parameters())
    smallest = int(str(error.value).split("at least ")[1].split()[0])
    remat.auto_checkpoint(model, memory_budget=smallest)
    passes(model, GPT.inputs())
    remat.auto_checkpoint(model, memory_budget=smallest - 1)
    with pytest.raises(remat.BudgetTooSmallError):
        model(*GPT.inputs())


def test_the_threshold_is_the_share_that_is_planned_for() -> None:
    model, inputs = GPT(4, 64, 0.0), GPT.inputs(4, 64)
    plain = remat.memory_report(model, *inputs).peak_bytes
    with remat.CheckpointManager(max_memory_mb=plain / 1e6, memory_threshold=0.7) as manager:
        passes(model, inputs)
    assert manager.last_pass.plan.peak_bytes <= 0.7 * plain
    tight = remat.CheckpointManager(max_memory_mb=plain / 1e7, memory_threshold=0.5)
    with pytest.raises(remat.BudgetTooSmallError, match="memory_threshold"), tight:
        passes(model, inputs)


class Several(nn.Module):
    """Several inputs, keywords, and results in a dataclass and a dict."""

    @dataclasses.dataclass
    class Output:
        loss: torch.Tensor
        parts: dict

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, *, mask=None, scale: float = 1.0):
        a = torch.tanh(self.first(x["a"])) * scale
        b = torch.sin(self.second(a + x["b"]))
        parts = {"a": a, "b": [b]}
        loss = (b.exp() if mask is None else b * mask).sum()
        return Several.Output(loss, parts)


@pytest.mark.parametrize("is_training", [True, False])
def test_structured_inputs_and_outputs(is_training) -> None:
    plain = Several().train(is_training)
    model = remat.auto_checkpoint(copy.deepcopy(plain), memory_budget=0.9)
    x = {"a": torch.randn(64, 8), "b": torch.randn(64, 8, requires_grad=True)}
    for options in ({}, {"scale": 2.0}, {"mask": torch.ones(64, 8)}, {}, {}):
        results = []
        for each in (plain, model):
            each.zero_grad()
            out = each(x, **options)
            (out.loss + out.parts["a"].square().sum() + out.parts["b"][0].sum()).backward()
            results.append([p.grad for p in each.parameters()] + [x["b"].grad.clone()])
            x["b"].grad = None
        assert_same([results[0]], [results[1]])


def test_gradient_accumulation_and_two_models_in_one_step() -> None:
    plain, inputs = GPT(dropout=0.0), GPT.inputs()
    a, b = (remat.auto_checkpoint(copy.deepcopy(plain), memory_budget=0.7) for _ in range(2))
    c, d = copy.deepcopy(plain), copy.deepcopy(plain)
    for _ in range(3):
        for one, other in ((a, b), (c, d)):
            (one(*inputs) * other(*inputs)).backward()
            one(*inputs).backward()
    found, expected = (
        [p.grad for m in (a, b) for p in m.parameters()],
        [p.grad for m in (c, d) for p in m.parameters()],
    )
    assert_same([found], [expected])


def test_marks_and_scopes_inside_of_a_manager_are_obeyed(replayed) -> None:
    w1, w2, w3 = (torch.randn(32, 32, requires_grad=True) for _ in range(3))
    x = torch.randn(64, 32)

    def program():
        a = remat.mark_checkpoint(torch.tanh(x @ w1))
        with remat.CheckpointScope("part"):
            b = torch.cos(torch.sin(torch.exp(a @ w2)))
        return torch.asinh(b @ w3).sum()

    expected = torch.autograd.grad(program(), [w1, w2, w3])
    replayed.clear()
    with remat.CheckpointManager(memory_budget="1GB"):
        for _ in range(3):
            replayed.clear()
            found = torch.autograd.grad(program(), [w1, w2, w3])
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            assert replayed["exp"] == replayed["sin"] == 1  # the scope says so
            assert replayed["tanh"] == replayed["asinh"] == 0


def test_training_inside_of_a_manager_is_training() -> None:
    def train(model, manager) -> list[float]:
        steps = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        with manager:
            for _ in range(5):
                loss = model(*model.inputs())
                steps.zero_grad()
                loss.backward()
                steps.step()
                losses.append(loss.item())
        return losses

    plain = ResNet()
    model = copy.deepcopy(plain)
    manager = remat.CheckpointManager(memory_budget=0.7)
    expected = train(plain, remat.CheckpointManager(auto_checkpoint=False))
    assert train(model, manager) == expected
    assert manager.last_pass.followed


# -- scopes and nodes of a manager -----------------------------------------------------------------


def held_scopes() -> list[remat.CheckpointScope]:
    scopes = []
    x = torch.randn(100, requires_grad=True)
    for size in (1, 3, 2):
        scope = remat.CheckpointScope(f"scope {size}", use_recomputation=False)
        with scope:
            y = (x.repeat(size) * 2).sin().exp()
        scopes.append(scope)
        scope.result = y.sum()  # keeps the graph alive
    return scopes


def test_nodes_are_chosen_by_size_until_the_rest_fits() -> None:
    scopes = held_scopes()
    nodes = [scope.nodes[0] for scope in scopes]
    sizes = [sum(a.nbytes for a in node.saved_activations) for node in nodes]
    limit = sizes[0] + sizes[2]
    manager = remat.CheckpointManager(memory_budget=limit)
    for scope in scopes:
        manager.register_scope(scope)
    assert [manager.should_checkpoint(node) for node in nodes] == [False, True, False]
    assert manager.selective_checkpointing(nodes) == [nodes[1]]
    assert nodes[1].is_checkpoint
    assert not nodes[1].saved_activations
    assert manager.selective_checkpointing(nodes) == []
    for scope in scopes:
        scope.result.backward(retain_graph=True)


def test_all_that_registered_scopes_hold_is_dropped() -> None:
    scopes = held_scopes()
    manager = remat.CheckpointManager(auto_checkpoint=False)
    manager.register_scope(scopes[0])
    manager.register_scope(scopes[1])
    manager.unregister_scope(scopes[1])
    manager.clear_all_checkpoints()
    held = [bool(scope.nodes[0].saved_activations) for scope in scopes]
    assert held == [False, True, True]
    with pytest.raises(ValueError, match="must be registered"):
        manager.unregister_scope(scopes[1])


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_memory_mb": 1, "memory_budget": 1}, ValueError, "not both"),
        ({"max_memory_mb": 0}, ValueError, "max_memory_mb must be a positive number, got 0"),
        ({"max_memory_mb": "1"}, ValueError, "max_memory_mb must be a positive number"),
        ({"memory_budget": "lots"}, ValueError, "memory_budget must be a number with a unit"),
        ({"memory_budget": 1.5}, ValueError, "fraction"),
        ({"memory_budget": 0}, ValueError, "memory_budget must be at least 1 byte"),
        ({"memory_budget": 1, "memory_threshold": 0}, ValueError, "memory_threshold"),
        ({"memory_budget": 1, "memory_threshold": 2}, ValueError, "memory_threshold"),
        ({"memory_budget": 1, "auto_checkpoint": "no"}, TypeError, "auto_checkpoint"),
    ],
)
def test_bad_options_of_a_manager(options, error, says) -> None:
    with pytest.raises(error, match=says):
        remat.CheckpointManager(**options)


def test_a_budget_that_is_given_later() -> None:
    """As in document 002: `manager = CheckpointManager()`, and then its attributes."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    x = torch.randn(512, 64)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    manager = remat.CheckpointManager()
    with pytest.raises(ValueError, match="needs a budget"), manager:
        pass
    manager.auto_checkpoint, manager.memory_threshold, manager.max_memory_mb = True, 0.8, 2
    with manager:
        for megabytes in (2.0, 1.2, 2.0):
            manager.max_memory_mb = megabytes
            for _ in range(3):
                step()
            assert manager.last_pass.budget == megabytes * 1e6
            assert manager.last_pass.followed
            assert manager.last_pass.plan.peak_bytes <= 0.8 * megabytes * 1e6
            assert manager.last_pass.measured_peak <= 0.9 * megabytes * 1e6
        assert "1.6 MB" in repr(manager)
    with pytest.raises(ValueError, match="not both"):
        manager.memory_budget = 0.5
    manager.max_memory_mb = None
    manager.memory_budget = 0.9
    with manager:
        step()
    for name, wrong in (("max_memory_mb", 0), ("memory_budget", "lots"), ("memory_threshold", 2)):
        with pytest.raises(ValueError, match=name):
            setattr(manager, name, wrong)


@pytest.mark.parametrize(
    ("model", "budget", "error", "says"),
    [
        (lambda x: x, 0.5, TypeError, r"model must be a torch.nn.Module"),
        (nn.Linear(1, 1), "lots", ValueError, "memory_budget"),
        (nn.Linear(1, 1), 0, ValueError, "memory_budget must be at least 1 byte"),
        (nn.DataParallel(nn.Linear(1, 1)), 0.5, remat.UnsupportedError, "inside of DataParallel"),
    ],
)
def test_bad_arguments_of_auto_checkpoint(model, budget, error, says) -> None:
    with pytest.raises(error, match=says):
        remat.auto_checkpoint(model, budget)


def test_a_manager_that_is_entered_twice_or_inside_of_a_region() -> None:
    manager = remat.CheckpointManager(memory_budget="1MB")
    with manager, pytest.raises(RuntimeError, match="entered already"):
        manager.__enter__()
    with pytest.raises(RuntimeError, match="not entered"):
        manager.__exit__(None, None, None)

    def inside(x):
        with pytest.raises(remat.UnsupportedError, match="put it around them"):
            manager.__enter__()
        return x.sin().exp()

    remat.checkpoint(inside, torch.ones(3, requires_grad=True)).sum().backward()


def test_an_error_inside_of_a_manager_leaves_nothing_behind() -> None:
    model = GPT(dropout=0.0)
    manager = remat.CheckpointManager(memory_budget="1GB")

    def fail() -> None:
        with manager:
            model(*model.inputs())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with manager:
        passes(model, model.inputs())


# -- looking ---------------------------------------------------------------------------------------


def test_a_frontier_leaves_the_model_as_it_was() -> None:
    model = ResNet()
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    curve = remat.frontier(model, *model.inputs())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    peaks = [point.peak_bytes for point in curve.points]
    costs = [point.extra_seconds for point in curve.points]
    assert peaks == sorted(peaks)
    assert costs == sorted(costs, reverse=True)
    assert curve.points[-1].extra_seconds == 0
    assert curve.slowdown(curve.points[-1]) == 1
    assert "knee" in curve.table()


def test_a_frontier_is_drawn(tmp_path) -> None:
    model = ResNet()
    path = remat.frontier(model, *model.inputs()).plot(tmp_path / "frontier.png")
    assert path.stat().st_size > 1000


def test_a_report_is_drawn(tmp_path) -> None:
    model = ResNet()
    with remat.CheckpointManager(memory_budget=0.7) as manager:
        passes(model, model.inputs())
    assert manager.plot(tmp_path / "budget.png").stat().st_size > 1000
    empty = remat.CheckpointManager(memory_budget=0.7)
    assert "No pass has ended" in empty.report()
    with pytest.raises(remat.RematError, match="no pass has ended"):
        empty.plot(tmp_path / "budget.png")


def test_where_the_memory_goes() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    report = remat.memory_report(model, torch.ones(128, 64))
    by_module = {row.module: row.kept_bytes for row in report.rows}
    assert by_module == {"0": 128 * 256 * 4, "1": 128 * 256 * 4}
    assert report.peak_bytes >= 2 * 128 * 256 * 4
    assert "at the peak" in str(report)


def gated(x: torch.Tensor, steps: int = 0) -> torch.Tensor:
    """Call an op far below the forward pass that called this."""
    return gated(x, steps - 1) if steps else x.sigmoid() * x


class Gate(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated(x, self.steps)


class Block(nn.Module):
    def __init__(self, width: int, steps: int = 0) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, width), Gate(steps), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.gate(self.up(x)))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return gated(x)


@pytest.mark.parametrize("steps", [0, 30])
def test_memory_belongs_to_the_module_that_runs_whatever_its_forward_calls(steps: int) -> None:
    rows = 16  # a gate keeps its input, which the layer before it made, and the sigmoid
    model = Stack(*(Block(32, steps) for _ in range(5)))
    report = remat.memory_report(model, torch.ones(rows, 8))
    found = {row.module: (row.kept_bytes, row.modules) for row in report.rows}
    assert found["blocks.*.gate"] == (5 * rows * 32 * 4 * 2, 5)  # the sigmoid and the product
    assert found["blocks.*.up"] == (5 * rows * 32 * 4, 5)
    assert found["Stack"] == (rows * 8 * 4, 1)
    assert "" not in found
    assert sum(kept for kept, _ in found.values()) == report.trace.saved_bytes
    assert "blocks.*.gate x 5" in str(report)
    assert all(place.split(",")[0] for place, _, _ in report.at_peak)
    assert any("blocks.*.gate x 5, test_budgets.py:" in place for place, _, _ in report.at_peak)


def test_only_blocks_that_do_the_same_are_one_row() -> None:
    widths = [32, 32, 64, 32, 64, 16]
    report = remat.memory_report(Stack(*map(Block, widths)), torch.ones(4, 8))
    found = {row.module: (row.kept_bytes, row.modules) for row in report.rows}
    assert found["blocks.{0-1,3}.up"] == (3 * 4 * 32 * 4, 3)
    assert found["blocks.{2,4}.up"] == (2 * 4 * 64 * 4, 2)
    assert found["blocks.5.up"] == (4 * 16 * 4, 1)


def test_traces_of_a_profiler_know_the_module() -> None:
    model = Stack(Block(32), Block(16))
    with remat.CheckpointProfiler() as profiler, remat.CheckpointScope("stack"):
        loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    (trace,) = profiler.traces
    modules = [op.module for op in trace.ops if "sigmoid" in op.name]
    assert modules == ["blocks.0.gate", "blocks.1.gate", "Stack"]


def test_a_function_without_gradients_has_no_frontier() -> None:
    with pytest.raises(remat.UnsupportedError, match="no gradient"):
        remat.frontier(lambda x: x * 2, torch.ones(3))
    with pytest.raises(TypeError, match="a model or a function"):
        remat.frontier(3, torch.ones(3))


def test_layers_that_are_unfrozen_are_planned_anew() -> None:
    """What fits without recomputation while most layers are frozen need not fit afterwards."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*layers)
    x = torch.randn(512, 32)
    plain = remat.frontier(model, x).plain_peak_bytes
    remat.auto_checkpoint(model, memory_budget=int(0.6 * plain))
    layers_but_the_last = model[:-1].requires_grad_(False)
    for _ in range(4):
        model(x).sum().backward()
    layers_but_the_last.requires_grad_(True)
    with remat.CheckpointProfiler() as profiler:
        for _ in range(2):
            model(x).sum().backward()
    assert profiler.recompute_count() > 0


def _steps_of_segments(manager: remat.CheckpointManager, count: int, **options) -> list:
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
    x, records = torch.randn(512, 64), []
    with manager:
        for _ in range(count):
            h = x
            for block in blocks:
                h = remat.checkpoint(block, h, **options)
            h.square().mean().backward()
            records.append(manager.last_pass)
    return records


def test_plans_know_what_segments_inside_start_from() -> None:
    """Also when a plan holds it, and the pass is planned again."""
    records = _steps_of_segments(remat.CheckpointManager(memory_budget="40MB"), 4)
    for record in records:
        assert record.recomputed_ops == 0
        assert record.measured_peak <= 1.05 * record.plan.peak_bytes


@pytest.mark.parametrize("policy", [remat.policies.save_everything, remat.policies.save_matmuls])
def test_plans_count_what_policies_of_segments_keep(policy) -> None:
    manager = remat.CheckpointManager(memory_budget="40MB")
    for record in _steps_of_segments(manager, 4, policy=policy):
        assert record.measured_peak == pytest.approx(record.plan.peak_bytes, rel=0.1)
    with pytest.raises(remat.BudgetTooSmallError) as caught:
        _steps_of_segments(remat.CheckpointManager(memory_budget="1MB"), 1, policy=policy)
    smallest = caught.value.smallest
    assert smallest is not None
    _steps_of_segments(remat.CheckpointManager(memory_budget=smallest), 2, policy=policy)


@pytest.mark.parametrize("share", [0.8, 0.7, 0.35])
def test_the_budget_that_an_error_names_works_with_a_share(share: float) -> None:
    options = {"memory_threshold": share}
    with pytest.raises(remat.BudgetTooSmallError) as caught:
        _steps_of_segments(remat.CheckpointManager(max_memory_mb=0.1, **options), 1)
    smallest = caught.value.smallest
    (named,) = re.findall(r"pass max_memory_mb=([0-9.]+) or more", str(caught.value))
    assert smallest <= float(named) * 1e6 <= 1.01 * smallest
    for megabytes in (smallest / 1e6, float(named)):
        _steps_of_segments(remat.CheckpointManager(max_memory_mb=megabytes, **options), 2)


def test_writes_to_memory_that_was_there_before_are_no_part_of_a_pass() -> None:
    """Gradients that are set to zero, a moving average of the parameters."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)])
    average = [torch.zeros_like(p) for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x, peaks = torch.randn(256, 256), []
    for writes in (False, True):
        manager = remat.CheckpointManager(memory_budget=0.8)
        with manager:
            for _ in range(3):
                loss = model(x).square().mean()
                if writes:
                    model.zero_grad(set_to_none=False)
                    with torch.no_grad():
                        for mean, parameter in zip(average, model.parameters(), strict=True):
                            mean.mul_(0.9)
                            mean.copy_(parameter)
                loss.backward()
        record = manager.last_pass
        peaks.append((record.plan.plain_peak_bytes, record.plan.peak_bytes, record.measured_peak))
    for without, with_writes in zip(*peaks, strict=True):
        assert with_writes == pytest.approx(without, rel=0.02)


def test_a_budget_that_a_plain_pass_fits_is_taken() -> None:
    """The gradient of what `sum` reads is a view of a scalar, and takes nothing."""
    x = torch.randn(128, 128)
    ws = [torch.randn(128, k * 128, requires_grad=True) for k in (11, 3, 4, 2)]
    with remat.CheckpointManager(memory_budget=3_200_000) as manager:
        for _ in range(3):
            sum(torch.mm(x, w).cos().sum() for w in ws).backward()
    record = manager.last_pass
    assert record.recomputed_ops == 0
    assert record.plan.peak_bytes == record.measured_peak < 3_000_000
