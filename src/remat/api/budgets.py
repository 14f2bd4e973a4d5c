"""Automatic checkpointing under a memory budget."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ..core.budget import Budget
from ..engines.compiling import is_compiling
from ..engines.locate import EngineFunctions, engine_of_module, engines_in_use
from ..errors import RematError, UnsupportedError
from ..plans import PassRecord, Trace
from ..plans.planner import Plans
from ..reports.budget import BudgetReport
from ..schedules.check import options_by_name
from ..sizes import format_bytes, parse_budget, shown
from .scopes import CheckpointNode, CheckpointScope
from .wrapped import refuse_module_class

__all__ = ["CheckpointManager", "GradientBudget", "auto_checkpoint", "check_memory_budget"]

M = TypeVar("M")


def _plans_of(trace: Trace) -> Plans:
    from ..plans.search import Search  # noqa: PLC0415  (the planner is loaded late)

    return Search(trace)


@options_by_name
def auto_checkpoint(model: M, memory_budget: int | float | str | None) -> M:
    """Let the forward pass of a model keep to a memory budget. Return the model.

    The first pass is recorded and keeps to the budget by dropping what is cheap to recompute. From
    then on a plan says which activations are kept, with the least recomputation that the budget
    allows. Gradients stay bit for bit those of the plain model. The model is the same object as
    before, with the same `state_dict` keys, type and hooks.

    Args:
        model: An `nn.Module`.
        memory_budget: The peak bytes that a forward and backward pass may hold above the level at
            which it began, the parameters' own `.grad` aside: an int, text such as "2GB", or a
            float in (0, 1] as the fraction of what a plain pass would hold. None takes the budget
            back.

    Raises:
        BudgetTooSmallError: At the end of the first forward pass, if no plan fits the budget. It
            says which budget does.

    >>> import torch, remat
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
    >>> model = remat.auto_checkpoint(torch.nn.Sequential(*layers), memory_budget=0.6)
    >>> for _ in range(3):
    ...     model(torch.ones(512, 64)).sum().backward()
    """
    refuse_module_class(model, "model")
    if memory_budget is not None:
        check_memory_budget(memory_budget, "memory_budget")
    result: M = engine_of_module(
        model, '; for a NumPy function write remat.grad(f, memory_budget="64MB")'
    ).set_budget(model, memory_budget, _plans_of)
    return result


class GradientBudget:
    """The budget of a gradient function; plans are remembered from call to call."""

    def __init__(self, memory_budget: int | float | str | None) -> None:
        if memory_budget is not None:
            check_memory_budget(memory_budget, "memory_budget")
        self._amount = memory_budget
        self._budgets: dict[EngineFunctions, Budget] = {}

    @contextmanager
    def within(self, engine: EngineFunctions) -> Iterator[None]:
        """Compute a gradient within the budget, if there is one."""
        if self._amount is None:
            yield
            return
        if engine not in self._budgets:
            self._budgets[engine] = engine.Budget(self._amount, _plans_of)
        budget = self._budgets[engine]
        begun: list[Budget] = []
        try:
            begun.append(budget.enter())  # in one line: no interrupt comes between
            yield
            budget.end()
        except BaseException:
            _fail(begun)
            raise


class CheckpointManager:
    """Keeps the passes of a program within a memory budget.

    Put it around one forward and backward pass, or around a whole training loop: an iteration ends
    when its backward pass ends. Inside, marks and scopes are obeyed: what is marked is kept, what
    is in a scope is recomputed as the scope says. The planner decides about the rest.

    Args:
        max_memory_mb: The memory in MB (of 10**6 bytes) that a pass may hold above the level at
            which it began; `memory_threshold` of it is planned for.
        memory_budget: The same as an int in bytes, as text such as "2GB", or as a fraction of a
            plain pass; all of it is planned for.
        memory_threshold: The share of `max_memory_mb` that is planned for.
        auto_checkpoint: False leaves the choice to marks, scopes and `selective_checkpointing`.

    All four are attributes that can be set later, the budget too: passes that begin afterwards keep
    to it, and are planned again. `auto_checkpoint` counts when the manager is entered.

    >>> import torch, remat
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
    >>> model = torch.nn.Sequential(*layers)
    >>> with remat.CheckpointManager(memory_budget=0.6) as manager:
    ...     for _ in range(3):
    ...         model(torch.ones(512, 64)).sum().backward()

    >>> import numpy as np
    >>> def f(x):
    ...     for _ in range(6):
    ...         x = np.tanh(np.sin(x) * 1.1)
    ...     return np.sum(x)
    >>> with remat.CheckpointManager(memory_budget=0.6) as manager:
    ...     for _ in range(3):
    ...         gradient = remat.grad(f)(np.linspace(0.0, 1.0, 100_000))
    >>> manager.last_pass.recomputed_ops > 0
    True
    """

    @options_by_name
    def __init__(
        self,
        max_memory_mb: float | None = None,
        memory_budget: int | float | str | None = None,
        memory_threshold: float = 0.8,
        auto_checkpoint: bool = True,
    ) -> None:
        self._max_memory_mb: float | None = None
        self._memory_budget: int | float | str | None = None
        self._memory_threshold = 1.0
        self._budgets: list[Budget] = []  # one for each engine
        self.auto_checkpoint = auto_checkpoint
        self.memory_threshold = memory_threshold
        self.max_memory_mb = max_memory_mb
        self.memory_budget = memory_budget
        self._scopes: list[CheckpointScope] = []
        self._entered = threading.local()

    # -- the budget --------------------------------------------------------------------------------

    @property
    def max_memory_mb(self) -> float | None:
        """The memory in MB that a pass may hold; a change counts for the passes that follow."""
        return self._max_memory_mb

    @max_memory_mb.setter
    def max_memory_mb(self, value: float | None) -> None:
        if value is not None and (not _is_number(value) or value <= 0):
            raise ValueError(f"max_memory_mb must be a positive number, got {shown(value)}")
        self._refuse_both(value, self._memory_budget)
        self._max_memory_mb = value
        self._changed()

    @property
    def memory_budget(self) -> int | float | str | None:
        """The budget of a pass; a change counts for the passes that follow."""
        return self._memory_budget

    @memory_budget.setter
    def memory_budget(self, value: int | float | str | None) -> None:
        if value is not None:
            check_memory_budget(value, "memory_budget")
        self._refuse_both(self._max_memory_mb, value)
        self._memory_budget = value
        self._changed()

    @property
    def memory_threshold(self) -> float:
        """The share of `max_memory_mb` that is planned for."""
        return self._memory_threshold

    @memory_threshold.setter
    def memory_threshold(self, value: float) -> None:
        if not _is_number(value) or not 0 < value <= 1:
            raise ValueError(f"memory_threshold must be a share in (0, 1], got {shown(value)}")
        self._memory_threshold = value
        self._changed()

    @property
    def auto_checkpoint(self) -> bool:
        """Whether a plan decides; it counts when the manager is entered."""
        return self._auto_checkpoint

    @auto_checkpoint.setter
    def auto_checkpoint(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"auto_checkpoint must be True or False, got {shown(value)}")
        self._auto_checkpoint = value

    @staticmethod
    def _refuse_both(max_memory_mb: Any, memory_budget: Any) -> None:
        if max_memory_mb is not None and memory_budget is not None:
            raise ValueError(
                "give max_memory_mb or memory_budget, not both; to change from one to the other, "
                "set the one that counts now to None first"
            )

    @property
    def _has_budget(self) -> bool:
        return self._max_memory_mb is not None or self._memory_budget is not None

    def _changed(self) -> None:
        if self._has_budget:
            for budget in self._budgets:
                budget.change(self._amount, share=self._share)

    # -- around passes -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if is_compiling():
            raise UnsupportedError(
                "CheckpointManager does not work inside of torch.compile; put it around the call "
                "of the compiled function, or set the compiler's own activation_memory_budget"
            )
        if getattr(self._entered, "is_open", False):
            raise RuntimeError("this CheckpointManager is entered already; leave it first")
        begun: list[Budget] = []
        try:
            if self.auto_checkpoint:
                self._begin(begun)
            self._entered.is_open = True
            return self
        except BaseException:
            self._entered.is_open = False
            _fail(begun)
            raise

    def _begin(self, begun: list[Budget]) -> None:
        """Begin the budgets of all engines, and note each in the list."""
        if not self._has_budget:
            raise ValueError(
                "a manager needs a budget: give max_memory_mb or memory_budget, or pass "
                "auto_checkpoint=False to leave the choice to marks and scopes"
            )
        engines = engines_in_use()
        for engine in engines[len(self._budgets) :]:
            self._budgets.append(engine.Budget(self._amount, _plans_of, share=self._share))
        for budget in self._budgets:
            begun.append(budget.enter())  # in one line: no interrupt comes between

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:  # an interrupt at this very line leaves it open: Python calls `__exit__` once
            self._end(failed=error is not None)
        except BaseException:
            if getattr(self._entered, "is_open", False):  # `_end` did not reach its end
                _fail(self._budgets)
                self._entered.is_open = False
            raise

    def _end(self, *, failed: bool) -> None:
        if not getattr(self._entered, "is_open", False):
            raise RuntimeError("this CheckpointManager was not entered in this thread")
        for budget in self._budgets:
            budget.end(failed=failed)
        self._entered.is_open = False

    @property
    def _amount(self) -> int | float | str:
        if self.max_memory_mb is not None:
            return int(self.max_memory_mb * 10**6)
        assert self.memory_budget is not None
        return self.memory_budget

    @property
    def _share(self) -> float:
        return self.memory_threshold if self.max_memory_mb is not None else 1.0

    # -- what it did -------------------------------------------------------------------------------

    def report(self) -> str:
        """Return what was planned and measured for the last pass, as text."""
        record = self.last_pass
        if record is None:
            return "No pass has ended inside of this manager: call backward() inside of it.\n"
        return BudgetReport(record).text() + "\n"

    def plot(self, path: str | Path) -> Path:
        """Draw memory over the last pass, plain, planned and measured; return the file.

        The ending of `path` says the format: .png, .svg or .pdf. Needs matplotlib.
        """
        record = self.last_pass
        if record is None:
            raise RematError(
                "no pass has ended inside of this manager; call backward() in it first"
            )
        return BudgetReport(record).plot(path)

    @property
    def last_pass(self) -> PassRecord | None:
        """What was planned and measured for the last pass whose backward has ended."""
        return next((b.last for b in self._budgets if b.last is not None), None)

    # -- scopes and nodes --------------------------------------------------------------------------

    def register_scope(self, scope: CheckpointScope) -> None:
        """Let the manager look after what a scope holds."""
        if not isinstance(scope, CheckpointScope):
            raise TypeError(f"scope must be a CheckpointScope, got {shown(scope)}")
        if scope not in self._scopes:
            self._scopes.append(scope)

    def unregister_scope(self, scope: CheckpointScope) -> None:
        """Let go of a scope; what it holds stays held."""
        if scope not in self._scopes:
            raise ValueError(f"scope must be registered with this manager, got {shown(scope)}")
        self._scopes.remove(scope)

    def should_checkpoint(self, node: CheckpointNode) -> bool:
        """Return whether a node has to be recomputed for all registered scopes to fit the budget.

        With `auto_checkpoint=False`, or without a budget in bytes, it is as the node says.
        """
        _check_nodes([node])
        limit = self._limit()
        if not self.auto_checkpoint or limit is None:
            return node.is_checkpoint
        nodes = {id(other): other for other in [*self._nodes(), node]}
        return id(node) in {id(chosen) for chosen in _to_drop(nodes.values(), limit)}

    def selective_checkpointing(self, nodes: Iterable[CheckpointNode]) -> list[CheckpointNode]:
        """Drop what some nodes hold, the largest first, until the rest fits the budget.

        Return the nodes whose activations will be recomputed in backward.
        """
        nodes = _check_nodes(nodes)
        limit = self._limit()
        chosen = _to_drop(nodes, 0 if limit is None else limit)
        for node in chosen:
            node.is_checkpoint = True
            node.clear_saved_activations()
        return chosen

    def clear_all_checkpoints(self) -> None:
        """Drop what the registered scopes hold and can recompute."""
        for node in self._nodes():
            node.clear_saved_activations()

    def _nodes(self) -> list[CheckpointNode]:
        return [node for scope in self._scopes for node in scope.nodes]

    def _limit(self) -> int | None:
        if self.max_memory_mb is None and isinstance(self.memory_budget, float | None):
            return None
        return int(parse_budget(self._amount, whole=0) * self._share)

    def __repr__(self) -> str:
        if not self._has_budget:
            return f"CheckpointManager(auto_checkpoint={self.auto_checkpoint})"
        amount = self._amount
        text = f"{amount:.0%}" if isinstance(amount, float) else format_bytes(self._limit() or 0)
        return f"CheckpointManager({text}, auto_checkpoint={self.auto_checkpoint})"


def _fail(budgets: Iterable[Budget]) -> None:
    """End passes within budgets after an exception; those that have ended stay so."""
    for budget in budgets:
        budget.end(failed=True)


def _check_nodes(nodes: Iterable[CheckpointNode]) -> list[CheckpointNode]:
    nodes = list(nodes)
    for node in nodes:
        if not isinstance(node, CheckpointNode):
            raise TypeError(f"a node must be a CheckpointNode, got {shown(node)}")
    return nodes


def _to_drop(nodes: Iterable[CheckpointNode], limit: int) -> list[CheckpointNode]:
    """Return the nodes to drop, the largest first, so that the others hold at most `limit`."""
    sizes = [(sum(_nbytes(a) for a in node.saved_activations), node) for node in nodes]
    held = sum(nbytes for nbytes, _ in sizes)
    chosen = []
    for nbytes, node in sorted(sizes, key=lambda pair: -pair[0]):
        if held <= limit or not nbytes:
            break
        chosen.append(node)
        held -= nbytes
    return chosen


def _nbytes(array: Any) -> int:
    return int(array.nbytes)


def check_memory_budget(value: Any, name: str) -> None:
    """Refuse what is no budget, by the name of the argument."""
    if isinstance(value, Integral) and not isinstance(value, bool) and value == 0:
        raise ValueError(f"{name} must be at least 1 byte, got 0")
    parse_budget(value, whole=1, name=name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
