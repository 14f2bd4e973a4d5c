"""Nodes that are used by hand, and the manners of a scope."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest

import remat

torch = pytest.importorskip("torch")


def test_a_node_by_hand_holds_and_computes_in_order() -> None:
    node = remat.CheckpointNode()
    assert node.is_checkpoint
    assert (node.saved_activations, node.recompute_functions, node.recompute()) == ([], [], [])
    first, second = torch.ones(2), torch.zeros(3)
    node.save_activations(first, second)
    node.save_activations(7.0)
    assert [id(held) for held in node.saved_activations[:2]] == [id(first), id(second)]
    node.add_recompute_function(lambda: {"b": 2, "a": (1,)})
    node.add_recompute_function(lambda: node.saved_activations[0] + 1)
    *numbers, tensor = node.recompute()
    assert sorted(numbers) == [1, 2]
    assert torch.equal(tensor, first + 1)
    node.clear_saved_activations()
    assert node.saved_activations == []
    assert len(node.recompute_functions) == 2


def test_a_node_takes_functions_only() -> None:
    with pytest.raises(TypeError, match="function must be a function, got 3"):
        remat.CheckpointNode().add_recompute_function(3.0)


def test_what_was_added_to_the_node_of_a_scope_comes_after_what_it_computes() -> None:
    x = torch.randn(3, requires_grad=True)
    with remat.CheckpointScope("part") as scope:
        y = x.exp().sin()
    (node,) = scope.nodes
    node.save_activations(x.detach())
    node.add_recompute_function(lambda: "mine")
    *computed, mine = node.recompute()
    assert mine == "mine"
    assert any(torch.equal(tensor, x.exp()) for tensor in computed)
    node.clear_saved_activations()
    y.sum().backward()
    assert torch.equal(x.grad, (x.exp().cos() * x.exp()).detach())


def test_a_node_shows_what_it_holds() -> None:
    x = torch.randn(1000, requires_grad=True)
    scope = remat.CheckpointScope("part")
    with scope:
        y = remat.mark_checkpoint(x.exp()).sin().cos()
    (node,) = scope.nodes
    shown = "<CheckpointNode of scope 'part': 1 activation held in 4.0 KB, 1 recompute function>"
    assert repr(node) == shown
    y.sum().backward()
    del y
    gc.collect()
    assert repr(node) == (
        "<CheckpointNode of scope 'part': 0 activations held in 0 B, 0 recompute functions, its "
        "backward pass is done>"
    )


@pytest.mark.parametrize(
    "renew", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_a_scope_is_copied_without_what_it_has_seen(renew) -> None:
    scope = remat.CheckpointScope("part", enabled=True, use_recomputation=False)
    with scope:
        y = torch.ones(3, requires_grad=True).exp().sin()
    other = renew(scope)
    assert (other.name, other.is_enabled, other.use_recomputation) == ("part", True, False)
    assert other.nodes == []
    assert len(scope.nodes) == 1
    assert repr(other) == "CheckpointScope('part', enabled=True, use_recomputation=False)"
    y.sum().backward()


def test_a_name_is_text() -> None:
    with pytest.raises(TypeError, match="name must be text, got function"):
        remat.CheckpointScope(lambda x: x)


@pytest.mark.parametrize("option", ["enabled", "use_recomputation"])
@pytest.mark.parametrize("value", ["no", 0, None], ids=repr)
def test_an_option_is_true_or_false(option: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{option} must be True or False, got {value!r}"):
        remat.CheckpointScope("part", **{option: value})


@pytest.mark.parametrize("enabled", [True, False])
def test_leaving_a_scope_that_was_not_entered_is_an_error(enabled: bool) -> None:
    scope = remat.CheckpointScope("part", enabled=enabled)
    with pytest.raises(remat.RematError, match=r"'part' was left more often than .* `with scope:"):
        scope.__exit__(None, None, None)


def test_leaving_a_scope_twice_is_an_error_and_it_still_works() -> None:
    x = torch.ones(3, requires_grad=True)
    scope = remat.CheckpointScope("part")
    with scope:
        x.exp().sin()
    with pytest.raises(remat.RematError, match="left more often"):
        scope.__exit__(None, None, None)
    with scope:
        y = x.exp().sin()
    y.sum().backward()
    assert torch.equal(x.grad, (x.exp().cos() * x.exp()).detach())


def test_a_scope_is_left_in_the_thread_that_entered_it() -> None:
    scope, errors = remat.CheckpointScope("part"), []

    def leave() -> None:
        try:
            scope.__exit__(None, None, None)
        except remat.RematError as error:
            errors.append(str(error))

    with scope:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        y = torch.ones(3, requires_grad=True).exp().sin()
    assert "entered in this thread" in errors[0]
    y.sum().backward()


def test_a_scope_that_is_not_enabled_does_nothing() -> None:
    x = torch.ones(3, requires_grad=True)
    with remat.CheckpointProfiler() as profiler, remat.CheckpointScope("off", enabled=False) as off:
        x.exp().sin().sum().backward()
    assert off.nodes == []
    assert (profiler.checkpoint_count(), profiler.recompute_count()) == (0, 0)
