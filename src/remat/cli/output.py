"""What the commands print: JSON, and messages that name options instead of arguments."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["in_options", "print_json"]

_OPTIONS = {
    "memory_bytes": "--memory",
    "state_bytes": "--state-bytes",
    "tape_bytes": "--tape-bytes",
    "num_checkpoints": "--checkpoints",
    "disk_slots": "--disk",
    "write_cost": "--disk-write",
    "read_cost": "--disk-read",
}


def in_options(text: str) -> str:
    """Name options of the command line where the library names its arguments."""
    return re.sub(rf"\b({'|'.join(_OPTIONS)})\b", lambda found: _OPTIONS[found[0]], text)


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))
