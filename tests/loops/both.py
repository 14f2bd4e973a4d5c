"""The same loop on both engines: what a test needs to be written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import remat


class OnNumPy:
    sin, sum = staticmethod(np.sin), staticmethod(np.sum)

    def array(self, values: Any) -> Any:
        return np.array(values, dtype=float)

    def whole(self, values: Any) -> Any:
        return np.array(values, dtype=int)

    def plain(self, value: Any) -> Any:
        """Return the numbers of an array that may be traced."""
        return np.asarray(getattr(value, "_value", value))

    def value_and_grad(self, f: Callable[[Any], Any], x: Any) -> tuple[float, list[float]]:
        """Return the value and the gradient of a scalar function of an array."""
        value, gradient = remat.value_and_grad(f)(self.array(x))
        return float(value), np.ravel(gradient).tolist()


class OnTorch:
    sin, sum = staticmethod(torch.sin), staticmethod(torch.sum)

    def array(self, values: Any) -> Any:
        return torch.tensor(values, dtype=torch.float64)

    def whole(self, values: Any) -> Any:
        return torch.tensor(values, dtype=torch.int64)

    def plain(self, value: Any) -> Any:
        return value.detach()

    def value_and_grad(self, f: Callable[[Any], Any], x: Any) -> tuple[float, list[float]]:
        leaf = self.array(x).requires_grad_()
        value = f(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
        return value.item(), gradient.ravel().tolist()


both = pytest.mark.parametrize("on", [OnNumPy(), OnTorch()], ids=["numpy", "torch"])
