"""A function in, a function out whose loops run with checkpoints."""

from __future__ import annotations

import ast
import functools
import warnings
from dataclasses import dataclass, field
from types import CodeType, FunctionType

from ..errors import LoopTransformError, RematWarning
from .analysis import LoopPlan, find_loops
from .functions import (
    NoSourceError,
    compile_function,
    explicit_names,
    function_with_code,
    parse_function,
)
from .protocols import Options, Runner, Values
from .refusals import Refusal
from .rewriting import rewrite
from .runtime import Runtime

__all__ = ["Transformed", "transform", "transform_code"]


@dataclass(slots=True)
class Transformed:
    """The new code of a function, and what is known of its loops."""

    code: CodeType | None  # None: there is nothing to transform
    source: str
    plans: dict[int, LoopPlan]
    refusals: tuple[Refusal, ...]
    warned: bool = field(default=False)


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
    made = transform_code(code, code.co_filename, function.__qualname__)
    _speak(made, code, strict=strict)
    runtime = Runtime(made.plans, code.co_filename, options, values, runner, strict=strict)
    new = function_with_code(function, made.code or code, runtime)
    new.transformed_source = made.source  # type: ignore[attr-defined]
    return new


@functools.lru_cache(maxsize=512)
def transform_code(code: CodeType, filename: str, qualified: str) -> Transformed:
    """Transform the code of a function; the same code once only.

    Code compares equal whatever its file is called, so the name of the file is an argument, too.
    """
    try:
        tree = parse_function(code)
    except NoSourceError as error:
        refusal = Refusal(code.co_firstlineno, f"{code.co_name}: {error}")
        return Transformed(None, "", {}, (refusal,))
    if tree is None:
        return Transformed(None, "", {}, ())
    explicit_names(tree, code, qualified)
    local = frozenset((*code.co_varnames, *code.co_cellvars))
    arguments = code.co_varnames[: _argument_count(code)]
    found = find_loops(tree, local, arguments)
    plans: dict[ast.AST, LoopPlan] = {n: f for n, f in found.items() if isinstance(f, LoopPlan)}
    refusals = tuple(each for each in found.values() if isinstance(each, Refusal))
    if not plans:
        return Transformed(None, ast.unparse(tree), {}, refusals)
    rewrite(tree, plans)
    by_number = {plan.number: plan for plan in plans.values()}
    return Transformed(compile_function(tree, code), ast.unparse(tree), by_number, refusals)


def _argument_count(code: CodeType) -> int:
    has_rest = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
    return code.co_argcount + code.co_kwonlyargcount + has_rest


def _speak(made: Transformed, code: CodeType, *, strict: bool) -> None:
    """Say which loops stay as they are: an error if `strict`, or a warning for each, once."""
    for refusal in made.refusals:
        words = f"{code.co_filename}:{refusal.line}: the loop cannot be checkpointed: "
        words += refusal.reason
        if strict:
            raise LoopTransformError(words)
        if not made.warned:
            warnings.warn_explicit(
                f"{words}; it runs without checkpoints",
                RematWarning,
                code.co_filename,
                refusal.line,
            )
    made.warned = True
