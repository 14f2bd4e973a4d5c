"""What an operator does to its arguments, read once from its schema, not guessed from its name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from .backend import (
    FLASH_ATTENTION_CPU,
    FUNCTIONS,
    NN_FUNCTIONS,
    SPARSE_MM_REDUCE,
    TENSOR_FUNCTIONS,
    TO_COPY,
    OpOverload,
    on_conjugates,
    with_version_counters,
)

__all__ = ["FUNCTION", "Route", "SchemaTraits", "call_in_mode", "traits_by_id", "traits_of"]

aten = torch.ops.aten
Key = int | str  # an argument: its position, or its name if it is a keyword


class Route(Enum):
    """How the recorder runs an operator."""

    SIMPLE = auto()  # reads tensors and allocates its output: the common case
    SIMPLE_UNLESS_RANDOM = auto()  # the same, if this call draws no random numbers
    VIEW = auto()  # reads and writes no data
    GENERAL = auto()


@dataclass(frozen=True, slots=True)
class SchemaTraits:
    """What the recorder needs to know about an operator."""

    func: Any
    call: Any  # the callable behind an OpOverload
    fast_call: Any  # the same for plain tensors, if no function mode is active
    fast_if_all_tensors: bool = False  # `fast_call` accepts tensors only
    route: Route = Route.GENERAL
    writes: tuple[Key, ...] = ()  # the arguments that it writes to
    hidden_writes: tuple[tuple[int, ...], int | None] | None = None
    makes_memory: bool = True  # at least one output has its own storage
    reshapes_in_place: bool = False  # changes the shape of its argument, but no data
    replaces_storage: bool = False  # gives a tensor another storage, and writes no data
    leaves_uninitialized: bool = False  # allocates memory without writing to it
    is_scratch: bool = False  # allocates memory and fills it with one number or a copy
    overwrites_all: bool = False  # writes every element of its target and reads none
    is_random: bool = False
    dropout: int | None = None  # the argument with the dropout probability
    saves_before_write: bool = False  # autograd saves an argument before the op writes to it
    counts_writes: bool = False  # increases version counters itself: writes to tensor lists
    uncounted: bool = False  # its writes do not increase version counters
    opaque: bool = True  # may be nondeterministic: its outputs are kept
    dynamic_shape: bool = False  # output shapes depend on data
    needs_grad_mode: bool = False  # computes less if grad mode is off
    uses_conjugates: bool = False  # uses conjugate views internally
    may_write: bool = False  # to an argument, hidden or not

    def hidden_targets(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the arguments that this call writes to although its schema does not say so."""
        if self.hidden_writes is None:
            return ()
        positions, condition = self.hidden_writes
        return positions if condition is None or args[condition] else ()

    def draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether this call draws random numbers. Attention without dropout does not."""
        if not self.is_random:
            return False
        if self.dropout is None:
            return True
        chance = args[self.dropout] if self.dropout < len(args) else kwargs.get("dropout_p", 0.0)
        return bool(chance)


def traits_of(func: Any) -> SchemaTraits:
    """Return the traits of an operator. Operators are never freed, so their id is a key."""
    traits = traits_by_id.get(id(func))
    if traits is None:
        traits = traits_by_id[id(func)] = _read(func)
    return traits


traits_by_id: dict[int, SchemaTraits] = {}
FUNCTION = SchemaTraits(
    "autograd.Function", None, None
)  # what a kernel may have written inside of it


def call_in_mode(traits: SchemaTraits, call: Callable[[], Any]) -> Any:
    """Call an op inside of a dispatch mode as it runs outside.

    Inside, PyTorch switches off layers of the dispatcher that some kernels rely on.
    """
    if traits.counts_writes:
        with with_version_counters():
            return call()
    if traits.uses_conjugates:
        with on_conjugates():
            return call()
    return call()


def _read(func: Any) -> SchemaTraits:
    call = getattr(func, "_op", func)
    if not isinstance(func, OpOverload):
        return SchemaTraits(func, call, call)
    schema, packet = func._schema, func._overloadpacket
    name, tags = func.name(), func.tags
    writes, counts_writes = _targets(func)
    aliases = [out.alias_info is not None for out in schema.returns]
    is_view = bool(aliases) and all(aliases) and not writes
    opaque = func.namespace not in ("aten", "prims") or packet in _OPAQUE
    reshapes = torch.Tag.inplace_view in tags and not opaque
    dropout = (n for n, a in enumerate(schema.arguments) if a.name in ("dropout_p", "dropout"))
    is_random = torch.Tag.nondeterministic_seeded in tags
    facts: dict[str, Any] = {
        "writes": writes,
        "hidden_writes": _HIDDEN_WRITES.get(packet),
        "reshapes_in_place": reshapes,
        "leaves_uninitialized": packet in _UNINITIALIZED,
        "is_scratch": packet in _SCRATCH,
        "opaque": opaque,
        "dynamic_shape": torch.Tag.dynamic_output_shape in tags,
        "uses_conjugates": "linalg" in name,
    }
    chance = next(dropout, None)
    facts["may_write"] = bool(writes or facts["hidden_writes"])
    is_simple = not (any(facts.values()) or is_view)
    return SchemaTraits(
        func,
        call,
        _fast_call(func) or call,
        fast_if_all_tensors=func in _FAST_FOR_TENSORS,
        route=_route(is_view, is_simple, is_random, chance is not None),
        makes_memory=not all(aliases),
        replaces_storage=packet is aten.set_,
        overwrites_all=packet in _OVERWRITES_ALL,
        is_random=is_random,
        dropout=chance,
        saves_before_write=packet in _SAVES_BEFORE_WRITE,
        counts_writes=counts_writes,
        uncounted=_is_uncounted(func, writes),
        needs_grad_mode="rnn" in name or "lstm" in name,
        **facts,
    )


def _route(is_view: bool, is_simple: bool, is_random: bool, has_dropout: bool) -> Route:
    if is_view:
        return Route.VIEW
    if not is_simple:
        return Route.GENERAL
    if not is_random:
        return Route.SIMPLE
    return Route.SIMPLE_UNLESS_RANDOM if has_dropout else Route.GENERAL


def _targets(func: Any) -> tuple[tuple[Key, ...], bool]:
    """Return the arguments that an op writes to, and whether it counts the writes itself."""
    # Collectives write to their tensors, but their schemas do not say so.
    collective = func.namespace == "c10d"
    targets = [
        (argument, argument.name if argument.kwarg_only else number)
        for number, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (collective and "Tensor" in str(argument.type))
    ]
    counts = collective or any("List" in str(argument.type) for argument, _ in targets)
    return tuple(key for _, key in targets), counts


def _is_uncounted(func: Any, writes: tuple[Key, ...]) -> bool:
    packet = func._overloadpacket
    return (
        bool(writes)
        and func.namespace != "c10d"
        and not packet.__name__.endswith("_")
        and not any(argument.is_out for argument in func._schema.arguments)
        and packet not in _SAVES_BEFORE_WRITE
    )


def _fast_call(func: Any) -> Any:
    if func in _FAST_FOR_TENSORS:
        return _function_of(func)
    return _FAST.get(func)


def _function_of(func: Any) -> Any:
    """Return the function of an op in `torch`; None if there is none."""
    name = "" if func is None else func._schema.name.removeprefix("aten::")
    return getattr(FUNCTIONS, name, None)


# Allocations without data. A kernel outside of the dispatcher may write to them, so what is read
# before a recorded write is kept.
_UNINITIALIZED = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.empty_permuted,
    aten.new_empty,
    aten.new_empty_strided,
}
# Memory that a custom Function hands to its kernels may begin as zeros, or as a copy.
_SCRATCH = {
    aten.clone,
    TO_COPY,
    aten.zeros,
    aten.zeros_like,
    aten.new_zeros,
    aten.ones,
    aten.ones_like,
    aten.new_ones,
    aten.full,
    aten.full_like,
    aten.new_full,
}
# Ops whose function in `torch` always resolves to this overload if all arguments are tensors. It
# parses its arguments faster than the overload.
_FAST_FOR_TENSORS = {
    aten.abs.default,
    aten.add.Tensor,
    aten.addmm.default,
    aten.bmm.default,
    aten.cos.default,
    aten.div.Tensor,
    aten.dot.default,
    aten.erf.default,
    aten.exp.default,
    aten.log.default,
    aten.maximum.default,
    aten.minimum.default,
    aten.mm.default,
    aten.mul.Tensor,
    aten.mv.default,
    aten.neg.default,
    aten.reciprocal.default,
    aten.relu.default,
    aten.rsqrt.default,
    aten.sigmoid.default,
    aten.sin.default,
    aten.sqrt.default,
    aten.sub.Tensor,
    aten.sum.default,
    aten.tanh.default,
    aten.where.self,
}
# The same with any arguments that this overload accepts.
_FAST: dict[Any, Any] = {
    FLASH_ATTENTION_CPU: _function_of(FLASH_ATTENTION_CPU),
    aten.gelu.default: getattr(NN_FUNCTIONS, "gelu", None),
    aten.native_layer_norm.default: getattr(FUNCTIONS, "native_layer_norm", None),
    aten.split.Tensor: getattr(FUNCTIONS, "split", None),
    aten.t.default: getattr(FUNCTIONS, "t", None),
    aten.transpose.int: getattr(FUNCTIONS, "transpose", None),
    aten.view.default: getattr(TENSOR_FUNCTIONS, "view", None),
}
_OVERWRITES_ALL = {
    aten.bernoulli_,
    aten.cauchy_,
    aten.copy_,
    aten.exponential_,
    aten.fill_,
    aten.geometric_,
    aten.log_normal_,
    aten.normal_,
    aten.random_,
    aten.uniform_,
    aten.zero_,
}
# Ops that change the storage of a tensor, or compute less if no gradient is needed.
_OPAQUE = {aten.set_, aten.resize_, aten.resize_as_, SPARSE_MM_REDUCE}
_SAVES_BEFORE_WRITE = {aten.rrelu_with_noise, aten.rrelu_with_noise_}
# Ops that write to arguments although their schema does not say so: the arguments, and the one that
# enables the write. In training mode batch normalization does not read the statistics that it
# updates, so a replay omits them.
_HIDDEN_WRITES: dict[Any, tuple[tuple[int, ...], int | None]] = {
    aten.batch_norm_gather_stats: ((3, 4), None),  # always
    aten.batch_norm_gather_stats_with_counts: ((3, 4), None),
    aten.batch_norm_update_stats: ((1, 2), None),
    aten.native_batch_norm: ((3, 4), 5),
    aten.cudnn_batch_norm: ((3, 4), 5),
    aten.miopen_batch_norm: ((3, 4), 5),
}


@functools.cache
def saves_its_output(func: Any) -> bool:
    """Return whether the backward of an op, or of one with this name, needs what it has made."""
    text = str(func).removeprefix("aten.")
    name = text.partition(".")[0]
    names = {text, name, name.removesuffix("_")}
    return not names.isdisjoint(_SAVE_THEIR_OUTPUT) or "attention" in name


# Ops whose backward needs what they gave: in place or not, in place only, or with an overload. It
# matters only for a value that one op made and the next one reads: whose backward is it saved for?
_SAVE_THEIR_OUTPUT = frozenset(
    [
        "_cdist_forward",
        "_log_softmax",
        "_softmax",
        "amax",
        "amin",
        "cumprod",
        "dist",
        "exp",
        "exp2",
        "expm1",
        "hypot",
        "linalg_cholesky_ex",
        "linalg_inv_ex",
        "linalg_qr",
        "linalg_solve_triangular",
        "linalg_vector_norm",
        "logcumsumexp",
        "logsumexp",
        "norm",
        "prod",
        "reciprocal",
        "relu",
        "rsqrt",
        "sigmoid",
        "sqrt",
        "std",
        "tan",
        "tanh",
        *("celu_", "elu_", "leaky_relu_", "rrelu_with_noise_"),
        *("pow.Scalar", "pow.Tensor_Tensor"),
    ]
)
