"""Every private name of PyTorch that remat uses, and what it is for. Checked with PyTorch 2.13.

A new version of PyTorch is this one file to check: if a name is gone, importing it says which.
Attributes of tensors that are private by name but common knowledge (`_version`, `_base`,
`_is_view`) are used where they are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.utils._python_dispatch

from ...errors import UnsupportedError

__all__ = [
    "FUNCTIONS",
    "NN_FUNCTIONS",
    "TENSOR_FUNCTIONS",
    "AccumulateGrad",
    "Guards",
    "are_functorch_transforms_active",
    "below_autograd",
    "count_dispatch_modes",
    "count_function_modes",
    "current_graph_task",
    "dispatch_mode_stack",
    "function_mode_stack",
    "has_global_module_hooks",
    "is_functorch_tensor",
    "is_traced_by_make_fx",
    "keep_compiler_out",
    "never_compiled",
    "on_conjugates",
    "pop_dispatch_mode",
    "pop_saved_tensor_hooks",
    "push_dispatch_mode",
    "push_saved_tensor_hooks",
    "queue_callback",
    "replaying",
    "set_version",
    "top_saved_tensor_hooks",
    "with_version_counters",
    "without_dispatch_modes",
    "without_function_modes",
    "without_modes",
    "without_subclass_functions",
]

Guard = AbstractContextManager[None]
_missing: list[str] = []


def _private(path: str, purpose: str) -> Any:
    """Return a private name of PyTorch; if it is gone, remember that for one error about all."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        _missing.append(f"torch.{path} ({purpose})")
        return lambda *_, **__: None


# -- modes and hooks -------------------------------------------------------------------------------

push_dispatch_mode: Callable[[Any], None] = _private(
    "_C._push_on_torch_dispatch_stack",
    "switches the recorder on; TorchDispatchMode.__enter__ also sets flags for the compiler",
)
pop_dispatch_mode: Callable[[Any], Any] = _private(
    "_C._pop_torch_dispatch_stack", "switches the recorder off"
)
count_dispatch_modes: Callable[[], int] = _private(
    "_C._len_torch_dispatch_stack", "tells whether dispatch modes of the program are on"
)
dispatch_mode_stack: Callable[[], list[Any]] = _private(
    "utils._python_dispatch._get_current_dispatch_mode_stack", "tells which ones"
)
without_modes: Callable[[], AbstractContextManager[Any]] = _private(
    "utils._python_dispatch._disable_current_modes", "detaches tensors of wrapper subclasses"
)
count_function_modes: Callable[[], int] = _private(
    "_C._len_torch_function_stack", "tells whether function modes of the program are on"
)
function_mode_stack: Callable[[], list[Any]] = _private(
    "overrides._get_current_function_mode_stack", "tells which ones"
)
without_function_modes: Callable[[], Guard] = _private(
    "_C.DisableTorchFunction", "replays ops unseen by function modes and subclasses"
)
without_subclass_functions: Callable[[], Guard] = _private(
    "_C.DisableTorchFunctionSubclass", "detaches a tensor without what its class adds"
)
push_saved_tensor_hooks: Callable[[Any, Any], None] = _private(
    "_C._autograd._push_saved_tensors_default_hooks", "what saved_tensors_hooks.__enter__ does"
)
pop_saved_tensor_hooks: Callable[[], None] = _private(
    "_C._autograd._pop_saved_tensors_default_hooks", "what saved_tensors_hooks.__exit__ does"
)
top_saved_tensor_hooks: Callable[[bool], Any] = _private(
    "_C._autograd._top_saved_tensors_default_hooks", "tells whether others were set since ours"
)

has_global_module_hooks: Callable[[], bool] = _private(
    "nn.modules.module._has_any_global_hook", "tells whether calls of modules are tracked"
)

# -- the dispatcher --------------------------------------------------------------------------------

below_autograd: Callable[[], Guard] = _private(
    "_C._AutoDispatchBelowADInplaceOrView", "calls ops below autograd and its version counters"
)
_include: Callable[[Any, bool], Guard] = _private(
    "_C._SetExcludeDispatchKeyGuard", "switches a layer of the dispatcher off or on again"
)
_exclude: Callable[[Any], Guard] = _private(
    "_C._ExcludeDispatchKeyGuard", "switches several layers of the dispatcher off"
)
_keys: Any = _private("_C.DispatchKey", "names the layers of the dispatcher")
_full_keys: Any = _private("_C._dispatch_keyset_full", "all layers")
_keys_after: Any = _private("_C._dispatch_keyset_full_after", "the layers below one")
_key_set: Any = _private("_C.DispatchKeySet", "a set of layers")


def without_dispatch_modes() -> Guard:
    """Call ops below all dispatch modes; torch's own guard for that cannot be entered twice."""
    return _exclude(
        _key_set(_keys.Python) | _key_set(_keys.PythonTLSSnapshot) | _key_set(_keys.PreDispatch)
    )


def with_version_counters() -> Guard:
    """Switch on, inside of a mode, the layer that counts writes; views share their counter."""
    return _include(_keys.ADInplaceOrView, False)


class on_conjugates:
    """Switch on, inside of a mode, what lets kernels work on conjugate views.

    PyTorch switches it off there, and kernels that make such views themselves go wrong.
    """

    def __enter__(self) -> None:
        self._guards = _include(_keys.Conjugate, False), _include(_keys.Negative, False)
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*error)


class Guards:
    """Guards of one kind that are made once and entered often.

    To make one takes as long as to run a small op, to enter it again a tenth of that. A guard is
    nobody else's between `take` and `give`, so a thread, or a call inside of a call, never enters
    one that another is inside of.

    >>> from contextlib import nullcontext
    >>> guards = Guards(nullcontext)
    >>> first, second = guards.take(), guards.take()
    >>> first is second
    False
    >>> guards.give(first)
    >>> guards.take() is first
    True
    """

    def __init__(self, make: Callable[[], Guard]) -> None:
        self._make = make
        self._idle: list[Guard] = []
        self.give = self._idle.append

    def take(self) -> Guard:
        try:
            return self._idle.pop()
        except IndexError:
            return self._make()


def _replaying() -> Callable[[], Guard]:
    """Return what switches off autograd, autocast, transforms and modes: a replay is unseen."""
    if _missing:
        return without_dispatch_modes
    below = _keys_after(_keys.ADInplaceOrView)
    return partial(_exclude, (_full_keys() - below) | _key_set(_keys.Python))


replaying = Guards(_replaying())

# -- autograd --------------------------------------------------------------------------------------

current_graph_task: Callable[[], int] = _private(
    "_C._current_graph_task_id", "tells backward passes apart; -1 outside of any"
)
queue_callback: Callable[[Callable[[], None]], None] = _private(
    "autograd.variable.Variable._execution_engine.queue_callback", "tells the end of a pass"
)
_set_versions: Any = _private(
    "_C._autograd._unsafe_set_version_counter", "finds tensors that share a version counter"
)
AccumulateGrad: Any = _private("_C._functions.AccumulateGrad", "the node of a leaf in a graph")


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter of a tensor, and of all that share it."""
    _set_versions((tensor,), (version,))


# -- transforms, tracers, the compiler -------------------------------------------------------------

are_functorch_transforms_active: Callable[[], bool] = _private(
    "_C._are_functorch_transforms_active", "refuses regions under torch.func"
)
is_functorch_tensor: Callable[[torch.Tensor], bool] = _private(
    "_C._functorch.is_functorch_wrapped_tensor", "recognises tensors of vmap, which have no memory"
)
_get_dispatch_mode: Any = _private("_C._get_dispatch_mode", "refuses regions under make_fx")
_mode_keys: Any = _private("_C._TorchDispatchModeKey", "names the mode of make_fx")
_eval_frame: Any = _private("_C._dynamo.eval_frame", "keeps the compiler out of remat's own code")


def is_traced_by_make_fx() -> bool:
    return _get_dispatch_mode(_mode_keys.PROXY) is not None


def never_compiled(function: Any) -> None:
    """Keep the compiler out of a function and what it calls, without a wrapper that takes time."""
    skip = _eval_frame._FrameAction.SKIP
    strategy = _eval_frame._FrameExecStrategy(skip, skip)
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)


def keep_compiler_out() -> None:
    """Have the compiler break its graph at this engine instead of tracing it, once it is loaded.

    Compiled autograd would trace what a backward pass does in hooks on saved tensors.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and not _skipped:
        _skipped.append(rules)
        rules.add(__package__)


_skipped: list[Any] = []

# -- functions that read their arguments more quickly than overloads -------------------------------

FUNCTIONS: Any = _private("_C._VariableFunctions", "functions of `torch`")
NN_FUNCTIONS: Any = _private("_C._nn", "functions of `torch.nn.functional`")
TENSOR_FUNCTIONS: Any = _private("_C.TensorBase", "methods of tensors")

if _missing:
    raise UnsupportedError(
        f"remat knows the insides of PyTorch 2.13; {torch.__version__} lacks "
        f"{'; '.join(_missing)}. Use a PyTorch that remat's CHANGELOG names, or a newer remat"
    )
