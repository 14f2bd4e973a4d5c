"""Where in the user's program an op was called: line and module, noted cheaply, told on error."""

from __future__ import annotations

import gc
import linecache
import os
from types import CodeType
from typing import Any
from weakref import ref

import torch

from .memory.records import Place

__all__ = ["MODULE_CALL", "caller", "describe", "outermost_module", "user_code"]

MODULE_CALL = torch.nn.Module._call_impl.__code__
_REMAT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_LIBRARIES = os.path.dirname(torch.__file__) + os.sep, _REMAT + os.sep
_FAR = 9  # frames to look at, so that a deep stack costs no more than a flat one
# Code by its id, not by its hash, which takes a look at all of it.
user_code: dict[int, CodeType] = {}  # that is known to be none of a library
_libraries: dict[int, CodeType] = {}  # that is known to be of one


def caller(frame: Any) -> Place:
    """Return the place of the user's code that called an op, from the frame that it came from."""
    module = None
    code = frame.f_code
    if id(code) not in user_code:
        frame, module = _nearest(frame)
        code = frame.f_code
    back = frame.f_back
    if module is None and back is not None and back.f_code is MODULE_CALL:
        module = ref(back.f_locals["self"])
    return code, frame.f_lasti, module


def _nearest(frame: Any) -> tuple[Any, ref[torch.nn.Module] | None]:
    """Go up from library code to the user's; return that frame, and the innermost module."""
    module = None
    inner = frame
    for _ in range(_FAR):
        code = frame.f_code
        if id(code) not in _libraries:
            if id(code) in user_code or not code.co_filename.startswith(_LIBRARIES):
                user_code[id(code)] = code
                break
            _libraries[id(code)] = code
        if code is MODULE_CALL and module is None:
            module = _module_of(inner, frame)
        if frame.f_back is None:
            break
        inner, frame = frame, frame.f_back
    return frame, module


def _module_of(forward: Any, call: Any) -> ref[torch.nn.Module]:
    """Return the module that was called, from the frame of its code and that of its caller.

    To look at a frame's variables takes a copy of them all: the library's modules have few.
    """
    variables = forward.f_code.co_varnames
    if variables[:1] == ("self",):
        module = forward.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            return ref(module)
    return ref(call.f_locals["self"])


def describe(place: Place, *, with_module: bool = True) -> str:
    """Return a place in words: function, module, file, line and its text.

    To find a module's path takes a look at every object of the process: that is for errors.
    """
    code, instruction, reference = place
    line = _line_of(code, instruction)
    text = linecache.getline(code.co_filename, line).strip()
    module = reference() if with_module and reference is not None else None
    inside = f" of module {_path_of(module)}" if module is not None else ""
    return f"{code.co_qualname}{inside}, {code.co_filename}:{line}" + (f": {text}" if text else "")


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


def outermost_module(frame: Any) -> torch.nn.Module | None:
    """Return the outermost module that is being called."""
    call = None
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            call = frame
        frame = frame.f_back
    return None if call is None else call.f_locals["self"]
