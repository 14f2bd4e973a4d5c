"""What PyTorch's ops and their derivatives do, for traces and plans (core.tracing.OpFacts)."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.records import Op
from ...core.tracing import PlainOperand
from . import workspace
from .schema import FUNCTION, saves_its_output, traits_of
from .source_location import line_text, module_path

__all__ = ["FACTS", "with_grad"]

_CAT = torch.ops.aten.cat.default


class TorchFacts:
    """TorchFacts about ops; those of derivatives are measured once per kind of op."""

    saves_when_done = False
    name = staticmethod(str)
    place = staticmethod(line_text)
    module = staticmethod(module_path)
    saves_its_output = staticmethod(saves_its_output)
    kernel_workspace = staticmethod(workspace.kernel_workspace)
    backward = staticmethod(workspace.known_backward)

    def __init__(self) -> None:
        self._unmeasured: dict[Hashable, workspace.Call] = {}

    def note_call(self, op: Op, key: Hashable) -> None:
        if key not in self._unmeasured and not workspace.is_known(key):
            call = workspace.call_of(op)
            if call is not None:
                self._unmeasured[key] = call

    def measure(self) -> None:
        calls, self._unmeasured = self._unmeasured, {}
        workspace.measure_workspace(calls)

    def plain_operands(self, op: Op) -> Iterable[PlainOperand]:
        return ()  # they are external values

    def joins(self, func: Any) -> bool:
        return func is _CAT

    def is_differentiable(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() or tensor.is_complex()

    def requires_grad(self, tensor: Tensor) -> bool:
        return tensor.requires_grad

    def has_gradient(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return torch.is_grad_enabled() and bool(with_grad(args, kwargs))

    @staticmethod
    @functools.cache
    def reads_shapes_only(func: Any) -> bool:
        # Backward itself calls `ones_like`.
        name = str(func).removeprefix("aten.").partition(".")[0]
        return name.endswith("_like") or name.startswith("new_")

    def reads_results(self, args: tuple[Any, ...]) -> bool:
        for arg in args:  # (a generator would be one more call for each op)
            if isinstance(arg, Tensor) and not arg._is_view() and not arg.is_leaf:
                return True
        return False

    def is_function(self, func: Any) -> bool:
        return traits_of(func) is FUNCTION

    def just_runs(self, func: Any) -> bool:
        traits = traits_of(func)
        return not (
            traits.may_write
            or traits.reshapes_in_place
            or traits.leaves_uninitialized
            or traits.is_scratch
            or traits.opaque
            or traits.uses_conjugates
            or traits.needs_grad_mode
        )


def with_grad(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments of an op that require grad."""
    found = []
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            if argument.requires_grad:
                found.append(argument)
        elif type(argument) in (list, tuple):
            found += [part for part in argument if isinstance(part, Tensor) and part.requires_grad]
    return found


FACTS = TorchFacts()
