"""What an operator does to its arguments, read from its schema, never from its name alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

__all__ = ["Kind", "is_ordinary", "kind_of", "kinds", "plain_types"]

aten = torch.ops.aten
_functions: Any = torch._C._VariableFunctions


class Kind:
    """What the recorder has to know of an operator."""

    __slots__ = (
        "blank",
        "call",
        "conjugates",
        "counts",
        "dropout",
        "dynamic",
        "fills",
        "fresh",
        "func",
        "hidden_writes",
        "light",
        "may_write",
        "needs_grad_mode",
        "of_tensors",
        "opaque",
        "quick",
        "random",
        "reseats",
        "reshapes",
        "same",
        "saved_early",
        "special",
        "special_if_it_draws",
        "uncounted",
        "view",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        self.func = func
        self.call = getattr(func, "_op", func)  # what calling an OpOverload comes to
        self.writes: tuple[int | str, ...] = ()  # arguments: numbers, or names of keywords
        self.fresh = True  # some output has memory of its own
        self.view = False  # all outputs are views, and nothing is written
        self.same = False  # a view that lies over the memory as its argument does
        self.reshapes = False  # changes the shape of its argument in place, but no bytes
        self.random = self.blank = self.fills = False
        self.dropout: int | None = None
        self.hidden_writes: tuple[tuple[int, ...], int | None] | None = None
        self.light = False  # passes over its input once; the rest that it makes is small
        self.saved_early = False  # autograd saves an argument before the op writes to it
        self.dynamic = False  # the shape of what it makes depends on values
        self.needs_grad_mode = False  # makes less for a backward pass if gradients are off
        self.conjugates = False  # works with conjugate views inside
        self.counts = False  # counts its writes by itself: those to lists of tensors
        self.uncounted = False  # autograd does not count its writes, though its schema names them
        self.opaque = True  # not to be trusted to repeat itself
        self.reseats = False  # puts a tensor over other memory, and writes no bytes
        if isinstance(func, torch._ops.OpOverload):
            self._read_schema(func)
        self.may_write = bool(self.writes or self.hidden_writes)
        more = bool(  # than to make new memory from what it reads
            self.writes
            or self.view
            or self.reshapes
            or self.blank
            or self.hidden_writes
            or self.opaque
            or self.dynamic
            or self.conjugates
        )
        self.special = more or self.random
        self.special_if_it_draws = self.dropout is not None and not more
        # The same, but called in a quicker way: if no tensor among its arguments is of a subclass,
        # none has a name, and, perhaps, all are tensors.
        self.quick = self
        self.of_tensors = func in _OF_TENSORS
        if self.of_tensors or func in _QUICK:
            self.quick = copy.copy(self)
            self.quick.call = _QUICK.get(func) or getattr(_functions, func._schema.name[6:])

    def _read_schema(self, func: torch._ops.OpOverload[Any, Any]) -> None:
        schema, packet = func._schema, func._overloadpacket
        self.writes = tuple(
            argument.name if argument.kwarg_only else number
            for number, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        self.counts = any(
            "List" in str(argument.type)
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        self.saved_early = packet in _SAVED_EARLY
        self.uncounted = (
            bool(self.writes)
            and not packet.__name__.endswith("_")
            and not any(argument.is_out for argument in schema.arguments)
            and not self.saved_early
        )
        if func.namespace == "c10d":  # collectives write to their arguments and do not say so
            self.writes = tuple(
                argument.name if argument.kwarg_only else number
                for number, argument in enumerate(schema.arguments)
                if "Tensor" in str(argument.type)
            )
            self.counts = True
        aliases = [out.alias_info is not None for out in schema.returns]
        self.fresh = not all(aliases)
        self.view = bool(aliases) and all(aliases) and not self.writes
        self.same = packet in (aten.alias, aten.detach)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.dropout = next(
            (n for n, a in enumerate(schema.arguments) if a.name in ("dropout_p", "dropout")), None
        )
        self.blank = packet in _BLANK
        self.fills = packet in _FILLS
        self.opaque = func.namespace not in ("aten", "prims") or packet in _OPAQUE
        self.reseats = packet is aten.set_
        self.reshapes = torch.Tag.inplace_view in func.tags and not self.opaque
        self.hidden_writes = _HIDDEN_WRITES.get(packet)
        self.light = packet in _LIGHT
        self.conjugates = "linalg" in func.name()
        self.dynamic = torch.Tag.dynamic_output_shape in func.tags
        self.needs_grad_mode = "rnn" in func.name() or "lstm" in func.name()

    def writes_in_secret(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the arguments that this call writes to although the schema does not say so."""
        if self.hidden_writes is None:
            return ()
        numbers, condition = self.hidden_writes
        return numbers if condition is None or args[condition] else ()

    def draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether this call draws random numbers: attention without dropout does not."""
        if not self.random:
            return False
        if self.dropout is None:
            return True
        chance = args[self.dropout] if self.dropout < len(args) else kwargs.get("dropout_p", 0.0)
        return bool(chance)


def kind_of(func: Any) -> Kind:
    """Return what an operator does; by its id, which is quicker and stays, for they live on."""
    kind = kinds.get(id(func))
    if kind is None:
        kind = kinds[id(func)] = Kind(func)
    return kind


kinds: dict[int, Kind] = {}

# Memory that nobody has written to yet. A kernel that we cannot see may write to it, so what is
# read from it before a write that we saw is kept.
_BLANK = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.empty_permuted,
    aten.new_empty,
    aten.new_empty_strided,
}
# Ops whose function in `torch`, called with nothing but tensors, comes to this overload whatever
# those are. It reads its arguments more quickly than the overload, which goes by its schema.
_OF_TENSORS = {
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
_QUICK: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        _functions._scaled_dot_product_flash_attention_for_cpu
    ),
    aten.gelu.default: torch._C._nn.gelu,
    aten.native_layer_norm.default: _functions.native_layer_norm,
    aten.split.Tensor: _functions.split,
    aten.t.default: _functions.t,
    aten.transpose.int: _functions.transpose,
    aten.view.default: torch._C.TensorBase.view,
}
# In-place ops that write every element and read none.
_FILLS = {
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
# Ops that pass over their input once. Autograd saves that, too, so what they make can wait.
_LIGHT = {
    aten._fused_rms_norm,
    aten.native_batch_norm,
    aten.native_group_norm,
    aten.native_layer_norm,
}
# Ops that change what a tensor is made of, or make less when no gradient is asked for.
_OPAQUE = {aten.set_, aten.resize_, aten.resize_as_, aten._sparse_mm_reduce_impl}
_SAVED_EARLY = {aten.rrelu_with_noise, aten.rrelu_with_noise_}
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


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor is strided memory that ops see as it is."""
    kind = type(tensor)
    if kind not in plain_types:
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return False
        plain_types.add(kind)
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


plain_types: set[type] = {Tensor, torch.nn.Parameter}
