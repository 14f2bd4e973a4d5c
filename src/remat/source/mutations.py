"""Which objects a piece of code visibly changes in place.

Only what the code itself shows is found: stores into subscripts and attributes, augmented
assignments, methods and functions that are known to change what they are called on. What a called
function does inside stays hidden.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import NamedTuple

from .names import walk_scope

__all__ = ["Mutation", "find_mutations"]

# As a statement of its own, a call of one of these is there for its effect.
_METHODS = frozenset(
    {
        *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "fill"),
        *("insert", "itemset", "partition", "pop", "popitem", "popleft", "put", "remove"),
        *("resize", "reverse", "rotate", "setdefault", "setflags", "sort", "update"),
        *("difference_update", "intersection_update", "symmetric_difference_update"),
    }
)
# These also give a value, so they are used inside of expressions.
_METHODS_WITH_VALUE = frozenset({"pop", "popitem", "popleft", "setdefault"})
# Functions that change their first argument.
_FUNCTIONS = frozenset(
    {
        *("copyto", "put", "place", "putmask", "fill_diagonal", "put_along_axis", "shuffle"),
        *("heappush", "heappop", "heapify", "heapreplace", "heappushpop", "insort"),
        *("insort_left", "insort_right", "setattr", "delattr"),
    }
)


class Mutation(NamedTuple):
    """One place where an object changes."""

    node: ast.AST
    name: str | None  # of the variable that holds the object; None: it is reached in another way
    how: str  # in words
    depth: int = 1  # 2: what changes is an entry of the object
    is_augmented: bool = False  # x += y, which changes arrays and rebinds numbers


def find_mutations(body: Iterable[ast.AST]) -> list[Mutation]:
    """Return every place where some code visibly changes an object."""
    found: list[Mutation] = []
    statements: set[int] = set()  # calls that are statements
    for node in walk_scope(body):
        if isinstance(node, ast.Expr):
            statements.add(id(node.value))
        match node:
            case ast.AugAssign(target=ast.Subscript() as target):  # an entry, perhaps in place
                found.append(_of(target, target, "changes an entry of {} in place"))
            case ast.Subscript(ctx=ast.Store() | ast.Del()):
                found.append(_store(node))
            case ast.Attribute(ctx=ast.Store() | ast.Del(), attr=attribute):
                found.append(Mutation(node, None, f"writes to the attribute .{attribute}"))
            case ast.AugAssign(target=ast.Name(id=name)):
                found.append(Mutation(node, name, f"changes {name} in place", is_augmented=True))
            case ast.Call():
                found += _call(node, is_statement=id(node) in statements)
    return found


def _store(node: ast.Subscript) -> Mutation:
    return _of(node, node.value, "writes into {}")


def _call(node: ast.Call, *, is_statement: bool) -> list[Mutation]:
    found = []
    for keyword in node.keywords:
        if keyword.arg == "out":
            parts = keyword.value.elts if isinstance(keyword.value, ast.Tuple) else [keyword.value]
            found += [_of(node, part, "writes into {} (out=)") for part in parts]
    function = node.func
    name = _called_name(function)
    if isinstance(function, ast.Attribute) and _changes_its_object(name, is_statement):
        found.append(_of(node, function.value, f"calls .{name}() on {{}}"))
    elif node.args and _changes_its_argument(function, name):
        found.append(_of(node, node.args[0], f"changes {{}} with {name}()"))
    return [each for each in found if each.name is not None or each.how]


def _called_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _changes_its_object(method: str, is_statement: bool) -> bool:
    if method in _METHODS_WITH_VALUE or (is_statement and method in _METHODS):
        return True
    return _is_in_place(method)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name != "_"


def _changes_its_argument(function: ast.expr, name: str) -> bool:
    is_at = name == "at" and isinstance(function, ast.Attribute)  # np.add.at(x, …)
    return is_at or name in _FUNCTIONS or _is_in_place(name)


def _of(node: ast.AST, changed: ast.expr, how: str) -> Mutation:
    """Say what changes: a variable, an entry of one, or something that is reached otherwise."""
    depth = 1
    while isinstance(changed, ast.Subscript):
        changed, depth = changed.value, depth + 1
    if isinstance(changed, ast.Name):
        return Mutation(node, changed.id, how.format(changed.id), depth)
    if isinstance(changed, ast.Call | ast.Constant | ast.BinOp | ast.List | ast.Dict):
        return Mutation(node, None, "")  # what was just made has no other reference
    return Mutation(node, None, how.format(ast.unparse(changed)))
