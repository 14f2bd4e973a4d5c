"""Policies for `checkpoint(fn, x, policy=...)`, `CheckpointScope` and `CheckpointGroup`.

A policy says what a checkpointed region keeps; the rest is recomputed in backward. A plain function
`(op_name, shapes, bytes, name) -> bool` is also a policy, and so are the policies of PyTorch's
selective checkpointing.

>>> import torch, remat
>>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
>>> y = remat.checkpoint(mlp, torch.ones(2, 8), policy=remat.policies.save_matmuls)
>>> y.sum().backward()  # recomputes the GELU, but no matrix product
"""

from __future__ import annotations

from typing import Any

from .plans.policy import (
    Decision,
    Either,
    Policy,
    SaveBelow,
    SaveEverything,
    SaveNames,
    SaveNothing,
    SaveOps,
    as_policy,
)
from .sizes import parse_bytes, shown

__all__ = [
    "Decision",
    "Policy",
    "either",
    "save_attention",
    "save_below",
    "save_everything",
    "save_matmuls",
    "save_names",
    "save_nothing",
    "save_ops",
]

save_nothing: Policy = SaveNothing()
save_everything: Policy = SaveEverything()
save_matmuls: Policy = SaveOps(
    frozenset(
        [
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "addbmm",
            "mv",
            "addmv",
            "dot",
            "vdot",
            "linear",
            "matmul",
            "inner",
            "outer",
            "tensordot",
            "einsum",
            "_scaled_mm",
            "_grouped_mm",
            "_int_mm",
        ]
    ),
    label="save_matmuls",
)
save_attention: Policy = SaveOps(
    frozenset(
        [
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_attention_math_for_mps",
            "_flash_attention_forward",
            "_efficient_attention_forward",
        ]
    ),
    label="save_attention",
)


def save_ops(*names: str) -> Policy:
    """Keep the outputs of these ops: "mm" for all overloads, or "aten.mm.default" for one.

    >>> save_ops("mm", "aten.addmm.default")
    save_ops('aten.addmm.default', 'mm')
    """
    return SaveOps(frozenset(_texts(names, "op names")))


def save_below(size: int | str) -> Policy:
    """Keep saved tensors that are smaller than `size`: bytes, or text such as "1MB".

    >>> save_below("1MB")
    save_below('1.0 MB')
    """
    return SaveBelow(parse_bytes(size, name="size"))


def save_names(*names: str) -> Policy:
    """Keep tensors that were named with `remat.name(tensor, "...")`.

    >>> save_names("attn")
    save_names('attn')
    """
    return SaveNames(frozenset(_texts(names, "tensor names")))


def either(*policies: Any) -> Policy:
    """Keep what at least one of several policies keeps.

    >>> either(save_matmuls, save_below("4KB"))
    either(save_matmuls, save_below('4.0 KB'))
    """
    if not policies:
        raise ValueError("either must be given at least one policy, got none")
    return Either(tuple(as_policy(policy) for policy in policies))


def _texts(names: tuple[str, ...], what: str) -> tuple[str, ...]:
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f'{what} must be text such as "mm", got {shown(names)}')
    return names
