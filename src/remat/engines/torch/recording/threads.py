"""The recorder of each thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import Tensor

from ..backend import pop_saved_tensor_hooks, push_saved_tensor_hooks
from ..memory import uncounted_writes
from ..region import unpack
from .recorder import Recorder
from .stacks import are_hooks_on_top, mode_disabled

__all__ = ["recorder_of_this_thread", "without_recorder"]

_threads = threading.local()


def recorder_of_this_thread() -> Recorder:
    """Return the recorder of this thread. It is active if a region is open."""
    try:
        recorder: Recorder = _threads.recorder
    except AttributeError:
        recorder = _threads.recorder = Recorder()
    return recorder


@contextmanager
def without_recorder() -> Iterator[None]:
    """Run code that the open regions of this thread do not record. Regions inside are independent.

    A loop is run so: for a region around it, its outputs are external inputs.
    """
    outer = recorder_of_this_thread()
    if not outer.opened and not outer.idle:
        yield
        return
    _threads.recorder = Recorder()
    on_top = bool(outer.opened) and are_hooks_on_top(outer.pack)
    if on_top:
        pop_saved_tensor_hooks()
    try:
        with mode_disabled(outer) if outer.opened else nullcontext():
            yield
    finally:
        if on_top:
            push_saved_tensor_hooks(outer.pack, unpack)
        _threads.recorder = outer


def _before_direct_write(tensor: Tensor) -> None:
    recorder = recorder_of_this_thread()
    if recorder.opened:
        recorder.before_direct_write(tensor)


def _after_optimizer_step() -> None:
    recorder_of_this_thread().end_iteration()


uncounted_writes.on_direct_write.append(_before_direct_write)
uncounted_writes.on_optimizer_step.append(_after_optimizer_step)
