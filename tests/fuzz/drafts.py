"""Drawing random programs: each line is run, plainly, as soon as it is drawn, and kept if it works.

So whoever draws the next line sees the real values, their shapes and types. All is kept alive
until a program is complete, so that a seed stands for the same program in every process.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kit, ops, wrapping
from .programs import Block, Item, Line, Program, names_in

__all__ = ["Draft", "NoFit", "draw", "namespace"]

_PLACE = re.compile(r"\{(\w+)\}")
_AUGMENTED = re.compile(r"^\s*(\w+) [-+*/]=", re.MULTILINE)


class NoFit(Exception):
    """There is no value that an op could take."""


def namespace(remat: Any) -> dict[str, Any]:
    """Return the names that a program sees when it starts."""
    return {"torch": torch, "F": F, "remat": remat, **kit.names}


def draw(seed: int) -> Program:
    """Return the program that a seed stands for."""
    for attempt in range(20):
        draft = Draft(random.Random(f"{seed}.{attempt}"), seed)
        try:
            program = draft.program()
        finally:
            draft.forget()
        if program is not None:
            return program
    raise AssertionError(f"no program for seed {seed}")


class Draft:
    """A program in the making, and its values."""

    def __init__(self, rng: random.Random, seed: int) -> None:
        self.rng = rng
        self.seed = seed
        self.head: list[Line] = []
        self.values = namespace(kit.plain)
        self.visible: list[str] = []  # inputs and values
        self.side: list[str] = []  # parameters and buffers
        self.most = 400  # elements of a value
        self._frames: list[list[str]] = [[]]  # what the functions have made that we are in
        self._made: list[str] = []  # by the line that is being drawn
        self._numbers: dict[str, int] = {}
        self._alive: list[Any] = []
        self._saved: set[int] = set()  # storages that autograd has saved
        self._regions: list[int] = []
        self._regions_so_far = 0
        self._touched: dict[int, set[int]] = {}  # by which outermost regions, by storage
        self._made_in: dict[int, int] = {}  # the outermost region that a storage was made in
        self._reads: dict[str, int] = {}
        self._local: list[str] = []  # what the block has made that we are in

    # The whole.

    def program(self) -> Program | None:
        rng = self.rng
        self._inputs()
        autocast = rng.random() < 0.12
        with self._running(autocast=autocast):
            items = self._fill(rng.randint(5, 40), 0)
        outputs = self._outputs()
        if not outputs:
            return None
        mode, backward = ops.draw_mode(rng, self.leaves())
        # (With a graph of the backward pass autocast caches casts of leaves there; any hook on a
        # saved tensor, also one that does nothing, makes another leaf of it, and other roundings.
        # And under any mode PyTorch goes back through bfloat16 convolutions in another way.)
        is_twice = any("create_graph" in line for line in backward)
        return Program(
            seed=self.seed,
            head=tuple(self.head),
            items=items,
            outputs=outputs,
            mode=mode,
            backward=(*self._meddling(items), *backward),
            autocast=autocast,
            backward_autocast=rng.random() < 0.06 and not is_twice,
            backward_scope=rng.random() < 0.04 and not is_twice,
            profiled=rng.random() < 0.1,
            in_thread=rng.random() < 0.04,
        )

    def forget(self) -> None:
        """Let go of all values: graphs hold our hook, so nobody else frees what refers to both."""
        self.values = {}
        self._alive.clear()

    def _inputs(self) -> None:
        rng = self.rng
        batch, width, length = rng.randint(1, 4), rng.choice((2, 3, 4, 6)), rng.randint(2, 7)
        shapes: list[tuple[int, ...]] = [
            (batch, width),
            (batch, width, length),
            (width, length),
            (batch, width, length, length),
            (width,),
            (),
        ]
        if rng.random() < 0.4:  # more bytes than the state of a random generator has
            self.most = 5000
            shapes[:4] = [(36, 40), (3, 20, 25), (50, 30), (4, 3, 11, 11)]
        for number in range(rng.randint(1, 3)):
            shape = rng.choice(shapes[:3] if number == 0 else shapes)
            dtype = rng.choices(("", "float64", "bfloat16"), (8, 2, 1))[0]
            self._add("x", self._leaf(shape, dtype, grad=number == 0 or rng.random() < 0.8))
        self.visible += [line.makes[0] for line in self.head]

    def _leaf(self, shape: tuple[int, ...], dtype: str = "", *, grad: bool = True) -> str:
        options = f", dtype=torch.{dtype}" if dtype else ""
        options += "" if grad else ", grad=False"
        sizes = "".join(f"{size}, " for size in shape)
        return f"leaf({sizes}seed={self._next('seed')}{options})"

    @contextmanager
    def _running(self, *, autocast: bool) -> Iterator[None]:
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(torch.random.fork_rng())
            enter(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            enter(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed))
            enter(torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext())
            torch.manual_seed(self.seed)
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        self._saved.update(_storages(kept))
        self._alive.append(kept)
        return kept

    def _outputs(self) -> tuple[str, ...]:
        made = [n for n in self.visible if n.startswith("v") and _is_real(self.values[n])]
        graded = [name for name in made if self.values[name].requires_grad]
        if not graded:
            return ()
        unread = [name for name in graded if not self._reads.get(name)]
        chosen = [self.rng.choice(graded[-4:])]
        chosen += self.rng.sample(unread, self.rng.randint(0, len(unread)))
        chosen += [self.rng.choice(made) for _ in range(self.rng.choice((0, 0, 1, 2)))]
        return tuple(dict.fromkeys(chosen))

    def _meddling(self, items: tuple[Item, ...]) -> list[str]:
        """Return what is done to scopes between the two passes: for plain autograd, nothing."""
        scopes = sorted(name for name in names_in(items) if name.startswith("s"))
        call = self.rng.choice(("", "", "recompute()", "clear_saved_activations()"))
        return [f"[node.{call} for node in {s}.nodes]" for s in scopes if call]

    # Lines and blocks.

    def _fill(self, count: int, depth: int) -> tuple[Item, ...]:
        items: list[Item] = []
        while count > 0:
            if depth < 4 and self.rng.random() < (0.12 if depth else 0.4):
                size = self.rng.randint(1, min(count, 24 - 5 * depth))
                items.append(self._block(size, depth))
                count -= size
            else:
                line = self._line()
                count -= 1
                if line is not None:
                    items.append(line)
        return tuple(items)

    def _block(self, size: int, depth: int) -> Block:
        drawn = wrapping.draw(
            self.rng,
            scope=self.shared("s", 'remat.CheckpointScope("shared")'),
            group=self.shared("q", 'remat.CheckpointGroup("group")'),
        )
        outer_local, self._local = self._local, []
        before = len(self.visible)
        outside = [*self.visible, *self.side]
        if drawn.kind == "call":
            self._frames.append([])
        with self._region(drawn.is_region), self._context(drawn):
            items = self._fill(size, depth + 1)
        read = sorted(names_in(items).intersection(outside))
        passed = self.rng.sample(read, self.rng.randint(min(1, len(read)), min(4, len(read))))
        if drawn.kind == "call":
            self._frames.pop()
            self._hide(before)
        self._frames[-1] += self.visible[before:]
        self._local = outer_local
        number = self._next("part")
        packings = ("tuple", "tuple", "list", "object" if number % 2 else "dict")
        return Block(
            drawn.kind,
            drawn.text,
            items,
            name=f"part{number}",
            passed=tuple(passed),
            packing=self.rng.choice(packings),
            is_region=drawn.is_region,
        )

    @contextmanager
    def _region(self, is_region: bool) -> Iterator[None]:
        if not is_region:
            yield
            return
        self._regions_so_far += 1
        self._regions.append(self._regions_so_far)
        yield
        self._regions.pop()

    def _context(self, drawn: wrapping.Wrapping) -> Any:
        if not drawn.text.startswith(("with torch.", "with kept_twice")):
            return nullcontext()
        return eval(drawn.text.removeprefix("with ").removesuffix(":"), self.values)

    def _hide(self, before: int) -> None:
        """Make some of what a function has made invisible: it is not returned."""
        share = self.rng.random()
        made = self.visible[before:]
        hidden = {name for name in made[:-1] if self.rng.random() < share}
        self.visible = [name for name in self.visible if name not in hidden]

    def _line(self) -> Line | None:
        for _ in range(40):
            op = ops.draw(self.rng)
            self._made = []
            try:
                text = op.draw(self) if callable(op.draw) else self.fill(op.draw)
                line = Line(text, tuple(self._made), op.name)
                self._check_bindings(line)
                self._run(line)
            except Exception:  # most ops refuse most values
                continue
            return line
        return None

    def _check_bindings(self, line: Line) -> None:
        """Python's += binds a name, so that the name has to be the function's own."""
        own = {*self._frames[-1], *line.makes}
        if any(name not in own for name in _AUGMENTED.findall(line.text)):
            raise NoFit

    def _run(self, line: Line) -> None:
        before = dict(self.values)
        self._alive.append(before)
        try:
            exec(line.text, self.values)
            if not all(self._is_welcome(self.values[name]) for name in line.makes):
                raise NoFit
        except Exception:
            self.values = before
            raise
        named = names_in([line])
        for name in named:
            self._reads[name] = self._reads.get(name, -1 if name in line.makes else 0) + 1
            if not (line.op == "batch_norm" and name.startswith("b")):
                self._touch(self.values.get(name))
        now = self._regions[0] if self._regions else 0
        for name in line.makes:
            for storage in _storages(self.values[name]):
                self._made_in.setdefault(storage, now)
            if name in self.visible:
                self.visible.remove(name)
            self.visible.append(name)
            self._frames[-1].append(name)
            self._local.append(name)
        if line.op == "forget":
            (name,) = named
            self.visible.remove(name)

    def _touch(self, value: Any) -> None:
        if self._regions:
            for storage in _storages(value):
                self._touched.setdefault(storage, set()).add(self._regions[0])

    def _is_welcome(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return False
        if value.numel() > 3 * self.most or value.dim() > 5:
            return False
        if value.dtype is torch.bool or not (value.is_floating_point() or value.is_complex()):
            return True
        wide = value.detach().abs().double()
        return bool(wide.numel() == 0 or wide.max() < 300)

    # What ops ask for.

    def fill(self, template: str, **given: str) -> str:
        """Return a template with names and numbers in its places."""
        chosen = dict(given)

        def put(match: re.Match[str]) -> str:
            key = match[1]
            if key not in chosen:
                chosen[key] = ops.PLACES[key](self, chosen)
            return chosen[key]

        text = _PLACE.sub(put, template)
        inputs = [name for key, name in chosen.items() if name not in self._made or key[0] != "n"]
        if "\n" in template and set(inputs).intersection(self._made):
            raise NoFit  # the first of several lines would overwrite what a later one reads
        return text

    def new(self) -> str:
        """Return a name for what a line makes: as a rule a new one."""
        local = [n for n in self._local if n in self.visible and n not in self._made]
        if local and self.rng.random() < 0.08:
            name = self.rng.choice(local)
        else:
            name = f"v{self._next('v')}"
        self._made.append(name)
        return name

    def pick(self, fits: Callable[[Tensor], bool]) -> str:
        """Return a value that fits, rather a late one than an early one."""
        pool = self.visible
        if self.rng.random() < 0.06:
            pool = [*pool, *self.side]
        found = [
            n
            for n in pool
            if isinstance(self.values.get(n), Tensor) and self._fits(fits, self.values[n])
        ]
        if not found:
            raise NoFit
        return self.rng.choice(found[-5:] if self.rng.random() < 0.6 else found)

    @staticmethod
    def _fits(fits: Callable[[Tensor], bool], value: Tensor) -> bool:
        try:
            return fits(value)
        except (RuntimeError, IndexError):
            return False

    def pick_to_write(self, fits: Callable[[Tensor], bool]) -> str:
        """Return a value that may be written to, so that as a rule a backward pass still works."""
        saved, used = self.rng.random() < 0.01, self.rng.random() < 0.05

        def may(tensor: Tensor) -> bool:
            return fits(tensor) and self._is_free(tensor, saved=saved, used=used)

        return self.pick(may)

    def may_write(self, name: str) -> bool:
        return self._is_free(self.values[name])

    def may_step(self, name: str) -> bool:
        """Return whether a parameter may be written to, although it is a leaf."""
        return self._is_free(self.values[name].detach())

    def _is_free(self, tensor: Tensor, *, saved: bool = False, used: bool = False) -> bool:
        """Return whether autograd has not saved a tensor, and no region that is over has used it.

        `saved` and `used` are whether it may nevertheless. What a region has made itself may be
        written to when it is over.
        """
        if tensor.requires_grad and tensor.is_leaf:
            return False
        now = self._regions[0] if self._regions else 0
        for storage in _storages(tensor):
            if storage in self._saved and not saved:
                return False
            over = self._touched.get(storage, set()) - {now, self._made_in.get(storage, 0)}
            if over and not used:
                return False
        return True

    def local_to_forget(self) -> str:
        local = [name for name in self._local if name in self.visible]
        if not local:
            raise NoFit
        return self.rng.choice(local)

    def in_region(self) -> bool:
        return bool(self._regions)

    def value(self, name: str) -> Tensor:
        value: Tensor = self.values[name]
        return value

    def leaves(self) -> list[str]:
        return [
            line.makes[0]
            for line in self.head
            if "leaf(" in line.text and "grad=False" not in line.text
        ]

    def param(self, *shape: int, dtype: torch.dtype = torch.float32) -> str:
        """Return a parameter of this shape, a new one or one that is there."""
        there = [
            n for n in self.side if n.startswith("p") and self.values[n].shape == torch.Size(shape)
        ]
        there = [name for name in there if self.values[name].dtype is dtype]
        if there and self.rng.random() < 0.5:
            return self.rng.choice(there)
        name = "" if dtype is torch.float32 else str(dtype).removeprefix("torch.")
        return self._on_the_side("p", self._leaf(shape, name))

    def buffer(self, *shape: int, start: str = "zeros") -> str:
        there = [
            n for n in self.side if n.startswith("b") and self.values[n].shape == torch.Size(shape)
        ]
        if there and self.rng.random() < 0.5:
            return self.rng.choice(there)
        sizes = ", ".join(map(str, shape))
        return self._on_the_side("b", f"torch.{start}({sizes or '()'})")

    def integers(self, high: int, *shape: int) -> str:
        sizes = "".join(f"{size}, " for size in shape)
        return self._add("i", f"ints({high}, {sizes}seed={self._next('seed')})")

    def module(self, text: str) -> str:
        for line in self.head:
            if f"lambda: {text}," in line.text and self.rng.random() < 0.5:
                return line.makes[0]
        return self._add("m", f"module(lambda: {text}, seed={self._next('seed')})")

    def shared(self, letter: str, text: str) -> str:
        """Return an object of which a program has one."""
        there = [line.makes[0] for line in self.head if line.makes[0].startswith(letter)]
        return there[0] if there else self._add(letter, text)

    def _on_the_side(self, letter: str, text: str) -> str:
        name = self._add(letter, text)
        self.side.append(name)
        return name

    def _add(self, letter: str, text: str) -> str:
        name = f"{letter}{self._next(letter)}"
        line = Line(f"{name} = {text}", (name,))
        exec(line.text, self.values)
        self.head.append(line)
        return name

    def _next(self, kind: str) -> int:
        self._numbers[kind] = self._numbers.get(kind, -1) + 1
        return self._numbers[kind]


def _storages(value: Any) -> list[int]:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return []
    return [value.untyped_storage()._cdata]


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
