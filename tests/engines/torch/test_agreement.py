"""Numbers that ranks agree upon, through the store of their process group."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from remat.engines.torch.budget import agreement

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch has no processes here")
PROGRAM = [("aten.sin", ((2, 3),), (24,))]
OTHER = [("aten.sin", ((4, 3),), (48,))]


@pytest.fixture
def store(monkeypatch):
    made = dist.HashStore()
    monkeypatch.setattr(agreement, "process_group_store", lambda: made)
    return made


def test_whoever_asks_first_is_followed(store) -> None:
    assert agreement.agreed_seconds(PROGRAM, [1.0, 2.0], about="1GB/0") == [1.0, 2.0]
    assert agreement.agreed_seconds(PROGRAM, [3.0, 4.0], about="1GB/0") == [1.0, 2.0]
    assert agreement.agreed_seconds(PROGRAM, [3.0, 4.0], about="1GB/1") == [3.0, 4.0]
    assert agreement.agreed_bytes(PROGRAM, 7, about="1GB/0") == 7
    assert agreement.agreed_bytes(PROGRAM, 9, about="1GB/0") == 7


def test_other_shapes_wait_for_nobody(store) -> None:
    agreement.agreed_seconds(PROGRAM, [1.0], about="1GB/0")
    assert agreement.agreed_seconds(OTHER, [5.0], about="1GB/0") == [5.0]


def test_the_store_does_not_grow_for_ever(store, monkeypatch) -> None:
    """With ever new shapes: from some number of programs on, ranks plan for themselves."""
    monkeypatch.setattr(agreement, "_MANY", 1)
    assert agreement.agreed_seconds(PROGRAM, [1.0], about="1GB/0") == [1.0]
    assert agreement.agreed_seconds(OTHER, [2.0], about="1GB/0") == [2.0]
    assert agreement.agreed_seconds(PROGRAM, [3.0], about="1GB/0") == [1.0]
    assert agreement.agreed_seconds(OTHER, [4.0], about="1GB/0") == [4.0]


def test_other_budgets_are_agreed_upon_by_themselves(store) -> None:
    agreement.agreed_bytes(PROGRAM, 7, about="1GB/0")
    assert agreement.agreed_bytes(PROGRAM, 9, about="2GB/0") == 9


def test_the_last_rank_plans_for_itself(monkeypatch) -> None:
    """At the end of training the rank that has the store may be the first to leave."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port, is_master=False)
    monkeypatch.setattr(agreement, "process_group_store", lambda: client)
    assert agreement.agreed_bytes(PROGRAM, 7, about="1GB/0") == 7
    del server
    assert agreement.agreed_bytes(PROGRAM, 9, about="1GB/0") == 9
    assert agreement.agreed_seconds(PROGRAM, [2.0], about="1GB/1") == [2.0]


def test_one_process_agrees_with_itself(monkeypatch) -> None:
    monkeypatch.setattr(agreement, "process_group_store", lambda: None)
    assert agreement.agreed_seconds(PROGRAM, [1.0], about="1GB/0") == [1.0]
