"""The closed forms, written anew from their definitions."""

from math import comb


def t(n: int, s: int) -> int:
    """Plain advances of Revolve for n steps and s slots, the initial state's slot included."""
    if n <= 1:
        return 0
    r = 0
    while comb(s + r, s) < n:
        r += 1
    return r * n - comb(s + r, r - 1)


def revolve(steps: int, slots: int) -> int:
    return t(steps, slots + 1) + steps


def mixed(steps: int, slots: int) -> int:
    return t(steps + 1, slots + 1)
