"""Every way to take a view, times every way to write: as in NumPy, value and gradient."""

# ruff: noqa: PLW2901  (loop variables changed in place are what is tested)

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from autograd.extend import defvjp, primitive

import remat

from .oracles import difference_quotient, same_bits

X = np.linspace(-0.8, 1.1, 24).reshape(4, 6)

TAKES: dict[str, Callable[[Any], Any]] = {
    "slice": lambda y: y[1:3],
    "steps": lambda y: y[::2, 1::2],
    "backwards": lambda y: y[::-1, ::-2],
    "row": lambda y: y[1],
    "row from the end": lambda y: y[-1],
    "row by NumPy's number": lambda y: y[np.int64(2)],
    "column": lambda y: y[..., 2],
    "one entry, as an array": lambda y: y[1, 2, ...],
    "new axis": lambda y: y[:, None, 1:],
    "all": lambda y: y[...],
    "nothing": lambda y: y[2:2],
    "transposed": lambda y: y.T,
    "np.transpose": lambda y: np.transpose(y, (1, 0)),
    "swapaxes": lambda y: y.swapaxes(0, 1),
    "moveaxis": lambda y: np.moveaxis(y, 0, 1),
    "rollaxis": lambda y: np.rollaxis(y, 1),
    "mT": lambda y: np.matrix_transpose(y) if hasattr(np, "matrix_transpose") else y.T,
    "reshape": lambda y: y.reshape(3, 8),
    "reshape by a list": lambda y: np.reshape(y, [2, -1]),
    "reshape that copies": lambda y: y[:, 1:].reshape(-1),
    "ravel": lambda y: y.ravel(),
    "np.ravel": np.ravel,
    "ravel that copies": lambda y: y.T.ravel(),
    "flatten": lambda y: y.flatten(),
    "squeeze": lambda y: np.squeeze(y[:, 1:2]),
    "expand_dims": lambda y: np.expand_dims(y, 1),
    "atleast_3d": np.atleast_3d,
    "atleast_1d": lambda y: np.atleast_1d(y[0]),
    "diagonal": lambda y: y.diagonal(),
    "np.diagonal": lambda y: np.diagonal(y, 1),
    "np.diag": np.diag,
    "einsum": lambda y: np.einsum("ij->ji", y),
    "flip": lambda y: np.flip(y, 0),
    "flipud": np.flipud,
    "fliplr": np.fliplr,
    "rot90": np.rot90,
    "split": lambda y: np.split(y, 2)[1],
    "array_split": lambda y: np.array_split(y, 3, axis=1)[2],
    "vsplit": lambda y: np.vsplit(y, 2)[0],
    "hsplit": lambda y: np.hsplit(y, 3)[1],
    "piece of a piece": lambda y: np.split(np.split(y, 2)[1], 2, axis=1)[0],
    "real": np.real,
    "astype without a copy": lambda y: y.astype(float, copy=False),
    "asarray": lambda y: y.conj(),
    "broadcast": lambda y: np.broadcast_to(y[0], (3, 6)),
    "broadcast_arrays": lambda y: np.broadcast_arrays(y, np.ones((4, 6)))[0],
    "index array": lambda y: y[[0, 2]],
    "mask": lambda y: y[X > 0],
    "take": lambda y: np.take(y, [1, 2], axis=1),
    "copy": lambda y: y.copy(),
    "long way": lambda y: y[1:].T[::-1].reshape(6, 3, 1)[2:5, :, 0].swapaxes(0, 1),
}


def by_mask(a: Any, b: Any) -> None:
    a[np.arange(a.size).reshape(a.shape) % 3 == 0] *= 0.7


def by_rows(a: Any, b: Any) -> None:
    for row in a:
        row *= 0.9


def by_out(a: Any, b: Any) -> None:
    np.multiply(a, a, out=a)


def by_numbers(a: Any, b: Any) -> None:
    a.reshape(-1)[-1:] = 0.25


def by_view_of_view(a: Any, b: Any) -> None:
    a[...][::-1][:1] *= 3.0


def by_value(a: Any, b: Any) -> None:
    a[...] = np.sum(b * b) * a


def by_index_array(a: Any, b: Any) -> None:
    a[[0, 0, -1]] = a[[-1, 0, 0]] * 0.5


def by_operators(a: Any, b: Any) -> None:
    a += 0.5
    a *= a
    a -= 0.1 * np.mean(b)
    a /= 2.0 + a**2


def by_sort(a: Any, b: Any) -> None:
    a[(0,) * (a.ndim - 1)].sort()


def by_fill(a: Any, b: Any) -> None:
    a.fill(0.3)


WRITES = [
    by_mask,
    by_rows,
    by_out,
    by_numbers,
    by_view_of_view,
    by_value,
    by_index_array,
    by_operators,
    by_sort,
    by_fill,
]

STARTS: dict[str, Callable[[Any], Any]] = {
    "C": lambda x: x * 1.0,
    "Fortran": lambda x: x.T.copy().T * 1.0,
    "an input": lambda x: x,
}


def weighted(array: Any) -> Any:
    size = int(np.prod(np.shape(array)))
    weights = np.cos(1.3 * np.arange(size)).reshape(np.shape(array))
    return np.sum(weights * array * array)


def numpy_refuses(program: Callable[[Any], Any], x: Any) -> bool:
    try:
        program(x)
    except (ValueError, IndexError, TypeError):
        return True
    return False


def judge(program: Callable[[Any], Any], x: Any) -> None:
    """Value and gradient are those of plain NumPy, and in scopes they have the same bits."""
    if numpy_refuses(program, x.copy(order="K")):  # a read-only view, or an index that is not there
        with pytest.raises((remat.UnsupportedError, ValueError, IndexError, TypeError)):
            remat.grad(program)(x)
        return

    def in_scope(x: Any) -> Any:
        with remat.CheckpointScope("all"):
            return program(x)

    value, gradient = remat.value_and_grad(program)(x.copy(order="K"))
    assert value == program(x.copy(order="K"))
    expected = difference_quotient(lambda x: program(x.copy(order="K")), x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)
    again, dropped = remat.value_and_grad(in_scope)(x.copy(order="K"))
    assert same_bits(value, again)
    assert same_bits(gradient, dropped)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("take", TAKES)
@pytest.mark.parametrize("target", ["the array", "the view", "another view"])
def test_all_that_look_at_the_memory_see_a_write(take: str, write: Any, target: str) -> None:
    def program(x: Any) -> Any:
        y = x * 1.0
        view, other = TAKES[take](y), y[1:, 2:]
        before = np.sum(np.sin(view))
        write({"the array": y, "the view": view, "another view": other}[target], x)
        return weighted(y) + weighted(view) + weighted(other) + before

    judge(program, X)


@pytest.mark.parametrize("take", TAKES)
@pytest.mark.parametrize("start", ["Fortran", "an input"])
@pytest.mark.parametrize("write", [by_operators, by_mask])
def test_what_is_a_view_depends_on_the_strides(take: str, start: str, write: Any) -> None:
    def program(x: Any) -> Any:
        y = STARTS[start](x)
        y += 0.1 * np.asarray(X, order="C")  # other strides than those of y
        view = TAKES[take](y)
        y *= 1.5
        write(TAKES[take](y), x)
        return weighted(y) + weighted(view)

    judge(program, X)


GAPS = {
    "every second": lambda: np.repeat(np.repeat(X, 2, 0), 2, 1)[::2, ::2],
    "backwards": lambda: X[::-1, ::-1],
    "transposed": lambda: np.ascontiguousarray(X.T).T,
    "of a record": lambda: np.rec.fromarrays([X, X > 0], names="a,b")["a"],
}


@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("take", ["reshape", "ravel", "slice", "transposed", "diagonal"])
def test_an_input_with_gaps_between_its_entries(gaps: str, take: str) -> None:
    x = GAPS[gaps]()

    def program(x: Any) -> Any:
        view = TAKES[take](x)
        x[1:] *= x[:-1]
        view_after = TAKES[take](x)
        if view.ndim > 1:
            view[0] = 0.5
        return weighted(x) + weighted(view) + weighted(view_after)

    buffer = np.zeros(4 * x.itemsize * max(map(abs, x.strides)), np.uint8)

    def with_gaps(values: Any) -> Any:
        """Return the same strides over other numbers."""
        start = sum(-(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True) if s < 0)
        same = np.ndarray(x.shape, x.dtype, buffer.copy(), start, x.strides)
        same[...] = values
        return same

    value, gradient = remat.value_and_grad(program)(with_gaps(x))
    assert value == program(with_gaps(x))
    expected = difference_quotient(lambda x: program(with_gaps(x)), x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("part", [np.real, np.imag])
@pytest.mark.parametrize("target", ["the whole", "the part"])
def test_parts_of_complex_numbers(part: Any, target: str) -> None:
    def program(x: Any) -> Any:
        z = x[:2] * (1.0 + 0.5j) + 2j * x[2:]
        view = part(z)
        if target == "the whole":
            z *= 1.0 - 2.0j
        else:
            view *= view
        return np.sum(np.real(z) ** 2 + np.imag(z) * X[:2]) + weighted(view)

    judge(program, X)


def test_an_index_that_changes_later() -> None:
    def program(x: Any) -> Any:
        y = x * 1.0
        shape, number = [2, 12], np.array(1)
        view, row = y.reshape(shape), y[number, ...]
        shape[:] = [12, 2]
        number += 1
        y *= 2.0
        return weighted(view) + weighted(row)

    judge(program, X)


def test_the_array_is_gone_but_its_views_share_it() -> None:
    def program(x: Any) -> Any:
        view = (x * 1.0)[1:]
        part = view[:, 2:]
        view *= x[0]
        part += 1.0
        return weighted(view) + weighted(part)

    judge(program, X)


def test_entries_that_share_memory_are_not_written_to() -> None:
    def program(x: Any) -> Any:
        wide = np.einsum("ij->ij", np.broadcast_to(x[:1], (4, 6)).copy()[:, :1])
        view = np.lib.stride_tricks.as_strided(np.zeros(6), (4, 6), (0, 8))
        return np.sum(wide * view) + np.sum(x)

    judge(program, X)
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(9), (4, 6), (8, 8))

    def writes(x: Any) -> Any:
        x[0] = 1.0
        return np.sum(x)

    with pytest.raises(remat.UnsupportedError, match="share memory with one another"):
        remat.grad(writes)(overlapping)


# -- scopes, calls, traces -------------------------------------------------------------------------


def test_a_view_from_outside_of_a_scope_is_written_to_inside_and_read_in_the_next() -> None:
    def program(x: Any, enabled: bool = True) -> Any:
        y = x * 1.0
        view = y.T
        total = 0.0
        for i in range(3):
            with remat.CheckpointScope(f"step {i}", enabled=enabled):
                y[1:] += 0.1 * np.sin(y[:-1])
                view[i] *= 1.5
                total = total + weighted(view)
        return total + weighted(y)

    value, gradient = remat.value_and_grad(program)(X)
    plain_value, plain_gradient = remat.value_and_grad(lambda x: program(x, enabled=False))(X)
    expected = difference_quotient(lambda x: program(x.copy(), enabled=False), X)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)
    assert same_bits(value, plain_value)
    assert same_bits(gradient, plain_gradient)


def test_a_checkpointed_call_writes_to_an_array_under_a_view() -> None:
    @remat.checkpoint
    def call(a: Any) -> None:
        a *= np.sin(a)

    def program(x: Any) -> Any:
        y = x * 1.0
        view, rows = y.T, y[1:3]
        call(y)
        call(rows)
        return weighted(view) + weighted(y) + weighted(rows)

    def written_out(x: Any) -> Any:
        y = x * np.sin(x)
        rows = y[1:3] * np.sin(y[1:3])
        y = np.concatenate([y[:1], rows, y[3:]])
        return weighted(y.T) + weighted(y) + weighted(rows)

    value, gradient = remat.value_and_grad(program)(X)
    assert np.isclose(value, written_out(X), rtol=1e-14)
    expected = difference_quotient(written_out, X)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("policy", [None, remat.policies.save_nothing])
def test_a_view_that_a_checkpointed_call_returns(policy: Any) -> None:
    def program(x: Any, call: Any = lambda f, y: f(y)) -> Any:
        y = x * 1.0
        view = call(lambda a: a[1:3], y)
        y *= 3.0
        return weighted(view)

    call = (lambda f, y: remat.checkpoint(f, y, policy=policy)) if policy else remat.checkpoint
    value, gradient = remat.value_and_grad(lambda x: program(x, call))(X)
    assert value == program(X)
    np.testing.assert_allclose(gradient, difference_quotient(program, X), rtol=1e-6, atol=1e-7)


def test_steps_of_a_loop_write_through_views() -> None:
    def step(state: Any) -> Any:
        new = state * 1.0
        top, flat = new[:2], new.reshape(-1)
        new *= 1.1
        top += 0.1 * np.sin(new[2:])
        flat[::5] = flat[1::5][: flat[::5].size] * 0.5 if flat[1::5].size >= 5 else 0.5
        return new + 0.0 * np.sum(top)

    def looped(x: Any) -> Any:
        return weighted(remat.checkpointed_loop(step, x, 5, 2)[0])

    def unrolled(x: Any) -> Any:
        for _ in range(5):
            x = step(x)
        return weighted(x)

    value, gradient = remat.value_and_grad(looped)(X)
    assert value == unrolled(X)
    expected = difference_quotient(unrolled, X)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)
    assert same_bits(gradient, remat.grad(unrolled)(X))


def test_second_derivatives_through_views() -> None:
    def in_place(x: Any) -> Any:
        y = x * 1.0
        view = y.T
        y[1:] *= x[:-1]
        view[0] = view[1] ** 2
        return np.sum(y**3)

    def out_of_place(x: Any) -> Any:
        y = np.concatenate([x[:1], x[1:] * x[:-1]])
        return np.sum(np.concatenate([y[:, 1:2] ** 2, y[:, 1:]], axis=1) ** 3)

    def curvature(f: Any) -> Any:
        return remat.grad(lambda x: np.sum(remat.grad(f)(x) * np.sin(X)))(X)

    np.testing.assert_allclose(curvature(in_place), curvature(out_of_place), rtol=1e-12)


def test_an_inner_gradient_does_not_see_what_an_outer_array_becomes() -> None:
    """Its rules refer to the array as it was: right, or refused."""

    def program(x: Any, gradient: Any) -> Any:
        y = x * 1.0

        def inner(z: Any) -> Any:
            w = z * z
            nonlocal y
            y *= 2.0
            return np.sum(w)

        return np.sum(gradient(inner)(y))

    with pytest.raises(remat.UnsupportedError, match="taken before"):
        remat.value_and_grad(lambda x: program(x, remat.grad))(X)


def test_a_primitive_of_your_own_that_returns_a_view_is_not_called_again() -> None:
    calls = []

    @primitive
    def top(y: Any) -> Any:
        calls.append(1)
        return y[: 1 + len(calls) // 2]

    defvjp(top, lambda ans, y: lambda g: np.concatenate([g, np.zeros((4 - len(g), 6))]))

    def program(x: Any) -> Any:
        y = x * 1.0
        view = top(y)
        y *= 2.0
        return np.sum(view)

    with pytest.raises(remat.UnsupportedError, match="taken before"):
        remat.grad(program)(X)
    assert len(calls) == 1


# -- plain arrays ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 8000])  # up to 64 KB
def test_a_small_plain_array_may_change_after_an_op_has_read_it(size: int) -> None:
    def program(x: Any) -> Any:
        c = np.linspace(1.0, 2.0, size)
        index = np.array([0, 1, 1])
        y = x * c
        c += 1.0
        z = y * c + np.sum(x[index] ** 2)
        c[:] = 0.0
        index[:] = 3
        return np.sum(z)

    def written_out(x: Any) -> Any:
        c = np.linspace(1.0, 2.0, size)
        return np.sum(x * c * (c + 1.0)) + size * (x[0] ** 2 + 2 * x[1] ** 2)

    x = np.sin(np.arange(float(size)))
    value, gradient = remat.value_and_grad(program)(x)
    assert np.isclose(value, written_out(x), rtol=1e-12)
    np.testing.assert_allclose(gradient, remat.grad(written_out)(x), rtol=1e-12)


def test_a_plain_array_that_is_read_again_and_again_is_copied_once() -> None:
    c = np.linspace(0.9, 1.0, 8000)
    marks = []

    def program(x: Any) -> Any:
        for _ in range(100):
            x = x * c
        marks.append(tracemalloc.get_traced_memory()[0])
        return np.sum(x)

    tracemalloc.start()
    try:
        remat.grad(program)(np.ones(8000))
    finally:
        tracemalloc.stop()
    assert marks[0] < 101 * 64_000 + 64_000 + 300_000


def write_through_a_view(x: Any) -> Any:
    view = x.swapaxes(0, -1)
    with remat.CheckpointScope("s", policy=remat.policies.save_ops("numpy.multiply")):
        np.sin(view, out=view)
        np.broadcast_to(view, (2, *np.shape(view)))
    return np.sum(np.sin(x) * 0.3)


def read_two_views(x: Any) -> Any:
    diagonal = np.diagonal(np.cos(x).reshape(2, 3) * 1.0)
    part = np.real((diagonal + 0.3j) ** 2)
    whole = np.atleast_2d(part)
    with remat.CheckpointScope("s"):
        part[:2] += 0.5
        part -= diagonal
    whole **= 2
    return np.sum(np.sin(part))


@pytest.mark.parametrize("program", [write_through_a_view, read_two_views])
@pytest.mark.parametrize("budget", [800, 100_000])
def test_views_that_follow_a_change_are_other_values_to_a_budget(program: Any, budget: int) -> None:
    """What a derivative needs is the view before the change, not what the program has now."""
    x = np.linspace(-0.7, 0.9, 6)
    expected = remat.grad(program)(x)
    gradient = remat.grad(program, memory_budget=budget)
    for _ in range(4):
        assert same_bits(gradient(x), expected)
