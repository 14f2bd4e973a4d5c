"""torch.compile: compiled parts inside of a region, and segments inside of compiled code."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import remat

from .oracles import APIS, assert_same, outcome, plain

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x):
        h = F.relu(self.norm(self.first(x)), inplace=True)
        return self.second(h).sin() + x


def program(run, net, x):
    """Compile a submodule on its own; the region is not compiled."""
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)

    def f(x):
        h = (x * 2).sin()
        h = compiled(h)
        return (h * h).exp().sin()

    return run(f, x), run(f, x.cos())


def inputs():
    torch.manual_seed(0)
    return Net(), torch.randn(4, 6).requires_grad_()


@pytest.mark.parametrize("api", ["segment", "scope", "group", "small"])
def test_a_compiled_part_inside_of_a_region(api) -> None:
    """The same compiled code runs without remat: outputs, gradients and buffers are the same."""
    made = inputs()
    expected = outcome(program, plain, copy.deepcopy(made))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = outcome(program, APIS[api], copy.deepcopy(made))
    assert_same(found, expected)


@pytest.mark.slow
def test_inductor_inside_of_a_region() -> None:
    made = inputs()

    def with_inductor(run, net, x):
        compiled = torch.compile(net, fullgraph=True)
        return run(lambda x: (compiled((x * 2).sin()) * x).exp(), x)

    expected = outcome(with_inductor, plain, copy.deepcopy(made))
    found = outcome(with_inductor, remat.checkpoint, copy.deepcopy(made))
    assert_same(found, expected)


def test_a_compiled_part_stays_compiled() -> None:
    """It is compiled once, whether a region is open or not."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def part(x):
        return (x * 2).sin()

    x = torch.randn(3).requires_grad_()
    part(x).sum().backward()
    for _ in range(3):
        remat.checkpoint(lambda x: part(x).exp() * x, x).sum().backward()
    assert len(graphs) == 1


# -- segments inside of compiled code --------------------------------------------------------------


def layer(x, w):
    return ((x @ w).sin() * x).tanh()


SEGMENTS = {
    "call": lambda x, w: remat.checkpoint(layer, x, w),
    "wrapper": remat.checkpoint(layer),
    "no random state": lambda x, w: remat.checkpoint(layer, x, w, preserve_rng_state=False),
    "as in torch": lambda x, w: remat.checkpoint(layer, x, w, use_reentrant=False),
    "adaptive": lambda x, w: remat.adaptive_checkpoint(layer, x, w, threshold="1KB"),
    "sequence": lambda x, w: remat.checkpoint_segment(lambda xs: layer(*xs), [x, w]),
}


@pytest.mark.parametrize("form", SEGMENTS)
def test_a_segment_inside_of_compiled_code(form) -> None:
    segment = SEGMENTS[form]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(x, w):
        return segment(segment(x * 2, w), w).sum()

    x, w = torch.randn(4, 6).requires_grad_(), torch.randn(6, 6).requires_grad_()
    found = torch.autograd.grad(f(x, w), (x, w))
    expected = torch.autograd.grad(layer(layer(x * 2, w), w).sum(), (x, w))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_the_compiler_recomputes_a_segment() -> None:
    """The graph for the way back has the segment's sine in it: it was not held."""
    graphs = []

    def backend(graph, example_inputs):
        from torch._dynamo.backends.common import aot_autograd  # noqa: PLC0415
        from torch._functorch.partitioners import (  # noqa: PLC0415
            min_cut_rematerialization_partition,
        )

        def note(graph, example_inputs):
            graphs.append(graph)
            return graph.forward

        compiler = aot_autograd(
            fw_compiler=note,
            bw_compiler=note,
            partition_fn=min_cut_rematerialization_partition,
        )
        return compiler(graph, example_inputs)

    @torch.compile(backend=backend, fullgraph=True)
    def f(x, w):
        return remat.checkpoint(layer, x, w).sum()

    x, w = torch.randn(4, 6).requires_grad_(), torch.randn(6, 6).requires_grad_()
    f(x, w).backward()
    forward, backward = graphs
    assert "sin" in backward.code
    held = len(forward.graph.output_node().args[0]) - 1
    assert held <= 2  # the inputs, nothing of what lies between


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("inside", "CheckpointScope does not work inside of torch.compile"),
        # Before PyTorch 2.15 the compiler is first.
        (
            "outside",
            "does not (know how to enter a `CheckpointScope`|work inside of torch.compile)",
        ),
    ],
)
def test_a_scope_inside_of_compiled_code_is_refused(made, says) -> None:
    outside = remat.CheckpointScope("scope")

    @torch.compile(backend="eager", fullgraph=True)
    def f(x):
        with outside if made == "outside" else remat.CheckpointScope("scope"):
            return (x * 2).sin()

    with pytest.raises(Exception, match=says):
        f(torch.randn(3).requires_grad_())


def test_a_scope_between_compiled_parts() -> None:
    """Where the compiler may break its graph, the scope runs as if nothing were compiled."""

    @torch.compile(backend="eager")
    def f(x):
        h = x * 2
        with remat.CheckpointScope("scope"):
            h = (h * 3).sin()
        return h.exp()

    x = torch.randn(3).requires_grad_()
    with ThreadPoolExecutor(1) as pool:  # where nothing that is left behind harms other tests
        y = pool.submit(f, x).result(60)
        assert pool.submit(_get_current_dispatch_mode_stack).result(60) == []
    y.sum().backward()
    (expected,) = torch.autograd.grad((x * 2 * 3).sin().exp().sum(), x)
    assert torch.equal(x.grad, expected)


def test_a_segment_with_a_break_of_the_graph_in_it() -> None:
    def inner(x):
        h = (x * 2).sin()
        torch._dynamo.graph_break()
        return h.exp() * h

    @torch.compile(backend="eager")
    def f(x):
        return remat.checkpoint(inner, x * 3).cos()

    x = torch.randn(3).requires_grad_()
    with ThreadPoolExecutor(1) as pool:
        y = pool.submit(f, x).result(60)
        assert pool.submit(_get_current_dispatch_mode_stack).result(60) == []
    y.sum().backward()
    (expected,) = torch.autograd.grad(inner(x * 3).cos().sum(), x)
    assert torch.equal(x.grad, expected)


def test_a_scope_around_compiled_code() -> None:
    net, x = inputs()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with remat.CheckpointScope("around"):
        y = compiled(x).exp()
    y.sum().backward()
    assert x.grad is not None


def test_a_module_compiled_in_place_inside_of_a_region() -> None:
    net, x = inputs()
    copied, y = copy.deepcopy(net), x.detach().clone().requires_grad_()
    copied.second.compile(backend="aot_eager")
    net.second.compile(backend="aot_eager")
    net(x).exp().sum().backward()
    remat.checkpoint(lambda x: copied(x).exp(), y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert int(copied.norm.num_batches_tracked) == 1


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_scope_in_compiled_code_under_a_profiler(monkeypatch) -> None:
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)

    @torch.compile(backend="eager")
    def f(x):
        with remat.CheckpointScope("scope"):
            return (x * 3).exp().sin()

    x = torch.randn(3).requires_grad_()
    with remat.CheckpointProfiler() as profiler:
        f(x).sum().backward()
    gc.collect()
    assert ignored == []
    assert profiler.checkpoint_count() == 1
    (expected,) = torch.autograd.grad((x * 3).exp().sin().sum(), x)
    assert torch.equal(x.grad, expected)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_the_backward_pass_of_an_eager_region_under_compiled_autograd() -> None:
    x = torch.randn(3).requires_grad_()
    y = remat.checkpoint(lambda x: (x * 3).exp().sin(), x)

    @torch.compile(backend="eager")
    def backward(y):
        y.sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        backward(y)
    (expected,) = torch.autograd.grad((x * 3).exp().sin().sum(), x)
    assert torch.allclose(x.grad, expected)


# -- loops in compiled code ------------------------------------------------------------------------


def compiled_loop(step, x):
    return remat.checkpointed_loop(step, x * 2, 10, 3)[0] * 2


def compiled_scan(step, x):
    final, ys = remat.checkpointed_scan(lambda s, y: (step(s) * y, s), x * 2, x, 3)
    return final + ys.sum() * 2


def compiled_while(step, x):
    return remat.checkpointed_while(lambda s: s.norm() > 0.5, step, x * 2, memory_budget="1MB")[0]


LOOPS = [compiled_loop, compiled_scan, compiled_while]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_in_compiled_code_runs_uncompiled(loop, backend) -> None:
    """The graph breaks there, and what it leaves is what it leaves without the compiler."""
    seen = []

    def run(f):
        x, w = torch.tensor([0.8, 0.5, 0.9], requires_grad=True), nn.Parameter(torch.tensor(0.7))

        def step(s):
            seen.append(torch.compiler.is_compiling())
            return (s * w).sin()

        y = f(loop)(step, x)
        y.sum().backward()
        return y.detach(), x.grad, w.grad

    found = run(lambda loop: torch.compile(loop, backend=backend))
    expected = run(lambda loop: loop)
    assert all(map(torch.equal, found, expected))
    assert not any(seen)
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_where_the_graph_must_not_break(loop) -> None:
    compiled = torch.compile(loop, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(torch.sin, torch.ones(3))
