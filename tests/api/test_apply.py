"""`remat.apply`: the layers that it chooses, and a model that is otherwise as it was."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import pickle

import pytest
import torch
from torch import nn

import remat


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.down(nn.functional.dropout(self.up(x).tanh(), 0.3))


class OtherBlock(Block):
    pass


class Leaf(nn.Module):
    """A block without modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return (x @ self.weight).tanh().exp()


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return nn.functional.pad(x, (0, x.shape[-1]))


class Stages(nn.Module):
    """Stages of unlike widths, as in Swin and ConvNeXt: the blocks are one level below."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(4 * 2**n, 2) for n in range(3))

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


class Experts(nn.Module):
    """A layer with a longer list inside than the list of layers: the layers are the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(blocks or (Block() for _ in range(3)))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TwoLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Model()
        self.decoder = Model(OtherBlock(), OtherBlock())

    def forward(self, x):
        return self.encoder(x) + self.decoder(x)


def gradients(model: nn.Module, width: int = 4) -> list[torch.Tensor]:
    """Return output and gradients of a pass with dropout."""
    torch.manual_seed(0)
    model.zero_grad()
    x = torch.linspace(-1, 1, 6 * width).view(6, width).requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def regions(model: nn.Module) -> int:
    """Return how many regions a pass runs and recomputes."""
    with remat.CheckpointProfiler() as profiler:
        gradients(model)
    assert profiler.recompute_count() == profiler.checkpoint_count()
    return profiler.checkpoint_count()


# -- the layers ------------------------------------------------------------------------------------

CHOICES = [
    (Model, None, ["layers.0", "layers.1", "layers.2"]),
    (Stages, None, [f"stages.{n}.blocks.{k}" for n in range(3) for k in range(2)]),
    (lambda: Model(Experts(), Experts()), None, ["layers.0", "layers.1"]),
    (lambda: Model(Block(), Experts(), Experts()), None, ["layers.1", "layers.2"]),
    (lambda: Model(Leaf(), Leaf()), None, ["layers.0", "layers.1"]),
    (
        TwoLists,
        None,
        [*(f"encoder.layers.{n}" for n in range(3)), *(f"decoder.layers.{n}" for n in range(2))],
    ),
    (lambda: nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Tanh()), None, ["1", "2"]),
    (
        lambda: Model(Block(), OtherBlock(), Block(), OtherBlock()),
        None,
        ["layers.0", "layers.1", "layers.2", "layers.3"],
    ),
    (lambda: nn.Sequential(*[layer := Block(), layer, Block()]), None, ["0", "2"]),
    (TwoLists, OtherBlock, ["decoder.layers.0", "decoder.layers.1"]),
    (lambda: Model(Block(), OtherBlock()), Block, ["layers.0", "layers.1"]),  # a subclass is one
    (TwoLists, "OtherBlock", ["decoder.layers.0", "decoder.layers.1"]),
    (TwoLists, "*.layers.1", ["encoder.layers.1", "decoder.layers.1"]),
    (TwoLists, "encoder.layers.[02]", ["encoder.layers.0", "encoder.layers.2"]),
    (TwoLists, "encoder.head", ["encoder.head"]),
    (TwoLists, lambda m: isinstance(m, nn.Sequential), ["encoder.head", "decoder.head"]),
    (Model, [Block, "head"], ["layers.0", "layers.1", "layers.2", "head"]),
    (Block, Block, [""]),
]


@pytest.mark.parametrize(("make", "layers", "expected"), CHOICES)
def test_chooses_layers(make, layers, expected) -> None:
    assert remat.applied(remat.apply(make(), layers)) == expected


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (9, [0])])
def test_every_nth_layer(every, expected) -> None:
    model = remat.apply(Model(*(Block() for _ in range(5))), every=every)
    assert remat.applied(model) == [f"layers.{n}" for n in expected]


def test_fewer_layers_than_before() -> None:
    """Those that are left out now are not checkpointed; layers that are not asked for stay."""
    model = remat.apply(TwoLists())
    decoder = ["decoder.layers.0", "decoder.layers.1"]
    remat.apply(model, "encoder.layers.*", every=2)
    assert remat.applied(model) == ["encoder.layers.0", "encoder.layers.2", *decoder]
    assert "forward" not in model.encoder.layers[1].__dict__
    with_budget = remat.auto_checkpoint(remat.apply(Block(), Block), memory_budget="1GB")
    model.encoder.layers[1] = with_budget
    remat.apply(model, "encoder.layers.*", every=2)
    assert remat.applied(model) == ["encoder.layers.0", "encoder.layers.2", *decoder]
    assert budgeted(with_budget)


def test_every_nth_layer_counts_within_each_list() -> None:
    model = remat.apply(TwoLists(), every=2)
    chosen = ["encoder.layers.0", "encoder.layers.2", "decoder.layers.0"]
    assert remat.applied(model) == chosen


def test_says_what_it_chose(capsys, caplog) -> None:
    with caplog.at_level(logging.INFO, "remat"):
        remat.apply(TwoLists(), verbose=True)
    said = "remat: checkpoints 3 Block (encoder.layers.*), 2 OtherBlock (decoder.layers.*)"
    assert capsys.readouterr().out.strip() == said
    assert caplog.messages == [said]


def test_prints_nothing_unless_asked(capsys) -> None:
    remat.apply(Model())
    assert capsys.readouterr().out == ""


# -- the model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Model, Stages, TwoLists, lambda: Model(Leaf(), Leaf())])
def test_gradients_are_those_of_the_plain_model(make) -> None:
    model = make()
    expected = gradients(model)
    assert remat.apply(model) is model
    assert all(map(torch.equal, gradients(model), expected))
    assert regions(model) == len(remat.applied(model))


def test_applying_again_replaces_the_options() -> None:
    model = Model()
    remat.apply(model)
    remat.apply(model, policy=remat.policies.save_everything)
    with remat.CheckpointProfiler() as profiler:
        gradients(model)
    assert (profiler.checkpoint_count(), profiler.recompute_count()) == (3, 0)


def test_the_model_looks_as_it_did() -> None:
    model = Model()
    keys, names = list(model.state_dict()), [(n, id(m)) for n, m in model.named_modules()]
    types, parameters = [type(m) for m in model.modules()], [id(p) for p in model.parameters()]
    remat.apply(model)
    assert list(model.state_dict()) == keys
    assert [(n, id(m)) for n, m in model.named_modules()] == names
    assert [type(m) for m in model.modules()] == types
    assert [id(p) for p in model.parameters()] == parameters


def test_hooks_of_layers_run_once_and_in_order() -> None:
    model, calls = Model(), []
    layer = model.layers[1]
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    remat.apply(model)
    layer.register_forward_hook(lambda *_: calls.append("after"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    gradients(model)
    assert calls == ["before", "after", "backward"]


def test_keyword_arguments_reach_a_layer() -> None:
    block = Block()
    x = torch.ones(2, 4)
    torch.manual_seed(0)
    expected = block(x, scale=3.0)
    remat.apply(block, Block)
    torch.manual_seed(0)
    assert torch.equal(block(x, scale=3.0), expected)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved]
)
def test_copies_are_checkpointed_and_on_their_own(duplicate) -> None:
    model = remat.apply(Model(), policy=remat.policies.save_matmuls)
    expected = gradients(model)
    copied = duplicate(model)
    assert remat.applied(copied) == remat.applied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(map(torch.equal, gradients(copied), expected))
    assert regions(copied) == 3
    remat.remove(copied)
    assert remat.applied(copied) == []
    assert len(remat.applied(model)) == 3


def test_a_state_dict_is_loaded_as_before() -> None:
    plain, model = Model(), remat.apply(Model())
    model.load_state_dict(plain.state_dict())
    assert all(map(torch.equal, gradients(model), gradients(plain)))


def test_the_signature_of_forward_stays() -> None:
    block = Block()
    expected = inspect.signature(block.forward)
    assert inspect.signature(remat.apply(block, Block).forward) == expected


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler itself
def test_torch_compile_sees_the_regions() -> None:
    model = Model(Leaf(), Leaf())
    expected = gradients(model)
    compiled = torch.compile(remat.apply(model), backend="aot_eager")
    for found, wanted in zip(gradients(compiled), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_evaluation_is_quiet() -> None:
    model = remat.apply(Model()).eval()
    with torch.no_grad():
        plain = remat.remove(copy.deepcopy(model))
        x = torch.ones(2, 4)
        torch.manual_seed(0)
        expected = plain(x)
        torch.manual_seed(0)
        assert torch.equal(model(x), expected)


# -- taken out again -------------------------------------------------------------------------------


def test_remove_gives_the_model_back() -> None:
    model = Model()
    expected = gradients(model)
    dicts = [list(m.__dict__) for m in model.modules()]
    assert remat.remove(remat.apply(model)) is model
    assert remat.applied(model) == []
    assert [list(m.__dict__) for m in model.modules()] == dicts
    assert all(map(torch.equal, gradients(model), expected))
    assert regions(model) == 0


def test_remove_on_a_model_without_any_changes_nothing() -> None:
    model = Model()
    model.layers[0].forward = own = lambda x: x
    remat.remove(model)
    assert model.layers[0].forward is own


def test_a_forward_of_the_instance_comes_back() -> None:
    model = Model()
    own = model.layers[0].forward = lambda x: (x * 2).tanh().exp()
    remat.remove(remat.apply(model))
    assert model.layers[0].forward is own


def test_what_another_tool_put_in_front_is_not_lost_in_silence() -> None:
    model = remat.apply(Model())
    ours = model.layers[1].forward

    def theirs(*args):
        return ours(*args)

    theirs.__wrapped__ = ours
    model.layers[1].forward = theirs
    with pytest.raises(remat.UnsupportedError, match="in front"):
        remat.remove(model)
    with pytest.raises(remat.UnsupportedError, match="in front"):
        remat.apply(model)
    assert len(remat.applied(model)) == 3  # nothing half-removed


# -- with a budget ---------------------------------------------------------------------------------


def budgeted(model: nn.Module) -> bool:
    return hasattr(model.forward, "budget")


def test_a_budget_is_kept_and_removed() -> None:
    model = Model()
    expected = gradients(model)
    assert remat.apply(model, memory_budget=0.7) is model
    assert budgeted(model)
    for _ in range(3):
        assert all(map(torch.equal, gradients(model), expected))
    remat.remove(model)
    assert "forward" not in model.__dict__
    assert all(map(torch.equal, gradients(model), expected))


def test_says_the_budget(capsys) -> None:
    remat.apply(Model(), memory_budget="1MB", verbose=True)
    assert capsys.readouterr().out == "remat: keeps Model within 1MB\n"


def test_regions_inside_of_a_budget_and_on_the_same_module() -> None:
    model = Model()
    expected = gradients(model)
    remat.apply(model, memory_budget="1MB")
    remat.apply(model)
    remat.apply(model, Model)  # the model itself is one of the layers
    assert budgeted(model)
    assert remat.applied(model) == ["", "layers.0", "layers.1", "layers.2"]
    assert all(map(torch.equal, gradients(model), expected))
    remat.auto_checkpoint(model, None)
    assert len(remat.applied(model)) == 4
    remat.apply(model, memory_budget="1MB")
    remat.remove(model)
    assert remat.applied(model) == []
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved])
def test_copies_keep_to_a_budget(duplicate) -> None:
    model = remat.apply(Model(), memory_budget=0.7)
    expected = gradients(model)
    copied = duplicate(model)
    assert budgeted(copied)
    assert all(map(torch.equal, gradients(copied), expected))
    remat.remove(copied)
    assert budgeted(model)
    assert not budgeted(copied)


# -- bad input -------------------------------------------------------------------------------------

BAD = [
    (lambda: nn.Linear(2, 2), {}, remat.UnsupportedError, "no repeated blocks"),
    (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        {},
        remat.UnsupportedError,
        "layers=",
    ),
    (Model, {"layers": "model.layers.*"}, ValueError, r"3 Block \(layers.\*\)"),
    (Model, {"layers": "LlamaDecoderLayer"}, ValueError, "'LlamaDecoderLayer'.*3 Block"),
    (Model, {"layers": nn.LSTM}, ValueError, "is a LSTM; its repeated blocks"),
    (Model, {"layers": lambda m: False}, ValueError, "chosen by .*lambda"),
    (Model, {"layers": [Block, nn.LSTM]}, ValueError, "LSTM"),
    (Model, {"layers": []}, ValueError, "layers must not be empty"),
    (Model, {"layers": "layers"}, ValueError, r"ModuleList.*'layers\.\*'"),
    (Model, {"layers": int}, TypeError, "int is not a class of modules"),
    (Model, {"layers": 3}, TypeError, "got 3"),
    (Model, {"every": 0}, ValueError, "every must be at least 1, got 0"),
    (Model, {"every": 1.5}, TypeError, "every .* got 1.5"),
    (Model, {"every": True}, TypeError, "every .* got True"),
    (Model, {"preserve_rng_state": 1}, TypeError, "preserve_rng_state"),
    (Model, {"verbose": 1}, TypeError, "verbose"),
    (Model, {"policy": 3}, TypeError, "policy .* got 3"),
    (Model, {"memory_budget": "1GB", "layers": Block}, ValueError, "not both"),
    (Model, {"memory_budget": "1 parsec"}, ValueError, "parsec"),
    (Model, {"memory_budget": "1GB", "every": 2}, ValueError, "every=2"),
    (lambda: [Block()], {}, TypeError, "model must be a torch.nn.Module, got .Block"),
]


@pytest.mark.parametrize(("make", "options", "error", "text"), BAD)
def test_bad_input_changes_nothing(make, options, error, text) -> None:
    model = make()
    with pytest.raises(error, match=text):
        remat.apply(model, **options)
    if isinstance(model, nn.Module):
        assert remat.applied(model) == []


@pytest.mark.parametrize("function", [remat.remove, remat.applied])
def test_only_modules_have_layers(function) -> None:
    with pytest.raises(TypeError, match=r"model must be .* got 3"):
        function(3)
