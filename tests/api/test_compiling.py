"""What torch.compile sees of a checkpointed call: the one that it knows."""

from __future__ import annotations

import pytest

import remat

torch = pytest.importorskip("torch")

MODEL = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
GROUP = remat.CheckpointGroup("group")


@remat.checkpoint
def decorated(x):
    return MODEL(x)


@remat.adaptive_checkpoint(threshold="10KB")
def adaptive(x):
    return MODEL(x)


@GROUP.checkpoint_fn
def grouped(x):
    return MODEL(x)


FORMS = {
    "call": lambda x: remat.checkpoint(MODEL, x),
    "options": lambda x: remat.checkpoint(MODEL, x, use_reentrant=False, preserve_rng_state=False),
    "keywords": lambda x: remat.checkpoint(lambda *, x: MODEL(x), x=x),
    "wrapped": lambda x: remat.checkpoint(lambda y: MODEL(y) * 1)(x) + 0,
    "decorated": decorated,
    "adaptive": adaptive,
    "adaptive call": lambda x: remat.adaptive_checkpoint(MODEL, x, threshold="10KB"),
    "segment": lambda x: remat.checkpoint_segment(lambda inputs: MODEL(inputs[0]), [x]),
    "group": lambda x: GROUP.checkpoint_fn(MODEL, x),
    "grouped": grouped,
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(function, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x).square().sum(), [x, *MODEL.parameters()])


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_the_whole_graph_compiles_and_has_the_same_gradients(form) -> None:
    x = torch.randn(3, 4)
    compiled = torch.compile(form, fullgraph=True, backend="aot_eager")
    for one, other in zip(gradients(compiled, x), gradients(MODEL, x), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_the_graph_says_that_this_is_to_be_recomputed(form) -> None:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(form, fullgraph=True, backend=backend)(torch.randn(3, 4, requires_grad=True))
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("checkpoint" in target for target in targets)


# -- models ----------------------------------------------------------------------------------------


def net():
    torch.manual_seed(1)
    layers = [(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)) for _ in range(3)]
    return torch.nn.Sequential(*[torch.nn.Sequential(*parts) for parts in layers])


def after_eager_steps(model, x):
    """Train a model for two steps. The optimizer loads the compiler, which the second one meets."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.filterwarnings("ignore")
def test_a_model_with_checkpointed_layers_compiles_whole_after_eager_steps() -> None:
    x = torch.randn(3, 4)
    plain, model = (after_eager_steps(m, x) for m in (net(), remat.apply(net())))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for each in (compiled, model, compiled):  # and eagerly in between
        for one in (plain, model):
            one.zero_grad()
        plain(x).square().sum().backward()
        each(x).square().sum().backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("how", "strict"), [("layers", False), ("budget", False), ("both", True)])
def test_a_model_is_exported(how, strict) -> None:
    x = torch.randn(3, 4)
    model = net()
    if how != "budget":
        remat.apply(model)
    if how != "layers":
        remat.auto_checkpoint(model, memory_budget="1MB")
    after_eager_steps(model, x)
    exported = torch.export.export(model, (x,), strict=strict).module()
    assert torch.equal(exported(x), model(x))
