"""What generated code needs from outside: values of the engines, and a runner for its steps.

The transform itself knows no engine. Who puts it together brings both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

from ..errors import LoopTransformError

__all__ = ["LoopSite", "Options", "Runner", "Values"]


@dataclass(frozen=True, slots=True)
class Options:
    """How loops are to be checkpointed; None: as the runner does by default."""

    num_checkpoints: int | None = None
    memory_budget: int | float | str | None = None
    schedule: str | None = None
    store: Any = None
    min_steps: int = 8

    def merged(self, given: dict[str, Any]) -> Options:
        """Return these options with those of one loop over them."""
        if given.get("memory_budget") is not None or given.get("num_checkpoints") is not None:
            given = {"memory_budget": None, "num_checkpoints": None, **given}
        return replace(self, **given)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(each.name for each in fields(cls))


class LoopSite(NamedTuple):
    """Where a loop stands; its errors."""

    filename: str
    line: int

    def words(self, reason: str) -> str:
        return f"{self.filename}:{self.line}: the loop cannot be checkpointed: {reason}"

    def error(self, reason: str) -> LoopTransformError:
        """Return what to raise if a loop that runs in steps turns out to be none."""
        return LoopTransformError(
            f"{self.words(reason)}. It was running in steps by then: leave it plain with "
            "remat.steps(…, min_steps=…), a number above that of its steps"
        )


class Values(Protocol):
    """What is asked about values."""

    def __hash__(self) -> int: ...
    def is_compiling(self) -> bool: ...
    def is_differentiating(self) -> bool: ...
    def is_array_type(self, kind: type) -> bool: ...
    def is_plain_array_type(self, kind: type) -> bool: ...
    def is_tracked(self, leaf: Any) -> bool: ...
    def is_traced_number(self, leaf: Any) -> bool: ...
    def is_seen_elsewhere(self, leaf: Any) -> bool: ...
    def aliased(self, leaf: Any) -> Any: ...
    def copied(self, leaf: Any) -> Any: ...
    def memory(self, leaf: Any) -> Any: ...
    def is_made(self, leaf: Any) -> bool: ...
    def content_mark(self, copy: Any, original: Any) -> Any: ...
    def is_content_changed(self, copy: Any, mark: Any) -> bool: ...
    def kind(self, leaf: Any) -> tuple[Any, Any]: ...
    def zeros_like(self, leaf: Any) -> Any: ...
    def tracked_zero(self, like: Any) -> Any: ...
    def numbered(self, steps: int, like: Any) -> Any: ...
    def entries(self, stack: Any, *, owned: bool) -> list[Any]: ...


class Runner(Protocol):
    """Runs steps with checkpoints."""

    def loop(self, step: Callable[..., Any], state: Any, steps: int, options: Options) -> Any:
        """Run so many steps; return the final state."""
        ...

    def scan(
        self, step: Callable[..., Any], state: Any, xs: Any, options: Options
    ) -> tuple[Any, Any]:
        """Run a step for each entry of `xs`; return the final state and the stacked outputs."""
        ...

    def loop_while(
        self,
        goes_on: Callable[[Any], bool],
        step: Callable[..., Any],
        state: Any,
        longest: int | None,
        options: Options,
    ) -> Any:
        """Run steps as long as `goes_on(state)`, at most `longest`; return the final state."""
        ...

    def can_run_while(self, options: Options) -> str | None:
        """Say what keeps a loop of unknown length from being run with these options, or None."""
        ...
