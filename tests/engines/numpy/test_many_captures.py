"""A step that closes over many arrays costs what it uses, counted in calls of functions."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import remat

from .oracles import difference_quotient


class _Pairs:
    """Arrays in two lists, taken by one number."""

    def __init__(self, ws: list) -> None:
        self.halves = [ws[::2], ws[1::2]]

    def __getitem__(self, i: int):
        return self.halves[i % 2][i // 2]


HOLDERS = {
    "list": list,
    "dict": lambda ws: dict(enumerate(ws)),
    "mixed list": lambda ws: [*ws, "end", 3.0],
    "lists in a list": _Pairs,
}


def loss_over(holder, layers: int, schedule: str = "all"):
    def loss(x):
        ws = HOLDERS[holder]([np.sin(x * (1.0 + i)) for i in range(layers)])

        def step(state):
            h, i = state
            return h * 0.5 + ws[i] * h, i + 1

        state = remat.checkpointed_loop(step, (x, 0), layers, 3, schedule=schedule)[0]
        return np.sum(state[0])

    return loss


def calls(function, *args) -> int:
    """Count the calls of functions, of Python and of C."""
    count = 0

    def see(frame, event, arg) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_layer_more_costs_the_same_whatever_their_number(holder: str) -> None:
    x = np.ones(2)
    remat.grad(loss_over(holder, 4))(x)  # imports, caches
    few, more, many = (calls(remat.grad(loss_over(holder, n)), x) for n in (40, 80, 160))
    assert many - more < 2.2 * (more - few)


@pytest.mark.parametrize("schedule", ["all", "revolve", "uniform"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_the_gradient_is_right(holder: str, schedule: str) -> None:
    loss, x = loss_over(holder, 7, schedule), np.array([0.3, -0.4])
    np.testing.assert_allclose(remat.grad(loss)(x), difference_quotient(loss, x), rtol=1e-6)


@pytest.mark.parametrize("change", ["append", "pop", "replace", "delete"])
def test_a_list_or_dict_that_changes_is_refused_and_restored(change: str) -> None:
    found = []

    def loss(x):
        ws = [x * i for i in range(3)]
        table = {"a": x * 1.0, "b": x * 2.0}
        before = list(ws), dict(table)

        def step(h):
            if change == "append":
                ws.append(h)
            elif change == "pop":
                ws.pop()
            elif change == "replace":
                ws[1] = h
            else:
                table.pop("a", None)
            return h * table["b"]

        try:
            return np.sum(remat.checkpointed_loop(step, x, 3, schedule="revolve")[0])
        finally:
            found.append((before, (ws, table)))

    with pytest.raises((remat.UnsupportedError, IndexError)):
        remat.grad(loss)(np.ones(2))
    (ws, table), (ws_now, table_now) = found[0]
    assert all(one is other for one, other in zip(ws, ws_now, strict=False))
    assert table.keys() == table_now.keys()
