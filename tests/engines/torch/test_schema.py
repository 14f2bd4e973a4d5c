"""Ops that are called by their functions in `torch`: the same op must come out of it."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.variable import Variable
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat.engines.torch import schema

aten = torch.ops.aten
SHAPES = [(), (1,), (4,), (4, 4), (2, 4, 4)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def arguments(func):
    """Yield lists of tensors, of equal and unequal shapes and types, that an op can work on."""
    count = sum(not argument.has_default_value() for argument in func._schema.arguments)
    for shapes in itertools.product(SHAPES, repeat=count):
        for first, others in itertools.product(DTYPES, DTYPES):
            dtypes = [first, *[others] * (count - 1)]
            args = [
                torch.ones(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            try:
                func(*args)
            except (RuntimeError, IndexError, TypeError):
                continue
            yield args


@pytest.mark.parametrize("func", sorted(schema._FAST_FOR_TENSORS, key=str), ids=str)
def test_the_function_of_an_op_runs_just_that_op_on_just_these_tensors(func):
    tried = 0
    for args in arguments(func):
        with Seen() as seen:
            schema.traits_of(func).fast_call(*args)
        ((called, given, keywords),) = seen.calls
        assert called is func
        assert len(given) == len(args)
        assert all(ours is theirs for ours, theirs in zip(given, args, strict=True))
        assert not keywords
        tried += 1
    assert tried >= 3


def test_no_op_that_does_more_than_make_new_memory_is_called_by_its_function():
    routes = {schema.traits_of(func).route for func in schema._FAST_FOR_TENSORS}
    assert routes == {schema.Route.SIMPLE}
    assert schema.traits_of(aten.mm.default).fast_call is torch.mm
    softmax = schema.traits_of(aten._softmax.default)
    assert softmax.fast_call is softmax.call


CALLS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: [
        (torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8)),
        (*[torch.ones(1, 2, 4, 8, dtype=torch.bfloat16)] * 3, 0.0, True),
    ],
    aten.gelu.default: [(torch.ones(3),), (torch.ones(2, 3, dtype=torch.bfloat16),)],
    aten.native_layer_norm.default: [
        (torch.ones(2, 3), [3], torch.ones(3), torch.ones(3), 1e-5),
        (torch.ones(2, 3, 4), [3, 4], None, None, 0.1),
        (torch.ones(2, 3), [3], torch.nn.Parameter(torch.ones(3)), None, 1),
    ],
    aten.split.Tensor: [(torch.ones(6), 2), (torch.ones(2, 6), 4, 1), (torch.ones(2, 6), 2, -1)],
    aten.t.default: [
        (torch.ones(3),),
        (torch.ones(2, 3),),
        (torch.nn.Parameter(torch.ones(2, 3)),),
    ],
    aten.transpose.int: [(torch.ones(2, 3), 0, 1), (torch.ones(2, 3, 4), -1, 0)],
    aten.view.default: [
        (torch.ones(6), [2, 3]),
        (torch.ones(2, 3), [-1]),
        (torch.ones(1), []),
        (torch.nn.Parameter(torch.ones(2, 3)), [6]),
    ],
}


def test_every_op_that_is_called_in_a_quicker_way_is_tried():
    assert CALLS.keys() == schema._FAST.keys()


@pytest.mark.parametrize(
    ("func", "args"), [(func, args) for func, calls in CALLS.items() for args in calls]
)
def test_the_quicker_way_leads_to_just_that_op_with_just_these_arguments(func, args):
    defaults = [argument.default_value for argument in func._schema.arguments]
    with torch.no_grad(), Seen() as seen:
        quick = schema.traits_of(func).fast_call(*args)
    ((called, given, keywords),) = seen.calls
    assert called is func
    assert not keywords
    assert len(given) <= len(defaults)
    expected = [*args, *defaults[len(args) :]]
    assert all(
        ours is theirs if isinstance(theirs, torch.Tensor) else ours == theirs
        for ours, theirs in zip(given, expected, strict=False)
    )
    slow = schema.traits_of(func).call(*args)
    for ours, theirs in zip(flat(quick), flat(slow), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert ours.stride() == theirs.stride()


def flat(out):
    return [out] if isinstance(out, torch.Tensor) else list(out)


class Doubled(TorchFunctionMode):
    """A mode of the program's own, for which `torch.mm` is something else."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func == torch.mm else out


def layer(x, w):
    return torch.tanh(torch.mm(x, w))


def leaves():
    return [torch.randn(4, 4, requires_grad=True, generator=gen) for gen in seeded(2)]


def seeded(count):
    return [torch.Generator().manual_seed(number) for number in range(count)]


def gradients(call, function, around):
    inputs = leaves()
    with Doubled() if "forward" in around else nullcontext():
        loss = call(function, *inputs).sum()
    with Doubled() if "backward" in around else nullcontext():
        _run_inside_of_modes(loss)
    return [leaf.grad for leaf in inputs]


def _run_inside_of_modes(loss):
    """Do what loss.backward() does, which leaves the modes of its caller before."""
    ones = torch.ones_like(loss)
    Variable._execution_engine.run_backward(
        (loss,), (ones,), False, False, (), True, accumulate_grad=True
    )


def plain(function, *inputs):
    return function(*inputs)


@pytest.mark.parametrize("around", ["forward", "backward", "forward and backward"])
def test_a_mode_of_the_program_does_not_see_our_calls(around):
    expected = gradients(plain, layer, around)
    ours = gradients(remat.checkpoint, layer, around)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_mode_of_the_program_does_not_see_our_calls_for_code_that_runs_inside_of_it():
    scripted = torch.jit.script(_product)
    for _ in range(3):  # it compiles itself, and then it does not repeat itself
        gradients(plain, scripted, "")
    expected = gradients(plain, scripted, "forward")
    ours = gradients(remat.checkpoint, scripted, "forward")
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.mm(x, w))
