"""What `verify` found: the same results with and without checkpointing."""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import counted
from .tables import Table

__all__ = ["Verification"]


@dataclass(frozen=True, slots=True)
class Verification:
    """How much was compared, bit for bit, and found to be the same; whatever differs is an error.

    >>> found = Verification("layer", outputs=1, gradients=2, ops=3)
    >>> print(found)
    layer is the same with and without checkpointing: 1 output, 2 gradients, 3 ops, random state
    >>> found
    <Verification: layer is the same with and without checkpointing: 1 output, 2 gradients, 3 ops,
    random state>
    >>> bool(found)
    True
    """

    function: str  # its name
    outputs: int  # arrays, and whatever else the function returned
    gradients: int  # of inputs and of what the function closes over
    buffers: int = 0  # what the function keeps between calls
    ops: int = 0  # results on the way, where the engine sees them
    random_state: bool = True  # compared, too: not with preserve_rng_state=False

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Verification: {self}>"

    def _repr_html_(self) -> str:
        rows = [(f"{word}s", f"{n:,}") for word, n in self._counts().items()]
        rows.append(("random state", "yes" if self.random_state else "no"))
        title = f"{self.function}: the same with and without checkpointing"
        return Table(("compared", ""), rows, title).html()

    def _counts(self) -> dict[str, int]:
        return {
            "output": self.outputs,
            "gradient": self.gradients,
            "buffer": self.buffers,
            "op": self.ops,
        }

    def __str__(self) -> str:
        parts = [counted(n, word) for word, n in self._counts().items() if n]
        parts += ["random state"] * self.random_state
        return f"{self.function} is the same with and without checkpointing: {', '.join(parts)}"
