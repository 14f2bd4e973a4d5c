"""Writes that PyTorch does not count: right, or an error."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import nn

import remat

from .oracles import APIS, Programs, same

programs = Programs()
FORGETTING = ["segment", "scope", "nested", "group"]


def leaf():
    return (torch.linspace(0.1, 1.0, 6).requires_grad_(),)


@programs.starting_from(leaf)
def applied(run, x):
    def f(x):
        mask = torch.ones(6) * 2
        early = (x + mask).sin()
        mask.apply_(lambda v: v + 1)
        return early, (x.exp() * mask).sin()

    return run(f, x)


@programs.starting_from(leaf)
def mapped(run, x):
    def f(x):
        mask = torch.ones(6) * 2
        mask.map_(torch.arange(6.0), lambda a, b: a + b)
        first = (x.exp() + mask).sin()
        mask.map2_(torch.arange(6.0), torch.ones(6), lambda a, b, c: a * b - c)
        return first, (x.exp() * mask).cos()

    return run(f, x)


@programs.starting_from(leaf)
def applied_to_what_is_detached(run, x):
    def f(x):
        y = x.exp() + 0
        early = (x + y.detach()).sin()
        y.detach().apply_(lambda v: v / 2)
        return early, (x * y.detach()).cos()

    return run(f, x)


def skip_if_dlpack_is_read_only() -> None:
    if not np.from_dlpack(torch.ones(1)).flags.writeable:
        pytest.skip("this NumPy does not write through DLPack")


@programs.starting_from(leaf)
def through_dlpack(run, x):
    skip_if_dlpack_is_read_only()

    def f(x):
        mask = torch.ones(6) * 2
        early = (x + mask).sin()
        np.from_dlpack(mask)[...] = 5.0
        return early, (x.exp() * mask).sin()

    return run(f, x)


@programs.starting_from(leaf)
def through_dlpack_of_torch(run, x):
    def f(x):
        mask = torch.ones(6) * 2
        other = torch.from_dlpack(mask)
        early = (x + mask).sin()
        other.mul_(3.0)
        return early, (x.exp() * mask).sin()

    return run(f, x)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", programs)
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])


@pytest.mark.parametrize("api", FORGETTING)
@pytest.mark.parametrize("elements", [6, 100_000])
def test_a_write_through_dlpack_after_the_region(api, elements) -> None:
    """Small memory was copied, of large memory there is a checksum."""
    skip_if_dlpack_is_read_only()
    x = torch.linspace(0.1, 1.0, elements).requires_grad_()
    mask = torch.ones(elements)
    array = np.from_dlpack(mask)
    y = APIS[api](lambda x: (x.exp() + mask).sin(), x)
    array[...] = 7.0
    if elements > 6:
        with pytest.raises(remat.ModifiedInputError, match="memory that it shares"):
            y.sum().backward()
    else:
        y.sum().backward()
        assert torch.equal(x.grad, (x.exp() + 1).cos().mul(x.exp()).detach())


@pytest.mark.parametrize("api", FORGETTING)
@pytest.mark.parametrize("fused", [True, False])
def test_the_step_of_an_optimizer_before_the_backward_pass(api, fused) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    model(torch.ones(2, 4)).sum().backward()
    y = APIS[api](lambda x: model(x.exp()).sin(), torch.ones(2, 4))
    optimizer.step()
    with pytest.raises(remat.ModifiedInputError, match=r"optimizer.step\(\) after|inplace"):
        y.sum().backward()


def test_a_step_after_the_backward_pass_is_none_of_our_business() -> None:
    def losses(run) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        found = []
        for _ in range(3):
            loss = run(lambda x: model(x.exp()).sin(), torch.ones(2, 4)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(remat.checkpoint) == losses(lambda f, x: f(x))


def test_raw_pointers_are_beyond_us_and_verify_tells() -> None:
    """Documented: nobody can see what is written through an address."""

    def f(x):
        mask = torch.ones(6) * 2
        ctypes.memset(mask.data_ptr(), 0, 8)
        return (x.exp() * mask).sin()

    with pytest.raises(remat.RecomputeMismatchError, match="gradients differ"):
        remat.verify(f, *leaf())
