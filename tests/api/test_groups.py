"""Groups of segments on NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import remat
from remat.watching import watchers

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
        assert len(watchers()) == 1
        return group.checkpoint_fn(np.sin, x) * 2

    np.testing.assert_allclose(
        remat.grad(lambda x: np.sum(group.checkpoint_fn(outer, x)))(X), 2 * np.cos(X)
    )
    assert watchers() == ()


def test_nobody_watches_after_an_error() -> None:
    def fail(x):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        remat.CheckpointGroup().checkpoint_fn(fail, X)
    assert watchers() == ()
