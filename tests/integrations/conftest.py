"""With the real packages, if they are all there: `make test-integrations` installs them."""

import importlib.util
import os

import pytest
import torch

PACKAGES = ["transformers", "diffusers", "peft", "accelerate", "lightning"]
if any(importlib.util.find_spec(package) is None for package in PACKAGES):
    collect_ignore_glob = ["test_*.py"]

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let these libraries warn of whatever they like, except for what remat warns of."""
    for item in items:
        if "tests/integrations" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("error::remat.RematWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)
