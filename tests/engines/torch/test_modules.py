"""Networks as people write them: outputs, gradients and buffers as without remat."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .oracles import APIS, Programs, same

programs = Programs()


class Block(nn.Module):
    """A block of a residual network, with everything in place that can be."""

    def __init__(self, channels: int, momentum: float | None) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels, momentum=momentum)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm_2 = nn.BatchNorm2d(channels, momentum=momentum)

    def forward(self, x):
        h = F.relu(self.norm(self.first(x)), inplace=True)
        h = self.norm_2(self.second(h))
        h += x
        return F.relu_(h)


class Residual(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.ModuleList(Block(4, momentum) for _ in range(3))
        self.head = nn.Linear(4, 5)

    def forward(self, run, x):
        x = self.stem(x)
        for block in self.blocks:
            x = run(block, x)
        return self.head(x.mean((2, 3)))


def images() -> torch.Tensor:
    return torch.randn(3, 3, 7, 7)


@programs.starting_from(lambda: (Residual(), images()))
def residual_network(run, model, x):
    return model(run, x)


@programs.starting_from(lambda: (Residual(momentum=None), images()))
def residual_network_with_the_mean_of_all_batches(run, model, x):
    return model(run, x), model(run, x + 1)


@programs.starting_from(lambda: (Residual().to(memory_format=torch.channels_last), images()))
def residual_network_channels_last(run, model, x):
    return model(run, x.to(memory_format=torch.channels_last))


@programs.starting_from(lambda: (Residual().eval(), images().requires_grad_()))
def residual_network_that_is_not_training(run, model, x):
    return model(run, x)


@programs.starting_from(lambda: (nn.ModuleList(map(_norm, range(6))), torch.randn(4, 6, 5)))
def other_norms(run, norms, x):
    def f(x):
        for norm in norms:
            x = norm(x * 1.5).sin()
        return x

    return run(f, x)


def _norm(number: int) -> nn.Module:
    return (
        nn.GroupNorm(2, 6),
        nn.LayerNorm(5),
        nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
        nn.RMSNorm(5),
        nn.LocalResponseNorm(2),
        nn.BatchNorm1d(6, affine=False),
    )[number]


@programs.starting_from(
    lambda: (nn.ModuleList([nn.Conv1d(4, 4, 3), nn.ConvTranspose1d(4, 4, 3)]), torch.randn(2, 4, 9))
)
def convolutions_and_pools(run, layers, x):
    def f(x):
        h = layers[1](layers[0](x).sin()).exp()
        pooled, where = F.max_pool1d(h, 2, return_indices=True)
        h = F.max_unpool1d(pooled, where, 2) + F.avg_pool1d(h, 2).repeat_interleave(2, -1)
        return F.interpolate(h, scale_factor=2).sin(), F.adaptive_max_pool1d(h, 3).exp()

    return run(f, x)


# -- language --------------------------------------------------------------------------------------


class Language(nn.Module):
    """A small transformer with tied weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.places = nn.Embedding(6, 8, max_norm=1.0, scale_grad_by_freq=True)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                8, 2, 16, dropout, batch_first=True, norm_first=bool(n % 2), activation="gelu"
            )
            for n in range(2)
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, run, tokens):
        x = run(lambda t: self.embed(t) * 2 + self.places(torch.arange(6)), tokens)
        for layer in self.layers:
            x = run(layer, x)
        logits = run(self.head, x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), label_smoothing=0.1), logits


def tokens() -> torch.Tensor:
    return torch.randint(11, (3, 6))


@programs.starting_from(lambda: (Language(), tokens()))
def language_model(run, model, tokens):
    return model(run, tokens)


@programs.starting_from(lambda: (Language(dropout=0.2), tokens()))
def language_model_with_dropout(run, model, tokens):
    return model(run, tokens)


@programs.starting_from(lambda: (nn.EmbeddingBag(9, 4, mode="max"), torch.randint(9, (5, 3))))
def bags(run, bag, index):
    return run(lambda i: (bag(i) * 2).sin(), index)


@programs.starting_from(lambda: (torch.randn(5, 7).requires_grad_(), torch.randint(7, (5,))))
def losses(run, x, target):
    def f(x, target):
        log = F.log_softmax(x * 2, 1)
        return (
            F.cross_entropy(x.sin(), target, reduction="none"),
            F.nll_loss(log, target, weight=torch.arange(1.0, 8.0)),
            F.kl_div(log, torch.softmax(x.detach(), 1), reduction="batchmean"),
            F.huber_loss(x.exp(), x.detach()),
            F.binary_cross_entropy_with_logits(x.cos(), (x > 0).float()),
            F.multi_margin_loss(x.sin(), target),
            F.ctc_loss(
                log[:, None], target[None, :2] % 6 + 1, torch.tensor([5]), torch.tensor([2])
            ),
        )

    return run(f, x, target)


# -- attention -------------------------------------------------------------------------------------

PATHS = {  # those of a CPU: the flash kernel has no dropout, and there is no efficient one
    "math": (SDPBackend.MATH, 0.0),
    "math with dropout": (SDPBackend.MATH, 0.3),
    "flash": (SDPBackend.FLASH_ATTENTION, 0.0),
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_attention(path, causal, api) -> None:
    backend, dropout = PATHS[path]

    def program(run, x, w):
        def f(x, w):
            q, k, v = (x @ w).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
            return out.transpose(1, 2).flatten(2).sin()

        with sdpa_kernel(backend):
            return run(f, x, w)

    same(
        program,
        lambda: (torch.randn(2, 5, 8).requires_grad_(), torch.randn(8, 24).requires_grad_()),
        APIS[api],
    )


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_multihead_attention_with_masks(dropout, api) -> None:
    def program(run, attention, x):
        mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

        def f(x):
            return attention(x * 2, x, x.sin(), key_padding_mask=padding, attn_mask=mask)

        return run(f, x)

    make = lambda: (  # noqa: E731
        nn.MultiheadAttention(8, 2, dropout, batch_first=True, add_bias_kv=True),
        torch.randn(2, 5, 8).requires_grad_(),
    )
    same(program, make, APIS[api])


# -- recurrent -------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent(kind, bidirectional, api) -> None:
    def program(run, rnn, x):
        out, state = run(rnn, x * 2)
        return out.sin(), run(rnn, x.sin(), state)

    def make():
        rnn = kind(3, 4, 2, dropout=0.3, bidirectional=bidirectional, batch_first=True)
        return rnn, torch.randn(2, 5, 3).requires_grad_()

    same(program, make, APIS[api])


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences(kind, api) -> None:
    def program(run, rnn, x):
        def f(packed: PackedSequence):
            out, state = rnn(packed)
            return pad_packed_sequence(out, batch_first=True)[0].sin(), state

        lengths = torch.tensor([3, 5, 1])
        packed = pack_padded_sequence(x * 2, lengths, batch_first=True, enforce_sorted=False)
        return run(f, packed)

    make = lambda: (kind(3, 4, 2, dropout=0.2), torch.randn(3, 5, 3).requires_grad_())  # noqa: E731
    same(program, make, APIS[api])


@programs.starting_from(lambda: (nn.LSTMCell(3, 4), nn.GRUCell(4, 4), torch.randn(5, 2, 3)))
def cells(run, lstm, gru, xs):
    def step(x, h, c, g):
        h, c = lstm(x, (h, c))
        return h, c, gru(h, g)

    h = c = g = torch.zeros(2, 4)
    for x in xs:
        h, c, g = run(step, x, h, c, g)
    return h, c, g


# -- parametrised weights --------------------------------------------------------------------------


@programs.starting_from(lambda: (parametrizations.weight_norm(nn.Linear(4, 4)), torch.randn(2, 4)))
def weight_norm(run, layer, x):
    return run(lambda x: layer(layer(x).sin()).exp(), x)


@programs.starting_from(
    lambda: (parametrizations.spectral_norm(nn.Linear(4, 4)), torch.randn(2, 4))
)
def spectral_norm(run, layer, x):
    return run(lambda x: layer(layer(x).sin()).exp(), x)


@programs.starting_from(
    lambda: (parametrizations.spectral_norm(nn.Linear(4, 4)), torch.randn(2, 4))
)
def spectral_norm_in_two_segments(run, layer, x):
    return run(lambda x: layer(x).sin().exp(), x), run(lambda x: layer(x).sin().exp(), x + 1)


@programs.starting_from(lambda: (parametrizations.orthogonal(nn.Linear(4, 4)), torch.randn(2, 4)))
def orthogonal(run, layer, x):
    return run(lambda x: layer(layer(x).sin()).exp(), x)


@programs.starting_from(lambda: (nn.Linear(4, 4), nn.Linear(4, 2), torch.randn(3, 4)))
def frozen_base_with_an_adapter(run, base, down, x):
    """As with LoRA: neither inputs nor most parameters require grad."""
    base.requires_grad_(False)
    up = down.weight.t() * 0.5

    def f(x):
        return (base(x) + down(x) @ up.t()).relu()

    return run(f, run(f, x).sin())


@programs.starting_from(lambda: (nn.Bilinear(3, 4, 2), nn.PReLU(), torch.randn(5, 7)))
def layers_with_two_inputs(run, bilinear, prelu, x):
    return run(lambda x: prelu(bilinear(x[:, :3] * 2, x[:, 3:].sin())).exp(), x)


@programs.starting_from(lambda: (torch.randn(4, 4).requires_grad_(),))
def linear_algebra(run, x):
    def f(x):
        a = x @ x.mT + 4 * torch.eye(4)
        u, s, v = torch.linalg.svd(x + 3 * torch.eye(4))
        solved = torch.linalg.solve(a, x.sin())
        return (
            torch.linalg.cholesky(a).sin(),
            torch.einsum("ij,jk,k->i", u.abs(), v.abs(), s),
            solved.exp(),
            torch.logdet(a) * 2,
            torch.linalg.inv(a).sin(),
            torch.cumsum(x.sin(), 0).cumprod(1).logsumexp(1),
            torch.linalg.eigh(a)[0].sin(),
        )

    return run(f, x)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", programs)
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])


@pytest.mark.parametrize("api", APIS)
def test_statistics_are_updated_once(api) -> None:
    model, x = Residual(), images()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = model(APIS[api], x).sum()
    loss.backward()
    assert [int(block.norm.num_batches_tracked) for block in model.blocks] == [1, 1, 1]
