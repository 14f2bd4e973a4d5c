"""Guards of the dispatcher that are reused, and private names of PyTorch: all in one file."""

from __future__ import annotations

import ast
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

import remat
from remat.engines.torch import backend
from remat.engines.torch.backend import (
    Guards,
    below_autograd,
    replaying,
    with_version_counters,
    without_dispatch_modes,
)


def excluded() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradCPU)


def test_a_guard_counts_each_time_it_is_entered() -> None:
    guard = replaying.take()
    for _ in range(3):
        assert not excluded()
        with guard:
            assert excluded()
    assert not excluded()
    replaying.give(guard)


@pytest.mark.parametrize("layer", ["Python", "PythonTLSSnapshot", "PreDispatch"])
def test_modes_are_off_each_time(layer) -> None:
    key = getattr(torch._C.DispatchKey, layer)
    guards = Guards(without_dispatch_modes)
    for _ in range(3):
        guard = guards.take()
        with guard:
            assert torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        assert not torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        guards.give(guard)


def test_versions_are_counted_each_time_inside_of_a_mode() -> None:
    guards, x = Guards(with_version_counters), torch.zeros(2)
    for count in (1, 2, 3):
        guard = guards.take()
        with below_autograd(), guard:
            x.add_(1)
        assert x._version == count
        guards.give(guard)


def test_a_guard_that_was_left_by_an_error_can_be_entered_again() -> None:
    guard = replaying.take()
    with pytest.raises(ValueError, match="inside"), guard:
        raise ValueError("inside")
    assert not excluded()
    with guard:
        assert excluded()
    replaying.give(guard)


def test_nobody_gets_a_guard_that_another_has() -> None:
    guards = Guards(without_dispatch_modes)
    at_once = 8
    together = Barrier(at_once)

    def take(_: int) -> object:
        guard = guards.take()
        together.wait(600)
        return guard

    with ThreadPoolExecutor(at_once) as pool:
        for _ in range(50):
            taken = list(pool.map(take, range(at_once)))
            assert len({id(guard) for guard in taken}) == at_once
            for guard in taken:
                guards.give(guard)


def test_a_replay_that_fails_leaves_nothing_excluded() -> None:
    x = torch.ones(4, requires_grad=True)
    y = remat.checkpoint(lambda x: torch.exp(x.sin()), x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()
    assert not excluded()
    again = remat.checkpoint(lambda x: torch.exp(x.sin()), x)
    again.sum().backward()
    plain = x.detach().requires_grad_()
    torch.exp(plain.sin()).sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_a_version_of_pytorch_that_lacks_names_is_told_which(monkeypatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delattr(torch._C, "_AutoDispatchBelowADInplaceOrView")
    spec = importlib.util.find_spec("remat.engines.torch.backend")
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(remat.UnsupportedError) as raised:
        spec.loader.exec_module(module)
    message = str(raised.value)
    assert torch.__version__ in message
    assert "torch._C._current_graph_task_id (identifies the backward pass" in message
    assert "torch._C._AutoDispatchBelowADInplaceOrView (calls ops below autograd" in message
    assert "_push_on_torch_dispatch_stack" not in message


def test_a_version_of_pytorch_that_lacks_an_attribute_is_told_which(monkeypatch) -> None:
    monkeypatch.delattr(torch.autograd.graph.Node, "_sequence_nr")
    spec = importlib.util.find_spec("remat.engines.torch.backend")
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(remat.UnsupportedError, match=r"_sequence_nr of Node \(orders the nodes"):
        spec.loader.exec_module(module)


# -- where private names stand ---------------------------------------------------------------------

PACKAGE = Path(remat.__file__).parent
TUPLES = {"_asdict", "_fields", "_replace"}  # public methods of named tuples


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[^_]\w*|__\w+(?<!__)", name) is not None


def is_private_path(path: str) -> bool:
    return path.startswith("torch.") and any(map(is_private, path.split(".")))


def dotted(node: ast.expr) -> list[str]:
    """Return the names of `a.b.c`; the first is empty if it is not a plain name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [*([node.id] if isinstance(node, ast.Name) else [""]), *reversed(names)]


def own_names(tree: ast.AST) -> set[str]:
    """Return the names that a file defines: functions, classes, variables, attributes of self."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if dotted(node)[:-1] == ["self"] else set()
    return own


def private_names(tree: ast.AST, allowed: set[str]) -> set[str]:
    """Return the private names of PyTorch that code uses: attributes, imports, names in strings."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                names = dotted(node)
                of_torch = names[0] in ("torch", "aten") and is_private(name)
                if of_torch or (is_private(name) and name not in allowed):
                    found.add(".".join(names))
            case ast.Import(names=names):
                found |= {alias.name for alias in names if is_private_path(alias.name)}
            case ast.ImportFrom(level=0, module=str(module), names=names):
                paths = {f"{module}.{alias.name}" for alias in names}
                found |= {path for path in paths if is_private_path(path)}
            case ast.Constant(value=str(text)) if is_private_path(text):
                found.add(text)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, name, *_]):
                text = getattr(name, "value", "")
                if isinstance(text, str) and is_private(text) and text not in allowed:
                    found.add(text)
    return found


SOURCES = {
    path: ast.parse(path.read_text())
    for path in PACKAGE.rglob("*.py")
    # The NumPy engine uses private names of autograd, integrations those of other libraries.
    if not path.is_relative_to(PACKAGE / "engines" / "numpy")
    and not path.is_relative_to(PACKAGE / "integrations")
}


def test_only_backend_uses_private_names_of_pytorch() -> None:
    own = set().union(*map(own_names, SOURCES.values())) | TUPLES | {"_remat"}
    own |= {name for tree in SOURCES.values() for name in remat_notes(tree)}
    allowed = own | backend.ATTRIBUTES.keys()
    used = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, tree in SOURCES.items()
        if path.name != "backend.py"
        for name in private_names(tree, allowed)
    }
    assert used == set()


def remat_notes(tree: ast.AST) -> set[str]:
    """Return the attributes that remat sets on objects of PyTorch."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_remat")
    }


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("torch._C._len_torch_dispatch_stack()", "torch._C._len_torch_dispatch_stack"),
        ("torch.ops.aten._conj.default(x)", "torch.ops.aten._conj"),
        ("aten._conj", "aten._conj"),
        ("x.grad_fn._saved_self", "x.grad_fn._saved_self"),
        ("torch.Tensor._version", "torch.Tensor._version"),
        ("sys.modules['torch']._C", "._C"),
        ("x.untyped_storage()._weak_ref()", "._weak_ref"),
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._C import Graph", "torch._C.Graph"),
        ("from torch.autograd.grad_mode import _unsafe", "torch.autograd.grad_mode._unsafe"),
        ("sys.modules.get('torch._dynamo.trace_rules')", "torch._dynamo.trace_rules"),
        ("getattr(x, '_is_flat_param', False)", "_is_flat_param"),
    ],
)
def test_private_names_are_found_in_all_forms(code, found) -> None:
    assert found in private_names(ast.parse(code), {"_version"})


@pytest.mark.parametrize("code", ["x._version", "self._mine", "x.__class__", "import torch.utils"])
def test_other_names_are_not(code) -> None:
    assert private_names(ast.parse(code), {"_version", "_mine"}) == set()
