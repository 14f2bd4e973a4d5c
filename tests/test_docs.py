"""Every Python block of the README and the docs runs and prints what its comments say."""

import importlib
import json
import linecache
import pkgutil
import re
import runpy
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "docs" / "benchmarks.md"
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - {GENERATED})]
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


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


# -- what is generated -----------------------------------------------------------------------------


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.tables")


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.pictures")


def test_the_page_of_benchmarks_is_what_the_results_say(tables: ModuleType) -> None:
    """If it differs, run `python -m benchmarks.tables`."""
    assert GENERATED.read_text() == tables.benchmarks_page()


def test_the_table_of_the_readme_is_what_the_results_say(tables: ModuleType) -> None:
    """If it differs, run `python -m benchmarks.tables`."""
    readme = (ROOT / "README.md").read_text()
    assert readme == tables.readme_with_table(readme)
    table = readme.partition(tables.BEGIN)[2].partition(tables.END)[0]
    assert len(table.strip().splitlines()) - 2 <= 10


def test_every_measured_value_is_on_the_page(tables: ModuleType) -> None:
    page = GENERATED.read_text()
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        for result in json.loads(path.read_text())["results"]:
            assert f"| {result['name']} |" in page


def test_a_readme_without_a_place_for_the_table_is_an_error(tables: ModuleType) -> None:
    with pytest.raises(ValueError, match="no lines"):
        tables.readme_with_table("# remat")


def test_the_picture_is_what_the_trace_gives(pictures: ModuleType) -> None:
    """If it differs, run `python -m benchmarks.pictures`."""
    assert pictures.PICTURE.read_text() == pictures.memory_picture()
    assert pictures.PICTURE.stat().st_size < 60_000


# -- links and folders -----------------------------------------------------------------------------


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", [*PAGES, GENERATED], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


# -- CONTRIBUTING ----------------------------------------------------------------------------------

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
LISTED = [ROOT / path for path in re.findall(r"^\| `(src/\S+)`", CONTRIBUTING, flags=re.MULTILINE)]


def test_the_folders_that_are_listed_are_all_there_are() -> None:
    found = {path.parent.name for path in (ROOT / "src" / "remat").glob("*/__init__.py")}
    assert all(path.exists() for path in LISTED)
    assert {path.name for path in LISTED if path.is_dir()} == found


def test_the_layers_of_the_engine_are_those_that_are_checked() -> None:
    """The drawing has them from top to bottom, as the contract of import-linter does."""
    drawing = CONTRIBUTING.partition("## The PyTorch engine")[2].split("```")[1]
    drawn = re.findall(r"^   (\S+)  ", drawing, flags=re.MULTILINE)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c["type"] == "layers")
    assert drawn == [part.strip() for layer in layers for part in layer.split(":")]


def test_the_steps_are_ten_and_all_names_exist() -> None:
    for title in ("### One `checkpoint(fn, x)` call", "### One step under a budget"):
        steps = CONTRIBUTING.partition(title)[2].partition("\n#")[0]
        assert len(re.findall(r"^\d+\. ", steps, flags=re.MULTILINE)) == 10
    names = re.findall(r"`(remat\.(?:\w+\.)*\w+)`", CONTRIBUTING)
    assert len(names) > 30
    for name in names:
        assert pkgutil.resolve_name(name) is not None, name


def test_files_that_are_named_exist() -> None:
    for path in re.findall(r"`((?:\w+/)+[\w.]*)`", CONTRIBUTING):
        places = [ROOT / path, ROOT / "src" / "remat" / path, ROOT / "src" / "remat/engines" / path]
        assert any(place.exists() for place in places), path


def test_the_glossary_is_short() -> None:
    words = CONTRIBUTING.partition("### Words")[2].partition("\n#")[0]
    assert len(re.findall(r"^\| \w", words, flags=re.MULTILINE)) <= 16  # with the heading
