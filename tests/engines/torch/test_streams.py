"""Streams, with a device that writes down what it is told: the CPU stands for an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import remat
from remat.engines.torch import streams
from remat.engines.torch.budget.manager import TorchBudget, run_within
from remat.engines.torch.recording import recorder
from remat.plans import Plan

from .oracles import planning

CPU = torch.device("cpu")


class Stream:
    device = CPU

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        return f"{self.name}'s event"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


class Accelerator:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.home, self.side = Stream("home", self.log), Stream("side", self.log)
        self.stream = self.home

    def current_accelerator(self) -> torch.device:
        return CPU

    def current_stream(self, device: object = None) -> Stream:
        return self.stream

    def set_stream(self, stream: Stream) -> None:
        self.stream = stream
        self.log.append(f"on {stream.name}")

    def current_device_index(self) -> int:
        return 0

    def set_device_index(self, index: int) -> None: ...

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        outer, self.stream = self.stream, stream
        yield
        self.stream = outer


@pytest.fixture
def device(monkeypatch) -> Accelerator:
    fake = Accelerator()
    monkeypatch.setattr(streams, "accelerator", fake)
    monkeypatch.setattr(recorder, "streams_in_use", streams.Streams)
    record = lambda _, stream: fake.log.append(f"kept for {stream.name}")  # noqa: E731
    monkeypatch.setattr(Tensor, "record_stream", record)
    return fake


def two_branches(device: Accelerator, x: Tensor) -> tuple[Tensor, Tensor]:
    a = (x * 2.0).sin()
    with device.on(device.side):
        b = (x * 3.0).sin()
    return a, b


def test_an_op_is_replayed_on_its_stream(device) -> None:
    """`x * 3` ran on the side: it runs there again, in order with the stream of the replay."""
    x = torch.linspace(0.0, 1.0, 5).requires_grad_()
    a, b = remat.checkpoint(lambda x: two_branches(device, x), x)
    assert device.log == []
    a.backward(torch.ones_like(a))
    assert device.log == [
        "home waits for side",  # whatever the region did there
        "side waits for home",
        "on side",
        "on home",
        "home waits for side",
        "kept for home",
    ]
    device.log.clear()
    with device.on(device.side):
        b.backward(torch.ones_like(b))
    assert torch.equal(x.grad, 2 * torch.cos(2 * x.detach()) + 3 * torch.cos(3 * x.detach()))


def test_who_takes_a_result_on_another_stream_waits_for_it(device) -> None:
    x = torch.linspace(0.0, 1.0, 5).requires_grad_()
    a, b = remat.checkpoint(lambda x: two_branches(device, x), x)

    def on_the_side(gradient: Tensor) -> None:
        device.log.clear()
        device.stream = device.side  # as autograd does for what ran there

    def at_home(gradient: Tensor) -> None:
        device.stream = device.home

    b.register_hook(on_the_side)
    a.register_hook(at_home)
    (a * 1.0).sum().backward(retain_graph=True)
    x.grad = None
    torch.autograd.backward([a, b], [torch.ones_like(a), torch.ones_like(b)])
    orders = {"home waits for side's event", "side waits for home's event"}
    assert orders.intersection(device.log)  # autograd chooses which of them asks first
    assert torch.equal(x.grad, 2 * torch.cos(2 * x.detach()) + 3 * torch.cos(3 * x.detach()))


def test_the_stages_of_a_budget_know_the_streams(device) -> None:
    x = torch.linspace(0.0, 1.0, 5).requires_grad_()
    budget = TorchBudget("1GB", planning(lambda trace, budget: Plan(frozenset())))
    for _ in range(2):
        a, b = run_within(budget, lambda: two_branches(device, x), ())
        device.log.clear()
        a.backward(torch.ones_like(a))
        device.stream = device.side
        b.backward(torch.ones_like(b))
        device.stream = device.home
    assert "home waits for side" in device.log


def test_one_stream_needs_no_events(device) -> None:
    x = torch.linspace(0.0, 1.0, 5).requires_grad_()
    with device.on(device.side):
        remat.checkpoint(lambda x: (x * 2.0).sin().sin(), x).sum().backward()
    assert device.log == []


def test_no_accelerator_no_streams() -> None:
    assert streams.streams_in_use() is None
