"""Diffusers: a UNet and a transformer with the blocks that they checkpoint themselves."""

from __future__ import annotations

import copy

import diffusers
import pytest
import torch
from torch import nn

import remat
from remat.integrations.diffusers import disable, enable

from .training import check, regions_of_a_step


def unet():
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
        dropout=0.1,
    )


def transformer():
    torch.manual_seed(0)
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=2,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        norm_num_groups=4,
        num_embeds_ada_norm=10,
        dropout=0.1,
    )


IMAGES = torch.linspace(-1, 1, 4 * 2 * 8 * 8).view(4, 2, 8, 8)
TIMES = torch.arange(4)


def unet_loss(model):
    text = torch.linspace(-1, 1, 4 * 3 * 8).view(4, 3, 8)
    return model(IMAGES, TIMES, encoder_hidden_states=text).sample.square().mean()


def transformer_loss(model):
    out = model(IMAGES, timestep=TIMES, class_labels=torch.arange(4)).sample
    return out.square().mean()


MODELS = [(unet, unet_loss, 11), (transformer, transformer_loss, 3)]


@pytest.mark.parametrize(("make", "loss_of", "regions"), MODELS)
def test_trains_as_without_remat(make, loss_of, regions) -> None:
    check(make, enable, loss_of, regions=regions, share=0.9)


@pytest.mark.parametrize(("make", "loss_of", "regions"), MODELS)
def test_the_public_method_takes_remats_function(make, loss_of, regions) -> None:
    def by_hand(model: nn.Module) -> None:
        model.enable_gradient_checkpointing(gradient_checkpointing_func=remat.checkpoint)

    check(make, by_hand, loss_of, regions=regions, share=0.9)


def test_disable() -> None:
    model = disable(enable(transformer()))
    assert regions_of_a_step(model.train(), transformer_loss) == 0


def test_a_copy_is_checkpointed() -> None:
    model = copy.deepcopy(enable(transformer()))
    assert regions_of_a_step(model.train(), transformer_loss) == 3


class WithoutBlocks(diffusers.ModelMixin):
    _supports_gradient_checkpointing = False


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (nn.Linear(2, 2), TypeError, "pipeline.unet, got Linear"),
        (WithoutBlocks(), remat.UnsupportedError, "use remat.apply"),
    ],
)
def test_bad_input(model, error, text) -> None:
    with pytest.raises(error, match=text):
        enable(model)
