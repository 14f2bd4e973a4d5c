"""What `verify` found: the same results with and without checkpointing."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Verification"]


@dataclass(frozen=True, slots=True)
class Verification:
    """How much was compared, bit for bit, and found to be the same; whatever differs is an error.

    >>> found = Verification("layer", outputs=1, gradients=2, ops=3)
    >>> print(found)
    layer is the same with and without checkpointing: 1 output, 2 gradients, 3 ops, random state
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

    def __str__(self) -> str:
        counts = {
            "output": self.outputs,
            "gradient": self.gradients,
            "buffer": self.buffers,
            "op": self.ops,
        }
        parts = [f"{n} {word}{'s' * (n != 1)}" for word, n in counts.items() if n]
        parts += ["random state"] * self.random_state
        return f"{self.function} is the same with and without checkpointing: {', '.join(parts)}"
