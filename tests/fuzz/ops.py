"""The wide list: what a line of a random program can be, and what autograd is asked to do after."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .drafts import Draft

__all__ = ["OPS", "PLACES", "Op", "draw", "draw_mode"]


@dataclass(frozen=True)
class Op:
    """A template with places to fill, or a function that writes the line."""

    name: str
    draw: str | Callable[[Draft], str]
    group: str


OPS: list[Op] = []
_WEIGHTS = {
    "elementwise": 16,
    "in place": 18,
    "view": 14,
    "overwriting": 8,
    "nested": 5,
    "random": 12,
    "reduction": 8,
    "normalisation": 5,
    "matrix": 9,
    "convolution": 6,
    "indexing": 8,
    "joining": 5,
    "loss": 2,
    "network": 4,
    "custom": 4,
    "types": 4,
    "blank": 4,
    "python": 5,
    "autograd": 3,
    "marks": 5,
    "forget": 5,
}


def draw(rng: random.Random) -> Op:
    group = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    return rng.choice(_BY_GROUP[group])


# Places in templates.


def _floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and 0 < tensor.numel() <= 6000


def _of(dims: range) -> Callable[[Draft, dict[str, str]], str]:
    return lambda draft, _: draft.pick(lambda t: _floating(t) and t.dim() in dims)


def _target(dims: range) -> Callable[[Draft, dict[str, str]], str]:
    return lambda draft, _: draft.pick_to_write(
        lambda t: _floating(t) and t.dim() in dims and 0 not in t.stride()
    )


def _first(draft: Draft, chosen: dict[str, str]) -> Tensor:
    """Return the first value that was chosen, to which others are to fit."""
    name = next(n for key, n in chosen.items() if key not in ("n", "n1", "n2", "n3"))
    return draft.value(name)


def _broadcast(draft: Draft, chosen: dict[str, str]) -> str:
    first = _first(draft, chosen)
    strict = draft.rng.random() < 0.9

    def fits(t: Tensor) -> bool:
        shape = torch.broadcast_shapes(first.shape, t.shape)
        return (
            _floating(t) and shape.numel() <= draft.most and (first.dtype is t.dtype or not strict)
        )

    return draft.pick(fits)


def _broadcast_into(draft: Draft, chosen: dict[str, str]) -> str:
    first = _first(draft, chosen)
    return draft.pick(
        lambda t: _floating(t) and torch.broadcast_shapes(first.shape, t.shape) == first.shape
    )


def _same(draft: Draft, chosen: dict[str, str]) -> str:
    first = _first(draft, chosen)
    return draft.pick(lambda t: t.shape == first.shape and t.dtype is first.dtype)


def _dim(draft: Draft, chosen: dict[str, str]) -> str:
    dims = _first(draft, chosen).dim()
    return str(draft.rng.randint(-dims, dims - 1)) if dims else "0"


def _size(draft: Draft, chosen: dict[str, str]) -> str:
    return str(draft.rng.randint(1, max(1, max(_first(draft, chosen).shape, default=1))))


def _choice(*options: str) -> Callable[[Draft, dict[str, str]], str]:
    return lambda draft, _: draft.rng.choice(options)


def _matching(draft: Draft, chosen: dict[str, str]) -> str:
    """Return what the first value can be multiplied with as a matrix."""
    first = _first(draft, chosen)
    return draft.pick(
        lambda t: (
            _floating(t)
            and t.dim() >= 1
            and t.dtype is first.dtype
            and t.shape[-2 if t.dim() > 1 else 0] == first.shape[-1]
            and (t.dim() <= 2 or t.shape[:-2] == first.shape[:-2])
        )
    )


def _index(draft: Draft, chosen: dict[str, str]) -> str:
    options = ("0", "-1", "1:", ":-1", "::2", "..., 0", ":, 0", ":, 1:", "...", "None, 0", "1:2")
    return draft.rng.choice(options)


def _indices(draft: Draft, chosen: dict[str, str]) -> str:
    """Return integers that index the first dimension of the first value."""
    return draft.integers(_first(draft, chosen).shape[0], draft.rng.randint(1, 5))


def _new(draft: Draft, chosen: dict[str, str]) -> str:
    return draft.new()


PLACES: dict[str, Callable[[Draft, dict[str, str]], str]] = {
    "n": _new,
    "n1": _new,
    "n2": _new,
    "n3": _new,
    "t": _of(range(6)),
    "a": _of(range(6)),
    "t0": _of(range(1)),
    "t1": _of(range(1, 6)),
    "t2": _of(range(2, 6)),
    "t3": _of(range(3, 6)),
    "vec": _of(range(1, 2)),
    "m": _of(range(2, 3)),
    "cube": _of(range(3, 4)),
    "img": _of(range(4, 5)),
    "u": _broadcast,
    "into": _broadcast_into,
    "s": _same,
    "mat": _matching,
    "w": _target(range(6)),
    "w1": _target(range(1, 6)),
    "w2": _target(range(2, 6)),
    "d": _dim,
    "e": _dim,
    "k": _size,
    "i": _index,
    "j": _index,
    "ids": _indices,
    "c": _choice("0.5", "-0.3", "1.1", "0.9", "0.25"),
    "p": _choice("0.1", "0.3", "0.5", "0.8"),
    "yes": _choice("True", "False"),
    "g": lambda draft, _: draft.shared("g", "torch.Generator().manual_seed(5)"),
    "count": lambda draft, _: draft.shared("c", "Counter()"),
}


# Templates, by group.

_TEMPLATES: dict[str, str] = {
    "elementwise": """
        {n} = torch.sin({t})
        {n} = torch.cos({t})
        {n} = torch.tanh({t})
        {n} = torch.sigmoid({t})
        {n} = torch.exp({t}.clamp(max=1.5))
        {n} = torch.relu({t})
        {n} = F.gelu({t})
        {n} = F.gelu({t}, approximate="tanh")
        {n} = F.silu({t})
        {n} = F.mish({t})
        {n} = F.softplus({t})
        {n} = F.elu({t})
        {n} = F.selu({t})
        {n} = F.celu({t})
        {n} = F.leaky_relu({t}, 0.1)
        {n} = F.hardswish({t})
        {n} = F.hardsigmoid({t})
        {n} = F.hardtanh({t})
        {n} = F.hardshrink({t}, 0.2)
        {n} = F.softshrink({t}, 0.2)
        {n} = F.tanhshrink({t})
        {n} = F.logsigmoid({t})
        {n} = F.relu6({t})
        {n} = F.threshold({t}, 0.1, 0.05)
        {n} = F.softsign({t})
        {n} = F.glu({t1}, {d})
        {n} = torch.erf({t})
        {n} = torch.atan({t})
        {n} = torch.abs({t})
        {n} = {t} ** 2
        {n} = {t} ** 3 * 0.1
        {n} = torch.rsqrt({t} * {t} + 0.5)
        {n} = torch.log1p({t} * {t})
        {n} = torch.sqrt({t} * {t} + 0.1)
        {n} = 1.0 / (1.0 + {t} * {t})
        {n} = -{t}
        {n} = {t}.clone()
        {n} = {t}.clone()
        {n} = {t} + {c}
        {n} = {t} + {c}
        {n} = {t} * {c}
        {n} = {t} * {u}
        {n} = {t} * {u}
        {n} = {t} + {u}
        {n} = {t} + {u}
        {n} = {t} - {u} * 0.5
        {n} = {t} / ({u} * {u} + 1.0)
        {n} = {t} * {t} + {t}
        {n} = torch.addcmul({t}, {u}, {u}, value=0.3)
        {n} = torch.addcdiv({t}, {u}, {u} * {u} + 1.0, value=0.3)
        {n} = torch.lerp({t}, {s}, 0.3)
        {n} = torch.maximum({t}, {u})
        {n} = torch.minimum({t}, {u})
        {n} = torch.hypot({t}, {s} + 3.0)
        {n} = torch.atan2({t}, {s} + 3.0)
        {n} = torch.logaddexp({t}, {s})
        {n} = torch.where({t} > 0, {t}, {u})
        {n} = torch.where({t} > 0.1, {t}, 0.2)
        {n} = {t}.masked_fill({t} > 0.3, {c})
        {n} = torch.clamp({t}, -0.5, 0.8)
        {n} = torch.clamp({t}, min={s})
        {n} = torch.nan_to_num({t})
        {n} = torch.round({t} * 4) + {t}
        {n} = torch.remainder({t}, 0.7)
        {n} = torch.copysign({t}, {s})
        {n} = torch.logit(torch.sigmoid({t}), eps=0.01)
        {n} = torch.sinc({t})
        {n} = torch.special.entr(torch.sigmoid({t}))
        {n} = torch.special.xlog1py({t}, {s} * {s})
        {n} = torch.cumsum({t1}, {d})
        {n} = recycled({t})
        {n1}, {n2} = torch.frexp({t})
    """,
    "in place": """
        {w}.add_({into})
        {w}.add_({into}, alpha=0.5)
        {w} += {into}
        {w} -= {into}
        {w} *= {c}
        {w} *= {into}
        {w} /= 2.0
        {w}.mul_({into})
        {w}.mul_({c}).add_({c})
        {w}.sub_({c})
        {w}.div_({into} * {into} + 1.0)
        {w}.sin_()
        {w}.tanh_()
        {w}.sigmoid_()
        {w}.relu_()
        {w}.neg_()
        {w}.abs_()
        {w}.square_()
        {w}.clamp_(-0.6, 0.7)
        {w}.zero_()
        {w}.fill_({c})
        {w}.copy_({into})
        {w}.copy_({into})
        {w}.addcmul_({into}, {into}, value=0.2)
        {w}.lerp_({s}, 0.4)
        {w}.masked_fill_({w} > 0.2, {c})
        {w}.cumsum_(0)
        {w}.round_()
        {w}.erf_()
        {w}.pow_(2)
        {w}.floor_()
        F.relu({w}, inplace=True)
        F.elu_({w})
        F.leaky_relu_({w}, 0.1)
        F.silu({w}, inplace=True)
        F.hardtanh_({w})
        F.dropout({w}, {p}, inplace=True)
        F.threshold_({w}, 0.1, 0.05)
        {n} = F.relu({w}, inplace=True) * 0.5
        {n} = {w}.mul_({c})
        {w1}[{i}] = {c}
        {w1}[{i}] = {w1}[{i}] * 0.5
        {w1}[{i}] *= {c}
        {w1}[{i}] += {into}[{i}]
        {w1}[{i}] = {into}[{i}]
        {w1}[{i}] = {w1}[{j}]
        {w1}[{w1} > 0.1] = {c}
        {w1}[{w1} > 0.1] *= {c}
        {w1}[{ids}] = {c}
        {w1}[{ids}] *= 0.7
        {w1}.index_fill_(0, {ids}, {c})
        {w1}.index_add_(0, {ids}, {w1}.detach()[{ids}], alpha=0.5)
        {w1}.index_copy_(0, {ids}[:1], {w1}.detach()[:1] * 2.0)
        {w1}.index_put_(({ids},), torch.tensor(0.3, dtype={w1}.dtype), accumulate={yes})
        {w1}.scatter_({d}, torch.zeros_like({w1}, dtype=torch.long), {c})
        {w1}.scatter_add_(0, torch.zeros_like({w1}, dtype=torch.long), {w1}.detach() * 0.1)
        {w1}.masked_scatter_({w1} > 0, torch.rand_like({w1}))
        {w1}[1:].mul_({c})
        {w1}[0].add_({c})
        {w1}.select({d}, 0).mul_({c})
        {w1}.narrow({d}, 0, 1).copy_({into}.narrow({d}, 0, 1))
        {w1}.view(-1)[::2].mul_({c})
        {w1}.view(-1)[1:].sin_()
        {w2}.t().mul_({c})
        {w2}.transpose({d}, {e}).add_({c})
        {w2}.diagonal().fill_({c})
        {w2}.diagonal().mul_(2.0).sub_({c})
        {w2}.tril_()
        {w1}.unsqueeze_({d})
        {n} = ({t2} * 2.0).detach().transpose({d}, {e})<>{n}.add_({c})
        {n} = ({t2} * {c}).detach().mT<>{n}.mul_({c})<>{n1} = {n}.sin() * {t2}.mT<>{n}.add_({c})
        {n} = torch.exp({t1} * 0.1).data[{i}]<>{n}.add_({c})<>{n1} = {n} * {c}<>{n}.mul_(0.5)
        {w2}.transpose_({d}, {e})
        {w1}.squeeze_()
        {w2}.t_()
        {w}.detach().mul_({c})
        {w1}.unbind(0)[0].detach().add_({c})
        torch._foreach_mul_([{w}, {w1}], 0.8)
        torch._foreach_add_([{w1}], [{into}])
        {w}.uniform_(-0.5, 0.5)
        {w}.normal_()
        {w}.bernoulli_({p})
        {w}.random_(0, 3)
        {w}.requires_grad_()
    """,
    "view": """
        {n} = {t1}[{i}]
        {n} = {t1}[{i}]
        {n} = {t2}[{i}][{j}]
        {n} = {t}.view(-1)
        {n} = {t}.reshape(-1)
        {n} = {t1}.flatten()
        {n} = {t1}.reshape(-1, {k})
        {n} = {t1}.view({k}, -1)
        {n} = {t1}.unflatten(-1, (-1, {k}))
        {n} = {t}.view_as({s})
        {n} = {t2}.transpose({d}, {e})
        {n} = {m}.t()
        {n} = {t2}.mT
        {n} = {t3}.permute(-1, *range({t3}.dim() - 1))
        {n} = {t2}.movedim({d}, {e})
        {n} = {t1}.select({d}, 0)
        {n} = {t1}.narrow({d}, 0, {k})
        {n} = {t1}.unfold({d}, {k}, 1)
        {n} = {t2}.diagonal()
        {n} = {t2}.diagonal(1)
        {n} = {t}.unsqueeze({d})
        {n} = {t1}.squeeze()
        {n} = {t}.expand(2, *{t}.shape)
        {n} = {t}[None].expand(3, *{t}.shape)
        {n} = {t}.broadcast_to(2, *{t}.shape)
        {n} = {t1}.as_strided(({k},), (1,))
        {n} = {t1}.as_strided((2, {k}), (1, 1))
        {n} = {t1}.as_strided(({k},), (1,), 1)
        {n} = {t}.detach()
        {n} = {t}.alias() if hasattr({t}, "alias") else {t}[...]
        {n} = torch.ops.aten.alias({t})
        {n} = torch.view_as_real(torch.view_as_complex({t1}.reshape(-1, 2)))
        {n} = torch.view_as_complex({t1}.view(-1, 2)).conj().resolve_conj().imag
        {n} = torch.view_as_complex({t1}.view(-1, 2)).imag
        {n} = torch.view_as_complex({t1}.view(-1, 2)).conj().imag
        {n} = torch.view_as_complex({t1}.view(-1, 2)).conj().real
        {n1}, {n2} = {t1}.chunk(2, {d})
        {n1}, {n2} = torch.split({t1}, {k}, {d})
        {n1}, {n2}, {n3} = {t1}.tensor_split(3, {d})
        {n1}, {n2} = {t1}[:2].unbind(0)
        {n1}, {n2} = {t1}.unbind({d})
        {n1}, {n2}, {n3} = {t1}.unbind({d})
        {n} = {t2}.swapaxes(0, 1)
        {n} = {t}.contiguous()
        {n} = {t2}.transpose(0, 1).contiguous()
        {n} = {t2}.contiguous(memory_format=torch.preserve_format)
        {n} = {img}.contiguous(memory_format=torch.channels_last)
        {n} = {t1}.detach().view(torch.int32 if {t1}.dtype == torch.float32 else torch.int16)
    """,
    "random": """
        {n} = F.dropout({t}, {p})
        {n} = F.dropout({t}, {p})
        {n} = F.dropout({t}, {p}, training={yes})
        {n} = F.alpha_dropout({t}, {p}, training=True)
        {n} = F.feature_alpha_dropout({t2}, {p}, training=True)
        {n} = F.dropout1d({cube}, {p})
        {n} = F.dropout2d({img}, {p})
        {n} = {t} * torch.rand_like({t})
        {n} = {t} + torch.randn_like({t}) * 0.1
        {n} = {t} * torch.bernoulli(torch.full_like({t}, {p}))
        {n} = torch.bernoulli(torch.sigmoid({t}))
        {n} = torch.normal({t}.detach(), 0.2) * {t}
        {n} = torch.normal(0.0, 1.0, {t}.shape)
        {n} = torch.rand({t}.shape)
        {n} = torch.randn({t}.shape, generator={g}) * {t}
        {n} = torch.rand({t}.shape, generator={g}, dtype=torch.float64)
        {n} = {t} * torch.randint(0, 3, {t}.shape)
        {n} = F.rrelu({t}, training=True)
        {n} = F.rrelu({t}, 0.1, 0.4, training={yes})
        {n} = {t1}[torch.randperm({t1}.shape[0])]
        {n} = {t1}[torch.randperm({t1}.shape[0], generator={g})]
        {n} = {t1}[torch.randint({t1}.shape[0], (3,))]
        {n} = {t1}[torch.multinomial(torch.ones({t1}.shape[0]), 2, replacement=True)]
        {n} = F.gumbel_softmax({t1}, tau=0.7, dim={d})
        {n} = F.gumbel_softmax({t1}, tau=0.7, hard=True, dim={d})
        {n} = {t} * torch.empty_like({t}).uniform_()
        {n} = {t} + torch.empty_like({t}).exponential_() * 0.1
        {n} = {t} * torch.poisson(torch.full({t}.shape, 1.5))
        {n} = torch.nn.init.trunc_normal_(torch.empty_like({t})) * {t}
        {n} = {t} * torch.randn({t}.shape).clamp_(-1, 1)
        {n} = F.scaled_dot_product_attention({t2}, {t2}, {t2})
        {n} = F.scaled_dot_product_attention({t2}, {t2}, {t2}, dropout_p={p})
        {n} = F.scaled_dot_product_attention({img}, {img}, {img})
        {n} = F.scaled_dot_product_attention({img}, {img}, {img}, is_causal=True)
        {n} = F.scaled_dot_product_attention({img}, {img}, {img}, dropout_p={p})
        {n1}, {n2} = torch.native_dropout({t}, {p}, True)
        {n1} = F.fractional_max_pool2d({img}, 2, output_size=(2, 2))
    """,
    "reduction": """
        {n} = {t}.sum()
        {n} = {t1}.sum({d})
        {n} = {t1}.sum({d}, keepdim=True)
        {n} = {t}.mean()
        {n} = {t1}.mean({d}, keepdim=True)
        {n} = {t1} - {t1}.mean({d}, keepdim=True)
        {n} = torch.prod({t1}, {d})
        {n} = {t1}.amax({d})
        {n} = {t1}.amin({d}, keepdim=True)
        {n} = {t}.max()
        {n1}, {n2} = {t1}.max({d})
        {n1}, {n2} = {t1}.min({d}, keepdim=True)
        {n1}, {n2} = {t1}.median({d})
        {n1}, {n2} = {t1}.cummax({d})
        {n1}, {n2} = {t1}.mode({d})
        {n1}, {n2} = torch.var_mean({t1}, {d})
        {n1}, {n2} = torch.kthvalue({t1}, 1, {d})
        {n} = {t1}.std({d})
        {n} = {t1}.var({d}, unbiased=False)
        {n} = ({t1} + 2.0).norm(dim={d})
        {n} = torch.linalg.vector_norm({t1} + 2.0, 3, {d})
        {n} = torch.logsumexp({t1}, {d})
        {n} = torch.softmax({t1}, {d})
        {n} = F.log_softmax({t1}, {d})
        {n} = F.softmin({t1}, {d})
        {n} = torch.cumsum({t1}, {d})
        {n} = torch.cumprod({t1}, {d})
        {n} = torch.logcumsumexp({t1}, {d})
        {n} = F.normalize({t1} + 2.0, dim={d})
        {n} = F.cosine_similarity({t1} + 2.0, {s} + 2.0, dim={d})
        {n} = torch.cdist({t2}, {t2} + 1.0)
        {n} = F.pdist({m} + 0.1)
        {n} = torch.trapezoid({t1}, dim={d})
        {n} = torch.renorm({t2}, 2, 0, 0.7)
        {n} = torch.diff({t1}, dim={d})
        {n} = torch.nansum({t1}, {d})
        {n} = torch.quantile({t1}, 0.4, {d})
        {n} = {t}.argmax()
        {n} = torch.histc({t}.detach(), 4)
    """,
    "normalisation": """
        {n} = F.layer_norm({t1}, {t1}.shape[-1:])
        {n} = F.layer_norm({t2}, {t2}.shape[-2:])
        {n} = F.rms_norm({t1}, {t1}.shape[-1:])
        {n} = F.group_norm({t2}, 1)
        {n} = F.group_norm({t2}, {t2}.shape[1])
        {n} = F.instance_norm({t3})
        {n} = F.batch_norm({t2}, None, None, training=True)
        {n} = F.local_response_norm({t3}, 2)
    """,
    "matrix": """
        {n} = {t1} @ {mat}
        {n} = {t1} @ {mat}
        {n} = torch.matmul({t2}, {t2}.mT)
        {n} = {m} @ {m}.t()
        {n} = {m}.t() @ {m}
        {n} = torch.mm({m}, {m}.t())
        {n} = torch.bmm({cube}, {cube}.transpose(1, 2))
        {n} = torch.einsum("ij,kj->ik", {m}, {s})
        {n} = torch.einsum("bij,bkj->bik", {cube}, {s})
        {n} = torch.einsum("ij,j->i", {m}, {m}[0])
        {n} = torch.einsum("bij->bji", {cube})
        {n} = torch.einsum("...ij,...ik->...jk", {t2}, {t2})
        {n} = torch.outer({vec}, {vec})
        {n} = torch.dot({vec}, {s})
        {n} = torch.mv({m}, {m}[0])
        {n} = torch.addmm({m} @ {m}.t(), {m}, {m}.t(), beta=0.5, alpha=0.3)
        {n} = torch.baddbmm(torch.zeros(1, dtype={cube}.dtype), {cube}, {cube}.mT, beta=0.5)
        {n} = torch.addmv({m}[:, 0], {m}, {m}[0])
        {n} = torch.addr({m}, {m}[:, 0], {m}[0])
        {n} = torch.tensordot({t2}, {t2}, dims=1)
        {n} = torch.kron({m}[:2, :2] * 1, {m}[:1] * 1)
        {n} = torch.linalg.solve({m} @ {m}.t() + torch.eye({m}.shape[0]), {m})
        {n} = torch.linalg.cholesky({m} @ {m}.t() + torch.eye({m}.shape[0]))
        {n} = torch.linalg.inv({m} @ {m}.t() + torch.eye({m}.shape[0]))
        {n} = torch.linalg.det({m}.t() @ {m} + torch.eye({m}.shape[1]))
        {n1}, {n2} = torch.linalg.qr({m} @ {m}.t() + torch.eye({m}.shape[0]))
        {n} = torch.linalg.eigvalsh({m} @ {m}.t())
        {n} = torch.linalg.matrix_exp({m}[:2, :2] * 0.3)
        {n} = torch.linalg.multi_dot([{m}, {m}.t(), {m}])
        {n} = torch.tril({t2})
        {n} = torch.triu({t2}, 1)
        {n} = torch.trace({m})
        {n} = torch.cross({m}[:, :3], {m}[:, :3] + 1.0, dim=1)
    """,
    "convolution": """
        {n} = F.max_pool1d({cube}, 2)
        {n} = F.avg_pool1d({cube}, 2)
        {n} = F.max_pool2d({img}, 2)
        {n1}, {n2} = F.max_pool2d({img}, 2, return_indices=True)
        {n} = F.max_unpool2d(*F.max_pool2d({img}, 2, return_indices=True), 2)
        {n} = F.avg_pool2d({img}, 2, stride=1)
        {n} = F.lp_pool2d({img} + 2.0, 2, 2)
        {n} = F.adaptive_avg_pool2d({img}, 2)
        {n} = F.adaptive_max_pool1d({cube}, 2)
        {n} = F.interpolate({img}, scale_factor=2, mode="nearest")
        {n} = F.interpolate({img}, size=3, mode="bilinear")
        {n} = F.interpolate({cube}, size=4, mode="linear")
        {n} = F.pad({t1}, (1, 0))
        {n} = F.pad({t2}, (1, 0, 0, 1), value={c})
        {n} = F.pad({cube}, (1, 1), mode="reflect")
        {n} = F.pad({cube}, (1, 1), mode="circular")
        {n} = F.pad({img}, (1, 1, 0, 1), mode="replicate")
        {n} = F.pixel_unshuffle({img}[..., :2, :2], 2)
        {n} = F.unfold({img}, 2)
        {n} = F.fold(F.unfold({img}, 2), {img}.shape[-2:], 2)
        {n} = F.grid_sample({img}, {img}[:, :2].permute(0, 2, 3, 1), align_corners=False)
        {n} = F.channel_shuffle({img}, 1)
    """,
    "indexing": """
        {n} = {t1}[{ids}]
        {n} = {t2}[:, [0]]
        {n} = {t1}[[0, -1, 0]]
        {n} = {t2}[[0, 0], [0, 1]]
        {n} = {t}[{t} > 0]
        {n} = torch.masked_select({t}, {t} < 0.2)
        {n} = {t1}.index_select(0, {ids})
        {n} = {t1}.gather({d}, torch.zeros_like({t1}, dtype=torch.long))
        {n} = {t1}.gather({d}, {t1}.argsort({d}))
        {n} = torch.take_along_dim({t1}, {t1}.argmax({d}, keepdim=True), {d})
        {n} = torch.take({t}, torch.tensor([0, 0]))
        {n} = {t1}.scatter({d}, torch.zeros_like({t1}, dtype=torch.long), {t1} * 0.5)
        {n} = {t1}.scatter_add({d}, torch.zeros_like({t1}, dtype=torch.long), {t1})
        {n} = {t1}.index_add(0, {ids}, {t1}[{ids}])
        {n} = {t1}.index_put(({ids},), {t1}[{ids}] * 2.0, accumulate={yes})
        {n} = {t1}.index_copy(0, {ids}[:1], {t1}[:1])
        {n} = {t1}.index_fill(0, {ids}, {c})
        {n} = {t1}.index_reduce(0, {ids}, {t1}[{ids}], "amax")
        {n} = {t1}.scatter_reduce({d}, {t1}.argsort({d}), {t1}, "mean")
        {n} = {t1}.slice_scatter({t1}[:1] * 2.0, 0, 0, 1)
        {n} = {t2}.select_scatter({t2}[0] * 2.0, 0, 0)
        {n1}, {n2} = {t1}.topk(1, {d})
        {n1}, {n2} = {t1}.topk({k}, {d})
        {n1}, {n2} = {t1}.sort({d})
        {n1}, {n2} = {t1}.sort({d}, descending=True)
        {n} = {t1}[{t1}.sum(tuple(range(1, {t1}.dim()))).argsort()]
        {n} = {t}.nonzero()
        {n} = torch.unique({t}.detach())
        {n} = torch.where({t} > 0)[0]
        {n} = torch.bucketize({t}, torch.linspace(-1, 1, 5)) * {t}
        {n} = torch.roll({t1}, 1, {d})
        {n} = torch.flip({t1}, [{d}])
        {n} = torch.rot90({t2})
        {n} = {t1}.repeat(2, *[1] * ({t1}.dim() - 1))
        {n} = {t1}.repeat_interleave(2, {d})
        {n} = F.one_hot({t1}.argmax(-1), {t1}.shape[-1]) * {t1}
        {n} = torch.diag_embed({t1})
        {n} = torch.diag({m})
        {n} = F.embedding(weight={m}, input={ids})
        {n} = F.embedding_bag(weight={m}, input={ids}[None], mode="sum")
        {n} = torch.searchsorted(torch.linspace(-1, 1, 4), {t}.detach().float())
    """,
    "joining": """
        {n} = torch.cat([{t1}, {s}], {d})
        {n} = torch.cat([{t1}, {t1}], {d})
        {n} = torch.cat([{t}.reshape(-1), {a}.reshape(-1)])
        {n} = torch.stack([{t}, {s}], {d})
        {n} = torch.stack([{t}, {s}, {t} * 2.0])
        {n} = torch.hstack([{t}, {s}])
        {n} = torch.cat(torch.broadcast_tensors({t1}, {u}))
        {n1}, {n2} = torch.meshgrid({vec}, {vec}, indexing="ij")
        {n} = torch.block_diag({m}, {m}[:1])
        {n} = torch.cartesian_prod({vec}[:3], {vec}[:3])
        {n} = torch.stack(list({t1}.unbind(0))[::-1])
        {n} = torch.cat([part * k for k, part in enumerate({t1}.chunk(3, {d}))], {d})
        {n} = sum(torch._foreach_mul([{t}, {s}], 0.5))
        {n1}, {n2} = torch._foreach_add([{t}, {a}], 0.5)
        {n1}, {n2} = torch.broadcast_tensors({t}, {u})
    """,
    "loss": """
        {n} = F.mse_loss({t}, {s})
        {n} = F.l1_loss({t}, {s})
        {n} = F.smooth_l1_loss({t}, {s}, reduction="none")
        {n} = F.huber_loss({t}, {s} * 2.0)
        {n} = F.kl_div(F.log_softmax({t1}, -1), torch.softmax({s}, -1))
        {n} = F.binary_cross_entropy_with_logits({t}, torch.sigmoid({s}))
        {n} = F.binary_cross_entropy(torch.sigmoid({t}), torch.sigmoid({s}))
        {n} = F.cross_entropy({m}, {m}.argmax(1))
        {n} = F.cross_entropy({m}, {m}.argmax(1), label_smoothing=0.1, reduction="none")
        {n} = F.cross_entropy({cube}, {cube}.argmax(1))
        {n} = F.nll_loss(F.log_softmax({m}, 1), {m}.argmin(1))
        {n} = F.soft_margin_loss({t}, torch.sign({s}))
        {n} = F.cosine_embedding_loss({m}, {s} + 1.0, torch.ones({m}.shape[0]))
        {n} = F.triplet_margin_loss({m}, {m} + 1.0, {s} - 1.0)
        {n} = F.multi_margin_loss({m}, {m}.argmax(1))
        {n} = F.gaussian_nll_loss({t}, {s}, {t} * {t} + 0.1)
        {n} = F.poisson_nll_loss({t}, {s})
    """,
    "custom": """
        {n} = Scaled.apply({t}, {c})
        {n} = Squared.apply({t})
        {n} = Squashed.apply({t})
        {n1}, {n2} = Waved.apply({t}, {s})
        {n} = Bumped.apply({w})
        {n} = Bumped.apply({t}.clone())
        {n} = Noisy.apply({t})
        {n} = Retaped.apply({t})
        {n1}, {n2} = Ranked.apply({t1})
        {n} = Turned.apply({t} * 1.1)
        {n} = {t} + {c}<>{n1} = torch.sin({n} * 0.5)<>{n} = Turned.apply({n}) * {n1}
        {n} = torch.sin(Turned.apply({t2} * {c}).transpose({d}, {e}))
        {n} = spun({t})
        {n} = spun({t}).mul_({c})
        {n} = Carved.apply({t})
        {n} = torch.utils.checkpoint.checkpoint(wave, {t}, use_reentrant=False)
        {n} = torch.vmap(wave)({t1})
        {n} = torch.utils.checkpoint.checkpoint(wave, {t}, use_reentrant=True)
        {n} = remat.checkpoint(wave_again, {t}) * {c}
        {n} = torch.utils.checkpoint.checkpoint(remat.checkpoint(wave), {t}, use_reentrant=False)
        {n} = torch.utils.checkpoint.checkpoint(remat.checkpoint(wave), {t}, use_reentrant=True)
        {n1}, {n2} = remat.checkpoint(lambda a: (a, torch.sin(a + 1.0)), {t})
        {n1}, {n2} = remat.checkpoint(lambda a, f: (f(a), a + 0.5), {t}, f=torch.tanh)
    """,
    "types": """
        {n} = {t}.double()
        {n} = {t}.float()
        {n} = {t}.float()
        {n} = {t}.bfloat16()
        {n} = {t}.half().float()
        {n} = {t}.to(torch.float64) * 0.5
        {n} = {t}.to({a}.dtype)
        {n} = {t} * ({t} > 0)
        {n} = ({t} * 10).long() * {t}
        {n} = torch.complex({t}, {s})
        {n} = torch.complex({t}, {s}).abs()
        {n} = torch.complex({t}, {s}).conj().imag
        {n} = torch.view_as_real(torch.complex({t}, {s}) ** 2)
        {n} = torch.polar({t}, {s}).real
        {n} = torch.fft.irfft(torch.fft.rfft({t1}), {t1}.shape[-1])
        {n} = torch.fft.fft({t1}).abs()
        {n} = (torch.complex({m}, {m}) @ torch.complex({m}, {m}).mH).real
        {n} = torch.view_as_real(torch.resolve_conj(torch.complex({t}, {s}).conj()))
        {n} = {t}.to(torch.float64).to({t}.dtype)
    """,
    "blank": """
        {n} = torch.empty_like({t}).copy_({t})
        {n} = torch.empty({t}.shape, dtype={t}.dtype).copy_({t}) * {t}
        {n} = torch.zeros_like({t}).add_({t})
        {n} = torch.ones_like({t})
        {n} = torch.full_like({t}, {c}) * {t}
        {n} = torch.zeros(3, *{t}.shape)<>{n}[1] = {t}
        {n} = torch.zeros(2, *{t}.shape)<>{n}[0] = {t}<>{n}[1] = {a}.sum()
        {n} = torch.empty(2, *{t}.shape)<>for k in range(2): {n}[k] = {t} * (k + 1)
        {n} = {t}.new_zeros({t}.shape)<>{n} += {t}
        {n} = {t}.new_empty({t}.shape).fill_({c})
        {n} = torch.empty({t}.shape)<>{n}.numpy()[...] = 0.5<>{n} = {n} * {t}
        {n} = torch.empty_strided((2, 3), (1, 2)).fill_({c})
        {n} = torch.empty_like({t})<>with torch.no_grad():<>    torch.mul({t}, 2.0, out={n})
        {n} = torch.tensor([0.5, -0.5, 1.0])
        {n} = torch.arange(4.0) * {t0}
        {n} = torch.tensor({t}.tolist()) * {t}
        {n} = torch.from_numpy({t}.detach().float().numpy() * 2.0)
        {n} = torch.from_numpy({t}.detach().clone().float().numpy()) + {t}
        {n} = torch.eye(3) * {t0}
        {n} = torch.linspace(-1, 1, 5)
    """,
    "python": """
        {n} = {t} * 2.0 if {a}.sum().item() > 0 else torch.sin({t})
        {n} = {t} * {count}.next()
        {n} = {t} + 0.1 * {count}.next()
        {n} = {t} * float({a}.detach().mean())
        {n} = {t}.sin() if bool(({t} > 0).any()) else {t}.cos()
        {n} = {t} * {t1}.shape[0]
        {n} = {t} * torch.rand(()).item()
        {n} = sum(row for row in {t1})
        {n} = {t1}[: int(torch.randint(1, 3, ()))]
        {n} = {t}<>while {n}.detach().abs().max() > 0.3: {n} = {n} * 0.5
        {n} = torch.stack([row * k for k, row in enumerate({t1})])
        {n} = {t} * len({t1}.tolist())
        {n} = {t} if torch.equal({t}, {a}) else {t} + 0.5
    """,
    "autograd": """
        {n} = {t}.detach().requires_grad_() * 2.0
        {n} = {t} + {t}.detach() * 0.5
        {n} = ({t} - {t}.detach()) * {t}
        with torch.no_grad():<>    {n} = torch.sin({t}) * {t}
        with torch.no_grad():<>    {n} = {t}.clone()<>    {n}.mul_(0.5)<>{n} = {n} * {t}
        with torch.no_grad():<>    {n} = {t} + 1.0<>{n} = torch.tanh({n}) * {t}
        with torch.inference_mode():<>    {n} = torch.sin({t})<>{n} = {t} + {n}.clone()
        {n} = {t} + 0.0<>{n}.register_hook(lambda grad: grad * 2.0) if {n}.requires_grad else None
        {n} = {t} * 1.5<>{n}.retain_grad() if {n}.requires_grad else None
        {n} = torch.autograd.grad(torch.sin({t}).sum(), {t}, create_graph={yes})[0]
        {n} = torch.autograd.grad({t}.sum(), {a}, create_graph=True, allow_unused=False)[0]
        {n} = torch.autograd.grad({t}.sum(), {a}, retain_graph=True)[0]
    """,
    "marks": """
        remat.mark_checkpoint({t})
        {n} = remat.mark_checkpoint({t})
        {n} = remat.mark_checkpoint(torch.tanh({t})) * {c}
        {n} = torch.sin(remat.mark_checkpoint({t} * {u}))
    """,
}


# What is read, overwritten, and read again, within a few lines; a blank line ends each.
_OVERWRITING = """
{n} = {t} + {c}
{n1} = torch.sin({n} * 2.0)
{n}.mul_({c})
{n2} = torch.tanh({n})

{n} = {t} * {c}
{n1} = torch.exp(-({n} + 0.5) ** 2)
{n} += {n1}
{n2} = {n} ** 2

{n} = {t1} + {c}
{n1} = torch.sigmoid({n}[{i}] + 0.1)
{n}[{i}] = {c}
{n2} = {n} ** 2

{n} = {t1} + {c}
{n1} = {n}[{i}]
{n2} = torch.sin({n1} + 0.1)
{n1}.mul_({c})
{n3} = {n} ** 2

{n} = {t1} + {c}
{n1} = {n}[1:]
{n}[0] = {c}
{n2} = ({n1} + 0.5) ** 2
{n1} *= {c}

{n} = {t} * {c}
{n1} = {n}.view(-1)
{n2} = torch.sin({n1} + {c})
{n1}[::2] = {c}
{n3} = {n} ** 3

{n} = {t2} + {c}
{n1} = {n}.mT
{n2} = torch.tanh({n1} + {c})
{n1}.add_({n2})
{n3} = {n} * {n}

{n} = {t} + {c}
for k in range(3):
    {n} = {n}.mul_({c}).add_(torch.sin({n} + 1.0))

{n} = {t} + {c}
{n1} = []
for k in range(3):
    {n}.add_({c})
    {n1}.append(torch.sin({n} * 1.0))
{n1} = torch.stack({n1})

{n} = torch.zeros_like({t})
{n1} = torch.sin({t} + {n})
{n}.add_({n1})
{n2} = {n} * {n}

{n} = torch.zeros(3, *{t}.shape)
for k in range(3):
    {n}[k] = torch.sin({t} * k + {n}[k - 1])
{n} = {n} ** 2

{n} = {t} + {c}
{n1} = {n} + 1.0
{n}.copy_({n1} * 2.0)
{n2} = torch.sin({n1}) * torch.cos({n})

{n} = {t} + {c}
{n1} = {n}.detach()
{n2} = torch.sin({n} + {n1})
{n}.mul_({c})
{n3} = {n} * {n1}

{n} = {t} + {c}
{n1} = {n}.clone()
{n}.zero_()
{n2} = torch.sin({n1} + {n} + {t})

{n} = {t1} + {c}
{n1}, {n2} = {n}[:2].clone().unbind(0)
{n3} = torch.sin({n1} * {n2})

{n} = {t} + {c}
{n1} = torch.sin({n} + 1.0)
write_unseen({n})
{n2} = torch.sin({n} + {n1})

{n} = {t} + {c}
write_unseen({n})
{n1} = {n} * {n}

{n} = unseen({t})
{n1} = torch.tanh({n} * 2.0)

{n} = torch.rand_like({t})
{n1} = torch.sin({t} + {n})
{n}.mul_({c})
{n2} = torch.sin({t} - {n})

{n} = {t} + torch.rand_like({t})
{n1} = torch.sin({n} + 1.0)
{n}.add_(torch.rand_like({t}))
{n2} = {n} ** 2

{n} = {t} + {c}
{n}.uniform_()
{n1} = torch.sin({n} + {t})
{n}.bernoulli_(0.5)
{n2} = torch.sin({n} + {t})

{n} = F.dropout({t}, 0.3)
{n1} = torch.sin({n} + {c})
{n} += {n1}
{n2} = F.dropout({n}, 0.4) * {n1}

{n} = {t} * {c}
{n1} = torch.sin({n} + {t})
F.dropout({n}, 0.5, inplace=True)
{n2} = torch.sin({n} + {t})

{n} = torch.empty_like({t})
{n}.copy_({t})
{n1} = torch.sin({n} + {c})
{n}.fill_({c})
{n2} = {n} * {t}

{n} = torch.empty({t}.shape)
{n}.fill_({c})
{n1} = torch.sin({n} + {t})
{n}.normal_()
{n2} = torch.sin({n} + {t})

{n} = torch.empty(2, *{t}.shape)
{n}[0].copy_({t})
{n}[1].fill_({c})
{n1} = torch.sin({n} + {c})

{n} = {t} + {c}
{n1} = torch.view_as_complex({n}.view(-1, 2)).conj()
{n2} = {n1}.imag * 2.0
{n}.mul_({c})

{n} = ({t} * 3.0).clone().view(1, -1)
torch._foreach_mul_([{n}], 0.8)
{n1} = torch.sin({n} + {c})

{n} = {t1} + {c}
torch._foreach_add_([{n}[0], {n}[1:]], [{n}[0].detach(), {n}[1:].detach()])
{n1} = {n} ** 2

{n} = torch.empty(2, *{t}.shape)
{n}.numpy()[...] = 0.5
{n}[0].copy_({t})
{n1} = torch.sin({n} + {t})

{n} = torch.sin({t1})
remat.mark_checkpoint({n}[1:])
{n1} = torch.tanh({n} * 2.0)
{n2} = torch.tanh({n}[{i}] + {c})

{n} = {t1} * 2.0 + {c}
{n1} = {n}[{i}]
remat.mark_checkpoint({n1})
{n2} = torch.sin({n} + {c}) + torch.sin({n1} * 0.5).sum()

with torch.inference_mode():
    {n} = torch.sin({t})
{n1} = torch.sin({t} + {n})
with torch.inference_mode():
    {n}.mul_(2.0)
{n2} = torch.sin({t} + {n})

{n} = {t} + {c}
remat.mark_checkpoint({n})
{n1} = torch.sin({n} + 1.0)
{n}.mul_({c})
{n2} = torch.sin({n} + {n1})

{n} = torch.zeros_like({t})
{n1} = torch.sin({t} + {n})
with torch.no_grad():
    torch.mul({t}, 2.0, out={n})
{n2} = torch.sin({t} + {n})

torch.manual_seed(3)
{n} = F.dropout({t}, 0.4)
torch.manual_seed(3)
{n1} = torch.sin(F.dropout({n} + {t}, 0.4))

{n} = {t} + {c}
try:
    {n}.add_(torch.ones(7919))
except RuntimeError:
    {n1} = torch.sin({n} + 1.0)
{n}.mul_({c})
{n2} = torch.sin({n} + 1.0)

{n} = {t} + {c}
if {n}.requires_grad:
    {n}.register_hook(lambda grad: remat.checkpoint(wave, grad))
{n1} = torch.sin({n} * {n})

{n} = torch.cat([{t1}, {t1}[:0]]) + {c}
{n1} = torch.sin({n}[:0]).sum() + torch.sin({n} + 1.0)

{n1}, {n2} = interleaved(remat, {t})
"""
# The same, in regions of their own: they have to be in an outer one, which knows what they read.
_NESTED = """
{n} = {t} + {c}
with remat.CheckpointScope("early"):
    {n1} = torch.sin({n} + 1.0)
with remat.CheckpointScope("late"):
    {n}.mul_({c})
    {n2} = torch.tanh({n})

{n} = {t} + {c}
with remat.CheckpointScope("early"):
    {n1} = torch.sin({n} + 1.0)
{n}.mul_({c})
with remat.CheckpointScope("late"):
    {n2} = torch.sin({n} + {n1})
{n3} = {n} * {n}

{n} = torch.tanh({t}) * {c}
with remat.CheckpointScope("one"):
    {n1} = {n} * 1.0
    with remat.CheckpointScope("two"):
        {n2} = torch.sin({n1} + {n})
    {n1} += {n2}
    with remat.CheckpointScope("three"):
        {n1}.add_({c})
        {n3} = torch.sin({n1} + {n})

{n} = remat.checkpoint(torch.sin, {t})
{n1} = remat.checkpoint(lambda a, b: torch.tanh(a + b).mul(b), {n}, {t})
{n2} = remat.checkpoint(torch.add, {n1}.mul_({c}), {n}) ** 2

{n} = torch.rand_like({t}) + {t}
with remat.CheckpointScope("one"):
    {n1} = torch.sin(F.dropout({n} + 1.0, 0.3))
with remat.CheckpointScope("two", use_recomputation=False):
    {n2} = torch.sin(F.dropout({n1} + {n}, 0.3))
{n3} = remat.checkpoint(lambda: F.dropout({n2}, 0.4) * torch.rand_like({n}))()

{n} = {t} + {c}
for k in range(3):
    with remat.CheckpointScope(f"step {k}"):
        {n} = torch.sin({n} + k)
        remat.checkpoint({n})
        {n} = {n}.mul({c}).add_({n})

{n} = {t1} + {c}
{n1} = {n}[{i}]
with remat.CheckpointScope("view"):
    {n2} = torch.sin({n1} + 1.0)
    {n1}.mul_({c})
{n3} = torch.sin({n} + 1.0)
"""


def _lines_of(template: str) -> str:
    return template.replace("<>", "\n")


for _group, _texts in _TEMPLATES.items():
    for _text in dict.fromkeys(_texts.strip().splitlines()):
        OPS.append(Op(_text.strip(), _lines_of(_text.strip()), _group))
for _text in _OVERWRITING.strip().split("\n\n"):
    OPS.append(Op(_text, _text, "overwriting"))


def _in_a_region(template: str) -> Callable[[Draft], str]:
    def draw(draft: Draft) -> str:
        assert draft.in_region()
        return draft.fill(template)

    return draw


for _text in _NESTED.strip().split("\n\n"):
    OPS.append(Op(_text, _in_a_region(_text), "nested"))


# Lines that take more than a template.


def op(group: str, times: int = 1) -> Callable[[Callable[[Draft], str]], Callable[[Draft], str]]:
    """Put a function that writes lines into the list, more than once if it is to come often."""

    def put(function: Callable[[Draft], str]) -> Callable[[Draft], str]:
        OPS.extend([Op(function.__name__, function, group)] * times)
        return function

    return put


@op("forget")
def forget(draft: Draft) -> str:
    return f"del {draft.local_to_forget()}"


@op("marks", times=3)
def checkpointed_tensor(draft: Draft) -> str:
    """Only where a scope, or a segment, knows how the tensor was made."""
    assert draft.in_region()
    return draft.fill(
        draft.rng.choice(
            (
                "remat.checkpoint({t})",
                "{n} = remat.checkpoint({t})",
                "{n} = torch.tanh(remat.checkpoint({t} * 0.5))",
                "{n} = remat.adaptive_checkpoint({t}, threshold=200)",
                "remat.adaptive_checkpoint({t}, threshold='1KB')",
            )
        )
    )


def _input(draft: Draft, *dims: int) -> tuple[str, Tensor]:
    name = draft.pick(lambda t: _floating(t) and t.dim() in dims)
    return name, draft.value(name)


@op("matrix", times=6)
def linear(draft: Draft) -> str:
    x, value = _input(draft, 1, 2, 3)
    width = draft.rng.choice((2, 3, 4, value.shape[-1]))
    weight = draft.param(width, value.shape[-1], dtype=value.dtype)
    bias = f", {draft.param(width, dtype=value.dtype)}" if draft.rng.random() < 0.7 else ""
    return f"{draft.new()} = F.linear({x}, {weight}{bias})"


@op("matrix", times=2)
def times_parameter(draft: Draft) -> str:
    x, value = _input(draft, 1, 2, 3)
    return f"{draft.new()} = {x} * {draft.param(*value.shape[-1:], dtype=value.dtype)}"


@op("matrix")
def addmm(draft: Draft) -> str:
    x, value = _input(draft, 2)
    bias = draft.param(3, dtype=value.dtype)
    weight = draft.param(value.shape[1], 3, dtype=value.dtype)
    return f"{draft.new()} = torch.addmm({bias}, {x}, {weight})"


def _refuse_autocast() -> None:
    """Refuse where a kernel of torch rounds otherwise as soon as any dispatch mode is on."""
    assert not torch.is_autocast_enabled("cpu")


@op("matrix")
def sparse_product(draft: Draft) -> str:
    _refuse_autocast()
    return draft.fill("{n} = torch.sparse.mm({m}.to_sparse(), {m}.t())")


@op("matrix")
def bilinear(draft: Draft) -> str:
    _refuse_autocast()
    x, value = _input(draft, 2)
    width = value.shape[1]
    weight = draft.param(2, width, width, dtype=value.dtype)
    return f"{draft.new()} = F.bilinear({x}, {x}, {weight})"


@op("convolution", times=5)
def convolution(draft: Draft) -> str:
    x, value = _input(draft, 3, 4)
    channels, out = value.shape[1], draft.rng.choice((2, 3, 4))
    kernel = [draft.rng.choice((1, 2, 3))] * (value.dim() - 2)
    dims = len(kernel)
    kind = draft.rng.choice(("", "", "", "grouped", "transposed"))
    padding = draft.rng.choice((0, 1))
    if kind == "grouped":
        weight = draft.param(channels, 1, *kernel, dtype=value.dtype)
        return f"{draft.new()} = F.conv{dims}d({x}, {weight}, groups={channels}, padding=1)"
    if kind == "transposed":
        weight = draft.param(channels, out, *kernel, dtype=value.dtype)
        return f"{draft.new()} = F.conv_transpose{dims}d({x}, {weight}, stride=2)"
    weight = draft.param(out, channels, *kernel, dtype=value.dtype)
    bias = draft.param(out, dtype=value.dtype)
    return f"{draft.new()} = F.conv{dims}d({x}, {weight}, {bias}, padding={padding})"


@op("normalisation", times=3)
def layer_norm(draft: Draft) -> str:
    x, value = _input(draft, 1, 2, 3)
    width = value.shape[-1]
    scale, shift = (draft.param(width, dtype=value.dtype) for _ in range(2))
    return f"{draft.new()} = F.layer_norm({x}, ({width},), {scale}, {shift})"


@op("normalisation", times=4)
def batch_norm(draft: Draft) -> str:
    """In training: it writes to its statistics, and does not read them."""
    x, value = _input(draft, 2, 3, 4)
    width = value.shape[1]
    mean, variance = draft.buffer(width), draft.buffer(width, start="ones")
    assert draft.may_write(mean)  # torch does not count these writes, so nobody can see them
    assert draft.may_write(variance)
    affine = ""
    if draft.rng.random() < 0.5:
        affine = f", {draft.param(width)}, {draft.param(width)}"
    if draft.rng.random() < 0.2:
        return f"{draft.new()} = F.instance_norm({x}, {mean}, {variance}{affine})"
    return f"{draft.new()} = F.batch_norm({x}, {mean}, {variance}{affine}, training=True)"


@op("normalisation")
def batch_norm_with_statistics(draft: Draft) -> str:
    x, value = _input(draft, 2, 3, 4)
    width = value.shape[1]
    mean, variance = draft.buffer(width), draft.buffer(width, start="ones")
    return f"{draft.new()} = F.batch_norm({x}, {mean}, {variance}.abs() + 0.1)"


@op("normalisation")
def group_norm(draft: Draft) -> str:
    x, value = _input(draft, 3, 4)
    width = value.shape[1]
    return f"{draft.new()} = F.group_norm({x}, 1, {draft.param(width)}, {draft.param(width)})"


@op("indexing", times=3)
def embedding(draft: Draft) -> str:
    ids = draft.integers(5, draft.rng.randint(1, 4))
    options = draft.rng.choice(("", "", "", ", padding_idx=0", ", scale_grad_by_freq=True"))
    return f"{draft.new()} = F.embedding({ids}, {draft.param(5, 4)}{options})"


@op("loss", times=8)
def cross_entropy(draft: Draft) -> str:
    x, value = _input(draft, 2)
    ids = draft.integers(value.shape[1], value.shape[0])
    weight = f", {draft.buffer(value.shape[1], start='ones')}" if draft.rng.random() < 0.2 else ""
    return f"{draft.new()} = F.cross_entropy({x}, {ids}{weight})"


@op("elementwise")
def prelu(draft: Draft) -> str:
    x, value = _input(draft, 1, 2, 3)
    return f"{draft.new()} = F.prelu({x}, {draft.param(1, dtype=value.dtype)})"


@op("in place", times=5)
def into_buffer(draft: Draft) -> str:
    """Keep something outside of the program: averages, copies, counts."""
    x, value = _input(draft, 0, 1, 2)
    buffer = draft.buffer(*value.shape)
    assert draft.may_write(buffer)
    template = draft.rng.choice(
        (
            "{b}.copy_({x}.detach())",
            "{b}.mul_(0.9).add_({x}.detach(), alpha=0.1)",
            "{b}.add_(1.0)",
            "with torch.no_grad():\n    {b}.lerp_({x}.to({b}.dtype), 0.5)",
            "{b}.copy_({x}.detach())\n{n} = {b} * {x}",
            "{n} = {b} * {x}\n{b}.add_(1.0)",
            "{n} = torch.sin({b} + {x})\n{b}.mul_(0.5)",
            "{n} = torch.sin({b} + {x})\n{b}.data.mul_(0.5)\n{n1} = torch.sin({b} - {x})",
            "{n} = {b}.detach()\n{n1} = torch.sin({n} + {x})\n{b}.mul_(0.5)\n{n2} = {n} * {x}",
            "{n} = torch.sin({b} + {x})\n{b}.unsqueeze_(0)\n{n1} = torch.sin({b} - {x})\n"
            "{b}.squeeze_(0)",
        )
    )
    return draft.fill(template, b=buffer, x=x)


@op("in place")
def parameter_step(draft: Draft) -> str:
    """Write to a parameter, as an optimiser does, between two uses."""
    x, value = _input(draft, 1, 2, 3)
    parameter = draft.param(*value.shape[-1:], dtype=value.dtype)
    assert draft.may_step(parameter)
    return draft.fill(
        "{n} = torch.sin({x} + {p})\nwith torch.no_grad():\n    {p}.mul_(0.9)\n"
        "{n1} = torch.sin({x} + {p})",
        x=x,
        p=parameter,
    )


@op("in place")
def parameter_turned(draft: Draft) -> str:
    """Change the shape of a parameter between two uses."""
    x, value = _input(draft, 2)
    size = value.shape[-1]
    assert size <= 64
    parameter = draft.param(size, size, dtype=value.dtype)
    assert draft.may_step(parameter)
    return draft.fill(
        "{n} = torch.sin({x}.t() @ {x} + {p})\nwith torch.no_grad():\n    {p}.t_()\n"
        "{n1} = torch.sin({n} * torch.exp({p}.sin()))",
        x=x,
        p=parameter,
    )


@op("types", times=2)
def other_default(draft: Draft) -> str:
    assert not draft.in_region()  # a region has one default
    return draft.fill(
        "with double_by_default():\n    with remat.CheckpointScope('double'):\n"
        "        {n} = {t} * torch.full((), 0.3) + torch.arange(2.0)[0]\n"
        "        {n1} = torch.sin({n} + 1)\n{n2} = torch.sin({n1} + torch.ones(()))"
    )


@op("overwriting", times=6)
def too_late(draft: Draft) -> str:
    """Write to what a region has used after it: remat may refuse, but not be wrong."""
    assert draft.rng.random() < 0.15
    return draft.fill(
        draft.rng.choice(
            (
                "{n} = {t} + {c}\nwith remat.CheckpointScope('over'):\n"
                "    {n1} = torch.sin({n} + 1.0)\n{n}.mul_({c})\n{n2} = {n} * {n}",
                "with remat.CheckpointScope('over'):\n    {n} = torch.rand_like({t})\n"
                "    {n1} = torch.sin({t} + {n})\n{n}.mul_({c})",
                "with remat.CheckpointScope('over'):\n    {n} = {t} * {c}\n"
                "    remat.mark_checkpoint({n})\n    {n1} = torch.sin({n} + 1.0)\n{n}.mul_({c})",
            )
        )
    )


@op("network", times=2)
def recurrent_cell(draft: Draft) -> str:
    x, value = _input(draft, 2)
    kind = draft.rng.choice(("GRUCell", "RNNCell", "LSTMCell"))
    cell = draft.module(f"torch.nn.{kind}({value.shape[1]}, 3)")
    last = "[0]" if kind == "LSTMCell" else ""
    if draft.rng.random() < 0.5:
        return f"{draft.new()} = {cell}({x}){last}"
    state = draft.new()
    return f"{state} = None\nfor _ in range(3): {state} = {cell}({x}, {state})\n" + (
        f"{state} = {state}[1]" if last else f"{state} = {state} * 0.5"
    )


@op("network", times=2)
def recurrent_network(draft: Draft) -> str:
    x, value = _input(draft, 3)
    kind = draft.rng.choice(("GRU", "RNN", "LSTM"))
    options = draft.rng.choice(("", ", num_layers=2, dropout=0.3", ", bidirectional=True"))
    network = draft.module(f"torch.nn.{kind}({value.shape[2]}, 3{options}, batch_first=True)")
    return f"{draft.new()} = {network}({x})[0]"


@op("network")
def attention(draft: Draft) -> str:
    x, value = _input(draft, 3)
    p = draft.rng.choice((0.0, 0.2))
    width = value.shape[2]
    text = f"torch.nn.MultiheadAttention({width}, {2 - width % 2}, dropout={p}, batch_first=True)"
    flag = draft.rng.choice(("", ", need_weights=False"))
    return f"{draft.new()} = {draft.module(text)}({x}, {x}, {x}{flag})[0]"


@op("network")
def encoder_layer(draft: Draft) -> str:
    x, value = _input(draft, 3)
    width = value.shape[2]
    text = f"torch.nn.TransformerEncoderLayer({width}, {2 - width % 2}, 8, batch_first=True)"
    return f"{draft.new()} = {draft.module(text)}({x})"


@op("network", times=2)
def small_network(draft: Draft) -> str:
    x, value = _input(draft, 2)
    width = value.shape[1]
    middle = draft.rng.choice(
        (
            "torch.nn.ReLU(inplace=True)",
            "torch.nn.BatchNorm1d(4), torch.nn.ReLU()",
            "torch.nn.Dropout(0.3), torch.nn.GELU()",
            "torch.nn.LayerNorm(4), torch.nn.Dropout(0.2, inplace=True)",
        )
    )
    text = f"torch.nn.Sequential(torch.nn.Linear({width}, 4), {middle}, torch.nn.Linear(4, 3))"
    network = draft.module(text)
    call = "remat.checkpoint({m}, {x})" if draft.rng.random() < 0.3 else "{m}({x})"
    return f"{draft.new()} = " + call.replace("{m}", network).replace("{x}", x)


@op("network")
def normalised_image(draft: Draft) -> str:
    x, value = _input(draft, 4)
    width = value.shape[1]
    text = (
        f"torch.nn.Sequential(torch.nn.Conv2d({width}, 3, 3, padding=1), torch.nn.BatchNorm2d(3), "
        "torch.nn.ReLU(inplace=True))"
    )
    return f"{draft.new()} = {draft.module(text)}({x})"


_BY_GROUP = {group: [o for o in OPS if o.group == group] for group in _WEIGHTS}


# What autograd is asked to do.

_ALL = "torch.autograd.grad(ys, inputs, gs, allow_unused=True"
_MODES: dict[str, tuple[int, tuple[str, ...]]] = {
    "backward": (10, ("torch.autograd.backward(ys, gs)",)),
    "some": (3, ("found += torch.autograd.grad(ys, SOME, gs, allow_unused=True)",)),
    "twice": (
        4,
        (
            "torch.autograd.backward(ys, gs, retain_graph=True)",
            "torch.autograd.backward(ys, gs)",
        ),
    ),
    "some, then all": (
        3,
        (
            "found += torch.autograd.grad(ys, SOME, gs, allow_unused=True, retain_graph=True)",
            "torch.autograd.backward(ys, gs)",
        ),
    ),
    "double": (
        4,
        (
            f"grads = {_ALL}, create_graph=True)",
            "found += grads",
            "squares(grads).backward()",
        ),
    ),
    "double, first kept": (
        2,
        (
            f"grads = {_ALL}, create_graph=True)",
            "squares(grads).backward(retain_graph=True)",
            "torch.autograd.backward(ys, gs)",
        ),
    ),
    "separate": (
        4,
        (
            "for n, (y, g) in enumerate(zip(ys, gs)):",
            "    y.backward(g, retain_graph=n + 1 < len(ys))",
        ),
    ),
    "separate, freed": (
        2,
        (
            "del outs",
            "while ys:",
            "    ys.pop().backward(gs.pop(), retain_graph=bool(ys))",
        ),
    ),
    "of outputs": (
        2,
        ("found += torch.autograd.grad(ys[-1:], ys[:1] + inputs, gs[-1:], allow_unused=True)",),
    ),
    "one only": (2, ("del outs", "ys.pop(0).backward(gs.pop(0))")),
    "thread": (2, ("in_thread(lambda: torch.autograd.backward(ys, gs))",)),
    "batched": (
        1,
        (
            "found += torch.autograd.grad("
            "ys, inputs, batched(gs), allow_unused=True, is_grads_batched=True)",
        ),
    ),
    "inputs only": (1, ("torch.autograd.backward(ys, gs, inputs=SOME)",)),
}


def draw_mode(rng: random.Random, leaves: list[str]) -> tuple[str, tuple[str, ...]]:
    """Return how gradients are asked for: a name and lines."""
    mode = rng.choices(list(_MODES), [weight for weight, _ in _MODES.values()])[0]
    some = sorted(rng.sample(leaves, rng.randint(1, len(leaves))))
    chosen = f"[{', '.join(some)}]"
    return mode, tuple(line.replace("SOME", chosen) for line in _MODES[mode][1])
