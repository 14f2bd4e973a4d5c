"""Sums against an oracle that recounts everything after every event."""

from __future__ import annotations

import gc
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.plans.trace import Trace
from remat.reports import accounting as module
from remat.reports.accounting import MemoryAccounting, RegionTotals

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["would_hold", "would_free", "holds", "frees", "allocated", "freed"]),
        st.integers(0, 3),
        st.integers(0, 100),
    )
)


def recount(events, put, take):
    """Return the total after every event."""
    totals = []
    for end in range(1, len(events) + 1):
        held: dict[int, list[int]] = {}
        for kind, key, nbytes in events[:end]:
            sizes = held.setdefault(key, [])
            if kind in (put, "allocated"):
                sizes.append(sizes[0] if sizes else nbytes)
            elif kind in (take, "freed") and sizes:
                sizes.pop()
        totals.append(sum(sizes[0] for sizes in held.values() if sizes))
    return totals


def send(accounting, events) -> None:
    for kind, key, nbytes in events:
        if kind in ("would_hold", "holds", "allocated"):
            getattr(accounting, kind)(key, nbytes)
        else:
            getattr(accounting, kind)(key)


@given(EVENTS)
def test_peaks_and_curves_agree_with_a_recount(events) -> None:
    accounting = MemoryAccounting()
    send(accounting, events)
    plain = recount(events, "would_hold", "would_free")
    held = recount(events, "holds", "frees")
    assert accounting.curve == list(zip(plain, held, strict=True))
    assert accounting.plain_peak == max(plain, default=0)
    assert accounting.held_peak == max(held, default=0)
    assert accounting.memory_saved == max(plain, default=0) - max(held, default=0)


def test_what_is_held_twice_counts_once_with_its_first_size() -> None:
    accounting = MemoryAccounting()
    accounting.holds("a", 10)
    accounting.holds("a", 99)
    accounting.frees("a")
    assert accounting.curve[-1] == (0, 10)
    accounting.frees("a")
    assert accounting.curve[-1] == (0, 0)
    accounting.frees("a")
    assert accounting.curve[-1] == (0, 0)
    accounting.holds("a", 99)
    assert accounting.curve[-1] == (0, 99)


def test_regions_are_added_up_by_name() -> None:
    accounting = MemoryAccounting()
    first, second, third = (accounting.region_ran(name) for name in ("a", "b", "a"))
    assert len({first, second, third}) == 3
    accounting.recomputed(third, 5, 0.25)
    accounting.recomputed(first, 2, 0.5)
    assert accounting.regions == [RegionTotals("a", 2, 2, 7, 0.75), RegionTotals("b", 1)]


def test_bytes_are_added_up_by_name() -> None:
    accounting = MemoryAccounting()
    first, second, third = (accounting.region_ran(name) for name in ("a", "b", "a"))
    accounting.kept(third, plain=5)
    accounting.kept(first, plain=20, held=3)
    accounting.kept(second, held=7)
    assert [(t.plain_bytes, t.held_bytes) for t in accounting.regions] == [(25, 3), (0, 7)]


def test_of_many_traces_the_last_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(module, "_MOST_TRACES", 3)
    accounting, traces = MemoryAccounting(), [Trace((), (), (number,)) for number in range(5)]
    for trace in traces:
        region = accounting.region_ran("a")
        accounting.traced(region, Trace((), ()))
        accounting.traced(region, trace)  # once more, after backward
    assert accounting.traces == traces[-3:]


def test_totals_alone_need_no_curve_and_no_traces() -> None:
    accounting = MemoryAccounting(only_totals=True)
    accounting.traced(accounting.region_ran("a"), Trace((), ()))
    accounting.would_hold("k", 5)
    assert (accounting.plain_peak, accounting.curve, accounting.traces) == (5, [], [])


def test_a_closed_accounting_keeps_its_numbers() -> None:
    accounting = MemoryAccounting()
    region = accounting.region_ran("a")
    accounting.holds("k", 5)
    accounting.close()
    accounting.region_ran("a")
    accounting.frees("k")
    accounting.holds("l", 50)
    accounting.recomputed(region, 1, 1.0)
    accounting.traced(region, Trace((), ()))
    assert accounting.held_peak == 5
    assert accounting.regions == [RegionTotals("a", 1)]
    assert accounting.traces == []


def test_traces_are_kept() -> None:
    accounting, trace = MemoryAccounting(), Trace((), ())
    accounting.traced(accounting.region_ran("a"), trace)
    assert accounting.traces == [trace]


@pytest.mark.parametrize("events", [4095, 4096, 4097, 100_000])
def test_a_long_curve_keeps_its_peaks_in_few_points(events) -> None:
    accounting = MemoryAccounting()
    high = random.Random(0).randrange(events)
    for i in range(events):
        accounting.would_hold("k", 1000 if i == high else 1)
        accounting.would_free("k")
    assert len(accounting.curve) <= module._MOST_POINTS
    assert max(plain for plain, _ in accounting.curve) == accounting.plain_peak == 1000


def test_many_threads_lose_nothing() -> None:
    accounting = MemoryAccounting()

    def work(number) -> None:
        for i in range(120):  # few enough for a point each on the curve
            region = accounting.region_ran("a")
            accounting.holds((number, i), 1)
            accounting.recomputed(region, 1, 0.0)
            if i % 3:
                accounting.frees((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert accounting.regions == [RegionTotals("a", 960, 960, 960, 0.0)]
    assert accounting.curve[-1] == (0, 320)


def test_garbage_may_be_collected_in_the_middle_of_an_event() -> None:
    """A finalizer notifies from inside another event."""
    accounting = MemoryAccounting()

    class Dies:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            accounting.frees("dead")

    class Key(str):
        def __hash__(self) -> int:
            gc.collect()
            return hash(str(self))

    accounting.holds("dead", 7)
    Dies()
    accounting.holds(Key("k"), 10)
    assert accounting.curve[-1] == (0, 10)
