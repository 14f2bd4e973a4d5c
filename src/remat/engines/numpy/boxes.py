"""The arrays that a traced NumPy function sees.

HIPS autograd records through *boxes*. Its own boxes follow operators and ufuncs; ours, which only
appear in traces that remat starts, also follow plain NumPy functions (`__array_function__`, see
`array_function.py`) and work in place the way NumPy arrays do:

1. An in-place change gives the box a new value and a new place in the graph; the old array stays
   as it was, since derivative rules still refer to it. The new one has the same strides.
2. A change of a view is written to the array that it is a view of (see `views.py`).
3. A view of an array that has changed is taken anew when it is next looked at.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import autograd.numpy as anp
import numpy as np
from autograd.builtins import DictBox, SequenceBox
from autograd.core import primitive_vjps
from autograd.extend import Box, defvjp, primitive
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import isbox, trace_primitives_map

from ...errors import RematError, UnsupportedError
from . import array_function, pickles
from .array_function import plain
from .nodes import LoggedNode, Node, OpLog, cast, shape_and_dtype
from .views import Link, ViewChain, ViewOrigin, has_strides_of, refuse_overlap, replaced, written

__all__ = ["OpLog", "TracedArray", "as_view", "captured_box", "plain", "root_box"]

Array = Any  # autograd and NumPy share no useful type
_Box = TypeVar("_Box", bound="TracedArray")


@primitive  # type: ignore[untyped-decorator]
def _converted(array: Array, dtype: Any, *args: Any, **kwargs: Any) -> Array:
    # (A Python number has no methods.)
    has_type = isinstance(array, np.ndarray | np.generic)
    return array.astype(dtype, *args, **kwargs) if has_type else dtype.type(array)


def _converted_vjp(ans: Array, array: Array, *args: Any, **kwargs: Any) -> Any:
    return lambda g: cast(g, shape_and_dtype(array)[1])


defvjp(_converted, _converted_vjp)


@primitive  # type: ignore[untyped-decorator]
def _copied(array: Array, order: Any) -> Array:
    # (A number is no array, and stays none.)
    return array.copy(order=order) if isinstance(array, np.ndarray) else array


defvjp(_copied, lambda ans, array, order: lambda g: g, None)


@primitive  # type: ignore[untyped-decorator]
def _power(base: Any, exponent: Any) -> Any:
    # (Not np.power: for some exponents the operator calls another function.)
    return base**exponent


primitive_vjps[_power] = primitive_vjps[anp.power]


@primitive  # type: ignore[untyped-decorator]
def multiply(one: Any, other: Any) -> Any:
    """Multiply complex numbers that are no arrays: the operator has other bits than np.multiply."""
    return one * other


primitive_vjps[multiply] = primitive_vjps[anp.multiply]


class TracedArray(ArrayBox):  # type: ignore[misc]
    """An array in a trace of remat."""

    __slots__ = ("__weakref__",)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return array_function.call(func, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise _NoSuchAttribute(
            f"ndarray.{name} is not supported on traced arrays; write it with NumPy functions, "
            "slices and x.ravel()"
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise _lossy("a traced array cannot become a plain one")

    def __float__(self) -> float:
        raise _lossy("a traced number cannot become a Python number")

    def __int__(self) -> int:
        raise _lossy("a traced number cannot become a Python number")

    def __complex__(self) -> complex:
        raise _lossy("a traced number cannot become a Python number")

    def __format__(self, spec: str) -> str:
        return format(plain(self), spec)  # to look at

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        if kwargs.get("where", True) is not True:
            raise UnsupportedError(
                f"np.{ufunc.__name__} is not supported with where=; use np.where on its result"
            )
        if method != "__call__":
            result = array_function.ufunc_method(ufunc, method, inputs, kwargs)
        else:
            result = _call_ufunc(ufunc, inputs, kwargs)
        return result if out is None else _write(out, result, inputs)

    # -- in place ------------------------------------------------------------------------------

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, TracedView) and value.is_item(self, index):
            return  # `x[i] += y` has written through the view already
        refuse_overlap(self, index, value)
        self._become(replaced(self, index, array_function.as_array(value)))

    def __iter__(self) -> Iterator[Any]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def fill(self, value: Any) -> None:
        self[...] = value

    def _update(self, result: Any, *, is_out: bool = False) -> Any:
        """Take over `result` as NumPy's augmented assignment, or its `out=`, does."""
        if not isinstance(plain(self), np.ndarray):
            return result  # numbers are not changed in place: the name gets another one
        is_same = np.shape(result) == self.shape
        if not is_same and not (is_out and _fits(result, self.shape)):
            raise ValueError(
                f"non-broadcastable output operand with shape {self.shape} doesn't match the "
                f"broadcast shape {np.shape(result)}"
            )
        if result.dtype != self.dtype:
            if not np.can_cast(result.dtype, self.dtype, "same_kind"):
                raise TypeError(f"cannot cast {result.dtype} to {self.dtype} in place")
            result = result.astype(self.dtype)
        # (A ufunc returns a number for arrays without axes, and the array stays one.)
        is_array = isbox(result) and isinstance(plain(result), np.ndarray)
        self._become(result if is_array and is_same else replaced(self, ..., result))
        return self

    def _become(self, result: Any) -> None:
        self._refuse_foreign(result)
        self._refuse_read_only()
        value = plain(self)
        is_array = isinstance(value, np.ndarray)
        if result._node.is_view or (is_array and not has_strides_of(plain(result), value)):
            result = replaced(self, ..., result)
        # (The slots are autograd's, which mypy does not see.)
        before: Node = self._node  # type: ignore[has-type]
        self._value = result._value  # type: ignore[misc]
        self._node = result._node  # type: ignore[misc]
        before.box.leave()
        self._node.box.bind(self)

    def own_value(self) -> Any:
        """Return the plain array, without a look at what this is a view of."""
        return self._value

    def _refuse_foreign(self, result: Any) -> None:
        if not isbox(result) or result._trace != self._trace:
            raise UnsupportedError(
                "a traced value was written into an array of an outer trace; return it instead"
            )

    def as_owner(self, array: Any) -> tuple[Any, ViewChain | None]:
        """Return whose memory this is, and the way from there to here."""
        return weakref.ref(self), ViewChain(array.strides, array.itemsize)

    def _refuse_read_only(self) -> None:
        value = plain(self)
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            raise UnsupportedError(
                "a read-only array is changed in place: a function of remat changes in place what "
                "it closes over, or NumPy has made it read-only; change a copy (x = x.copy()), or "
                "hand it over in the state or the arguments, and return it"
            )

    def __iadd__(self, other: Any) -> Any:
        return self._update(self + other)

    def __isub__(self, other: Any) -> Any:
        return self._update(self - other)

    def __imul__(self, other: Any) -> Any:
        return self._update(self * other)

    def __itruediv__(self, other: Any) -> Any:
        return self._update(self / other)

    def __ipow__(self, other: Any) -> Any:
        return self._update(_power(self, other))

    def __imatmul__(self, other: Any) -> Any:
        return self._update(self @ other)

    def __imod__(self, other: Any) -> Any:
        return self._update(self % other)

    def __ifloordiv__(self, other: Any) -> Any:
        return self._update(self // other)

    # -- what autograd's boxes lack ------------------------------------------------------------

    def __pos__(self) -> Any:
        return anp.positive(self)

    def __pow__(self, other: Any) -> Any:
        return _power(self, other)

    def __rpow__(self, other: Any) -> Any:
        return _power(other, self)

    def __mul__(self, other: Any) -> Any:
        return multiply(self, other) if _are_complex_numbers(self, other) else _mul(self, other)

    def __rmul__(self, other: Any) -> Any:
        return multiply(other, self) if _are_complex_numbers(self, other) else _rmul(self, other)

    def __divmod__(self, other: Any) -> Any:
        return anp.floor_divide(self, other), anp.mod(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return anp.floor_divide(other, self), anp.mod(other, self)

    def __round__(self, ndigits: int | None = None) -> Any:
        return array_function.call(np.round, (self, ndigits or 0), {})

    def __floordiv__(self, other: Any) -> Any:
        return anp.floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return anp.floor_divide(other, self)

    def copy(self, order: str = "C") -> Any:
        return _copied(self, order)

    def __copy__(self) -> Any:
        return _copied(self, "C")

    def __deepcopy__(self, memo: Any) -> Any:
        return _copied(self, "K")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pickles.unpickled, (pickles.keep(_copied(self, "K")),)

    def astype(self, dtype: Any, *args: Any, copy: bool = True, **kwargs: Any) -> Any:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        if np.dtype(dtype).kind not in "fc":  # whole numbers have no slope
            return plain(self).astype(dtype, *args, **kwargs)
        return _converted(self, np.dtype(dtype), *args, **kwargs)

    def dot(self, other: Any, out: Any = None) -> Any:
        return array_function.call(np.dot, (self, other), {"out": out})

    def transpose(self, *axes: Any) -> Any:
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes or None
        return array_function.call(np.transpose, (self, order), {})

    def reshape(self, *shape: Any, order: str = "C") -> Any:
        sizes = shape[0] if len(shape) == 1 else shape
        if order == "C":  # the usual case, without a look at the options
            return anp.reshape(self, sizes)
        return array_function.call(np.reshape, (self, sizes), {"order": order})

    def ravel(self, order: str = "C") -> Any:
        return anp.ravel(self) if order == "C" else array_function.call(np.ravel, (self, order), {})

    def compress(self, condition: Any, axis: int | None = None) -> Any:
        return array_function.call(np.compress, (condition, self, axis), {})

    def sort(self, axis: int = -1, **options: Any) -> None:
        self[...] = array_function.call(np.sort, (self, axis), options)

    def item(self, *place: Any) -> Any:
        if not place and self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.ravel()[place[0] if len(place) == 1 else 0] if len(place) < 2 else self[place]

    def tolist(self) -> Any:
        return [part.tolist() for part in self] if self.ndim else self

    def _put_real(self, value: Any) -> None:
        # (Unlike an entry, a part may be set to a complex number.)
        self.real[...] = value if np.ndim(value) else np.real(value)

    def _put_imag(self, value: Any) -> None:
        if self.dtype.kind != "c":
            raise TypeError("array does not have imaginary part to set")
        self.imag[...] = value if np.ndim(value) else np.real(value)

    def _refuse_shape(self, value: Any) -> None:
        raise UnsupportedError(
            "the shape of a traced array cannot be assigned to; write x = x.reshape(shape)"
        )

    def _refuse_dtype(self, value: Any) -> None:
        raise UnsupportedError(
            "the dtype of a traced array cannot be assigned to; write x = x.astype(dtype)"
        )

    def conj(self, out: Any = None) -> Any:
        if out is not None:
            raise UnsupportedError("ndarray.conj is supported without out")
        # (Unlike np.conj, the method returns real numbers as they are: not even a copy.)
        return anp.conj(self) if self.dtype.kind == "c" else self

    def flatten(self, order: str = "C") -> Any:
        return _copied(self.ravel(order), "K")

    conjugate = conj
    # (autograd's forgets the byte order.)
    dtype = property(lambda self: shape_and_dtype(self)[1], _refuse_dtype)
    shape = property(lambda self: np.shape(self._value), _refuse_shape)
    real = property(lambda self: array_function.call(np.real, (self,), {}), _put_real)
    imag = property(lambda self: array_function.call(np.imag, (self,), {}), _put_imag)
    mT = property(lambda self: anp.swapaxes(self, -1, -2))
    nbytes = property(lambda self: np.asarray(self._value).nbytes)
    itemsize = property(lambda self: np.asarray(self._value).itemsize)


def _lossy(fact: str) -> UnsupportedError:
    return UnsupportedError(
        f"{fact}: its gradient would be lost. Instead of np.array([a, b]), np.r_[a, b], "
        "np.c_[a, b] or np.sum([a, b]) write np.stack([a, b]) or np.concatenate([a, b]); "
        "instead of filling a plain array (out = np.zeros(3); out[0] = x[0]) collect the parts in "
        "a list and np.stack them, or start from a traced array (out = 0 * x); "
        "instead of math.exp(x) or float(x) write np.exp(x) or x"
    )


class _NoSuchAttribute(UnsupportedError, AttributeError):
    """Both: `hasattr` and NumPy itself ask for attributes, and take no for an answer."""


def _method(name: str) -> Any:
    """Follow a method as the function of its name, with what that accepts and refuses."""
    function = getattr(np, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return array_function.call(function, (self, *args), kwargs)

    method.__name__ = name
    return method


for _name in (
    *("all", "any", "argmax", "argmin", "argsort", "clip", "cumprod", "cumsum", "diagonal"),
    *("max", "mean", "min", "prod", "repeat", "round", "squeeze", "std", "sum"),
    *("swapaxes", "take", "trace", "var", "ptp"),
):
    setattr(TracedArray, _name, _method(_name))


def _are_complex_numbers(one: Any, other: Any) -> bool:
    value = plain(one)
    if isinstance(value, np.ndarray) or isinstance(plain(other), np.ndarray):
        return False
    return isinstance(value, _COMPLEX) or isinstance(plain(other), _COMPLEX)


_COMPLEX = (complex, np.complexfloating)


def _operator(name: str) -> Any:
    """Call autograd's operator, and say what it does not support."""
    operation = getattr(ArrayBox, f"__{name}__")

    def call(self: Any, other: Any) -> Any:
        try:
            return operation(self, other)
        except RematError:
            raise
        except Exception as error:
            plainly = getattr(operator, name.removeprefix("r"))
            pair = (self, other) if hasattr(operator, name) else (other, self)
            raise array_function.fitting_error(plainly, pair, {}, error) from error

    call.__name__ = f"__{name}__"
    return call


_mul, _rmul = _operator("mul"), _operator("rmul")

for _name in ("add", "sub", "truediv", "matmul", "mod"):
    setattr(TracedArray, f"__{_name}__", _operator(_name))
    if hasattr(ArrayBox, f"__r{_name}__"):
        setattr(TracedArray, f"__r{_name}__", _operator(f"r{_name}"))


class TracedView(TracedArray):
    """A traced array that looks at the memory of another one, its owner."""

    __slots__ = ("chain", "node", "owner", "seen", "viewed")

    def __init__(self, value: Any, trace: int, node: Any, origin: ViewOrigin) -> None:
        self.owner: TracedArray | None = None if origin.owner is None else origin.owner()
        self.chain = origin.chain
        self._note(value, node)
        self._trace = trace  # type: ignore[misc]

    def _note(self, value: Any, node: Any) -> None:
        self.viewed, self.node = value, node
        # The owner has another node when it has changed.
        self.seen = None if self.owner is None else self.owner._node

    def own_value(self) -> Any:
        return self.viewed

    @property
    def _value(self) -> Any:
        self._update_view()
        return self.viewed

    @property
    def _node(self) -> Any:
        self._update_view()
        return self.node

    def _update_view(self) -> None:
        """Look at what the owner is now."""
        if self.owner is None or self.owner._node is self.seen:
            return
        view = None if self.chain is None else self.chain(self.owner)
        if not isinstance(view, TracedView):
            raise UnsupportedError(
                "this view was taken before the array under it was changed in place, by a function "
                "that cannot be called again; take the view after the change, or change a copy"
            )
        before: Node = self.node
        self._note(view.viewed, view.node)
        before.box.leave()
        self.node.box.bind(self)

    def way(self) -> tuple[Any, tuple[Link, ...]]:
        return self.owner, () if self.chain is None else self.chain.links

    def is_item(self, array: TracedArray, index: Any) -> bool:
        """Tell whether this is `array[index]`, taken as such."""
        root, before = (array, ()) if not isinstance(array, TracedView) else array.way()
        owner, links = self.way()
        if owner is not root or len(links) != len(before) + 1:
            return False
        if any(one is not other for one, other in zip(links, before, strict=False)):
            return False
        last = links[-1]
        return last.function is ArrayBox.__getitem__ and _same_index(last.args[1], index)

    def as_owner(self, array: Any) -> tuple[Any, ViewChain | None]:
        return None if self.owner is None else weakref.ref(self.owner), self.chain

    def _become(self, result: Any) -> None:
        self._refuse_foreign(result)
        self._refuse_read_only()
        if self.owner is None or self.chain is None:
            raise UnsupportedError(
                "an in-place change of a view is not supported if it was taken by a checkpointed "
                "call, by a primitive of your own or in an outer trace; change the array itself, "
                "or a copy"
            )
        self.owner._become(written(self.owner, self.chain, result))


def _same_index(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arrays among the parts
        return one is other


def _call_ufunc(ufunc: Any, inputs: Any, kwargs: Any) -> Any:
    wrapper = trace_primitives_map.get(ufunc)
    if ufunc is np.divmod:
        return anp.floor_divide(*inputs), anp.mod(*inputs)
    if ufunc in array_function.rules:
        return array_function.call(ufunc, inputs, kwargs)
    if wrapper is None:
        raise UnsupportedError(f"np.{ufunc.__name__} is not supported on traced arrays")
    try:
        return wrapper(*inputs, called_by_autograd_dispatcher=True, **kwargs)
    except RematError:
        raise
    except Exception as error:
        raise array_function.fitting_error(ufunc, inputs, kwargs, error) from error


def _write(out: tuple[Any, ...], result: Any, inputs: Any) -> Any:
    if len(out) > 1:
        raise UnsupportedError(
            f"a ufunc with {len(out)} results is supported without out=; use what it returns"
        )
    (target,) = out
    if not isinstance(target, TracedArray):
        raise UnsupportedError(
            "a traced value cannot be written into a plain array (out=, or an in-place operator "
            "on it): its gradient would be lost; write `x = x + y` instead of `x += y`"
        )
    # (A node belongs to one box.)
    result = _copied(result, "K") if any(result is x for x in inputs) else result
    return target._update(result, is_out=True)


def _fits(result: Any, shape: tuple[int, ...]) -> bool:
    """Say whether a result can be written to an array of a shape."""
    try:
        return np.broadcast_shapes(np.shape(result), shape) == shape
    except ValueError:
        return False


class CapturedArray(TracedArray):
    """What a step closes over, for all steps of a loop."""

    __slots__ = ()

    def _become(self, result: Any) -> None:
        raise UnsupportedError(
            "the function changes in place what it closes over; what changes from call to call "
            "belongs into the state (or the inputs and results) of the function"
        )


def captured_box(value: Any, trace: int) -> CapturedArray:
    return _known(CapturedArray(value, trace, Node.new_root(value)))


def _known(box: _Box) -> _Box:
    """Let the node of a box know it, for views."""
    box._node.box.bind(box)
    return box


def _box_of(value: Any, trace: int, node: Any) -> Any:
    """Make the box for a result: ours in our traces, autograd's in others."""
    if not isinstance(node, Node):
        return ArrayBox(value, trace, node)
    if node.is_view:
        box: TracedArray = TracedView(value, trace, node, node.origin)
    else:
        box = TracedArray(value, trace, node)
    node.box.bind(box)
    return box


def as_view(box: TracedArray, array: TracedArray) -> TracedArray:
    """Return a box as a view of `array`, for what a function has returned."""
    owner, _ = array.as_owner(plain(array))
    return _known(TracedView(box._value, box._trace, box._node, ViewOrigin(owner, None)))


@primitive  # type: ignore[untyped-decorator]
def _passed_on(array: Array) -> Array:
    return array


defvjp(_passed_on, lambda ans, array: lambda g: g)
# An inner trace refers to values, not to whatever an array of the outer one becomes later on.
_passed_on.is_final = True


def root_box(value: Any, trace: int, log: OpLog | None = None) -> TracedArray:
    """Box an input of a trace; it counts as the owner of its memory."""
    if isinstance(value, TracedArray):
        value = _passed_on(value)
    node = Node.new_root(value) if log is None else LoggedNode.new_root(value)
    if log is not None:
        node.log = log
    return _known(TracedArray(value, trace, node))


def _sequence_of(value: Any, trace: int, node: Any) -> Any:
    """Make a list or tuple of boxes for a result that is one, as NumPy returns one.

    Why not for sums of gradients? autograd adds to them as a whole.
    """
    box = SequenceBox(value, trace, node)
    if not isinstance(node, Node) or node.is_sum:
        return box
    parts = [box[i] for i in range(len(value))]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _dict_of(value: Any, trace: int, node: Any) -> Any:
    box = DictBox(value, trace, node)
    if not isinstance(node, Node) or node.is_sum:
        return box
    return {key: box[key] for key in value}


def _install() -> None:
    makers = {ArrayBox: _box_of, SequenceBox: _sequence_of, DictBox: _dict_of}
    for value_type, maker in list(Box.type_mappings.items()):
        if maker in makers and value_type is not maker:
            Box.type_mappings[value_type] = makers[maker]
    for cls in (TracedArray, TracedView, CapturedArray):
        Box.types.add(cls)
        Box.type_mappings[cls] = _box_of


_install()
