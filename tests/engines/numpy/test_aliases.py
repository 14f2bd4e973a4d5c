"""A result is a view where NumPy's is one, and a copy where NumPy's is one; or an error says no."""

from __future__ import annotations

import numpy as np
import pytest

import remat

from .every_function import alias_complaints, functions, methods
from .oracles import difference_quotient

X = np.array([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("name", [*functions(), *methods()])
def test_a_change_after_the_call_shows_where_it_shows_in_numpy(name: str) -> None:
    assert alias_complaints(name) == ()


def judge(program) -> None:
    """The value and the gradient are those of plain NumPy."""
    value, gradient = remat.value_and_grad(program)(X)
    assert value == program(X.copy())
    expected = difference_quotient(lambda x: program(x.copy()), X)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


TAKEN = {
    "squeeze": lambda y: y.squeeze(),
    "conj": lambda y: y.conj(),
    "conjugate": lambda y: y.conjugate(),
    "diagonal": lambda y: np.diagonal(y.reshape(2, 2)),
    "diag": lambda y: np.diag(y.reshape(2, 2)),
    "diagonal method": lambda y: y.reshape(2, 2).diagonal(),
    "linalg.diagonal": lambda y: np.linalg.diagonal(y.reshape(2, 2)),
    "split": lambda y: np.split(y, 2)[1],
    "clip": lambda y: np.clip(y, None, None),
    "prod": lambda y: np.prod(y[:1].reshape(())),
    "flatten": lambda y: y.flatten(),
    "real": lambda y: y.real,
    "reshape": lambda y: y.reshape(4),
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_array_changes_afterwards(name: str) -> None:
    def program(x):
        y = x * 1.0
        z = TAKEN[name](y)
        y *= 3.0
        return np.sum(z * z)

    judge(program)


@pytest.mark.parametrize("name", TAKEN)
def test_what_was_taken_changes_afterwards(name: str) -> None:
    def program(x):
        y = x * 1.0
        z = TAKEN[name](y)
        try:
            z *= 3.0
        except ValueError:  # NumPy: read-only
            raise remat.UnsupportedError from None
        return np.sum(y * y) + np.sum(z)

    try:
        program(X.copy())
    except remat.UnsupportedError:
        with pytest.raises(remat.UnsupportedError):
            remat.grad(program)(X)
    else:
        judge(program)


@pytest.mark.parametrize("name", ["squeeze", "conj", "conjugate", "real", "flatten", "clip"])
def test_what_numpy_returns_as_it_is_or_as_a_copy_is_followed(name: str) -> None:
    def program(x):
        y = x * 1.0
        z = TAKEN[name](y)
        y *= 3.0
        return np.sum(z)

    assert remat.value_and_grad(program)(X)[0] == program(X.copy())


def test_pieces_that_are_asked_for_late() -> None:
    def program(x):
        y = x * 1.0
        parts = np.split(y, 2)
        y *= 3.0
        return np.sum(parts[0])

    judge(program)


def test_a_read_only_array_stays_read_only() -> None:
    x = X.copy()
    x.flags.writeable = False

    def program(x):
        x += 1.0
        return np.sum(x)

    with pytest.raises(remat.UnsupportedError, match="read-only"):
        remat.grad(program)(x)
