"""Benchmarks: every figure the project claims, measured beside a peer. `python -m benchmarks`."""
