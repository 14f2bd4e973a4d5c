"""From values to the engine that knows them, without importing anything to find out."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from .. import trees
from ..errors import UnsupportedError
from ..introspect import names_in, references
from ..observers import AllocationTracker, Observer
from ..segments import SegmentOptions
from ..sizes import shown
from ..verification import Verification

if TYPE_CHECKING:
    from ..core.budget import Budget as PassBudget
    from ..loops import LoopOptions, MemorySize, Progress
    from ..plans import Trace
    from ..plans.planner import Planner
    from ..stores import Arrays, Store

__all__ = [
    "EngineFunctions",
    "ModuleFunctions",
    "OpenScope",
    "allocation_tracker",
    "engine_for",
    "engine_in_use",
    "engine_of_call",
    "engine_of_module",
    "engines_in_use",
    "is_torch_module",
]


class OpenScope(Protocol):
    """A region that was opened by hand, and access to it after it was closed."""

    name: str
    records: bool  # whether ops are recorded in it

    @property
    def is_alive(self) -> bool:
        """Whether its backward pass may still come."""
        ...

    def close(self, *, quiet: bool) -> None: ...

    def held(self) -> list[Any]: ...

    def recompute(self) -> list[Any]: ...

    def drop(self) -> None: ...


class EngineFunctions(Protocol):
    """What an engine brings; a module can be one."""

    @property
    def ARRAYS(self) -> Arrays:
        """What stores have to know of its arrays."""
        ...

    def run_loop(
        self,
        function: Any,
        state: Any,
        options: LoopOptions,
        *,
        xs: Any = None,
        progress: Progress | None = None,
    ) -> tuple[Any, Any, Mapping[int, Any]]:
        """Run a loop, or a scan if `xs` is given; return final state, outputs and checkpoints."""
        ...

    def run_while(
        self,
        condition: Any,
        function: Any,
        state: Any,
        num_checkpoints: int | None,
        memory_budget: MemorySize | None,
        *,
        store: Store | None = None,
        progress: Progress | None = None,
    ) -> tuple[Any, Mapping[int, Any]]:
        """Run a loop whose length shows at its end; return final state and checkpoints."""
        ...

    def run_segment(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: SegmentOptions,
    ) -> Any:
        """Call the function; drop the activations that it computes."""

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
        ...

    def value_and_grad(
        self,
        function: Any,
        wrt: Sequence[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        init_grad: Any,
    ) -> tuple[Any, list[Any]]: ...

    def open_scope(self, name: str, *, policy: Any) -> OpenScope:
        """Begin a region; the policy says what is kept, None: nothing."""
        ...

    def mark(self, tensor: Any) -> Any:
        """Hold this tensor; return it."""

    def is_marked(self, tensor: Any) -> bool: ...

    def name_tensor(self, tensor: Any, name: str) -> Any:
        """Give a tensor a name for policies and reports; return it."""

    def Budget(
        self, budget: int | float | str, planner: Planner, *, share: float = 1.0
    ) -> PassBudget:
        """Return what keeps passes within a budget; `planner` makes plans of traces."""
        ...

    def record_trace(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        """Run a function forward and backward; return what it did."""
        ...


class ModuleFunctions(EngineFunctions, Protocol):
    """What an engine brings that has modules: PyTorch's."""

    def checkpointed_module(self, module: Any, run: Callable[..., Any]) -> Any:
        """Return a module over the same parameters whose calls are `run(call, args, kwargs)`."""

    def set_budget(
        self, module: Any, memory_budget: int | float | str | None, planner: Planner
    ) -> Any:
        """Let the forward pass of a module keep to a budget; return the module."""

    def choose_layers(
        self, model: Any, layers: Any, every: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the chosen modules of a model by path, and those that `every` leaves out."""
        ...

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

    def AllocationMode(self, observer: Observer) -> AllocationTracker:
        """Return what tells an observer what a thread allocates."""
        ...


# The array type of each framework, looked up only if the framework has been imported.
_FOREIGN = {"torch": "Tensor", "jax": "Array"}


def engine_for(leaves: Iterable[Any], function: Any = None) -> EngineFunctions:
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
) -> EngineFunctions:
    """Return the engine for a call; a tensor among the arguments decides quickly."""
    tensor = _array_type("torch")
    if tensor is not None:
        for arg in args:
            if isinstance(arg, tensor):
                return _load("torch")
    elif _array_type("jax") is None:
        return _load("numpy")
    return engine_for(trees.flatten((args, kwargs))[0], function)


def engine_in_use(value: Any = None) -> EngineFunctions:
    """Return the engine that records what the program runs now.

    If `value` is an array, it tells. Otherwise NumPy's, while a NumPy function is being
    differentiated in this thread; else that of PyTorch, if the program uses it; else NumPy's.
    """
    tensor = _array_type("torch")
    if tensor is None or (not isinstance(value, tensor) and _is_of_numpy(value)):
        return _load("numpy")
    return _load("torch")


def engines_in_use() -> list[EngineFunctions]:
    """Return all engines that the program may use: NumPy's, and that of PyTorch if imported."""
    frameworks = ["numpy"] if _array_type("torch") is None else ["numpy", "torch"]
    return [_load(framework) for framework in frameworks]


def engine_of_module(model: Any, remedy: str = "") -> ModuleFunctions:
    """Return the engine of a module; only PyTorch has some. `remedy` is for functions of NumPy."""
    if not is_torch_module(model):
        raise TypeError(f"model must be a torch.nn.Module, got {shown(model)}{remedy}")
    return _torch_engine()


def _is_of_numpy(value: Any) -> bool:
    if value is not None and _is_array(value):
        return True
    if "remat.engines.numpy" not in sys.modules:  # if it is not loaded, it traces nothing
        return False
    from .numpy import is_tracing  # noqa: PLC0415

    return is_tracing()


def allocation_tracker(observer: Observer) -> AllocationTracker | None:
    """Return what tells an observer what a thread allocates, if an engine can."""
    return None if _array_type("torch") is None else _torch_engine().AllocationMode(observer)


def is_torch_module(value: Any) -> bool:
    """Return whether a value is an `nn.Module`."""
    module = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    return module is not None and isinstance(value, module)


@functools.cache
def _load(framework: str) -> EngineFunctions:
    if framework == "jax":
        raise UnsupportedError(
            "this version of remat has no engine for jax; convert to NumPy arrays or to tensors "
            "of torch, or use a version that lists it in its CHANGELOG"
        )
    return _torch_engine() if framework == "torch" else _numpy_engine()


def _numpy_engine() -> EngineFunctions:
    from . import numpy as engine  # noqa: PLC0415  (an engine is loaded when it is needed)

    return engine


@functools.cache
def _torch_engine() -> ModuleFunctions:
    from . import torch as engine  # noqa: PLC0415

    return engine


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
