"""Integrations whose package is missing or too old; nothing of them at `import remat`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import remat
from remat.integrations import MissingPackageError, require

NAMES = ["transformers", "diffusers", "peft", "accelerate", "lightning", "timm"]
# As if nothing of them was installed, whatever is.
WITHOUT = f"""\
import importlib, json, sys
for name in {NAMES!r} + ["pytorch_lightning"]:
    sys.modules[name] = None
said = {{}}
for name in {NAMES!r}:
    try:
        importlib.import_module(f"remat.integrations.{{name}}")
    except ImportError as error:
        is_ours = isinstance(error, sys.modules["remat"].RematError)
        said[name] = [type(error).__name__, is_ours, str(error)]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[str, bool, str]]:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_named(name, said) -> None:
    kind, is_ours, text = said[name]
    assert (kind, is_ours) == ("MissingPackageError", True)
    assert 'pip install "' in text
    # (what PEFT is used with is asked for first)
    wanted = "transformers" if name == "peft" else name
    assert f"remat.integrations.{wanted} needs {wanted}" in text


def test_a_package_that_is_too_old() -> None:
    with pytest.raises(
        MissingPackageError, match=r'needs rich 999.0 or newer, found 1.*"rich>=999'
    ):
        require("rich", "999.0")
    assert require("rich", "13.0").__name__ == "rich"


def test_what_a_package_needs_itself_is_named(tmp_path, monkeypatch) -> None:
    """As timm without torchvision: to install timm again would change nothing."""
    (tmp_path / "needs_more.py").write_text("import not_there.inside")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackageError, match=r"'not_there'; pip install not_there$"):
        require("needs_more", "1.0")


def test_the_error_is_one_of_import_and_of_remat() -> None:
    assert issubclass(MissingPackageError, ImportError)
    assert issubclass(MissingPackageError, remat.UnsupportedError)


def test_import_remat_loads_no_integration() -> None:
    code = (
        "import sys, remat; sys.exit(any(n.startswith('remat.integrations') for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# timm needs torchvision to be imported; this has its interface and nothing else.
MODEL_OF_TIMM = """\
import torch
from torch import nn

class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.GELU())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.grad_checkpointing = True
    def set_grad_checkpointing(self, enable=True):
        self.grad_checkpointing = enable
    def forward(self, x):
        return self.blocks(x)
"""
PROGRAM_WITH_TIMM = """\
import torch, timm, remat
from remat.integrations.timm import disable, enable
model = timm.Model()
assert enable(model, every=2) is model
assert (remat.applied(model), model.grad_checkpointing) == (["blocks.0"], False)
model(torch.ones(2, 4)).sum().backward()
assert remat.applied(disable(model)) == []
try:
    enable(torch.nn.Linear(2, 2))
except remat.UnsupportedError as error:
    print(error)
"""


def test_timm(tmp_path, monkeypatch) -> None:
    for folder in ("timm", "timm-1.0.0.dist-info"):
        (tmp_path / folder).mkdir()
    (tmp_path / "timm/__init__.py").write_text(MODEL_OF_TIMM)
    metadata = "Metadata-Version: 2.1\nName: timm\nVersion: 1.0.0\n"
    (tmp_path / "timm-1.0.0.dist-info/METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM_WITH_TIMM], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("Linear is no model of timm"), done.stderr
