"""Scopes, marks and single arrays on NumPy: the bits of a plain gradient, in less memory."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.extend import defvjp, primitive

import remat
from remat.engines.numpy.recording import rule_templates

from .every_function import functions, scope_complaints
from .oracles import same_bits
from .random_programs import IN_PLACE, OUT_OF_PLACE, SCALARS, VIEWS, compiled, draw, with_scopes

X = np.linspace(0.2, 1.4, 12).reshape(3, 4)
LARGE = np.linspace(0.1, 1.0, 100_000)


def scope(name: str = "part", **options: Any) -> remat.CheckpointScope:
    return remat.CheckpointScope(name, **options)


def peak_and_gradient(f: Callable[[Any], Any], x: Any) -> tuple[int, Any]:
    tracemalloc.start()
    try:
        gradient = remat.grad(f)(x)
        return tracemalloc.get_traced_memory()[1], gradient
    finally:
        tracemalloc.stop()


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", functions())
def test_every_derivative_rule_gives_the_same_bits_in_a_scope(name: str) -> None:
    assert scope_complaints(name) == ()


@pytest.mark.parametrize("name", functions())
def test_every_derivative_rule_can_be_made_again(name: str, monkeypatch) -> None:
    """As for arrays that are large: what a rule has computed for itself is not held."""
    monkeypatch.setattr(rule_templates, "SMALL", -1)
    scope_complaints.cache_clear()
    try:
        assert scope_complaints(name) == ()
    finally:
        scope_complaints.cache_clear()


ARRAYS = OUT_OF_PLACE + IN_PLACE + VIEWS


@pytest.mark.filterwarnings("ignore::remat.RematWarning")  # scopes around plain numbers
@pytest.mark.parametrize("seed", range(150))
def test_random_programs_with_scopes_give_the_bits_of_plain_ones(seed: int) -> None:
    source = draw(seed, ARRAYS + SCALARS)
    start = np.linspace(-0.7, 0.9, 6)
    try:
        plain = remat.value_and_grad(compiled(source))(start.copy())
    except remat.UnsupportedError:
        return
    changed = with_scopes(seed, source)
    found = remat.value_and_grad(compiled(changed))(start.copy())
    assert all(map(same_bits, found, plain)), changed


def step(h: Any) -> Any:
    return np.tanh(np.sin(h) * 1.1 + np.exp(-h * h))


def steps(h: Any, count: int, **options: Any) -> Any:
    for i in range(count):
        with scope(f"step {i}", **options):
            h = step(h)
    return np.sum(h)


@pytest.mark.parametrize("options", [{}, {"use_recomputation": False}, {"enabled": False}])
def test_steps_in_scopes(options) -> None:
    found = remat.grad(lambda x: steps(x, 5, **options))(X)
    assert same_bits(found, remat.grad(lambda x: steps(x, 5, enabled=False))(X))


def test_nested_scopes_give_the_same_bits() -> None:
    def f(x: Any, enabled: bool = True) -> Any:
        with scope("outer", enabled=enabled):
            h = np.exp(x) * 0.5
            with scope("inner", enabled=enabled):
                h = np.sin(h) * h
                with scope("innermost", enabled=enabled):
                    h = np.cos(h) * x
            with scope("second", enabled=enabled):
                h = np.tanh(h * x) + h
            return np.sum(h * np.sin(h))

    assert same_bits(remat.grad(f)(X), remat.grad(lambda x: f(x, enabled=False))(X))


def test_inner_scopes_are_recomputed_once_each() -> None:
    """The outer region computes all inputs of inner ones in one go: no op runs more than thrice."""
    runs = []

    @primitive
    def counted(x: Any) -> Any:
        runs.append(1)
        return np.sin(x)

    defvjp(counted, lambda ans, x: lambda g: g * anp.cos(x))

    def f(x: Any) -> Any:
        with scope("outer"):
            for i in range(8):
                with scope(f"inner {i}"):
                    x = counted(x) * x
        return np.sum(x)

    remat.grad(f)(X)
    assert 8 + 7 <= len(runs) <= 3 * 8


def test_an_op_that_is_not_needed_is_not_run_again() -> None:
    runs = []

    @primitive
    def counted(x: Any) -> Any:
        runs.append(1)
        return x * 2.0

    defvjp(counted, lambda ans, x: lambda g: g * 2.0)

    def f(x: Any) -> Any:
        with scope():
            return np.sum(counted(np.sin(x)))

    assert same_bits(remat.grad(f)(X), 2.0 * np.cos(X))
    assert len(runs) == 1


def test_second_derivatives_go_through_a_scope() -> None:
    def f(x: Any, enabled: bool = True) -> Any:
        with scope(enabled=enabled):
            return np.sum(np.sin(x * x) * x)

    def slope(enabled: bool) -> Any:
        return remat.grad(lambda x: np.sum(remat.grad(lambda y: f(y, enabled))(x) ** 2))(X)

    assert same_bits(slope(True), slope(False))


def test_a_segment_and_a_loop_inside_of_a_scope_and_around_one() -> None:
    def inner(x: Any) -> Any:
        with scope("inside"):
            return np.sin(np.exp(-x) * x)

    def f(x: Any) -> Any:
        with scope("around"):
            h = np.cos(x)
            h = remat.checkpoint(inner, h)
            h = remat.checkpointed_loop(lambda s: inner(s) * 1.1, h * h, 4)[0]
            return np.sum(h * np.cos(h))

    def plain(x: Any) -> Any:
        h = np.cos(x)
        h = np.sin(np.exp(-h) * h)
        h = h * h
        for _ in range(4):
            h = np.sin(np.exp(-h) * h) * 1.1
        return np.sum(h * np.cos(h))

    assert same_bits(remat.grad(f)(X), remat.grad(plain)(X))


def test_python_runs_once_and_random_numbers_are_drawn_once() -> None:
    calls = []

    def f(x: Any, rng: Any, enabled: bool = True) -> Any:
        with scope(enabled=enabled):
            calls.append(1)
            h = np.sin(x) * rng.random(x.shape) * np.random.random(x.shape)
            return np.sum(np.exp(h) * (rng.random(x.shape) > 0.5))

    def differentiate(enabled: bool) -> Any:
        np.random.seed(3)
        return remat.grad(lambda x: f(x, np.random.default_rng(1), enabled))(X), np.random.random()

    found, plain = differentiate(True), differentiate(False)
    assert len(calls) == 2
    assert same_bits(found[0], plain[0])
    assert found[1] == plain[1]


# -- memory ----------------------------------------------------------------------------------------


def test_memory_falls_and_is_freed_as_backward_goes() -> None:
    plain, expected = peak_and_gradient(lambda x: steps(x, 16, enabled=False), LARGE)
    found, gradient = peak_and_gradient(lambda x: steps(x, 16), LARGE)
    assert same_bits(gradient, expected)
    # 16 inputs of steps, and one step: some 8 arrays.
    assert found < 26 * LARGE.nbytes
    assert found < 0.5 * plain


def test_nothing_is_left_when_backward_is_done() -> None:
    remat.grad(lambda x: steps(x, 4))(LARGE)
    gc.collect()
    tracemalloc.start()
    try:
        gradient = remat.grad(lambda x: steps(x, 4))(LARGE)
        left = tracemalloc.get_traced_memory()[0] - gradient.nbytes
    finally:
        tracemalloc.stop()
    assert left < 0.2 * LARGE.nbytes


def test_reference_counting_is_enough() -> None:
    gc.collect()
    gc.disable()
    try:
        with_cycles = peak_and_gradient(lambda x: steps(x, 16), LARGE)[0]
    finally:
        gc.enable()
    assert with_cycles < 26 * LARGE.nbytes


def test_use_recomputation_false_holds_what_a_plain_pass_holds() -> None:
    plain, _ = peak_and_gradient(lambda x: steps(x, 8, enabled=False), LARGE)
    found, _ = peak_and_gradient(lambda x: steps(x, 8, use_recomputation=False), LARGE)
    assert 0.8 * plain < found < 1.1 * plain


# -- what a program may write to -------------------------------------------------------------------


def test_a_small_plain_array_may_be_written_to_later() -> None:
    def f(x: Any) -> Any:
        weights = np.ones(x.shape)
        with scope():
            h = np.sin(x * weights) * weights
            weights *= 2.0
            h = h * weights
            weights += 1.0
        return np.sum(h)

    assert same_bits(remat.grad(f)(X), np.cos(X) * 2.0)


def test_a_large_plain_array_that_is_written_to_is_an_error() -> None:
    def f(x: Any) -> Any:
        weights = np.ones(x.shape)
        with scope():
            h = np.sin(x * weights)
        weights[3] = 2.0
        return np.sum(h)

    with pytest.raises(remat.ModifiedInputError, match=r"numpy\.multiply has read"):
        remat.grad(f)(LARGE)


def test_an_exchange_of_entries_is_seen() -> None:
    def f(x: Any) -> Any:
        weights = x + 0.0 if not hasattr(x, "_value") else LARGE.copy()
        with scope():
            h = np.sin(x * weights)
        weights[[3, 4]] = weights[[4, 3]]
        return np.sum(h)

    with pytest.raises(remat.ModifiedInputError):
        remat.grad(f)(LARGE)


def test_a_list_of_indices_may_be_changed_later() -> None:
    def f(x: Any) -> Any:
        rows = [0, 2]
        with scope():
            h = np.exp(np.sin(x)[rows])
            rows[0] = 1
        return np.sum(h)

    plain = remat.grad(lambda x: np.sum(np.exp(np.sin(x)[[0, 2]])))(X)
    assert same_bits(remat.grad(f)(X), plain)


def test_a_primitive_that_gives_something_else_is_an_error() -> None:
    numbers = iter(range(1, 100))

    @primitive
    def impure(x: Any) -> Any:
        return x * next(numbers)

    defvjp(impure, lambda ans, x: lambda g: g * ans)

    def f(x: Any) -> Any:
        with scope():
            return np.sum(np.sin(impure(x)))

    with pytest.raises(remat.RecomputeMismatchError, match=r"numpy\.impure"):
        remat.grad(f)(X)


# -- single arrays ---------------------------------------------------------------------------------


def test_a_marked_array_is_held_and_not_computed_again() -> None:
    runs = []

    @primitive
    def counted(x: Any) -> Any:
        runs.append(1)
        return np.sin(x)

    defvjp(counted, lambda ans, x: lambda g: g * anp.cos(x))
    held = []

    def f(x: Any) -> Any:
        with scope() as part:
            h = remat.mark_checkpoint(counted(np.exp(x)))
            assert remat.is_checkpoint(h)
            assert not remat.is_checkpoint(x)
            y = np.cos(h) * h
        held.extend(part.nodes[0].saved_activations)
        return np.sum(y)

    remat.grad(f)(X)
    assert len(runs) == 1
    assert len(held) == 1
    assert same_bits(held[0], np.sin(np.exp(X)))


def test_marks_outside_of_a_differentiated_function_are_remembered() -> None:
    array, other = np.ones(3), np.ones(3)
    assert remat.mark_checkpoint(array) is array
    assert remat.is_checkpoint(array)
    assert not remat.is_checkpoint(other)


@pytest.mark.parametrize(
    "drop", [remat.checkpoint, lambda a: remat.adaptive_checkpoint(a, threshold=90)]
)
def test_a_single_array_is_dropped_where_everything_is_held(drop) -> None:
    held = {}

    def f(x: Any, drop: Any) -> Any:
        with scope(use_recomputation=False) as part:
            h = drop(np.exp(x))
            y = np.sin(h) * 2.0
        held[drop] = [same_bits(a, np.exp(X)) for a in part.nodes[0].saved_activations]
        return np.sum(y)

    keep = lambda a: a  # noqa: E731
    assert same_bits(remat.grad(lambda x: f(x, drop))(X), remat.grad(lambda x: f(x, keep))(X))
    assert any(held[keep])
    assert not any(held[drop])


def test_up_to_the_threshold_an_array_is_held() -> None:
    held = []

    def f(x: Any) -> Any:
        with scope(use_recomputation=False) as part:
            h = remat.adaptive_checkpoint(np.exp(x), threshold=X.nbytes)
            y = np.sin(h)
        held.extend(part.nodes[0].saved_activations)
        return np.sum(y)

    remat.grad(f)(X)
    assert any(same_bits(a, np.exp(X)) for a in held)


def test_a_single_array_outside_of_a_scope_is_an_error() -> None:
    with pytest.raises(remat.UnsupportedError, match="CheckpointScope"):
        remat.grad(lambda x: np.sum(remat.checkpoint(np.exp(x))))(X)


def test_a_single_array_inside_of_a_segment_is_dropped_with_the_rest() -> None:
    def f(x: Any) -> Any:
        return remat.checkpoint(lambda y: np.sin(remat.checkpoint(np.exp(y))), x)

    plain = remat.grad(lambda x: np.sum(np.sin(np.exp(x))))(X)
    assert same_bits(remat.grad(lambda x: np.sum(f(x)))(X), plain)


# -- scopes ----------------------------------------------------------------------------------------


def test_nodes_show_what_is_held_and_compute_the_rest() -> None:
    part = scope("part")
    seen: dict[str, Any] = {}

    def f(x: Any) -> Any:
        with part:
            y = np.sin(remat.mark_checkpoint(np.exp(x)) * 2.0)
        (node,) = part.nodes
        seen["node"], seen["shown"] = node, repr(node)
        seen["computed"] = node.recompute()
        node.clear_saved_activations()
        seen["left"] = node.saved_activations
        return np.sum(y)

    gradient = remat.grad(f)(X)
    assert same_bits(gradient, remat.grad(lambda x: np.sum(np.sin(np.exp(x) * 2.0)))(X))
    shown = "<CheckpointNode of scope 'part': 1 activation held in 96 B, 1 recompute function>"
    assert seen["shown"] == shown
    assert any(same_bits(a, np.exp(X) * 2.0) for a in seen["computed"])
    assert seen["left"] == []
    gc.collect()
    assert repr(seen["node"]).endswith("0 recompute functions, its backward pass is done>")


def test_what_another_scope_reads_is_lent_even_if_it_was_dropped() -> None:
    first = scope("first")

    def f(x: Any) -> Any:
        with first:
            h = np.exp(x)
        with scope("second"):
            y = np.sin(h) * h
        first.nodes[0].clear_saved_activations()
        return np.sum(y)

    plain = remat.grad(lambda x: np.sum(np.sin(np.exp(x)) * np.exp(x) + 0.0))(X)
    assert np.allclose(remat.grad(f)(X), plain, rtol=1e-14)


def test_outside_of_a_differentiated_function_it_says_once_that_it_does_nothing() -> None:
    code = """
import warnings
import numpy as np, remat
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        with remat.CheckpointScope("alone"):
            y = np.sin(np.ones(3))
(warning,) = caught
assert issubclass(warning.category, remat.RematWarning)
assert "no function is being differentiated" in str(warning.message)
import sys
assert "torch" not in sys.modules
"""
    run_python(code)


def run_python(code: str) -> None:
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415

    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_scope_in_which_nothing_is_traced_says_so() -> None:
    def f(x: Any) -> Any:
        with scope("plain part"):
            np.sin(np.ones(3))
        return np.sum(x)

    with pytest.warns(remat.RematWarning, match="depends on what is differentiated"):
        remat.grad(f)(X)


def test_in_a_segment_and_in_a_loop_nothing_is_said() -> None:
    def f(x: Any) -> Any:
        with scope("in a call"):
            return np.sin(x) * 2.0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remat.grad(lambda x: np.sum(remat.checkpoint(f, x)))(X)
        remat.grad(lambda x: np.sum(remat.checkpointed_loop(f, x, 3)[0]))(X)


def test_an_error_inside_leaves_nothing_open() -> None:
    def f(x: Any) -> Any:
        with scope("outer"), scope("inner"):
            h = np.sin(x)
            raise KeyError("mine")
        return h

    with pytest.raises(KeyError, match="mine"):
        remat.grad(f)(X)
    with pytest.raises(remat.UnsupportedError):
        remat.grad(lambda x: np.sum(remat.checkpoint(np.exp(x))))(X)


def test_a_scope_that_is_never_left_ends_with_its_function() -> None:
    part = scope()

    def f(x: Any) -> Any:
        part.__enter__()
        return np.sum(np.sin(x) ** 2)

    gradient = remat.grad(f)(X)
    assert np.allclose(gradient, np.sin(2 * X))
    part.__exit__(None, None, None)
    with pytest.raises(remat.UnsupportedError):
        remat.grad(lambda x: np.sum(remat.checkpoint(np.exp(x))))(X)


def test_scopes_that_are_left_in_the_wrong_order_are_an_error() -> None:
    def f(x: Any) -> Any:
        one, other = scope("one"), scope("other")
        one.__enter__()
        other.__enter__()
        h = np.sin(x)
        one.__exit__(None, None, None)
        return np.sum(h)

    with pytest.raises(remat.RematError, match="'one' was left before"):
        remat.grad(f)(X)


def test_another_thread_has_scopes_of_its_own() -> None:
    found: list[type[BaseException]] = []

    def other() -> None:
        try:
            remat.checkpoint(np.ones(3))
        except remat.UnsupportedError as error:  # there is no scope here
            found.append(type(error))

    def f(x: Any) -> Any:
        with scope():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return np.sum(np.sin(x) * x)

    remat.grad(f)(X)
    assert found == [remat.UnsupportedError]
