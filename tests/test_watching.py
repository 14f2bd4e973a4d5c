from __future__ import annotations

import threading
import uuid
import warnings

import pytest

import remat
from remat.reports.ledger import Ledger
from remat.watching import start_watching, stop_watching, warn_once, watchers


def test_those_who_watch_are_known_in_their_thread_only() -> None:
    one, other, seen = Ledger(), Ledger(), []
    start_watching(one)
    start_watching(other)
    try:
        assert watchers() == (one, other)
        thread = threading.Thread(target=lambda: seen.append(watchers()))
        thread.start()
        thread.join()
        stop_watching(one)
        assert watchers() == (other,)
    finally:
        stop_watching(one)
        stop_watching(other)
    assert watchers() == ()
    assert seen == [()]


def test_a_warning_comes_once_and_names_the_line_of_the_caller() -> None:
    key = uuid.uuid4()
    with pytest.warns(remat.RematWarning, match="nothing") as caught:
        warn_once(key, "it saves nothing")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_once(key, "it saves nothing")
