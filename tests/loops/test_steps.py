"""What steps and conditions may and may not do, on both engines."""

from __future__ import annotations

import pytest

import remat

from .both import both


@both
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("start", "step", "words"),
    [
        ([1.0, 2.0], lambda h, x: 0.5 * h + x, r"of shape \(2,\)"),
        ([1.0, 2.0, 3.0], lambda h, x: 0.5 * h + x, r"of shape \(3,\)"),
        ([1.0, 2.0], lambda h, x: {"state": h, "output": x}, "dict of length 2"),
        ([1.0, 2.0], lambda h, x: (h, x, x), "tuple of length 3"),
        ([1.0, 2.0], lambda h, x: None, "NoneType"),
    ],
)
def test_a_scan_step_that_returns_no_pair(on, start, step, words, traced) -> None:
    def run(h):
        return on.sum(remat.checkpointed_scan(step, h, on.array([[1.0], [2.0], [3.0]]))[0])

    with pytest.raises(TypeError, match=rf"{words}; return \(state, output\)"):
        if traced:
            on.value_and_grad(run, start)
        else:
            run(on.array(start))


@both
def test_a_scan_step_that_forgets_its_output_with_a_pair_as_state(on) -> None:
    with pytest.raises(TypeError, match=r"return \(state, output\)"):
        remat.checkpointed_scan(
            lambda h, x: (h[0] + x, h[1]), (on.array([1.0]), on.array([2.0])), on.array([[1.0]])
        )


@both
@pytest.mark.parametrize("pair", [tuple, list])
def test_a_scan_step_may_return_any_pair(on, pair) -> None:
    final, ys = remat.checkpointed_scan(
        lambda h, x: pair([h + x, h * x]), on.array(0.0), on.array([1.0, 2.0, 3.0])
    )
    assert float(final) == 6.0
    assert ys.tolist() == [0.0, 2.0, 9.0]
