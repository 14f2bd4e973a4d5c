from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.sizes import format_bytes, parse_budget, parse_bytes

UNITS = {
    **{"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4},
    **{"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4},
}


@pytest.mark.parametrize(("unit", "size"), UNITS.items())
def test_a_unit_is_worth_its_bytes(unit: str, size: int) -> None:
    assert parse_bytes(f"3{unit}") == 3 * size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GB", 2_000_000_000),
        ("512MiB", 536_870_912),
        ("2 gb", 2_000_000_000),
        ("  1.5 KB ", 1500),
        (".5KB", 500),
        ("5.KB", 5000),
        ("0", 0),
        ("4096", 4096),
    ],
)
def test_text_is_read_as_people_write_it(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@given(
    st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(UNITS.keys() - {"", "B"}))
)
def test_text_is_read_exactly(whole: int, thousandths: int, unit: str) -> None:
    number = f"{whole}.{thousandths:03}"
    assert parse_bytes(number + unit) == floor(Fraction(number) * UNITS[unit])


@pytest.mark.parametrize(("text", "count"), [("1.001KB", 1001), (str(2**53 + 1), 2**53 + 1)])
def test_no_byte_is_lost_to_rounding(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("count", [0, 1, 4096, 10**30])
def test_an_int_is_a_number_of_bytes(count: int) -> None:
    assert parse_bytes(count) == count


@pytest.mark.parametrize(
    "text", ["", "GB", "2XB", "-1MB", "1e3", "2 G B", "1,5KB", "1.2.3", "inf", "."]
)
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match='bytes must be a number with a unit such as "64MB"'
    ) as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["0.1", "7.9", "1.0", ".5", "5.", "0.5B", "3.2 b"])
def test_a_fraction_of_a_byte_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match="bytes must be a whole number of bytes, or have a unit"
    ) as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("value", [1.5, True, False, None, b"2GB"], ids=repr)
def test_what_is_neither_int_nor_text_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="bytes must be bytes as an int or text") as error:
        parse_bytes(value)
    assert repr(value) in str(error.value)


def test_negative_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes must be at least 0, got -5"):
        parse_bytes(-5)


@pytest.mark.parametrize("value", [-1, "much", 2.5])
def test_an_error_names_the_argument(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^state_bytes "):
        parse_bytes(value, name="state_bytes")


@pytest.mark.parametrize(
    ("value", "count"),
    [(0.25, 250), (1.0, 1000), (0.0019, 1), (0.0001, 0), (2000, 2000), ("1KB", 1000), (0, 0)],
)
def test_a_budget_is_bytes_or_a_fraction_of_the_whole(value: float | str, count: int) -> None:
    assert parse_budget(value, whole=1000) == count


@pytest.mark.parametrize("value", [0.0, -0.5, 1.01, 64.0, float("nan"), float("inf")])
def test_a_fraction_outside_of_0_to_1_is_refused(value: float) -> None:
    with pytest.raises(
        ValueError, match=r"memory_budget as a float must be a fraction in \(0, 1\]"
    ):
        parse_budget(value, whole=1000)


def test_a_budget_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"^memory_budget must be bytes as an int, text .* got True"
    ):
        parse_budget(True, whole=1000)
    with pytest.raises(ValueError, match=r"^limit must be at least 0, got -1"):
        parse_budget(-1, whole=1000, name="limit")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (1536, "1.5 KB"),
        (999_400, "999.4 KB"),
        (999_950, "1.0 MB"),
        (2_500_000, "2.5 MB"),
        (2_000_000_000, "2.0 GB"),
        (3.2e12, "3.2 TB"),
        (5e15, "5000.0 TB"),
        (-1536, "-1.5 KB"),
        (-2, "-2 B"),
    ],
)
def test_bytes_are_written_for_people(count: float, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 10**14))
def test_what_is_written_can_be_read_again(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.05)


@given(st.floats(0, 9e14))
def test_no_unit_is_written_a_thousand_times(count: float) -> None:
    assert "1000" not in format_bytes(count)
