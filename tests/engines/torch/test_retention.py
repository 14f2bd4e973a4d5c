"""What a region holds: no more than it needs, and recomputation starts from the nearest of it."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import remat
from remat import policies
from remat.engines.torch.memory.geometry import geometry_of, may_overlap

from .oracles import APIS, plain


@pytest.fixture
def live_bytes():
    """Return a function that counts the bytes of all tensors there are, each storage once."""

    def count() -> int:
        gc.collect()
        found = {}
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, nn.Parameter) and thing.layout is torch.strided:
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        return sum(found.values())

    return count


# -- a scope around training holds nothing of its past ---------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_state_of_an_optimizer_that_is_born_in_a_scope(
    optimizer, set_to_none, live_bytes
) -> None:
    def levels(scope) -> list[int]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(3)])
        steps = optimizer(model.parameters(), lr=0.01)
        x, found = torch.randn(8, 128), []
        with scope:
            for _ in range(4):
                model(x).square().mean().backward()
                steps.step()
                steps.zero_grad(set_to_none)
                found.append(live_bytes())
        return found

    expected = levels(nullcontext())
    found = levels(remat.CheckpointScope("training"))
    slack = 128 * 128 * 4  # one weight
    assert all(ours <= theirs + slack for ours, theirs in zip(found, expected, strict=True))


def test_a_running_total_in_a_scope(live_bytes) -> None:
    model, total, levels = nn.Linear(128, 128), torch.zeros(()), []
    with remat.CheckpointScope("training"):
        for _ in range(5):
            loss = model(torch.randn(64, 128)).sin().square().mean()
            loss.backward()
            total = total + loss.detach()
            levels.append(live_bytes())
    assert max(levels[1:]) <= levels[0] + 4096


def test_a_second_graph_survives_the_backward_pass_of_the_first() -> None:
    """The pass ends an iteration; what was recorded before it can still be recomputed."""

    def gradients(scope) -> list[torch.Tensor]:
        x = torch.linspace(0.0, 1.0, 12).requires_grad_()
        with scope:
            a, b = x.exp().sin(), x.cos().exp()
            a.sum().backward()
            c = (b * a.detach()).sin()  # both are from before the pass
            (c.sum() + b.sin().sum()).backward()
        return [x.grad]

    assert torch.equal(*gradients(nullcontext()), *gradients(remat.CheckpointScope("two graphs")))


# -- writes to parts of memory ---------------------------------------------------------------------


def test_a_cache_that_regions_write_to_row_by_row(live_bytes) -> None:
    """What they read is not overwritten, so nothing is copied."""
    rows, width = 16, 64 * 512

    def run(call) -> tuple[torch.Tensor, int]:
        start = live_bytes()
        cache = torch.zeros(rows, 1, width)
        x = torch.linspace(0.0, 1.0, width).requires_grad_()
        h = x
        for row in range(rows):

            def step(h, row=row):
                cache[row, 0].copy_(h.detach())
                return torch.sin(h * 2) + cache[: row + 1].sum((0, 1))

            h = call(step, h)
        held = live_bytes() - start
        h.sum().backward()
        return x.grad, held

    expected, theirs = run(plain)
    found, ours = run(remat.checkpoint)
    assert torch.equal(found, expected)
    assert ours <= theirs + 2 * width * 4


def test_a_row_that_was_read_is_saved_before_it_is_overwritten() -> None:
    def run(call) -> torch.Tensor:
        cache = torch.zeros(4, 50_000)
        x = torch.linspace(0.0, 1.0, 50_000).requires_grad_()

        def step(h, row):
            cache[row].copy_(h.detach())
            return torch.sin(h + cache[row])

        h = x
        for row in (0, 1, 0, 1, 2):
            h = call(step, h, row)
        h.sum().backward()
        return x.grad

    assert torch.equal(run(remat.checkpoint), run(plain))


def test_a_large_buffer_that_is_written_to_after_its_region_is_an_error() -> None:
    cache = torch.zeros(50_000)
    x = torch.linspace(0.0, 1.0, 50_000).requires_grad_()

    def step(h):
        cache.copy_(h.detach())
        return torch.sin(h + cache)

    y = remat.checkpoint(step, x)
    cache.zero_()
    with pytest.raises(remat.ModifiedInputError, match="modified by an inplace operation"):
        y.sum().backward()


def test_parameters_that_are_views_of_one_buffer(live_bytes) -> None:
    count, side = 8, 128

    def train(scope) -> tuple[torch.Tensor, int]:
        start = live_bytes()
        torch.manual_seed(0)
        flat = torch.randn(count * side * side) / side
        parameters = [nn.Parameter(torch.empty(0)) for _ in range(count)]
        for part, parameter in zip(flat.view(count, side, side), parameters, strict=True):
            parameter.data = part
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        x = torch.randn(4, side)
        with scope:
            for _ in range(2):
                h = x
                for parameter in parameters:
                    h = torch.tanh(h @ parameter)
                h.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                held = live_bytes() - start
        return flat, held

    expected, theirs = train(nullcontext())
    found, ours = train(remat.CheckpointScope("training"))
    assert torch.equal(found, expected)
    assert ours <= theirs + 2 * side * side * 4


GRID = torch.zeros(4, 6, 8)
PARTS = {
    "apart along the first axis": (GRID[:2], GRID[2:], False),
    "apart along the last axis": (GRID[..., :3], GRID[..., 3:], False),
    "apart along the middle": (GRID[:, 1:2], GRID[:, 2:5], False),
    "a row and a column": (GRID[1, 2], GRID[:, :, 3], True),
    "a row and another column": (GRID[1, :, 2], GRID[2:, :, 2], False),
    "interleaved": (GRID[::2], GRID[1::2], False),
    "interleaved diagonals": (GRID[0, ::2].diagonal(), GRID[0, 1::2].diagonal(), False),
    "a diagonal and a row beside it": (GRID[0].diagonal(), GRID[0, 1:, 0], True),  # in doubt
    "transposed": (GRID.transpose(0, 2)[:3], GRID[..., 3:], False),
    "the same": (GRID[1:3], GRID[2:], True),
    "empty": (GRID[:0], GRID, False),
    "expanded": (GRID[0, 0, 0].expand(5), GRID[0, 0, 1:], False),
    "another type": (GRID[:2].view(torch.int16), GRID[1:], True),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_overlap(name) -> None:
    one, other, expected = PARTS[name]
    assert may_overlap(geometry_of(one), geometry_of(other)) == expected
    assert may_overlap(geometry_of(other), geometry_of(one)) == expected


def cut(tensor: torch.Tensor, slices, swap: bool) -> torch.Tensor:
    for axis, (start, stop, step) in enumerate(slices):
        tensor = tensor[(slice(None),) * axis + (slice(start, stop, step),)]
    return tensor.transpose(0, -1) if swap else tensor


SLICES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=3
)


@given(SLICES, st.booleans(), SLICES, st.booleans())
def test_what_overlaps_is_never_taken_to_be_apart(slices, swap, others, swap_other) -> None:
    numbers = torch.arange(4 * 3 * 5).reshape(4, 3, 5)
    one, other = cut(numbers, slices, swap), cut(numbers, others, swap_other)
    if set(one.flatten().tolist()) & set(other.flatten().tolist()):
        assert may_overlap(geometry_of(one), geometry_of(other))


# -- recomputation starts from the nearest value held ----------------------------------------------


class Block(nn.Module):
    """A transformer block; `single` is called on its three cheap activations."""

    def __init__(self, single=lambda x: x, attention=lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm2, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.single, self.attention = single, attention

    def forward(self, x):
        heads = self.qkv(self.single(self.norm(x))).view(2, 128, 3, 1, 32).permute(2, 0, 3, 1, 4)
        y = self.attention(F.scaled_dot_product_attention(*heads, is_causal=True))
        x = x + self.out(y.transpose(1, 2).reshape(2, 128, 32))
        return x + self.down(self.single(F.gelu(self.up(self.single(self.norm2(x))))))


def gradient_of(block, run) -> torch.Tensor:
    x = torch.linspace(-1.0, 1.0, 2 * 128 * 32).reshape(2, 128, 32).requires_grad_()
    run(block, x).square().sum().backward()
    return x.grad


def test_three_cheap_tensors_cost_three_ops(replayed) -> None:
    block = Block(single=remat.checkpoint)
    with remat.CheckpointScope("held", use_recomputation=False):
        assert torch.equal(gradient_of(block, APIS["held"]), gradient_of(Block(), plain))
    assert replayed == {"native_layer_norm": 2, "gelu": 1}


def test_a_marked_attention_is_not_run_again(replayed) -> None:
    """Not even for its logsumexp, which is small beside its output."""
    block = Block(attention=remat.mark_checkpoint)
    found = gradient_of(block, remat.checkpoint)
    assert torch.equal(found, gradient_of(Block(), plain))
    assert replayed["_scaled_dot_product_flash_attention_for_cpu"] == 0
    assert replayed["addmm"] == 3  # (the last one is nobody's input)


def test_without_a_mark_the_attention_runs_once_and_its_logsumexp_is_freed(replayed) -> None:
    x = torch.linspace(-1.0, 1.0, 2 * 128 * 32).reshape(2, 128, 32).requires_grad_()
    block = Block()
    with remat.CheckpointScope("block") as scope:
        y = block(x)
    assert scope.nodes[0].saved_activations == []
    y.sum().backward()
    assert replayed["_scaled_dot_product_flash_attention_for_cpu"] == 1


@pytest.mark.parametrize(
    ("policy", "matmuls", "attentions"),
    [
        (policies.save_nothing, 3, 1),
        (policies.save_matmuls, 0, 1),
        (policies.save_attention, 3, 0),
        (policies.either(policies.save_matmuls, policies.save_attention), 0, 0),
        (policies.save_ops("addmm"), 0, 1),
        (policies.save_ops("aten.addmm.default"), 0, 1),
        (policies.save_everything, 0, 0),
        (policies.save_below("1GB"), 0, 0),
        (policies.save_below(1), 3, 1),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:the policy:remat.RematWarning")
def test_what_a_policy_keeps_is_not_run_again(policy, matmuls, attentions, replayed) -> None:
    found = gradient_of(Block(), partial(remat.checkpoint, policy=policy))
    assert torch.equal(found, gradient_of(Block(), plain))
    assert replayed["addmm"] == matmuls
    assert replayed["_scaled_dot_product_flash_attention_for_cpu"] == attentions


def test_an_inner_region_starts_from_what_its_parent_saved(replayed) -> None:
    def inner(x):
        return x.sin().sin()

    def outer(x):
        return remat.checkpoint(inner, remat.checkpoint(inner, x.exp()))

    def twice(x):
        return inner(inner(x.exp()))

    x = torch.linspace(0.0, 1.0, 12).requires_grad_()
    remat.checkpoint(outer, x).sum().backward()
    assert replayed["exp"] == 1  # for both inner regions, and for its own saved output
    found, x.grad = x.grad, None
    twice(x).sum().backward()
    assert torch.equal(found, x.grad)
