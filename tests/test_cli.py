import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import remat
from remat import cli
from remat.cli import demo, main, plan
from remat.schedules import Disk

PLAN = ["plan", "--steps", "100", "--checkpoints", "5"]
SIZED = ["plan", "--steps", "1000", "--state-bytes", "5"]
DEMO = ["demo", "--steps", "50", "--size", "32"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Commands that the tests start find remat from there, too.
    monkeypatch.setenv("PYTHONPATH", str(Path(remat.__file__).parents[1]))


def run(capfd, *arguments):
    """Run a command line; return exit code, stdout, stderr."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


# -- help --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["demo", "plan", "examples:", "--version"]),
        (["demo", "--help"], ["--steps", "--size", "--output", "default: 1500", "examples:"]),
        (["plan", "--help"], ["--memory", "--state-bytes", "--disk-write", "--plot", "examples:"]),
    ],
)
def test_help_tells_the_options_and_gives_examples(capfd, arguments, words):
    code, out, err = run(capfd, *arguments)
    assert (code, err) == (0, "")
    assert [word for word in words if word not in out] == []


def test_the_version(capfd):
    assert run(capfd, "--version") == (0, f"remat {remat.__version__}\n", "")


def test_no_command_shows_the_help(capfd):
    code, out, err = run(capfd)
    assert (code, out) == (2, "")
    assert "examples:" in err


def examples():
    texts = (cli._EXAMPLES, plan._PLAN_EXAMPLES)
    lines = [line.split("  ")[1] for text in texts for line in text.splitlines() if "  re" in line]
    return [line for line in lines if line.startswith("remat plan")]


@pytest.mark.parametrize("line", examples())
def test_the_examples_of_the_help_run(capfd, line):
    code, out, err = run(capfd, *line.split()[1:])
    assert (code, err) == (0, "")
    assert "revolve" in out


# -- plan --------------------------------------------------------------------------------------


def test_a_plan_is_a_table_and_its_reason(capfd):
    code, out, err = run(capfd, "plan", "--steps", 1000, "--checkpoints", 31)
    assert (code, err) == (0, "")
    assert "* revolve" in out
    assert "3,405" in out
    assert "32 states" in out
    assert "the fewest evaluations for slots that hold states" in " ".join(out.split())
    assert "with --tape-bytes there may be better" in " ".join(out.split())
    assert "tape_bytes" not in out


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["--checkpoints", "31"], {"slots": 31}),
        ([], {"slots": 17}),
        (["--checkpoints", "9", "--state-bytes", "1MB"], {"slots": 9, "state_bytes": 10**6}),
        (
            ["--memory", "64MB", "--state-bytes", "1MB", "--tape-bytes", "3MiB"],
            {"memory_bytes": "64MB", "state_bytes": "1MB", "tape_bytes": "3MiB"},
        ),
        (
            ["--checkpoints", "5", "--disk", "20", "--disk-write", "2", "--disk-read", "0.5"],
            {"slots": 5, "disk": Disk(20, 2.0, 0.5)},
        ),
    ],
)
def test_the_json_of_a_plan_is_what_plan_loop_says(capfd, arguments, asked):
    code, out, err = run(capfd, "plan", "--steps", 300, *arguments, "--json")
    assert (code, err) == (0, "")
    found, plan = json.loads(out), remat.plan_loop(300, **asked)
    reason = plan.reason.replace("tape_bytes", "--tape-bytes")
    assert (found["steps"], found["best"], found["reason"]) == (300, plan.name, reason)
    unit = "bytes" if "state_bytes" in asked else "states"
    assert found["peak_unit"] == unit
    assert found["options"] == [
        {
            "name": option.name,
            "evaluations": option.evaluations,
            "evaluations_per_step": option.evaluations / 300,
            "cost": option.cost,
            f"peak_{unit}": option.peak_bytes,
            "disk_slots": option.disk_slots,
        }
        for option in (plan.best, *plan.alternatives)
    ]


@pytest.mark.parametrize(("fraction", "room"), [("0.1", 300_400_000), ("1.0", 3_004_000_000)])
def test_memory_without_a_unit_is_a_fraction_of_the_plain_pass(capfd, fraction, room):
    # Plain, a pass of 1000 steps holds 1000 tapes of 3 MB, and a step runs with a state and a tape.
    sizes = "--state-bytes", "1MB", "--tape-bytes", "3MB", "--json"
    asked = run(capfd, "plan", "--steps", 1000, "--memory", fraction, *sizes)
    assert asked[0] == 0
    assert asked == run(capfd, "plan", "--steps", 1000, "--memory", room, *sizes)


@pytest.mark.parametrize(("steps", "words"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps")])
def test_steps_are_counted_in_english(capfd, steps, words):
    out = run(capfd, "plan", "--steps", steps)[1]
    assert out.splitlines()[0].strip() == f"Schedules for {words}"


def test_a_state_of_one_byte_is_still_a_byte(capfd):
    assert "6 B" in run(capfd, *PLAN, "--state-bytes", 1)[1]


def test_disk_is_planned_for_long_loops_as_well(capfd):
    long = "plan", "--steps", 100_000, "--checkpoints", 5, "--disk", 100, "--json"
    assert json.loads(run(capfd, *long)[1])["best"] == "staged"


def test_a_schedule_is_drawn_on_request(capfd, tmp_path):
    code, out, _ = run(capfd, *PLAN, "--plot", "schedule.png")
    assert code == 0
    assert "schedule.png" in out
    assert png_size(tmp_path / "schedule.png") > (800, 400)


def test_json_stays_json_with_a_plot(capfd, tmp_path):
    assert json.loads(run(capfd, *PLAN, "--plot", "s.png", "--json")[1])["steps"] == 100
    assert (tmp_path / "s.png").exists()


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], ["--steps"]),
        (["plan", "--steps", "many"], ["--steps", "'many'"]),
        (["plan", "--steps", "-1"], ["--steps", "'-1'"]),
        (["plan", "--steps", "9", "--checkpoints", "2.5"], ["--checkpoints", "'2.5'"]),
        ([*PLAN, "--memory", "1MB"], ["--memory", "--checkpoints"]),
        (["plan", "--steps", "9", "--memory", "lots"], ["--memory", "'lots'", "64MB"]),
        (["plan", "--steps", "9", "--memory", "1MB"], ["--memory 1000000", "--state-bytes"]),
        ([*PLAN, "--tape-bytes", "5"], ["--tape-bytes 5", "--state-bytes"]),
        ([*PLAN, "--state-bytes", "0"], ["--state-bytes must be at least 1, got 0"]),
        ([*PLAN, "--state-bytes", "0.5"], ["--state-bytes", "'0.5'", "whole number of bytes"]),
        ([*SIZED, "--memory", "0.1"], ["--memory 0.1", "fraction", "--tape-bytes"]),
        ([*SIZED, "--memory", "7.9"], ["--memory", "'7.9'", "(0, 1]", "64MB"]),
        ([*SIZED, "--memory", "0.0"], ["--memory", "'0.0'", "(0, 1]"]),
        ([*SIZED, "--memory", "1.2.3"], ["--memory", "'1.2.3'", "64MB"]),
        ([*SIZED, "--memory", "0.001", "--tape-bytes", "3"], ["8 B", "5 B", "raise --memory to"]),
        ([*PLAN, "--disk-read", "2"], ["--disk-read 2", "--disk"]),
        ([*PLAN, "--disk", "3", "--disk-write", "nan"], ["--disk-write", "'nan'"]),
        ([*PLAN, "--disk", "3", "--disk-read", "slow"], ["--disk-read", "'slow'"]),
        (
            ["plan", "--steps", "9", "--memory", "1KB", "--state-bytes", "2KB"],
            ["2.0 KB", "1.0 KB", "raise --memory to at least 2000"],
        ),
        ([*PLAN, "--plot", "schedule.doc"], ["'schedule.doc'", ".png"]),
        ([*PLAN, "--plot", "nowhere/s.png"], ["'nowhere/s.png'", "folder"]),
        (["plan", "--steps", "30000", "--plot", "s.png"], ["30000"]),
        ([*PLAN, "--pl", "s.png"], ["--pl"]),
        (["demo", "--steps", "0"], ["--steps", "'0'"]),
        (["demo", "--size", "1"], ["--size", "'1'"]),
        (["demo", "--checkpoints", "few"], ["--checkpoints", "'few'"]),
        (["demo", "--output", "memory.txt"], ["'memory.txt'", ".png"]),
        (["demo", "--output", "nowhere/m.png"], ["'nowhere/m.png'", "folder"]),
        (["dmo"], ["dmo"]),
    ],
)
def test_bad_input_is_named_with_exit_code_2(capfd, tmp_path, arguments, words):
    code, out, err = run(capfd, *arguments)
    assert (code, out) == (2, "")
    assert [word for word in words if word not in err] == []
    assert "Traceback" not in err
    assert not re.search(r"[a-z]_[a-z]", err)  # options, no names of Python
    assert not list(tmp_path.iterdir())


def test_a_plot_without_matplotlib_is_an_error(capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(capfd, *PLAN, "--plot", "s.png")
    assert (code, out) == (2, "")
    assert "pip install matplotlib" in err


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_is_read_only_is_named(capfd, tmp_path):
    tmp_path.chmod(0o500)
    code, _, err = run(capfd, *PLAN, "--plot", "s.png")
    assert code == 2
    assert "s.png" in err


def test_a_reader_that_leaves_early_is_no_error():
    program = "import sys; from remat.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, *PLAN, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 1


def test_an_interrupt_is_exit_code_130(capfd, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_simulation_demo", interrupted)
    assert run(capfd, "demo") == (130, "", "remat: interrupted\n")


# -- demo --------------------------------------------------------------------------------------


def test_a_demo_from_the_shell(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "remat", *DEMO],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    for words in ("peak memory", "time", "gradient difference", "the same gradient"):
        assert words in done.stdout
    for words in ("plain loop", "checkpointed loop", "forward", "backward"):
        assert words in done.stderr
    assert png_size(tmp_path / "remat-demo.png") > (800, 400)
    assert [path.name for path in tmp_path.iterdir()] == ["remat-demo.png"]


def test_the_json_of_a_demo_agrees_with_itself(capfd, tmp_path):
    code, out, _ = run(capfd, *DEMO, "--json", "--checkpoints", 6, "--output", "memory.png")
    found = json.loads(out)
    assert code == 0
    assert (found["steps"], found["size"], found["checkpoints"]) == (50, 32, 6)
    plain, checkpointed = found["plain"], found["checkpointed"]
    assert found["memory_ratio"] == checkpointed["peak_bytes"] / plain["peak_bytes"]
    assert found["time_ratio"] == checkpointed["seconds"] / plain["seconds"]
    assert 0 <= found["gradient_difference"] <= 1e-13 * found["gradient_largest"]
    assert found["plot"] == "memory.png"
    assert png_size(tmp_path / "memory.png") > (800, 400)


def test_a_demo_without_matplotlib_tells_how_to_get_the_picture(capfd, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = run(capfd, *DEMO)
    assert code == 0
    assert "peak memory" in out
    assert "pip install matplotlib" in out
    assert not list(tmp_path.iterdir())


def test_a_demo_without_a_picture_on_request(capfd, tmp_path):
    code, out, _ = run(capfd, *DEMO, "--no-plot", "--json")
    assert code == 0
    assert json.loads(out)["plot"] is None
    assert not list(tmp_path.iterdir())
