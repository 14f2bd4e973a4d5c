"""Writes that fail, that autograd does not count, or that are none: only the shape changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize

import remat

from .oracles import APIS, Programs, randn, same

programs = Programs()
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
]


def leaf_and_constant(*shape):
    return lambda: (torch.randn(*shape).requires_grad_(), torch.randn(*shape))


# -- shapes of one tensor, while others over the same bytes count by themselves -------------------


@programs.starting_from(lambda: randn(3, 3)() + randn(3, 3)())
def a_parameter_whose_data_was_transposed(run, x, p):
    def f(x):
        y = (x + p).sin()
        p.data.t_()
        with torch.no_grad():
            p.mul_(2)
        return y, (x - p).cos()

    return run(f, x)


@programs.starting_from(leaf_and_constant(3, 3))
def a_buffer_whose_data_was_transposed(run, x, b):
    def f(x):
        y = (x + b).sin()
        b.data.t_()
        b.mul_(2)
        return y, (x - b).cos()

    return run(f, x)


@programs.starting_from(leaf_and_constant(3, 3))
def the_data_of_a_buffer_that_was_transposed(run, x, b):
    def f(x):
        data = b.data
        y = (x * data).sin()
        b.t_()
        return y, (x * data).cos() * b

    return run(f, x)


@programs.starting_from(randn(3, 3))
def a_marked_tensor_whose_data_was_transposed(run, x):
    def f(x):
        y = x.sin()
        remat.mark_checkpoint(y)
        z = (y + x).sin()
        y.data.t_()
        y.mul_(2)
        return z + y

    return run(f, x)


# -- the same bytes under another shape, by assignment: nobody counts that ------------------------


def turned(y):
    y.data = y.data.t()


def put_elsewhere(change):
    """Return a program that reads a tensor of the region before and after such a change."""

    def program(run, x):
        def f(x):
            y = x.detach().exp()
            z = (x + y).sin()
            change(y)
            w = (x * 2 + y).cos()
            change(y)
            return z * w, (x - y).sin()

        return run(f, x)

    return program


programs["assigned_transposes"] = put_elsewhere(turned), randn(3, 3)
programs["assigned_conjugates"] = (
    put_elsewhere(lambda y: setattr(y, "data", y.data.conj())),
    randn(3, 3, dtype=torch.complex128),
)
programs["assigned_rows"] = (
    put_elsewhere(lambda y: setattr(y, "data", y.data[:1])),
    randn(3, 3),
)
programs["assigned_repetitions"] = (
    put_elsewhere(lambda y: setattr(y, "data", y.data[:, :1].expand(3, 3))),
    randn(3, 3),
)
programs["assigned_bits"] = (
    put_elsewhere(lambda y: setattr(y, "data", y.data.view(torch.int32))),
    randn(3, 3),
)


@programs.starting_from(randn(3, 3))
def an_assigned_transpose_with_a_history(run, x):
    def f(x):
        y = x * 2
        z = (y + 1).sin()
        turned(y)
        return z * (y + 2).cos()

    return run(f, x)


@programs.starting_from(randn(3, 3))
def an_assigned_transpose_that_is_written_to(run, x):
    def f(x):
        y = x.detach().exp()
        z = (x + y).sin()
        turned(y)
        y[0] = 5
        return z * (x + y).cos()

    return run(f, x)


@programs.starting_from(randn(3, 3))
def an_assigned_transpose_that_is_marked(run, x):
    def f(x):
        y = x.detach().exp()
        z = (x + y).sin()
        turned(y)
        remat.mark_checkpoint(y)
        return z * (x + y).cos()

    return run(f, x)


@programs.starting_from(leaf_and_constant(3, 3))
def an_assigned_transpose_of_a_buffer(run, x, b):
    elsewhere = b.data.t()  # made before the region

    def f(x):
        z = (x + b).sin()
        b.data = elsewhere
        w = (x - b).cos()
        turned(b)
        return z * w, (x * 2 + b).exp()

    return run(f, x)


@programs.starting_from(lambda: randn(3, 3)() + randn(3, 3)())
def an_assigned_transpose_of_a_parameter(run, x, p):
    before, elsewhere = p.data, p.data.t()

    def f(x):
        z = (x + p).sin()
        p.data = elsewhere
        w = (x - p).cos()
        p.data = before
        return z * w, (x * 2 + p).exp()

    return run(f, x)


@programs.starting_from(lambda: randn(3, 3)() + randn(3, 3)())
def a_parameter_that_stays_transposed(run, x, p):
    def f(x):
        z = (x + p).sin()
        turned(p)
        return z * (x - p).cos()

    return run(f, x)


@programs.starting_from(lambda: randn(3, dtype=torch.cfloat)() + randn(3, dtype=torch.cfloat)())
def a_parameter_that_becomes_its_conjugate_after_the_region(run, x, p):
    y = run(lambda x: (x + p).sin().exp(), x)
    p.data = p.data.conj()
    return y


def test_a_parameter_of_another_type_over_the_same_memory_is_refused() -> None:
    x = torch.randn(3, dtype=torch.bfloat16, requires_grad=True)
    p = torch.randn(3, dtype=torch.bfloat16, requires_grad=True)

    def f(x):
        y = (x + p).sin()
        p.data = p.data.view(torch.float16)
        return y.exp() + p

    with pytest.raises(remat.UnsupportedError, match=r"bfloat16 \[3\].*float16.*clone"):
        remat.checkpoint(f, x)


# -- ops that raise, and the program goes on -----------------------------------------------------


def attempt(write):
    with pytest.raises(RuntimeError):
        write()


@programs.starting_from(leaf_and_constant(2, 3, 4))
def a_shape_that_cannot_be_changed(run, x, b):
    def f(x):
        y = (x + b).sin()
        attempt(b.t_)
        b.mul_(2)
        return y * b

    return run(f, x)


@programs.starting_from(leaf_and_constant(3))
def a_write_of_another_shape_before_any_use(run, x, b):
    def f(x):
        attempt(lambda: b.add_(torch.ones(7)))
        return (x * b).sin()

    return run(f, x)


@programs.starting_from(leaf_and_constant(3))
def a_write_of_another_shape_between_uses(run, x, b):
    def f(x):
        y = (x * b).sin()
        attempt(lambda: b.add_(torch.ones(7)))
        return (y * b).cos()

    return run(f, x)


@programs.starting_from(randn(3, 3))
def blank_memory_that_could_not_be_filled(run, x):
    def f(x):
        blank = torch.empty(3, 3)
        attempt(lambda: blank.copy_(torch.randn(7)))
        blank.numpy()[:] = 1.5
        return (x * blank).sin()

    return run(f, x)


@programs.starting_from(randn(3))
def half_a_write(run, x):
    def f(x):
        y = x.detach().sin()
        attempt(lambda: y.scatter_(0, torch.tensor([0, 9]), torch.tensor([5.0, 6.0])))
        return (x * y).sin()

    return run(f, x)


# -- writes that nobody counts ---------------------------------------------------------------------


@programs.starting_from(lambda: (torch.randn(4).requires_grad_(), FusedMovingAvgObsFakeQuantize()))
def an_observer_that_is_called_twice(run, x, observe):
    return run(lambda x: observe(observe(x).sin()).exp(), x)


@programs.starting_from(lambda: (torch.randn(4).requires_grad_(), FusedMovingAvgObsFakeQuantize()))
def an_observer_whose_scale_is_read_before_and_after(run, x, observe):
    def f(x):
        before = (x + observe.scale).sin()
        y = observe(before * 3)
        return y * (x + observe.scale).cos()

    return run(f, x)


@programs.starting_from(
    lambda: (torch.randn(4, 3, 5).requires_grad_(), torch.zeros(3), torch.ones(3))
)
def statistics_alone(run, x, mean, variance):
    def f(x):
        m, _ = torch.batch_norm_update_stats(x.detach(), mean, variance, 0.1)
        return (x.sin() * m.view(3, 1)).exp()

    return run(f, x)


# -- others ---------------------------------------------------------------------------------------


class Doubled(nn.Parameter):
    """A weight that acts as twice what it is."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.add, torch.mul):
                args = [a.as_subclass(torch.Tensor) * 2 if isinstance(a, cls) else a for a in args]
            elif func in (torch.Tensor.untyped_storage, torch.Tensor.as_strided):
                return NotImplemented
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("api", APIS)
def test_a_class_of_parameters_with_functions_of_its_own(api) -> None:
    x, p = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2)
    weights = Doubled(p.clone())
    APIS[api](lambda x: torch.mul(torch.add(x, weights).sin(), weights), x).sum().backward()
    ours = x.grad, weights.grad
    x.grad = None
    plain = Doubled(p.clone())
    torch.mul(torch.add(x, plain).sin(), plain).sum().backward()
    assert torch.equal(ours[0], x.grad)
    assert torch.equal(ours[1], plain.grad)


@programs.starting_from(randn(2, 2))
def a_mark_after_a_change_of_shape_and_a_write(run, x):
    def f(x):
        y = x.sin()
        remat.mark_checkpoint(y)
        y.t_()
        z = y + 1
        y.mul_(2)
        remat.mark_checkpoint(y)
        return z + y

    return run(f, x)


@programs.starting_from(lambda: (torch.randn(3, 3).requires_grad_(), torch.eye(3).to_sparse()))
def a_sparse_tensor_transposed_in_place(run, x, s):
    def f(x):
        z = (s.to_dense() * x).sin()
        s.t_()
        return z.exp() + s.to_dense()

    return run(f, x)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", programs)
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])
