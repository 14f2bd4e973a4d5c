"""Rewrites a loop: as it was for its first turns, and from then on as steps of a loop runner.

    for x in xs:                    _remat_loop_0 = _remat.for_loop(0, xs)
        h = f(h, x)                 for x in _remat_loop_0.items():
                                        if _remat_loop_0.check_now:
                                            _remat_taken_0 = _remat_loop_0.take((h,))
                                            if _remat_taken_0:
                                                def _remat_make_0(_remat_frame, …, f):
                                                    def loop_at_line_7(_remat_state, …):
                                                        (h,) = _remat_frame.open(_remat_state)
                                                        x = _remat_frame.item(…)
                                                        h = f(h, x)
                                                        return _remat_frame.close(…, 0, (), h)
                                                    return loop_at_line_7
                                                (_remat_exit_0, h) = _remat_loop_0.run(…)
                                                continue
                                        h = f(h, x)

A loop that is not differentiated, and one with few steps, never leaves its own code. What the body
reads and does not bind becomes a parameter of `make`: steps are run again much later, when the
function may have given these names other values. A `break` or `return` ends the step with a number
that says where to go on; the value of a `return` is computed outside of the step.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Mapping, Sequence
from textwrap import indent
from typing import Any

from .analysis import LoopSpec
from .names import SCOPES

__all__ = ["RUNTIME", "rewrite"]

RUNTIME = "_remat"  # (not __remat, which Python would spell otherwise in a class)
_GOES_ON, _ENDED, _BROKEN, _RETURNED = 0, -1, 1, 2
_TRANSPARENT = ("zip", "enumerate", "reversed", "steps")


def rewrite(function: Any, specs: Mapping[ast.AST, LoopSpec]) -> None:
    """Replace every loop with a spec, in place."""
    function.body = _visited(_FunctionWriter(specs), function.body)


class _FunctionWriter(ast.NodeTransformer):
    """Writes the loops of a function, inner ones first; not those of functions inside of it."""

    def __init__(self, specs: Mapping[ast.AST, LoopSpec]) -> None:
        self._specs = specs

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, SCOPES):
            return node
        self.generic_visit(node)
        spec = self._specs.get(node)
        return node if spec is None else _LoopWriter(node, spec).loop()


class _LoopWriter:
    """Writes one loop."""

    def __init__(self, node: Any, spec: LoopSpec) -> None:
        self._node: ast.For | ast.While = node
        self._spec = spec
        self._loop = f"_remat_loop_{spec.number}"
        self._returns: dict[Any, ast.expr | None] = {}  # by where they stand

    def loop(self) -> list[ast.stmt]:
        node, number = self._node, self._spec.number
        steps = self._steps()
        if isinstance(node, ast.For):
            begin = self._code(f"{self._loop} = {RUNTIME}.for_loop({number}, iterable)")
            begin[0].value.args[1] = _with_items(node.iter)  # type: ignore[attr-defined]
            node.iter = self._expression(f"{self._loop}.items()")
        else:
            begin = self._code(f"{self._loop} = {RUNTIME}.while_loop({number})")
            running = self._expression(f"{self._loop}.is_running")
            test = ast.BoolOp(ast.And(), [running, node.test])
            node.test = ast.copy_location(test, node.test)
        node.body = [*steps, *node.body]
        return [*begin, node]

    # -- around the steps ----------------------------------------------------------------------

    def _steps(self) -> list[ast.stmt]:
        """Write what runs the rest of the loop as steps, if it can."""
        spec, number = self._spec, self._spec.number
        step = self._step()
        given = _tuple([*self._values(spec.state), *(each.name for each in spec.outputs)])
        forget = "".join(f"del {_value_of(name)}\n" for name in sorted(spec.unbound))
        parameters = "".join(f", {self._parameter(name)}" for name in spec.reads)
        names = _tuple(spec.state)
        run = f"(_remat_exit_{number}, {names}) = {self._loop}.run("
        run += f"_remat_make_{number}{''.join(f', {name}' for name in spec.reads)})\n"
        if spec.guarded and spec.state:
            # Code that catches the error must not find values from before the loop.
            unbind = "".join(f"{name} = None; del {name}\n" for name in spec.state)
            run = f"try:\n    {run}except BaseException:\n{indent(unbind, '    ')}    raise\n"
        code = (
            f"if {self._loop}.check_now:\n"
            f"{indent(self._try_values('_remat'), '    ')}"
            f"    _remat_taken_{number} = {self._loop}.take(({given}))\n"
            f"{indent(forget, '    ')}"
            f"    if _remat_taken_{number}:\n"
            f"        def _remat_make_{number}(_remat_frame, _remat_sources{parameters}):\n"
            "            'the step'\n"
            f"            return {self._step_name}\n"
            f"{indent(run + self._unbind('_remat'), ' ' * 8)}"
            "        continue\n"
        )
        written = self._code(code)
        taken = written[0].body[-1]  # type: ignore[attr-defined]
        taken.body[0].body[0] = step
        taken.body[-1:-1] = self._exits()
        return written

    def _exits(self) -> list[ast.stmt]:
        """Write where the program goes on after a break or return of a step."""
        exit_number = f"_remat_exit_{self._spec.number}"
        found: list[ast.stmt] = []
        if self._spec.has_exits:
            found += self._code(f"if {exit_number} == {_BROKEN}: break")
        for place, value in enumerate(self._returns.values(), _RETURNED):
            (way,) = self._code(f"if {exit_number} == {place}: return None")
            way.body[0].value = value  # type: ignore[attr-defined]
            found.append(way)
        return found

    @property
    def _step_name(self) -> str:
        return f"loop_at_line_{self._spec.line}"

    def _parameter(self, name: str) -> str:
        """Name a parameter of `make`; a step may take it as a variable of its own."""
        return f"_remat_read_{name}" if self._spec.owns_reads else name

    def _values(self, names: Iterable[str]) -> list[str]:
        return [_value_of(name) if name in self._spec.unbound else name for name in names]

    def _try_values(self, owner: str) -> str:
        """Write what asks for variables that may have no value."""
        return "".join(
            f"try: {_value_of(name)} = {name}\n"
            f"except NameError: {_value_of(name)} = {owner}.unbound\n"
            for name in sorted(self._spec.unbound)
        )

    def _unbind(self, owner: str) -> str:
        return "".join(
            f"if {name} is {owner}.unbound: del {name}\n" for name in sorted(self._spec.unbound)
        )

    # -- one step ------------------------------------------------------------------------------

    def _step(self) -> ast.stmt:
        spec, node = self._spec, self._node
        frame, state = "_remat_frame", "_remat_state"
        code = ""
        if spec.has_exits or isinstance(node, ast.While):
            code += f"if {frame}.has_ended({state}): return {frame}.after_end({state})\n"
        names = f"({_tuple(spec.state)}) = " if spec.state else ""
        code += f"{names}{frame}.open({state})\n{self._unbind(frame)}"
        if spec.owns_reads and spec.reads:
            given = ", ".join(map(self._parameter, spec.reads))
            code += f"({_tuple(spec.reads)}) = {frame}.own({given})\n"
        for place, each in enumerate(spec.outputs):
            code += f"{each.name} = {frame}.collect({place}, {state})\n"
        head = f"def {self._step_name}({state}, _remat_x=None):\n"
        (step,) = self._code(head + indent(code, "    "))
        assert isinstance(step, ast.FunctionDef)
        if isinstance(node, ast.For) and spec.needs_item:
            (item,) = self._code(f"target = {frame}.item({state}, _remat_sources, _remat_x)")
            item.targets[0] = copy.deepcopy(node.target)  # type: ignore[attr-defined]
            step.body.append(item)
        step.body += _visited(_Jumps(self), copy.deepcopy(node.body))
        step.body += self.leave(_GOES_ON)
        return step

    def leave(self, exit_number: int) -> list[ast.stmt]:
        """Write the end of a step."""
        spec = self._spec
        is_tested = exit_number == _GOES_ON and isinstance(self._node, ast.While)
        number = "_remat_where" if is_tested else str(exit_number)
        outputs = _tuple(each.name for each in spec.outputs)
        given = [number, f"({outputs})", f"({_tuple(spec.reads)})", *self._values(spec.state)]
        code = self._try_values("_remat_frame")
        code += f"return _remat_frame.close(_remat_state, {', '.join(given)})"
        written = self._code(code)
        if is_tested:  # first: the condition may bind names of the state
            (test,) = self._code(f"_remat_where = {_GOES_ON} if test else {_ENDED}")
            test.value.test = copy.deepcopy(self._node.test)  # type: ignore[attr-defined, union-attr]
            written.insert(0, test)
        return written

    def leave_returning(self, value: ast.expr | None) -> list[ast.stmt]:
        # A `return` of an inner loop is there twice; both must give the same number.
        key = None if value is None else (value.lineno, value.col_offset)
        self._returns.setdefault(key, value)
        return self.leave(_RETURNED + list(self._returns).index(key))

    # -- parts ---------------------------------------------------------------------------------

    def _code(self, text: str) -> list[ast.stmt]:
        """Parse code that stands, for tracebacks and debuggers, at the line of the loop."""
        tree, at = ast.parse(text), self._node
        for node in ast.walk(tree):
            if hasattr(node, "lineno"):
                node.lineno = node.end_lineno = at.lineno  # type: ignore[attr-defined]
                node.col_offset = node.end_col_offset = at.col_offset  # type: ignore[attr-defined]
        return tree.body

    def _expression(self, text: str) -> ast.expr:
        (statement,) = self._code(text)
        assert isinstance(statement, ast.Expr)
        return statement.value


class _Jumps(ast.NodeTransformer):
    """Turns what leaves a turn of the loop into the end of a step."""

    def __init__(self, writer: _LoopWriter) -> None:
        self._writer = writer
        self._inner = 0  # loops inside of the loop, which have jumps of their own

    def visit_Return(self, node: ast.Return) -> Any:
        return self._writer.leave_returning(node.value)

    def visit_Break(self, node: ast.Break) -> Any:
        return node if self._inner else self._writer.leave(_BROKEN)

    def visit_Continue(self, node: ast.Continue) -> Any:
        return node if self._inner else self._writer.leave(_GOES_ON)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, SCOPES):
            return node
        if not isinstance(node, ast.For | ast.While):
            return super().generic_visit(node)
        self._inner += 1
        node.body = _visited(self, node.body)
        self._inner -= 1
        node.orelse = _visited(self, node.orelse)
        return node


def _visited(transformer: ast.NodeTransformer, body: Sequence[ast.stmt]) -> list[ast.stmt]:
    found = (transformer.visit(statement) for statement in body)
    return [new for each in found for new in (each if isinstance(each, list) else [each])]


def _with_items(iterable: ast.expr) -> ast.expr:
    """Let the library see through zip, enumerate, reversed and steps: it asks them for entries."""
    function = getattr(iterable, "func", None)
    if getattr(function, "id", "") not in _TRANSPARENT and getattr(function, "attr", "") != "steps":
        return iterable
    assert isinstance(iterable, ast.Call)
    lazy = ast.parse(f"{RUNTIME}.lazy()", mode="eval").body
    for node in ast.walk(lazy):
        ast.copy_location(node, iterable)
    assert isinstance(lazy, ast.Call)
    lazy.args = [iterable.func, *map(_with_items, iterable.args)]
    lazy.keywords = iterable.keywords
    return lazy


def _value_of(name: str) -> str:
    return f"_remat_value_of_{name}"


def _tuple(names: Iterable[str]) -> str:
    return "".join(f"{name}, " for name in names)
