"""The program is for type checkers, not to be run."""

collect_ignore = ["program.py"]
