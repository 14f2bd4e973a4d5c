"""Which engine a call goes to; the engines themselves are stand-ins."""

from __future__ import annotations

import functools
import subprocess
import sys
import types

import numpy as np
import pytest

import remat
from remat.engines import locate
from remat.engines.locate import engine_for, engine_of_call

torch = pytest.importorskip("torch")

TENSOR = torch.ones(2)
MODULE = torch.nn.Linear(2, 2)
ARRAY = np.ones(2)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    engines = {framework: types.ModuleType(framework) for framework in ("numpy", "torch")}
    load = locate._load
    monkeypatch.setattr(locate, "_load", lambda name: engines.get(name) or load(name))


def name_of(engine) -> str:
    return engine.__name__


def of_call(function, *args, **kwargs) -> str:
    return name_of(engine_of_call(function, args, kwargs))


@pytest.mark.parametrize(
    ("args", "kwargs", "engine"),
    [
        ((TENSOR,), {}, "torch"),
        ((1.0, TENSOR), {}, "torch"),
        ((ARRAY, TENSOR), {}, "torch"),
        (([{"a": (TENSOR,)}],), {}, "torch"),
        ((), {"x": TENSOR}, "torch"),
        ((torch.nn.Parameter(TENSOR),), {}, "torch"),
        ((ARRAY,), {}, "numpy"),
        ((), {"x": [ARRAY]}, "numpy"),
        ((1.0, "text", None), {}, "numpy"),
        ((), {}, "numpy"),
    ],
)
def test_arrays_tell(args, kwargs, engine) -> None:
    assert of_call(np.sin, *args, **kwargs) == engine


@pytest.mark.parametrize(("leaf", "engine"), [(TENSOR, "torch"), (ARRAY, "numpy"), (1, "numpy")])
def test_leaves_tell(leaf, engine) -> None:
    assert name_of(engine_for([1.0, leaf])) == engine


class Holder:
    def __init__(self, value) -> None:
        self.value = value

    def method(self):
        return self.value


def closes_over(value):
    return lambda *args: value


def has_default(x, value=TENSOR):
    return value


def has_keyword_default(x, *, value=MODULE):
    return value


def names_a_global(x):
    return MODULE(x)


def names_nothing(x):
    return x


def calls_torch():
    return torch.linspace(0, 1, 3)


def calls_numpy():
    return np.linspace(0, 1, 3)


def calls_both():
    return torch.from_numpy(np.ones(3))


def imports_torch():
    import torch  # noqa: PLC0415 (what this is about)

    return torch.ones(2)


def calls_torch_inside():
    def inner():
        return [torch.ones(2) for _ in range(2)]

    return inner()


def calls_what_calls_torch(depth=1):
    return calls_what_calls_torch(depth - 1) if depth else calls_torch()


@remat.checkpoint
def decorated():
    return calls_torch()


def calls_what_is_decorated():
    return decorated()


def names_an_array_and_torch():
    return torch.is_tensor(ARRAY)


def has_an_empty_cell():
    def inner(x):
        return later(x)

    if inner is None:
        later = None
    return inner


BY_FUNCTION = [
    (MODULE, "torch"),
    (MODULE.forward, "torch"),
    (closes_over(TENSOR), "torch"),
    (closes_over(MODULE), "torch"),
    (functools.partial(names_nothing, TENSOR), "torch"),
    (functools.partial(MODULE), "torch"),
    (functools.partial(closes_over(MODULE)), "torch"),
    (Holder(TENSOR).method, "torch"),
    (has_default, "torch"),
    (has_keyword_default, "torch"),
    (names_a_global, "torch"),
    (calls_torch, "torch"),
    (calls_both, "torch"),
    (imports_torch, "torch"),
    (calls_torch_inside, "torch"),
    (calls_what_calls_torch, "torch"),
    (closes_over(calls_torch), "torch"),
    (closes_over(closes_over(MODULE)), "torch"),
    (decorated, "torch"),
    (calls_what_is_decorated, "torch"),
    (closes_over(calls_numpy), "numpy"),
    (closes_over(torch.nn.functional), "torch"),
    (closes_over(torch.linspace), "torch"),
    (closes_over(torch.nn.functional.gelu), "torch"),
    (closes_over(torch.nn.functional.dropout), "torch"),
    (closes_over(torch.nn.Linear), "torch"),
    (closes_over(torch.ops.aten.add), "torch"),
    (calls_numpy, "numpy"),
    (names_an_array_and_torch, "numpy"),
    (names_nothing, "numpy"),
    (closes_over(ARRAY), "numpy"),
    (Holder(ARRAY).method, "numpy"),
    (has_an_empty_cell(), "numpy"),
    (len, "numpy"),
    (np.sin, "numpy"),
]


@pytest.mark.parametrize(("function", "engine"), BY_FUNCTION)
@pytest.mark.parametrize("args", [(), (3, 1.0, "text")])
def test_where_no_array_tells_the_function_does(function, engine, args) -> None:
    assert of_call(function, *args) == engine


def test_an_array_tells_more_than_what_is_closed_over() -> None:
    assert of_call(closes_over(TENSOR), ARRAY) == "numpy"


def test_a_module_tells_more_than_an_array() -> None:
    assert of_call(MODULE, ARRAY) == "torch"


def test_jax_has_no_engine(monkeypatch) -> None:
    class Array:
        pass

    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(Array=Array))
    for call in (lambda: of_call(np.sin, [Array()]), lambda: engine_for([Array()])):
        with pytest.raises(remat.UnsupportedError, match="jax"):
            call()


def test_a_half_imported_framework_tells_nothing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert of_call(names_nothing, 1.0) == "numpy"


def test_without_torch_nothing_is_looked_for() -> None:
    check = (
        "import sys, numpy as np, remat\n"
        "assert remat.checkpoint(np.add, 1.0, np.ones(2)).tolist() == [2.0, 2.0]\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
