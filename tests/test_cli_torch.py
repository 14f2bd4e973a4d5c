"""`remat demo --model` and `remat frontier`: what they print is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import remat
from remat import cli
from remat.demo import training
from remat.reports.memory import MeasuredPass

from .test_cli import _in_an_empty_folder, png_size, run  # noqa: F401  (a fixture for all)

torch = pytest.importorskip("torch")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "budget"), [("gpt", 0.5), ("resnet", 0.5)])
def test_a_network_is_trained_within_its_budget(capfd, model, budget, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, out, err = run(capfd, "demo", "--model", model, "--budget", budget, "--json")
    assert code == 0, err
    found = json.loads(out)
    plain, budgeted = found["plain"], found["budgeted"]
    assert found["budget_bytes"] == int(budget * plain["peak_bytes"])
    assert 0.5 * found["budget_bytes"] < budgeted["peak_bytes"] <= 1.05 * found["budget_bytes"]
    assert found["memory_ratio"] == budgeted["peak_bytes"] / plain["peak_bytes"]
    assert found["time_ratio"] == budgeted["seconds"] / plain["seconds"]
    assert found["loss_difference"] == 0
    assert f"{model}, plain" in err
    assert min(png_size(Path(found["plot"]))) > 300


def small_network():
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(32, 32), torch.nn.GELU())]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(0), torch.nn.Linear(32 * 256, 1)), (
        torch.randn(256, 32)
    )


def test_a_small_network_is_trained_within_its_budget(monkeypatch):
    """As the test above, in this process: peaks are those that remat counts."""
    plain_peak = remat.memory_report(*small_network()).peak_bytes

    def here(module, name, settings, *_, **__):
        report = training.train(**settings)
        peak = settings["memory_budget"] or plain_peak
        return MeasuredPass(name, report["seconds"], peak), report

    monkeypatch.setattr(training, "measure_apart", here)
    monkeypatch.setattr(training, "_gpt", small_network)
    found = training.run_training_demo("gpt", 0.6, 4)
    assert found.facts["budget_bytes"] == found.budget == int(0.6 * plain_peak)
    assert found.facts["loss_difference"] == 0
    assert found.facts["memory_ratio"] == pytest.approx(0.6, rel=0.01)


def test_the_table_of_a_training(capfd, monkeypatch):
    def fresh(module, name, settings, *_, **__):
        if settings["memory_budget"] is None:
            return MeasuredPass(name, 1.0, 1000), {"losses": [2.0, 1.0]}
        return MeasuredPass(name, 1.25, 390), {"losses": [2.0, 0.75]}

    monkeypatch.setattr(training, "measure_apart", fresh)
    assert cli.main(["demo", "--model", "gpt", "--budget", "0.4", "--no-plot"]) == 0
    out = capfd.readouterr().out
    for word in ("1.0 KB", "390 B", "39.0%", "400 B", "97.5% used", "1.25 x", "0.25", "other"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "vgg"], ["--model", "vgg", "gpt", "resnet"]),
        (["--model", "gpt", "--budget", "5MB"], ["--budget is a share", "0.4", "5000000"]),
        (["--model", "gpt", "--budget", "1.5"], ["--budget", "1.5"]),
        (["--model", "gpt", "--budget", "-1"], ["--budget"]),
        (["--budget", "0.5"], ["--budget 0.5 needs --model"]),
        (["--model", "gpt", "--output", "x.bmp"], ["x.bmp", ".png"]),
    ],
)
def test_bad_options_of_a_training_are_named(capfd, arguments, words):
    code, out, err = run(capfd, "demo", *arguments)
    assert (code, out) == (2, "")
    assert [word for word in words if word not in err] == []


# -- remat frontier --------------------------------------------------------------------------------

MODELS = """
import torch
from torch import nn

layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())]
model = nn.Sequential(*layers)
number = 7

def make_model():
    return model, torch.randn(64, 16)

class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model

    def forward(self, x, y):
        return self.inner(x * y)

def make_pair():
    return TwoInputs(), (torch.randn(64, 16), torch.randn(64, 16))

def make_by_name():
    return TwoInputs(), {"y": torch.randn(64, 16), "x": torch.randn(64, 16)}

def only_a_model():
    return model

def no_model():
    return 3, torch.ones(2)

def no_gradient():
    return (lambda x: x * 2), torch.ones(4)

def broken():
    raise OSError("weights.bin is missing")
"""


@pytest.fixture
def project(tmp_path):
    """A module with models in the current folder; each test has a name of its own to import."""
    name = f"project_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    return name


@pytest.mark.parametrize("function", ["make_model", "make_pair", "make_by_name"])
def test_the_frontier_of_a_model_as_json(capfd, project, function):
    code, out, err = run(capfd, "frontier", f"{project}:{function}", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    peaks = [peak for peak, _ in found["points"]]
    seconds = [extra for _, extra in found["points"]]
    assert len(peaks) > 2
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0
    assert peaks[-1] == found["plain_peak_bytes"]
    assert found["plot"] is None


def test_the_frontier_of_a_model_as_a_table_and_a_picture(capfd, project, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "curve.png"
    code, out, err = run(capfd, "frontier", f"{project}:make_model", "--plot", target)
    assert (code, err) == (0, "")
    assert str(target) in out
    assert "KB" in out
    assert min(png_size(target)) > 300


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module:make", ["no_such_module cannot be imported", "are looked for in"]),
        ("{project}:nothing", ["has no nothing", "name a function"]),
        ("{project}:number", ["is no function that makes a model", "got int"]),
        ("{project}:only_a_model", ["is to return (model, inputs), got Sequential"]),
        ("{project}:no_model", ["is to return (model, inputs), got tuple"]),
        ("{project}:no_gradient", ["no gradient", "requires grad"]),
        ("{project}:broken", ["weights.bin is missing"]),
        ("{project}", ["module:function, such as"]),
        (":make_model", ["module:function, such as", "got :make_model"]),
    ],
)
def test_what_is_wrong_with_a_target_is_said(capfd, project, target, words):
    code, out, err = run(capfd, "frontier", target.format(project=project))
    assert (code, out) == (2, "")
    assert [word for word in words if word not in err] == []


def test_a_picture_that_cannot_be_written_is_named_before_anything_runs(capfd, project):
    code, out, err = run(capfd, "frontier", f"{project}:broken", "--plot", "curve.bmp")
    assert (code, out) == (2, "")
    assert "curve.bmp" in err
    assert "weights.bin" not in err
