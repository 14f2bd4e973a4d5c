"""Groups of segments on NumPy."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

import remat
from remat.observers import observers

X = np.array([1.0, 2.0, 3.0])


def three(x, y, *, scale=1.0):
    return np.sin(x) * scale, {"sum": x + y}, [y * y]


def test_several_outputs_have_the_gradients_of_the_function() -> None:
    group = remat.CheckpointGroup()

    def loss(run):
        def f(x, y):
            a, b, c = run(three, x, y, scale=2.0)
            return np.sum(a * b["sum"] * c[0])

        return f

    found = remat.grad(loss(group.checkpoint_fn), wrt=(0, 1))(X, X + 1)
    expected = remat.grad(loss(lambda f, *args, **kwargs: f(*args, **kwargs)), wrt=(0, 1))(X, X + 1)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert group.calls == 1


def test_a_group_counts_its_calls() -> None:
    group = remat.CheckpointGroup("counted")
    other = remat.CheckpointGroup("other")
    for _ in range(3):
        group.checkpoint_fn(np.sin, X)
    assert (group.calls, other.calls) == (3, 0)
    assert group.name == "counted"
    assert "counted" in repr(group)


def test_a_group_decorates() -> None:
    group = remat.CheckpointGroup()

    @group.checkpoint_fn
    def named(x):
        """Say something."""
        return x * 2

    np.testing.assert_array_equal(named(X), X * 2)
    assert group.calls == 1
    assert (named.__name__, named.__doc__) == ("named", "Say something.")


def test_segments_of_a_group_may_be_nested() -> None:
    group = remat.CheckpointGroup()

    def outer(x):
        assert len(observers()) == 1
        return group.checkpoint_fn(np.sin, x) * 2

    np.testing.assert_allclose(
        remat.grad(lambda x: np.sum(group.checkpoint_fn(outer, x)))(X), 2 * np.cos(X)
    )
    assert observers() == ()


def test_no_observer_is_left_after_an_error() -> None:
    def fail(x):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        remat.CheckpointGroup().checkpoint_fn(fail, X)
    assert observers() == ()


def _double(x):
    return np.exp(x) * 2


def test_a_group_keeps_nothing_of_its_calls() -> None:
    """It may count for the whole of a training."""
    group = remat.CheckpointGroup("layers")

    def run(calls: int) -> None:
        for _ in range(calls):
            remat.grad(lambda x: np.sum(group.checkpoint_fn(_double, x)))(np.tile(X, 100))

    assert grown_bytes(run, calls=600) < 100 * 600
    assert group.calls == group.recompute_count() == 1200


def test_a_group_keeps_nothing_of_its_calls_on_pytorch() -> None:
    torch = pytest.importorskip("torch")
    group = remat.CheckpointGroup("layers")
    x = torch.ones(3, requires_grad=True)

    def run(calls: int) -> None:
        for _ in range(calls):
            group.checkpoint_fn(lambda x: x.exp() * 2, x).sum().backward()

    assert grown_bytes(run, calls=2000) < 100 * 2000  # the trace of a call takes 1000


def grown_bytes(run, *, calls: int) -> int:
    """Return by how much the memory of Python grows in some calls, after as many others."""
    run(calls)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        run(calls)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
