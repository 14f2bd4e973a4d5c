"""The scales: what arrays stand in, who refers to them, and what tracemalloc counts."""

from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import pytest

from remat.engines.numpy.memory_measure import held_elsewhere, memories, traced_memory


def test_views_stand_in_the_memory_of_their_array() -> None:
    array = np.zeros((4, 5))
    found = memories([array, array[1:], array.T, array.reshape(-1)[3:], 3.0, "text"])
    assert list(found.values()) == [array.nbytes]
    assert memories([array]) == found


def test_an_array_that_is_gone_leaves_no_key_to_another() -> None:
    keys = set()
    for _ in range(50):  # each may take the place of the one before
        (key,) = memories([np.zeros(100)])
        keys.add(key)
    assert len(keys) == 50


@pytest.mark.parametrize("kind", ["array", "view", "slice of a slice", "number"])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("held", [False, True])
def test_who_else_refers_to_an_array(kind, times, held) -> None:
    def made():
        array = np.arange(10.0)
        if kind == "number":
            return array[3]
        return {"array": array, "view": array[:], "slice of a slice": array[2:][1:]}[kind]

    values = [made()] * times
    others = [values[0]] if held else []
    assert held_elsewhere(values) == [held] * times
    assert len(others) == held


def test_whoever_refers_to_the_memory_under_a_view() -> None:
    array = np.arange(10.0)
    values = [array[:5], array[5:]]
    assert held_elsewhere(values) == [True, True]
    del array
    assert held_elsewhere(values) == [False, False]
    third = values[0][1:]
    assert held_elsewhere(values) == [True, True]
    assert third.base is values[1].base


def test_tracing_that_the_program_has_started_goes_on() -> None:
    tracemalloc.start()
    try:
        with traced_memory() as used:
            before = used()
            array = np.zeros(100_000)
            assert array.nbytes <= used() - before < array.nbytes + 5000
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


def test_the_last_of_several_threads_switches_off() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with traced_memory():
            inside.set()
            leave.wait(600)

    thread = threading.Thread(target=other)
    with traced_memory():
        thread.start()
        inside.wait(600)
    assert tracemalloc.is_tracing()
    leave.set()
    thread.join()
    assert not tracemalloc.is_tracing()


def test_an_error_switches_off() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), traced_memory():
        raise RuntimeError("on purpose")
    assert not tracemalloc.is_tracing()
