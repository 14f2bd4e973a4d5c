"""Arrays that are changed in place while they are traced behave as NumPy's, or an error says no."""

# ruff: noqa: PLW2901  (loop variables changed in place are what is tested)

from __future__ import annotations

import numpy as np
import pytest

import remat

from .fuzz import DIRECTION, START, judge
from .oracles import difference_quotient
from .random_programs import IN_PLACE, OUT_OF_PLACE, SCALARS, VIEWS, draw

ARRAYS = OUT_OF_PLACE + IN_PLACE + VIEWS


@pytest.mark.parametrize("seed", range(250))
def test_a_random_program_is_right_or_writes_to_a_plain_array(seed: int) -> None:
    source = draw(seed, ARRAYS)
    assert judge(source) in ("right", "refused", "kink"), source


@pytest.mark.parametrize("seed", range(100))
def test_a_random_program_with_numbers_is_right_or_writes_to_a_plain_array(seed: int) -> None:
    source = draw(1000 + seed, ARRAYS + 2 * SCALARS)
    assert judge(source) in ("right", "refused", "kink"), source


def test_most_random_programs_are_judged() -> None:
    verdicts = [judge(draw(seed, ARRAYS)) for seed in range(60)]
    assert verdicts.count("right") >= 55


# -- single rules ----------------------------------------------------------------------------------


def augmented(x):
    x += 1.0
    x *= x
    x -= 0.5
    x /= 2.0
    x **= 2
    return x


def slices(x):
    u = x * 1.0
    u[1:-1] += 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2])
    return u


def through_a_view(x):
    v = x[1:4]
    v *= 2.0
    return x


def through_a_view_of_a_view(x):
    v = x[1:][1:3]
    v += x[:2]
    return x


def through_an_alias(x):
    y = x
    y += 1.0
    return x * y


def rows(x):
    m = x.reshape(2, 3) * 1.0
    for row in m:
        row *= np.array([1.0, 2.0, 3.0])
    return m


def two_indices(x):
    m = x.reshape(2, 3) * 1.0
    m[0][1] = m[1][2] ** 2
    m[1, :] += m[0, :]
    return m


def mask(x):
    u = x * 1.0
    u[x > 0] *= 3.0
    return u


def last_one_wins(x):
    u = x * 1.0
    u[[0, 0, 1]] = x[[3, 4, 5]]
    return u


def overlap(x):
    u = x * 1.0
    u[1:] = u[:-1]
    return u


def out_argument(x):
    u = x * 1.0
    np.multiply(u, x, out=u)
    np.sin(u, out=u)
    return u


def fancy_is_a_copy(x):
    v = x[[0, 1]]
    v += 10.0
    return x * np.sum(v)


def copy_is_a_copy(x):
    v = x.copy()
    v += 10.0
    return x * v


def broadcast_value(x):
    m = x.reshape(2, 3) * 1.0
    m[:] = x[:3]
    return m


def wait_then_use(x):
    y = np.exp(x)
    z = y * 2.0  # the rule of exp refers to y
    y += 1.0
    return y * z


def zero_d(x):
    s = x[:1].reshape(()) * np.ones(())
    return s * x


def through_a_piece(x):
    u = x * 1.0
    first, _ = np.split(u, 2)
    first += 1.0
    return u * u


RULES = [
    through_a_piece,
    augmented,
    slices,
    through_a_view,
    through_a_view_of_a_view,
    through_an_alias,
    rows,
    two_indices,
    mask,
    last_one_wins,
    overlap,
    out_argument,
    fancy_is_a_copy,
    copy_is_a_copy,
    broadcast_value,
    wait_then_use,
    zero_d,
]


def assert_right(program, x) -> None:
    def total(x):
        result = program(x)
        weights = np.arange(1.0, 1.0 + np.size(np.ones(np.shape(result))))
        return np.sum(result * weights.reshape(np.shape(result)))

    value, gradient = remat.value_and_grad(total)(x.copy())
    assert value == total(x.copy())
    expected = difference_quotient(lambda x: total(x.copy()), x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("program", RULES)
def test_in_place_rules(program) -> None:
    assert_right(program, START)


@pytest.mark.parametrize("program", RULES)
def test_the_callers_array_is_not_modified(program) -> None:
    x = START.copy()
    remat.grad(lambda x: np.sum(program(x)))(x)
    assert np.array_equal(x, START)


def changed_under_a_view(x):
    v = x[1:3]
    x += 1.0
    return v


def changed_through_another_view(x):
    v, w = x[:3], x[2:]
    v += 1.0
    return w


def changed_transposed(x):
    m = x.reshape(2, 3) * 1.0
    t = m.T
    t += 1.0
    return m


def changed_ravelled(x):
    m = x.reshape(2, 3) * 1.0
    np.ravel(m)[0] = 5.0
    return m


@pytest.mark.parametrize(
    "program",
    [
        changed_under_a_view,
        changed_through_another_view,
        changed_transposed,
        changed_ravelled,
    ],
)
def test_views_follow(program) -> None:
    assert_right(program, START)


# -- numbers, aliases, shapes ----------------------------------------------------------------------


def python_number(x):
    y = x
    x += 1.0
    return x * y


def element(x):
    total = x[0]
    totals = [total]
    for i in range(1, 6):
        total += x[i]
        totals.append(total)
    return np.stack(totals)


def reduced(x):
    total = np.sum(x)
    before = total
    total *= 2.0
    return total * before * x


def number_becomes_array(x):
    total = x[0]
    total += x
    return total


@pytest.mark.parametrize("program", [element, reduced, number_becomes_array])
def test_numbers_are_not_changed_in_place(program) -> None:
    assert_right(program, START)


def test_a_python_float_is_not_changed_in_place() -> None:
    assert remat.value_and_grad(python_number)(3.0) == (12.0, 7.0)


def floor_divided(x):
    y = x
    y //= 0.31
    return x * np.arange(6.0)


def cast_without_copy(x):
    u = x * 1.0
    v = u.astype(float, copy=False)
    v += 1.0
    return u * v


def extra_axis(x):
    u = np.sin(x)
    u[:3] = x.reshape(2, 3)[:1]
    return u


@pytest.mark.parametrize("program", [floor_divided, cast_without_copy, extra_axis])
def test_aliases_and_shapes(program) -> None:
    assert_right(program, START)


def test_views_are_followed_in_second_derivatives() -> None:
    def in_place(x):
        v = x[1:3]
        v *= x[0]
        return np.sum(x**3)

    def out_of_place(x):
        return np.sum(np.concatenate([x[:1], x[1:3] * x[0], x[3:]]) ** 3)

    def curvature(f):
        return remat.grad(lambda x: np.sum(remat.grad(f)(x) * DIRECTION))(START)

    np.testing.assert_allclose(curvature(in_place), curvature(out_of_place), rtol=1e-12)


# -- overlapping assignments -----------------------------------------------------------------------


def wider(x):
    x[::2] = x[:3]


def wider_through_views(x):
    x[::-1][::-1][::2][...] = np.split(x, 2)[0]


def masked(x):
    x[np.ones(6, bool)] = x[::-1]


@pytest.mark.parametrize("assign", [wider, wider_through_views, masked])
def test_an_assignment_that_numpy_itself_gets_wrong_is_refused(assign) -> None:
    def f(x):
        y = x * 1.0
        assign(y)
        return np.sum(y * START)

    with pytest.raises(remat.UnsupportedError, match="assign a copy"):
        remat.grad(f)(START.copy())


def narrower(x):
    x[:3] = x[::2]


def shifted(x):
    x[1:] = x[:-1]
    x[:-2] = x[2:]


def reversed_in_place(x):
    x[:] = x[::-1]
    x[[0, 1, 2]] = x[:3]


def transposed(x):
    m = x[:4].reshape(2, 2)
    m[:, 0] = m[1]
    m[...] = m.T


@pytest.mark.parametrize("assign", [narrower, shifted, reversed_in_place, transposed])
def test_other_assignments_of_an_array_to_itself_are_followed(assign) -> None:
    def f(x):
        y = x * 1.0
        assign(y)
        return np.sum(np.sin(y) * (START + 2.0))

    value, gradient = remat.value_and_grad(f)(START.copy())
    assert value == f(START.copy())
    assert gradient == pytest.approx(difference_quotient(f, START), abs=1e-8)
