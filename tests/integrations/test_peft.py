"""PEFT: adapters train, the base stays as it is; inputs do not require grad."""

from __future__ import annotations

import peft
import pytest
import torch

import remat
from remat.integrations.peft import enable, prepare_model_for_kbit_training

from .test_transformers import LAYERS, llama, text_loss
from .training import check, regions_of_a_step


def with_adapters(base):
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_dropout=0.2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(base, config)


def test_adapters_on_a_frozen_base() -> None:
    check(lambda: with_adapters(llama()), enable, text_loss, regions=LAYERS)


def test_a_base_that_is_checkpointed_already() -> None:
    check(
        lambda: with_adapters(llama()),
        lambda model: enable(model.get_base_model()),
        text_loss,
        regions=LAYERS,
    )


def test_prepared_for_kbit_training() -> None:
    def make():
        base = peft.prepare_model_for_kbit_training(llama(), use_gradient_checkpointing=False)
        return with_adapters(base)

    expected = make()
    model = with_adapters(prepare_model_for_kbit_training(llama()))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == [name for name, p in expected.named_parameters() if p.requires_grad]
    assert regions_of_a_step(model.train(), text_loss) == LAYERS
    check(make, enable, text_loss, regions=LAYERS)


def test_pefts_own_function_does_not_replace_remat() -> None:
    base = enable(llama())
    base.is_loaded_in_8bit = True
    with pytest.warns(remat.RematWarning, match="would replace"):
        peft.prepare_model_for_kbit_training(base)
    assert regions_of_a_step(with_adapters(base).train(), text_loss) == LAYERS


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match="got Linear"):
        prepare_model_for_kbit_training(torch.nn.Linear(2, 2))
