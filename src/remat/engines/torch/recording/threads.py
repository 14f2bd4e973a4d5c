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
    on_top = bool(outer.opened) and are_hooks_on_top(outer.pack)
    try:
        _threads.recorder = Recorder()
        if on_top:
            pop_saved_tensor_hooks()
        with mode_disabled(outer) if outer.opened else nullcontext():
            yield
        _continue(outer, on_top=on_top)
    except BaseException:
        _continue(outer, on_top=on_top)
        raise


def _continue(outer: Recorder, *, on_top: bool) -> None:
    """Let a recorder go on; it can be called again after an interrupt (see `stacks`)."""
    _threads.recorder = outer
    if on_top and not are_hooks_on_top(outer.pack):
        push_saved_tensor_hooks(outer.pack, unpack)


def _before_direct_write(tensor: Tensor) -> None:
    recorder = recorder_of_this_thread()
    if recorder.opened:
        recorder.before_direct_write(tensor)


def _after_optimizer_step() -> None:
    recorder_of_this_thread().end_iteration()


uncounted_writes.on_direct_write.append(_before_direct_write)
uncounted_writes.on_optimizer_step.append(_after_optimizer_step)
