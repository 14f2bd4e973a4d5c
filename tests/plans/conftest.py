"""Here plans are searched for at length: a part of what users get is enough for all promises."""

import functools

import pytest

from remat.plans import graph


@functools.lru_cache(maxsize=8)
def _quick_search(trace):
    return graph.Search(trace)


@pytest.fixture(autouse=True)
def quick_plans(monkeypatch):
    """Search for less long than for users."""
    monkeypatch.setattr(graph, "_search", _quick_search)  # what is found is not for others
    monkeypatch.setattr(graph, "_TINY_WORK", 100_000)
    monkeypatch.setattr(graph, "_SMALL_RELIEF_WORK", 300_000)
    monkeypatch.setattr(graph, "_RELIEF_WORK", 200_000)
    monkeypatch.setattr(graph, "_SEARCHED_WORK", 30_000)
