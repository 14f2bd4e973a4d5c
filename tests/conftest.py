"""What holds for all tests."""

import os
import signal

import pytest
from hypothesis import settings

# How long one example takes says nothing on a shared machine.
settings.register_profile("remat", parent=settings.default, deadline=None)
settings.load_profile("remat")

# On some virtual machines PyTorch itself dies of an illegal instruction: oneDNN believes that there
# is AMX. It is read when oneDNN is first used, so this is early enough. (The Makefile has it, too.)
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


@pytest.fixture
def interruptible():
    """Let SIGINT interrupt this process and those that it starts, for a test.

    A run that was started with `nohup` or `&` ignores it, and what it starts inherits that. A
    handler is not inherited: a new process begins with the default.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
