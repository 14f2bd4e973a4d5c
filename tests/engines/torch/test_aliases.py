"""Several tensors over the same bytes: detached ones, `.data`, conjugates, NumPy arrays, types."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import remat

from .oracles import APIS, Programs, randn, same

programs = Programs()


def complex_leaf() -> tuple[torch.Tensor]:
    return (torch.randn(4, 3, dtype=torch.complex64).requires_grad_(),)


def complex_constant() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, dtype=torch.complex64), torch.randn(4).requires_grad_()


# -- .data and detach ------------------------------------------------------------------------------


@programs.starting_from(randn(4, 3))
def detached_and_written(run, x):
    def f(x):
        h = x * 2
        h.detach().mul_(3)
        return h.sin() * 2, h.detach() * x

    return run(f, x)


@programs.starting_from(randn(4, 3))
def data_written_before_it_is_used(run, x):
    def f(x):
        h = x * 2
        h.data.mul_(3)
        k = h.data
        k += 1
        return h.sin() * 2, (k * x).cos()

    return run(f, x)


@programs.starting_from(randn(4, 3))
def data_and_tensor_written_in_turn(run, x):
    def f(x):
        h = x.detach() * 2
        k = h.data
        a = h.abs() * x
        k.add_(1)
        b = h.abs() * x
        h.add_(1)
        k.mul_(2)
        return a.sin(), b.sin(), (k.abs() * x).sin(), (h.abs() * x).cos()

    return run(f, x)


@programs.starting_from(lambda: (torch.randn(4, 3).requires_grad_(), torch.randn(4, 3)))
def data_of_an_input_written(run, w, x):
    def f(w, x):
        a = (w * x.abs()).sin()
        x.data.mul_(2)
        return a, (w * x.abs()).cos()

    return run(f, w, x)


@programs.starting_from(randn(4, 3))
def random_numbers_into_data(run, x):
    def f(x):
        mask = torch.empty(4, 3).data.bernoulli_(0.5)
        noise = torch.zeros(4, 3).detach().uniform_()
        return (x * mask).sin(), (x * noise).exp()

    return run(f, x)


@programs.starting_from(randn(4, 3))
def new_leaf_inside(run, x):
    def f(x):
        h = (x * 2).sin()
        k = h.detach().requires_grad_()
        k2 = (k * k).exp()
        (g,) = torch.autograd.grad(k2.sum(), k)
        return h * g, k2.detach() * x

    return run(f, x)


@programs.starting_from(randn(4, 3))
def parameter_data_replaced_inside(run, x):
    def f(x):
        p = torch.nn.Parameter(torch.ones(3))
        a = (x * p.detach()).sin()
        p.data = torch.full((3,), 2.0)
        return a, (x * p.detach()).cos()

    return run(f, x)


# -- conjugates and negatives ----------------------------------------------------------------------


@programs.starting_from(complex_leaf)
def conjugates(run, z):
    def f(z):
        h = z * (1 + 2j)
        return (h.conj() * z).sin(), h.mH @ z, torch.view_as_real(h).sin(), h.conj().imag.exp()

    return run(f, z)


@programs.starting_from(complex_leaf)
def conjugates_written(run, z):
    def f(z):
        h = z * (1 + 2j)
        h.conj().mul_(3j)
        h.real.add_(1)
        h.imag.mul_(2)
        h.conj().imag.add_(0.5)
        return h.sin(), torch.view_as_real(h)[..., 0] * 2

    return run(f, z)


@programs.starting_from(complex_leaf)
def conjugated_inputs(run, z):
    return run(lambda a, b: (a * b).sin() * a.real, (z * 2).conj(), z)


@programs.starting_from(complex_constant)
def negative_views_of_inputs(run, z, w):
    def f(a, b, w):
        return (a * w).sin() + (b.sin() * w).sin() + (z.abs() * w).cos()

    return run(f, z.conj().imag, z.real, w)


@programs.starting_from(complex_constant)
def negative_views_written(run, z, w):
    def f(a, w):
        y = (a.abs() * w).sin()
        a.add_(1)
        return y, (a.abs() * w).cos()

    return run(f, z.conj().imag, w)


@programs.starting_from(complex_constant)
def conjugate_inputs_written(run, z, w):
    def f(a, w):
        y = (a.abs() * w).sin()
        a.mul_(2j)
        return y, (a.real.abs() * w).cos()

    return run(f, z.conj(), w)


@programs.starting_from(randn(8, dtype=torch.float64))
def fourier(run, x):
    def f(x):
        h = torch.fft.rfft(x * 2)
        return torch.fft.irfft(h * h.conj()).sin(), h.abs().log()

    return run(f, x)


# -- types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
)
@pytest.mark.parametrize("api", APIS)
def test_types(dtype, api) -> None:
    def program(run, x):
        return run(lambda x: ((x * 2).tanh() * x).sigmoid() @ x.t(), x)

    same(program, randn(4, 3, dtype=dtype), APIS[api])


@programs.starting_from(randn(4, 3))
def casts(run, x):
    def f(x):
        h = (x * 2).double().sin()
        return h.half() * 2, (h.bfloat16() * x.bfloat16()).float().exp(), h.to(torch.int64) * x

    return run(f, x)


@programs.starting_from(lambda: (torch.randn(5, 3).requires_grad_(), torch.tensor([1, 4, 1])))
def integers_and_booleans(run, x, index):
    def f(x, index):
        index = index * 1
        picked = x[index % 5].sin()
        index += torch.tensor([1, 0, -1])
        mask = (index[:, None] > torch.arange(3)) | (picked.detach() > 0)
        return torch.where(mask, picked, x[index].exp()), mask, index % 3

    return run(f, x, index)


@programs.starting_from(lambda: (torch.tensor(2.0).requires_grad_(), torch.randn(0, 3)))
def no_dimensions_and_no_entries(run, scale, nothing):
    def f(scale, nothing):
        return (scale * 2).sin(), (nothing * scale).exp(), nothing.sum() * scale

    return run(f, scale, nothing)


@programs.starting_from(lambda: (torch.tensor([0.5, float("nan"), -1.0]).requires_grad_(),))
def not_a_number(run, x):
    return run(lambda x: (x * 2).log().sin() * x, x)


# -- sparse ----------------------------------------------------------------------------------------


@programs.starting_from(randn(4, 4))
def sparse_inside(run, x):
    def f(x):
        mask = torch.eye(4).to_sparse() * 2
        h = (x * 3).sin()
        return torch.sparse.mm(mask, h).exp(), h.to_sparse().to_dense().sin() * x

    return run(f, x)


@programs.starting_from(lambda: (torch.eye(4).to_sparse(), torch.randn(4, 4).requires_grad_()))
def sparse_input(run, sparse, x):
    return run(lambda s, x: torch.sparse.mm(s, (x * 2).sin()).exp(), sparse, x)


@programs.starting_from(lambda: (torch.eye(4).to_sparse(), torch.randn(4, 4).requires_grad_()))
def the_shape_of_a_part_changed_in_place(run, sparse, x):
    def f(sparse, x):
        with torch.no_grad():
            mask = torch.sparse.mm(sparse, torch.ones(4, 4))
        sparse._values().unsqueeze_(0).squeeze_(0)
        return (x * mask).sin().exp()

    return run(f, sparse, x)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("api", APIS)
def test_compressed_rows(api) -> None:
    def program(run, x):
        return run(lambda x: (torch.eye(4).to_sparse_csr() @ (x * 2).sin()).exp(), x)

    same(program, randn(4, 4), APIS[api])


# -- NumPy -----------------------------------------------------------------------------------------


@programs.starting_from(randn(4, 3))
def through_numpy(run, x):
    def f(x):
        h = (x * 2).sin()
        mask = torch.from_numpy(np.sign(h.detach().numpy()))
        order = np.argsort((x.detach() * 3).numpy(), axis=0)
        return h * mask, (x * 3).gather(0, torch.from_numpy(order)).exp(), h * h.sum().item()

    return run(f, x)


@programs.starting_from(randn(4, 3))
def memory_of_numpy(run, x):
    array = np.ones((4, 3), np.float32)

    def f(x):
        shared = torch.from_numpy(array)
        shared += 1
        return (x * shared.abs()).sin(), (x * torch.as_tensor(array * 2)).exp()

    return run(f, x)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", programs)
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])


@pytest.mark.parametrize("api", APIS)
def test_written_through_a_numpy_array(api) -> None:
    def program(run, x):
        def f(x):
            h = torch.ones(4, 3) * 2
            h.numpy()[:] = 5
            return (h * x).sin()

        return run(f, x)

    same(program, randn(4, 3), APIS[api])


def test_a_storage_that_was_copied_is_still_computed_again() -> None:
    """Copying a storage puts a tensor over it, which counts writes by itself."""

    def gradient(scope) -> torch.Tensor:
        x = torch.linspace(0.1, 1.0, 6).requires_grad_()
        with scope():
            y = x + 0.9
            y.mul_(0.9)
            y.untyped_storage().clone()
            z = torch.sin((y * y).clone())
        with torch.no_grad():
            y.zero_()
        z.backward(torch.ones_like(z))
        return x.grad

    def keeping() -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept)

    assert torch.equal(gradient(lambda: remat.CheckpointScope("part")), gradient(keeping))
