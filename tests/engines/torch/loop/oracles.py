"""What is right of a loop: the plain Python loop from equal copies of its inputs, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import remat
from remat import trees
from remat.loops import LoopOptions

from ..oracles import assert_same_bits, backward, tensors_in

SCHEDULES = ["auto", "revolve", "uniform", "all"]


class Plain:
    """Runs loops as anybody would write them; steps never see the caller's own tensors."""

    def loop(self, step: Callable[[Any], Any], state: Any, steps: int) -> Any:
        state = _copied(state) if steps else state
        for _ in range(steps):
            state = step(state)
        return state

    def scan(self, step: Callable[[Any, Any], Any], state: Any, xs: Any) -> tuple[Any, Any]:
        leaves, structure = trees.flatten(xs)
        state = _copied(state) if len(leaves[0]) else state
        zeros = [torch.zeros_like(leaf[:1]).sum(0) if _is(leaf) else 0 for leaf in leaves]
        leaves = [leaf.unbind() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        ys = []
        for i in range(len(leaves[0])):
            state, y = step(state, trees.unflatten(structure, [_copied(x[i]) for x in leaves]))
            ys.append(y)
        if not ys:  # empty outputs, of the kind that the step returns
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                _, y = step(_copied(state), trees.unflatten(structure, zeros))
            return state, trees.map_leaves(lambda y: torch.as_tensor(y)[None][:0].clone(), y)
        columns = zip(*(trees.flatten(y)[0] for y in ys), strict=True)
        stacks = [torch.stack([torch.as_tensor(y) for y in column]) for column in columns]
        return state, trees.unflatten(trees.flatten(ys[0])[1], stacks)

    def until(self, condition: Callable[[Any], Any], step: Callable[[Any], Any], state: Any) -> Any:
        first = True
        while condition(trees.map_leaves(lambda x: x.detach() if _is(x) else x, state)):
            state = step(_copied(state) if first else state)
            first = False
        return state


class Remat:
    """Runs loops with remat."""

    def __init__(self, slots: int | None = 2, **options: Any) -> None:
        self.slots = slots
        self.options = options

    def loop(self, step: Callable[[Any], Any], state: Any, steps: int) -> Any:
        return remat.checkpointed_loop(step, state, steps, self.slots, **self.options)[0]

    def scan(self, step: Callable[[Any, Any], Any], state: Any, xs: Any) -> tuple[Any, Any]:
        return remat.checkpointed_scan(step, state, xs, self.slots, **self.options)

    def until(self, condition: Callable[[Any], Any], step: Callable[[Any], Any], state: Any) -> Any:
        options = {k: v for k, v in self.options.items() if k != "schedule"}
        return remat.checkpointed_while(condition, step, state, self.slots, **options)[0]


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _copied(state: Any) -> Any:
    once: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if id(leaf) not in once:
            once[id(leaf)] = leaf.clone() if _is(leaf) else leaf
        return once[id(leaf)]

    return trees.map_leaves(copied, state)


def same(program: Callable[..., Any], make_inputs: Callable[[], Any], run: Any) -> dict[str, Any]:
    """Compare `program(run, *make_inputs())` with the same over plain loops, bit for bit."""
    torch.manual_seed(0)
    inputs = make_inputs()
    expected = outcome(program, Plain(), copy.deepcopy(inputs))
    found = outcome(program, run, copy.deepcopy(inputs))
    assert found["requires grad"] == expected["requires grad"]
    assert found["numbers"] == expected["numbers"]
    for what in ("outputs", "inputs", "gradients", "random state"):
        assert len(found[what]) == len(expected[what]), what
        for number, (one, other) in enumerate(zip(found[what], expected[what], strict=True)):
            assert_same_bits(one, other, f"{what} {number}")
    return found


def outcome(program: Callable[..., Any], run: Any, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Run a program and its backward pass; return all that can be seen of it."""
    torch.manual_seed(1)
    leaves, _ = trees.flatten(program(run, *inputs))
    outputs = [leaf for leaf in leaves if _is(leaf)]
    backward(outputs)
    given = list(tensors_in(inputs))
    return {
        "outputs": [out.detach().clone().contiguous() for out in outputs],
        "requires grad": [out.requires_grad for out in outputs],
        "numbers": [leaf for leaf in leaves if not _is(leaf)],
        "inputs": [tensor.detach() for tensor in given],
        "gradients": [
            None if leaf.grad is None else leaf.grad.contiguous() for leaf in given if leaf.is_leaf
        ],
        "random state": [torch.get_rng_state()],
    }


def note_schedules(monkeypatch: Any) -> list[Any]:
    """Return a list that all schedules are added to that are chosen from now on."""
    chosen: list[Any] = []
    choose = LoopOptions.choose

    def watched(self: LoopOptions, measured: Any, disk: Any = None) -> Any:
        chosen.append(choose(self, measured, disk))
        return chosen[-1]

    monkeypatch.setattr(LoopOptions, "choose", watched)
    return chosen
