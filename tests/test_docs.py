"""Every Python block of the README and the docs runs and prints what its comments say."""

import linecache
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def _promised(code: str) -> list[str]:
    """What stands behind a print (`# …`), or below one (`# -> …`)."""
    return [
        a or b for a, b in re.findall(r"print\(.*\)  # (.*)$|^# -> (.*)$", code, flags=re.MULTILINE)
    ]


def _findable(code: str, name: str) -> str:
    """Let the source of functions be found, as that of files is."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    return name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_print_what_they_say(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks
    names: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks):
        exec(compile(block, _findable(block, f"<{page.name} {number}>"), "exec"), names)
        assert capsys.readouterr().out.splitlines() == _promised(block)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out
