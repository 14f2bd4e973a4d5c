"""In a notebook, with and without IPython: what rich does there by itself is not enough."""

from __future__ import annotations

import builtins
import sys
import types

import numpy as np
import pytest

import remat


class ZMQInteractiveShell:
    """How rich recognises a notebook."""


@pytest.fixture(params=["IPython", "no IPython"])
def shown(request, monkeypatch):
    """Be in a notebook; return what is displayed there."""
    shown: list[object] = []
    shell = ZMQInteractiveShell()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    if request.param == "no IPython":
        monkeypatch.setitem(sys.modules, "IPython", None)
        monkeypatch.setitem(sys.modules, "IPython.display", None)
        return shown
    package, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    display.display = lambda *values, **_: shown.extend(values)
    package.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def loss(x):
    return np.sum(remat.checkpointed_loop(np.sin, x, 30, 3, schedule="revolve", progress=True)[0])


@pytest.mark.usefixtures("shown")
def test_a_loop_shows_its_progress_without_ipywidgets(capfd) -> None:
    found = remat.grad(loss)(np.ones(3))
    out, err = capfd.readouterr()
    assert out == ""
    last = err.replace("\r", "\n").splitlines()[-1]
    assert last.startswith("forward 30/30, recompute ")
    assert last.endswith(", backward 30/30")
    assert "ipywidgets" not in err
    monitor = np.ones(3)
    product = np.ones(3)
    for _ in range(30):
        product *= np.cos(monitor)
        monitor = np.sin(monitor)
    np.testing.assert_allclose(found, product)


@pytest.mark.usefixtures("shown")
def test_an_error_ends_the_line(capfd) -> None:
    def fails(x):
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        remat.checkpointed_loop(fails, np.ones(3), 30, 3, progress=True)
    assert capfd.readouterr().err.endswith("\n")  # what is printed next begins a line


def test_a_report_is_the_whole_text(shown, capfd) -> None:
    with remat.CheckpointProfiler() as profiler:
        remat.grad(lambda x: np.sum(remat.checkpoint(np.sin, x)))(np.ones(3))
    report = profiler.report()
    for words in ("region", "runs", "plain", "held", "recomputed", "ops", "seconds", "│ sin"):
        assert words in report
    assert "peak of a plain pass" in report
    assert shown == []
    assert capfd.readouterr() == ("", "")
