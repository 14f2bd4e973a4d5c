from __future__ import annotations

import threading
import uuid
import warnings

import pytest

import remat
from remat.observers import observers, start_observing, stop_observing, warn_once
from remat.reports.accounting import MemoryAccounting


def test_observers_are_known_in_their_thread_only() -> None:
    one, other, seen = MemoryAccounting(), MemoryAccounting(), []
    start_observing(one)
    start_observing(other)
    try:
        assert observers() == (one, other)
        thread = threading.Thread(target=lambda: seen.append(observers()))
        thread.start()
        thread.join()
        stop_observing(one)
        assert observers() == (other,)
    finally:
        stop_observing(one)
        stop_observing(other)
    assert observers() == ()
    assert seen == [()]


def test_a_warning_comes_once_and_names_the_line_of_the_caller() -> None:
    key = uuid.uuid4()
    with pytest.warns(remat.RematWarning, match="nothing") as caught:
        warn_once(key, "it saves nothing")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_once(key, "it saves nothing")
