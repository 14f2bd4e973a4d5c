"""Random loop programs: run plain and transformed, results, gradients and errors must agree.

`python -m tests.source.random_loops numpy 5000` (or torch) runs so many of those in which arrays
have several names, from seed 0 on; `… numpy 5000 0 plain` the others.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import linecache
import random
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

import remat

ARRAYS = ["a", "b", "c"]
FRESH = ["u", "v"]
REFUSED = (remat.LoopTransformError, remat.UnsupportedError)
LIMIT = 20  # seconds of the processor for one program, in long runs
INVALID = "autograd saved what was changed in place later"


class Writer:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.names = 0

    def program(self) -> str:
        self.line(0, "def program(a, W, xs):")
        self.line(1, "b, c, n, s, z = a * 0.5, W[0], 0, 0.0, None")
        self.line(1, "out, pair, buf = [], (a, b), a * 2")
        if self.random.random() < 0.3:
            self.line(1, "hist = [a, b * 0.1]")
        else:
            self.line(1, "hist = [a]")
        for _ in range(self.random.randint(1, 2)):
            self.loop(1, 0)
            if self.random.random() < 0.5:
                self.simple(1, 0)
        self.line(1, f"r = a + b * 0.3 + c + n * 0.1 + s + pair[0] * 0.2 + {self.fresh_read()}")
        self.line(1, "r = r + buf * 0.1 + hist[-1] * 0.05")
        self.line(1, "for o in out:")
        self.line(2, "r = r + o * 0.01")
        self.line(1, "return r, len(out), len(hist), n, z is None")
        return "\n".join(self.lines) + "\n"

    def line(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def fresh_read(self) -> str:
        return self.random.choice(["0", "0", "0", "u", "v * 0.5"])

    def new(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def expression(self, loops: int) -> str:
        r = self.random
        x = r.choice([*ARRAYS, "pair[1]", "buf"])
        y = r.choice(ARRAYS)
        forms = [
            f"xp.tanh({x} + {y})",
            f"xp.sin({x} @ W)",
            f"{x} * 0.7 + {y} * 0.2",
            f"{x} * {y}",
            f"xp.tanh({x} * (n + 1) * 0.1)",
            f"sum([{y} * k for k in (0.1, 0.2)]) + {x} * 0.5",
            f"hist[-1] * 0.3 + {y}",
            f"xp.cos({x}) if n % 2 else {y} * 0.9",
        ]
        if loops:
            forms += [f"{x} * 0.5 + x{r.randint(1, loops)} * 0.3"]
        return r.choice(forms)

    def condition(self) -> str:
        limit = round(self.random.uniform(-0.5, 1.5), 2)
        return self.random.choice(
            [
                f"{self.random.choice(ARRAYS)}.sum() > {limit}",
                f"n % {self.random.randint(2, 4)} == 0",
                f"n > {self.random.randint(1, 8)}",
                "z is None",
            ]
        )

    def simple(self, depth: int, loops: int) -> None:
        r = self.random
        array = r.choice(ARRAYS)
        value = self.expression(loops)
        forms = [
            f"{array} = {value}",
            f"{array} = {value}",
            f"{array}, s = {value}, s + 0.25",
            f"{r.choice(FRESH)} = {value}",
            "n += 1",
            "n = n + 1",
            f"s = s + {array}.sum() * 0.1",
            f"pair = ({value}, pair[0])",
            f"out.append({value})",
            f"z = {array}",
            f"b = {array} if z is None else z * 0.5",
            f"c = (w := {value}) + w * 0.1",
            f"buf[{r.randint(0, 2)}] = {array}[0] * 0.5",
            f"buf = buf * 0.5 + {array}",
            f"hist.append({value})",
            f"hist += [{value}]",
            f"{r.choice(FRESH)} = {r.choice(FRESH)} * 0.5",
        ]
        self.line(depth, r.choice(forms))

    def block(self, depth: int, loops: int, nesting: int) -> None:
        r = self.random
        for _ in range(r.randint(1, 4)):
            kind = r.random()
            if kind < 0.65:
                self.simple(depth, loops)
            elif kind < 0.85:
                self.branch(depth, loops, nesting)
            elif nesting < 2:
                self.loop(depth, loops)
            else:
                self.simple(depth, loops)

    def branch(self, depth: int, loops: int, nesting: int) -> None:
        r = self.random
        self.line(depth, f"if {self.condition()}:")
        jump = r.random()
        self.simple(depth + 1, loops)
        if loops and jump < 0.15:
            self.line(depth + 1, "break")
        elif loops and jump < 0.3:
            self.line(depth + 1, "continue")
        elif loops and jump < 0.36:
            self.line(depth + 1, f"return {self.expression(loops)}, len(out), n")
        if r.random() < 0.4:
            self.line(depth, "else:")
            self.simple(depth + 1, loops)

    def loop(self, depth: int, loops: int) -> None:
        r = self.random
        inner = loops + 1
        x, i = f"x{inner}", f"i{inner}"
        heads = [
            f"for {i} in range({r.randint(0, 9)}):\n{x} = {i} * 0.1",
            f"for {i} in range({r.randint(0, 3)}, 14, {r.randint(2, 4)}):\n{x} = {i} * 0.1",
            f"for {x} in xs:",
            f"for {i}, {x} in enumerate(xs):",
            f"for {x}, {i} in zip(xs, [0.5, 0.25, 1.0, 2.0, 0.1, 0.3]):",
            f"for {x} in [a, b, a * 2, c, a, b]:",
            f"for {i}, {x} in dict(p=a, q=b, r=c, s=a).items():",
            f"for {x} in reversed([0.1, 0.2, 0.3, 0.4, 0.5]):",
        ]
        turns = self.new("t")
        whiles = [
            f"while {turns} < {r.randint(0, 9)}:",
            f"while {turns} < 8 and ({self.condition()}):",
            f"while ({turns} := {turns} + 1) < 7:",
            "while True:",
        ]
        is_while = r.random() < 0.3
        if is_while:
            self.line(depth, f"{turns} = 0")
            head = r.choice(whiles)
            self.line(depth, head)
            self.line(depth + 1, f"{x} = {turns} * 0.1")
            if f"({turns} :=" not in head:
                self.line(depth + 1, f"{turns} += 1")
            if head == "while True:":
                self.line(depth + 1, f"if {turns} > 6:")
                self.line(depth + 2, "break")
        else:
            head, _, first = r.choice(heads).partition("\n")
            self.line(depth, head)
            if first:
                self.line(depth + 1, first)
        self.block(depth + 1, inner, inner)
        if r.random() < 0.2:
            self.line(depth, "else:")
            self.simple(depth + 1, loops)


class NamesWriter(Writer):
    """Writes a program in which arrays have several names, and are written to.

    Most operations are linear: PyTorch lets programs write to what they have not saved.
    """

    NAMES = ("a", "b", "c", "first", "keep", "row", "view", "e", "box['k']", "ns.h")

    def program(self) -> str:
        r = self.random
        self.line(0, "def program(a, W, xs):")
        self.line(1, "a, b, c, n, s, z = a * 1.0, a * 0.5, W[0] * 1.0, 0, 0.0, None")
        self.line(1, "e, out, buf, fs, gen = s, [], a * 2, [], None")
        self.line(1, "first = keep = " + r.choice(["a", "b", "c", "a * 1"]))
        self.line(1, "row, view = xs[0] * 1.0, b * 0.1")
        self.line(1, "box, ns = {'k': " + r.choice(["a", "c", "b * 1"]) + "}, NS(h=b * 1.0)")
        self.line(1, "hist, pair = [a], (a, b)")
        for _ in range(r.randint(1, 2)):
            self.loop(1, 0)
            for _ in range(r.randint(0, 3)):
                self.write_in_place(1)
        names = ", ".join([*self.NAMES[:7], "box['k']", "ns.h", "*out[:3]", "*pair"])
        self.line(1, f"names = [{names}]")
        self.line(1, "same = [[p is q for q in names] for p in names]")
        self.line(1, "r = a + b * 0.3 + c + n * 0.1 + s + e * 0.1 + buf * 0.1 + pair[0] * 0.2")
        self.line(1, "for p in names:")
        self.line(2, "r = r + p.sum() * 0.05")
        self.line(1, "for f in fs:")
        self.line(2, "r = r + f(a) * 0.01")
        self.line(1, "for p in gen or ():")
        self.line(2, "r = r + p * 0.02")
        self.line(1, "return r, len(out), len(hist), n, z is None, same")
        return "\n".join(self.lines) + "\n"

    def expression(self, loops: int) -> str:
        r = self.random
        if r.random() < 0.25:
            return super().expression(loops)
        x, y = r.choice([*ARRAYS, "first", "keep", "row", "buf", "ns.h"]), r.choice(ARRAYS)
        return r.choice([f"{x} * 0.7 + {y} * 0.2", f"{x} - {y} * 0.1", f"{x} * 0.9", f"{y} + 0.1"])

    def write_in_place(self, depth: int) -> None:
        r = self.random
        name = r.choice(["a", "a", "b", "c", "first", "keep", "row", "view", "buf", "ns.h"])
        forms = [
            f"{name} += 0.25",
            f"{name} *= 0.5",
            f"{name}[0] = 0.125",
            "box['k'] += 0.5",
            "pair[0][1] = 0.75",
            "hist[-1][0] = 0.25",
        ]
        if depth == 1:  # (nothing shows that it is a write)
            forms.append("out and out[-1].__iadd__(0.5)")
        self.line(depth, r.choice(forms[:3] * 2 + forms))

    def simple(self, depth: int, loops: int) -> None:
        r = self.random
        if r.random() < 0.5:
            super().simple(depth, loops)
            return
        array, value = r.choice(ARRAYS), self.expression(loops)
        forms = [
            "a, b = b, a",
            "a, b, c = c, a, b",
            f"keep = {array}",
            f"first = {array}",
            f"{array} = {r.choice(['keep', 'first', 'b', 'c'])}",
            f"keep = touch({array})",
            f"{array} = touch(first)",
            f"out.append({array})",
            f"out.append(({array}, keep)[n % 2])",
            f"box = {{'k': {array}}}",
            "a = box['k']",
            f"pair = ({array}, keep)",
            "other = pair; pair = (other[1], other[0])",
            f"row = xs[{r.randint(0, 4)}]",
            f"view = {array}[1:]",
            "view = part(buf)",
            f"ns = NS(h={value})",
            f"remember(ns, {array})",
            "c = ns.h * 0.5",
            "fs.append(lambda v: v * n)",
            "fs.append(partial(lambda k, v: v * n * k, 0.5))",
            f"f = lambda v: v + {array}; c = f(c) * 0.5",
            "gen = (a * k for k in (0.1, 0.2))",
            f"e = ({array} * {array}).sum()",
        ]
        if r.random() < 0.2:
            self.write_in_place(depth)
        else:
            self.line(depth, r.choice(forms))

    def condition(self) -> str:
        if self.random.random() < 0.3:
            return f"(e := {self.random.choice(ARRAYS)}.sum()) > 0.1"
        return super().condition()


class Namespace:
    """An object that is no tree."""

    def __init__(self, h: Any) -> None:
        self.h = h


def remember(holder: Namespace, value: Any) -> None:
    holder.h = value


def touch(value: Any) -> Any:
    return value


def part(value: Any) -> Any:
    return value[:2]


HELPERS = {
    **{"NS": Namespace, "remember": remember, "touch": touch, "part": part},
    "partial": functools.partial,
}


def write(seed: int, writer: type[Writer] = Writer) -> str:
    return writer(seed).program()


def load(source: str, name: str, **names: Any) -> Any:
    """Run source as a file would be, so that it can be found again."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "random_program", **HELPERS, **names}
    exec(compile(source, name, "exec"), namespace)
    return namespace["program"]


def outcome_numpy(function: Any) -> Any:
    rng = np.random.default_rng(0)
    args = rng.normal(size=3) * 0.5, rng.normal(size=(3, 3)) * 0.4, rng.normal(size=(5, 3)) * 0.5
    rest = []

    def scalar(*args: Any) -> Any:
        value, *others = function(*args)
        rest.append(others)
        return value

    try:
        value, gradients = remat.value_and_grad(scalar, wrt=(0, 1, 2))(*args)
    except Exception as error:
        return type(error)
    return [value, *gradients], rest[0]


def outcome_torch(function: Any) -> Any:
    import torch  # noqa: PLC0415

    rng = np.random.default_rng(0)
    arrays = rng.normal(size=3) * 0.5, rng.normal(size=(3, 3)) * 0.4, rng.normal(size=(5, 3)) * 0.5
    leaves = [torch.tensor(each, requires_grad=True) for each in arrays]
    try:
        value, *rest = function(*(leaf * 1 for leaf in leaves))
        gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    except Exception as error:
        # (Or an entry of what a loop has collected was written to, and nothing shows that it is.)
        # Neither does anything show that a function has stored the state of a step in an object.
        refusals = (
            "an inplace operation",
            "Output .* of (Unbind|Select).* is a view and is being modified",
            "a view of a leaf Variable that requires grad is being used in an in-place operation",
        )
        return INVALID if any(re.search(each, str(error)) for each in refusals) else type(error)
    found = [
        torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)
    ]
    return [value.detach().numpy(), *(g.numpy() for g in found)], rest


def difference(plain: Any, transformed: Any) -> str | None:
    """Say how two outcomes differ."""
    if INVALID in (plain, transformed) or transformed in REFUSED:
        return None  # whether autograd comes by a dead branch of the graph is its own affair
    if isinstance(plain, type) or isinstance(transformed, type):
        return None if plain is transformed else f"{plain} and {transformed}"
    if plain[1] != transformed[1]:
        return f"{plain[1]} and {transformed[1]}"
    for place, (one, other) in enumerate(zip(plain[0], transformed[0], strict=True)):
        if not np.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True):
            return f"result {place}: {one} and {other}"
    return None


def check(
    seed: int, engine: str, writer: type[Writer] = Writer, **options: Any
) -> tuple[str | None, int]:
    """Run one program; return how plain and transformed differ, and how many loops were taken."""
    words, taken, _ = examine(seed, engine, writer, **options)
    return words, taken


def examine(
    seed: int, engine: str, writer: type[Writer], **options: Any
) -> tuple[str | None, int, str]:
    """Do that, and say what became of the program: whether it ran, or raised what."""
    source = write(seed, writer)
    xp: Any = np
    if engine == "torch":
        import torch as xp  # noqa: PLC0415
    function = load(source, f"<random {writer.__name__} {engine} {seed}>", xp=xp)
    outcome = outcome_torch if engine == "torch" else outcome_numpy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = outcome(function)
        transformed = remat.checkpoint_loops(function, **{"min_steps": 2, **options})
        with remat.CheckpointProfiler() as profiler:
            found = outcome(transformed)
    if found is remat.RecomputeMismatchError and "remember(" in source:
        return None, profiler.checkpoint_count(), "found not to repeat itself"
    if found is not plain and isinstance(found, type) and found in REFUSED:
        fate = "refused while it ran"
    elif found == INVALID != plain:
        fate = "refused by autograd"
    else:
        fate = "raised as plain" if isinstance(plain, type | str) else "ran"
    return difference(plain, found), profiler.checkpoint_count(), fate


class TookTooLong(BaseException):  # (no program catches it)
    """A program, plain or transformed, has not ended within the limit."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TookTooLong(f"did not end within {seconds} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def main(engine: str, count: int, first: int = 0, writer: type[Writer] = NamesWriter) -> int:
    totals: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + count):
        try:
            with limited(LIMIT):
                words, taken, fate = examine(seed, engine, writer)
        except (Exception, TookTooLong) as error:  # of the transform itself
            words, taken, fate = f"{type(error).__name__}: {error}", 0, "broke"
        totals[fate] += 1
        totals["with steps"] += taken > 0
        totals["loops in steps"] += taken
        if words:
            totals["different"] += 1
            print(f"seed {seed} on {engine}: {words}", flush=True)
    print(engine, writer.__name__, dict(totals))
    return int(totals["different"] > 0)


if __name__ == "__main__":
    writers = {"plain": Writer, "names": NamesWriter}
    chosen = (writers[each] for each in sys.argv[4:])
    sys.exit(main(*sys.argv[1:2], *map(int, sys.argv[2:4]), *chosen))
