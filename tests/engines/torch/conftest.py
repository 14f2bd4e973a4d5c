"""One thread: small tensors gain nothing from more, and the machine is shared."""

import threading
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from remat.engines.torch.adapter import TORCH

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_is_left_switched_on():
    """After any test, no mode records ops, no hook sees what autograd saves, gradients are on."""
    yield
    modes = _get_current_dispatch_mode_stack()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    for _ in modes:
        _pop_mode()  # or all that follow would fail as well
    if hooks is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert (modes, hooks) == ([], None)
    assert torch.is_grad_enabled()


@pytest.fixture
def another_thread():
    """Let there be another thread, as there is in most programs: draws are then checked."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.fixture
def replayed(monkeypatch):
    """Count the ops that are run again, by name."""
    counts: Counter[str] = Counter()
    run = TORCH.run

    def counted(op, *rest):
        counts[str(op.traits.func).split(".")[1]] += 1
        return run(op, *rest)

    monkeypatch.setattr(TORCH, "run", counted)
    return counts
