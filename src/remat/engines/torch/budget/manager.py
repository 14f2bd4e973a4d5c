"""Budgets on PyTorch: where passes begin and end, in forward passes and in training loops.

Inside of a manager a pass begins with the first op that has a gradient: what runs before, without
gradients, is no part of it and is not recorded. It ends with its backward, or when nothing of its
graph is left; and another one begins where the program starts again, although a result of the one
before is still there, as that of the last batch of a validation. Where this was wrong, since both
were differentiated, it is not done again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor

from ....core import budget
from ....core.passes import BudgetedPass, PassRegion
from ....core.region import KnownValues
from ....core.tracing import Key
from ....errors import UnsupportedError
from ....plans.planner import Planner
from ..adapter import TORCH
from ..memory.tensors import is_plain
from ..memory.uncounted_writes import on_optimizer_step
from ..modes import changing_mode, why_it_counts
from ..op_facts import FACTS, with_grad
from ..recording.recorder import Recorder
from ..recording.threads import recorder_of_this_thread
from ..region import TorchRegion
from ..segment import refuse_transforms
from .agreement import agreed_bytes, agreed_seconds, is_shared
from .sections import ModuleSections, find_sections

__all__ = ["TorchBudget", "run_within"]


class TorchPassRegion(PassRegion, TorchRegion):
    """The region of a pass, or of all passes in a manager."""

    def __init__(self, observed: BudgetedPass, owner: TorchBudget) -> None:
        super().__init__(observed, owner)
        self._budget = owner
        if owner.counts_gradients:
            self.admits = self._admits

    def close(self) -> None:
        self.admits = None  # it refers to this region
        super().close()

    def joined_by(self, stage: Any) -> None:
        stage.streams = self.streams

    def _admits(
        self, table: KnownValues, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Return whether an op belongs to a pass; the one before may end with it."""
        if not (self.current.has_begun or torch.is_grad_enabled()):
            return False  # the common case of a validation
        found = with_grad(args, kwargs) if torch.is_grad_enabled() else []
        if self.current.is_over:
            self._restart()
        current = self.current
        if not found:
            return current.has_begun
        if not len(current.tracer):
            current.first = _first_of(func, args)
        elif not any(map(_is_made, found)):
            op = _first_of(func, args)
            goes_on = current.goes_on_with(func)
            if not goes_on and self._budget.starts_again(op, current.first):
                self._restart()
                self.current.follow_on(current, op)
        elif current.left is not None:
            current.look_back(lambda: any(_is_made(t) and table.known(t) is None for t in found))
        return True

    def _restart(self) -> None:
        before = self.current
        self._budget.restart()
        self.current.adopt(before)


class TorchBudget(budget.Budget):
    """Keeps passes within a memory budget."""

    engine = TORCH
    facts = FACTS

    def __init__(self, budget: int | float | str, planner: Planner, *, share: float = 1.0) -> None:
        super().__init__(budget, planner, share=share)
        self._region: TorchPassRegion | None = None
        self._recorder: ref[Recorder] | None = None  # of the thread in which a pass runs
        self._hooks: dict[int, Any] = {}  # of parameters, by their ids

    # -- a pass begins and ends --------------------------------------------------------------------

    def can_begin(self) -> bool:
        """Return whether there is a pass to keep within a budget: gradients, and no region yet."""
        recorder = recorder_of_this_thread()
        return torch.is_grad_enabled() and not recorder.opened and changing_mode() is None

    def why_not(self) -> str:
        """Return what keeps a pass with gradients from having a budget of its own, or ""."""
        if not torch.is_grad_enabled():
            return ""
        if recorder_of_this_thread().opened:
            return (
                "it is inside of a checkpointed region, scope or manager, which decides what is "
                "held; call it outside of them, or leave the budget to a CheckpointManager"
            )
        mode = changing_mode()
        return "" if mode is None else why_it_counts(mode)

    def begin(self, *, meters_backward: bool = False) -> Self:
        refuse_transforms()
        recorder = recorder_of_this_thread()
        before = len(recorder.opened), recorder.idle
        try:
            with self._lock:
                if self._recording not in (None, recorder):
                    raise UnsupportedError(
                        "this budget is in use in another thread; give each thread a copy of the "
                        "model (copy.deepcopy), or a CheckpointManager of its own"
                    )
                self._release()  # what an exception has left in this thread
                self._recorder = ref(recorder)
            self.counts_gradients = meters_backward
            self._pass = self.new_pass()
            self._region = TorchPassRegion(self._pass, self)
            recorder.open(self._region)
            if meters_backward:
                on_optimizer_step.append(self._stepped)
            return self
        except BaseException:
            recorder.unwind(*before)
            if self._recording is recorder:
                self._release()
            raise

    @property
    def _recording(self) -> Recorder | None:
        """The recorder of the pass that runs; None if its thread has ended meanwhile."""
        return None if self._recorder is None else self._recorder()

    def end(self, *, failed: bool = False, plans: bool = True) -> None:
        """End the recording; raise if no plan fits the budget. Without effect if nothing began.

        `plans=False` leaves that to the backward pass, which may never come.
        """
        recorder, region = recorder_of_this_thread(), self._region
        if region is None or self._recording is not recorder:
            return
        try:
            self._end(recorder, region, failed=failed, plans=plans)
        except BaseException:  # an interrupt, or no plan fits
            if region in recorder.opened:
                recorder.unwind(recorder.opened.index(region), recorder.idle)
            self._release()
            raise

    def _end(
        self, recorder: Recorder, region: TorchPassRegion, *, failed: bool, plans: bool
    ) -> None:
        recorder.close(region)
        ended, meters_backward = region.current, self.counts_gradients
        self._release()  # before planning, which may raise
        if failed:
            ended.abandon()
        elif not meters_backward:
            ended.end_forward(region)
            self.has_backward = ended.has_backward
            if plans:
                ended.plan()

    def _release(self) -> None:
        """Take back all but the recording. Last of all, let other threads use this."""
        while self._hooks:
            self._hooks.popitem()[1].remove()
        while self._stepped in on_optimizer_step:
            on_optimizer_step.remove(self._stepped)
        self._region = self._pass = None
        self._recorder = None

    def restart(self) -> None:
        """Begin another pass: an iteration of training is over."""
        if self._region is not None:
            if (recorder := self._recording) is not None:
                recorder.end_iteration()
            self._pass = self.new_pass()
            self._region.begin(self._pass)

    def enter(self) -> Self:
        recorder = recorder_of_this_thread()
        if recorder.opened:
            raise UnsupportedError(
                "a CheckpointManager cannot be entered inside of a checkpointed region, scope or "
                "other manager; put it around them: they are obeyed inside"
            )
        mode = changing_mode()
        if mode is not None:
            raise UnsupportedError(f"a CheckpointManager does not work here: {why_it_counts(mode)}")
        return self.begin(meters_backward=True)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return run_within(self, function, args)

    # -- what the core asks ------------------------------------------------------------------------

    def make_region(self, name: str) -> TorchRegion:
        return TorchRegion(name)

    def find_sections(self) -> ModuleSections | None:
        return find_sections()

    @property
    def is_shared(self) -> bool:
        return is_shared()

    def agreed_seconds(self, keys: Sequence[Key], seconds: list[float], about: str) -> list[float]:
        return agreed_seconds(keys, seconds, about=about)

    def agreed_bytes(self, keys: Sequence[Key], nbytes: int, about: str) -> int:
        return agreed_bytes(keys, nbytes, about=about)

    def expect_gradient(self, parameter: Tensor) -> None:
        if not self.counts_gradients:
            return
        # The id may have been that of another tensor before. Its hooks went with it. (A weak
        # reference to a parameter would be in the way of `torch.utils.swap_tensors`.)
        handle, hooks = self._hooks.get(id(parameter)), parameter._post_accumulate_grad_hooks
        if handle is None or hooks is None or handle.hooks_dict_ref() is not hooks:
            register: Any = parameter.register_post_accumulate_grad_hook
            self._hooks[id(parameter)] = register(_Accumulated(ref(self)))

    def accumulated(self, parameter: Tensor) -> None:
        if self._pass is not None and parameter.grad is not None:
            self._pass.meter.remove(TORCH.memory(parameter.grad))

    def backward_began(self, begun: BudgetedPass) -> None:
        if (recorder := self._recording) is not None:
            recorder.end_iteration()

    def _stepped(self) -> None:
        """An optimizer has made a step: what ran before it belongs to no pass."""
        if self._recording is recorder_of_this_thread():
            self.restart()


class _Accumulated:
    """A hook of a parameter: its gradient is there, and does not count."""

    def __init__(self, budget: ref[TorchBudget]) -> None:
        self._budget = budget

    def __call__(self, parameter: Tensor) -> None:
        if (budget := self._budget()) is not None:
            budget.accumulated(parameter)


def run_within(
    budget: TorchBudget,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    plans: bool = True,
) -> Any:
    """Call a function as a pass within a budget, if there is a graph to be made.

    `plans=False` leaves planning to the backward pass, which may never come.
    """
    if not budget.can_begin():
        return function(*args, **kwargs)
    try:
        budget.begin()
        result = function(*args, **kwargs)
        budget.end(plans=plans)
        return result
    except BaseException:
        budget.end(failed=True)
        raise


def _is_made(tensor: Tensor) -> bool:
    """Return whether a tensor was computed from leaves, and is not just a view of one."""
    base = tensor._base if tensor._is_view() else None
    return not (tensor if base is None else base).is_leaf


def _first_of(func: Any, args: tuple[Any, ...]) -> Any:
    """Return what a program is recognised by when it starts again: its first op, on what.

    Parameters count by themselves: layers of one shape begin alike (autocast casts a weight).
    """
    return func, tuple(map(_known_by, args))


def _known_by(argument: Any) -> Any:
    if not isinstance(argument, Tensor) or not is_plain(argument):
        return type(argument)
    if argument.requires_grad:
        return id(argument._base if argument._is_view() else argument)
    return tuple(argument.shape)
