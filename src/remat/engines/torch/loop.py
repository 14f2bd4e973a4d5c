"""Loops under autograd: a whole loop is one node of the graph, and the runner goes back through it.

The way ahead is run first, outside of any graph. Only then is it known what the steps close over,
and final state, initial state, inputs and captures are tied together by one autograd function. So
every parameter gets one gradient per backward pass, whatever the number of steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from ... import trees
from ...errors import RecomputeMismatchError, UnsupportedError
from ...loops import (
    Account,
    Budget,
    KnownLength,
    Length,
    LoopOptions,
    LoopRun,
    LoopTales,
    Measured,
    Progress,
    UnknownLength,
    Watcher,
    checkpoints_of,
    state_and_output,
)
from ...stores import MemoryStore, Store
from .captures import replaced_by_outer
from .reach import Reach
from .recording.recorder import without_recorder
from .scans import Outputs, PerStep
from .states import Gradients, HeldState, LiveState, Recording
from .steps import Steps

__all__ = ["run_loop", "run_while"]

Run = LoopRun[LiveState, HeldState, Recording, Gradients]
Checkpoints = Mapping[int, Any]


def run_loop(
    function: Any,
    state: Any,
    options: LoopOptions,
    *,
    xs: Any = None,
    progress: Progress | None = None,
) -> tuple[Any, Any, Checkpoints]:
    """Run a loop, or a scan if `xs` is given; return final state, outputs and checkpoints."""
    scan = xs is not None

    def call(state: Any, x: Any) -> tuple[Any, Any]:
        return state_and_output(function(state, x)) if scan else (function(state), None)

    leaves, structure = trees.flatten(state)
    leaves = replaced_by_outer(leaves)
    if not options.is_planned:  # where steps differ, the first may begin with whole numbers
        _check_state(leaves)
    inputs, inputs_structure = trees.flatten(xs) if scan else ([], None)
    inputs = replaced_by_outer(inputs)
    outputs = Outputs(options.steps, wanted=scan)
    steps = Steps(call, structure, Reach([function]), PerStep(inputs, inputs_structure), outputs)
    name = "checkpointed_scan" if scan else "checkpointed_loop"
    body = _Pass(name, steps, leaves, inputs, KnownLength(options, progress), progress)
    final, stacks = body.run_ahead()
    ys = trees.unflatten(outputs.structure, stacks) if outputs.structure is not None else ()
    return trees.unflatten(structure, final), ys, body.checkpoints()


def run_while(
    condition: Any,
    function: Any,
    state: Any,
    num_checkpoints: int | None,
    memory_budget: Budget | None,
    *,
    store: Store | None = None,
    progress: Progress | None = None,
) -> tuple[Any, Checkpoints]:
    """Run a loop whose length shows at its end."""
    leaves, structure = trees.flatten(state)
    leaves = replaced_by_outer(leaves)
    _check_state(leaves)

    def goes_on(live: LiveState) -> bool:
        with torch.no_grad():
            return bool(condition(trees.unflatten(structure, live.leaves)))

    def call(state: Any, x: Any) -> tuple[Any, Any]:
        new = function(state)
        if replay:  # a condition that draws random numbers has to draw them again, too
            with torch.no_grad():
                condition(trees.map_leaves(_detached, new))
        return new, None

    # (Something of their own that both refer to: a pass that `call` knows would be a cycle.)
    replay: list[Any] = []
    steps = Steps(
        call,
        structure,
        Reach([function, condition]),
        PerStep([], None),
        Outputs(0, wanted=False),
    )
    length = UnknownLength(goes_on, replay, num_checkpoints, memory_budget, store or MemoryStore())
    body = _Pass("checkpointed_while", steps, leaves, [], length, progress)
    final, _ = body.run_ahead()
    return trees.unflatten(structure, final), body.checkpoints()


class _Pass:
    """One run of a loop: ahead once, and back as often as autograd asks."""

    def __init__(
        self,
        name: str,
        steps: Steps,
        leaves: list[Any],
        inputs: list[Any],
        length: Length,
        progress: Progress | None,
    ) -> None:
        self.name = name
        self.steps = steps
        self.length = length
        self.progress = progress
        self.traced = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        tracked = [self.traced and _is_tracked(leaf) for leaf in leaves]
        self.given = [*leaves, *inputs]  # until they are tied to what comes out
        once = {id(leaf): _detached(leaf) for leaf in leaves}  # what is one tensor stays one
        self.initial = steps.initial([once[id(leaf)] for leaf in leaves], tracked)
        self.around = steps.effects.around()  # when the loop began
        self.final = self.initial
        self.count = len(leaves)
        self.run: Run | None = None
        self.setting = _Setting()
        self.account = Account()
        self.tales: LoopTales | None = None
        if self.account.must_weigh and self.traced:
            made = [value for value in self.given if _is_tracked(value) and not value.is_leaf]
            self.tales = LoopTales(
                self.account, _memories(made), lambda held: _nbytes(held.leaves), progress
            )

    @property
    def watcher(self) -> Watcher | None:
        return self.tales or self.progress

    def shown(self, *, last: bool) -> AbstractContextManager[None]:
        return self.progress.shown(last=last) if self.progress else nullcontext()

    def weighed(self, measured: Measured) -> None:
        if self.tales:
            tape_bytes = measured.tape_bytes - measured.state_bytes
            self.tales.weighed(tape_bytes, plain_bytes=self.steps.plain_bytes)

    # -- ahead ---------------------------------------------------------------------------------

    def run_ahead(self) -> tuple[list[Any], list[Any]]:
        """Run the loop; return the final state and the stacked outputs, tied into the graph."""
        steps = self.steps
        self.account.begin(self.name)
        with (
            self.account.inside(),
            without_recorder(),
            self.setting,
            steps.captures.standing_in(),
            self.shown(last=not self.traced),
        ):
            self.run = self._start()
        if self.tales:
            self.tales.settle()
        steps.captures.complete()
        steps.outputs.complete()
        steps.effects.complete(self.around)
        given, self.given = self.given, []
        if not self.run.steps:
            return given[: self.count], []
        results = [*self.final.leaves, *steps.outputs.stacks]
        tracked = [*self.final.tracked, *steps.outputs.tracked]
        sources = [*given, *replaced_by_outer(steps.captures.sources)]
        if any(tracked):
            if not self.run.goes_back:
                raise UnsupportedError(
                    "nothing in the initial state, in xs and in what step 0 uses requires grad, "
                    "but a later step uses something that does, too late to plan for gradients; "
                    "call requires_grad_() on a floating-point tensor of the initial state"
                )
            self.wanted = [i for i, is_wanted in enumerate(tracked) if is_wanted]
            used = self._used(len(given))
            self.slots = [i for i, source in enumerate(sources) if used[i] and _is_tracked(source)]
            tensors = [sources[i] for i in self.slots]
            aliases = [results[i].detach() for i in self.wanted]
            tied = _Tie.apply(self, aliases, *tensors)
            for i, tensor in zip(self.wanted, tied, strict=True):
                results[i] = tensor
        else:
            self.traced = False  # nobody can ask for a gradient
        return results[: self.count], results[self.count :]

    def _used(self, given: int) -> list[bool]:
        """Tell which sources the graphs of the steps lead to: to others no gradient can flow.

        A source that was tied to the loop nevertheless would get a gradient of None, and its hooks
        be called with it.
        """
        state = [i in self.steps.uses_state for i in range(self.count)]
        inputs = [i in self.steps.uses_inputs for i in range(given - self.count)]
        return [*state, *inputs, *self.steps.captures.met]

    def _start(self) -> Run:
        run, self.final = self.length.ahead(
            self.steps,
            self.initial,
            traced=self.traced,
            weighed=self.weighed if self.tales else None,
            watcher=self.watcher,
        )
        return run

    def checkpoints(self) -> Checkpoints:
        """Return the states that are held, as the caller sees them."""
        structure = self.steps.structure
        anchor = torch.zeros((), requires_grad=True) if self.traced else None

        def shown(held: HeldState) -> Any:
            return trees.unflatten(structure, [_shown(leaf, anchor) for leaf in held.leaves])

        return checkpoints_of(self.run, shown, lazily=self.traced)

    # -- back ----------------------------------------------------------------------------------

    def back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return a gradient for each tensor that goes in: state, inputs, captures."""
        steps = self.steps
        steps.captures.check()
        steps.numbers.look_again()
        seeds: list[Tensor | None] = [None] * (self.count + len(steps.outputs.stacks))
        for i, gradient in zip(self.wanted, gradients, strict=True):
            seeds[i] = gradient
        steps.start_gradients()
        steps.outputs.gradients = seeds[self.count :]
        known, steps.seconds = self.run.evaluations if self.run else 0, 0.0
        if self.tales:
            self.tales.is_ahead = False
        try:
            with (
                self.account.inside(),
                without_recorder(),
                self.setting,
                torch.enable_grad(),
                steps.captures.standing_in(),
                steps.captures.no_new_hooks(),
                self.shown(last=True),
                steps.effects.unchanged(),
            ):
                run, self.run = self.run or self._again(), None
                # (The caller may have written to it: then there is nothing to compare with.)
                final = self.final if steps.is_unchanged(self.final) else None
                state = self.length.back(run, final, seeds[: self.count])
            steps.captures.check_recorded()
            if run.evaluations > known:
                self.account.recomputed(run.evaluations - known, steps.seconds)
            self.account.rounded(run.storing_error)
        finally:
            steps.outputs.gradients = ()
        found = [*state, *steps.inputs.gradients, *steps.back.gathered]
        steps.start_gradients()
        tied = set(self.slots)
        if any(gradient is not None and i not in tied for i, gradient in enumerate(found)):
            raise RecomputeMismatchError(
                "a step that was run again uses a tensor for its result that it did not use the "
                "first time, so that its gradient would be lost. Make the step a function of its "
                "state"
            )
        return [found[i] for i in self.slots]

    def _again(self) -> Run:
        """Run ahead once more: the checkpoints of the first time were used up."""
        known = self.final
        self.steps.effects.go_to(self.initial.around)
        run = self._start()
        difference = None
        if self.steps.is_unchanged(known):  # or the caller has written to it
            difference = self.steps.difference(self.final, known)
        if difference:
            raise RecomputeMismatchError(f"the whole loop was run again and its final {difference}")
        return run


class _Tie(torch.autograd.Function):
    """Ties what comes out of a loop to what went in."""

    @staticmethod
    def forward(ctx: Any, body: _Pass, results: list[Tensor], *sources: Tensor) -> Any:
        ctx.body = body
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        with torch.no_grad():
            found = ctx.body.back(gradients)
        if torch.is_grad_enabled():  # create_graph=True: what was found has no history
            anchor = torch.zeros((), requires_grad=True)
            found = [None if g is None else _NoFurther.apply(g, anchor) for g in found]
        return None, None, *found


class _NoFurther(torch.autograd.Function):
    """A gradient that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor) -> Tensor:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(
            "gradients of gradients do not flow through a checkpointed loop; use a plain Python "
            "loop with runs of steps in remat.checkpoint(fn, state), which can be differentiated "
            "twice"
        )


class _JustALook(torch.autograd.Function):
    """A checkpoint that is shown to the caller."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, anchor: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(
            "gradients do not flow through the checkpoints that a loop returns; to use states on "
            "the way in a loss, return them as outputs of remat.checkpointed_scan"
        )


class _Setting:
    """What is switched on around a loop, and has to be when its steps are run again: autocast.

    Its cache of weights that were cast is switched off: a cast that one step has made would be a
    part of the graphs of all others.
    """

    def __init__(self) -> None:
        self._casts = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _devices()
        ]
        self._stack = ExitStack()

    def __enter__(self) -> None:
        stack = ExitStack()
        for device, is_enabled, dtype in self._casts:
            if is_enabled or torch.is_autocast_enabled(device):
                cast = torch.autocast(device, dtype, is_enabled, cache_enabled=False)
                stack.enter_context(cast)
        self._stack = stack

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _shown(leaf: Any, anchor: Tensor | None) -> Any:
    if anchor is None or not _is_floating(leaf):
        return leaf.clone() if isinstance(leaf, Tensor) and anchor is not None else leaf
    return _JustALook.apply(leaf, anchor)


def _devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _check_state(leaves: list[Any]) -> None:
    if not any(_is_floating(leaf) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise TypeError(
            f"the state holds no floating-point tensor, only {kinds}: there is nothing to "
            "differentiate"
        )


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _is_tracked(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _nbytes(leaves: list[Any]) -> int:
    return sum(_memories(leaves).values())


def _memories(values: list[Any]) -> dict[Hashable, int]:
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return {("torch", storage._cdata): storage.nbytes() for storage in storages}
