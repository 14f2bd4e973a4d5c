"""Every private name of PyTorch that remat uses, and what it is for. Checked with PyTorch 2.13.

For a new version of PyTorch this is the one file to check: importing it names what is missing.
Well-known private attributes of tensors (`_version`, `_base`, `_is_view`) are used where they are
needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
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
    "composable_states",
    "count_dispatch_modes",
    "count_function_modes",
    "count_graph_nodes",
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
    "process_group_store",
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
    """Return a private name of PyTorch. Missing names are collected for one error."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        _missing.append(f"torch.{path} ({purpose})")
        return lambda *_, **__: None


# -- modes and hooks -------------------------------------------------------------------------------

push_dispatch_mode: Callable[[Any], None] = _private(
    "_C._push_on_torch_dispatch_stack",
    "enters the recorder; TorchDispatchMode.__enter__ also sets flags for the compiler",
)
pop_dispatch_mode: Callable[[Any], Any] = _private(
    "_C._pop_torch_dispatch_stack", "leaves the recorder"
)
count_dispatch_modes: Callable[[], int] = _private(
    "_C._len_torch_dispatch_stack", "checks whether dispatch modes of the program are active"
)
dispatch_mode_stack: Callable[[], list[Any]] = _private(
    "utils._python_dispatch._get_current_dispatch_mode_stack", "lists the active dispatch modes"
)
without_modes: Callable[[], AbstractContextManager[Any]] = _private(
    "utils._python_dispatch._disable_current_modes", "detaches tensors of wrapper subclasses"
)
count_function_modes: Callable[[], int] = _private(
    "_C._len_torch_function_stack", "checks whether function modes of the program are active"
)
function_mode_stack: Callable[[], list[Any]] = _private(
    "overrides._get_current_function_mode_stack", "tells which ones"
)
without_function_modes: Callable[[], Guard] = _private(
    "_C.DisableTorchFunction", "replays ops without function modes and subclasses"
)
without_subclass_functions: Callable[[], Guard] = _private(
    "_C.DisableTorchFunctionSubclass", "detaches a tensor without __torch_function__ of its class"
)
push_saved_tensor_hooks: Callable[[Any, Any], None] = _private(
    "_C._autograd._push_saved_tensors_default_hooks", "what saved_tensors_hooks.__enter__ does"
)
pop_saved_tensor_hooks: Callable[[], None] = _private(
    "_C._autograd._pop_saved_tensors_default_hooks", "what saved_tensors_hooks.__exit__ does"
)
top_saved_tensor_hooks: Callable[[bool], Any] = _private(
    "_C._autograd._top_saved_tensors_default_hooks",
    "checks whether other hooks were set after ours",
)

has_global_module_hooks: Callable[[], bool] = _private(
    "nn.modules.module._has_any_global_hook", "checks whether module calls are tracked"
)

# -- the dispatcher --------------------------------------------------------------------------------

below_autograd: Callable[[], Guard] = _private(
    "_C._AutoDispatchBelowADInplaceOrView", "calls ops below autograd and version counters"
)
_include: Callable[[Any, bool], Guard] = _private(
    "_C._SetExcludeDispatchKeyGuard", "disables a dispatch key, or enables it again"
)
_exclude: Callable[[Any], Guard] = _private(
    "_C._ExcludeDispatchKeyGuard", "disables several dispatch keys"
)
_keys: Any = _private("_C.DispatchKey", "names dispatch keys")
_full_keys: Any = _private("_C._dispatch_keyset_full", "all dispatch keys")
_keys_after: Any = _private("_C._dispatch_keyset_full_after", "the keys below one")
_key_set: Any = _private("_C.DispatchKeySet", "a set of dispatch keys")


def without_dispatch_modes() -> Guard:
    """Call ops below all dispatch modes. torch's own guard for that cannot be entered twice."""
    return _exclude(
        _key_set(_keys.Python) | _key_set(_keys.PythonTLSSnapshot) | _key_set(_keys.PreDispatch)
    )


def with_version_counters() -> Guard:
    """Enable version counting inside a dispatch mode; views share the counter of their base."""
    return _include(_keys.ADInplaceOrView, False)


class on_conjugates:
    """Enable the conjugate and negative fallbacks inside a dispatch mode.

    PyTorch disables them there. Kernels that make conjugate views themselves then fail.
    """

    def __enter__(self) -> None:
        self._guards = _include(_keys.Conjugate, False), _include(_keys.Negative, False)
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*error)


class Guards:
    """A pool of dispatcher guards of one kind, which are reused.

    Making a guard takes as long as running a small op, entering it again a tenth of that. Between
    `take` and `give` a guard has one owner, so no other thread and no nested call enters it.

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
    """Return a guard that disables autograd, autocast, transforms and modes for a replay."""
    if _missing:
        return without_dispatch_modes
    below = _keys_after(_keys.ADInplaceOrView)
    return partial(_exclude, (_full_keys() - below) | _key_set(_keys.Python))


replaying = Guards(_replaying())

# -- autograd --------------------------------------------------------------------------------------

current_graph_task: Callable[[], int] = _private(
    "_C._current_graph_task_id", "identifies the backward pass; -1 outside of any"
)
queue_callback: Callable[[Callable[[], None]], None] = _private(
    "autograd.variable.Variable._execution_engine.queue_callback",
    "calls back at the end of a backward pass",
)
_set_versions: Any = _private(
    "_C._autograd._unsafe_set_version_counter", "detects tensors that share a version counter"
)
AccumulateGrad: Any = _private("_C._functions.AccumulateGrad", "the graph node of a leaf")


def count_graph_nodes() -> int:
    """Return how many nodes of graphs this thread has made, this one included."""
    with torch.enable_grad():
        node: Any = torch.empty(0, requires_grad=True).view(0).grad_fn
    count: int = node._sequence_nr()
    return count


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter of a tensor and of all tensors that share it."""
    _set_versions((tensor,), (version,))


# -- transforms, tracers, the compiler -------------------------------------------------------------

are_functorch_transforms_active: Callable[[], bool] = _private(
    "_C._are_functorch_transforms_active", "refuses regions under torch.func"
)
is_functorch_tensor: Callable[[torch.Tensor], bool] = _private(
    "_C._functorch.is_functorch_wrapped_tensor", "recognises tensors of vmap, which have no storage"
)
_get_dispatch_mode: Any = _private("_C._get_dispatch_mode", "refuses regions under make_fx")
_mode_keys: Any = _private("_C._TorchDispatchModeKey", "names the mode of make_fx")
_eval_frame: Any = _private("_C._dynamo.eval_frame", "keeps the compiler out of remat's own code")


def is_traced_by_make_fx() -> bool:
    return _get_dispatch_mode(_mode_keys.PROXY) is not None


def composable_states() -> Mapping[Any, Any]:
    """Return the modules that `fully_shard` and the like manage, with references to their states.

    It is looked up when it is needed: without FSDP nobody has loaded it.
    """
    states = sys.modules.get("torch.distributed._composable_state")
    mapping: Mapping[Any, Any] = getattr(states, "_module_state_mapping", {})
    return mapping


def process_group_store() -> Any:
    """Return the key-value store of the processes that train together; None if there is one only.

    No module of `torch.distributed` is loaded for that.
    """
    group = sys.modules.get("torch.distributed.distributed_c10d")
    if group is None or not group.is_initialized() or group.get_world_size() == 1:
        return None
    try:
        return group._get_default_store()
    except (AttributeError, ValueError):  # a group without one, as that of MPI
        return None


def never_compiled(function: Any) -> None:
    """Exclude a function and its callees from compilation, without the cost of a wrapper."""
    skip = _eval_frame._FrameAction.SKIP
    strategy = _eval_frame._FrameExecStrategy(skip, skip)
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)


def keep_compiler_out() -> None:
    """Make the compiler break its graph at this engine, if the compiler is loaded.

    Compiled autograd would otherwise trace the saved-tensor hooks.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and not _skipped:
        _skipped.append(rules)
        rules.add(__package__)


_skipped: list[Any] = []

# -- functions that parse their arguments faster than overloads ------------------------------------

FUNCTIONS: Any = _private("_C._VariableFunctions", "functions of `torch`")
NN_FUNCTIONS: Any = _private("_C._nn", "functions of `torch.nn.functional`")
TENSOR_FUNCTIONS: Any = _private("_C.TensorBase", "methods of tensors")

if _missing:
    raise UnsupportedError(
        f"remat uses private names of PyTorch 2.13; {torch.__version__} lacks "
        f"{'; '.join(_missing)}. Use a PyTorch that remat's CHANGELOG names, or a newer remat"
    )
