"""Programs as people write them: transformed, they give the same, and hold less."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import remat
from remat import trees

torch = pytest.importorskip("torch")


class RNN(torch.nn.Module):
    """A recurrent network whose forward pass is a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(5, 7)
        self.head = torch.nn.Linear(7, 2)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        h = xs.new_zeros(xs.shape[1], 7)
        outputs = []
        for x in xs:
            h = self.dropout(self.cell(x, h))
            outputs.append(self.head(h))
        return torch.stack(outputs)


class Deep(torch.nn.Module):
    """Unlike layers in a row, some of them frozen, one with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [
                torch.nn.Linear(5, 8),
                torch.nn.Tanh(),
                torch.nn.Linear(8, 6),
                torch.nn.BatchNorm1d(6),
                *(torch.nn.Linear(6, 6) for _ in range(10)),
                torch.nn.Linear(6, 2),
            ]
        )
        self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Indexed(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(len(self.layers)):
            x = self.layers[i](x)
        return x


def run_module(module: torch.nn.Module, given: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    module.zero_grad()
    result = module(given)
    (result**2).sum().backward()
    found = [p.grad for p in module.parameters() if p.grad is not None]
    return [result.detach(), *(g.clone() for g in found), *(b.clone() for b in module.buffers())]


@pytest.mark.parametrize("kind", [RNN, Deep, Indexed])
def test_a_module_does_the_same(kind: type) -> None:
    torch.manual_seed(0)
    plain, checkpointed = kind(), kind()
    checkpointed.load_state_dict(plain.state_dict())
    given = torch.randn(40, 3, 5) if kind is RNN else torch.randn(9, 5)
    assert remat.checkpoint_loops(checkpointed, strict=True) is checkpointed
    with remat.CheckpointProfiler() as profiler:
        found = run_module(checkpointed, given)
    expected = run_module(plain, given)
    assert profiler.checkpoint_count() == 1
    assert checkpointed.state_dict().keys() == plain.state_dict().keys()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_a_forward_that_is_decorated_in_its_class() -> None:
    class Model(Deep):
        forward = remat.checkpoint_loops(Deep.forward, strict=True)

    torch.manual_seed(0)
    plain, model = Deep(), Model()
    model.load_state_dict(plain.state_dict())
    given = torch.randn(9, 5)
    for one, other in zip(run_module(plain, given), run_module(model, given), strict=True):
        assert torch.equal(one, other)


def adaptive_runge_kutta(y, rate, end=4.0, tolerance=1e-4):
    """Heun's method with a step size that follows the error."""
    t, dt, taken = 0.0, 0.1, 0
    trajectory = [y]
    while True:
        k1 = -rate * np.sin(y)
        k2 = -rate * np.sin(y + dt * k1)
        error = float(np.max(np.abs(plain(dt * (k2 - k1) / 2))))
        if error > tolerance:
            dt = dt * 0.7
            continue
        y = y + dt * (k1 + k2) / 2
        t, taken = t + dt, taken + 1
        trajectory.append(y)
        if t >= end:
            break
        dt = min(dt * 1.2, end - t + 1e-12)
    return y + 0.01 * sum(trajectory) + taken


def plain(value):
    while hasattr(value, "_value"):
        value = value._value
    return value


def heat(u, diffusivity, steps=30, inner=4):
    """Explicit steps inside of steps that are stored."""
    trajectory = u[None, :] * np.zeros((steps, 1))
    for n in range(steps):
        for _ in range(inner):
            u = u + diffusivity * (np.roll(u, 1) - 2 * u + np.roll(u, -1))
        trajectory[n] = u
    return np.sum(trajectory**2) + u


def sinkhorn(cost, a, b, tolerance=1e-9):
    """Scaling until the marginals agree."""
    kernel = np.exp(-cost)
    u, v = a * 0 + 1, b * 0 + 1
    for iteration in range(500):  # noqa: B007
        u = a / (kernel @ v)
        v = b / (kernel.T @ u)
        if np.max(np.abs(plain(u * (kernel @ v) - a))) < tolerance:
            break
    return np.sum(u[:, None] * kernel * v[None, :] * cost) + 0 * iteration


def simulate(params, data):
    """A training loop unrolled, to be differentiated by its learning rate."""
    rate, w = params
    for x in data:
        error = w @ x - np.sum(x)
        w = w - rate * error * x
    return np.sum((w - 1) ** 2)


RNG = np.random.default_rng(3)
CASES = {
    "runge-kutta": (adaptive_runge_kutta, (RNG.normal(size=4), np.array(1.3)), (0, 1)),
    "heat": (heat, (RNG.normal(size=12), np.array(0.2)), (0, 1)),
    "sinkhorn": (
        sinkhorn,
        (RNG.random((5, 4)), np.full(5, 0.2), np.full(4, 0.25)),
        (0, 1, 2),
    ),
    "training": (
        simulate,
        ((np.array(0.1), RNG.normal(size=3)), RNG.normal(size=(40, 3)) * 0.5),
        (0, 1),
    ),
}


@pytest.mark.parametrize(("function", "args", "wrt"), CASES.values(), ids=CASES.keys())
def test_a_numpy_program_does_the_same(function, args, wrt) -> None:
    value, gradients = remat.value_and_grad(function, wrt=wrt)(*args)
    transformed = remat.checkpoint_loops(function, strict=True)
    with remat.CheckpointProfiler() as profiler:
        other, found = remat.value_and_grad(transformed, wrt=wrt)(*args)
    assert profiler.checkpoint_count() >= 1
    np.testing.assert_array_equal(value, other)
    flat = [leaf for each in (gradients, found) for leaf in trees.flatten(each)[0]]
    half = len(flat) // 2
    for one, two in zip(flat[:half], flat[half:], strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-11, atol=1e-13)


def meta_learning(start, data, rate):
    """Inner steps of gradient descent, differentiated by where they start and by their rate."""
    w = start
    for x, y in data:
        loss = ((x @ w - y) ** 2).mean()
        (slope,) = torch.autograd.grad(loss, w, create_graph=True)
        w = w - rate * slope
    return ((w - 1) ** 2).sum()


def test_gradients_inside_of_steps() -> None:
    torch.manual_seed(0)
    data = [(torch.randn(6, 3), torch.randn(6)) for _ in range(20)]
    start = torch.randn(3, requires_grad=True)
    rate = torch.tensor(0.05, requires_grad=True)
    expected = torch.autograd.grad(meta_learning(start, data, rate), [start, rate])
    transformed = remat.checkpoint_loops(meta_learning, strict=True)
    with remat.CheckpointProfiler() as profiler:
        found = torch.autograd.grad(transformed(start, data, rate), [start, rate])
    assert profiler.checkpoint_count() == 1
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-7)


def rnn_model(x, W, b):
    state = x
    for i in range(1000):  # noqa: B007  This loop will be automatically checkpointed
        state = np.tanh(state @ W + b)
    return state


def test_the_example_of_the_guide_holds_less_than_six_percent() -> None:
    rng = np.random.default_rng(0)
    args = np.zeros((16, 64)), rng.normal(size=(64, 64)) * 0.01, rng.normal(size=64) * 0.01

    def peak(gradient):
        gradient(*args)
        tracemalloc.start()
        try:
            result = gradient(*args)
            return tracemalloc.get_traced_memory()[1], result
        finally:
            tracemalloc.stop()

    whole, expected = peak(remat.grad(rnn_model, wrt=(0, 1, 2)))
    less, found = peak(remat.grad_with_checkpointing(rnn_model, wrt=(0, 1, 2), num_checkpoints=31))
    assert less < 0.06 * whole
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)
