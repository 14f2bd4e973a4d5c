"""A function in, a function out whose loops run with checkpoints.

From the function to its syntax tree, and back: the tree has the lines and columns of the user's
file; the new function has the same closure cells, globals, defaults and names, so that tracebacks
and debuggers show the user's own code.
"""

from __future__ import annotations
import __future__

import ast
import copy
import dis
import functools
import inspect
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from ..errors import LoopTransformError, RematWarning
from .analysis import LoopSpec, find_loops
from .names import LOOPS, Function, walk_scope
from .protocols import LoopSite, Options, Runner, Values
from .refusals import Refusal
from .rewriting import RUNTIME, rewrite
from .runtime import Runtime

__all__ = ["transform"]

_FACTORY = "_remat_factory"
_FUTURE = 0
for _feature in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _feature).compiler_flag


@dataclass(slots=True)
class Transformed:
    """The new code of a function, and what is known of its loops."""

    code: CodeType | None  # None: there is nothing to transform
    source: str
    specs: dict[int, LoopSpec]
    refusals: tuple[Refusal, ...]
    warned: bool = False


def transform(
    function: FunctionType,
    options: Options,
    values: Values,
    runner: Runner,
    *,
    strict: bool,
) -> FunctionType:
    """Return a function that does what another one does, with loops that checkpoint themselves."""
    code = function.__code__
    made = _transform_code(code, code.co_filename, function.__qualname__)
    for refusal in made.refusals:
        words = LoopSite(code.co_filename, refusal.line).words(refusal.reason)
        if strict:
            raise LoopTransformError(words)
        if not made.warned:
            words += "; it runs without checkpoints"
            warnings.warn_explicit(words, RematWarning, code.co_filename, refusal.line)
    made.warned = True
    runtime = Runtime(made.specs, code.co_filename, options, values, runner, strict=strict)
    new = _with_code(function, made.code or code, runtime)
    new.transformed_source = made.source  # type: ignore[attr-defined]
    return new


@functools.lru_cache(maxsize=512)
def _transform_code(code: CodeType, filename: str, qualified: str) -> Transformed:
    """Transform the code of a function; the same code once only.

    Code compares equal whatever its file is called, so the name of the file is an argument, too.
    """
    try:
        tree = _parse(code, qualified)
    except _NoSourceError as error:
        refusal = Refusal(code.co_firstlineno, f"{code.co_name}: {error}")
        return Transformed(None, "", {}, (refusal,))
    if tree is None:
        return Transformed(None, "", {}, ())
    if "__class__" in code.co_freevars:
        _write_out_super(tree)
    found = find_loops(tree)
    specs = {loop: each for loop, each in found.items() if isinstance(each, LoopSpec)}
    refusals = tuple(each for each in found.values() if isinstance(each, Refusal))
    if not specs:
        return Transformed(None, ast.unparse(tree), {}, refusals)
    rewrite(tree, specs)
    by_number = {spec.number: spec for spec in specs.values()}
    return Transformed(
        _compile(tree, code, qualified, (RUNTIME,)), ast.unparse(tree), by_number, refusals
    )


# -- from a function to its tree ---------------------------------------------------------------


_OTHER_FILE = "the file is not what it was when it was imported"


class _NoSourceError(Exception):
    """There is no source to be found, or it is not that of the function."""


def _parse(code: CodeType, qualified: str) -> Function | None:
    """Return the syntax tree of a function with the lines of its file; None if it is a lambda."""
    try:
        if code.co_filename == "<string>":  # Python 3.13 looks for it in the text of `python -c`
            raise OSError("it has no file")
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError) as error:
        raise _NoSourceError(f"its source is not available ({error})") from error
    if code.co_name == "<lambda>":
        return None
    source = "".join(lines)
    is_indented = source[:1].isspace()
    try:
        # A block around it, and not less indentation: columns stay what they are.
        tree = ast.parse(f"if True:\n{source}" if is_indented else source)
    except SyntaxError as error:
        raise _NoSourceError(f"its source cannot be parsed alone ({error})") from error
    ast.increment_lineno(tree, first - 1 - is_indented)
    node = tree.body[0].body[0] if is_indented else tree.body[0]  # type: ignore[attr-defined]
    if not isinstance(node, Function) or node.name != code.co_name:
        raise _NoSourceError(_OTHER_FILE)
    node.decorator_list = []
    if not _is_rewritten(code) and not _are_same(code, _compile(node, code, qualified)):
        raise _NoSourceError(_OTHER_FILE)
    return node


def _is_rewritten(code: CodeType) -> bool:
    """Return whether pytest has rewritten the assertions of a function."""
    return any(name.startswith("@py") for name in (*code.co_varnames, *code.co_names))


def _are_same(one: CodeType, other: CodeType) -> bool:
    """Return whether two functions have the same instructions.

    How a method of a global is called depends on the module: that is not compared.
    """
    pairs = itertools.zip_longest(_instructions(one), _instructions(other))
    return all(
        _are_same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else a == b
        for a, b in pairs
    )


def _instructions(code: CodeType) -> Iterator[Any]:
    for each in dis.get_instructions(code):
        if isinstance(each.argval, CodeType):
            yield each.argval
        elif each.opname not in ("PRECALL", "PUSH_NULL"):
            name = "LOAD_ATTR" if each.opname == "LOAD_METHOD" else each.opname
            yield name, "" if each.opcode in _JUMPS else repr(each.argval)


_JUMPS = {*dis.hasjrel, *dis.hasjabs}


def _write_out_super(function: Function) -> None:
    """Give super() in loops its arguments: in a step it would look for others."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    loops = [node for node in walk_scope(function.body) if isinstance(node, LOOPS)]
    for node in walk_scope(loops if parameters else []):
        match node:
            case ast.Call(func=ast.Name(id="super"), args=[], keywords=[]):
                names = [ast.Name(each, ast.Load()) for each in ("__class__", parameters[0].arg)]
                node.args = [ast.copy_location(each, node) for each in names]


# -- from a tree to a function -----------------------------------------------------------------


def _compile(
    function: Function, code: CodeType, qualified: str, more: tuple[str, ...] = ()
) -> CodeType:
    """Compile a tree to the code of a function with the free variables of another one, and `more`.

    A function around it binds these; a class around that makes Python spell private names.
    """
    owners = [each.split(".")[-2] for each in qualified.split(".<locals>.") if "." in each]
    path = [*owners[-1:], _FACTORY]
    free = ", ".join((*code.co_freevars, *more))
    head = f"class {owners[-1]}:\n    def" if owners else "def"
    module = ast.parse(f"{head} {_FACTORY}({free}): pass")
    factory: Any = module.body[0]
    for _ in owners[-1:]:
        factory = factory.body[0]
    inner_function: Any = copy.copy(function)
    if hasattr(function, "type_params"):  # from Python 3.12 on; they have a scope around it
        inner_function.type_params = []
    factory.body = [inner_function]
    flags = code.co_flags & _FUTURE
    made = compile(module, code.co_filename, "exec", flags=flags, dont_inherit=True)
    for name in (*path, code.co_name):
        inner = [each for each in made.co_consts if isinstance(each, CodeType)]
        made = next(each for each in inner if each.co_name == name)
    return _renamed(made, made.co_qualname, code.co_qualname)


def _renamed(code: CodeType, old: str, new: str) -> CodeType:
    """Give code, and the code inside of it, the qualified names that the user knows."""
    consts = tuple(
        _renamed(each, old, new) if isinstance(each, CodeType) else each for each in code.co_consts
    )
    name = code.co_qualname
    return code.replace(co_consts=consts, co_qualname=new + name.removeprefix(old))


def _with_code(function: FunctionType, code: CodeType, runtime: Runtime) -> FunctionType:
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
