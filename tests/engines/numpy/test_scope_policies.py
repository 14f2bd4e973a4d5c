"""Policies, names, profilers and verify, in scopes and segments on NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import remat

from .oracles import same_bits

X = np.linspace(0.2, 1.4, 16).reshape(4, 4)
LARGE = np.linspace(0.1, 1.0, 100_000)


def layer(x: Any) -> Any:
    hidden = remat.name(np.tanh(x @ x), "hidden")
    return np.sin(hidden @ x) * hidden


def held_by(policy: Any) -> tuple[list[Any], Any]:
    held: list[Any] = []

    def f(x: Any) -> Any:
        with remat.CheckpointScope("layer", policy=policy) as scope:
            y = layer(x)
        held.extend(scope.nodes[0].saved_activations)
        return np.sum(y)

    return held, remat.grad(f)(X)


HIDDEN = np.tanh(X @ X)
PLAIN = remat.grad(lambda x: np.sum(layer(x)))(X)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (remat.policies.save_nothing, []),
        (remat.policies.save_matmuls, [X @ X, HIDDEN @ X]),
        (remat.policies.save_ops("numpy.tanh"), [HIDDEN]),
        (remat.policies.save_names("hidden"), [HIDDEN]),
        (remat.policies.save_below(10), []),
        (lambda op, shapes, nbytes, name: op == "numpy.sin", [np.sin(HIDDEN @ X)]),
        (lambda op, shapes, nbytes, name: shapes[0] == (5, 5) or nbytes > 128, []),
    ],
)
def test_a_policy_says_what_a_scope_holds(policy, expected) -> None:
    held, gradient = held_by(policy)
    assert len(held) == len(expected)
    assert all(any(same_bits(a, b) for b in held) for a in expected)
    assert same_bits(gradient, PLAIN)


def test_a_policy_is_told_shapes_and_bytes() -> None:
    told = {}

    def policy(op: str, shapes: Any, nbytes: int, name: str) -> bool:
        told[op] = shapes, nbytes
        return False

    held_by(policy)
    assert told["numpy.matmul"] == ((X.shape, X.shape, X.shape), X.nbytes)


def test_everything_below_a_size_is_held_if_rules_need_it() -> None:
    held, gradient = held_by(remat.policies.save_below("1MB"))
    assert any(same_bits(a, HIDDEN) for a in held)
    result = np.sin(HIDDEN @ X) * HIDDEN
    assert not any(same_bits(a, result) for a in held)  # no rule needs it
    assert same_bits(gradient, PLAIN)


def test_a_segment_with_a_policy_runs_its_python_once() -> None:
    calls = []

    def counted(x: Any) -> Any:
        calls.append(1)
        return layer(x)

    policy = remat.policies.save_matmuls
    gradient = remat.grad(lambda x: np.sum(remat.checkpoint(counted, x, policy=policy)))(X)
    assert same_bits(gradient, PLAIN)
    assert len(calls) == 1


def test_a_bad_policy_is_refused() -> None:
    def f(x: Any) -> Any:
        return np.sum(remat.checkpoint(layer, x, policy=3))

    with pytest.raises(TypeError, match="policy must be one of"):
        remat.grad(f)(X)


# -- profilers and verify --------------------------------------------------------------------------


def in_scopes(x: Any) -> Any:
    for i in range(4):
        with remat.CheckpointScope(f"step {i}"):
            x = np.tanh(np.sin(x) * 1.1 + np.exp(-x * x))
    return np.sum(x)


def test_a_profiler_counts_regions_and_recomputations() -> None:
    with remat.CheckpointProfiler() as profiler:
        remat.grad(in_scopes)(LARGE)
    assert profiler.checkpoint_count() == 4
    assert profiler.recompute_count() >= 4
    assert profiler.recompute_seconds() > 0
    # A plain pass holds 6 arrays a step at its peak; here there are 4 inputs and one step.
    assert 8 * LARGE.nbytes < profiler.memory_saved() < 20 * LARGE.nbytes
    assert "step 2" in profiler.report()


@pytest.mark.parametrize("f", [in_scopes, lambda x: remat.checkpoint(in_scopes, x)])
def test_a_profiler_changes_no_bits(f: Callable[[Any], Any]) -> None:
    expected = remat.grad(f)(X)
    with remat.CheckpointProfiler():
        assert same_bits(remat.grad(f)(X), expected)


def test_verify_goes_through_scopes() -> None:
    remat.verify(in_scopes, X)


def test_a_scope_inside_asks_only_for_what_is_still_to_be_used() -> None:
    """Backward has gone past `d`, and freed what it takes, when the second scope asks for `a`."""

    def f(x: Any, enabled: bool = True) -> Any:
        a, b = np.sin(x) * 1.0, np.cos(x).reshape(2, 3) * 1.0
        with remat.CheckpointScope("outer", enabled=enabled):
            with remat.CheckpointScope("first", enabled=enabled):
                a = a[1:][:2]
                d = np.cumsum(b, axis=0)
            b = d.swapaxes(0, -1)
            a += 0.1
            with remat.CheckpointScope("second", enabled=enabled):
                np.cumsum(b, axis=0)  # is not used
                a[:] = 0.25
        c = np.stack([b, b * 0.5])
        return sum(np.sum(np.sin(array)) for array in (x, a, b, c, d))

    x = np.linspace(-0.7, 0.9, 6)
    assert same_bits(remat.grad(f)(x), remat.grad(lambda x: f(x, enabled=False))(x))


@pytest.mark.parametrize(
    "policy",
    [
        remat.policies.save_matmuls,
        remat.policies.save_everything,
        remat.policies.save_below(100),
        lambda op_name, shapes, nbytes, name: nbytes > 10,
    ],
    ids=["matmuls", "everything", "below", "own"],
)
@pytest.mark.parametrize("name", ["eigh", "svd", "slogdet"])
def test_policies_decide_about_functions_with_several_results(policy, name) -> None:
    function = getattr(np.linalg, name)

    def program(x):
        return sum(np.sum(part * part) for part in function(x @ x.T)[:2])

    x = np.eye(3) + 0.1 * np.arange(9.0).reshape(3, 3)
    expected = remat.grad(program)(x)
    found = remat.grad(lambda x: remat.checkpoint(program, x, policy=policy))(x)
    np.testing.assert_array_equal(found, expected)

    def in_a_scope(x):
        with remat.CheckpointScope("several", policy=policy):
            return program(x)

    np.testing.assert_array_equal(remat.grad(in_a_scope)(x), expected)
