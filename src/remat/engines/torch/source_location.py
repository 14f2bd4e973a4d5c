"""Source locations: the line and module that called an op. Cheap to note, formatted on demand."""

from __future__ import annotations

import gc
import linecache
import os
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any
from weakref import ref

import torch

from ...core.records import Op
from .backend import MODULE_CALL

__all__ = ["SourceLocation", "caller", "describe", "line_text", "module_path", "user_code"]

# Where an op was called: the code object, the instruction, and the innermost module.
SourceLocation = tuple[CodeType, int, "ref[torch.nn.Module] | None"]

_REMAT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_LIBRARIES = os.path.dirname(torch.__file__) + os.sep, _REMAT + os.sep
# Keyed by id, because the hash of a code object reads all of it.
user_code: dict[int, CodeType] = {}  # known to be outside of torch and remat
_libraries: dict[int, CodeType] = {}  # known to be in torch or remat


def caller(frame: Any) -> SourceLocation:
    """Return the location in user code that called an op, starting from a frame."""
    module = None
    code = frame.f_code
    if id(code) not in user_code:
        frame, module = _nearest_user_frame(frame)
        code = frame.f_code
    back = frame.f_back
    if module is None and back is not None and back.f_code is MODULE_CALL:
        module = ref(back.f_locals["self"])
    return code, frame.f_lasti, module


def _nearest_user_frame(frame: Any) -> tuple[Any, ref[torch.nn.Module] | None]:
    """Go up from library code to user code; return that frame and the innermost module.

    Modules in modules, as in a `Sequential` of `Sequential`s, are many frames of a library.
    """
    module = None
    first = inner = frame
    while True:
        code = frame.f_code
        if id(code) not in _libraries:
            if id(code) in user_code or not code.co_filename.startswith(_LIBRARIES):
                user_code[id(code)] = code
                break
            _libraries[id(code)] = code
        if code is MODULE_CALL and module is None:
            module = _module_of(inner, frame)
        if frame.f_back is None:  # a thread of a library: name what it called first
            return first, module
        inner, frame = frame, frame.f_back
    return frame, module


def _module_of(forward: Any, call: Any) -> ref[torch.nn.Module]:
    """Return the module that was called, from its frame and the frame of its caller.

    Reading `f_locals` copies all variables of a frame; those of torch's modules are few.
    """
    variables = forward.f_code.co_varnames
    if variables[:1] == ("self",):
        module = forward.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            return ref(module)
    return ref(call.f_locals["self"])


def describe(location: SourceLocation, *, with_module: bool = True) -> str:
    """Format a location: function, module, file, line and source text.

    Finding the path of a module scans all objects of the process, so it is for errors only.
    """
    code, instruction, reference = location
    line = _line_of(code, instruction)
    text = linecache.getline(code.co_filename, line).strip()
    module = reference() if with_module and reference is not None else None
    inside = f" of module {_path_of(module)}" if module is not None else ""
    return f"{code.co_qualname}{inside}, {code.co_filename}:{line}" + (f": {text}" if text else "")


def line_text(location: SourceLocation) -> str:
    """Format a location without its module; each line of the program is looked up once."""
    code, instruction, _ = location
    known = _texts.get((id(code), instruction))
    if known is None:
        known = _texts[id(code), instruction] = code, describe(location, with_module=False)
    return known[1]


# By id, with the code, so that the id stays its own.
_texts: dict[tuple[int, int], tuple[CodeType, str]] = {}


def _line_of(code: CodeType, instruction: int) -> int:
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def _path_of(module: torch.nn.Module) -> str:
    """Return the longest dotted path to a module from a module that contains it."""
    paths = [
        name
        for root in gc.get_objects()
        if issubclass(type(root), torch.nn.Module)
        for name, part in root.named_modules()
        if part is module and name
    ]
    kind = type(module).__name__
    return f"{max(paths, key=lambda p: p.count('.'))} ({kind})" if paths else kind


def module_path(op: Op, paths: dict[int, str]) -> str:
    """Return the path of the innermost module that is running, from the outermost one.

    It may be far up the stack: a `forward` calls helpers, which call ops. `paths` are those that
    are known, by the modules' ids; they are added to.
    """
    module = None if op.location[2] is None else op.location[2]()
    if module is None:
        module = next(_running(sys._getframe(1)), None)
    if module is None:
        return ""
    if id(module) not in paths:
        *_, root = module, *_running(sys._getframe(1))
        paths[id(module)] = type(module).__name__
        for path, part in root.named_modules():
            paths[id(part)] = path or type(part).__name__
    return paths[id(module)]


def _running(frame: Any) -> Iterator[torch.nn.Module]:
    """Generate the modules that are being called, the innermost first."""
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back
