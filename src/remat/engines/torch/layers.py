"""The layers of a model: chosen by class, path, predicate, or found by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ...errors import UnsupportedError
from ...sizes import did_you_mean, shown

__all__ = ["choose_layers", "describe_layers"]

Layers = dict[str, nn.Module]  # by path
_CONTAINERS = (nn.ModuleList, nn.Sequential)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_MANY = 8  # names that an error shows


def choose_layers(model: nn.Module, layers: Any = None, every: int = 1) -> tuple[Layers, Layers]:
    """Return the chosen modules of a model by path, every n-th of one parent, and the others."""
    found = _find_repeated(model) if layers is None else _select(model, layers)
    counts: Counter[str] = Counter()
    chosen: Layers = {}
    skipped: Layers = {}
    for path, module in found.items():
        parent = path.rpartition(".")[0]
        (skipped if counts[parent] % every else chosen)[path] = module
        counts[parent] += 1
    return chosen, skipped


# -- chosen by the caller --------------------------------------------------------------------------


def _select(model: nn.Module, layers: Any) -> Layers:
    """Return what any of the given classes, names, patterns and predicates chooses."""
    choices = list(layers) if isinstance(layers, list | tuple | set | frozenset) else [layers]
    if not choices:
        raise ValueError(
            "layers must not be empty; name classes or paths, or pass None to find the blocks"
        )
    wanted: set[int] = set()
    for choice in choices:
        wanted.update(map(id, _matching(model, choice)))
    return {path: module for path, module in model.named_modules() if id(module) in wanted}


def describe_layers(layers: Layers) -> str:
    """Return in words which layers these are: "4 of class Block (blocks.*)"."""
    groups = Counter((type(m).__name__, path.rpartition(".")[0]) for path, m in layers.items())
    texts = []
    for (name, parent), count in groups.items():
        paths = [path for path, m in layers.items() if _is_of(path, m, name, parent)]
        shown = f"{parent}.*".lstrip(".") if count > 1 else paths[0] or "the model itself"
        texts.append(f"{count} {name} ({shown})")
    return ", ".join(texts)


def _is_of(path: str, module: nn.Module, name: str, parent: str) -> bool:
    return type(module).__name__ == name and path.rpartition(".")[0] == parent


def _matching(model: nn.Module, choice: Any) -> list[nn.Module]:
    test, kind = _test_for(choice)
    found = [(path, module) for path, module in model.named_modules() if test(path, module)]
    if not found:
        near = did_you_mean(choice, {type(module).__name__ for module in model.modules()})
        raise ValueError(f"layers: no module of the model {kind}; {_hint(model)}{near}")
    for path, module in found:
        if isinstance(module, _NEVER_CALLED):
            raise ValueError(
                f"layers: {path} is a {type(module).__name__}, which is never called itself; "
                f"choose what is in it: {path + '.*'!r}"
            )
    return [module for _, module in found]


def _test_for(choice: Any) -> tuple[Callable[[str, nn.Module], bool], str]:
    """Return what says whether a module is chosen, and that in words."""
    if isinstance(choice, type):
        if not issubclass(choice, nn.Module):
            raise TypeError(f"layers: {choice.__qualname__} is not a class of modules")
        return lambda _, module: isinstance(module, choice), f"is a {choice.__qualname__}"
    if isinstance(choice, str):
        pattern = choice.split(".")
        return (
            lambda path, module: type(module).__name__ == choice or _fits(path, pattern),
            f"has the class name {choice!r} or a path that fits it",
        )
    if callable(choice):
        return lambda _, module: bool(choice(module)), f"is chosen by {_name(choice)}"
    raise TypeError(
        "layers must be a class, a class name, a path pattern such as 'model.layers.*', a function "
        f"of a module, or a list of these, got {shown(choice)}"
    )


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))


def _fits(path: str, pattern: list[str]) -> bool:
    """Return whether a path fits a pattern; a `*` stands for (a part of) one name in it."""
    names = path.split(".")
    return len(names) == len(pattern) and all(map(fnmatchcase, names, pattern))


def _hint(model: nn.Module) -> str:
    """Say what could have been chosen."""
    found = _find_groups(model, "")
    if found:
        return f"its repeated blocks are {describe_layers(found)}"
    names = Counter(type(module).__name__ for module in model.modules() if _is_block(module))
    if not names:
        return "it has no modules that could be checkpointed"
    common = ", ".join(name for name, _ in names.most_common(_MANY))
    return f"it has no repeated blocks; its classes are {common}"


# -- found by themselves ---------------------------------------------------------------------------


def _find_repeated(model: nn.Module) -> Layers:
    found = _find_groups(model, "")
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no repeated blocks: no ModuleList or Sequential holds two "
            "modules of one class that are more than a single layer of torch.nn. Name what is to "
            f"be checkpointed: remat.apply(model, layers=...); {_hint(model)}"
        )
    return found


def _find_groups(module: nn.Module, path: str) -> Layers:
    """Return the outermost repeated blocks below a module."""
    found: Layers = {}
    seen: set[int] = set()
    _collect(module, path, found, seen)
    return found


def _collect(module: nn.Module, path: str, found: Layers, seen: set[int]) -> None:
    children = {}
    for name, child in module.named_children():
        if id(child) not in seen:  # a module that is in two places is one layer
            seen.add(id(child))
            children[f"{path}.{name}" if path else name] = child
    repeated = _repeated(children) if isinstance(module, _CONTAINERS) else {}
    for group in repeated.values():
        found.update(_blocks_of(group, seen))
    for child_path, child in children.items():
        if type(child) not in repeated:
            _collect(child, child_path, found, seen)


def _repeated(children: Layers) -> dict[type, Layers]:
    """Return the blocks of each class of which there is more than one."""
    groups: dict[type, Layers] = {}
    for path, child in children.items():
        if _is_block(child):
            groups.setdefault(type(child), {})[path] = child
    return {cls: group for cls, group in groups.items() if len(group) > 1}


def _blocks_of(group: Layers, seen: set[int]) -> Layers:
    """Return the blocks of a group, or of stages (of other widths each) the blocks inside."""
    if len({_shapes(module) for module in group.values()}) == 1:
        return group
    inside: Layers = {}
    for path, stage in group.items():
        blocks: Layers = {}
        _collect(stage, path, blocks, seen)
        if not blocks:
            return group
        inside.update(blocks)
    return inside


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


def _is_block(module: nn.Module) -> bool:
    """Return whether there is something between input and output that could be dropped."""
    is_leaf = next(module.children(), None) is None
    is_single_op = is_leaf and type(module).__module__.startswith("torch.nn.")
    return not is_single_op and not isinstance(module, _NEVER_CALLED)
