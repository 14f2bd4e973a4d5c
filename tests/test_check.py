"""`remat check`: what it finds on the CPU, and that it can fail."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import remat
from remat.check import cases, programs, run_checks
from remat.cli import main

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def keep_only(monkeypatch, **checks) -> None:
    monkeypatch.setattr("remat.check.cases.CHECKS", checks)


def never(device, *, quick):
    raise cases.Failed("result [0] differs")


def breaks(device, *, quick):
    raise RuntimeError("no kernel image")


def holds(device, *, quick):
    return f"{device}, {quick}"


def test_all_holds_on_the_cpu(capsys) -> None:
    assert main(["check", "--device", "cpu", "--quick"]) == 0
    out = capsys.readouterr().out
    line = out.splitlines()[-1]
    assert f"remat {remat.__version__}, torch {torch.__version__}" in line
    for name in cases.CHECKS:
        expected = "skipped" if name in ("streams", "CUDA graphs") else "ok"
        assert f"{name}: {expected}" in line
    assert "checkpointed (" in out


@pytest.mark.parametrize(("check", "text"), [(never, "result [0]"), (breaks, "no kernel image")])
def test_the_exit_code_and_the_line_tell_what_failed(capsys, monkeypatch, check, text) -> None:
    keep_only(monkeypatch, first=holds, second=check)
    assert main(["check", "--device", "cpu", "--quick"]) == 1
    out = capsys.readouterr().out
    assert text in out.splitlines()[-1]
    assert "first: ok, second: FAILED" in out


def test_the_usual_device_is_there(monkeypatch) -> None:
    keep_only(monkeypatch, check=holds)
    report = run_checks()
    assert report.all_held
    assert report.checks[0].detail.endswith("False")


@pytest.mark.parametrize("device", ["xpu", "gpu", "cuda:3"])
def test_a_device_that_is_not_there(capsys, device) -> None:
    if getattr(torch, device.partition(":")[0], cases).__dict__.get("is_available", bool)():
        pytest.skip("it is there")
    assert main(["check", "--device", device]) == 2
    assert device in capsys.readouterr().err


def nearly(function, *args):
    """A function whose gradients are wrong in the last bits."""
    return [tensor * (1 + 1e-6) for tensor in function(*args)]


def forgets_random_numbers(function, *args):
    out = function(*args)
    torch.rand(1)
    return out


@pytest.mark.parametrize("api", [nearly, forgets_random_numbers])
def test_a_wrong_engine_is_found(monkeypatch, api) -> None:
    monkeypatch.setattr(programs, "APIS", (api,))
    with pytest.raises(cases.Failed, match="differ"):
        cases.random_programs(CPU, quick=True)


def test_programs_have_regions_and_random_numbers() -> None:
    regions, drawn = [], []

    def counting(function, tensors):
        regions.append(function)
        before = torch.get_rng_state()
        out = function(tensors)
        drawn.append(not torch.equal(before, torch.get_rng_state()))
        return out

    for seed in range(20):
        try:
            programs.result_of(seed, CPU, counting)
        except RuntimeError:
            continue
    assert len(regions) > 20
    assert any(drawn)


def test_no_saving_is_found(monkeypatch) -> None:
    monkeypatch.setattr("remat.apply", lambda model: model)
    with pytest.raises(cases.Failed, match="more than 80%"):
        cases.peak_memory(CPU, quick=True)


def test_the_peak_is_that_of_the_allocator() -> None:
    def two_arrays_at_once() -> None:
        for _ in range(3):
            a = torch.empty(1 << 20, dtype=torch.uint8)
            b = torch.empty(1 << 19, dtype=torch.uint8)
            del a, b

    assert cases.peak_bytes(two_arrays_at_once, CPU) == 3 << 19


def test_a_region_refuses_a_cuda_graph(monkeypatch) -> None:
    monkeypatch.setattr("remat.engines.torch.segment.is_capturing", lambda: True)
    with pytest.raises(remat.UnsupportedError, match="CUDA graph"):
        remat.checkpoint(torch.sin, torch.ones(3, requires_grad=True))


def test_importing_the_command_line_loads_no_torch() -> None:
    check = "import sys, remat.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
