"""Something long as one primitive of autograd, which computes its own gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from autograd.core import defvjp_argnums
from autograd.extend import primitive
from autograd.tracer import isbox

from ...errors import UnsupportedError

__all__ = ["Whole", "run_as_one"]


class Whole(Protocol):
    """What runs ahead once, and back as often as autograd asks."""

    @property
    def name(self) -> str: ...

    def ahead(self) -> tuple[Any, ...]:
        """Run on the plain values, and return the results that are differentiable."""
        ...

    def back(self, gradients: Sequence[Any]) -> list[Any]:
        """Return a gradient for each value that it was run on."""
        ...


def run_as_one(whole: Whole, values: Sequence[Any]) -> list[Any]:
    """Run on `values`, some of them traced; return the differentiable results, traced."""
    results = _run(whole, *values)
    return [results[i] for i in range(len(results))]


@primitive  # type: ignore[untyped-decorator]
def _run(whole: Whole, *values: Any) -> tuple[Any, ...]:
    return whole.ahead()


def _run_vjp(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Callable[[Any], Any]:
    whole: Whole = args[0]

    def vjp(g: Any) -> Any:
        if isbox(g) or any(map(isbox, g)) or any(map(isbox, args[1:])):
            raise UnsupportedError(
                f"second derivatives through a {whole.name} are not supported; for them, write it "
                "without checkpointing"
            )
        gradients = whole.back(g)
        return tuple(gradients[argnum - 1] for argnum in argnums)

    return vjp


_run.is_opaque = True  # to run it again would be to run code of the program again
defvjp_argnums(_run, _run_vjp)
