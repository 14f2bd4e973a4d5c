"""Running a program with and without remat, and comparing everything, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CodeType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
)

import remat
from remat.engines.torch.budget.manager import TorchBudget

from ..engines.torch.oracles import planning
from ..engines.torch.random_plans import RandomPlans
from . import kit
from .drafts import namespace
from .programs import Program

__all__ = [
    "Verdict",
    "check",
    "check_in_turn",
    "check_under_a_policy",
    "check_within_a_budget",
]

Kind = Literal[
    "same",
    "differs",
    "raises",
    "refused",  # with reason: what a region had used was written to later
    "torch differs",  # under any dispatch mode, even one that does nothing, and by little
    "plain raises",  # in the backward pass
    "discarded",  # plain torch cannot run it
    "unsteady",  # plain torch is not equal to itself
    "dies",  # its process is gone
]


@dataclass(frozen=True)
class Verdict:
    """How a program fared: `differs`, `raises` and `dies` are bugs of remat, all else is none."""

    kind: Kind
    what: str = ""
    is_close: bool = False  # of results that differ

    @property
    def way(self) -> tuple[str, str]:
        """The kind, and of an error when and what it was: a smaller program has to fail alike."""
        return self.kind, ":".join(self.what.split(":")[:2]) if self.kind == "raises" else ""

    @property
    def is_failure(self) -> bool:
        return self.kind in ("differs", "raises", "dies")


_INPUT = re.compile(r"^[bipx]\d+ = ")  # (of modules, numbers say more than sizes)
_PASSES = 5  # the fourth is settled, if it can be
_TIMES = 20  # plain torch is asked to repeat itself, if remat differs from it


class _Stopped(Exception):
    """A run ended early: in which pass, and by which error."""

    def __init__(self, when: str, error: Exception) -> None:
        super().__init__(f"{when} pass: {type(error).__name__}: {error}")
        self.when = when
        self.error = error


def check_in_turn(program: Program) -> Verdict:
    """Check a program as it is, under a policy, or within a budget: the seed says which."""
    return (check, check_under_a_policy, check_within_a_budget)[program.seed % 3](program)


def check_under_a_policy(program: Program) -> Verdict:
    """Run a program with a policy without reason on all its regions."""
    return check(program, under_a_policy(program.seed))


def check(program: Program, library: Any = None) -> Verdict:
    """Run a program both ways and say how they compare; `library` stands for `remat`."""
    library = library or remat
    codes = _compiled(program)
    if codes is None:
        return Verdict("discarded", "it is not Python")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.random.fork_rng():
            verdict = _check(codes, library)
            if verdict.kind == "differs" and program.backward_scope:
                # Under any mode some formulas of autograd go another way, up to the sign of zeros.
                without = _compiled(replace(program, backward_scope=False))
                if (
                    without is not None
                    and verdict.is_close
                    and _check(without, library).kind == "same"
                ):
                    return Verdict("torch differs", verdict.what)
            return verdict


def check_within_a_budget(program: Program) -> Verdict:
    """Run a program several times under a plan without reason; compare each time.

    Half of the programs run as in a manager, where a forward without a backward comes before each.
    Where plain torch can run it with another size of its inputs, each second pass has that.
    """
    budget = TorchBudget("1GB", planning(RandomPlans(program.seed)))
    # Half of them without regions inside: passes are settled then.
    library = remat if program.seed // 6 % 2 else kit.plain
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        sized = _sized(program)
        if isinstance(sized, Verdict):
            return sized
        for number in range(_PASSES * len(sized)):
            codes, expected = sized[number % len(sized)]
            evaluated = codes[0] if program.seed % 2 else None
            torch.manual_seed(0)
            try:
                got = _run(codes, library, functools.partial(_within, budget, evaluated))
            except _Stopped as stopped:
                is_refused = isinstance(stopped.error, remat.RematError)
                return Verdict("refused" if is_refused else "raises", str(stopped))
            difference = _first_difference(expected, got)
            if difference is not None:
                for _ in range(_TIMES):  # does plain torch read memory that nobody has written?
                    torch.manual_seed(0)
                    again = _first_difference(expected, _run(codes, kit.plain))
                    if again is not None:
                        return Verdict("unsteady", again)
                torch.manual_seed(0)
                # (In backward, too, if the program has a scope around it.)
                under_a_mode = _run(codes, kit.with_regions(_Passing), _Passing)
                if _is_close(expected, got) and _first_difference(under_a_mode, got) is None:
                    return Verdict("torch differs", difference)
                return Verdict("differs", difference)
    return Verdict("same")


def _sized(program: Program) -> list[tuple[tuple[CodeType, CodeType], dict[str, Any]]] | Verdict:
    """Return a program and, if there is one, itself with another size; each with what it gives."""
    found = []
    for each in (program, *_resized(program)):
        codes = _compiled(each)
        if codes is None:
            return Verdict("discarded", "it is not Python")
        torch.manual_seed(0)
        try:
            found.append((codes, _run(codes, kit.plain)))
        except _Stopped as stopped:
            if not found:
                return Verdict("discarded", str(stopped))
        if len(found) == 2:
            break
    return found


def _resized(program: Program) -> Iterator[Program]:
    """Yield the program with one of the sizes of its inputs enlarged: some have it written down."""
    inputs = [line.text for line in program.head if _INPUT.search(line.text)]
    sizes = dict.fromkeys(n for text in inputs for n in re.findall(r"\b\d+(?=, )", text))
    for size in sizes:
        enlarged = functools.partial(re.sub, rf"(?<![=\w.]){size}(?=[,)])", str(int(size) + 1))
        head = (
            replace(line, text=enlarged(line.text)) if _INPUT.search(line.text) else line
            for line in program.head
        )
        yield replace(program, head=tuple(head))


@contextlib.contextmanager
def _within(budget: TorchBudget, evaluated: CodeType | None = None) -> Iterator[None]:
    budget.begin(meters_backward=evaluated is not None)
    try:
        if evaluated is not None:
            for with_grad in (False, True):
                with torch.set_grad_enabled(with_grad), contextlib.suppress(Exception):
                    exec(evaluated, namespace(remat))
            torch.manual_seed(0)
        yield
    except BaseException:
        budget.end(failed=True)
        raise
    budget.end()


def _compiled(program: Program) -> tuple[CodeType, CodeType] | None:
    try:
        return (
            compile(program.forward_text(), f"<program {program.seed}>", "exec"),
            compile(program.backward_text(), f"<backward {program.seed}>", "exec"),
        )
    except SyntaxError:
        return None


def _check(codes: tuple[CodeType, CodeType], library: Any) -> Verdict:
    try:
        expected = _run(codes, kit.plain)
    except _Stopped as stopped:
        if stopped.when == "forward":
            return Verdict("discarded", str(stopped))
        return _check_after_error(codes, stopped, library)
    try:
        got = _run(codes, library)
    except _Stopped as stopped:
        if _stops_under_any_mode(codes, stopped):
            return Verdict("torch differs", str(stopped))
        return _judge_error(codes, stopped)
    difference = _first_difference(expected, got)
    if difference is None:
        return Verdict("same")
    # Some kernels of torch read memory that nobody has written to: once more is not enough.
    for _ in range(_TIMES):
        again = _first_difference(expected, _run(codes, kit.plain))
        if again is not None:
            return Verdict("unsteady", again)
    is_close = _is_close(expected, got)
    if is_close and _differs_under_any_mode(codes, got):
        return Verdict("torch differs", difference)
    return Verdict("differs", difference, is_close)


def _differs_under_any_mode(codes: tuple[CodeType, CodeType], got: dict[str, Any]) -> bool:
    """Return whether the result of remat is that of a mode which only passes ops on.

    Some kernels and formulas of torch take another way when a dispatch mode is on.
    """
    try:
        return _first_difference(_run(codes, kit.with_regions(_Passing)), got) is None
    except _Stopped:
        return False


def _stops_under_any_mode(codes: tuple[CodeType, CodeType], stopped: _Stopped) -> bool:
    try:
        _run(codes, kit.with_regions(_Passing))
    except _Stopped as other:
        return str(other) == str(stopped)
    return False


def _check_after_error(codes: tuple[CodeType, CodeType], plain: _Stopped, library: Any) -> Verdict:
    """Plain autograd refuses the backward pass: remat may do so or not, if it runs the forward."""
    try:
        _run(codes, library)
    except _Stopped as stopped:
        if stopped.when == "forward" and not _stops_under_any_mode(codes, stopped):
            return Verdict("raises", str(stopped))
    return Verdict("plain raises", str(plain))


def _judge_error(codes: tuple[CodeType, CodeType], stopped: _Stopped) -> Verdict:
    if "modified by an inplace operation" not in str(stopped.error):
        return Verdict("raises", str(stopped))
    why = _why_refused(codes, str(stopped.error))
    if why is None:
        return Verdict("raises", f"a refusal without reason: {stopped}")
    return Verdict("refused", why)


def under_a_policy(seed: int) -> SimpleNamespace:
    """Return `remat` with a random policy on every segment, scope and group."""
    rng = random.Random(seed)
    way, share = rng.choice(["names", "names", "calls", "ops"]), rng.choice([0.1, 0.3, 0.6, 0.9])
    kept: dict[str, bool] = {}

    def by_name(op: str, shapes: Any, nbytes: int, name: str) -> bool:
        return kept.setdefault(op, random.Random(f"{seed} {op}").random() < share)

    def by_call(op: str, shapes: Any, nbytes: int, name: str) -> bool:
        return rng.random() < share

    policy: Any = {"names": by_name, "calls": by_call}.get(way) or [
        op for op in _overloads() if random.Random(f"{seed} {op}").random() < share
    ]

    def checkpoint(fn: Any = None, *inputs: Any, **options: Any) -> Any:
        options = options if isinstance(fn, Tensor) else {"policy": policy, **options}
        return remat.checkpoint(fn, *inputs, **options)

    wrapped = SimpleNamespace(**{name: getattr(remat, name) for name in remat.__all__})
    wrapped.checkpoint = checkpoint
    wrapped.CheckpointScope = functools.partial(remat.CheckpointScope, policy=policy)
    wrapped.CheckpointGroup = functools.partial(remat.CheckpointGroup, policy=policy)
    return wrapped


@functools.cache
def _overloads() -> list[Any]:
    """Return the ops that write in place, and a few that make what they write to."""
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name[-1:] == "_"]
    packets += [torch.ops.aten.mul, torch.ops.aten.add, torch.ops.aten.clone, torch.ops.aten.sin]
    found = []
    for packet in packets:
        if isinstance(packet, torch._ops.OpOverloadPacket):
            found += [getattr(packet, overload) for overload in packet.overloads()]
    return found


# A run.


def _run(
    codes: tuple[CodeType, CodeType],
    library: Any,
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> dict[str, Any]:
    """Run a program, its forward part inside of a context; return all that it leaves, by name."""
    names = namespace(library)
    calls: dict[str, int] = {}
    _execute("forward", codes[0], names, around)
    after_forward = torch.random.get_rng_state()
    outs = names["outs"]
    for name, tensor in _leaves(names):
        tensor.register_post_accumulate_grad_hook(_counting(calls, name))
    _execute("backward", codes[1], names)
    return {
        "output": outs,
        "gradient": {name: tensor.grad for name, tensor in _leaves(names)},
        "gradient of output": [_kept_gradient(out) for out in outs],
        "result of autograd.grad": names["found"],
        "value": {n: value for n, value in names.items() if isinstance(value, Tensor)},
        "buffer": dict(_buffers(names)),
        "random state after the forward pass": after_forward,
        "random state at the end": torch.random.get_rng_state(),
        "generator": [v.get_state() for v in names.values() if isinstance(v, torch.Generator)],
        "counter": [v.n for v in names.values() if isinstance(v, kit.Counter)],
        "gradients that were ready": calls,
    }


def _kept_gradient(out: Tensor) -> Tensor | None:
    grad = out.grad if out.retains_grad else None
    # With is_grads_batched torch leaves one behind that is not good for anything.
    is_odd = grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)
    return None if is_odd else grad


def _execute(
    when: str,
    code: CodeType,
    names: dict[str, Any],
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    try:
        with around():
            exec(code, names)
    except Exception as error:
        raise _Stopped(when, error) from error
    finally:
        if _get_current_dispatch_mode() is not None:
            while _get_current_dispatch_mode() is not None:
                _pop_mode()
            raise _Stopped(when, AssertionError("a dispatch mode is still on"))


def _leaves(names: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in list(names.items()):
        if isinstance(value, torch.nn.Module):
            yield from ((f"{name}.{key}", p) for key, p in value.named_parameters())
        elif name[0] in "xp" and isinstance(value, Tensor) and _is_leaf(value):
            yield name, value


def _is_leaf(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


def _buffers(names: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in names.items():
        if isinstance(value, torch.nn.Module):
            yield from ((f"{name}.{key}", b) for key, b in value.named_buffers())


def _counting(calls: dict[str, int], name: str) -> Callable[[Tensor], None]:
    def count(_: Tensor) -> None:
        calls[name] = calls.get(name, 0) + 1

    return count


class _Passing(TorchDispatchMode):
    """Does nothing."""

    remat_looks_on = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# What differs.


def _first_difference(expected: Any, got: Any, where: str = "") -> str | None:
    if isinstance(expected, dict) and isinstance(got, dict):
        if expected.keys() != got.keys():
            return f"{where}: {sorted(expected)} and {sorted(got)}"
        pairs = [(f"{where} {key}".strip(), expected[key], got[key]) for key in expected]
    elif isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        if len(expected) != len(got):
            return f"{where}: {len(expected)} and {len(got)} of them"
        pairs = [(f"{where} {n}", a, b) for n, (a, b) in enumerate(zip(expected, got, strict=True))]
    elif isinstance(expected, Tensor) and isinstance(got, Tensor):
        return _difference_of_tensors(expected, got, where)
    else:
        return None if expected == got else f"{where}: {expected!r} and {got!r}"
    found = (_first_difference(a, b, name) for name, a, b in pairs)
    return next((difference for difference in found if difference is not None), None)


def _difference_of_tensors(expected: Tensor, got: Tensor, where: str) -> str | None:
    for what in ("dtype", "shape", "layout", "requires_grad"):
        if getattr(expected, what) != getattr(got, what):
            return f"{where}: {what} {getattr(expected, what)} and {getattr(got, what)}"
    if expected.layout is not torch.strided:
        return None if torch.equal(expected.to_dense(), got.to_dense()) else f"{where}: values"
    if expected.stride() != got.stride() and expected.numel():
        return f"{where}: strides {expected.stride()} and {got.stride()}"
    if _bytes(expected) == _bytes(got):
        return None
    return f"{where}:\n{expected.detach()}\nplain, and\n{got.detach()}\nwith remat"


def _is_close(expected: Any, got: Any) -> bool:
    """Return whether numbers differ by rounding only; all else has to be the same."""
    if isinstance(expected, dict) and expected.keys() == got.keys():
        return all(_is_close(expected[key], got[key]) for key in expected)
    if isinstance(expected, list | tuple) and len(expected) == len(got):
        return all(_is_close(a, b) for a, b in zip(expected, got, strict=True))
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        return _first_difference(expected, got) is None
    if expected.shape != got.shape or not expected.dtype.is_floating_point:
        return _first_difference(expected, got) is None
    ours, theirs = (value.detach().double().nan_to_num() for value in (got, expected))
    scale = float(theirs.abs().max()) if theirs.numel() else 0.0
    return torch.allclose(theirs, ours, rtol=0.05, atol=0.05 * scale)


def _bytes(tensor: Tensor) -> bytes:
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return bytes(plain.view(torch.uint8).numpy())


# When remat may refuse: what a region has used was written to after the region was over.


class _Audit(TorchDispatchMode):
    """Follows which storages regions use, and whether they are written to later, elsewhere."""

    remat_looks_on = True

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.region = 0
        self.made: dict[int, int] = {}  # the outermost region that made a storage
        self.used: dict[int, set[int]] = {}  # the outermost regions that used it
        self.alive: list[Any] = []
        self.looks: dict[int, set[str]] = {}  # the tensors that were seen over a storage
        self.late: set[int] = set()  # storages that were written to too late

    def begin(self) -> None:
        self.region += not self.depth
        self.depth += 1

    def end(self) -> None:
        self.depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        now = self.region if self.depth else 0
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            for key in self._keys(value):
                if is_write:
                    self._judge(key, now)
                if now:
                    self.used.setdefault(key, set()).add(now)
        for key in self._keys(kwargs.get("out")):
            self._judge(key, now)
        out = func(*args, **kwargs)
        for key in self._keys(out):
            self.made.setdefault(key, now)
            if now:
                self.used.setdefault(key, set()).add(now)
        return out

    def _judge(self, key: int, now: int) -> None:
        if self.used.get(key, set()) - {now}:
            self.late.add(key)

    def why(self, message: str) -> str | None:
        """Return where what a message names came from, if it was written to too late."""
        for key in self.late:
            if any(look in message for look in self.looks[key]):
                return "made inside" if self.made.get(key, 0) else "from outside"
        return None

    def _keys(self, value: Any) -> list[int]:
        if isinstance(value, list | tuple):
            return [key for part in value for key in self._keys(part)]
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return []
        storage = value.untyped_storage()
        self.alive.append(storage)
        look = f"[{value.dtype} {list(value.shape)}]"
        self.looks.setdefault(storage._cdata, set()).add(look)
        return [storage._cdata]


def _why_refused(codes: tuple[CodeType, CodeType], message: str) -> str | None:
    """Return where the tensor that remat names came from; None if it was not written to late."""
    audit = _Audit()

    @contextlib.contextmanager
    def region() -> Iterator[None]:
        audit.begin()
        try:
            yield
        finally:
            audit.end()

    names = namespace(kit.with_regions(region))
    names["in_thread"] = lambda work: work()  # a mode sees its own thread only
    with audit:
        for code in codes:
            exec(code, names)
    return audit.why(message)
