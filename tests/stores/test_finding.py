"""The argument `store`: a name, or a store."""

from __future__ import annotations

import pytest

import remat
from remat.stores import find_store


@pytest.mark.parametrize(
    ("name", "words", "on_disk"),
    [
        ("memory", "MemoryStore()", False),
        ("bfloat16", "ReducedPrecisionStore('bfloat16')", False),
        ("float16", "ReducedPrecisionStore('float16')", False),
        ("disk", "DiskStore()", True),
    ],
)
def test_a_name(name: str, words: str, on_disk: bool) -> None:
    store = find_store(name)
    assert repr(store) == words
    assert store.on_disk is on_disk


def test_a_store_is_itself() -> None:
    store = remat.DiskStore("/scratch")
    assert find_store(store) is store
    assert repr(store) == "DiskStore('/scratch')"


@pytest.mark.parametrize("name", ["ram", "", "Memory", "float32"])
def test_another_name(name: str) -> None:
    with pytest.raises(
        ValueError, match=f'"memory", "bfloat16", "float16" or "disk", got {name!r}'
    ):
        find_store(name)


@pytest.mark.parametrize("value", [None, 3, remat.MemoryStore, ["disk"]])
def test_what_is_no_store(value: object) -> None:
    with pytest.raises(TypeError, match=r'"disk", or an object such as MemoryStore\(\).*got'):
        find_store(value)


@pytest.mark.parametrize("dtype", ["float32", None, "half"])
def test_another_precision(dtype: object) -> None:
    with pytest.raises(ValueError, match=f'"bfloat16" or "float16", got {dtype!r}'):
        remat.ReducedPrecisionStore(dtype)


def test_a_directory_that_is_no_path() -> None:
    with pytest.raises(TypeError, match="directory must be a path or None, got 3"):
        remat.DiskStore(3)
