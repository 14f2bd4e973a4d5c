"""Policies on PyTorch: ours, plain functions, and those of torch's selective checkpointing."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import remat
from remat import policies

aten = torch.ops.aten
MODEL = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8))


def save_products(ctx, op, *args, **kwargs):
    return (
        CheckpointPolicy.MUST_SAVE
        if op is aten.addmm.default
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def save_products_by_bool(ctx, op, *args, **kwargs):
    assert not ctx.is_recompute
    assert isinstance(args[0], torch.Tensor)
    return op is aten.addmm.default


PRODUCTS = {
    "ready": {"policy": policies.save_matmuls},
    "function": {"policy": lambda op, shapes, nbytes, name: op == "aten.addmm.default"},
    "selective": {"policy": save_products},
    "bool": {"policy": save_products_by_bool},
    "list": {"policy": [aten.addmm.default]},
    "context_fn": {
        "context_fn": functools.partial(create_selective_checkpoint_contexts, save_products)
    },
    "context_fn of a list": {
        "context_fn": functools.partial(create_selective_checkpoint_contexts, [aten.addmm.default])
    },
}


def gradients(run) -> list[torch.Tensor]:
    x = torch.linspace(-1.0, 1.0, 32).reshape(4, 8).requires_grad_()
    return list(torch.autograd.grad(run(MODEL, x).sin().sum(), [x, *MODEL.parameters()]))


def in_scope(policy):
    def run(fn, x):
        with remat.CheckpointScope("scope", policy=policy):
            return fn(x)

    return run


def in_group(policy):
    return remat.CheckpointGroup("group", policy=policy).checkpoint_fn


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_product_is_run_again(name, replayed) -> None:
    found = gradients(functools.partial(remat.checkpoint, **PRODUCTS[name]))
    assert all(map(torch.equal, found, gradients(lambda f, x: f(x))))
    assert replayed["addmm"] == 0
    assert replayed["gelu"] == 1


@pytest.mark.parametrize("make", [in_scope, in_group])
@pytest.mark.parametrize("policy", [policies.save_matmuls, save_products, [aten.addmm.default]])
def test_scopes_and_groups_take_policies_too(make, policy, replayed) -> None:
    found = gradients(make(policy))
    assert all(map(torch.equal, found, gradients(lambda f, x: f(x))))
    assert replayed["addmm"] == 0
    assert replayed["gelu"] == 1


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_the_compiler_gets_them_as_it_knows_them(name) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda f, x: remat.checkpoint(f, x, **PRODUCTS[name]), fullgraph=True, backend="aot_eager"
    )
    found, expected = gradients(compiled), gradients(lambda f, x: f(x))
    assert all(torch.allclose(*pair) for pair in zip(found, expected, strict=True))
    torch._dynamo.reset()


def test_a_function_is_told_the_op_its_shapes_and_bytes() -> None:
    seen = []

    def policy(op, shapes, nbytes, name):
        seen.append((op, shapes, nbytes, name))
        return False

    with pytest.warns(remat.RematWarning, match="kept nothing"):
        remat.checkpoint(MODEL.forward, torch.ones(4, 8), policy=policy)
    assert seen[0] == ("aten.addmm.default", ((4, 8), (8,), (4, 8), (8, 8)), 128, "")


@pytest.mark.parametrize(
    "policy", [policies.save_ops("mm"), policies.save_names("attn"), lambda ctx, *args: False]
)
def test_a_policy_that_matches_nothing_warns(policy) -> None:
    """An overload packet, or a name that nobody gave: all would be recomputed unnoticed."""
    with pytest.warns(remat.RematWarning, match="kept nothing of .*: no op or tensor matched"):
        remat.checkpoint(lambda x: MODEL(x) * 1, torch.ones(4, 8), policy=policy)


def test_a_named_tensor_is_kept(replayed) -> None:
    def block(x):
        y = remat.name(x.exp().sin(), "sine")
        return remat.name(y.cos(), "cosine").exp()

    x = torch.linspace(0.0, 1.0, 12).requires_grad_()
    remat.checkpoint(block, x, policy=policies.save_names("sine")).sum().backward()
    found, x.grad = x.grad, None
    block(x).sum().backward()
    assert torch.equal(found, x.grad)
    assert replayed == {"exp": 2, "cos": 1}  # the first one for its own backward; not the sine


def test_a_name_outside_of_a_region_changes_nothing() -> None:
    x = torch.ones(3)
    assert remat.name(x, "attn") is x


@pytest.mark.parametrize("name", [None, "", 3])
def test_a_name_is_text(name) -> None:
    with pytest.raises(TypeError, match="name must be text"):
        remat.name(torch.ones(3), name)


def test_a_tensor_that_is_to_be_recomputed_is_not_kept_by_a_policy(replayed) -> None:
    x = torch.linspace(0.0, 1.0, 12).requires_grad_()
    with remat.CheckpointScope("held", policy=policies.save_everything):
        y = remat.checkpoint(x.exp()).sin()
    y.sum().backward()
    assert replayed == {"exp": 1}


def test_what_a_policy_keeps_is_freed_with_the_graph() -> None:
    x = torch.linspace(0.0, 1.0, 12).requires_grad_()
    with remat.CheckpointScope("some", policy=policies.save_ops("exp")) as scope:
        y = x.exp().sin()
    (node,) = scope.nodes
    assert [t.shape for t in node.saved_activations] == [(12,)]
    y.sum().backward()
    assert scope.nodes == [] or scope.nodes[0].saved_activations == []


def test_dropping_what_a_policy_keeps(replayed) -> None:
    x = torch.linspace(0.0, 1.0, 12).requires_grad_()
    with remat.CheckpointScope("some", policy=policies.save_ops("exp")) as scope:
        y = x.exp().sin()
    scope.nodes[0].clear_saved_activations()
    y.sum().backward()
    assert replayed == {"exp": 1}


def offload(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_CPU_OFFLOAD


def test_offloading_is_said_to_be_unsupported_and_keeps() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients(functools.partial(remat.checkpoint, policy=offload))
    assert any("not supported yet" in str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "matmuls"}, TypeError, "one of remat.policies"),
        ({"policy": [aten.addmm]}, TypeError, r"write aten.addmm.default"),
        ({"policy": lambda ctx, *args: "keep"}, TypeError, "a CheckpointPolicy or a bool"),
        ({"policy": policies.save_matmuls, "context_fn": list}, ValueError, "not both"),
        ({"context_fn": 3}, TypeError, "context_fn must be a function"),
        ({"determinism_check": "strict"}, ValueError, "determinism_check"),
        ({"debug": "yes"}, TypeError, "debug must be True or False"),
        ({"early_stop": 1}, TypeError, "early_stop must be True or False"),
        ({"preserve_rng_state": "no"}, TypeError, "preserve_rng_state must be True or False"),
    ],
)
def test_bad_options_are_named(options, error, message) -> None:
    with pytest.raises(error, match=message):
        remat.checkpoint(MODEL, torch.ones(4, 8), **options)


def test_contexts_of_ones_own_are_refused() -> None:
    def contexts():
        return torch.autograd.set_detect_anomaly(True), torch.autograd.set_detect_anomaly(False)

    with pytest.raises(remat.UnsupportedError, match="enter other contexts inside of fn"):
        remat.checkpoint(MODEL, torch.ones(4, 8), context_fn=contexts)


def test_the_harmless_options_of_torch_are_accepted() -> None:
    options = {
        "use_reentrant": False,
        "determinism_check": "none",
        "debug": True,
        "early_stop": False,
        "context_fn": torch.utils.checkpoint.noop_context_fn,
    }
    found = gradients(functools.partial(remat.checkpoint, **options))
    assert all(map(torch.equal, found, gradients(lambda f, x: f(x))))
