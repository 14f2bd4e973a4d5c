"""remat in other libraries; each module here imports its library, and only when it is imported.

`remat.integrations.transformers`, `.diffusers`, `.peft`, `.accelerate`, `.lightning`, `.timm`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from types import ModuleType

from ..errors import UnsupportedError

__all__ = ["MissingPackageError", "require"]


class MissingPackageError(UnsupportedError, ImportError):
    """The package of an integration is not installed, or too old."""


if importlib.util.find_spec("torch") is None:
    raise MissingPackageError(
        "remat.integrations needs PyTorch, which is not installed; pip install torch"
    )


def require(package: str, at_least: str) -> ModuleType:
    """Import a package; say what to install if it is missing or too old."""
    remedy = f'pip install "{package}>={at_least}"'
    try:
        module = importlib.import_module(package)
        found = importlib.metadata.version(package)
    except ImportError as error:  # (a missing version is one, too)
        raise MissingPackageError(
            f"remat.integrations.{package} needs {package} {at_least} or newer, and importing it "
            f"failed: {error}; {_remedy(error, package, remedy)}"
        ) from error
    if _numbers(found) < _numbers(at_least):
        raise MissingPackageError(
            f"remat.integrations.{package} needs {package} {at_least} or newer, found {found}; "
            f"{remedy}"
        )
    return module


def _remedy(error: ImportError, package: str, remedy: str) -> str:
    """Return what to install: the package, or what it needs itself and does not find."""
    missing = (error.name or package).partition(".")[0]
    is_other = isinstance(error, ModuleNotFoundError) and missing != package
    return f"pip install {missing}" if is_other else remedy


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
