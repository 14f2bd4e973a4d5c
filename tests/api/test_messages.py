"""Wrong calls: each says what must be given, what was, and what to write instead."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import remat
from remat import policies
from remat.schedules import Given, Mixed
from remat.sizes import did_you_mean, shown

LARGE = torch.ones(200, 300, requires_grad=True)
ARRAY = np.ones((200, 300))
LAYERS = nn.Sequential(nn.Linear(4, 4), nn.GELU())


def double(x):
    return x * 2


WRONG = [
    # a policy that was not called, or should not have been
    (lambda: remat.checkpoint(torch.sin, LARGE, policy=policies.save_names), 'save_names("attn")'),
    (lambda: remat.checkpoint(policy=policies.save_ops), 'save_ops("mm")'),
    (lambda: remat.CheckpointScope("a", policy=policies.save_below), 'save_below("1MB")'),
    (lambda: remat.CheckpointGroup("a", policy=policies.either), "either(p, q)"),
    (lambda: remat.apply(LAYERS, "Linear", policy=policies.save_names), 'save_names("attn")'),
    (lambda: policies.either(policies.save_names), 'save_names("attn")'),
    (policies.save_matmuls, "without parentheses: policy=policies.save_matmuls"),
    (policies.save_nothing, "without parentheses: policy=policies.save_nothing"),
    (policies.save_everything, "without parentheses"),
    (lambda: remat.checkpoint(torch.sin, LARGE, policy=["mm"]), "policies.save_ops('mm')"),
    # large values
    (lambda: remat.checkpointed_loop(double, LARGE, LARGE), "use remat.checkpointed_scan"),
    (lambda: remat.checkpointed_loop(double, ARRAY, ARRAY), "float64 ndarray of shape (200, 300)"),
    (lambda: remat.checkpointed_loop(ARRAY, double, 3), "func must be a function, got float64"),
    (lambda: remat.checkpointed_loop(double, ARRAY, 9, store=ARRAY), "store must be"),
    (lambda: remat.checkpointed_loop(double, ARRAY, 9, memory_budget=ARRAY), "a fraction as a"),
    (lambda: remat.checkpointed_loop(double, ARRAY, 9, schedule=ARRAY), "schedule must be one of"),
    (lambda: remat.grad(double, wrt=ARRAY), "wrt must be the position"),
    (lambda: remat.grad(double)(np.arange(5000)), "got int64 ndarray of shape (5000,)"),
    (lambda: remat.checkpoint_sequential(LAYERS, LARGE, 9), "segments must be a whole number"),
    (lambda: remat.checkpoint_segment(torch.sin, LARGE), "inputs must be a list or tuple"),
    (lambda: remat.CheckpointManager(LARGE), "max_memory_mb must be a positive number"),
    (lambda: remat.name(LARGE, LARGE), "name must be text, got float32 Tensor"),
    # budgets
    (lambda: remat.auto_checkpoint(LAYERS, "0.5"), "must be a float if it is a fraction"),
    (lambda: remat.CheckpointManager(memory_budget="50%"), "write 0.5"),
    (lambda: remat.checkpoint_sequential(LAYERS, LARGE, memory_budget="12.5 %"), "write 0.125"),
    (lambda: remat.grad(double, memory_budget=True), "a fraction as a float in (0, 1], got True"),
    (lambda: remat.auto_checkpoint(LAYERS, 2.5), "must be a fraction in (0, 1]"),
    # structures
    (lambda: remat.checkpointed_loop(lambda a: (a, a), ARRAY, 9), "(array, array) instead of an"),
    (lambda: remat.checkpointed_loop(lambda s: s[0], (LARGE,) * 2, 9), "an array instead of (arr"),
    # classes in the place of modules, and other things
    (lambda: remat.apply(nn.Linear), "got class Linear; make one: Linear(...)"),
    (lambda: remat.auto_checkpoint(nn.Linear, 0.5), "got class Linear; make one: Linear(...)"),
    (lambda: remat.checkpoint(nn.Linear, LARGE), "got class Linear; make one: Linear(...)"),
    (lambda: remat.memory_report(nn.Linear, LARGE), "got class Linear; make one: Linear(...)"),
    (lambda: remat.verify(nn.Linear, LARGE), "got class Linear; make one: Linear(...)"),
    (lambda: remat.DiskStore(__file__), "directory must be a directory, got the file"),
    (lambda: remat.CheckpointManager(1).should_checkpoint("a"), "must be a CheckpointNode"),
    (lambda: remat.CheckpointManager(1).selective_checkpointing("a"), "must be a CheckpointNode"),
    (lambda: remat.checkpoint_loops(double, schedule=Given(3, (1,))), "schedule must be one of"),
    (lambda: remat.steps(3), "iterable must be something to iterate over, got 3"),
    (lambda: remat.CheckpointProfiler().plot(3), "path must be text or a path"),
    (lambda: Given(9, 3), "positions must be whole numbers, got 3"),
    (lambda: Mixed(9, 4, 3), "sizes must be remat.schedules.Sizes, got 3"),
    # misspelled options
    (lambda: remat.checkpoint(double, LARGE, polcy=1), "did you mean 'policy'?"),
    (lambda: remat.checkpoint(LAYERS, LARGE, preserve_rng=False), "mean 'preserve_rng_state'?"),
    (lambda: remat.adaptive_checkpoint(double, LARGE, threshold=1, preserve_rng=1), "did you mean"),
    (lambda: remat.checkpointed_loop(double, ARRAY, 9, num_checkpoint=3), "'num_checkpoints'?"),
    (lambda: remat.checkpointed_scan(double, ARRAY, ARRAY, shedule="all"), "'schedule'?"),
    (lambda: remat.checkpointed_while(double, double, 1.0, num_checkpoint=3), "'num_checkpoints'?"),
    (lambda: remat.checkpointed_loop(double, ARRAY, 9, store="dsik"), "did you mean 'disk'?"),
    (lambda: remat.checkpoint_sequential(LAYERS, LARGE, segmnts=2), "did you mean 'segments'?"),
    (lambda: remat.apply(LAYERS, memory_bugdet=0.5), "did you mean 'memory_budget'?"),
    (lambda: remat.apply(LAYERS, "Linaer"), "did you mean 'Linear'?"),
    (lambda: remat.auto_checkpoint(LAYERS, budget=0.5), "did you mean 'memory_budget'?"),
    (lambda: remat.CheckpointManager(memory_bugdet=0.5), "did you mean 'memory_budget'?"),
    (lambda: remat.CheckpointScope("a", use_recompute=False), "mean 'use_recomputation'?"),
    (lambda: remat.CheckpointGroup("a", preserve_rng=True), "did you mean 'preserve_rng_state'?"),
    (lambda: remat.grad_with_checkpointing(double, num_chekpoints=3), "'num_checkpoints'?"),
    (lambda: remat.steps(range(3), num_chekpoints=3), "did you mean 'num_checkpoints'?"),
    (lambda: remat.value_and_grad(double, memory_bugdet=0.5), "did you mean 'memory_budget'?"),
    (lambda: remat.plan_loop(9, slot=3), "did you mean 'slots'?"),
    (lambda: remat.get_memory_savings(9, num_checkpoint=3), "did you mean 'num_checkpoints'?"),
    (lambda: remat.compute_checkpoint_positions(9, 3, "unifrom"), "did you mean 'uniform'?"),
]


@pytest.mark.parametrize(("call", "part"), WRONG, ids=[part for _, part in WRONG])
def test_a_wrong_call_says_what_to_write(call, part: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    message = str(caught.value).replace("Did you", "did you")  # Python's own, from 3.14 on
    assert part in message
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("options", "smaller", "remedy"),
    [
        ({"memory_budget": 0.01}, "memory_budget=0.01", r"pass memory_budget=(0\.\d+) or more"),
        ({"memory_budget": 9000}, "memory_budget=9000", r"pass memory_budget=(\d+) or more"),
        ({"memory_budget": "9KB"}, "memory_budget='9KB'", r'pass memory_budget="(\d+KB)" or more'),
        ({"max_memory_mb": 0.01}, "max_memory_mb=0.01", r"pass max_memory_mb=([\d.]+) or more"),
    ],
)
def test_a_budget_that_is_too_small_says_what_to_pass(options, smaller, remedy) -> None:
    """In the unit of the user; and what it says works."""
    x, weights = np.linspace(0, 1, 3000), [1.0, 1.1, 0.9, 1.2]

    def loss(x):
        for weight in weights:
            x = np.tanh(np.sin(x) * weight)
        return np.sum(x)

    with pytest.raises(remat.BudgetTooSmallError) as caught, remat.CheckpointManager(**options):
        remat.grad(loss)(x)
    message = str(caught.value)
    assert smaller in message
    (found,) = re.findall(remedy, message)
    (name,) = options
    value = found if isinstance(options[name], str) else type(options[name])(found)
    with remat.CheckpointManager(**{name: value}):
        gradient = remat.grad(loss)(x)
    np.testing.assert_array_equal(gradient, remat.grad(loss)(x))


def test_the_keywords_of_a_function_are_its_own() -> None:
    def scaled(x, polcy):
        return (x * polcy).sin()

    assert remat.checkpoint(scaled, LARGE, polcy=3.0).shape == LARGE.shape
    assert remat.checkpoint(
        lambda x, **rest: (x * rest["polcy"]).sin(), LARGE, polcy=3.0
    ).requires_grad


def test_an_error_inside_of_a_call_is_left_alone() -> None:
    def step(x):
        return double(x, num_checkpoint=3)

    with pytest.raises(TypeError, match=r"unexpected keyword argument 'num_checkpoint'\nraised"):
        remat.checkpointed_loop(step, ARRAY, 9)


class Failing:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (None, "None"),
        ("x" * 500, None),
        (list(range(10_000)), "[0, ...]"),
        ({"a": ARRAY}, "{'a': float64 ndarray of shape (200, 300)}"),
        (LARGE, "float32 Tensor of shape (200, 300)"),
        (np.float64(0.5), repr(np.float64(0.5))),
        (nn.Linear, "class Linear"),
        (LAYERS, "Sequential object"),
        (np, "module numpy"),
        (double, "function double"),
        (torch.mm, "function mm"),
        (object(), "object object"),
        (Failing(), "Failing object"),
    ],
)
def test_values_are_shown_on_one_short_line(value, text: str | None) -> None:
    assert text is None or shown(value) == text
    assert len(shown(value)) <= 80


def test_what_is_not_near_is_not_suggested() -> None:
    assert did_you_mean("argnums", ["wrt", "memory_budget"]) == ""
    assert did_you_mean(3, ["wrt"]) == ""


def test_integrations_say_that_they_need_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import remat.integrations.timm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingPackageError: remat.integrations needs PyTorch" in done.stderr
    assert importlib.import_module("remat.integrations")
