"""The command line: arguments -> public API -> text. One file for each command."""

from .entry import main

__all__ = ["main"]
