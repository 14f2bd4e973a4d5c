"""What an operator does to its arguments, read once from its schema, never from its name alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from .backend import FUNCTIONS, NN_FUNCTIONS, TENSOR_FUNCTIONS

__all__ = ["OpTraits", "Route", "traits_by_id", "traits_of"]

aten = torch.ops.aten
Key = int | str  # an argument: its position, or its name if it is a keyword


class Route(Enum):
    """How the recorder runs an operator."""

    SIMPLE = auto()  # reads tensors and makes new memory: the common case
    SIMPLE_UNLESS_RANDOM = auto()  # the same, if this call draws no random numbers
    VIEW = auto()  # touches no bytes
    GENERAL = auto()


@dataclass(frozen=True, slots=True)
class OpTraits:
    """What the recorder has to know of an operator."""

    func: Any
    call: Any  # what calling an OpOverload comes to
    fast_call: Any  # the same for tensors of no subclass, if no function mode is on
    fast_if_all_tensors: bool = False  # `fast_call` takes nothing but tensors
    route: Route = Route.GENERAL
    writes: tuple[Key, ...] = ()  # the arguments that it writes to
    hidden_writes: tuple[tuple[int, ...], int | None] | None = None
    makes_memory: bool = True  # some output has memory of its own
    is_identity: bool = False  # a view that lies over the memory as its argument does
    reshapes_in_place: bool = False  # changes the shape of its argument, but no bytes
    replaces_storage: bool = False  # puts a tensor over other memory, and writes no bytes
    leaves_uninitialized: bool = False  # allocates memory and does not write to it
    overwrites_all: bool = False  # writes every element of its target and reads none
    is_random: bool = False
    dropout: int | None = None  # the argument that says with which chance it drops
    saves_before_write: bool = False  # autograd saves an argument before the op writes to it
    counts_writes: bool = False  # counts its writes by itself: those to lists of tensors
    uncounted: bool = False  # autograd does not count its writes, though its schema names them
    opaque: bool = True  # not to be trusted to repeat itself
    dynamic_shape: bool = False  # the shape of what it makes depends on values
    needs_grad_mode: bool = False  # makes less for a backward pass if gradients are off
    uses_conjugates: bool = False  # works with conjugate views inside

    @property
    def may_write(self) -> bool:
        return bool(self.writes or self.hidden_writes)

    def hidden_targets(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the arguments that this call writes to although the schema does not say so."""
        if self.hidden_writes is None:
            return ()
        positions, condition = self.hidden_writes
        return positions if condition is None or args[condition] else ()

    def draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether this call draws random numbers: attention without dropout does not."""
        if not self.is_random:
            return False
        if self.dropout is None:
            return True
        chance = args[self.dropout] if self.dropout < len(args) else kwargs.get("dropout_p", 0.0)
        return bool(chance)


def traits_of(func: Any) -> OpTraits:
    """Return what an operator does; by its id, which is quicker and stays, for they live on."""
    traits = traits_by_id.get(id(func))
    if traits is None:
        traits = traits_by_id[id(func)] = _read(func)
    return traits


traits_by_id: dict[int, OpTraits] = {}


def _read(func: Any) -> OpTraits:
    call = getattr(func, "_op", func)
    if not isinstance(func, torch._ops.OpOverload):
        return OpTraits(func, call, call)
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
        "opaque": opaque,
        "dynamic_shape": torch.Tag.dynamic_output_shape in tags,
        "uses_conjugates": "linalg" in name,
    }
    chance = next(dropout, None)
    is_simple = not (any(facts.values()) or is_view)
    return OpTraits(
        func,
        call,
        _fast_call(func) or call,
        fast_if_all_tensors=func in _FAST_FOR_TENSORS,
        route=_route(is_view, is_simple, is_random, chance is not None),
        makes_memory=not all(aliases),
        is_identity=packet in (aten.alias, aten.detach),
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
    """Return the arguments that an op writes to, and whether it counts that by itself."""
    # Collectives write to their tensors and do not say so.
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
        return getattr(FUNCTIONS, func._schema.name.removeprefix("aten::"))
    return _FAST.get(func)


# Memory that nobody has written to yet. A kernel that we cannot see may write to it, so what is
# read from it before a write that we saw is kept.
_UNINITIALIZED = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.empty_permuted,
    aten.new_empty,
    aten.new_empty_strided,
}
# Ops whose function in `torch`, called with nothing but tensors, comes to this overload whatever
# those are. It reads its arguments more quickly than the overload, which goes by its schema.
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
# The same with any arguments that this overload takes.
_FAST: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        FUNCTIONS._scaled_dot_product_flash_attention_for_cpu
    ),
    aten.gelu.default: NN_FUNCTIONS.gelu,
    aten.native_layer_norm.default: FUNCTIONS.native_layer_norm,
    aten.split.Tensor: FUNCTIONS.split,
    aten.t.default: FUNCTIONS.t,
    aten.transpose.int: FUNCTIONS.transpose,
    aten.view.default: TENSOR_FUNCTIONS.view,
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
# Ops that change what a tensor is made of, or make less when no gradient is asked for.
_OPAQUE = {aten.set_, aten.resize_, aten.resize_as_, aten._sparse_mm_reduce_impl}
_SAVES_BEFORE_WRITE = {aten.rrelu_with_noise, aten.rrelu_with_noise_}
# Ops that write to arguments although their schema does not say so: which ones, and the argument
# that says whether. In training, batch normalisation does not read the statistics that it updates,
# so a replay leaves them out.
_HIDDEN_WRITES: dict[Any, tuple[tuple[int, ...], int | None]] = {
    aten.batch_norm_gather_stats: ((3, 4), None),  # always
    aten.batch_norm_gather_stats_with_counts: ((3, 4), None),
    aten.batch_norm_update_stats: ((1, 2), None),
    aten.native_batch_norm: ((3, 4), 5),
    aten.cudnn_batch_norm: ((3, 4), 5),
    aten.miopen_batch_norm: ((3, 4), 5),
}
