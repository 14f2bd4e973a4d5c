"""From values to the engine that knows them, without importing anything to find out."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol, cast

from .. import trees
from ..errors import UnsupportedError
from ..introspect import names_in, references
from ..observers import AllocationTracker, Observer
from ..segments import SegmentOptions
from ..stores import Arrays
from ..verification import Verification

__all__ = [
    "Engine",
    "ScopeEngine",
    "allocation_tracker",
    "engine_for",
    "engine_of_call",
    "engine_with_scopes",
    "engines_with_scopes",
    "is_torch_module",
]


class Engine(Protocol):
    """What an engine brings; a module can be one."""

    ARRAYS: Arrays  # what stores have to know of its arrays

    def run_loop(self, function: Any, state: Any, options: Any, **keywords: Any) -> Any: ...

    def run_while(
        self, condition: Any, function: Any, state: Any, *args: Any, **keywords: Any
    ) -> Any: ...

    def run_segment(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: SegmentOptions,
    ) -> Any:
        """Call the function; forget what it computes on the way."""

    def checkpointed_module(self, module: Any, run: Callable[..., Any]) -> Any:
        """Return a module over the same parameters whose calls are `run(call, args, kwargs)`."""

    def checkpoint_tensor(self, tensor: Any, threshold: int | None) -> Any:
        """Do not hold this tensor, if it has more bytes than `threshold`; return it."""

    def verify(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: SegmentOptions,
    ) -> Verification:
        """Run with and without checkpointing, and compare."""

    def value_and_grad(
        self, function: Any, wrt: Any, args: Any, kwargs: Any, init_grad: Any
    ) -> Any: ...


class ScopeEngine(Protocol):
    """What an engine brings that can record ops as they run."""

    def open_scope(self, name: str, *, policy: Any) -> Any:
        """Begin a region; the policy says what is kept, None: nothing."""

    def close_scope(self, scope: Any, *, quiet: bool) -> None: ...

    def mark(self, tensor: Any) -> Any:
        """Hold this tensor; return it."""

    def is_marked(self, tensor: Any) -> bool: ...

    def name_tensor(self, tensor: Any, name: str) -> Any:
        """Give a tensor a name for policies and reports; return it."""

    def Budget(self, budget: int | float | str, planner: Any, *, share: float = 1.0) -> Any:
        """Return what keeps passes within a budget; `planner` makes plans of traces."""

    def run_within(self, budget: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a function as a pass, or a part of one, within a budget."""

    def enter_budget(self, budget: Any) -> Any:
        """Begin passes within a budget, and return it; `budget.end()` ends them."""

    def record_trace(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a function forward and backward; return what it did as a `plans.Trace`."""

    def set_budget(self, model: Any, budget: int | float | str | None, planner: Any) -> Any:
        """Let the forward pass of a model keep to a budget; return the model."""

    def choose_layers(
        self, model: Any, layers: Any, every: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the chosen modules of a model by path, and those that `every` leaves out."""

    def describe_layers(self, layers: dict[str, Any]) -> str: ...

    def apply_to(
        self,
        layers: dict[str, Any],
        run: Callable[[str], Callable[..., Any]],
        skipped: dict[str, Any],
    ) -> None:
        """Let the forward passes of these layers be `run(path)(forward, args, kwargs)`."""

    def remove_from(self, model: Any) -> None: ...

    def applied_to(self, model: Any) -> list[str]: ...


# The array type of each framework, looked up only if the framework has been imported.
_FOREIGN = {"torch": "Tensor", "jax": "Array"}


def engine_for(leaves: Iterable[Any], function: Any = None) -> Engine:
    """Return the engine for these values: NumPy unless one of them belongs to another framework.

    If no value belongs to one, the `function` that gets them may: a module, or a function that
    closes over tensors or refers to functions of a framework.
    """
    leaves = list(leaves)
    for framework in _FOREIGN:
        kind = _array_type(framework)
        if kind is not None and any(isinstance(leaf, kind) for leaf in leaves):
            return _load(framework)
    return _load("torch" if function is not None and _is_of_torch(function, leaves) else "numpy")


def engine_of_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Engine:
    """Return the engine for a call; a tensor among the arguments decides quickly."""
    tensor = _array_type("torch")
    if tensor is not None:
        for arg in args:
            if isinstance(arg, tensor):
                return _load("torch")
    elif _array_type("jax") is None:
        return _load("numpy")
    return engine_for(trees.flatten((args, kwargs))[0], function)


def engine_with_scopes(value: Any = None) -> ScopeEngine:
    """Return the engine that records ops as they run.

    If `value` is an array, it tells. Otherwise NumPy's, while a NumPy function is being
    differentiated in this thread; else that of PyTorch, if the program uses it; else NumPy's.
    """
    tensor = _array_type("torch")
    if tensor is None or (not isinstance(value, tensor) and _is_of_numpy(value)):
        return cast(ScopeEngine, _load("numpy"))
    return cast(ScopeEngine, _load("torch"))


def engines_with_scopes() -> list[ScopeEngine]:
    """Return all engines that the program may use: NumPy's, and that of PyTorch if imported."""
    frameworks = ["numpy"] if _array_type("torch") is None else ["numpy", "torch"]
    return [cast(ScopeEngine, _load(framework)) for framework in frameworks]


def _is_of_numpy(value: Any) -> bool:
    if value is not None and _is_array(value):
        return True
    engine = sys.modules.get("remat.engines.numpy")  # if it is not loaded, it traces nothing
    return engine is not None and bool(engine.is_tracing())


def allocation_tracker(observer: Observer) -> AllocationTracker | None:
    """Return what tells an observer what a thread allocates, if an engine can."""
    if _array_type("torch") is None:
        return None
    tracker: AllocationTracker = cast(Any, _load("torch")).AllocationMode(observer)
    return tracker


def is_torch_module(value: Any) -> bool:
    """Return whether a value is an `nn.Module`."""
    module = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    return module is not None and isinstance(value, module)


@functools.cache
def _load(framework: str) -> Engine:
    if framework == "jax":
        raise UnsupportedError(
            "this version of remat has no engine for jax; convert to NumPy arrays or to tensors "
            "of torch, or use a version that lists it in its CHANGELOG"
        )
    return cast(Engine, importlib.import_module(f"remat.engines.{framework}"))


def _array_type(framework: str) -> Any:
    return getattr(sys.modules.get(framework), _FOREIGN[framework], None)


def _is_of_torch(function: Any, leaves: list[Any]) -> bool:
    torch = sys.modules.get("torch")
    module = getattr(getattr(torch, "nn", None), "Module", None)
    if module is None:
        return False
    if isinstance(function, module) or isinstance(getattr(function, "__self__", None), module):
        return True
    # Arrays decide.
    if any(hasattr(leaf, "dtype") for leaf in leaves):
        return False
    nearby = list(_reach(function))
    if any(isinstance(value, (_array_type("torch"), module)) for value in nearby):
        return True
    return not any(_is_array(value) for value in nearby) and any(map(_belongs_to_torch, nearby))


def _is_array(value: Any) -> bool:
    """Return whether a value is an array; the module `numpy` has a `dtype`, too, but is none."""
    return hasattr(type(value), "dtype")


def _belongs_to_torch(value: Any) -> bool:
    """Return whether a value is `torch`, one of its modules, or a function or class of theirs."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] == "torch"


def _reach(function: Any) -> Iterator[Any]:
    """Generate what a function refers to, and what the functions of its file do that it calls.

    What lies deeper is not worth the search.
    """
    functions = [_undecorated(function)]
    for caller in functions:  # which grow on the way
        for value in _nearby(caller):
            yield value
            called = _undecorated(value)
            if (
                isinstance(called, FunctionType)
                and called.__globals__ is getattr(caller, "__globals__", None)
                and called not in functions
            ):
                functions.append(called)


def _undecorated(value: Any) -> Any:
    is_wrapper = isinstance(value, FunctionType) or "__wrapped__" in getattr(value, "__dict__", ())
    return inspect.unwrap(value) if is_wrapper else value


def _nearby(value: Any) -> Iterator[Any]:
    """Generate what a function refers to directly, through partials and methods.

    Of the object of a method, those are the values of its attributes.
    """
    if not isinstance(value, FunctionType | MethodType | functools.partial):
        return
    for found, _ in references(value, _never):
        yield from found if isinstance(found, tuple) else (found,)
        if isinstance(value, MethodType) and found is value.__self__:
            yield from getattr(found, "__dict__", {}).values()
        elif not isinstance(value, FunctionType):
            yield from _nearby(found)
    if isinstance(value, FunctionType):  # which may import a module by itself
        names = names_in(value.__code__) - value.__globals__.keys()
        yield from (sys.modules[name] for name in names if name in sys.modules)


def _never(value: Any) -> bool:
    return False
