"""Pictures: memory over time, and a schedule as the path that it takes over the steps.

matplotlib is loaded when a picture is drawn, and only as objects: no backend is chosen and no
global state is touched, so it can be used beside whatever a program draws itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, assert_never

from ..errors import UnsupportedError
from ..schedules.actions import Action, Advance, Backward, Drop, Restore, Save, Tape, Tier
from ..sizes import format_bytes, shown
from .memory import MeasuredPass

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "can_plot",
    "check_plot_path",
    "plot_budget",
    "plot_frontier",
    "plot_memory",
    "plot_profile",
    "plot_schedule",
    "schedule_paths",
]

_FORMATS = (".png", ".svg", ".pdf")
_MOST_STEPS = 20_000  # beyond, lines are far thinner than pixels, and there are millions of them
_MEMORY_COLOURS = ("#c44e52", "#4c72b0", "#55a868", "#8172b3")
_BLUE, _RED, _GREY, _BROWN, _GREEN = "#4c72b0", "#c44e52", "#8c8c8c", "#937860", "#55a868"


def can_plot() -> bool:
    """Say whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_plot_path(path: str | Path) -> Path:
    """Return where a picture goes, or say why it cannot: better now than after a long run."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be text or a path, got {shown(path)}")
    path = Path(path)
    if path.suffix.lower() not in _FORMATS:
        raise ValueError(f"path must end in one of {', '.join(_FORMATS)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"the folder of {str(path)!r} does not exist; create it first")
    return path


# -- memory over time --------------------------------------------------------------------------


def plot_memory(
    passes: Sequence[MeasuredPass], path: str | Path, *, title: str = "", budget: int | None = None
) -> Path:
    """Draw the memory of each pass over its time, with the budget as a line if there is one."""
    figure, axes = _figure(title)
    for number, one in enumerate(passes):
        label = f"{one.name}: {format_bytes(one.peak_bytes)}, {one.seconds:.1f} s"
        _fill(axes, number, one.curve_seconds, one.curve_bytes, label)
    axes.set_xlabel("seconds since the start of the pass")
    axes.set_xlim(left=0)
    return _write_memory(figure, axes, path, "peak memory and time", budget)


def plot_profile(curve: Sequence[tuple[int, int]], path: str | Path, *, title: str = "") -> Path:
    """Draw what a plain pass would hold and what is held, over what happened."""
    check_plot_path(path)
    figure, axes = _figure(title)
    names = ("a plain pass would hold", "held")
    for number, held in enumerate(zip(*(curve or [(0, 0)]), strict=True)):
        label = f"{names[number]}: {format_bytes(max(held))}"
        _fill(axes, number, range(len(held)), held, label)
    axes.set_xlabel("what happened, in order")
    return _write_memory(figure, axes, path)


def plot_budget(curves: Mapping[str, Sequence[int]], budget: int, path: str | Path) -> Path:
    """Draw memory over a forward and backward pass in several ways, with the budget as a line."""
    check_plot_path(path)
    figure, axes = _figure("Memory over one forward and backward pass")
    for number, (name, held) in enumerate(curves.items()):
        percent = [100 * at / max(1, len(held) - 1) for at in range(len(held))]
        _fill(axes, number, percent, held, f"{name}: {format_bytes(max(held, default=0))}")
    axes.set_xlabel("percent of the pass")
    return _write_memory(figure, axes, path, budget=budget)


def _fill(axes: Axes, number: int, along: Sequence[float], held: Sequence[int], label: str) -> None:
    """Draw one curve of memory, and fill what is below it."""
    megabytes, colour = [n / 1e6 for n in held], _MEMORY_COLOURS[number]
    axes.fill_between(along, megabytes, color=colour, alpha=0.18, linewidth=0)
    axes.plot(along, megabytes, color=colour, linewidth=2, label=label)


def _write_memory(
    figure: Figure,
    axes: Axes,
    path: str | Path,
    legend: str = "peak memory",
    budget: int | None = None,
) -> Path:
    if budget is not None:
        label = f"budget {format_bytes(budget)}"
        axes.axhline(budget / 1e6, color=_GREY, linestyle="--", label=label)
    axes.set_ylabel("memory above the start (MB)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.legend(frameon=False, title=legend, alignment="left")
    return _write(figure, path)


def plot_frontier(
    points: Sequence[tuple[int, float]], knee: tuple[int, float], path: str | Path
) -> Path:
    """Draw time against peak memory: points of (peak bytes, time of a pass over a plain one)."""
    check_plot_path(path)
    figure, axes = _figure("Peak memory against time")
    axes.step(
        [peak / 1e6 for peak, _ in points],
        [time for _, time in points],
        where="post",
        color=_BLUE,
        linewidth=2,
        marker="o",
        markersize=3,
    )
    label = f"knee: {format_bytes(knee[0])} at {knee[1]:.2f} x"
    axes.plot([knee[0] / 1e6], [knee[1]], "o", color=_RED, markersize=9, label=label)
    axes.set_xlabel("peak memory (MB)")
    axes.set_ylabel("time of a pass, relative to a plain one")
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    return _write(figure, path)


# -- a schedule --------------------------------------------------------------------------------


class Line(NamedTuple):
    """A straight line from (work, position) to (work, position)."""

    start: tuple[float, float]
    end: tuple[float, float]


@dataclass
class SchedulePaths:
    """A schedule as lines: steps ahead, steps back, and how long states and tapes are held."""

    ahead: list[Line] = field(default_factory=list)
    back: list[Line] = field(default_factory=list)
    states: list[Line] = field(default_factory=list)
    on_disk: list[Line] = field(default_factory=list)
    tapes: list[Line] = field(default_factory=list)
    work: int = 0


def schedule_paths(actions: Iterable[Action]) -> SchedulePaths:
    """Follow the actions of a schedule; a step ahead and a step back are one unit of work each.

    >>> from remat.schedules import StoreAll
    >>> schedule_paths(StoreAll(2)).work
    4
    """
    return _PathFinder().follow(actions)


def plot_schedule(
    actions: Iterable[Action], steps: int, path: str | Path, *, title: str = ""
) -> Path:
    """Draw the position in the loop over the work done: what runs when, and what is held."""
    if steps > _MOST_STEPS:
        raise ValueError(f"a picture shows at most {_MOST_STEPS} steps, got {steps}; plot fewer")
    figure, axes = _figure(title)
    paths = schedule_paths(actions)
    thin = min(1.6, max(0.4, 400 / max(1, paths.work)))
    for lines, colour, width, label in (
        (paths.tapes, _GREEN, thin, "tape held"),
        (paths.states, _GREY, thin, "state held in memory"),
        (paths.on_disk, _BROWN, 1.5 * thin, "state held on disk"),
        (paths.ahead, _BLUE, 2 * thin, "steps ahead"),
        (paths.back, _RED, 2 * thin, "steps back"),
    ):
        if lines:
            _draw(axes, lines, colour, width, label)
    axes.set_xlim(0, max(1, paths.work))
    axes.set_ylim(0, max(1, steps))
    axes.grid(visible=False)  # it would look like held states
    axes.set_xlabel("work done (steps ahead and steps back)")
    axes.set_ylabel("position in the loop (step)")
    _explain_lines(figure, axes)
    return _write(figure, path)


class _PathFinder:
    """Walks over the actions and notes where each line starts and ends."""

    def __init__(self) -> None:
        self.paths = SchedulePaths()
        self.held: dict[tuple[Tier, int], int] = {}  # since which unit of work

    def follow(self, actions: Iterable[Action]) -> SchedulePaths:
        for action in actions:
            self._act(action)
        for tier, step in list(self.held):
            self._let_go(tier, step)
        return self.paths

    def _act(self, action: Action) -> None:
        match action:
            case Advance(start, stop):
                self._run(start, stop)
            case Save(step, tier):
                self.held[tier, step] = self.paths.work
            case Drop(step, tier):
                self._let_go(tier, step)
            case Tape(step):
                self._run(step, step + 1)
                self._use_up(step)
                self.held[Tier.TAPE, step] = self.paths.work
            case Backward(step):
                if (Tier.TAPE, step) not in self.held:
                    self._run(step, step + 1)
                self._use_up(step)
                self._let_go(Tier.TAPE, step)
                self._line(self.paths.back, step + 1, step)
            case Restore():
                pass  # a jump: the next line starts elsewhere
            case _:
                assert_never(action)

    def _run(self, start: int, stop: int) -> None:
        self._line(self.paths.ahead, start, stop)

    def _line(self, lines: list[Line], start: int, stop: int) -> None:
        before = self.paths.work
        self.paths.work += abs(stop - start)
        lines.append(Line((before, start), (self.paths.work, stop)))

    def _use_up(self, step: int) -> None:
        self._let_go(Tier.MEMORY, step)
        self._let_go(Tier.DISK, step)

    def _let_go(self, tier: Tier, step: int) -> None:
        since = self.held.pop((tier, step), None)
        if since is None:
            return
        bars = {Tier.DISK: self.paths.on_disk, Tier.TAPE: self.paths.tapes}
        # A tape belongs to the step, which lies between two states.
        height = step + 0.5 if tier is Tier.TAPE else step
        bars.get(tier, self.paths.states).append(Line((since, height), (self.paths.work, height)))


# -- matplotlib --------------------------------------------------------------------------------


def _figure(title: str) -> tuple[Figure, Axes]:
    if not can_plot():
        raise UnsupportedError(
            "pictures need matplotlib, which is not installed; pip install matplotlib"
        )
    from matplotlib.figure import Figure  # noqa: PLC0415  (optional, and slow to load)

    figure = Figure(figsize=(9, 5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize="large")
    return figure, axes


def _draw(axes: Axes, lines: list[Line], colour: str, width: float, label: str) -> None:
    # One broken line, not a collection of lines: a NaN lifts the pen, and agg draws it fast.
    xs, ys = zip(*_points(lines), strict=True)
    axes.plot(xs, ys, color=colour, linewidth=width, label=label, solid_capstyle="butt")


def _explain_lines(figure: Figure, axes: Axes) -> None:
    lines, labels = axes.get_legend_handles_labels()
    legend = figure.legend(
        lines, labels, loc="outside lower center", ncols=5, frameon=False, fontsize="small"
    )
    for line in legend.get_lines():
        line.set_linewidth(2)  # thin lines show no colour


def _points(lines: list[Line]) -> Iterator[tuple[float, float]]:
    for start, end in lines:
        yield start
        yield end
        yield float("nan"), float("nan")


def _write(figure: Figure, path: str | Path) -> Path:
    """Draw in memory first: an error or Ctrl-C on the way leaves no half-written file."""
    path = check_plot_path(path)
    drawn = BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower())
    path.write_bytes(drawn.getvalue())
    return path
