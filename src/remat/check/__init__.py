"""`remat check`: whether remat keeps its promises on the machine that it runs on.

The checks use the public API only, as a program of a user does.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import remat

from ..tables import Table

__all__ = ["DEVICES", "Check", "CheckReport", "run_checks"]

DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True, slots=True)
class Check:
    """What one check has found; `status` is "ok", "FAILED" or "skipped"."""

    name: str
    status: str
    detail: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What all checks have found on a device."""

    device: str
    versions: str
    checks: tuple[Check, ...]

    @property
    def all_held(self) -> bool:
        """Whether no check has failed."""
        return all(check.status != "FAILED" for check in self.checks)

    def table(self) -> Table:
        """Return a table for the terminal."""
        headings = ("check", "result", "what was found")
        rows = [(c.name, c.status, textwrap.fill(c.detail, 60)) for c in self.checks]
        return Table(headings, rows, f"remat check: {self.device}", names=3)

    def line(self) -> str:
        """Return one line for a bug report."""
        held = ", ".join(f"{check.name}: {check.status}" for check in self.checks)
        failed = "; ".join(
            f"{c.name}: {' '.join(c.detail.split())}" for c in self.checks if c.status == "FAILED"
        )
        return f"{self.versions} | {self.device} | {held}" + (f" | {failed}" if failed else "")


def run_checks(
    device: str | None = None,
    *,
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
) -> CheckReport:
    """Run all checks on a device: by default the accelerator, if there is one."""
    torch = _torch()
    from .cases import CHECKS  # noqa: PLC0415  (it imports torch)

    chosen = _device(torch, device)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random programs have regions that save nothing
        for name, function in CHECKS.items():
            if progress is not None:
                progress(name)
            found.append(_run(name, function, chosen, quick=quick))
    return CheckReport(_name_of(torch, chosen), _versions(torch), tuple(found))


def _run(name: str, function: Callable[..., str], device: Any, *, quick: bool) -> Check:
    from .cases import Failed, Skipped  # noqa: PLC0415

    try:
        return Check(name, "ok", function(device, quick=quick))
    except Skipped as reason:
        return Check(name, "skipped", str(reason))
    except Failed as reason:
        return Check(name, "FAILED", str(reason))
    except Exception as error:  # whatever a device may raise is a finding
        return Check(name, "FAILED", f"{type(error).__name__}: {error}")


def _torch() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise ValueError("remat check needs PyTorch: pip install torch")
    import torch  # noqa: PLC0415

    return torch


def _device(torch: Any, name: str | None) -> Any:
    """Return a device that is there."""
    there = [kind for kind in DEVICES if _is_there(torch, kind)]
    if name is None:
        return torch.device(there[-1])
    if name.partition(":")[0] not in DEVICES:
        raise ValueError(f"--device must be one of {', '.join(DEVICES)}, got {name!r}")
    if name.partition(":")[0] not in there:
        raise ValueError(f"--device {name}: this torch has only {', '.join(there)}")
    return torch.device(name)


def _is_there(torch: Any, kind: str) -> bool:
    if kind == "cpu":
        return True
    if kind == "mps":
        return bool(torch.backends.mps.is_available())
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def _name_of(torch: Any, device: Any) -> str:
    if device.type in ("cuda", "xpu"):
        return f"{device} ({torch.get_device_module(device).get_device_name(device)})"
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"


def _versions(torch: Any) -> str:
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f"remat {remat.__version__}, torch {torch.__version__}, python {python}, "
        f"{platform.system()}"
    )
