"""Guards of the dispatcher that are reused, and private names of PyTorch: all in one file."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from threading import Barrier

import pytest
import torch
from torch.torch_version import TorchVersion

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


def loaded_again():
    """Return the module as it would be with what this version of PyTorch has now."""
    spec = importlib.util.find_spec("remat.engines.torch.backend")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "name", "purpose", "use"),
    [
        ("_C", "_current_graph_task_id", "identifies the", lambda b: b.current_graph_task()),
        ("_C", "_AutoDispatchBelowADInplaceOrView", "calls ops", lambda b: b.below_autograd()),
        (
            "_C",
            "_current_autograd_node",
            "tells whose",
            lambda b: b.is_custom_function_in_backward(),
        ),
        ("_C", "DispatchKeySet", "a set of dispatch keys", lambda b: b.replaying.take()),
        ("_C", "DispatchKey", "names dispatch keys", lambda b: b.without_dispatch_modes()),
    ],
)
def test_a_name_that_pytorch_lacks_is_told_where_it_is_needed(
    monkeypatch, path, name, purpose, use
) -> None:
    monkeypatch.delattr(getattr(torch, path), name)
    module = loaded_again()
    with pytest.raises(remat.UnsupportedError) as raised:
        use(module)
    message = str(raised.value)
    assert f"{torch.__version__} lacks torch.{path}.{name} ({purpose}" in message
    assert "or a newer remat" in message


def test_an_attribute_that_pytorch_lacks_is_told_when_recording_begins(monkeypatch) -> None:
    monkeypatch.setattr(torch.nn, "Module", object)
    module = loaded_again()
    with pytest.raises(remat.UnsupportedError, match=r"_buffers of object \(replaces a"):
        module.push_dispatch_mode(None)


def test_the_engine_is_imported_without_many_of_the_names() -> None:
    """In a process of its own, because modules of the engine would keep the names."""
    code = """
        import torch
        torch.optim.SGD([torch.ones(1)])  # which loads the compiler

        del torch._C._push_on_torch_dispatch_stack, torch._C._AutoDispatchBelowADInplaceOrView
        del torch._C._VariableFunctions, torch._C._nn, torch._C._dynamo.eval_frame
        del torch._C._SetExcludeDispatchKeyGuard, torch._C._current_autograd_node
        import remat

        x = torch.ones(2, requires_grad=True)
        remat.checkpointed_loop(lambda s: s.sin(), x, 5, 2)[0].sum().backward()
        assert x.grad is not None
        try:
            remat.checkpoint(lambda x: x.sin(), x)
        except remat.UnsupportedError as error:
            assert "_push_on_torch_dispatch_stack (enters the recorder" in str(error), error
        else:
            raise AssertionError("not refused")
        torch.randn(3)  # nothing is left on
    """
    command = [sys.executable, "-c", dedent(code)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_old_pytorch_is_refused_with_a_remedy(monkeypatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.7.1+cpu"))
    with pytest.raises(
        remat.UnsupportedError, match=r"needs PyTorch [\d.]+ or newer; this is 2\.7\.1.*pip install"
    ):
        loaded_again()


def test_a_newer_pytorch_is_not(monkeypatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("3.1.0a0+gitabc"))
    loaded_again()


def test_the_lower_bound_is_that_of_the_package() -> None:
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["torch"] == [f"torch>={backend.LOWEST}"]


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
