"""Chains of layers on NumPy arrays: gradients, what is held, what is counted, what is refused."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remat
from remat import ActivationCheckpointer, CheckpointConfig, StoreError

SIZE = 3  # of an activation of float64: 24 bytes
X = np.array([0.3, -0.7, 1.1])


def weights(layers: int) -> list[np.ndarray]:
    rng = np.random.default_rng(layers)
    return [rng.normal(size=(SIZE, SIZE)) for _ in range(layers)]


def layer(x, W):
    return np.tanh(x @ W) + 0.1 * x


def by_hand(x, layers, forward):
    for one in layers:
        x = forward(x, one)
    return x


def activations(x, layers, forward) -> list:
    found = []
    for one in layers:
        x = forward(x, one)
        found.append(x)
    return found


def held_layers(checkpointer: ActivationCheckpointer, among: int) -> list[int]:
    found = []
    for number in range(among):
        try:
            checkpointer.get(number)
        except StoreError:
            continue
        found.append(number)
    return found


configs = st.builds(CheckpointConfig, st.integers(0, 5), st.integers(0, 5))


# -- gradients ---------------------------------------------------------------------------------


@given(configs, st.integers(1, 9))
@settings(max_examples=60)
def test_gradients_are_those_of_the_plain_loop(config, count) -> None:
    def loss(run):
        return lambda x, W: np.sum(run(x, W, layer) ** 2)

    checkpointer = ActivationCheckpointer(config)
    W = weights(count)
    plain = remat.grad(loss(by_hand), wrt=(0, 1))(X, W)
    found = remat.grad(loss(checkpointer.checkpointed_forward), wrt=(0, 1))(X, W)
    np.testing.assert_array_equal(found[0], plain[0])
    np.testing.assert_array_equal(found[1], plain[1])


@given(configs, st.integers(0, 9), st.booleans())
@settings(max_examples=60)
def test_what_is_held_and_counted(config, count, differentiated) -> None:
    W = weights(count)
    checkpointer = ActivationCheckpointer(config)

    def forward(x, i):
        return layer(x, W[i])

    def run(x):
        return np.sum(checkpointer.checkpointed_forward(x, range(count), forward))

    value = remat.value_and_grad(run)(X)[0] if differentiated else run(X)
    known = activations(X, W, layer)
    assert value == np.sum(known[-1] if known else X)
    every, most = config.checkpoint_every_n_layers, config.max_checkpoints
    candidates = [i for i in range(count) if every and i % every == 0]
    expected = candidates[len(candidates) - most :] if most < len(candidates) else candidates
    assert held_layers(checkpointer, count) == expected
    assert checkpointer.num_checkpoints() == len(expected)
    assert checkpointer.memory_stored_bytes() == 24 * len(expected)
    assert checkpointer.memory_saved_bytes() == 24 * (count - len(expected))
    for number in expected:
        np.testing.assert_array_equal(checkpointer.get(number), known[number])


def test_each_layer_runs_at_most_once_more() -> None:
    calls: list[int] = []
    W = weights(10)

    def forward(x, i):
        calls.append(i)
        return layer(x, W[i])

    checkpointer = ActivationCheckpointer(CheckpointConfig(3))
    remat.grad(lambda x: np.sum(checkpointer.checkpointed_forward(x, range(10), forward)))(X)
    # Held are the activations of 0, 3, 6 and 9, which is the output: 7, 8, 9 are run with a tape.
    # (Layer 0, which is run first, is run with a tape to see what it closes over.)
    assert calls == [*range(10), 4, 5, 6, 1, 2, 3, 0]


def test_activations_may_be_any_trees_and_change_their_shapes() -> None:
    sizes = [3, 5, 2, 4, 4, 1]
    rng = np.random.default_rng(0)
    W = [rng.normal(size=pair) for pair in pairwise(sizes)]

    def forward(state, i):
        h = np.tanh(state["h"] @ W[i])
        return {"h": h, "sum": (state["sum"][0] + np.sum(h), i)}

    def loss(run):
        def f(x):
            out = run({"h": x, "sum": (0.0, -1)}, range(5), forward)
            return out["sum"][0] + np.sum(out["h"])

        return f

    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    found = remat.grad(loss(checkpointer.checkpointed_forward))(X)
    np.testing.assert_array_equal(found, remat.grad(loss(by_hand))(X))
    assert checkpointer.get(2)["h"].shape == (4,)
    assert checkpointer.get(2)["sum"][1] == 2


def test_layers_may_begin_with_whole_numbers() -> None:
    table = np.arange(12.0).reshape(4, 3)
    tokens = np.array([1, 3])

    def loss(run):
        def f(table):
            return np.sum(run(tokens, [lambda t: table[t], np.sin, np.exp], lambda x, f: f(x)))

        return f

    checkpointer = ActivationCheckpointer(CheckpointConfig(1))
    found = remat.grad(loss(checkpointer.checkpointed_forward))(table)
    np.testing.assert_array_equal(found, remat.grad(loss(by_hand))(table))


def test_layers_have_the_numbers_that_they_are_given() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(4))
    checkpointer.checkpointed_forward(X, np.array([7, 8, 12, 3]), lambda x, i: x + i)
    assert held_layers(checkpointer, 20) == [8, 12]
    np.testing.assert_array_equal(checkpointer.get(12), X + 7 + 8 + 12)


def test_layers_write_in_place() -> None:
    def forward(x, i):
        x *= i + 1.0
        return x

    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    given = X.copy()
    np.testing.assert_array_equal(
        checkpointer.checkpointed_forward(given, range(4), forward), X * 24
    )
    np.testing.assert_array_equal(given, X)
    np.testing.assert_array_equal(checkpointer.get(2), X * 6)


def test_no_layers_return_the_input() -> None:
    checkpointer = ActivationCheckpointer()
    assert checkpointer.checkpointed_forward(X, [], layer) is X
    assert checkpointer.num_checkpoints() == 0


# -- whatever happens between ahead and back ---------------------------------------------------


def passes(checkpointer, between):
    """Return a gradient that needs a pass whose activations have gone since."""
    W = weights(7)

    def loss(x):
        y = checkpointer.checkpointed_forward(x, W, layer)
        between(x)
        return np.sum(y**2)

    return remat.grad(loss)(X), remat.grad(lambda x: np.sum(by_hand(x, W, layer) ** 2))(X)


@pytest.mark.parametrize("most", [1, 2, 64])
def test_a_pass_keeps_what_it_needs(most) -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, most))
    others: list = []

    def clear(x):
        checkpointer.clear()

    def pass_by(x):
        checkpointer.checkpointed_forward(2 * x, weights(7), layer)

    def overwrite(x):
        for number in held_layers(checkpointer, 7):
            checkpointer.save(number, np.zeros(3))

    def write_to(x):
        for number in held_layers(checkpointer, 7):
            others.append(checkpointer.get(number))
            others[-1][:] = 0

    for between in (clear, pass_by, overwrite, write_to):
        found, expected = passes(checkpointer, between)
        np.testing.assert_array_equal(found, expected)


def test_a_way_back_leaves_what_is_held_alone() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))

    def save_by_hand(x):
        checkpointer.clear()
        checkpointer.save(2, np.zeros(3))

    passes(checkpointer, save_by_hand)
    assert held_layers(checkpointer, 7) == [2]
    np.testing.assert_array_equal(checkpointer.get(2), np.zeros(3))


def test_going_back_twice() -> None:
    """The Jacobian goes back once for each output; what is held stays that of the last pass."""
    from autograd import jacobian  # noqa: PLC0415

    W = weights(7)
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))

    def run(x):
        y = checkpointer.checkpointed_forward(x, W, layer)
        checkpointer.clear()
        return y

    found = jacobian(run)(X)
    np.testing.assert_array_equal(found, jacobian(lambda x: by_hand(x, W, layer))(X))
    assert checkpointer.num_checkpoints() == 0
    assert checkpointer.memory_saved_bytes() == 0


def test_a_second_pass_takes_the_place_of_the_first() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    for factor in (1.0, 2.0):
        checkpointer.checkpointed_forward(factor * X, range(5), lambda x, i: x + i)
        assert checkpointer.memory_stored_bytes() == 3 * 24
        assert checkpointer.memory_saved_bytes() == 2 * 24
    np.testing.assert_array_equal(checkpointer.get(2), 2 * X + 3)


def test_a_pass_that_fails_leaves_nothing_of_the_pass_before_it() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    checkpointer.checkpointed_forward(X, range(6), lambda x, i: x + i)

    def fail(x, i):
        if i == 3:
            raise RuntimeError("on purpose")
        return x * 2

    with pytest.raises(RuntimeError, match="on purpose"):
        checkpointer.checkpointed_forward(X, range(6), fail)
    assert held_layers(checkpointer, 6) == [0, 2]
    assert checkpointer.memory_stored_bytes() == 2 * 24
    assert checkpointer.memory_saved_bytes() == 24


def test_a_pass_that_nobody_goes_back_through_keeps_nothing() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    checkpointer.checkpointed_forward(X, range(5), lambda x, i: x + i)
    activation = weakref.ref(checkpointer._activations[2])
    checkpointer.clear()
    gc.collect()
    assert activation() is None


def peak_of(call) -> int:
    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_that_of_the_checkpoints_and_one_part() -> None:
    x = np.ones((8_000, SIZE))
    W = weights(64)

    def gradient(run):
        return lambda: remat.grad(lambda x: np.sum(run(x, W, heavy)))(x)

    def heavy(x, W):
        return np.tanh(np.sin(np.cos(np.exp(-np.abs(x @ W)))))

    def chain(x, W, layer):  # (a checkpointer of its own: what it holds goes with it)
        return ActivationCheckpointer(CheckpointConfig(8)).checkpointed_forward(x, W, layer)

    plain, checkpointed = peak_of(gradient(by_hand)), peak_of(gradient(chain))
    # Without checkpoints the tapes of 64 layers; with them those of 8, and 8 activations.
    assert checkpointed < 0.3 * plain


def test_what_is_held_is_a_copy() -> None:
    checkpointer = ActivationCheckpointer()
    own = X.copy()
    checkpointer.save(5, own)
    own[:] = 0
    checkpointer.get(5)[:] = 0
    np.testing.assert_array_equal(checkpointer.get(5), X)


def test_one_array_that_stands_twice_is_held_once() -> None:
    checkpointer = ActivationCheckpointer()
    checkpointer.save(0, (X, [X]))
    assert checkpointer.memory_stored_bytes() == 24
    first, (second,) = checkpointer.get(0)
    assert first is second


def test_a_traced_value_is_saved_as_an_array() -> None:
    checkpointer = ActivationCheckpointer()

    def f(x):
        checkpointer.save(0, x * 2)
        return np.sum(x)

    remat.grad(f)(X)
    assert type(checkpointer.get(0)) is np.ndarray
    np.testing.assert_array_equal(checkpointer.get(0), X * 2)


# -- room --------------------------------------------------------------------------------------


def test_saving_by_hand_refuses_when_there_is_no_room() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(max_checkpoints=2))
    checkpointer.save(1, X)
    checkpointer.save(6, X)
    with pytest.raises(StoreError, match=r"no room for layer 9: 2 of 2 .*\(layers 1, 6\)"):
        checkpointer.save(9, X)
    checkpointer.save(6, np.ones(10))  # in the place of what is there
    assert checkpointer.memory_stored_bytes() == 24 + 80
    assert checkpointer.memory_saved_bytes() == 0


def test_a_pass_evicts_the_oldest() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, max_checkpoints=3))
    for number, size in ((100, 1), (101, 2), (100, 4)):
        checkpointer.save(number, np.ones(size))  # saved again, 100 is newer than 101
    checkpointer.checkpointed_forward(X, range(3), lambda x, i: x + i)
    assert held_layers(checkpointer, 200) == [0, 2, 100]
    assert checkpointer.memory_stored_bytes() == 2 * 24 + 32
    assert checkpointer.memory_saved_bytes() == 24 + 16


def test_no_room_at_all() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(1, max_checkpoints=0))
    np.testing.assert_array_equal(
        checkpointer.checkpointed_forward(X, range(3), lambda x, i: x + i), X + 3
    )
    assert checkpointer.num_checkpoints() == 0
    assert checkpointer.memory_saved_bytes() == 72
    with pytest.raises(StoreError, match=r"0 of 0 checkpoints are held \(no layer\)"):
        checkpointer.save(0, X)


# -- mixed precision ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("differentiated", [True, False])
def test_mixed_precision_stores_two_bytes_a_number(dtype, differentiated) -> None:
    W = [w.astype(dtype) for w in weights(7)]
    x = X.astype(dtype)
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, use_mixed_precision=True))

    def run(x):
        return np.sum(checkpointer.checkpointed_forward(x, W, layer))

    exact = np.sum(by_hand(x, W, layer))
    if differentiated:
        value, gradient = remat.value_and_grad(run)(x)
        expected = remat.grad(lambda x: np.sum(by_hand(x, W, layer)))(x)
        np.testing.assert_allclose(gradient, expected, rtol=1e-2)
        assert np.any(gradient != expected)
    else:
        value = run(x)
    assert value == exact  # on the way ahead nothing is rounded
    assert checkpointer.memory_stored_bytes() == 4 * 3 * 2
    known = activations(x, W, layer)
    assert checkpointer.get(4).dtype == dtype
    np.testing.assert_array_equal(checkpointer.get(4), known[4].astype(np.float16).astype(dtype))


def test_what_float16_cannot_hold_is_refused() -> None:
    config = CheckpointConfig(2, use_mixed_precision=True)
    message = r"layer 2: a checkpoint holds the value 7e\+06, .*; set use_mixed_precision=False"
    with pytest.raises(StoreError, match=message):
        ActivationCheckpointer(config).save(2, np.array([1.0, 7e6]))
    with pytest.raises(StoreError, match=message):
        ActivationCheckpointer(config).checkpointed_forward(
            np.array([7.0]), range(4), lambda x, i: x * 100
        )


def test_a_large_input_is_not_stored() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, use_mixed_precision=True))
    with remat.CheckpointProfiler():
        remat.grad(
            lambda x: np.sum(checkpointer.checkpointed_forward(x, range(4), lambda x, i: x / 10))
        )(np.array([7e4]))
    assert checkpointer.num_checkpoints() == 2


# -- recomputing -------------------------------------------------------------------------------


@given(configs, st.integers(1, 9), st.data())
@settings(max_examples=60)
def test_recompute_from_the_nearest_checkpoint(config, count, data) -> None:
    W = weights(count)
    calls: list[int] = []

    def forward(x, i):
        calls.append(i)
        return layer(x, W[i])

    checkpointer = ActivationCheckpointer(config)
    checkpointer.checkpointed_forward(X, range(count), forward)
    target = data.draw(st.integers(0, count - 1))
    before = [i for i in held_layers(checkpointer, count) if i <= target]
    calls.clear()
    if before:
        found = checkpointer.recompute_from_checkpoint(target, range(count), forward)
        np.testing.assert_array_equal(found, activations(X, W, layer)[target])
        assert calls == list(range(before[-1] + 1, target + 1))
    else:
        with pytest.raises(StoreError, match=f"held at or before layer {target} of layer"):
            checkpointer.recompute_from_checkpoint(target, range(count), forward)
        assert calls == []


def test_recomputing_follows_the_order_of_the_layers() -> None:
    checkpointer = ActivationCheckpointer()
    checkpointer.save(9, X)
    checkpointer.save(3, X + 100)
    found = checkpointer.recompute_from_checkpoint(5, [9, 4, 5, 3], lambda x, i: x + i)
    np.testing.assert_array_equal(found, X + 9)


def test_recomputing_over_the_layers_themselves() -> None:
    W = weights(6)
    checkpointer = ActivationCheckpointer(CheckpointConfig(3))
    checkpointer.checkpointed_forward(X, W, layer)
    np.testing.assert_array_equal(
        checkpointer.recompute_from_checkpoint(5, W, layer), by_hand(X, W, layer)
    )


# -- figures and errors ------------------------------------------------------------------------


def test_a_profiler_sees_what_a_pass_saves() -> None:
    W = weights(60)
    checkpointer = ActivationCheckpointer(CheckpointConfig(8))
    x = np.ones((500, SIZE))
    with remat.CheckpointProfiler() as profiler:
        remat.grad(lambda x: np.sum(checkpointer.checkpointed_forward(x, W, layer)))(x)
    assert profiler.recompute_count() == 1
    assert profiler.memory_saved() > 40 * x.nbytes


def test_clear_begins_anew() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    checkpointer.checkpointed_forward(X, range(5), lambda x, i: x + i)
    checkpointer.clear()
    assert checkpointer.num_checkpoints() == 0
    assert checkpointer.memory_stored_bytes() == 0
    assert checkpointer.memory_saved_bytes() == 0
    with pytest.raises(StoreError, match="no activation is held for layer 0, only for no layer"):
        checkpointer.get(0)


@pytest.mark.parametrize("every", [1, 3, 4])
def test_checkpoint_layers(every) -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(every))
    assert [i for i in range(9) if checkpointer.is_checkpoint_layer(i)] == list(range(0, 9, every))
    assert not ActivationCheckpointer(CheckpointConfig(0)).is_checkpoint_layer(0)


def test_the_defaults() -> None:
    config = ActivationCheckpointer().config
    assert config == CheckpointConfig(4, 64, use_mixed_precision=False)
    assert ActivationCheckpointer(config).config is config


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda c: CheckpointConfig(-1), ValueError, "checkpoint_every_n_layers .* got -1"),
        (
            lambda c: CheckpointConfig(2, 1.5),
            TypeError,
            "max_checkpoints must be a whole .* got 1.5",
        ),
        (lambda c: CheckpointConfig(use_mixed_precision=1), TypeError, "use_mixed_precision .* 1"),
        (
            lambda c: ActivationCheckpointer(3),
            TypeError,
            "config must be a CheckpointConfig, got 3",
        ),
        (lambda c: c.save(-1, X), ValueError, "layer must be at least 0, got -1"),
        (lambda c: c.save("a", X), TypeError, "layer must be a whole number, got 'a'"),
        (lambda c: c.get(5), StoreError, "for layer 5, only for layers 0, 4"),
        (lambda c: c.get(None), TypeError, "layer must be a whole number, got None"),
        (lambda c: c.checkpointed_forward(X, 3, layer), TypeError, "layers must be a .* got 3"),
        (lambda c: c.checkpointed_forward(X, [0, -1], layer), ValueError, "a layer .* got -1"),
        (
            lambda c: c.checkpointed_forward(X, [0, 1, 0], layer),
            ValueError,
            "layer 0 .* 2 times",
        ),
        (lambda c: c.checkpointed_forward(X, [0], None), TypeError, "forward_fn .* got None"),
        (lambda c: c.checkpointed_forward("a", [0], layer), TypeError, "no array, only str"),
        (
            lambda c: c.recompute_from_checkpoint(9, range(6), layer),
            ValueError,
            "target must be one of the layers, layers 0 to 5, got 9",
        ),
        (
            lambda c: c.recompute_from_checkpoint(2, [1, 2], layer),
            StoreError,
            "at or before layer 2 of layers 1, 2; held: layers 0, 4",
        ),
        (lambda c: c.recompute_from_checkpoint(1, [1], 5), TypeError, "forward_fn .* got 5"),
    ],
)
def test_what_is_wrong_is_said(call, kind, message) -> None:
    checkpointer = ActivationCheckpointer()
    checkpointer.save(4, X)
    checkpointer.save(0, X)
    with pytest.raises(kind, match=message):
        call(checkpointer)


def test_another_structure_is_refused() -> None:
    with pytest.raises(TypeError, match="step 1 returned a state of another structure"):
        ActivationCheckpointer().checkpointed_forward(
            X, range(3), lambda x, i: (x, x) if i == 1 else x
        )
