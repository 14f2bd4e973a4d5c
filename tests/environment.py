"""Makes an environment with the lowest or the newest versions that remat says it works with.

    python -m tests.environment lowest .venv-lowest
    python -m tests.environment newest .venv-newest
    python -m tests.environment newest /tmp/t214 --torch 2.14.1

`lowest` turns the lower bounds of what users install into pins. `newest` takes the newest PyTorch
of the registry. Everything else is as in constraints.txt.

PyTorch's wheels for Linux ask for some gigabytes of CUDA libraries. Here they are installed one by
one until `import torch` works, which takes those that it is linked with and no others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = ("hypothesis", "pytest", "pytest-xdist", "scipy")  # what running the tests needs of `dev`
BEYOND_IMPORT = re.compile(r"nvidia-|cuda-|triton|pytorch-triton")  # large, or of no use here
LIBRARY = re.compile(r"lib(\w+)\.so[.\d]*: cannot open shared object file")
PACKAGES = {"cudart": "runtime"}  # libraries that are not named as their package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", choices=["lowest", "newest"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--torch", help="this version of PyTorch")
    options = parser.parse_args()
    needs = requirements()
    pins = lowest(needs) if options.versions == "lowest" else constrained(needs)
    torch = pins.pop("torch", "torch")
    subprocess.run([sys.executable, "-m", "venv", options.path], check=True)
    python = options.path / "bin" / "python"
    install_torch(python, f"torch=={options.torch}" if options.torch else torch, pins)
    pip(python, "--no-deps", "--editable", str(ROOT))


def requirements() -> dict[str, str]:
    """Return what running the tests needs: the version bounds of each package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tools = [each for each in extras["dev"] if name_of(each) in TOOLS]
    return {
        name_of(each): each
        for each in (*project["dependencies"], *extras["plot"], *extras["torch"], *tools)
    }


def lowest(needs: dict[str, str]) -> dict[str, str]:
    """Return the lower bounds as pins; what only tests need is as in constraints.txt."""
    pins = constrained(needs)
    return {
        name: pins[name] if name in TOOLS else needed.replace(">=", "==")
        for name, needed in needs.items()
    }


def constrained(needs: dict[str, str]) -> dict[str, str]:
    """Return the pins of constraints.txt, without that of PyTorch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {name_of(line): line for line in lines if line and line[0] != "#"}
    return {name: pins[name] for name in needs if name != "torch"}


def install_torch(python: Path, torch: str, pins: dict[str, str]) -> None:
    """Install PyTorch and the pins, then the libraries that importing PyTorch misses."""
    pip(python, "--no-deps", torch)
    asked = requires(python, "torch")
    small = [each for name, each in asked.items() if not BEYOND_IMPORT.match(name)]
    pip(python, *pins.values(), *[each for each in small if name_of(each) not in pins])
    if "cuda-toolkit" in asked:  # it only names packages, by version
        pip(python, "--no-deps", asked["cuda-toolkit"])
        asked |= requires(python, "cuda-toolkit")
    libraries = {short(name): each for name, each in asked.items() if name.startswith("nvidia-")}
    while (missing := missing_library(python)) is not None:
        matching = [name for name in libraries if missing.startswith(name)]
        if not matching:
            raise SystemExit(f"import torch misses lib{missing}, which none of {asked} is named as")
        pip(python, "--no-deps", libraries.pop(max(matching, key=len)))


def missing_library(python: Path) -> str | None:
    """Return the name of a library that importing PyTorch does not find; None if it works."""
    command = [python, "-c", "import torch"]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode == 0:
        return None
    found = LIBRARY.search(done.stderr)
    if found is None:
        raise SystemExit(done.stderr)
    name = found[1].lower()
    return PACKAGES.get(name, name)


def requires(python: Path, package: str) -> dict[str, str]:
    """Return what an installed package asks for: name -> name and version bounds."""
    code = f"import json, importlib.metadata as m; print(json.dumps(m.requires({package!r}) or []))"
    lines = json.loads(subprocess.check_output([python, "-c", code]))
    plain = [line for line in lines if package != "torch" or "extra ==" not in line]
    return {name_of(each): re.sub(r"\[.*?\]|;.*", "", each).strip() for each in plain}


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def short(name: str) -> str:
    """`nvidia-cuda-nvrtc-cu12` -> `nvrtc`: as the library is named."""
    return re.sub(r"^nvidia-(cuda-)?|-cu\d+$", "", name)


def pip(python: Path, *arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True, env=environment)


if __name__ == "__main__":
    main()
