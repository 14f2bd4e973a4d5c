"""Records one call with autograd and goes back through it.

autograd differentiates functions of one argument; a step has many inputs (state, per-step input,
whatever it closes over) and many outputs. The reverse pass is autograd's, over several ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from autograd.core import add_outgrads, sparse_object_types, vspace
from autograd.tracer import isbox, trace_stack
from autograd.util import toposort

from ...errors import UnsupportedError
from . import pickles
from .adapter import backward_pass
from .boxes import OpLog, captured_box, plain, root_box
from .nodes import cast
from .recording.constants import Constants, check_again
from .recording.region import threads

__all__ = [
    "Flagged",
    "Recording",
    "SharedRoots",
    "is_differentiable",
    "is_tracing",
    "plain",
    "record",
    "refuse_boxes",
    "refuse_changed",
    "zeros_like",
]

Flagged = tuple[Any, bool]  # autograd's: a gradient, and whether it may be added to in place


def is_differentiable(leaf: Any) -> bool:
    """Return whether a value is a float or complex number, scalar or array."""
    leaf = plain(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind in "fc"
    return type(leaf) in (float, complex)


def is_made(value: Any) -> bool:
    """Return whether the pass has made a value; its inputs belong to the caller."""
    return isbox(value) and bool(value._node.parents)


def zeros_like(value: Any) -> Any:
    return vspace(value).zeros()


class SharedRoots:
    """What all steps of a loop close over: boxed once, whatever the number of steps.

    A step costs what it uses; its gradients are added to `sums`, by number.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values
        self.sums: dict[int, Flagged] = {}
        self.numbers: dict[Any, int] = {}  # by node, of all traces
        self._boxes: dict[int, list[Any]] = {}  # by trace

    def boxes(self) -> list[Any]:
        """Return the boxes for the trace that is being recorded: the same list every time."""
        trace = _traces.number
        if trace not in self._boxes:
            self._boxes[trace] = [
                captured_box(value, trace) if is_differentiable(value) else value
                for value in self.values
            ]
            found = enumerate(self._boxes[trace])
            self.numbers |= {box._node: i for i, box in found if isbox(box)}
        return self._boxes[trace]


class Recording:
    """One recorded call: its plain results and the graph that leads back to its inputs."""

    __slots__ = ("ends", "results", "roots")

    def __init__(self, roots: list[Any], ends: list[Any], results: list[Any]) -> None:
        self.roots = roots  # a node for each input, None for those that just pass through
        self.ends = ends  # a node for each result, None for those that depend on no input
        self.results = results

    def go_back(
        self,
        seeds: Sequence[Any],
        shared: SharedRoots | None = None,
        *,
        once: bool = False,
    ) -> list[Flagged | None]:
        """Pull `seeds`, a gradient (or None) for each result, back to the inputs.

        `shared` is what a step of a loop closes over, with the sums of its gradients so far. Adding
        to them here, node by node, is the order in which plain autograd adds over a whole loop: the
        rounding is the same. With `once`, arrays are freed on the way: there is no second time.
        """
        with backward_pass():
            return self._go_back(seeds, shared, once=once)

    def _go_back(
        self, seeds: Sequence[Any], shared: SharedRoots | None, *, once: bool
    ) -> list[Flagged | None]:
        gathered: dict[Any, Flagged] = {}
        roots = {root for root in self.roots if root is not None}
        numbers, totals = (shared.numbers, shared.sums) if shared else ({}, {})

        def add(node: Any, part: Any) -> None:
            if node in numbers:
                totals[numbers[node]] = _sum(totals.get(numbers[node]), part)
            else:
                gathered[node] = _sum(gathered.get(node), part)

        starts = [pair for pair in zip(self.ends, seeds, strict=True) if _counts(*pair)]
        for end, seed in starts:
            add(end, seed)
        nodes = list(toposort(_Top([node for node, _ in starts])))[1:]
        _refuse_foreign_roots(nodes, roots | numbers.keys())
        for node in nodes if once else ():
            node.value = None  # it belongs to rules and recomputations from now on
        for node in nodes:
            if not node.parents:
                continue
            out, _ = gathered.pop(node)
            for parent, part in zip(node.parents, _parts(node, out), strict=True):
                add(parent, _fitted(node, parent, part))
            if once:
                node.vjp = None  # with the arrays that it holds: there is no second time
        return [None if root is None else gathered.get(root) for root in self.roots]


class _Top:
    """A node above all ends."""

    def __init__(self, parents: list[Any]) -> None:
        self.parents = parents


def _sum(total: Flagged | None, part: Any) -> Flagged:
    # (autograd adds what a slice gives in place: to an array, also if that has no axes.)
    if total is not None and isinstance(total[0], np.generic) and type(part) in sparse_object_types:
        total = np.array(total[0]), True
    result: Flagged = add_outgrads(total, part)
    return result


def _parts(node: Any, out: Any) -> Iterable[Any]:
    try:
        return tuple(node.vjp(out))
    except NotImplementedError as error:
        name = getattr(node, "name", node)
        raise UnsupportedError(
            f"np.{name} is not supported with these arguments: {error}"
        ) from error


def _fitted(node: Any, parent: Any, part: Any) -> Any:
    """Return a gradient in the type of what it belongs to.

    Some of autograd's rules forget about broadcasting: an error, not a wrong gradient.
    """
    wanted = getattr(parent, "shape", None)
    if wanted is None or type(part) in sparse_object_types:
        return part
    if np.shape(plain(part)) != wanted:
        raise UnsupportedError(
            f"the derivative rule of np.{getattr(node, 'name', node)} gives a gradient of shape "
            f"{np.shape(plain(part))} for an argument of shape {wanted}; it does not support these "
            "arguments: bring them to a common shape first"
        )
    return cast(part, parent.dtype)


def _refuse_foreign_roots(nodes: list[Any], roots: set[Any]) -> None:
    for node in nodes:
        if not node.parents and node not in roots:
            raise _foreign_root(node)


def _foreign_root(node: Any) -> UnsupportedError:
    shape = getattr(node, "shape", None)
    return UnsupportedError(
        f"the result depends on a traced array (of shape {shape}) that is no input of this trace: "
        "one that was left over from another call (in a global, a cache, an attribute), or that "
        "was copied by other means than copy.copy and copy.deepcopy. Its gradient would be lost; "
        "pass it in as an argument"
    )


def _counts(end: Any, seed: Any) -> bool:
    return end is not None and seed is not None


def record(
    function: Callable[[list[Any]], list[Any]],
    inputs: Sequence[Any],
    wanted: Sequence[bool],
    log: OpLog | None = None,
) -> Recording:
    """Run `function` on boxes of `inputs` where `wanted`, and on the others as they are."""
    with _new_trace() as trace:
        pairs = zip(inputs, wanted, strict=True)
        boxes = [root_box(x, trace, log) if want else x for x, want in pairs]
        roots = [box._node if want else None for box, want in zip(boxes, wanted, strict=True)]
        results = function(boxes)
        ends = [r._node if isbox(r) and r._trace == trace else None for r in results]
        values = [r._value if end is not None else r for r, end in zip(results, ends, strict=True)]
    return Recording(roots, ends, values)


def refuse_boxes(values: Sequence[Any]) -> None:
    """A box that is left is one that the search for closed-over values did not find."""
    for value in values:
        if isbox(value) or (
            isinstance(value, np.ndarray) and value.dtype == object and any(map(isbox, value.flat))
        ):
            raise UnsupportedError(
                "the function uses a traced array that remat cannot find from outside (in a class "
                "attribute, an object array or an extension type); pass it in through the "
                "arguments or the state, or close over it in a variable, list, dict or attribute"
            )


def refuse_changed(boxes: Sequence[Any], values: Sequence[Any]) -> None:
    """What a function closes over must be after the call what it was before."""
    for box, value in zip(boxes, values, strict=True):
        if isbox(box) and box._value is not value:
            raise UnsupportedError(
                "the function changes in place what it closes over; what changes from call to call "
                "belongs into the state (or the inputs and results) of the function"
            )


class _Traces(threading.local):
    def __init__(self) -> None:
        self.depth = 0  # functions that are being differentiated in this thread
        self.number = -1  # of the innermost trace


_traces = _Traces()


def is_tracing() -> bool:
    """Return whether a function is being differentiated in this thread."""
    return _traces.depth > 0


@contextmanager
def _new_trace() -> Iterator[int]:
    """Like autograd's, but an exception leaves no trace behind."""
    # Why not autograd's count alone? Other threads change it, and an inner trace has to have a
    # larger number than the one around it.
    outer = _traces.number
    number = _traces.number = max(trace_stack.top, outer) + 1
    trace_stack.top += 1
    _traces.depth += 1
    # An open region is one of the trace around.
    region, threads.region = threads.region, None
    constants, threads.constants = threads.constants, Constants()
    check_again()
    try:
        yield number
    except ValueError as error:
        # What `out[0] = x[0]` raises on a plain array: NumPy hides why x[0] cannot be a float.
        if isinstance(error.__cause__, UnsupportedError):
            raise error.__cause__ from None
        raise
    finally:
        pickles.forget(number)
        trace_stack.top -= 1
        _traces.number = outer
        _traces.depth -= 1
        threads.region, threads.constants = region, constants
