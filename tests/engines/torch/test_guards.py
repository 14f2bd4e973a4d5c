"""Guards that are entered again and again: each time they do what a new one does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

import remat
from remat.engines.torch.guards import Guards
from remat.engines.torch.replay import unseen


def excluded() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradCPU)


def test_a_guard_counts_each_time_it_is_entered() -> None:
    guard = unseen.take()
    for _ in range(3):
        assert not excluded()
        with guard:
            assert excluded()
    assert not excluded()
    unseen.give(guard)


def test_a_guard_that_was_left_by_an_error_can_be_entered_again() -> None:
    guard = unseen.take()
    with pytest.raises(ValueError, match="inside"), guard:
        raise ValueError("inside")
    assert not excluded()
    with guard:
        assert excluded()
    unseen.give(guard)


def test_nobody_gets_a_guard_that_another_has() -> None:
    guards = Guards(torch._C._DisableTorchDispatch)
    at_once = 8
    together = Barrier(at_once)

    def take(_: int) -> object:
        guard = guards.take()
        together.wait(10)
        return guard

    with ThreadPoolExecutor(at_once) as pool:
        for _ in range(50):
            taken = list(pool.map(take, range(at_once)))
            assert len({id(guard) for guard in taken}) == at_once
            for guard in taken:
                guards.give(guard)


def test_a_replay_that_fails_leaves_nothing_excluded() -> None:
    x = torch.ones(4, requires_grad=True)
    y = remat.checkpoint(lambda x: torch.exp(x.sin()), x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()
    assert not excluded()
    again = remat.checkpoint(lambda x: torch.exp(x.sin()), x)
    again.sum().backward()
    plain = x.detach().requires_grad_()
    torch.exp(plain.sin()).sum().backward()
    assert torch.equal(x.grad, plain.grad)
