"""Loops on PyTorch: a loop is one autograd node, and the runner computes its gradient.

Final state, outputs, initial state, inputs and captures are connected by that node. So every
parameter gets one gradient per backward pass, whatever the number of steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .... import trees
from ....loops import LoopFunctions
from .captures import replace_for_outer_loops
from .steps import TorchSteps

__all__ = ["run_loop", "run_while"]


def _ask(condition: Any, state: Any) -> Any:
    with torch.no_grad():
        return condition(state)


def _detached(state: Any) -> Any:
    return trees.map_leaves(lambda v: v.detach() if isinstance(v, Tensor) else v, state)


_loops = LoopFunctions(TorchSteps, _ask, _detached, replace_for_outer_loops)
run_loop = _loops.run_loop
run_while = _loops.run_while
