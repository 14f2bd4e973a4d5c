"""`remat frontier`: memory against time of a model of the user."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import Any

import remat

from ..reports.plots import check_plot_path
from .arguments import print_json, texts

__all__ = ["add_frontier"]

_FRONTIER = """\
Peak memory against time for every budget, from one recorded pass of a model of your own.

TARGET is module:function. The function takes no argument and returns the model and its inputs:
(model, x), (model, (x, y)), or (model, {"input_ids": x}). The module is looked for in the current
folder, too. The model's result is differentiated as a sum.
"""
_FRONTIER_EXAMPLES = """\
examples:
  remat frontier my_project.models:make_model
  remat frontier my_project.models:make_model --plot frontier.png
  remat frontier my_project.models:make_model --json
"""


def add_frontier(commands: Any) -> None:
    """Add the command to the parser of the command line."""
    parser = commands.add_parser(
        "frontier",
        help="memory against time of your own model",
        **texts(_FRONTIER, _FRONTIER_EXAMPLES),
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="module:function that makes the model and its inputs")
    add("--plot", metavar="FILE", help="draw the curve: .png, .svg or .pdf")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_frontier)


def _frontier(arguments: argparse.Namespace) -> None:
    if arguments.plot is not None:
        check_plot_path(arguments.plot)
    model, args, kwargs = _made_by(arguments.target)
    curve = remat.frontier(model, *args, **kwargs)
    picture = None if arguments.plot is None else curve.plot(arguments.plot)
    if arguments.json:
        print_json({**curve.to_json(), "plot": str(picture) if picture else None})
        return
    print(curve.table(), end="")
    if picture:
        print(f"The curve: {picture}")


def _made_by(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Import "module:function", call it, and return the model and its arguments."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f"TARGET is module:function, such as my_project:make_model, got {target}")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(import_module(module), name)
    except ImportError as error:
        raise ValueError(
            f"{module} cannot be imported: {error}; modules are looked for in {os.getcwd()} and "
            "where Python finds installed ones"
        ) from None
    except AttributeError:
        raise ValueError(
            f"{module} has no {name}; name a function of it that makes a model"
        ) from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(function):
        kind = type(function).__name__
        raise TypeError(f"{target} is no function that makes a model and its inputs, got {kind}")
    made = function()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise TypeError(f"{target}() is to return (model, inputs), got {type(made).__name__}")
    model, inputs = made
    if isinstance(inputs, dict):
        return model, (), inputs
    return model, inputs if isinstance(inputs, tuple) else (inputs,), {}
