"""Loops that checkpoint themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import trees
from ..engines.compiling import uncompiled
from ..engines.locate import engine_for
from ..loops import LoopOptions, MemorySize, Progress, ScheduleName
from ..loops.options import check_budget
from ..schedules import Schedule
from ..schedules.check import options_by_name, whole_number
from ..sizes import shown
from ..stores import Store, find_store
from .segments import check_option

__all__ = ["checkpointed_loop", "checkpointed_scan", "checkpointed_while"]


@uncompiled
@options_by_name
def checkpointed_loop(
    func: Callable[[Any], Any],
    initial_state: Any,
    seq_length: int,
    num_checkpoints: int | None = None,
    *,
    memory_budget: MemorySize | None = None,
    schedule: ScheduleName | Schedule = "auto",
    store: str | Store = "memory",
    progress: bool = False,
) -> tuple[Any, Mapping[int, Any]]:
    """Apply `func` to a state `seq_length` times, and hold only a few of the states.

    Inside a function that is differentiated the gradient is exact, also with respect to what
    `func` closes over; the states between the checkpoints are recomputed in backward.

    Args:
        func: One step, from state to state. A state is any pytree with an array in it; its
            structure stays the same from step to step, shapes may change.
        initial_state: The state before step 0. It is never modified.
        seq_length: The number of steps.
        num_checkpoints: How many states may be held, by default floor(sqrt(seq_length)).
        memory_budget: The peak of the whole pass instead: bytes, text such as "64MB", or a
            fraction of what it would take without checkpointing.
        schedule: "auto" measures a step and takes the best schedule for the room that
            `num_checkpoints` states take; "revolve" and "uniform" hold states only, "all" holds
            every step's tape. A schedule object (`remat.schedules`, or of your own: `steps`,
            `evaluations` and the actions to iterate over) is checked with
            `remat.schedules.simulate` and run as it is, without `num_checkpoints`.
        store: Where states are held: "memory", rounded to "bfloat16" or "float16" (half the bytes,
            and gradients that are no longer exact), or "disk". With "disk" and "auto" the
            `num_checkpoints` states in memory are joined by as many on disk as pay off.
        progress: Show a progress bar on standard error.

    Returns:
        The final state, and a dict from positions p to the state before step p that is held at
        the end of the first sweep. Outside of differentiation it holds `num_checkpoints` states;
        inside, what the schedule holds at that time ("auto" may hold tapes in their place), and
        no gradient flows through it. Those in a store, and all that a backward pass will use, are
        fetched when they are looked at, and gone after that pass.

    >>> import numpy as np
    >>> W = np.eye(3) * 0.9
    >>> final, checkpoints = checkpointed_loop(lambda x: np.tanh(x @ W), np.ones(3), 1000)
    >>> final.shape, len(checkpoints)
    ((3,), 31)
    """
    _check_callable(func, "func")
    if getattr(seq_length, "ndim", 0) or isinstance(seq_length, list | tuple):
        raise TypeError(
            f"seq_length must be a whole number, got {shown(seq_length)}; for steps over arrays "
            "use remat.checkpointed_scan(func, initial_state, xs)"
        )
    options = LoopOptions(seq_length, num_checkpoints, memory_budget, schedule, find_store(store))
    engine = engine_for(trees.flatten(initial_state)[0])
    final, _, checkpoints = engine.run_loop(
        func, initial_state, options, progress=_progress(options.steps, progress)
    )
    return final, checkpoints


@uncompiled
@options_by_name
def checkpointed_scan(
    func: Callable[[Any, Any], tuple[Any, Any]],
    initial_state: Any,
    xs: Any,
    num_checkpoints: int | None = None,
    *,
    memory_budget: MemorySize | None = None,
    schedule: ScheduleName | Schedule = "auto",
    store: str | Store = "memory",
    progress: bool = False,
) -> tuple[Any, Any]:
    """Run `state, y = func(state, x)` over the entries of `xs`, and hold only a few states.

    `xs` is an array, or a pytree of arrays, whose first axis is the step. The outputs `ys` are
    stacked along a new first axis; if there are no steps, `func` is called once on zeros to learn
    what it returns, and they are empty arrays of that kind. The options are those of
    `checkpointed_loop`.

    >>> import numpy as np
    >>> final, ys = checkpointed_scan(lambda s, x: (s + x, s * x), np.zeros(()), np.arange(4.0))
    >>> float(final), ys
    (6.0, array([0., 0., 2., 9.]))
    """
    _check_callable(func, "func")
    leaves, _ = trees.flatten(xs)
    options = LoopOptions(
        _length(leaves), num_checkpoints, memory_budget, schedule, find_store(store)
    )
    engine = engine_for([*trees.flatten(initial_state)[0], *leaves])
    final, ys, _ = engine.run_loop(
        func, initial_state, options, xs=xs, progress=_progress(options.steps, progress)
    )
    return final, ys


@uncompiled
@options_by_name
def checkpointed_while(
    cond: Callable[[Any], Any],
    func: Callable[[Any], Any],
    initial_state: Any,
    num_checkpoints: int | None = None,
    *,
    memory_budget: int | str | None = None,
    store: str | Store = "memory",
    progress: bool = False,
) -> tuple[Any, Mapping[int, Any]]:
    """Apply `func` as long as `cond(state)` is true; the length shows at the end.

    Checkpoints are placed while the loop runs and moved as it grows, so that at any time they
    are close to the best for the steps done so far. Give `num_checkpoints` states, or a
    `memory_budget` in bytes or text.

    Returns the final state and the states held at the end, as `checkpointed_loop` does.

    >>> import numpy as np
    >>> def halve(x):
    ...     return x / 2
    >>> final, checkpoints = checkpointed_while(lambda x: x > 1, halve, np.array(1000.0), 4)
    >>> float(final), len(checkpoints)
    (0.9765625, 4)
    """
    _check_callable(cond, "cond")
    _check_callable(func, "func")
    if num_checkpoints is None and memory_budget is None:
        raise ValueError(
            "give num_checkpoints or memory_budget: the length is not known, so there is no default"
        )
    if num_checkpoints is not None:
        whole_number(num_checkpoints, "num_checkpoints")
    check_budget(num_checkpoints, memory_budget)
    if isinstance(memory_budget, float):
        raise ValueError(
            f"memory_budget must be bytes where the length is not known, got the fraction "
            f"{memory_budget!r}"
        )
    engine = engine_for(trees.flatten(initial_state)[0])
    final, checkpoints = engine.run_while(
        cond,
        func,
        initial_state,
        num_checkpoints,
        memory_budget,
        store=find_store(store),
        progress=_progress(None, progress),
    )
    return final, checkpoints


def _progress(steps: int | None, wanted: bool) -> Progress | None:
    check_option("progress", wanted)
    if not wanted:
        return None
    from ..reports.progress import LoopProgress  # noqa: PLC0415  (rich only if it is used)

    return LoopProgress(steps)


def _length(leaves: list[Any]) -> int:
    lengths = {leaf.shape[0] if getattr(leaf, "ndim", 0) else None for leaf in leaves}
    if len(lengths) != 1 or None in lengths:
        shapes = [getattr(leaf, "shape", type(leaf).__name__) for leaf in leaves]
        raise ValueError(
            f"xs must be arrays with a common first axis, the steps, got {shown(shapes)}"
        )
    (length,) = lengths
    return int(length or 0)


def _check_callable(value: Any, name: str) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {shown(value)}")
