"""Hugging Face models with random weights under a memory budget."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import remat

IDS = torch.arange(4 * 32).view(4, 32) % 64


def _gpt2():
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=64, n_layer=4, n_head=4, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": IDS, "labels": IDS}


def _llama():
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": IDS, "labels": IDS}


def _bert():
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=32,
    )
    return transformers.BertForMaskedLM(config), {"input_ids": IDS, "labels": IDS}


def _t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, use_cache=False
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config), {"input_ids": IDS, "labels": IDS}


def _vit():
    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    pixels = torch.linspace(-1, 1, 8 * 3 * 32 * 32).view(8, 3, 32, 32)
    inputs = {"pixel_values": pixels, "labels": torch.arange(8) % 5}
    return transformers.ViTForImageClassification(config), inputs


def _experts():
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config), {"input_ids": IDS, "labels": IDS}


def _mamba():
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=3, state_size=8, use_cache=False
    )
    return transformers.MambaForCausalLM(config), {"input_ids": IDS, "labels": IDS}


MODELS = [_gpt2, _llama, _bert, _t5, _vit, _experts, _mamba]


def _gradients(model, inputs) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *(g.clone() for g in grads)]


@pytest.mark.parametrize("share", [0.5, 0.25])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__.strip("_"))
def test_the_gradients_of_the_plain_model_within_the_budget(make, share) -> None:
    torch.manual_seed(0)
    plain, inputs = make()
    plain.train()
    model = copy.deepcopy(plain)
    curve = remat.frontier(plain, **inputs)
    plain_peak, smallest = curve.plain_peak_bytes, curve.points[0].peak_bytes
    budget = max(int(share * plain_peak), int(1.05 * smallest))
    remat.auto_checkpoint(model, memory_budget=budget)
    expected = _gradients(plain, inputs)
    for _ in range(3):
        found = _gradients(model, inputs)
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    record = model.forward.budget.last
    assert record.followed
    assert record.recomputed_ops
    assert record.measured_peak <= 1.05 * budget


def test_all_memory_of_a_model_belongs_to_modules() -> None:
    model, inputs = _gpt2()
    report = remat.memory_report(model, **inputs)
    modules = {row.module: row.modules for row in report.rows}
    assert "" not in modules
    assert modules["transformer.h.*.attn"] == modules["transformer.h.*.mlp.act"] > 1
    assert sum(row.kept_bytes for row in report.rows) == report.trace.saved_bytes
