"""Gradients of what a step closes over, wherever it keeps it."""

# ruff: noqa: PLW0108, PLW0603  (lambdas and globals are what is tested)

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
from autograd.tracer import isbox

import remat

from .oracles import plain_loop, same_bits

W = np.array([0.5, 0.7])
X = np.array([1.0, -0.4])


class Pair(NamedTuple):
    w: Any
    b: Any


class Holder:
    def __init__(self, w):
        self.w = w

    def step(self, x):
        return np.tanh(x * self.w)

    def __call__(self, x):
        return np.tanh(x * self.w)


class Slots:
    __slots__ = ("w",)


class MangledSlots:
    __slots__ = ("__w",)

    def __init__(self, w):
        self.__w = w

    def step(self, x):
        return np.tanh(x * self.__w)


class Child(Holder):
    @property
    def double(self):
        return self.w * 2


@dataclasses.dataclass
class Data:
    w: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    w: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    w: Any


def variable(w):
    return lambda x: np.tanh(x * w)


def in_list(w):
    box = [1.0, w]
    return lambda x: np.tanh(x * box[1])


def in_dict(w):
    box = {"w": w}
    return lambda x: np.tanh(x * box["w"])


def in_tuple(w):
    box = (1.0, w)
    return lambda x: np.tanh(x * box[1])


def in_named_tuple(w):
    box = Pair(w, 0.5)
    return lambda x: np.tanh(x * box.w + box.b)


def nested_containers(w):
    box = {"a": [{"b": (w, [w])}]}
    return lambda x: np.tanh(x * box["a"][0]["b"][0] * box["a"][0]["b"][1][0])


def in_deque(w):
    box = collections.deque([w])
    return lambda x: np.tanh(x * box[0])


def in_ordered_dict(w):
    box = collections.OrderedDict(w=w)
    return lambda x: np.tanh(x * box["w"])


def in_default_dict(w):
    box = collections.defaultdict(list, w=w)
    return lambda x: np.tanh(x * box["w"])


def in_object(w):
    box = Holder(w)
    return lambda x: np.tanh(x * box.w)


def in_namespace(w):
    box = types.SimpleNamespace(w=w)
    return lambda x: np.tanh(x * box.w)


def in_slots(w):
    box = Slots()
    box.w = w
    return lambda x: np.tanh(x * box.w)


def behind_a_property(w):
    box = Child(w)
    return lambda x: np.tanh(x * box.double)


def in_dataclass(w):
    box = Data(w)
    return lambda x: np.tanh(x * box.w)


def in_frozen_dataclass(w):
    box = Frozen(w)
    return lambda x: np.tanh(x * box.w)


def in_frozen_dataclass_with_slots(w):
    box = FrozenSlots(w)
    return lambda x: np.tanh(x * box.w)


def in_partial(w):
    return functools.partial(lambda w, x, *, v: np.tanh(x * w * v), w, v=w)


def in_partial_of_method(w):
    return functools.partial(Holder(w).step)


def in_bound_method(w):
    return Holder(w).step


def in_callable_object(w):
    return Holder(w)


def in_default(w):
    return lambda x, w=w: np.tanh(x * w)


def in_keyword_default(w):
    def step(x, *, w=w):
        return np.tanh(x * w)

    return step


def in_nested_functions(w):
    def times(x):
        return x * w

    def helper(x):
        return np.tanh(times(x))

    return lambda x: helper(x)


def behind_a_decorator(w):
    def plain(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)

        return wrapper

    return plain(lambda x: np.tanh(x * w))


def in_function_attribute(w):
    def step(x):
        return np.tanh(x * step.w)

    step.w = w
    return step


def in_function_inside_the_step(w):
    def step(x):
        def inner():
            return x * w

        return np.tanh(inner())

    return step


def in_comprehension(w):
    weights = [w, w * 2]
    return lambda x: np.tanh(sum([x * v for v in weights]))


def same_array_in_two_places(w):
    box = [w]
    return lambda x: np.tanh(x * w + box[0])


def view_of_it(w):
    v = w[::-1]
    return lambda x: np.tanh(x * v + w)


def result_of_it(w):
    v = np.exp(w)
    return lambda x: np.tanh(x * v)


def two_objects_that_refer_to_each_other(w):
    one, two = Holder(w), Holder(w)
    one.other, two.other = two, one
    return lambda x: np.tanh(x * one.other.other.w)


_global = None


def in_global(w):
    global _global
    _global = w
    return lambda x: np.tanh(x * _global)


FOUND = [
    variable,
    in_list,
    in_dict,
    in_tuple,
    in_named_tuple,
    nested_containers,
    in_deque,
    in_ordered_dict,
    in_default_dict,
    in_object,
    in_namespace,
    in_slots,
    behind_a_property,
    in_dataclass,
    in_frozen_dataclass,
    in_frozen_dataclass_with_slots,
    in_partial,
    in_partial_of_method,
    in_bound_method,
    in_callable_object,
    in_default,
    in_keyword_default,
    in_nested_functions,
    behind_a_decorator,
    in_function_attribute,
    in_function_inside_the_step,
    in_comprehension,
    same_array_in_two_places,
    view_of_it,
    result_of_it,
    two_objects_that_refer_to_each_other,
    in_global,
]


def gradients(build, run):
    return remat.grad(lambda w, x: np.sum(run(build(w), x)), wrt=(0, 1))(W, X)


def looped(schedule):
    return lambda step, x: remat.checkpointed_loop(step, x, 7, 1, schedule=schedule)[0]


def plain(step, x):
    return plain_loop(step, x, 7)


@pytest.mark.parametrize("build", FOUND)
@pytest.mark.parametrize("schedule", ["auto", "revolve", "all"])
def test_a_loop_finds_it(build, schedule) -> None:
    found, expected = gradients(build, looped(schedule)), gradients(build, plain)
    assert np.any(expected[0])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14)


@pytest.mark.parametrize("build", FOUND)
def test_a_segment_finds_it(build) -> None:
    found = gradients(build, lambda f, x: plain_loop(remat.checkpoint(f), x, 3))
    expected = gradients(build, lambda f, x: plain_loop(f, x, 3))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14)


@pytest.mark.parametrize("build", FOUND)
def test_sweeps_see_plain_arrays(build) -> None:
    """A box that were left would make every step of a sweep slow, and the result a box."""
    types_seen = set()

    def watched(w):
        step = build(w)

        def watch(x):
            result = step(x)
            types_seen.add(type(result))
            return result

        return watch

    gradients(watched, looped("revolve"))
    assert np.ndarray in types_seen


# -- where nobody finds it: an error, no wrong gradient --------------------------------------------


def in_set(w):
    box = {w}
    return lambda x: np.tanh(x * next(iter(box)))


def in_class_attribute(w):
    class Box:
        weight = w

    return lambda x: np.tanh(x * Box.weight)


def in_proxy(w):
    box = types.MappingProxyType({"w": w})
    return lambda x: np.tanh(x * box["w"])


def in_cached_function(w):
    @functools.lru_cache
    def get():
        return w

    return lambda x: np.tanh(x * get())


def in_generator(w):
    def forever():
        while True:
            yield w

    weights = forever()
    return lambda x: np.tanh(x * next(weights))


def in_object_array(w):
    box = np.empty(1, dtype=object)
    box[0] = w
    return lambda x: np.tanh(x * box[0])


def in_module(w):
    module = types.ModuleType("module")
    module.w = w
    return lambda x: np.tanh(x * module.w)


def in_static_method(w):
    class Box:
        @staticmethod
        def step(x):
            return np.tanh(x * w)

    return lambda x: Box.step(x)


@pytest.mark.parametrize(
    "build",
    [
        in_set,
        in_proxy,
        in_cached_function,
        in_generator,
        in_object_array,
        in_module,
    ],
)
@pytest.mark.parametrize("schedule", ["auto", "revolve", "all"])
def test_what_is_not_found_is_refused(build, schedule) -> None:
    with pytest.raises(remat.UnsupportedError, match=r"cannot find|functools cache"):
        gradients(build, looped(schedule))


# -- what ought to be found ------------------------------------------------------------------------


def in_closure_of_a_method(w):
    class Step:
        def __call__(self, x):
            return np.tanh(x * w)

    return Step()


def in_closure_of_a_called_method(w):
    class Layer:
        def forward(self, x):
            return np.tanh(x * w)

    layer = Layer()
    return lambda x: layer.forward(x)


class UsesGlobal:
    def __call__(self, x):
        return np.tanh(x * _global)


def global_in_a_method(w):
    global _global
    _global = w
    return UsesGlobal()


def in_mangled_slots(w):
    return MangledSlots(w).step


def in_subclass_of_tuple(w):
    class Both(tuple):
        __slots__ = ()

        @property
        def weight(self):
            return self[0]

    box = Both((w,))
    return lambda x: np.tanh(x * box.weight)


def in_user_dict(w):
    box = collections.UserDict(w=w)
    return lambda x: np.tanh(x * box["w"])


@pytest.mark.parametrize(
    "build",
    [
        in_class_attribute,
        in_static_method,
        in_closure_of_a_method,
        in_closure_of_a_called_method,
        global_in_a_method,
        in_mangled_slots,
        in_subclass_of_tuple,
        in_user_dict,
    ],
)
def test_more_places_to_find_it(build) -> None:
    found, expected = gradients(build, looped("revolve")), gradients(build, plain)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14)


# -- steps that keep what they compute from it -----------------------------------------------------


def memo_in_a_dict(w):
    memo = {}

    def step(x):
        if "exp" not in memo:
            memo["exp"] = np.exp(w)
        return np.tanh(x * memo["exp"])

    return step


class CachesProperty(Holder):
    @functools.cached_property
    def squared(self):
        return self.w**2


def memo_in_a_cached_property(w):
    box = CachesProperty(w)
    return lambda x: np.tanh(x * box.squared)


def memo_in_an_attribute(w):
    box = Holder(w)
    box.memo = None

    def step(x):
        if box.memo is None:
            box.memo = np.exp(box.w)
        return np.tanh(x * box.memo)

    return step


@pytest.mark.parametrize("build", [memo_in_a_dict, memo_in_a_cached_property, memo_in_an_attribute])
@pytest.mark.parametrize("schedule", ["revolve", "uniform", "all"])
def test_what_a_step_remembers_is_no_constant(build, schedule) -> None:
    expected = gradients(build, plain)
    try:
        found = gradients(build, looped(schedule))
    except remat.RematError:
        return  # refusing is right as well
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14)


@pytest.mark.parametrize("build", [memo_in_a_dict, memo_in_a_cached_property, memo_in_an_attribute])
def test_what_a_segment_remembers_is_no_constant(build) -> None:
    expected = gradients(build, lambda f, x: f(x))
    try:
        found = gradients(build, remat.checkpoint)
    except remat.RematError:
        return
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14)


def looks_back(schedule):
    def run(x):
        history = [x * 0.0]

        def step(s):
            y = np.sin(s) + 0.5 * history[-1]
            history.append(s)
            return y

        if schedule is None:
            return np.sum(plain_loop(step, x, 4))
        return np.sum(remat.checkpointed_loop(step, x, 4, 2, schedule=schedule)[0])

    return run


def collects_losses(schedule):
    def run(x):
        losses = []

        def step(s):
            losses.append(np.sum(s**2))
            return np.sin(s)

        if schedule is None:
            plain_loop(step, x, 4)
        else:
            remat.checkpointed_loop(step, x, 4, 2, schedule=schedule)
        return sum(losses[:4])

    return run


@pytest.mark.filterwarnings("ignore:the output does not depend")
@pytest.mark.parametrize("run", [looks_back, collects_losses])
@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform", "all"])
def test_what_a_step_leaves_outside_of_its_state_is_not_lost_in_silence(run, schedule) -> None:
    value, gradient = remat.value_and_grad(run(None))(X)
    try:
        found = remat.value_and_grad(run(schedule))(X)
    except remat.RematError:
        return
    assert not isbox(found[0])
    np.testing.assert_allclose(found[0], value, rtol=1e-14)
    np.testing.assert_allclose(found[1], gradient, rtol=1e-14)


def rebinds(w):
    def step(x):
        nonlocal w
        w = w * 0.5
        return x * w

    return step


def replaces_an_entry(w):
    box = {"w": w}

    def step(x):
        box["w"] = box["w"] * 0.5
        return x * box["w"]

    return step


def changes_in_place(w):
    def step(x):
        w[0] += 1.0
        return x * w

    return step


@pytest.mark.parametrize("build", [rebinds, replaces_an_entry, changes_in_place])
@pytest.mark.parametrize("schedule", ["revolve", "uniform", "all"])
def test_a_step_that_changes_what_it_closes_over_is_caught(build, schedule) -> None:
    def loss(run):
        # Weights of this trace: changing the caller's is a different question.
        return remat.value_and_grad(lambda w: np.sum(run(build(w * 1.0), X)))

    value, gradient = loss(lambda step, x: plain_loop(step, x, 3))(W)
    try:
        found = loss(lambda s, x: remat.checkpointed_loop(s, x, 3, 1, schedule=schedule)[0])(W)
    except (remat.RematError, ValueError):
        return
    np.testing.assert_allclose(found[0], value)
    np.testing.assert_allclose(found[1], gradient)


# -- afterwards ------------------------------------------------------------------------------------


def test_the_closure_is_as_it_was() -> None:
    box = {"list": [W], "w": W}
    holder = Holder(W)

    def step(x):
        return np.tanh(x * box["w"] * box["list"][0] * holder.w)

    remat.grad(lambda x: np.sum(looped("revolve")(step, x)))(X)
    assert box["w"] is W
    assert box["list"][0] is W
    assert holder.w is W


@pytest.mark.parametrize("run", [looped("revolve"), remat.checkpoint], ids=["loop", "segment"])
def test_what_was_restored_before_the_way_back_stays(run) -> None:
    model = Holder(W)

    def loss(w):
        model.w = w
        try:
            return np.sum(run(lambda x: np.tanh(x * model.w), X))
        finally:
            model.w = W

    gradient = remat.grad(loss)(W)
    assert np.any(gradient)
    assert not isbox(model.w)
    assert same_bits(model.w, W)


def test_weights_are_not_modified() -> None:
    w = W.copy()

    def loss(w):
        def step(x):
            w[0] += 1.0
            return x * w

        return np.sum(looped("revolve")(step, X))

    with pytest.raises(remat.UnsupportedError, match="changes in place what it closes over"):
        remat.grad(loss)(w)
    assert same_bits(w, W)


def test_weights_are_not_modified_by_a_segment() -> None:
    w = W.copy()

    def loss(w):
        def layer(x):
            w[0] += 1.0
            return x * w

        return np.sum(remat.checkpoint(layer, X))

    with contextlib.suppress(remat.RematError, ValueError):
        remat.grad(loss)(w)
    assert same_bits(w, W)


@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform", "all"])
def test_a_constant_may_be_kept(schedule) -> None:
    def build(w):
        kept = {}

        def step(x):
            if "eye" not in kept:
                kept["eye"] = np.eye(2) * 0.5
            return np.tanh(x @ kept["eye"] + w)

        return step

    found, expected = gradients(build, looped(schedule)), gradients(build, plain)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14)
