"""Transformers: layers of real architectures, the Trainer, and what would replace remat."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn

import remat
from remat.integrations.transformers import RematCallback, disable, enable
from remat.observers import observers

from .training import check, regions_of_a_step, train

LAYERS = 3
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, attention_dropout=0.1))


def qwen():
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT, head_dim=16))


def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **TEXT, num_local_experts=4, output_router_logits=True, router_jitter_noise=0.01
    )
    return transformers.MixtralForCausalLM(config)


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=LAYERS, n_head=2, n_positions=64
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**TEXT, "num_key_value_heads": None})
    return transformers.BertForMaskedLM(config)


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=LAYERS,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        image_size=32,
        patch_size=4,
        hidden_dropout_prob=0.1,
    )
    return transformers.ViTForImageClassification(config)


TOKENS = torch.arange(8 * 32).view(8, 32) % 61


def text_loss(model):
    return model(input_ids=TOKENS, labels=TOKENS).loss


def image_loss(model):
    pixels = torch.linspace(-1, 1, 8 * 3 * 32 * 32).view(8, 3, 32, 32)
    return model(pixel_values=pixels, labels=torch.arange(8) % 2).loss


MODELS = [
    (llama, text_loss, LAYERS),
    (qwen, text_loss, LAYERS),
    (mixtral, text_loss, LAYERS),
    (gpt2, text_loss, LAYERS),
    (bert, text_loss, LAYERS),
    (t5, text_loss, 2 * LAYERS),
    (vit, image_loss, LAYERS),
]


@pytest.mark.parametrize(("make", "loss_of", "regions"), MODELS)
def test_trains_as_without_remat(make, loss_of, regions) -> None:
    check(make, enable, loss_of, regions=regions)


@pytest.mark.parametrize(("make", "loss_of", "regions"), MODELS)
def test_apply_finds_the_layers(make, loss_of, regions) -> None:
    def apply(model: nn.Module) -> None:
        model.config.use_cache = False  # a cache would hold keys and values
        remat.apply(model)

    check(make, apply, loss_of, regions=regions)


def test_apply_by_the_name_of_the_class() -> None:
    model = remat.apply(llama(), "LlamaDecoderLayer", every=2)
    assert remat.applied(model) == ["model.layers.0", "model.layers.2"]


def test_every_nth_layer() -> None:
    assert regions_of_a_step(enable(llama(), every=2).train(), text_loss) == 2


def test_a_policy() -> None:
    model = enable(llama(), policy=remat.policies.save_everything).train()
    with remat.CheckpointProfiler() as profiler:
        text_loss(model).backward()
    assert (profiler.checkpoint_count(), profiler.recompute_count()) == (LAYERS, 0)


def test_disable() -> None:
    model = llama()
    names = list(model.__dict__)
    disable(enable(model))
    assert not model.is_gradient_checkpointing
    assert list(model.__dict__) == names
    assert regions_of_a_step(model.train(), text_loss) == 0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_checkpointed(duplicate) -> None:
    model = duplicate(enable(llama()).train())
    assert regions_of_a_step(model, text_loss) == LAYERS


def test_saved_and_loaded(tmp_path) -> None:
    model = enable(llama())
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor)


# -- the Trainer -----------------------------------------------------------------------------------


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, n):
        tokens = (torch.arange(32) * (n + 1)) % 61
        return {"input_ids": tokens, "labels": tokens}


def fit(model, folder, *, callbacks=(), **options):
    """Train with the Trainer for five steps; return losses and weights, and the trainer."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=5,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **options,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Text(), callbacks=list(callbacks)
    )
    trainer.train()
    losses = [torch.tensor(log["loss"]) for log in trainer.state.log_history if "loss" in log]
    assert len(losses) == 5
    return [*losses, *(tensor.clone() for tensor in model.state_dict().values())], trainer


def test_survives_the_trainer(tmp_path) -> None:
    expected, _ = fit(gpt2(), tmp_path)
    model = enable(gpt2())
    with remat.CheckpointProfiler() as profiler:
        found, _ = fit(model, tmp_path)
    assert profiler.checkpoint_count() == profiler.recompute_count() == 5 * LAYERS
    assert all(map(torch.equal, found, expected))
    assert regions_of_a_step(model, text_loss) == LAYERS


def test_the_trainer_in_bfloat16_with_accumulated_gradients(tmp_path) -> None:
    options = {"bf16": True, "gradient_accumulation_steps": 2}
    expected, _ = fit(gpt2(), tmp_path, **options)
    found, _ = fit(enable(gpt2()), tmp_path, **options)
    assert all(map(torch.equal, found, expected))


def test_an_argument_of_the_trainer_does_not_replace_remat(tmp_path) -> None:
    expected, _ = fit(gpt2(), tmp_path)
    model = enable(gpt2())
    with (
        pytest.warns(remat.RematWarning, match="would replace"),
        remat.CheckpointProfiler() as profiler,
    ):
        found, _ = fit(model, tmp_path, activation_checkpointing=True)
    assert profiler.checkpoint_count() == 5 * LAYERS
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", ["activation", "gradient"])
def test_a_call_does_not_replace_remat(kind) -> None:
    name = f"{kind}_checkpointing_enable"
    model = enable(llama()).train()
    with pytest.warns(remat.RematWarning, match=name):
        getattr(model, name)()
    assert regions_of_a_step(model, text_loss) == LAYERS


def test_the_callback(tmp_path) -> None:
    expected, _ = fit(gpt2(), tmp_path)
    model = gpt2()
    found, trainer = fit(model, tmp_path, callbacks=[RematCallback()])
    assert all(map(torch.equal, found, expected))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    for log in logs:
        assert log["remat/regions"] == LAYERS
        assert log["remat/recompute_seconds"] > 0
        assert 0 < log["remat/peak_bytes"] < log["remat/peak_bytes"] + log["remat/saved_bytes"]
    assert not model.is_gradient_checkpointing  # it is as it was


def test_the_callback_with_a_budget(tmp_path) -> None:
    expected, _ = fit(gpt2(), tmp_path)
    model = gpt2()
    found, trainer = fit(model, tmp_path, callbacks=[RematCallback(0.6)], use_cache=True)
    assert all(map(torch.equal, found, expected))
    for log in (log for log in trainer.state.log_history if "loss" in log):
        assert 0 < log["remat/peak_bytes"] <= log["remat/budget_bytes"]
        assert log["remat/saved_bytes"] > 0
        assert log["remat/recompute_seconds"] > 0
    assert "forward" not in model.__dict__  # it is as it was
    assert model.config.use_cache


def test_the_callback_takes_the_place_of_torchs(tmp_path) -> None:
    with (
        pytest.warns(remat.RematWarning, match="in its place"),
        remat.CheckpointProfiler() as profiler,
    ):
        fit(gpt2(), tmp_path, callbacks=[RematCallback()], activation_checkpointing=True)
    assert profiler.checkpoint_count() == 5 * LAYERS


class Fails(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        raise KeyError("the program fails")


@pytest.mark.parametrize("budget", [None, 0.6])
def test_the_callback_after_an_error(tmp_path, budget) -> None:
    """Transformers tells no callback of it."""
    model, callback = gpt2(), RematCallback(budget)
    with pytest.raises(KeyError):
        fit(model, tmp_path, callbacks=[callback, Fails()])
    callback.undo()
    assert not observers()
    assert not model.is_gradient_checkpointing
    assert "forward" not in model.__dict__
    expected, _ = fit(gpt2(), tmp_path)
    with pytest.raises(KeyError):
        fit(model, tmp_path, callbacks=[callback, Fails()])
    found, _ = fit(model, tmp_path, callbacks=[callback])  # undoes what was left by itself
    assert all(map(torch.equal, found, expected))
    assert not observers()


@pytest.mark.parametrize("budget", [None, 0.6])
def test_the_callback_leaves_what_was_enabled_before(tmp_path, budget) -> None:
    model = remat.apply(enable(gpt2(), every=2), "GPT2MLP")
    fit(model, tmp_path, callbacks=[RematCallback(budget)])
    model.config.use_cache = False
    assert regions_of_a_step(model, text_loss) == (LAYERS + 1) // 2 + LAYERS
    with pytest.warns(remat.RematWarning, match="would replace"):
        model.gradient_checkpointing_enable()


@pytest.mark.parametrize("budget", ["much", 2.0])
def test_a_wrong_budget_changes_nothing(tmp_path, budget) -> None:
    model = enable(gpt2())
    with pytest.raises(ValueError, match="budget"):
        fit(model, tmp_path, callbacks=[RematCallback(budget)], use_cache=True)
    assert model.is_gradient_checkpointing
    assert model.config.use_cache


class OfOurOwn(transformers.PreTrainedModel):
    """A model that Transformers cannot checkpoint."""

    def __init__(self) -> None:
        super().__init__(transformers.PreTrainedConfig())
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU())))
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids, labels):
        scores = self.head(self.layers(self.embed(input_ids)))
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


def test_a_budget_for_a_model_without_checkpointed_layers(tmp_path) -> None:
    expected, _ = fit(OfOurOwn(), tmp_path)
    found, trainer = fit(OfOurOwn(), tmp_path, callbacks=[RematCallback(0.7)])
    assert all(map(torch.equal, found, expected))
    assert trainer.state.log_history[0]["remat/saved_bytes"] > 0


# -- bad input -------------------------------------------------------------------------------------


class WithoutLayers(transformers.LlamaForCausalLM):
    supports_gradient_checkpointing = False


class OldModel(transformers.LlamaForCausalLM):
    def _set_gradient_checkpointing(self, module, value=False):
        raise AssertionError


@pytest.mark.parametrize(
    ("make", "options", "error", "text"),
    [
        (lambda: nn.Linear(2, 2), {}, TypeError, "got Linear; for other models use remat.apply"),
        (lambda: 3, {}, TypeError, "got int"),
        (
            lambda: WithoutLayers(transformers.LlamaConfig(**TEXT)),
            {},
            remat.UnsupportedError,
            "WithoutLayers has no checkpointed layers",
        ),
        (
            lambda: OldModel(transformers.LlamaConfig(**TEXT)),
            {},
            remat.UnsupportedError,
            "takes no enable, gradient_checkpointing_func",
        ),
        (llama, {"every": 0}, ValueError, "every .* got 0"),
        (llama, {"policy": 3}, TypeError, "policy .* got 3"),
    ],
)
def test_bad_input(make, options, error, text) -> None:
    model = make()
    with pytest.raises(error, match=text):
        enable(model, **options)
    if isinstance(model, transformers.PreTrainedModel):
        assert not model.is_gradient_checkpointing


def test_a_callback_takes_one_of_two() -> None:
    with pytest.raises(ValueError, match="not both"):
        RematCallback("1GB", every=2)


def test_the_oracle_repeats_itself_and_sees_dropout() -> None:
    assert all(map(torch.equal, train(gpt2(), text_loss), train(gpt2(), text_loss)))
    torch.manual_seed(1)
    with_dropout, again = gpt2(), gpt2()
    assert not torch.equal(text_loss(with_dropout), text_loss(again))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_of_a_callback(duplicate) -> None:
    assert duplicate(RematCallback(every=2)).every == 2
    assert duplicate(RematCallback("1GB")).memory_budget == "1GB"
