"""A function as one primitive of autograd, with a gradient of its own (as JAX's `custom_vjp`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from autograd.core import defvjp_argnums
from autograd.extend import primitive
from autograd.tracer import isbox

from ...errors import UnsupportedError

__all__ = ["CustomVJP", "run_custom_vjp"]


class CustomVJP(Protocol):
    """Runs forward once, and backward as often as autograd asks."""

    @property
    def name(self) -> str: ...

    def forward(self) -> tuple[Any, ...]:
        """Run on the plain values, and return the results that are differentiable."""
        ...

    def backward(self, gradients: Sequence[Any]) -> list[Any]:
        """Return a gradient for each value that it was run on."""
        ...


def run_custom_vjp(function: CustomVJP, values: Sequence[Any]) -> list[Any]:
    """Run a function on `values`, some of them traced; return its traced results."""
    results = _run(function, *values)
    return [results[i] for i in range(len(results))]


@primitive  # type: ignore[untyped-decorator]
def _run(function: CustomVJP, *values: Any) -> tuple[Any, ...]:
    return function.forward()


def _run_vjp(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Callable[[Any], Any]:
    function: CustomVJP = args[0]

    def vjp(g: Any) -> Any:
        if isbox(g) or any(map(isbox, g)) or any(map(isbox, args[1:])):
            raise UnsupportedError(
                f"second derivatives through a {function.name} are not supported; for them, write "
                "it without checkpointing"
            )
        gradients = function.backward(g)
        return tuple(gradients[argnum - 1] for argnum in argnums)

    return vjp


_run.is_opaque = True  # a replay would call code of the program again
defvjp_argnums(_run, _run_vjp)
