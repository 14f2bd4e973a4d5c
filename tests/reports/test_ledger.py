"""The books against a second bookkeeper, who recounts everything after every tale."""

from __future__ import annotations

import gc
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.plans.trace import Trace
from remat.reports import ledger as module
from remat.reports.ledger import Ledger, RegionTotals

TALES = st.lists(
    st.tuples(
        st.sampled_from(["would_hold", "would_free", "holds", "frees", "allocated", "freed"]),
        st.integers(0, 3),
        st.integers(0, 100),
    )
)


def recount(tales, put, take):
    """Return the total after every tale."""
    totals = []
    for end in range(1, len(tales) + 1):
        held: dict[int, list[int]] = {}
        for kind, key, nbytes in tales[:end]:
            sizes = held.setdefault(key, [])
            if kind in (put, "allocated"):
                sizes.append(sizes[0] if sizes else nbytes)
            elif kind in (take, "freed") and sizes:
                sizes.pop()
        totals.append(sum(sizes[0] for sizes in held.values() if sizes))
    return totals


def tell(ledger, tales) -> None:
    for kind, key, nbytes in tales:
        if kind in ("would_hold", "holds", "allocated"):
            getattr(ledger, kind)(key, nbytes)
        else:
            getattr(ledger, kind)(key)


@given(TALES)
def test_peaks_and_curves_agree_with_a_recount(tales) -> None:
    ledger = Ledger()
    tell(ledger, tales)
    plain = recount(tales, "would_hold", "would_free")
    held = recount(tales, "holds", "frees")
    assert ledger.curve == list(zip(plain, held, strict=True))
    assert ledger.plain_peak == max(plain, default=0)
    assert ledger.held_peak == max(held, default=0)
    assert ledger.memory_saved == max(plain, default=0) - max(held, default=0)


def test_what_is_held_twice_counts_once_with_its_first_size() -> None:
    ledger = Ledger()
    ledger.holds("a", 10)
    ledger.holds("a", 99)
    ledger.frees("a")
    assert ledger.curve[-1] == (0, 10)
    ledger.frees("a")
    assert ledger.curve[-1] == (0, 0)
    ledger.frees("a")
    assert ledger.curve[-1] == (0, 0)
    ledger.holds("a", 99)
    assert ledger.curve[-1] == (0, 99)


def test_regions_are_added_up_by_name() -> None:
    ledger = Ledger()
    first, second, third = (ledger.region_ran(name) for name in ("a", "b", "a"))
    assert len({first, second, third}) == 3
    ledger.recomputed(third, 5, 0.25)
    ledger.recomputed(first, 2, 0.5)
    assert ledger.regions == [RegionTotals("a", 2, 2, 7, 0.75), RegionTotals("b", 1)]


def test_bytes_are_added_up_by_name() -> None:
    ledger = Ledger()
    first, second, third = (ledger.region_ran(name) for name in ("a", "b", "a"))
    ledger.kept(third, plain=5)
    ledger.kept(first, plain=20, held=3)
    ledger.kept(second, held=7)
    assert [(t.plain_bytes, t.held_bytes) for t in ledger.regions] == [(25, 3), (0, 7)]


def test_of_many_traces_the_last_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(module, "_MOST_TRACES", 3)
    ledger, traces = Ledger(), [Trace((), (), (number,)) for number in range(5)]
    for trace in traces:
        region = ledger.region_ran("a")
        ledger.traced(region, Trace((), ()))
        ledger.traced(region, trace)  # once more, after backward
    assert ledger.traces == traces[-3:]


def test_totals_alone_need_no_curve_and_no_traces() -> None:
    ledger = Ledger(only_totals=True)
    ledger.traced(ledger.region_ran("a"), Trace((), ()))
    ledger.would_hold("k", 5)
    assert (ledger.plain_peak, ledger.curve, ledger.traces) == (5, [], [])


def test_a_closed_ledger_keeps_its_numbers() -> None:
    ledger = Ledger()
    region = ledger.region_ran("a")
    ledger.holds("k", 5)
    ledger.close()
    ledger.region_ran("a")
    ledger.frees("k")
    ledger.holds("l", 50)
    ledger.recomputed(region, 1, 1.0)
    ledger.traced(region, Trace((), ()))
    assert ledger.held_peak == 5
    assert ledger.regions == [RegionTotals("a", 1)]
    assert ledger.traces == []


def test_traces_are_kept() -> None:
    ledger, trace = Ledger(), Trace((), ())
    ledger.traced(ledger.region_ran("a"), trace)
    assert ledger.traces == [trace]


@pytest.mark.parametrize("events", [4095, 4096, 4097, 100_000])
def test_a_long_curve_keeps_its_peaks_in_few_points(events) -> None:
    ledger = Ledger()
    high = random.Random(0).randrange(events)
    for i in range(events):
        ledger.would_hold("k", 1000 if i == high else 1)
        ledger.would_free("k")
    assert len(ledger.curve) <= module._MOST_POINTS
    assert max(plain for plain, _ in ledger.curve) == ledger.plain_peak == 1000


def test_many_threads_lose_nothing() -> None:
    ledger = Ledger()

    def work(number) -> None:
        for i in range(120):  # few enough for a point each on the curve
            region = ledger.region_ran("a")
            ledger.holds((number, i), 1)
            ledger.recomputed(region, 1, 0.0)
            if i % 3:
                ledger.frees((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.regions == [RegionTotals("a", 960, 960, 960, 0.0)]
    assert ledger.curve[-1] == (0, 320)


def test_garbage_may_be_collected_in_the_middle_of_a_tale() -> None:
    """A thing that dies while the books are open tells from inside another tale."""
    ledger = Ledger()

    class Dies:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            ledger.frees("dead")

    class Key(str):
        def __hash__(self) -> int:
            gc.collect()
            return hash(str(self))

    ledger.holds("dead", 7)
    Dies()
    ledger.holds(Key("k"), 10)
    assert ledger.curve[-1] == (0, 10)
