"""Every private name of PyTorch that remat uses, and what it is for. Checked with 2.13 to 2.15.

For a new version of PyTorch this is the one file to check. A name that is missing there does not
prevent the import: what needs it raises an error that names it. What can be asked for by behaviour
is not looked up by name.
Private attributes of objects (`tensor._version`) are used where they are needed, because a function
call would cost as much as a small op. `ATTRIBUTES` lists them. A test finds other private names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from operator import attrgetter
from pkgutil import walk_packages
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ... import core
from ...errors import UnsupportedError

__all__ = [
    "ATTRIBUTES",
    "FLASH_ATTENTION_CPU",
    "FUNCTIONS",
    "LOWEST",
    "MODULE_CALL",
    "NN_FUNCTIONS",
    "OBSERVING_MODES",
    "SPARSE_MM_REDUCE",
    "TENSOR_FUNCTIONS",
    "TO_COPY",
    "AccumulateGrad",
    "Guards",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "are_functorch_transforms_active",
    "below_autograd",
    "conj_view",
    "count_dispatch_modes",
    "count_function_modes",
    "count_graph_nodes",
    "count_storage_owners",
    "current_graph_task",
    "default_mps_generator",
    "dispatch_mode_stack",
    "function_mode_stack",
    "has_global_module_hooks",
    "is_custom_function_in_backward",
    "is_flat_parameter",
    "is_fsdp_loaded",
    "is_function_output",
    "is_functorch_tensor",
    "is_in_forward",
    "is_traced_by_make_fx",
    "keep_compiler_out",
    "neg_view",
    "never_compiled",
    "on_conjugates",
    "pop_dispatch_mode",
    "pop_saved_tensor_hooks",
    "preserve_version_counter",
    "process_group_store",
    "push_dispatch_mode",
    "push_saved_tensor_hooks",
    "queue_callback",
    "replaying",
    "set_version",
    "sharded_modules",
    "sharded_states",
    "top_saved_tensor_hooks",
    "with_version_counters",
    "without_dispatch_modes",
    "without_function_modes",
    "without_modes",
    "without_subclass_functions",
]

Guard = AbstractContextManager[None]

LOWEST = "2.13"  # as in pyproject.toml
if torch.__version__ < LOWEST:  # a `TorchVersion`, which compares as versions do
    raise UnsupportedError(
        f"remat needs PyTorch {LOWEST} or newer; this is {torch.__version__}. "
        "Install a newer PyTorch: pip install --upgrade torch"
    )


class _Missing:
    """Stands for a private name that this version of PyTorch lacks: using it raises an error."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            f"remat uses private names of PyTorch; {torch.__version__} lacks {self._what}. "
            "Use a PyTorch that remat's CHANGELOG names, or a newer remat"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        self()


def _private(path: str, purpose: str) -> Any:
    """Return a private name of PyTorch, or what raises when it is used."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return _Missing(f"torch.{path} ({purpose})")


# -- attributes of objects -------------------------------------------------------------------------

_OP = torch.ops.aten.add.Tensor
with torch.inference_mode(False), torch.enable_grad():
    _NODE: Any = torch.zeros((), requires_grad=True, device="cpu").view(()).grad_fn
ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "_version": (torch.Tensor, "counts the writes to a tensor"),
    "_base": (torch.Tensor, "the tensor that a view was made from"),
    "_is_view": (torch.Tensor, "tells views, which share memory with their base"),
    "_backward_hooks": (torch.Tensor, "copies the hooks of a leaf to the leaf that replaces it"),
    "_post_accumulate_grad_hooks": (torch.Tensor, "tells whether a parameter has a hook of ours"),
    "_indices": (torch.Tensor, "a part of a sparse tensor"),
    "_values": (torch.Tensor, "a part of a sparse tensor"),
    "_cdata": (torch.UntypedStorage, "identifies a storage"),
    "_buffers": (torch.nn.Module(), "replaces a buffer of a module"),
    "_sequence_nr": (_NODE, "orders the nodes that a thread has made"),
    "_schema": (_OP, "what an op reads, writes and returns"),
    "_op": (_OP, "the function behind an op"),
    "_overloadpacket": (_OP, "the op without its overload"),
}
_missing = [
    f"{name} of {getattr(owner, '__name__', type(owner).__name__)} ({purpose})"
    for name, (owner, purpose) in ATTRIBUTES.items()
    if not hasattr(owner, name)
]

# -- modes and hooks -------------------------------------------------------------------------------

push_dispatch_mode: Callable[[Any], None] = _private(
    "_C._push_on_torch_dispatch_stack",
    "enters the recorder; TorchDispatchMode.__enter__ also sets flags for the compiler",
)
if _missing:  # recording needs them all
    push_dispatch_mode = _Missing("; ".join(_missing))
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

# Modules of dispatch modes whose code was checked: they call every op unchanged. Other modes of
# torch do not: its selective checkpointing returns cached results, and draws no random numbers for
# them.
OBSERVING_MODES = {
    "torch._subclasses.fake_utils",
    "torch._subclasses.schema_check_mode",
    "torch.cuda._sanitizer",
    "torch.distributed._tools.mem_tracker",
    "torch.distributed._tools.memory_tracker",
    "torch.distributed.tensor.debug._comm_mode",
    "torch.testing._internal.logging_tensor",
    "torch.utils.flop_counter",
}

has_global_module_hooks: Callable[[], bool] = _private(
    "nn.modules.module._has_any_global_hook", "checks whether module calls are tracked"
)
# Recognises frames of module calls, to name the module in reports; without it they name none.
MODULE_CALL: Any = getattr(getattr(torch.nn.Module, "_call_impl", None), "__code__", None)

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


@cache
def _keys_of_replay() -> Any:
    below = _keys_after(_keys.ADInplaceOrView)
    return (_full_keys() - below) | _key_set(_keys.Python)


def _replay() -> Guard:
    """Return a guard that disables autograd, autocast, transforms and modes for a replay."""
    return _exclude(_keys_of_replay())


replaying = Guards(_replay)

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
preserve_version_counter: Callable[[tuple[torch.Tensor, ...]], Guard] = _private(
    "autograd.grad_mode._unsafe_preserve_version_counter",
    "restores buffers without counting it as a write",
)
_creation_meta: Callable[[torch.Tensor], Any] = _private(
    "_C._autograd._get_creation_meta", "recognises views that a custom Function has returned"
)
_creation: Any = _private("_C._autograd.CreationMeta", "names how a view was made")
_current_node: Callable[[], Any] = _private(
    "_C._current_autograd_node", "tells whose backward asks for a saved tensor"
)
AccumulateGrad: Any = type(_NODE.next_functions[0][0])  # the graph node of a leaf


def is_custom_function_in_backward() -> bool:
    """Return whether the backward of a custom Function runs now, in this thread."""
    return isinstance(_current_node(), torch.autograd.function.FunctionCtx)


def is_function_output(tensor: torch.Tensor) -> bool:
    """Return whether a custom Function has returned a tensor, or what a tensor is a view of."""
    if tensor._is_view():
        creation = _creation_meta(tensor)
        if creation != _creation.MULTI_OUTPUT_NODE:  # several outputs, of a Function or of a split
            return bool(creation == _creation.IN_CUSTOM_FUNCTION)
    try:
        return isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction)
    except RuntimeError:  # a view of what was written to since
        return False


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
# Keeps the compiler out of remat's own code. Without it, `keep_compiler_out` does so alone.
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)


def is_traced_by_make_fx() -> bool:
    return _get_dispatch_mode(_mode_keys.PROXY) is not None


def is_fsdp_loaded() -> bool:
    return "torch.distributed.fsdp._fully_shard._fsdp_state" in sys.modules


def _composable_states() -> Mapping[Any, Any]:
    """Return the modules that `fully_shard` and the like manage, with references to their states.

    It is looked up when it is needed: it is loaded with FSDP.
    """
    states = sys.modules.get("torch.distributed._composable_state")
    mapping: Mapping[Any, Any] = getattr(states, "_module_state_mapping", {})
    return mapping


def sharded_modules() -> list[tuple[Any, list[torch.Tensor]]]:
    """Return the modules that `fully_shard` was called on, with the parameters that it gathers."""
    return [
        (module, parameters)
        for module, reference in list(_composable_states().items())
        if (parameters := _gathered_parameters(reference()))
    ]


def sharded_states() -> list[Any]:
    """Return the states of the modules that `fully_shard` was called on, in the order of calls."""
    if not is_fsdp_loaded():
        return []
    states = (reference() for reference in list(_composable_states().values()))
    return list({id(s): s for s in states if getattr(s, "_fsdp_param_groups", ())}.values())


def is_in_forward(state: Any) -> bool:
    """Return whether the forward of a sharded module runs now."""
    return bool(state._training_state.name == "FORWARD")


def _gathered_parameters(state: Any) -> list[torch.Tensor]:
    return [
        parameter
        for group in getattr(state, "_fsdp_param_groups", ())
        for sharded in group.fsdp_params
        if (parameter := getattr(sharded, "_unsharded_param", None)) is not None
    ]


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter of FSDP1, which holds those of a whole module."""
    return getattr(tensor, "_is_flat_param", False)


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
    if _eval_frame is None:
        return
    skip = _eval_frame._FrameAction.SKIP
    strategy = _eval_frame._FrameExecStrategy(skip, skip)
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)


def keep_compiler_out() -> None:
    """Make the compiler break its graph at this engine and the core, if the compiler is loaded.

    Compiled autograd would otherwise trace the saved-tensor hooks.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and not _skipped:
        _skipped.append(rules)
        for package in (__package__, core.__name__):
            for module in walk_packages(sys.modules[package].__path__, f"{package}."):
                if not module.ispkg and module.name not in _COMPILED:
                    rules.add(module.name)


# What stands in front of the forward of a module: it hands over to what the compiler knows.
_COMPILED = {f"{__package__}.modules", f"{__package__}.budget.forward"}

_skipped: list[Any] = []

# -- memory and devices ----------------------------------------------------------------------------

_storage_use_count: Any = _private("_C._storage_Use_Count", "counts the tensors over a storage")
conj_view: Any = _private("ops.aten._conj.default", "sets the conjugate bit of a view")
neg_view: Any = _private("ops.aten._neg_view.default", "sets the negative bit of a view")
default_mps_generator: Callable[[], torch.Generator] = _private(
    "mps._get_default_mps_generator", "the generator that ops on Apple GPUs draw from"
)


def count_storage_owners(tensor: torch.Tensor) -> int | None:
    """Return how many tensors there are over a storage; None for a tensor without a storage."""
    try:
        return int(_storage_use_count(tensor.untyped_storage()._cdata)) - 1  # one for asking
    except (NotImplementedError, RuntimeError):  # sparse, or of vmap
        return None


# -- ops, and functions that parse their arguments faster than overloads ---------------------------

OpOverload: Any = type(_OP)
OpOverloadPacket: Any = type(torch.ops.aten.add)  # ops without overload
# The class of flex_attention; none that has instances, if it is missing.
HigherOrderOperator: Any = getattr(torch._ops, "HigherOrderOperator", _Missing)
TO_COPY: Any = _private("ops.aten._to_copy", "a copy with another dtype or device")
SPARSE_MM_REDUCE: Any = _private(
    "ops.aten._sparse_mm_reduce_impl", "computes less if no gradient is needed"
)
# Only for speed. None where they are missing.
FLASH_ATTENTION_CPU: Any = getattr(
    getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None), "default", None
)
FUNCTIONS: Any = getattr(torch._C, "_VariableFunctions", None)  # functions of `torch`
NN_FUNCTIONS: Any = getattr(torch._C, "_nn", None)  # functions of `torch.nn.functional`
TENSOR_FUNCTIONS: Any = getattr(torch._C, "TensorBase", None)  # methods of tensors
