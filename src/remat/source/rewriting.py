"""Writes a loop anew: as it was for its first turns, and from then on as steps of a loop runner.

    for x in xs:                    __remat_loop_0 = __remat.for_loop(0, xs)
        h = f(h, x)                 for x in __remat_loop_0.items():
                                        if __remat_loop_0.due:
                                            if __remat_loop_0.take((h,)):
                                                def __remat_make_0(__remat_frame, …, f):
                                                    def loop_at_line_7(__remat_state, …):
                                                        (h,) = __remat_frame.open(__remat_state)
                                                        x = __remat_frame.item(…)
                                                        h = f(h, x)
                                                        return __remat_frame.close(…, 0, (), h)
                                                    return loop_at_line_7
                                                (__remat_exit_0, h) = __remat_loop_0.run(…)
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
from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

from .analysis import LoopPlan
from .names import FUNCTIONS

__all__ = ["RUNTIME", "rewrite"]

RUNTIME = "__remat"  # the variable that generated code knows the library by
_GOES_ON, _ENDED, _BROKEN, _RETURNED = 0, -1, 1, 2


def rewrite(function: Any, plans: Mapping[ast.AST, LoopPlan]) -> None:
    """Replace every planned loop of a function, in place."""
    writer = _Writer(plans)
    function.body = [new for old in function.body for new in _listed(writer.visit(old))]


class _Writer(ast.NodeTransformer):
    def __init__(self, plans: Mapping[ast.AST, LoopPlan]) -> None:
        self._plans = plans

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return node  # nested functions are not transformed

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return node

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)  # inner loops first
        plan = self._plans.get(node)
        return node if plan is None else _LoopWriter(node, plan).for_loop(node)

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        plan = self._plans.get(node)
        return node if plan is None else _LoopWriter(node, plan).while_loop(node)


class _LoopWriter:
    """Writes one loop."""

    def __init__(self, node: ast.For | ast.While, plan: LoopPlan) -> None:
        self._node = node
        self._plan = plan
        self._loop = f"__remat_loop_{plan.number}"
        self._returns: dict[tuple[int, int] | None, ast.expr | None] = {}  # by where they stand
        self._test = node.test if isinstance(node, ast.While) else None

    def for_loop(self, node: ast.For) -> list[ast.stmt]:
        steps = self._steps(node.body, f"{self._loop}.due", node.target)
        begin = self._code(f"{self._loop} = {RUNTIME}.for_loop({self._plan.number}, None)")
        begin[0].value.args[1] = _items(node.iter)  # type: ignore[attr-defined]
        items = self._expression(f"{self._loop}.items()")
        node.iter = ast.copy_location(items, node.iter)
        node.body = [*steps, *node.body]
        return [*begin, node]

    def while_loop(self, node: ast.While) -> list[ast.stmt]:
        steps = self._steps(node.body, f"{self._loop}.due()", None)
        begin = self._code(f"{self._loop} = {RUNTIME}.while_loop({self._plan.number})")
        is_open = self._expression(f"{self._loop}.open")
        both = ast.BoolOp(ast.And(), [is_open, node.test])
        node.test = ast.copy_location(both, node.test)
        node.body = [*steps, *node.body]
        return [*begin, node]

    # -- around the steps ----------------------------------------------------------------------

    def _steps(self, body: Sequence[ast.stmt], due: str, target: ast.expr | None) -> list[ast.stmt]:
        """Write what runs the rest of the loop as steps, if it is due."""
        plan, number = self._plan, self._plan.number
        step = self._step(body, target)
        loop, reads = self._loop, ", ".join(["", *map(self._parameter, plan.reads)])
        given = [_temporary(name) if name in plan.unbound else name for name in plan.state]
        given += [each.name for each in plan.outputs]
        values = "".join(f"{name}, " for name in given)
        code = (
            f"if {due}:\n"
            f"{indent(self._values(), '    ')}"
            f"    __remat_taken_{number} = {loop}.take(({values}))\n"
            f"{indent(self._forget(), '    ')}"
            f"    if __remat_taken_{number}:\n"
            f"        def __remat_make_{number}(__remat_frame, __remat_sources{reads}):\n"
            "            'the step'\n"
            f"            return {self._step_name}\n"
            f"{indent(self._run(), ' ' * 8)}"
            "        continue\n"
        )
        written = self._code(code)
        make = written[0].body[-1].body[0]  # type: ignore[attr-defined]
        make.body[0] = step
        self._go_on(written[0].body[-1])  # type: ignore[attr-defined]
        return written

    def _parameter(self, name: str) -> str:
        """Name a parameter of `make`; a step may take it as a variable of its own."""
        return f"__remat_read_{name}" if self._plan.owns_reads else name

    @property
    def _step_name(self) -> str:
        return f"loop_at_line_{self._plan.line}"

    def _run(self) -> str:
        """Write the call of the runner, which gives the state new values."""
        plan = self._plan
        reads = ", ".join(["", *plan.reads])
        names = "".join(f"{name}, " for name in plan.state)
        run = f"(__remat_exit_{plan.number}, {names}) = {self._loop}.run("
        run += f"__remat_make_{plan.number}{reads})\n"
        if plan.guarded and plan.state:
            # Code that catches the error must not find values from before the loop.
            unbind = "".join(f"{name} = None; del {name}\n" for name in plan.state)
            run = f"try:\n    {run}except BaseException:\n{indent(unbind, '    ')}    raise\n"
        for name in sorted(plan.unbound):
            run += f"if {name} is {RUNTIME}.unbound: del {name}\n"
        return run

    def _go_on(self, taken: Any) -> None:
        """Write where the program goes on after a break or return of a step, before `continue`."""
        exits: list[ast.stmt] = []
        leaves = f"__remat_exit_{self._plan.number}"
        if self._plan.has_exits and isinstance(self._node, ast.For | ast.While):
            exits += self._code(f"if {leaves} == {_BROKEN}: break")
        for place, value in enumerate(self._returns.values(), _RETURNED):
            way = self._code(f"if {leaves} == {place}: return None")
            way[0].body[0].value = value  # type: ignore[attr-defined]
            exits += way
        taken.body[-1:-1] = exits

    def _values(self) -> str:
        return "".join(
            f"try: {_temporary(name)} = {name}\n"
            f"except NameError: {_temporary(name)} = {RUNTIME}.unbound\n"
            for name in sorted(self._plan.unbound)
        )

    def _forget(self) -> str:
        return "".join(f"del {_temporary(name)}\n" for name in sorted(self._plan.unbound))

    # -- one step ------------------------------------------------------------------------------

    def _step(self, body: Sequence[ast.stmt], target: ast.expr | None) -> ast.stmt:
        plan = self._plan
        code = f"def {self._step_name}(__remat_state, __remat_x=None):\n"
        if plan.has_exits or target is None:
            code += "    if __remat_frame.is_done(__remat_state):\n"
            code += "        return __remat_frame.idle(__remat_state)\n"
        names = "".join(f"{name}, " for name in plan.state)
        if plan.state:
            code += f"    ({names}) = __remat_frame.open(__remat_state)\n"
        else:
            code += "    __remat_frame.open(__remat_state)\n"
        for name in sorted(plan.unbound):
            code += f"    if {name} is __remat_frame.unbound: del {name}\n"
        if plan.owns_reads and plan.reads:
            own = "".join(f"{name}, " for name in plan.reads)
            given = ", ".join(map(self._parameter, plan.reads))
            code += f"    ({own}) = __remat_frame.own({given})\n"
        for place, each in enumerate(plan.outputs):
            code += f"    {each.name} = __remat_frame.collect({place}, __remat_state)\n"
        (step,) = self._code(code + "    pass\n")
        assert isinstance(step, ast.FunctionDef)
        step.body.pop()
        if target is not None and plan.needs_item:
            get = "target = __remat_frame.item(__remat_state, __remat_sources, __remat_x)"
            item = self._code(get)
            item[0].targets[0] = copy.deepcopy(target)  # type: ignore[attr-defined]
            step.body += item
        jumps = _Jumps(self)
        for statement in copy.deepcopy(list(body)):
            step.body += _listed(jumps.visit(statement))
        step.body += self.leave(_GOES_ON)
        return step

    def leave(self, where: int) -> list[ast.stmt]:
        """Write the end of a step."""
        plan = self._plan
        outputs = "".join(f"{each.name}, " for each in plan.outputs)
        unsure = [name for name in plan.state if name in plan.unbound]
        prelude = "".join(
            f"try: {_temporary(name)} = {name}\n"
            f"except NameError: {_temporary(name)} = __remat_frame.unbound\n"
            for name in unsure
        )
        values = [_temporary(name) if name in plan.unbound else name for name in plan.state]
        # The condition comes first: it may bind names of the state.
        is_tested = where == _GOES_ON and self._test is not None
        leaves_by = "__remat_where" if is_tested else str(where)
        reads = "".join(f"{name}, " for name in plan.reads)
        given = ", ".join([f"__remat_state, {leaves_by}, ({outputs}), ({reads})", *values])
        code = self._code(f"{prelude}return __remat_frame.close({given})")
        if is_tested:
            first = self._code(f"__remat_where = {_GOES_ON} if test else {_ENDED}")
            first[0].value.test = copy.deepcopy(self._test)  # type: ignore[attr-defined]
            code = [*first, *code]
        return code

    def leave_returning(self, value: ast.expr | None) -> list[ast.stmt]:
        # A `return` of an inner loop is there twice; both must give the same number.
        key = None if value is None else (value.lineno, value.col_offset)
        place = list(self._returns).index(key) if key in self._returns else len(self._returns)
        self._returns[key] = value
        return self.leave(_RETURNED + place)

    # -- parts ---------------------------------------------------------------------------------

    def _code(self, text: str) -> list[ast.stmt]:
        """Parse code that stands, for tracebacks and debuggers, at the line of the loop."""
        tree = ast.parse(text)
        for node in ast.walk(tree):
            _place(node, self._node)
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
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            return node
        if not isinstance(node, ast.For | ast.While):
            return super().generic_visit(node)
        self._inner += 1
        node.body = [new for old in node.body for new in _listed(self.visit(old))]
        self._inner -= 1
        node.orelse = [new for old in node.orelse for new in _listed(self.visit(old))]
        return node


def _items(iterable: ast.expr) -> ast.expr:
    """Let the library see through zip, enumerate, reversed and steps: it asks them for entries."""
    if not isinstance(iterable, ast.Call) or not _is_transparent(iterable.func):
        return iterable
    arguments = [_items(each) for each in iterable.args]
    lazy = ast.Attribute(ast.Name(RUNTIME, ast.Load()), "lazy", ast.Load())
    call = ast.Call(lazy, [iterable.func, *arguments], iterable.keywords)
    ast.copy_location(call, iterable)
    for node in (lazy, lazy.value):
        ast.copy_location(node, iterable)
    return call


def _is_transparent(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in ("zip", "enumerate", "reversed", "steps")
    return isinstance(function, ast.Attribute) and function.attr == "steps"


def _temporary(name: str) -> str:
    return f"__remat_value_of_{name}"


def _place(node: ast.AST, at: ast.stmt) -> None:
    if hasattr(node, "lineno"):
        node.lineno = node.end_lineno = at.lineno  # type: ignore[attr-defined]
        node.col_offset, node.end_col_offset = at.col_offset, at.col_offset  # type: ignore[attr-defined]


def _listed(node: Any) -> list[Any]:
    return node if isinstance(node, list) else [node]
