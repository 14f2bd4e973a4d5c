"""What is right: the same program without remat, from equal copies of its inputs, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import remat
from remat.engines.torch.budget.manager import TorchBudget, run_within
from remat.plans import Plan, Trace
from remat.plans.planner import Planner

Run = Callable[..., Any]  # runs a function with its arguments, checkpointed in some way or not


def plain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def in_a_scope(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with remat.CheckpointScope("scope"):
        return fn(*args, **kwargs)


def in_a_holding_scope(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with remat.CheckpointScope("holding", use_recomputation=False):
        return fn(*args, **kwargs)


def in_a_scope_in_a_segment(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def segment(*args: Any, **kwargs: Any) -> Any:
        with remat.CheckpointScope("inner"):
            return fn(*args, **kwargs)

    return remat.checkpoint(segment, *args, **kwargs)


def in_a_group(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return remat.CheckpointGroup("group").checkpoint_fn(fn, *args, **kwargs)


def in_a_budget(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function as an unplanned pass that has room for nothing: all is evicted."""
    planner = planning(lambda trace, budget: Plan(frozenset()))
    return run_within(TorchBudget(1, planner), fn, args, kwargs)


class MadePlans:
    """The plans that a function `make(trace, budget)` makes (plans.planner.Plans)."""

    memory_bytes = 0

    def __init__(self, make: Callable[[Trace, int], Plan], trace: Trace) -> None:
        self._make = make
        self._trace = trace

    def plan(self, memory_budget: Any) -> Plan:
        return self._make(self._trace, memory_budget)


def planning(make: Callable[[Trace, int], Plan]) -> Planner:
    """Return a planner for budgets."""
    return partial(MadePlans, make)


APIS: dict[str, Run] = {
    "segment": remat.checkpoint,
    "scope": in_a_scope,
    "nested": in_a_scope_in_a_segment,
    "group": in_a_group,
    "drawn": partial(remat.checkpoint, preserve_rng_state=False),
    "held": in_a_holding_scope,
    "small": partial(remat.adaptive_checkpoint, threshold="1GB"),
    "budget": in_a_budget,
    "medium": partial(remat.adaptive_checkpoint, threshold=300),
}


def same(program: Callable[..., Any], make_inputs: Callable[[], Any], run: Run) -> Any:
    """Compare `program(run, *make_inputs())` with the same without remat, all of it bit for bit.

    Programs return tensors in any tree. All of them are differentiated, with fixed seeds; the
    gradients of all leaves among the inputs, and of all parameters, are compared, the buffers,
    what became of the inputs, and the random state.
    """
    torch.manual_seed(0)
    inputs = make_inputs()
    expected = outcome(program, plain, copy.deepcopy(inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.RematWarning)
        found = outcome(program, run, copy.deepcopy(inputs))
    assert_same(found, expected)
    return found


def outcome(program: Callable[..., Any], run: Run, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Run a program and its backward pass; return all that can be seen of it."""
    torch.manual_seed(1)
    outputs = list(tensors_in(program(run, *inputs)))
    backward(outputs)
    return {
        "outputs": outputs,
        "inputs": list(tensors_in(inputs)),
        "gradients": [leaf.grad for leaf in tensors_in(inputs) if leaf.is_leaf],
        "random state": torch.get_rng_state(),
    }


def backward(outputs: list[Tensor], **options: Any) -> None:
    differentiable = [out for out in outputs if out.requires_grad and out.grad_fn is not None]
    if differentiable:
        torch.autograd.backward(differentiable, [seed_of(out) for out in differentiable], **options)


def seed_of(out: Tensor) -> Tensor:
    """Return a gradient to begin with, no entry like another, that costs no random number."""
    ramp = torch.arange(1.0, 1.0 + out.numel(), dtype=torch.float64).reshape(out.shape)
    if out.is_complex():
        return torch.complex(ramp.cos(), ramp.sin()).to(out.dtype)
    return ramp.cos().to(out.dtype)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Generate the tensors in a tree; of modules their parameters and buffers."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, torch.nn.Module):
        yield from tree.parameters()
        yield from tree.buffers()
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for what, value in expected.items():
        if isinstance(value, list):
            assert len(found[what]) == len(value), what
            for number, (one, other) in enumerate(zip(found[what], value, strict=True)):
                assert_same_bits(one, other, f"{what} {number}")
        else:
            assert_same_bits(found[what], value, what)


def assert_same_bits(found: Tensor | None, expected: Tensor | None, what: str = "") -> None:
    if expected is None or found is None:
        assert found is expected, what
        return
    for name in ("dtype", "shape", "layout", "requires_grad", "is_leaf"):
        assert getattr(found, name) == getattr(expected, name), f"{what}: {name}"
    if expected.layout is torch.strided:
        assert found.stride() == expected.stride(), f"{what}: stride"
    one, other = bits(found), bits(expected)
    assert torch.equal(one, other), f"{what}: {found} instead of {expected}"


def bits(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return tensor.view(torch.uint8) if tensor.numel() else tensor


class Programs(dict[str, tuple[Callable[..., Any], Callable[[], Any]]]):
    """Programs and what makes their inputs, each a case of its own for every api."""

    def starting_from(self, make_inputs: Callable[[], Any]) -> Callable[..., Any]:
        def add(program: Callable[..., Any]) -> Callable[..., Any]:
            self[program.__name__] = program, make_inputs
            return program

        return add


def randn(*shape: int, **options: Any) -> Callable[[], tuple[Tensor, ...]]:
    """Return what makes one leaf that requires grad."""
    return lambda: (torch.randn(*shape, **options).requires_grad_(),)
