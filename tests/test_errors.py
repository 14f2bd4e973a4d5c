import re

import pytest

from remat import errors

WARNINGS = {"RematWarning"}


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"RematError"} - WARNINGS))
def test_every_error_is_caught_as_a_remat_error(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.RematError)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_says_what_it_is(name: str) -> None:
    assert getattr(errors, name).__doc__.strip()


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    names = re.findall(r"\b\w+(?:Error|Warning)\b(?=  |$)", errors.__doc__, re.M)
    assert sorted(names) == errors.__all__


def test_warnings_can_be_silenced_as_all_of_users() -> None:
    assert issubclass(errors.RematWarning, UserWarning)


@pytest.mark.parametrize("builtin", [ValueError, TypeError])
def test_bad_arguments_are_no_remat_errors(builtin: type[Exception]) -> None:
    assert not issubclass(builtin, errors.RematError)
    assert not issubclass(errors.RematError, builtin)
