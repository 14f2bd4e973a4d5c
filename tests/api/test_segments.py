"""The public functions of a segment: what they hand to an engine, and what they refuse."""

from __future__ import annotations

import collections
import types

import numpy as np
import pytest

import remat
from remat.api.wrapped import plain_function
from remat.engines import locate
from remat.segments import SegmentOptions

X = np.array([1.0, 2.0])


def add(*args, **kwargs):
    return args, kwargs


@pytest.fixture
def calls(monkeypatch):
    """What an engine for NumPy would be asked to do."""
    asked = []
    engine = types.ModuleType("stand-in")
    engine.run_segment = lambda *args: asked.append(args) or "result"
    monkeypatch.setattr(locate, "_load", {"numpy": engine}.__getitem__)
    return asked


@pytest.fixture
def tensors(monkeypatch):
    """What an engine for torch would be asked to do with a tensor."""
    asked = []
    engine = types.ModuleType("stand-in")
    engine.checkpoint_tensor = lambda *args: asked.append(args) or args[0]
    monkeypatch.setattr(locate, "_load", {"torch": engine}.__getitem__)
    return asked


# -- what is handed over ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (lambda: remat.checkpoint(add, X, k=1), SegmentOptions()),
        (lambda: remat.checkpoint(add)(X, k=1), SegmentOptions()),
        (lambda: remat.checkpoint()(add)(X, k=1), SegmentOptions()),
        (lambda: remat.checkpoint()(add, X, k=1), SegmentOptions()),
        (lambda: remat.checkpoint(add, X, k=1, use_reentrant=False), SegmentOptions()),
        (
            lambda: remat.checkpoint(add, X, k=1, preserve_rng_state=False),
            SegmentOptions(preserve_rng_state=False),
        ),
        (
            lambda: remat.checkpoint(preserve_rng_state=False)(add)(X, k=1),
            SegmentOptions(preserve_rng_state=False),
        ),
        (
            lambda: remat.adaptive_checkpoint(add, X, k=1, threshold="10KB"),
            SegmentOptions(threshold=10_000),
        ),
        (
            lambda: remat.adaptive_checkpoint(threshold=7)(add)(X, k=1),
            SegmentOptions(threshold=7),
        ),
        (
            lambda: remat.adaptive_checkpoint(add, threshold=0, preserve_rng_state=False)(X, k=1),
            SegmentOptions(preserve_rng_state=False, threshold=0),
        ),
        (
            lambda: remat.CheckpointGroup("g").checkpoint_fn(add, X, k=1),
            SegmentOptions(name="g"),
        ),
        (
            lambda: remat.CheckpointGroup(preserve_rng_state=False).checkpoint_fn(add)(X, k=1),
            SegmentOptions(preserve_rng_state=False),
        ),
    ],
)
def test_a_call_goes_to_the_engine_with_its_options(calls, call, options) -> None:
    assert call() == "result"
    ((function, args, kwargs, given),) = calls
    assert function is add
    assert args[0] is X
    assert len(args) == 1
    assert kwargs == {"k": 1}
    assert given == options


@pytest.mark.parametrize("inputs", [[X, 1.0], (X,), collections.deque([X, X])])
def test_a_segment_gets_the_sequence(calls, inputs) -> None:
    remat.checkpoint_segment(add, inputs, preserve_rng_state=False)
    ((_, (given,), kwargs, options),) = calls
    assert list(given) == list(inputs)
    assert given is inputs or isinstance(given, list)
    assert kwargs == {}
    assert options == SegmentOptions(preserve_rng_state=False)


def test_a_function_without_inputs_runs_when_the_wrapper_is_called(calls) -> None:
    remat.checkpoint(add)()
    assert calls == [(add, (), {}, SegmentOptions())]


def test_a_direct_call_wraps_nothing(calls, monkeypatch) -> None:
    monkeypatch.setattr("functools.update_wrapper", None)
    assert remat.checkpoint(add, X) == "result"


@pytest.mark.parametrize("how", [remat.checkpoint, remat.adaptive_checkpoint(threshold=1)])
def test_the_wrapped_function_is_remembered(how) -> None:
    assert plain_function(how(add)) is add
    assert plain_function(add) is add


@pytest.mark.parametrize(
    ("call", "threshold"),
    [
        (remat.checkpoint, None),
        (lambda t: remat.adaptive_checkpoint(t, threshold="1KiB"), 1024),
        (remat.adaptive_checkpoint(threshold=5), 5),
    ],
)
def test_a_tensor_goes_to_its_engine(tensors, call, threshold) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2)
    assert call(tensor) is tensor
    ((given, limit),) = tensors
    assert given is tensor
    assert limit == threshold


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call", [remat.checkpoint, lambda a: remat.adaptive_checkpoint(a, threshold=1)]
)
@pytest.mark.parametrize("array", [X, np.float64(3.0)])
def test_a_single_array_of_numpy_is_refused_with_the_alternative(call, array) -> None:
    with pytest.raises(remat.UnsupportedError, match=r"remat\.checkpoint\(fn, x\)"):
        call(array)


def test_a_single_traced_array_is_refused_with_the_alternative() -> None:
    with pytest.raises(remat.UnsupportedError, match=r"remat\.checkpoint\(fn, x\)"):
        remat.grad(lambda x: np.sum(remat.checkpoint(np.sin(x))))(X)


@pytest.mark.parametrize(
    "call",
    [
        lambda: remat.checkpoint(3),
        lambda: remat.checkpoint("sin"),
        lambda: remat.checkpoint([X]),
        lambda: remat.checkpoint(X, X),
        lambda: remat.checkpoint(None, X),
        lambda: remat.checkpoint(k=3),
        lambda: remat.adaptive_checkpoint(X, X, threshold=3),
        lambda: remat.checkpoint_segment(X, [X]),
        lambda: remat.CheckpointGroup().checkpoint_fn(X),
    ],
)
def test_what_is_no_function_is_refused(call) -> None:
    with pytest.raises(TypeError, match="fn must be a function"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: remat.checkpoint(add, X, use_reentrant=True),
        lambda: remat.adaptive_checkpoint(add, X, threshold=1, use_reentrant=True),
        lambda: remat.checkpoint_segment(add, [X], use_reentrant=True),
    ],
)
def test_reentrant_is_refused(call) -> None:
    with pytest.raises(ValueError, match="use_reentrant"):
        call()


@pytest.mark.parametrize(
    ("threshold", "error"),
    [
        (-1, ValueError),
        ("ten", ValueError),
        ("10 parsecs", ValueError),
        (0.5, TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
)
def test_a_bad_threshold_is_named(threshold, error) -> None:
    with pytest.raises(error, match="threshold"):
        remat.adaptive_checkpoint(add, X, threshold=threshold)


def test_a_threshold_must_be_given() -> None:
    with pytest.raises(TypeError, match="threshold"):
        remat.adaptive_checkpoint(add, X)


@pytest.mark.parametrize("empty", [[], (), collections.deque()])
def test_an_empty_sequence_is_refused(empty) -> None:
    with pytest.raises(ValueError, match="inputs must not be empty"):
        remat.checkpoint_segment(add, empty)


@pytest.mark.parametrize("inputs", [X, "text", {1: X}, {1.0}, iter([X]), 3, None])
def test_what_is_no_sequence_is_refused(inputs) -> None:
    with pytest.raises(TypeError, match="inputs must be a list or tuple"):
        remat.checkpoint_segment(add, inputs)


@pytest.mark.parametrize("name", [3, b"g", X])
def test_the_name_of_a_group_is_text(name) -> None:
    with pytest.raises(TypeError, match="name"):
        remat.CheckpointGroup(name)


@pytest.mark.parametrize("value", ["no", 1, None], ids=repr)
@pytest.mark.parametrize(
    "call",
    [
        lambda **options: remat.checkpoint(add, X, **options),
        remat.checkpoint,
        lambda **options: remat.adaptive_checkpoint(add, X, threshold=0, **options),
        lambda **options: remat.checkpoint_segment(add, [X], **options),
        lambda **options: remat.checkpoint_sequential([np.sin], X, **options),
        remat.CheckpointGroup,
        lambda **options: remat.verify(add, X, **options),
    ],
    ids=["checkpoint", "decorator", "adaptive", "segment", "sequential", "group", "verify"],
)
def test_whether_random_state_is_preserved_is_true_or_false(call, value) -> None:
    with pytest.raises(TypeError, match=f"preserve_rng_state must be True or False, got {value!r}"):
        call(preserve_rng_state=value)
