"""Chains of layers on tensors: `ActivationCheckpointer` and `checkpoint_sequential`."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import remat
from remat import ActivationCheckpointer, CheckpointConfig, StoreError

configs = st.builds(CheckpointConfig, st.integers(0, 4), st.integers(0, 4))


def network(count: int, *, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(count)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(dropout)) for _ in range(count))
    )


def x_of(count: int = 3) -> torch.Tensor:
    torch.manual_seed(count)
    return torch.randn(count, 4, requires_grad=True)


def call(activation, layer):
    return layer(activation)


def by_hand(x, layers, forward=call):
    for layer in layers:
        x = forward(x, layer)
    return x


def gradients(output: torch.Tensor, x: torch.Tensor, net: nn.Module) -> list[torch.Tensor]:
    wanted = [*([x] if x.requires_grad else []), *(p for p in net.parameters() if p.requires_grad)]
    return list(torch.autograd.grad((output**2).sum(), wanted, allow_unused=True))


def assert_same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# -- gradients ---------------------------------------------------------------------------------


@given(configs, st.integers(1, 8))
@settings(max_examples=30)
def test_gradients_are_those_of_plain_autograd(config, count) -> None:
    net, x = network(count), x_of()
    checkpointer = ActivationCheckpointer(config)
    found = gradients(checkpointer.checkpointed_forward(x, net, call), x, net)
    assert_same(found, gradients(net(x), x, net))


def test_the_same_module_in_many_places() -> None:
    shared, x = network(1), x_of()
    checkpointer = ActivationCheckpointer(CheckpointConfig(3))
    found = gradients(checkpointer.checkpointed_forward(x, [shared] * 10, call), x, shared)
    expected = gradients(by_hand(x, [shared] * 10), x, shared)
    for one, other in zip(found, expected, strict=True):  # summed up in another order
        torch.testing.assert_close(one, other)
    assert checkpointer.num_checkpoints() == 4


def test_dropout_is_drawn_again_as_it_was() -> None:
    net, x = network(7, dropout=0.5), x_of(50)
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    torch.manual_seed(1)
    found = gradients(checkpointer.checkpointed_forward(x, net, call), x, net)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert_same(found, gradients(net(x), x, net))
    assert torch.equal(torch.get_rng_state(), state)


def test_statistics_are_gathered_once() -> None:
    net, x = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(6))), x_of(8)
    plain = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(6)))
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    found = gradients(checkpointer.checkpointed_forward(x, net, call), x, net)
    assert_same(found, gradients(plain(x), x, plain))
    assert_same(net.buffers(), plain.buffers())


@pytest.mark.parametrize("frozen", [1, 3, 4, 5])
def test_the_first_layers_may_be_frozen(frozen) -> None:
    net, x = network(6), x_of().detach()
    net[:frozen].requires_grad_(False)
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    found = gradients(checkpointer.checkpointed_forward(x, net, call), x, net)
    assert_same(found, gradients(net(x), x, net))


def test_nothing_requires_a_gradient() -> None:
    net, x = network(6).requires_grad_(False), x_of().detach()
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    y = checkpointer.checkpointed_forward(x, net, call)
    assert not y.requires_grad
    assert_same([y], [net(x)])
    assert checkpointer.num_checkpoints() == 3


def test_the_first_layer_may_be_an_embedding() -> None:
    net = nn.Sequential(nn.Embedding(5, 4), *network(4))
    tokens = torch.tensor([1, 4, 1])
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    found = gradients(checkpointer.checkpointed_forward(tokens, net, call), tokens, net)
    assert_same(found, gradients(net(tokens), tokens, net))


def test_activations_may_be_trees() -> None:
    net, x = network(5), x_of()

    def forward(state, layer):
        h = layer(state["h"])
        return {"h": h, "sum": [state["sum"][0] + h.sum()]}

    start = {"h": x, "sum": [torch.zeros(())]}
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    found = checkpointer.checkpointed_forward(start, net, forward)["sum"][0]
    expected = by_hand(start, net, forward)["sum"][0]
    assert_same(gradients(found, x, net), gradients(expected, x, net))
    assert checkpointer.get(2)["h"].shape == (3, 4)


def test_gradients_reach_tensors_that_are_parts_of_graphs() -> None:
    scale, x = torch.ones(4, requires_grad=True), x_of()

    def run(chain):
        doubled = scale * 2
        y = chain(x, range(5), lambda h, i: torch.tanh(h * doubled) + i)
        return torch.autograd.grad(y.sum(), [x, scale])

    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    for one, other in zip(run(checkpointer.checkpointed_forward), run(by_hand), strict=True):
        torch.testing.assert_close(one, other)


def test_layers_that_write_to_their_input_are_refused_or_right() -> None:
    x = x_of()
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    with pytest.raises((RuntimeError, remat.UnsupportedError), match=r"in-place|in place"):
        checkpointer.checkpointed_forward(x, net, call)
    net = nn.Sequential(nn.LeakyReLU(inplace=True), *net, nn.LeakyReLU(inplace=True))
    found = gradients(checkpointer.checkpointed_forward(x * 1, net, call), x, net)
    assert_same(found, gradients(net(x * 1), x, net))


def test_a_profiler_sees_what_a_pass_saves() -> None:
    net, x = network(32), x_of(100)
    checkpointer = ActivationCheckpointer(CheckpointConfig(6))
    with remat.CheckpointProfiler() as profiler:
        checkpointer.checkpointed_forward(x, net, call).sum().backward()
    assert profiler.recompute_count() == 1
    assert profiler.memory_saved() > 20 * x.nbytes


def test_a_checkpointer_is_copied_with_what_it_holds() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, use_mixed_precision=True))
    checkpointer.checkpointed_forward(x_of(), network(5), call).sum().backward()
    for other in (copy.deepcopy(checkpointer), pickle.loads(pickle.dumps(checkpointer))):
        assert_same([other.get(2)], [checkpointer.get(2)])
        assert repr(other) == repr(checkpointer)


# -- what is held ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("most", "held"), [(64, [0, 2, 4, 6]), (2, [4, 6]), (0, [])])
def test_what_is_held_and_counted(mode, most, held) -> None:
    net, x = network(7), x_of()
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, most))
    with mode():
        y = checkpointer.checkpointed_forward(x, range(7), lambda h, i: net[i](h))
    assert_same([y], [net(x)])
    assert checkpointer.num_checkpoints() == len(held)
    assert checkpointer.memory_stored_bytes() == len(held) * 48
    assert checkpointer.memory_saved_bytes() == (7 - len(held)) * 48
    for number in held:
        activation = checkpointer.get(number)
        assert not activation.requires_grad
        assert_same([activation], [by_hand(x, net[: number + 1]).detach()])
    if held:
        again = checkpointer.recompute_from_checkpoint(5, range(7), lambda h, i: net[i](h))
        assert_same([again], [net[:6](x)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixed_precision_stores_two_bytes_a_number(dtype) -> None:
    net, x = network(7).to(dtype), x_of(100).detach().to(dtype).requires_grad_()
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, use_mixed_precision=True))
    y = checkpointer.checkpointed_forward(x, net, call)
    assert_same([y], [net(x)])  # on the way ahead nothing is rounded
    assert checkpointer.memory_stored_bytes() == 4 * 400 * 2
    assert checkpointer.get(4).dtype == dtype
    expected = gradients(net(x), x, net)
    found = gradients(y, x, net)
    assert any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def test_what_float16_cannot_hold_is_refused() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, use_mixed_precision=True))
    with pytest.raises(
        StoreError, match=r"layer 2: .* the value 70000.* use_mixed_precision=False"
    ):
        checkpointer.save(2, torch.tensor([7e4]))
    with pytest.raises(StoreError, match=r"layer 2: .* the value -80000.* use_mixed_precision"):
        checkpointer.checkpointed_forward(
            torch.tensor([-10.0], requires_grad=True), range(4), lambda h, i: h * 20
        )


def test_what_is_held_is_a_copy() -> None:
    x = x_of()
    checkpointer = ActivationCheckpointer()
    own = x * 2
    checkpointer.save(5, own)
    with torch.no_grad():
        own.zero_()
        checkpointer.get(5).zero_()
    assert_same([checkpointer.get(5)], [x.detach() * 2])


def test_activations_that_the_caller_writes_to() -> None:
    net, x = network(5), x_of()
    seen = []

    def forward(h, layer):
        seen.append(layer(h))
        return seen[-1]

    checkpointer = ActivationCheckpointer(CheckpointConfig(1))
    with torch.no_grad():
        checkpointer.checkpointed_forward(x, net, forward)
        seen[2].zero_()
        assert_same([checkpointer.get(2)], [net[:3](x)])


# -- whatever happens between ahead and back ---------------------------------------------------


def clear(checkpointer, net, x):
    checkpointer.clear()


def pass_by(checkpointer, net, x):
    checkpointer.checkpointed_forward(2 * x, net, call)


def overwrite(checkpointer, net, x):
    checkpointer.clear()
    checkpointer.save(2, torch.zeros(3, 4))


def write_to(checkpointer, net, x):
    checkpointer.get(6).zero_()


@pytest.mark.parametrize("between", [clear, pass_by, overwrite, write_to])
@pytest.mark.parametrize("most", [1, 64])
def test_a_pass_keeps_what_it_needs(between, most) -> None:
    net, x = network(7), x_of()
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, most))
    y = checkpointer.checkpointed_forward(x, net, call)
    between(checkpointer, net, x)
    held = checkpointer.num_checkpoints()
    assert_same(gradients(y, x, net), gradients(net(x), x, net))
    assert checkpointer.num_checkpoints() == held


def test_two_passes_go_back_in_any_order() -> None:
    net, x = network(7), x_of()
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    first = checkpointer.checkpointed_forward(x, net, call)
    second = checkpointer.checkpointed_forward(2 * x, net, call)
    assert_same(gradients(first, x, net), gradients(net(x), x, net))
    assert_same(gradients(second, x, net), gradients(net(2 * x), x, net))


def test_going_back_twice() -> None:
    net, x = network(7), x_of()
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    y = (checkpointer.checkpointed_forward(x, net, call) ** 2).sum()
    (expected,) = torch.autograd.grad((net(x) ** 2).sum(), x)
    (once,) = torch.autograd.grad(y, x, retain_graph=True)
    checkpointer.clear()
    (twice,) = torch.autograd.grad(y, x)
    assert_same([once, twice], [expected, expected])
    assert checkpointer.num_checkpoints() == 0


def test_nothing_stays_after_clear() -> None:
    def held() -> int:
        gc.collect()
        tensors = (o for o in gc.get_objects() if type(o) is torch.Tensor)
        return sum(tensor.shape == (77, 4) for tensor in tensors)

    net, x = network(7), x_of(77)
    before = held()
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    checkpointer.checkpointed_forward(x, net, call).sum().backward()
    assert held() == before + 4
    checkpointer.clear()
    assert held() == before


# -- checkpoint_sequential ---------------------------------------------------------------------


@pytest.mark.parametrize("segments", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("as_list", [True, False])
def test_sequential_gives_the_gradients_of_the_plain_model(segments, as_list) -> None:
    net, x = network(7, dropout=0.3), x_of(20)
    functions = list(net) if as_list else net
    torch.manual_seed(3)
    y = remat.checkpoint_sequential(functions, x, segments=segments, use_reentrant=False)
    found = gradients(y, x, net)
    torch.manual_seed(3)
    assert_same(found, gradients(net(x), x, net))


def test_sequential_with_batch_normalisation_and_layers_that_work_in_place() -> None:
    torch.manual_seed(0)

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            *(m for _ in range(5) for m in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(True)))
        )

    net, plain, x = make(), make(), x_of(8)
    y = remat.checkpoint_sequential(net, x, segments=5)
    assert_same(gradients(y, x, net), gradients(plain(x), x, plain))
    assert_same(net.buffers(), plain.buffers())


def test_sequential_with_tuples_between_layers() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair):
            h, total = pair
            h = torch.sin(self.linear(h))
            return h, total + h.sum()

    net, x = nn.Sequential(*(Pair() for _ in range(6))), x_of()
    y, total = remat.checkpoint_sequential(net, (x, torch.zeros(())), segments=3)
    z, plain = net((x, torch.zeros(())))
    assert_same(gradients(y * total, x, net), gradients(z * plain, x, net))


def test_sequential_saves_memory() -> None:
    net, x = network(16), x_of(100)
    with remat.CheckpointProfiler() as profiler:
        remat.checkpoint_sequential(net, x).sum().backward()
    assert profiler.checkpoint_count() == profiler.recompute_count() == 3
    # A layer holds its input and that of GELU. Without segments 32 of these, with 4 of them 8 and
    # three inputs.
    assert profiler.memory_saved() > 10 * x.nbytes


def test_a_single_module_is_no_chain() -> None:
    with pytest.raises(
        TypeError, match=r"functions must be a list or an nn\.Sequential, got Linear"
    ):
        remat.checkpoint_sequential(nn.Linear(4, 4), x_of())
