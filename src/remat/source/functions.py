"""From a function to its syntax tree and back to a function.

The tree has the lines and columns of the user's file; the new function has the same closure cells,
globals, defaults and names, so that tracebacks and debuggers show the user's own code.
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
from types import CellType, CodeType, FunctionType
from typing import Any

from .names import LOOPS, walk_scope
from .rewriting import RUNTIME

__all__ = [
    "NoSourceError",
    "compile_function",
    "explicit_names",
    "function_with_code",
    "parse_function",
]

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FACTORY = "__remat_factory"
_FUTURE = 0
for _feature in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _feature).compiler_flag


class NoSourceError(Exception):
    """There is no source to be found, or it is not that of the function."""


def parse_function(code: CodeType) -> Function | None:
    """Return the syntax tree of a function with the lines of its file; None if it is a lambda."""
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError) as error:
        raise NoSourceError(f"its source is not available ({error})") from error
    if code.co_name == "<lambda>":
        return None
    source = "".join(lines)
    is_indented = source[:1].isspace()
    try:
        # A block around it, and not less indentation: columns stay what they are.
        tree = ast.parse(f"if True:\n{source}" if is_indented else source)
    except SyntaxError as error:
        raise NoSourceError(f"its source cannot be parsed alone ({error})") from error
    ast.increment_lineno(tree, first - 1 - is_indented)
    node = tree.body[0].body[0] if is_indented else tree.body[0]  # type: ignore[attr-defined]
    if not isinstance(node, Function) or node.name != code.co_name:
        raise NoSourceError("the file is not what it was when it was imported")
    node.decorator_list = []
    return node


def explicit_names(function: Function, code: CodeType, qualified: str) -> None:
    """Write out what depends on where code stands: super(), and private names of a class."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    if "__class__" in code.co_freevars and parameters:
        for loop in walk_scope(function.body):
            if isinstance(loop, LOOPS):
                _name_super(loop, parameters[0].arg)
    owner, name = _class_of(qualified), function.name
    if owner:
        _Mangling(owner).visit(function)
        function.name = name


def _name_super(loop: ast.AST, first: str) -> None:
    for node in walk_scope(loop):
        match node:
            case ast.Call(func=ast.Name(id="super"), args=[], keywords=[]):
                arguments = [ast.Name("__class__", ast.Load()), ast.Name(first, ast.Load())]
                node.args = [ast.copy_location(each, node) for each in arguments]


def _class_of(qualified: str) -> str | None:
    """Return the class in whose body a function stands, by its qualified name."""
    for part in reversed(qualified.split(".<locals>.")):
        names = part.split(".")
        if len(names) > 1:
            return names[-2]
    return None


class _Mangling(ast.NodeTransformer):
    """Private names of a class, as Python spells them outside of it."""

    def __init__(self, owner: str) -> None:
        self._prefix = f"_{owner.lstrip('_')}"

    def _mangled(self, name: str) -> str:
        is_private = name.startswith("__") and not name.endswith("__") and "." not in name
        return self._prefix + name if is_private else name

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.ClassDef):
            return node  # has names of its own
        for field in ("id", "attr", "arg", "name"):
            value = getattr(node, field, None)
            if isinstance(value, str) and not isinstance(node, ast.keyword):
                setattr(node, field, self._mangled(value))
        if isinstance(node, ast.Global | ast.Nonlocal):
            node.names = list(map(self._mangled, node.names))
        return super().generic_visit(node)


def compile_function(function: Function, code: CodeType) -> CodeType:
    """Compile a tree to the code of a function with the free variables of another one."""
    free = [ast.arg(name) for name in (*code.co_freevars, RUNTIME)]
    none: list[Any] = []
    arguments = ast.arguments(none, free, None, [], [], None, [])
    made = copy.copy(function)
    factory = ast.FunctionDef(_FACTORY, arguments, [made], [], None)
    if "type_params" in ast.FunctionDef._fields:  # from Python 3.12 on; they have a scope around it
        made.type_params = []  # type: ignore[union-attr]
        factory.type_params = []  # type: ignore[attr-defined]
    module = ast.fix_missing_locations(ast.Module([factory], []))
    flags = code.co_flags & _FUTURE
    whole = compile(module, code.co_filename, "exec", flags=flags, dont_inherit=True)
    inner = _inner(_inner(whole, _FACTORY), code.co_name)
    return _renamed(inner, f"{_FACTORY}.<locals>.{code.co_name}", code.co_qualname)


def _inner(code: CodeType, name: str) -> CodeType:
    codes = [each for each in code.co_consts if isinstance(each, CodeType)]
    return next(each for each in codes if each.co_name == name)


def _renamed(code: CodeType, old: str, new: str) -> CodeType:
    """Give code, and the code inside of it, the qualified names that the user knows."""
    consts = tuple(
        _renamed(each, old, new) if isinstance(each, CodeType) else each for each in code.co_consts
    )
    name = code.co_qualname
    return code.replace(co_consts=consts, co_qualname=new + name.removeprefix(old))


def function_with_code(function: FunctionType, code: CodeType, runtime: Any) -> FunctionType:
    """Return a function like another one, cells included, with other code."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells[RUNTIME] = CellType(runtime)
    closure = tuple(cells[name] for name in code.co_freevars)
    new = FunctionType(code, function.__globals__, function.__name__, None, closure)
    new.__defaults__ = function.__defaults__
    new.__kwdefaults__ = function.__kwdefaults__
    # From Python 3.14 on annotations are evaluated when they are asked for: what they name may come
    # later.
    is_deferred = getattr(function, "__annotate__", None) is not None
    annotations = "__annotate__" if is_deferred else "__annotations__"
    for name in (annotations, "__doc__", "__module__", "__qualname__", "__type_params__"):
        if hasattr(function, name):
            setattr(new, name, getattr(function, name))
    new.__dict__.update(function.__dict__)
    return new
