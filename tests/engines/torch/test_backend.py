"""Guards that are entered again and again: each time they do what a new one does."""

from __future__ import annotations

import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

import remat
from remat.engines.torch import backend
from remat.engines.torch.backend import (
    Guards,
    below_autograd,
    replaying,
    with_version_counters,
    without_dispatch_modes,
)


def excluded() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradCPU)


def test_a_guard_counts_each_time_it_is_entered() -> None:
    guard = replaying.take()
    for _ in range(3):
        assert not excluded()
        with guard:
            assert excluded()
    assert not excluded()
    replaying.give(guard)


@pytest.mark.parametrize("layer", ["Python", "PythonTLSSnapshot", "PreDispatch"])
def test_modes_are_off_each_time(layer) -> None:
    key = getattr(torch._C.DispatchKey, layer)
    guards = Guards(without_dispatch_modes)
    for _ in range(3):
        guard = guards.take()
        with guard:
            assert torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        assert not torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        guards.give(guard)


def test_versions_are_counted_each_time_inside_of_a_mode() -> None:
    guards, x = Guards(with_version_counters), torch.zeros(2)
    for count in (1, 2, 3):
        guard = guards.take()
        with below_autograd(), guard:
            x.add_(1)
        assert x._version == count
        guards.give(guard)


def test_a_guard_that_was_left_by_an_error_can_be_entered_again() -> None:
    guard = replaying.take()
    with pytest.raises(ValueError, match="inside"), guard:
        raise ValueError("inside")
    assert not excluded()
    with guard:
        assert excluded()
    replaying.give(guard)


def test_nobody_gets_a_guard_that_another_has() -> None:
    guards = Guards(without_dispatch_modes)
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


def test_a_version_of_pytorch_that_lacks_names_is_told_which(monkeypatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delattr(torch._C, "_AutoDispatchBelowADInplaceOrView")
    spec = importlib.util.find_spec("remat.engines.torch.backend")
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(remat.UnsupportedError) as raised:
        spec.loader.exec_module(module)
    message = str(raised.value)
    assert torch.__version__ in message
    assert "torch._C._current_graph_task_id (identifies the backward pass" in message
    assert "torch._C._AutoDispatchBelowADInplaceOrView (calls ops below autograd" in message
    assert "_push_on_torch_dispatch_stack" not in message


def test_no_other_file_uses_private_names_of_pytorch() -> None:
    package = Path(backend.__file__).parent
    used = {
        f"{path.relative_to(package)}: {match}"
        for path in package.rglob("*.py")
        if path.name != "backend.py"
        for match in re.findall(r"torch\._C\b[\w.]*|_execution_engine[\w.]*", path.read_text())
    }
    assert used == set()
