"""Traces of networks as they would be recorded: seconds and bytes of the right proportions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from remat.plans import Kind, Op, Trace, Value

MB = 10**6


class Builder:
    """Writes a trace op by op; a value is freed after the last op that reads it."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._values: list[Value] = []
        self._last: dict[int, int] = {}
        self._kept: set[int] = set()

    def input(self, nbytes: int) -> int:
        self._values.append(Value(nbytes, kind=Kind.INPUT))
        return len(self._values) - 1

    def parameter(self, nbytes: int) -> int:
        self._values.append(Value(nbytes, kind=Kind.PARAMETER, requires_grad=True))
        return len(self._values) - 1

    def op(
        self,
        name: str,
        reads: Sequence[int],
        *nbytes: int,
        seconds: float,
        saves: str = "",
        module: str = "",
        kind: Kind = Kind.COMPUTED,
        overwrites: int | None = None,
    ) -> int:
        """Add an op; `saves` names what autograd saves: "0" its first input, "=" its result.

        The first of its results has a gradient; others (statistics) are saved.
        """
        number, first = len(self._ops), len(self._values)
        for place, count in enumerate(nbytes):
            self._values.append(
                Value(
                    count,
                    made_by=number,
                    kind=kind,
                    requires_grad=place == 0,
                    overwrites=overwrites if place == 0 else None,
                )
            )
        made = tuple(range(first, len(self._values)))
        for value in (*reads, *made):
            self._last[value] = number
        saved = [made[0] if mark == "=" else reads[int(mark)] for mark in saves] + list(made[1:])
        self._ops.append(
            Op(
                name,
                tuple(reads),
                made,
                seconds,
                module=module,
                saves=tuple(saved),
                backward_seconds=2 * seconds,
            )
        )
        return made[0]

    def outlives(self, value: int) -> None:
        self._kept.add(value)

    def trace(self) -> Trace:
        self._kept.add(self._ops[-1].makes[0])
        values = [
            value
            if value.made_by is None or number in self._kept
            else Value(
                value.nbytes,
                value.made_by,
                value.overwrites,
                value.kind,
                value.requires_grad,
                self._last[number],
                value.name,
            )
            for number, value in enumerate(self._values)
        ]
        return Trace(tuple(self._ops), tuple(values))


def gpt(blocks: int = 24) -> Trace:
    """Width 256, 8 x 256 tokens, fused attention; milliseconds and bytes as measured once."""
    b, tokens = Builder(), 8 * 256 * 256 * 4
    weight = b.parameter(MB)
    x = b.op("embedding", [b.input(16384), weight], tokens, seconds=1e-4)
    for number in range(blocks):
        m = f"blocks.{number}"
        h = b.op("ln", [x, weight], tokens, 8192, 8192, seconds=0.13e-3, saves="0", module=m)
        qkv = b.op("linear", [h, weight], 3 * tokens, seconds=4.3e-3, saves="0", module=m)
        a = b.op("attention", [qkv], tokens, tokens // 32, seconds=5e-3, saves="0=", module=m)
        p = b.op("linear", [a, weight], tokens, seconds=1.5e-3, saves="0", module=m)
        x = b.op("add", [x, p], tokens, seconds=0.14e-3, module=m)
        h = b.op("ln", [x, weight], tokens, 8192, 8192, seconds=0.13e-3, saves="0", module=m)
        u = b.op("linear", [h, weight], 4 * tokens, seconds=5.9e-3, saves="0", module=m)
        g = b.op("gelu", [u], 4 * tokens, seconds=0.64e-3, saves="0", module=m)
        d = b.op("linear", [g, weight], tokens, seconds=5.7e-3, saves="0", module=m)
        x = b.op("add", [x, d], tokens, seconds=0.15e-3, module=m)
    h = b.op("ln", [x, weight], tokens, 8192, 8192, seconds=0.13e-3, saves="0")
    logits = b.op("linear", [h, weight], 2 * tokens, seconds=3e-3, saves="0")
    b.op("loss", [logits], 4, seconds=1e-3, saves="0")
    return b.trace()


def llama(blocks: int = 16) -> Trace:
    """Norms in several ops, rotary tables that all blocks read, gated feed-forward."""
    b, t = Builder(), 2 * MB
    weight = b.parameter(MB)
    x = b.op("embedding", [b.input(16384), weight], t, seconds=1e-4)
    cos = b.op("cos", [b.input(65536)], 65536, seconds=5e-5)
    sin = b.op("sin", [b.input(65536)], 65536, seconds=5e-5)
    for number in range(blocks):
        m = f"layers.{number}"

        def norm(v: int, m: str = m) -> int:
            s = b.op("pow", [v], t, seconds=1.5e-4, saves="0", module=m)
            r = b.op("mean", [s], 8192, seconds=1e-4, module=m)
            r = b.op("rsqrt", [r], 8192, seconds=1e-5, saves="=", module=m)
            n = b.op("mul", [v, r], t, seconds=1.5e-4, saves="01", module=m)
            return b.op("mul", [n, weight], t, seconds=1.5e-4, saves="0", module=m)

        def rotary(v: int, m: str = m) -> int:
            c = b.op("mul", [v, cos], t, seconds=1.5e-4, saves="1", module=m)
            half = b.op("rotate", [v], t, seconds=3e-4, module=m)
            s = b.op("mul", [half, sin], t, seconds=1.5e-4, saves="1", module=m)
            return b.op("add", [c, s], t, seconds=1.5e-4, module=m)

        h = norm(x)
        q = rotary(b.op("linear", [h, weight], t, seconds=1.5e-3, saves="0", module=m))
        k = rotary(b.op("linear", [h, weight], t, seconds=1.5e-3, saves="0", module=m))
        v = b.op("linear", [h, weight], t, seconds=1.5e-3, saves="0", module=m)
        a = b.op("attention", [q, k, v], t, t // 32, seconds=5e-3, saves="012=", module=m)
        o = b.op("linear", [a, weight], t, seconds=1.5e-3, saves="0", module=m)
        x = b.op("add", [x, o], t, seconds=1.5e-4, module=m)
        h = norm(x)
        g = b.op("linear", [h, weight], 3 * t, seconds=4e-3, saves="0", module=m)
        u = b.op("linear", [h, weight], 3 * t, seconds=4e-3, saves="0", module=m)
        s = b.op("silu", [g], 3 * t, seconds=6e-4, saves="0", module=m)
        p = b.op("mul", [s, u], 3 * t, seconds=4e-4, saves="01", module=m)
        d = b.op("linear", [p, weight], t, seconds=4e-3, saves="0", module=m)
        x = b.op("add", [x, d], t, seconds=1.5e-4, module=m)
    h = b.op("ln", [x, weight], t, 8192, 8192, seconds=0.13e-3, saves="0")
    logits = b.op("linear", [h, weight], 4 * t, seconds=6e-3, saves="0")
    b.op("loss", [logits], 4, seconds=1e-3, saves="0")
    return b.trace()


def _conv(b: Builder, x: int, nbytes: int, ms: float, m: str, *, relu: bool = True) -> int:
    weight = b.parameter(MB // 20)
    c = b.op("conv", [x, weight], nbytes, seconds=ms * 1e-3, saves="0", module=m)
    n = b.op("bn", [c, weight], nbytes, 512, 512, seconds=ms * 1e-4, saves="0", module=m)
    if not relu:
        return n
    return b.op("relu", [n], nbytes, seconds=ms * 5e-5, saves="=", module=m)


def resnet(blocks: int = 15) -> Trace:
    """Two convolutions with BatchNorm a block, and an addition."""
    b, size = Builder(), 4 * MB
    x = _conv(b, b.input(size // 4), size, 1.0, "stem")
    for number in range(blocks):
        m = f"blocks.{number}"
        h = _conv(b, x, size, 3.0, m)
        h = _conv(b, h, size, 3.0, m, relu=False)
        s = b.op("add", [x, h], size, seconds=2e-4, module=m)
        x = b.op("relu", [s], size, seconds=1.5e-4, saves="=", module=m)
    p = b.op("pool", [x], 4096, seconds=1e-4, saves="0")
    b.op("loss", [p], 4, seconds=1e-5, saves="0")
    return b.trace()


def unet(levels: int = 4) -> Trace:
    """Long skips: what the encoder makes is read again by the decoder."""
    b, size = Builder(), 16 * MB
    x, skips = b.input(size // 8), []
    for level in range(levels):
        nbytes = size >> level
        for number in range(2):
            x = _conv(b, x, nbytes, 4.0, f"down.{level}.{number}")
        skips.append(x)
        x = b.op("pool", [x], nbytes // 4, nbytes // 4, seconds=2e-4, module=f"down.{level}")
    for number in range(2):
        x = _conv(b, x, size >> levels, 4.0, f"middle.{number}")
    for level in reversed(range(levels)):
        nbytes = size >> level
        m = f"up.{level}"
        x = b.op("upsample", [x], nbytes, seconds=5e-4, module=m)
        x = b.op("cat", [x, skips[level]], 2 * nbytes, seconds=4e-4, module=m)
        for number in range(2):
            x = _conv(b, x, nbytes, 6.0 - 2 * number, f"{m}.{number}")
    b.op("loss", [x], 4, seconds=1e-3, saves="0")
    return b.trace()


def mlp(layers: int = 200, seed: int = 0) -> Trace:
    """Layers of unlike width, in a row."""
    b, dice = Builder(), random.Random(seed)
    x, before = b.input(MB), 1.0
    for number in range(layers):
        width = dice.choice([0.5, 1.0, 1.0, 2.0, 4.0])
        m = f"layers.{number}"
        seconds = 1e-3 * before * width
        weight = b.parameter(int(MB * before * width / 4))
        x = b.op("linear", [x, weight], int(MB * width), seconds=seconds, saves="0", module=m)
        x = b.op("relu", [x], int(MB * width), seconds=5e-5 * width, saves="=", module=m)
        before = width
    b.op("loss", [x], 4, seconds=1e-5, saves="0")
    return b.trace()


NETWORKS: dict[str, Callable[[], Trace]] = {
    "gpt": gpt,
    "llama": llama,
    "resnet": resnet,
    "unet": unet,
    "mlp": mlp,
}


def random_trace(seed: int, ops: int, *, reach: int = 4) -> Trace:
    """Ops that read some of the last few results and save some of what they read and make."""
    b, dice = Builder(), random.Random(seed)
    weight = b.parameter(dice.randrange(1, 50))
    made = [b.input(dice.randrange(1, 20))]
    for number in range(ops):
        recent = made[-reach:]
        reads = dice.sample(recent, dice.randrange(1, min(3, len(recent)) + 1))
        if number == ops - 1:
            reads = [made[-1]]
        saves = [str(n) for n in range(len(reads)) if dice.random() < 0.7]
        saves += ["="] if dice.random() < 0.4 else []
        kind = Kind.FIXED if dice.random() < 0.08 else Kind.COMPUTED
        results = [dice.randrange(1, 100)] + (
            [dice.randrange(1, 10)] if dice.random() < 0.2 else []
        )
        seconds = dice.choice([1.0, 2.0, 3.0, 10.0, 20.0])
        reads = [*reads, weight] if dice.random() < 0.3 else reads
        saves_text = "".join(saves)
        made.append(b.op("op", reads, *results, seconds=seconds, saves=saves_text, kind=kind))
        if dice.random() < 0.05:
            b.outlives(made[-1])
    return b.trace()
