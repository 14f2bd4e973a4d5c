"""What is forgotten is freed, by reference counting alone, and what is held is held."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat

from .oracles import APIS, plain

FORGETTING = ["segment", "scope", "nested", "group"]


@pytest.fixture(autouse=True)
def without_the_garbage_collector():
    gc.disable()
    gc.freeze()  # what was there before is none of ours, and need not be looked through
    yield
    gc.unfreeze()
    gc.enable()


class Kept:
    """Weak references to the memory of tensors."""

    def __init__(self) -> None:
        self.references: list[weakref.ref] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        self.references.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def alive(self) -> list[bool]:
        return [reference() is not None for reference in self.references]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape or (50, 50)).requires_grad_()


@pytest.mark.parametrize("api", FORGETTING)
def test_what_lies_between_is_freed(api) -> None:
    kept, x = Kept(), leaf()

    def f(x):
        return kept(kept(kept(x * 2).sin()).sin()).cos()

    y = APIS[api](f, x)
    assert kept.alive() == [False] * 3
    y.sum().backward()


def test_the_measure_is_not_blind() -> None:
    """Without remat the same values are alive."""
    kept, x = Kept(), leaf()
    y = kept(kept(kept(x * 2).sin()).sin()).cos()
    assert kept.alive() == [True] * 3
    del y
    assert kept.alive() == [False] * 3


@pytest.mark.parametrize("api", ["held", "small"])
def test_what_is_to_be_held_is_held(api) -> None:
    kept, x = Kept(), leaf()

    def f(x):
        return kept(kept(kept(x * 2).sin()).sin()).cos()

    y = APIS[api](f, x)
    assert kept.alive() == [True] * 3
    y.sum().backward()
    del y
    assert kept.alive() == [False] * 3


@pytest.mark.parametrize("api", FORGETTING)
def test_random_numbers_are_freed(api) -> None:
    """They are drawn again; only the state of the generator is kept."""
    kept, x = Kept(), leaf(100, 100)

    def f(x):
        return kept(F.dropout(kept(x * 2))) * kept(torch.empty(100, 100).bernoulli_())

    y = APIS[api](f, x)
    assert kept.alive() == [False] * 3
    y.sum().backward()


def test_the_noise_of_dropout_is_freed(memory_of) -> None:
    x = leaf(100, 100)
    held = memory_of(lambda: remat.checkpoint(lambda x: (F.dropout(x) * 2).sin(), x))
    assert held < 1.2 * x.nbytes  # the output, and the state of the generator


def test_the_noise_of_dropout_is_freed_in_channels_last(memory_of) -> None:
    x = torch.randn(2, 8, 25, 25).to(memory_format=torch.channels_last).requires_grad_()
    held = memory_of(lambda: remat.checkpoint(lambda x: (F.dropout(x) * 2).sin(), x))
    assert held < 1.2 * x.nbytes


@pytest.mark.xfail(strict=True, reason="a copy of memory that nobody wrote to yet is held")
def test_a_buffer_that_is_filled_step_by_step_is_freed(memory_of) -> None:
    x = leaf(100, 100)

    def f(x):
        out = torch.empty(100, 100)
        for row in range(0, 100, 10):
            out[row : row + 10] = x.detach()[row : row + 10] * row
        return (x * out).sin()

    assert memory_of(lambda: remat.checkpoint(f, x)) < 1.2 * x.nbytes


@pytest.fixture
def memory_of():
    """Return a function that counts the bytes of tensors that are there after a call."""

    def tensors() -> dict[int, int]:
        found = {}
        for thing in gc.get_objects():
            if type(thing) is Tensor and thing.layout is torch.strided:
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        return found

    def measure(call) -> int:
        before = tensors()
        result = call()
        after = tensors()
        del result
        return sum(size for key, size in after.items() if key not in before)

    return measure


# -- a forward pass whose backward pass never comes ------------------------------------------------


@pytest.mark.parametrize("api", APIS)
def test_a_forward_pass_without_a_backward_pass(api) -> None:
    kept, x = Kept(), leaf()
    model = nn.Sequential(
        nn.Linear(50, 50), nn.BatchNorm1d(50), nn.ReLU(inplace=True), nn.Dropout()
    )

    def f(x):
        h = kept(model(kept(x * 2)))
        h += 1
        return kept(h.exp()) * h

    y = kept(APIS[api](f, x))
    z = kept(APIS[api](f, y))
    del y, z
    assert kept.alive() == [False] * len(kept.references)


@pytest.mark.parametrize("api", APIS)
def test_inputs_are_freed_with_the_graph(api) -> None:
    kept = Kept()
    w = leaf(50)
    x = kept(torch.randn(50, 50))
    h = kept(x * 2)
    y = APIS[api](lambda h: (h.abs() * w).sin() * h, h)
    del x, h
    assert kept.alive()[1]
    y.sum().backward()
    assert kept.alive() == [False] * 2


@pytest.mark.parametrize("api", APIS)
def test_nothing_stays_after_a_backward_pass(api) -> None:
    kept, x = Kept(), leaf()

    def f(x):
        h = kept((x * 2).sin())
        k = kept(h.exp())
        k += h
        return kept(F.dropout(k)) * h

    y = APIS[api](f, x)
    y.sum().backward()
    assert kept.alive() == [False] * 3


@pytest.mark.parametrize("api", APIS)
def test_nothing_is_kept_by_an_output_that_lives_on(api) -> None:
    """The output, detached, does not keep the recording of how it was made."""
    kept, x = Kept(), leaf()
    h = kept(x * 1)
    y = APIS[api](lambda h: (h * 2).sin(), h).detach()
    del h
    assert kept.alive() == [False]
    assert y.shape == x.shape


@pytest.mark.parametrize("api", APIS)
def test_nothing_is_kept_after_an_error(api) -> None:
    kept, x = Kept(), leaf()

    def f(x):
        kept((x * 2).sin()).exp()
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        APIS[api](f, x)
    assert kept.alive() == [False]


@pytest.mark.parametrize("api", FORGETTING)
def test_between_two_passes_nothing_is_held(api) -> None:
    """What was computed again for a pass that keeps its graph is freed at the pass's end."""
    x = leaf()
    y = APIS[api](lambda x: (x * 2).sin().exp().cos(), x)
    before = in_use()
    during = []
    x.register_hook(lambda g: during.append(in_use()))
    y.sum().backward(retain_graph=True)
    x.grad = None
    assert in_use() == before
    assert during[0] > before  # or the measurement would be blind


def test_recomputed_values_are_freed_on_the_way() -> None:
    """When the pass has come half way, what it has used is gone."""
    depth, size = 20, 100 * 100 * 4
    x = leaf(100, 100)
    peaks = []

    def f(x):
        for n in range(depth):
            x = x.sin()
            if n == depth // 2:
                x.register_hook(lambda g: peaks.append(in_use()))
        return x

    y = remat.checkpoint(f, x)
    start = in_use()
    y.sum().backward()
    assert peaks[0] - start < (depth // 2 + 5) * size
    assert peaks[0] - start > (depth // 2 - 5) * size  # or the measurement would be blind


def in_use() -> int:
    """Return the bytes of all tensors that Python knows."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) is Tensor:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


# -- marks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", FORGETTING)
def test_marks_are_held_and_the_rest_is_not(api) -> None:
    kept, x = Kept(), leaf()

    def f(x):
        a = kept(x * 2)
        b = kept(remat.mark_checkpoint(a.sin()))
        c = kept(b.exp())
        return c.cos()

    y = APIS[api](f, x)
    assert kept.alive() == [False, True, False]
    y.sum().backward()
    assert kept.alive() == [False] * 3


def test_what_leads_to_a_mark_is_not_held() -> None:
    kept, x = Kept(), leaf()

    def f(x):
        h = kept(remat.mark_checkpoint(kept(x.detach() * 2).sin()))
        return (h * x).exp()

    y = remat.checkpoint(f, x)
    assert kept.alive() == [False, True]
    y.sum().backward()
    del y
    assert kept.alive() == [False, False]


def test_a_single_tensor_is_dropped_from_a_holding_scope() -> None:
    kept, x = Kept(), leaf()
    with remat.CheckpointScope("holding", use_recomputation=False):
        a = kept(x * 2)
        b = kept(remat.checkpoint(a.sin()))
        y = kept(b.exp() * 2).sin()
        del a, b
    assert kept.alive()[0]
    assert not kept.alive()[1]
    y.sum().backward()


@pytest.mark.parametrize(("threshold", "alive"), [(10_000, True), (9_999, False), ("10KB", True)])
def test_a_single_tensor_above_a_threshold_is_dropped(threshold, alive) -> None:
    kept, x = Kept(), leaf()  # 10 000 bytes
    with remat.CheckpointScope("holding", use_recomputation=False):
        h = kept(remat.adaptive_checkpoint(x * 2, threshold=threshold))
        y = h.sin()
        del h
    assert kept.alive() == [alive]
    y.sum().backward()


@pytest.mark.parametrize(
    ("threshold", "alive"), [(30_000, True), (29_999, False), (0, False), ("30KB", True)]
)
def test_an_adaptive_segment_at_its_limit(threshold, alive) -> None:
    """Three values of 10 000 bytes: up to the limit all are held, above it none is."""
    kept, x = Kept(), leaf()

    def f(x):
        return kept(kept(kept(x * 2).sin() * 3).cos() * 4).sin() * 5

    y = remat.adaptive_checkpoint(f, x, threshold=threshold)
    plainly = f(x)
    assert kept.alive() == [alive] * 3 + [True] * 3
    y.sum().backward()
    del plainly


def test_views_count_once() -> None:
    kept, x = Kept(), leaf()

    def f(x):
        h = kept(x * 2)
        return h[:25].sin() + h[25:].cos() + h.view(2, 25, 50)[0].exp() * 0

    y = remat.adaptive_checkpoint(f, x, threshold=10_000 + 5_000)
    assert kept.alive() == [True]
    y.sum().backward()


def test_plain_is_plain() -> None:
    """The oracle of these tests runs a function and nothing else."""
    assert plain(lambda x, *, y: x + y, 1, y=2) == 3


def test_a_function_that_leads_back_to_its_region_leaves_nothing_behind() -> None:
    """It rebinds what it closes over; no backward pass comes."""

    def run() -> weakref.ref:
        h = torch.randn(3, 4, requires_grad=True) * 2

        def body():
            nonlocal h
            h = torch.sin(torch.sin(h))
            return h

        remat.checkpoint(body)()
        return weakref.ref(h.untyped_storage())

    assert run()() is None


# -- a scope around a whole loop -------------------------------------------------------------------

weight = torch.linspace(0, 1, 1 << 18).requires_grad_()
buffer = torch.zeros(1 << 18)


def gradient_of(y: Tensor) -> None:
    torch.autograd.grad(y.sum(), weight)


def training(x):
    gradient_of((x * weight).sin())


def no_backward_pass(x):
    (x * weight).sin().sum()


def no_gradients(x):
    with torch.no_grad():
        (x * weight).sin().sum()


def views_of_batches(x):
    gradient_of((x[1:] * weight[1:]).sin())


def batches_that_require_grad(x):
    gradient_of((x.requires_grad_() * weight).sin())


def a_segment_inside(x):
    gradient_of(remat.checkpoint(lambda x: (x * weight).sin().exp(), x))


def a_buffer_that_is_written_to(x):
    buffer.copy_(x)
    gradient_of((buffer * weight).sin())


def a_step(x):
    (gradient,) = torch.autograd.grad((x * weight).sin().sum(), weight)
    with torch.no_grad():
        weight.sub_(gradient, alpha=0.1)


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize(
    "step",
    [
        training,
        no_backward_pass,
        no_gradients,
        views_of_batches,
        batches_that_require_grad,
        a_segment_inside,
        a_buffer_that_is_written_to,
        a_step,
    ],
)
def test_a_scope_around_a_loop_does_not_hold_all_batches(step, hold) -> None:
    kept = Kept()
    most = 0
    with remat.CheckpointScope("loop", use_recomputation=not hold):
        for _ in range(25):
            x = kept(torch.from_numpy(np.ones(1 << 18, np.float32)))
            step(x)
            del x
            most = max(most, sum(kept.alive()))
    assert most < 10
    assert not any(kept.alive())


def test_what_a_backward_pass_will_need_is_not_forgotten() -> None:
    """Many batches, and one backward pass through all of them."""

    def loss(batches):
        total = torch.zeros(())
        for batch in batches:
            total = total + (torch.from_numpy(batch) * 2 * weight).sin().sum()
        return total

    batches = [np.full(1 << 18, n, np.float32) for n in range(12)]
    (expected,) = torch.autograd.grad(loss(batches), weight)
    with remat.CheckpointScope("loop"):
        total = loss(batches)
    (found,) = torch.autograd.grad(total, weight)
    assert torch.equal(found, expected)


def test_what_a_holding_scope_was_told_not_to_hold_is_not_kept_with_all_it_came_from() -> None:
    big, x = torch.randn(1000), torch.randn(1000, requires_grad=True)
    with remat.CheckpointScope("scope", use_recomputation=False):
        a = (big * x).exp()
        remat.checkpoint(a)
        a = a * a
        b = x.exp()
    alive = weakref.ref(big.untyped_storage())
    del big, a
    assert alive() is None
    b.sum().backward()
    assert torch.equal(x.grad, b)


# -- reference cycles ------------------------------------------------------------------------------


def _net() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(3)))


def _automatic(go_on):
    net, x = remat.auto_checkpoint(_net(), 0.9), torch.ones(4, 8)
    return lambda: go_on(net(x).sum())


def _managed(go_on):
    net, x, manager = _net(), torch.ones(4, 8), remat.CheckpointManager(memory_budget=0.9)

    def run():
        with manager:
            go_on(net(x).sum())

    return run


def _scope(go_on):
    net, x = _net(), torch.ones(4, 8)

    def run():
        with remat.CheckpointScope("net"):
            y = net(x)
        go_on(y.sum())

    return run


def _profiled(go_on):
    net, x = _net(), torch.ones(4, 8)

    def run():
        with remat.CheckpointProfiler():
            go_on(remat.checkpoint(net, x).sum())

    return run


def _loop_in_a_segment(go_on):
    def f(x):
        return remat.checkpointed_loop(torch.sin, (x * 2).sin().sin(), 3)[0]

    return lambda: go_on(remat.checkpoint(f, leaf()).sum())


def _in_a_thread(go_on):
    net, x = _net(), torch.ones(4, 8)

    def run():
        work = threading.Thread(target=lambda: go_on(remat.checkpoint(net, x).sum()))
        work.start()
        work.join()

    return run


CYCLES = [_automatic, _managed, _scope, _profiled, _loop_in_a_segment, _in_a_thread]


@pytest.mark.parametrize("has_backward", [True, False])
@pytest.mark.parametrize("make", CYCLES)
def test_passes_leave_nothing_to_the_garbage_collector(make, has_backward) -> None:
    run = make(Tensor.backward if has_backward else lambda loss: None)
    for _ in range(5):  # plans are made
        run()
    gc.collect()
    for _ in range(10):
        run()
    assert gc.collect() < 10  # less than one each
