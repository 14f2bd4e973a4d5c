"""What the numbers of a profile mean: where checkpointing saves nothing, and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

from ..sizes import format_bytes
from .accounting import RegionTotals

__all__ = ["advice"]

_LITTLE = 0.02  # of the peak: less is not worth the time
_MOST = 0.5  # of the peak


def advice(regions: Sequence[RegionTotals], plain: int, held: int) -> list[str]:
    """Return sentences about a profile: `plain` and `held` are the peaks.

    >>> whole = RegionTotals("model", 1, 1, 50, 0.2, plain_bytes=9000, held_bytes=100)
    >>> print(*advice([whole], plain=10_000, held=10_000))
    Checkpointing did not lower the peak: 'model' recomputes 9.0 KB at once. Checkpoint its parts
    instead (each block of a model), so that one part at a time is recomputed.
    """
    found = [note for totals in regions if (note := _about_region(totals))]
    if any(totals.recomputed for totals in regions):  # else no backward pass has shown the peak
        found += _about_peak(regions, plain, held)
    return found


def _about_region(totals: RegionTotals) -> str:
    """Say if what a region holds is as large as what it drops."""
    if not totals.held_bytes or totals.held_bytes < (1 - _LITTLE) * totals.plain_bytes:
        return ""
    held = format_bytes(totals.held_bytes / max(1, totals.runs))
    plain = format_bytes(_run_bytes(totals))
    more = totals.held_bytes > totals.plain_bytes
    return (
        f"{totals.name!r} {'raises what is held' if more else 'saves nothing'}: it holds {held} "
        f"for backward, a plain pass {plain}. Checkpoint a longer part, whose inputs are small "
        "beside its activations, or leave this one as it is."
    )


def _about_peak(regions: Sequence[RegionTotals], plain: int, held: int) -> list[str]:
    """Say if the peak is not lower than without checkpointing."""
    if plain - held > _LITTLE * plain:
        return []
    if held > (1 + _LITTLE) * plain:
        effect = f"Checkpointing raised the peak by {format_bytes(held - plain)}"
    else:
        effect = "Checkpointing did not lower the peak"
    largest = max(regions, key=_run_bytes)
    at_once = _run_bytes(largest)
    if at_once >= _MOST * plain:
        return [
            f"{effect}: {largest.name!r} recomputes {format_bytes(at_once)} at once. Checkpoint "
            "its parts instead (each block of a model), so that one part at a time is recomputed."
        ]
    return [
        f"{effect}: it lies where regions do not help, in gradients or in activations outside of "
        "regions. Checkpoint what surrounds it, or leave these regions as they are."
    ]


def _run_bytes(totals: RegionTotals) -> float:
    """Return what a plain pass keeps for one run of a region."""
    return totals.plain_bytes / max(1, totals.runs)
