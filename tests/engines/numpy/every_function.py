"""Calls every function of NumPy with every argument pattern that it accepts.

Each call is made inside `remat.value_and_grad`; its value is compared with that of plain NumPy and
its gradient with a difference quotient.
"""

from __future__ import annotations

import functools
import itertools
import operator
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import remat
from remat.engines.numpy.array_function import plain
from remat.engines.numpy.tape import record

_rng = np.random.default_rng(7)


def _draw(*shape: int) -> np.ndarray:
    return _rng.uniform(0.1, 0.9, shape)


A, B = _draw(3, 3), _draw(3, 3)
S = A @ A.T + np.eye(3)  # symmetric, positive definite
V, W = _draw(3), _draw(3)
T, C = _draw(2, 3, 4), _draw(3, 3, 3)
R = _draw(3, 4)
ZERO_D = np.array(0.37)
MASK = np.array([[True, False, True], [False, True, False], [True, True, False]])
INDEX, INDEX2 = np.array([2, 0, 1]), np.array([[0, 2], [1, 1], [2, 0]])
KNOTS, HEIGHTS = np.array([0.0, 0.25, 0.7, 1.0]), np.array([0.3, 0.9, 0.1, 0.6])
BATCH, BATCH2 = np.stack([S, S + A @ A.T]), np.stack([A, B])
HOLES = np.array([[1.0, np.nan, 2.0], [0.3, 0.4, 0.5]])


# What happens to the arguments and the results after the call.
Change = Callable[[list[Any], list[Any]], None]


class Pattern(NamedTuple):
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012  (never changed)


_ONE = [
    Pattern("A", (A,)),
    Pattern("v", (V,)),
    Pattern("T", (T,)),
    Pattern("C", (C,)),
    Pattern("zero_d", (ZERO_D,)),
    Pattern("float", (0.37,)),
    Pattern("S", (S,)),
    Pattern("R", (R,)),
    Pattern("float32", (A.astype(np.float32),)),
    Pattern("transposed", (T.T,)),
    Pattern("batch", (BATCH,)),
    Pattern("holes", (HOLES,)),
]

_TWO = [
    Pattern("A,B", (A, B)),
    Pattern("A,v", (A, V)),
    Pattern("v,A", (V, A)),
    Pattern("v,w", (V, W)),
    Pattern("S,A", (S, A)),
    Pattern("S,v", (S, V)),
    Pattern("A,R", (A, R)),
    Pattern("A,column", (A, V[:, None])),
    Pattern("A,zero_d", (A, ZERO_D)),
    Pattern("zero_d,A", (ZERO_D, A)),
    Pattern("zero_d,zero_d", (ZERO_D, np.array(0.6))),
    Pattern("A,float", (A, 0.5)),
    Pattern("float,A", (0.5, A)),
    Pattern("float32,float64", (A.astype(np.float32), B)),
    Pattern("A,list", (A, [0.1, 0.2, 0.3])),
    Pattern("list,B", ([V, W, V * 2], B)),
    Pattern("T,T", (T, _draw(2, 4, 3))),
    Pattern("T,R", (T, R)),
    Pattern("T,R.T", (T, R.T.copy())),
    Pattern("C,C", (C, C[::-1].copy())),
    Pattern("A,C", (A, C)),
    Pattern("A,T", (A, T)),
    Pattern("v,T", (V, T)),
    Pattern("batch,batch", (BATCH, BATCH2)),
    Pattern("batch,S", (BATCH, S)),
    Pattern("S,batch", (S, BATCH2)),
    *(
        Pattern(f"{name},{n}", (a, n))
        for name, a in {"A": A, "v": V, "T": T}.items()
        for n in range(-1, 4)
    ),
]

_SEQUENCES = [
    Pattern("[v,w]", ([V, W],)),
    Pattern("(v,w)", ((V, W),)),
    Pattern("[A,B]", ([A, B],)),
    Pattern("[A,B,S]", ([A, B, S],)),
    Pattern("[A,B],1", ([A, B], 1)),
    Pattern("[A,B],axis=-1", ([A, B],), {"axis": -1}),
    Pattern("[A,B],axis=None", ([A, B],), {"axis": None}),
    Pattern("[T,T],2", ([T, T * 2], 2)),
    Pattern("[T,T],-2", ([T, T * 2], -2)),
    Pattern("[[A,B],[B,A]]", ([[A, B], [B, A]],)),
    Pattern("[zero_d,float]", ([ZERO_D, 0.4],)),
    Pattern("[v,list]", ([V, [0.1, 0.2, 0.3]],)),
    Pattern("[A,B,v]", ([A, B, V],)),
    Pattern("[v,A,B,v]", ([V, A, B, V],)),
]

_OPTIONS: dict[str, dict[str, Any]] = {
    "axis=0": {"axis": 0},
    "axis=1": {"axis": 1},
    "axis=-1": {"axis": -1},
    "axis=-2": {"axis": -2},
    "axis=None": {"axis": None},
    "axis=(0,1)": {"axis": (0, 1)},
    "axis=(0,-1)": {"axis": (0, -1)},
    "keepdims": {"keepdims": True},
    "axis=0,keepdims": {"axis": 0, "keepdims": True},
    "axis=-1,keepdims": {"axis": -1, "keepdims": True},
    "axis=(0,1),keepdims": {"axis": (0, 1), "keepdims": True},
    "axis=(-2,),keepdims": {"axis": (-2,), "keepdims": True},
    "k=1": {"k": 1},
    "k=-1": {"k": -1},
    "offset=1": {"offset": 1},
    "ddof": {"ddof": 1},
    "ddof,axis": {"ddof": 1, "axis": 0},
    "correction": {"correction": 1},
    "n=2": {"n": 2},
    "n=2,axis=0": {"n": 2, "axis": 0},
    "n=3": {"n": 3},
    "n=7": {"n": 7},
    "ord=1": {"ord": 1},
    "ord=2": {"ord": 2},
    "ord=3": {"ord": 3},
    "ord=inf": {"ord": np.inf},
    "ord=-inf": {"ord": -np.inf},
    "ord=fro": {"ord": "fro"},
    "ord=nuc": {"ord": "nuc"},
    "ord=1,axis": {"ord": 1, "axis": 0},
    "ord=2,axis": {"ord": 2, "axis": 1},
    "ord=3,axis": {"ord": 3, "axis": 0},
    "initial": {"initial": 0.5},
    "initial,axis": {"initial": 0.5, "axis": 0},
    "where": {"where": MASK},
    "where,axis": {"where": MASK, "axis": 0},
    "order=F": {"order": "F"},
    "axis1,axis2": {"axis1": 1, "axis2": 0},
    "norm=ortho": {"norm": "ortho"},
    "norm=forward": {"norm": "forward"},
    "axes=0": {"axes": (0,)},
    "s=(2,4)": {"s": (2, 4)},
    "s=(4,5)": {"s": (4, 5)},
    "full_matrices": {"full_matrices": False},
    "UPLO": {"UPLO": "U"},
    "upper": {"upper": True},
    "prepend": {"prepend": 0.5},
    "edge_order": {"edge_order": 2},
    "dx": {"dx": 0.3},
    "nan": {"nan": 1.0},
    "copy=False": {"copy": False},
    "dtype": {"dtype": np.float64},
    "rowvar": {"rowvar": False},
    "returned": {"returned": True},
    "mode=reduced": {"mode": "reduced"},
    "mode=complete": {"mode": "complete"},
    "compute_uv": {"compute_uv": False},
    "kind": {"kind": "stable"},
    "to_end": {"to_end": 0.3},
}
_PAIR_OPTIONS: dict[str, dict[str, Any]] = {
    "axes=0": {"axes": 0},
    "axes=1": {"axes": 1},
    "axes=2": {"axes": 2},
    "axes=lists": {"axes": ([0, 1], [1, 0])},
    "mode=valid": {"mode": "valid"},
    "mode=same": {"mode": "same"},
    "mode=full": {"mode": "full"},
    "axis=0": {"axis": 0},
    "axis=1": {"axis": 1},
    "axis=-1": {"axis": -1},
    "axisa,axisb": {"axisa": 0, "axisb": 0},
    "axisa,axisb,axisc": {"axisa": 0, "axisb": 0, "axisc": 0},
    "where": {"where": MASK},
    "sparse": {"sparse": True},
    "indexing=ij": {"indexing": "ij"},
}
_KEYWORDS = [
    *(
        Pattern(f"{name},{option}", (a,), kwargs)
        for name, a in {"A": A, "v": V, "T": T}.items()
        for option, kwargs in _OPTIONS.items()
    ),
    *(
        Pattern(f"C,{option}", (C,), kwargs)  # a cube does not show by its shape what went wrong
        for option, kwargs in _OPTIONS.items()
        if "axis" in kwargs or "axis1" in kwargs
    ),
    *(
        Pattern(f"{name},{option}", pair, kwargs)
        for name, pair in {"A,B": (A, B), "v,w": (V, W), "A,v": (A, V), "C,C": (C, C * 2)}.items()
        for option, kwargs in _PAIR_OPTIONS.items()
    ),
    Pattern("A,weights=B", (A,), {"weights": B}),
    Pattern("A,weights=v,axis=0", (A,), {"weights": V, "axis": 0}),
    Pattern("A,weights=v,axis=-1", (A,), {"weights": V, "axis": -1}),
    Pattern("S,UPLO=U", (S,), {"UPLO": "U"}),
    Pattern("R,full_matrices", (R,), {"full_matrices": False}),
]

_SPECIAL = [
    Pattern("ij,jk->ik", ("ij,jk->ik", A, B)),
    Pattern("ij,jk", ("ij,jk", A, B)),
    Pattern("ii", ("ii", A)),
    Pattern("ii->i", ("ii->i", A)),
    Pattern("ij->ji", ("ij->ji", A)),
    Pattern("i->", ("i->", V)),
    Pattern("i,j", ("i,j", V, W)),
    Pattern("...i,i->...", ("...i,i->...", C, V)),
    Pattern("i,...i->...", ("i,...i->...", V, C)),
    Pattern("ij,ij,j->i", ("ij,ij,j->i", A, B, V)),
    Pattern("einsum lists", (A, [0, 1], B, [1, 2], [0, 2])),
    Pattern("einsum optimize", ("ij,jk,kl->il", A, B, S), {"optimize": True}),
    Pattern("einsum out", ("ij,jk->ik", A, B), {"out": np.zeros((3, 3))}),
    Pattern("mask,A,B", (MASK, A, B)),
    Pattern("mask,A,0", (MASK, A, 0.0)),
    Pattern("mask,zero_d,v", (MASK, ZERO_D, V)),
    Pattern("mask[0],v,A", (MASK[0], V, A)),
    Pattern("column mask,A,v", (MASK[:, :1], A, V)),
    Pattern("mask,A", (MASK, A)),
    Pattern("A,mask", (A, MASK)),
    Pattern("A,index", (A, INDEX)),
    Pattern("A,index,0", (A, INDEX, 0)),
    Pattern("A,index,-1", (A, INDEX, -1)),
    Pattern("A,index2,1", (A, INDEX2, 1)),
    Pattern("A,index2,axis=1", (A, INDEX2), {"axis": 1}),
    Pattern("v,index", (V, INDEX)),
    Pattern("v,index2", (V, INDEX2)),
    Pattern("v,[0,0,2]", (V, [0, 0, 2])),
    Pattern("v,bools", (V, np.array([True, False, False]))),
    Pattern("v,index,mode=wrap", (V, np.array([4, -1])), {"mode": "wrap"}),
    Pattern("v,index,mode=clip", (V, np.array([4, 1])), {"mode": "clip"}),
    Pattern("index,rows", (INDEX, [A[0], B[0], S[0]])),
    Pattern("A,0.3,0.6", (A, 0.3, 0.6)),
    Pattern("A,None,0.6", (A, None, 0.6)),
    Pattern("A,min,max", (A,), {"min": 0.3, "max": 0.6}),
    Pattern("A,arrays", (A, B * 0.3, B + 0.2)),
    Pattern("v,wider arrays", (V, B * 0.3, B + 0.2)),
    Pattern("A,9", (A, 9)),
    Pattern("A,(-1,)", (A, (-1,))),
    Pattern("A,(1,9)", (A, (1, 9))),
    Pattern("T,(6,4),order=F", (T, (6, 4)), {"order": "F"}),
    Pattern("A.T,(9,),order=A", (A.T, (9,)), {"order": "A"}),
    Pattern("v,(2,3)", (V, (2, 3))),
    Pattern("column,(3,4)", (V[:, None], (3, 4))),
    Pattern("zero_d,(2,3)", (ZERO_D, (2, 3))),
    Pattern("T,(1,0,2)", (T, (1, 0, 2))),
    Pattern("T,(2,0,1)", (T, (2, 0, 1))),
    Pattern("C,(2,0,1)", (C, (2, 0, 1))),
    Pattern("C,(-1,0,1)", (C, (-1, 0, 1))),
    Pattern("C,(1,-1,0)", (C, (1, -1, 0))),
    Pattern("A,0,1", (A, 0, 1)),
    Pattern("C,0,2", (C, 0, 2)),
    Pattern("C,-1,0", (C, -1, 0)),
    Pattern("C,(0,1),(2,0)", (C, (0, 1), (2, 0))),
    Pattern("C,(0,-1),(-2,0)", (C, (0, -1), (-2, 0))),
    Pattern("A,1,0", (A, 1, 0)),
    Pattern("A,(1,2),(0,1)", (A, (1, 2), (0, 1))),
    Pattern("A,(2,1)", (A, (2, 1))),
    Pattern("A,(2,1,2)", (A, (2, 1, 2))),
    Pattern("A,[1,2,0],0", (A, [1, 2, 0], 0)),
    Pattern("A,[1,2,0],axis=1", (A, [1, 2, 0]), {"axis": 1}),
    Pattern("A,2,0", (A, 2, 0)),
    Pattern("A,((1,0),(0,2))", (A, ((1, 0), (0, 2)))),
    Pattern("A,1,constant", (A, 1, "constant")),
    Pattern("A,pairs,constant", (A, ((1, 0), (0, 2)), "constant")),
    Pattern("A,1,constant_values", (A, 1, "constant"), {"constant_values": 0.3}),
    Pattern("A,1,reflect", (A, 1, "reflect")),
    Pattern("A,1,edge", (A, 1, "edge")),
    Pattern("A,[1],1", (A, [1], 1)),
    Pattern("A,[1,2]", (A, [1, 2])),
    Pattern("T,2,axis=2", (T, 2), {"axis": 2}),
    Pattern("a,b,5", (ZERO_D, np.array(0.9), 5)),
    Pattern("v,w,4", (V, W + 1, 4)),
    Pattern("v,w,4,axis=-1", (V, W + 1, 4), {"axis": -1}),
    Pattern("a,b,5,endpoint", (ZERO_D, np.array(0.9), 5), {"endpoint": False}),
    Pattern("a,b,5,retstep", (ZERO_D, np.array(0.9), 5), {"retstep": True}),
    Pattern("x,knots,heights", (V, KNOTS, HEIGHTS)),
    Pattern("zero_d,knots,heights", (ZERO_D, KNOTS, HEIGHTS)),
    Pattern("A,knots,heights", (A, KNOTS, HEIGHTS)),
    Pattern("outside,knots,heights", (np.array([-1.0, 0.5, 2.0]), KNOTS, HEIGHTS)),
    Pattern("x,knots,heights,left", (V, KNOTS, HEIGHTS), {"left": 0.2}),
    Pattern("A,x=v", (A,), {"x": np.array([0.1, 0.5, 0.7])}),
    Pattern("A,x=v,axis=0", (A,), {"x": np.array([0.1, 0.5, 0.7]), "axis": 0}),
    Pattern("A,x=B", (A,), {"x": np.cumsum(B, 1)}),
    Pattern("A,dx,axis=0", (A,), {"dx": 0.3, "axis": 0}),
    Pattern("A,0.3,axis=0", (A, 0.3), {"axis": 0}),
    Pattern("A,[0.2,0.8]", (A, [0.2, 0.8])),
    Pattern("v,1,0.5", (V, 1, 0.5)),
    Pattern("A,1,v,axis=0", (A, 1, V), {"axis": 0}),
    Pattern("A,[0,2],axis=1", (A, [0, 2]), {"axis": 1}),
    Pattern("A,-1,axis=-1", (A, -1), {"axis": -1}),
    Pattern("A,B,axis=-1", (A, B), {"axis": -1}),
    Pattern("(2,3),zero_d", ((2, 3), ZERO_D)),
    Pattern("A,v,shape", (A, V), {"shape": (2, 3)}),
    Pattern("ints,zero_d", (np.zeros(3, int), ZERO_D)),
    Pattern("index,v", (INDEX, V)),
    Pattern("index,weights=v", (INDEX,), {"weights": V}),
    Pattern("conditions,choices", ([MASK, ~MASK], [A, B])),
    Pattern("overlapping conditions", ([MASK, MASK.T], [A, B], 0.5)),
    Pattern("conditions,choices,default", ([MASK], [A], B)),
    Pattern("piecewise", (V, [V > 0.5, V <= 0.5], [lambda x: x**2, lambda x: -x])),
    Pattern("function,0,A", (lambda x: np.sum(x**2), 0, A)),
    Pattern("function,A,[0]", (np.sum, A, [0])),
    Pattern("bools,A,0", ([True, False, True], A, 0)),
    Pattern("bools,v", ([True, False, True], V)),
    Pattern("A,B,where", (A, B), {"where": MASK}),
    Pattern("A,mask,v", (A, MASK, V)),
    Pattern("A,[0,4],v", (A, [0, 4], V[:2])),
    Pattern("A,index2,B,1", (A, INDEX2, B[:, :2], 1)),
    Pattern("A,out", (A,), {"out": B}),
    Pattern("A,B,out", (A, B), {"out": S}),
    Pattern("A,out=v,axis=0", (A,), {"out": V, "axis": 0}),
    Pattern("A,B,out,where", (A, B), {"out": S, "where": MASK}),
    Pattern("S,-2", (S, -2)),
    Pattern("S,-3", (S, -3)),
    Pattern("batch,3", (BATCH, 3)),
    Pattern("R.T,v,rcond", (R.T, HEIGHTS), {"rcond": None}),
    Pattern("narrow", (A[:, :2], B[:, :2])),
    Pattern("v,spacing", (V, 0.3)),
    Pattern("A,spacings", (A, 0.3, 0.5)),
    Pattern("v,coordinates", (V, np.array([0.1, 0.4, 0.9]))),
    Pattern("T,1,(0,2)", (T, 1, (0, 2))),
    Pattern("T,(0,2)", (T, (0, 2))),
    Pattern("v,w,u", (V, W, HEIGHTS)),
    Pattern("T,R,axes", (T, R), {"axes": ([1, 2], [0, 1])}),
    Pattern("A,None,0", (A, None, 0)),
    Pattern("T,4,1", (T, 4, 1)),
    Pattern("A,(2,4)", (A, (2, 4))),
    Pattern("T,(2,4),(1,2)", (T, (2, 4), (1, 2))),
    Pattern("A,5", (A, 5)),
    Pattern("A,4", (A, 4)),
    Pattern("holes,axis=0", (HOLES,), {"axis": 0}),
    Pattern("holes,axis=1,keepdims", (HOLES,), {"axis": 1, "keepdims": True}),
]

PATTERNS = [*_ONE, *_TWO, *_SEQUENCES, *_KEYWORDS, *_SPECIAL]

# Files, printing, settings; what makes no array out of arrays.
_LEFT_OUT = {
    *("save", "savez", "savez_compressed", "savetxt", "load", "loadtxt", "genfromtxt", "fromfile"),
    *("info", "show_config", "show_runtime", "setbufsize", "seterr", "seterrcall", "fromregex"),
    *("set_printoptions", "printoptions", "get_include", "frombuffer", "from_dlpack", "empty"),
    *("empty_like", "get_printoptions", "geterr", "geterrcall", "getbufsize", "frompyfunc"),
    *("fromiter", "fromfunction", "fromstring", "asmatrix", "bmat", "nested_iters", "test"),
    *("array_repr", "array_str", "array2string", "base_repr", "isscalar", "iterable"),
    *("format_float_positional", "format_float_scientific", "may_share_memory", "shares_memory"),
    *("trapz", "in1d", "row_stack"),  # deprecated aliases
}


def functions() -> dict[str, Callable[..., Any]]:
    """Every function of np, np.linalg and np.fft by its name."""
    found = {}
    for prefix, module in {"np": np, "np.linalg": np.linalg, "np.fft": np.fft}.items():
        for name in dir(module):
            if name.startswith("_") or name in _LEFT_OUT:
                continue
            function = getattr(module, name)
            if callable(function) and not isinstance(function, type):
                found[f"{prefix}.{name}"] = function
    return found


def methods() -> dict[str, Callable[..., Any]]:
    """Every method and attribute of an array that gives arrays, as functions of the array."""
    names = [name for name in dir(np.ndarray) if not name.startswith("_")]
    return {
        f"ndarray.{name}": functools.partial(_call_method, name)
        for name in names
        if name not in _METHODS_LEFT_OUT
    }


# Files, text and bytes; questions; what a box is not meant to have.
_METHODS_LEFT_OUT = {
    *("tofile", "tolist", "tobytes", "dump", "dumps", "tostring", "item", "itemset", "setfield"),
    *("setflags", "base", "ctypes", "data", "flags", "device", "strides", "byteswap", "getfield"),
    *("newbyteorder", "resize", "view", "put", "partition", "flat"),
}


def _call_method(name: str, array: Any, *args: Any, **kwargs: Any) -> Any:
    found = getattr(array, name)
    return found(*args, **kwargs) if callable(found) else found


@functools.cache
def complaints(name: str) -> tuple[str, ...]:
    """Return what is wrong with a function, over all patterns."""
    function = functions()[name]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return tuple(words for pattern in PATTERNS for words in _judge_each(function, pattern))


def _judge_each(function: Callable[..., Any], pattern: Pattern) -> Iterator[str]:
    """Yield what is wrong with the calls of a pattern: all arguments traced, then one at a time."""
    leaves = _leaves((pattern.args, pattern.kwargs))
    floats = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]
    if not floats or not _is_judged(function, pattern) or not _is_accepted(function, pattern):
        return
    choices = [floats] if len(floats) == 1 else [floats, *([i] for i in floats[:3])]
    for traced in choices:
        try:
            wrong = _judge(function, pattern, traced)
        except (remat.UnsupportedError, TypeError, NotImplementedError):
            continue
        except Exception as error:
            wrong = f"raised {type(error).__name__}: {error}"
            if "non-broadcastable output operand" in str(error):
                continue  # NumPy's own words for a result that does not fit in place
        if wrong:
            yield f"{pattern.name}, traced {traced}: {wrong}"


# A difference quotient cannot judge these: results that NumPy leaves unset, steps of 1e-9, turns
# by a fraction of a right angle; and rules that answer for symmetric matrices only.
_NOT_JUDGED = {
    *((name, "A,9") for name in ("np.round", "np.around")),
    *(("np.rot90", pattern) for pattern in ("A,zero_d", "A,float")),
    *(
        (f"np.linalg.{name}", pattern)
        for name in ("cholesky", "eigh", "eigvalsh")
        for pattern in ("S", "batch", "A", "C", "S,UPLO=U")
    ),
}


def _is_judged(function: Callable[..., Any], pattern: Pattern) -> bool:
    if isinstance(function, functools.partial):
        return (function.args[0], pattern.name) != ("round", "A,9")
    if isinstance(function, np.ufunc):
        return "where" not in pattern.kwargs or "out" in pattern.kwargs
    name = f"{function.__module__}.{function.__name__}".replace("numpy", "np")
    return (name, pattern.name) not in _NOT_JUDGED


def _is_accepted(function: Callable[..., Any], pattern: Pattern) -> bool:
    args, kwargs = _copied((pattern.args, pattern.kwargs))
    try:
        function(*args, **kwargs)
    except Exception:
        return False
    return True


@functools.cache
def alias_complaints(name: str) -> tuple[str, ...]:
    """Return where a change after the call shows elsewhere than in NumPy, over all patterns."""
    function = {**functions(), **methods()}[name]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return tuple(words for pattern in PATTERNS for words in _judge_aliases(function, pattern))


def _judge_aliases(function: Callable[..., Any], pattern: Pattern) -> Iterator[str]:
    leaves = _leaves((pattern.args, pattern.kwargs))
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)]
    arrays = [i for i in arrays if _is_float(leaves[i])]
    if not arrays or not _is_judged(function, pattern) or not _is_accepted(function, pattern):
        return
    args, kwargs = _copied((pattern.args, pattern.kwargs))
    leaves = _leaves(function(*args, **kwargs))
    results = [i for i, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)]
    changes = {f"argument {i} changed": _change_argument(i) for i in arrays[:2]}
    changes |= {f"result {i} changed": _change_result(i) for i in results[:3]}
    for words, change in changes.items():
        try:
            wrong = _judge(function, pattern, arrays, change)
        except (remat.UnsupportedError, TypeError, NotImplementedError):
            continue
        except Exception as error:
            wrong = f"raised {type(error).__name__}: {error}"
            if "non-broadcastable output operand" in str(error):
                continue
        if wrong:
            yield f"{pattern.name}, {words}: {wrong}"


def _change_argument(number: int) -> Change:
    def change(arguments: list[Any], results: list[Any]) -> None:
        arguments[number] *= 3.0

    return change


def _change_result(number: int) -> Change:
    def change(arguments: list[Any], results: list[Any]) -> None:
        results[number] *= 3.0

    return change


def _raises(function: Callable[..., Any], *args: Any) -> bool:
    try:
        function(*args)
    except Exception:
        return True
    return False


def _judge(
    function: Callable[..., Any], pattern: Pattern, traced: list[int], change: Change | None = None
) -> str | None:
    skeleton = (pattern.args, pattern.kwargs)

    def run(*values: Any) -> Any:
        leaves = [_copied(leaf) for leaf in _leaves(skeleton)]
        for place, value in zip(traced, values, strict=True):
            leaves[place] = value if change is None else value.copy()
        args, kwargs = _filled(skeleton, iter(leaves))
        result = function(*args, **kwargs)
        if change is not None:
            change(leaves, _leaves(result))
        # The arguments count as well: some functions work in place.
        return _projection([*_leaves(result), *leaves])

    given = [_leaves(skeleton)[place] for place in traced]
    differentiate = remat.value_and_grad(run, wrt=tuple(range(len(given))))
    if change is not None and _raises(run, *_copied(given)):
        silent = not _raises(differentiate, *_copied(given))
        return "NumPy raises an error, a traced call does not" if silent else None
    right = run(*_copied(given))
    if not np.isfinite(right):
        return None
    value, gradients = differentiate(*_copied(given))
    slope = _slope(run, given)
    single = any(getattr(leaf, "dtype", None) == np.float32 for leaf in given)
    if not np.isclose(value, right, rtol=1e-5 if single else 1e-10, atol=1e-5 if single else 1e-10):
        return f"value {value} instead of {right}"
    for gradient, x in zip(gradients, given, strict=True):
        if np.shape(gradient) != np.shape(x):
            return f"gradient of shape {np.shape(gradient)} for an argument of shape {np.shape(x)}"
    if slope is None:
        return None
    found = sum(np.sum(g * _direction(x)) for g, x in zip(gradients, given, strict=True))
    tolerance = 1e-3 if single else 1e-5
    if not np.isclose(found, slope, rtol=tolerance, atol=tolerance):
        return f"slope {found} instead of {slope}"
    return None


def _slope(run: Callable[..., Any], given: list[Any], h: float = 1e-5) -> float | None:
    """Return the slope in a direction in which all entries change, None where there is a kink."""

    def at(step: float) -> float:
        return float(run(*(_moved(x, step) for x in given)))

    middle, ahead, back = at(0.0), at(h), at(-h)
    slope = (ahead - back) / (2 * h)
    bend = abs((ahead - middle) - (middle - back)) / h  # the difference of the one-sided slopes
    finer = (at(h / 4) - at(-h / 4)) / (h / 2)
    steady = np.isclose(slope, finer, rtol=1e-4, atol=1e-4)
    return slope if steady and bend < 1e-2 * (1 + abs(slope)) else None


def _moved(x: Any, step: float) -> Any:
    if isinstance(x, float):
        return x + step * float(_direction(x))
    moved = np.array(x, dtype=np.float64, order="K")  # the layout matters to some
    moved += step * _direction(x)
    return moved


def _direction(x: Any) -> Any:
    size = np.size(x)
    return np.sin(0.5 + 1.7 * np.arange(size) ** 1.1).reshape(np.shape(x)) + 0.1


@functools.cache
def _weights(number: int, shape: tuple[int, ...]) -> Any:
    size = int(np.prod(shape))
    return (np.cos(1.0 + 3.7 * number + 1.3 * np.arange(size)) + 0.2).reshape(shape)


def _projection(results: list[Any]) -> Any:
    """Return one number that every entry of every result contributes to."""
    total: Any = 0.0
    for number, result in enumerate(results):
        if isinstance(result, type):
            continue
        kind = result.dtype.kind if hasattr(result, "dtype") else np.asarray(result).dtype.kind
        if kind not in "biufc":
            continue
        weights = _weights(number, np.shape(result))
        if kind == "c":
            total = total + np.sum(np.imag(result) * _weights(number + 50, np.shape(result)))
            result = np.real(result)  # noqa: PLW2901
        total = total + np.sum(result * weights)
    return total


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, float) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f")


def _is_sequence(tree: Any) -> bool:
    return isinstance(tree, list | tuple) or type(tree).__name__ == "SequenceBox"


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if _is_sequence(tree):
        return [leaf for part in tree for leaf in _leaves(part)]
    return [tree]


def _filled(tree: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _filled(part, leaves) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_filled(part, leaves) for part in tree])
    return next(leaves)


def _copied(tree: Any) -> Any:
    return _filled(
        tree,
        (leaf.copy(order="K") if isinstance(leaf, np.ndarray) else leaf for leaf in _leaves(tree)),
    )


@functools.cache
def scope_complaints(name: str) -> tuple[str, ...]:
    """Return where a gradient through a scope has other bits than one without, over all patterns.

    The arguments are made inside of the scope, so that they are dropped, too.
    """
    function = functions()[name]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return tuple(words for pattern in PATTERNS for words in _judge_scope(function, pattern))


def _judge_scope(function: Callable[..., Any], pattern: Pattern) -> Iterator[str]:
    skeleton = (pattern.args, pattern.kwargs)
    leaves = _leaves(skeleton)
    floats = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]
    if not floats or not _is_accepted(function, pattern):
        return
    given = [leaves[place] for place in floats]

    def differentiate(enabled: bool) -> Any:
        def run(*values: Any) -> Any:
            filled = [_copied(leaf) for leaf in leaves]
            with remat.CheckpointScope("call", enabled=enabled):
                for place, value in zip(floats, values, strict=True):
                    filled[place] = value * 1.0
                args, kwargs = _filled(skeleton, iter(filled))
                result = function(*args, **kwargs)
                return _projection([*_leaves(result), *filled])

        return remat.value_and_grad(run, wrt=tuple(range(len(given))))(*_copied(given))

    try:
        plain = differentiate(False)
    except Exception:
        return  # refused, with a scope or without
    try:
        found = differentiate(True)
    except Exception as error:
        yield f"{pattern.name}: raised {type(error).__name__}: {error}"
        return
    pairs = zip([found[0], *found[1]], [plain[0], *plain[1]], strict=True)
    if any(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs):
        yield f"{pattern.name}: other bits"


# -- values ----------------------------------------------------------------------------------------

# Questions about types and texts; what traces a number that NumPy takes for an option; positional
# `out`, in place with broadcasting, and one product of two complex numbers without axes in place.
_VALUES_LEFT_OUT = {
    *("np.mintypecode", "np.linalg.norm", "operator.eq", "operator.ne", "np.matvec", "np.vecmat"),
    *("np.matmul", "np.vecdot", "ndarray.conj", "ndarray.conjugate", "ndarray.dot"),
    "operator.imul",
}


def all_names() -> list[str]:
    names = [*functions(), *methods(), *OPERATORS]
    return [name for name in names if name not in _VALUES_LEFT_OUT]


KINDS = (np.float64, np.float32, np.complex128, np.complex64)


@functools.cache
def value_complaints(name: str, *, one_in: int = 1) -> tuple[str, ...]:
    """Return where a traced call gives other bits, another type or error, over all patterns.

    Of the patterns and types only a part is judged: one in so many.
    """
    function = {**functions(), **methods(), **OPERATORS}[name]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return tuple(
            f"{pattern.name} of {np.dtype(kind)}{words}"
            for pattern in PATTERNS
            for kind in KINDS
            if not zlib.crc32(f"{name} {pattern.name} {np.dtype(kind)}".encode()) % one_in
            for words in _judge_value(function, pattern, kind)
        )


def _judge_value(function: Callable[..., Any], pattern: Pattern, kind: Any) -> Iterator[str]:
    skeleton = (pattern.args, pattern.kwargs)
    leaves = [_as_kind(leaf, kind) for leaf in _leaves(skeleton)]
    floats = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]
    if not floats or "out" in pattern.kwargs:
        return
    expected, error = _outcome(function, skeleton, leaves)
    if error is not None:
        return
    for traced in [floats] if len(floats) == 1 else [floats, *([i] for i in floats[:3])]:
        found, raised = _traced_outcome(function, skeleton, leaves, traced)
        if isinstance(raised, remat.UnsupportedError):
            continue
        where = f", traced {traced}: "
        if raised is not None:
            yield f"{where}raised {raised!r}"
            continue
        pairs = itertools.zip_longest(found, expected)
        words = next((words for pair in pairs if (words := _difference(*pair))), None)
        if words:
            yield where + words


def _outcome(function: Any, skeleton: Any, leaves: list[Any]) -> tuple[list[Any], Any]:
    args, kwargs = _filled(skeleton, iter([_copied(leaf) for leaf in leaves]))
    try:
        return _leaves(function(*args, **kwargs)), None
    except Exception as error:
        return [], error


def _traced_outcome(
    function: Any, skeleton: Any, leaves: list[Any], traced: list[int]
) -> tuple[list[Any], Any]:
    found: list[Any] = []

    def run(values: list[Any]) -> list[Any]:
        filled = [_copied(leaf) for leaf in leaves]
        for place, value in zip(traced, values, strict=True):
            filled[place] = value
        args, kwargs = _filled(skeleton, iter(filled))
        found.extend(plain(result) for result in _leaves(function(*args, **kwargs)))
        return []

    given = [_copied(leaves[place]) for place in traced]
    try:
        record(run, given, [True] * len(given))
    except Exception as error:
        return [], error
    return found, None


def _as_kind(leaf: Any, kind: Any) -> Any:
    """Return a leaf in another type; complex numbers get an imaginary part."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
        if np.dtype(kind).kind == "c":
            turned = np.empty_like(leaf, dtype=kind)
            turned[...] = leaf + 1j * np.sin(3 * leaf)
            return turned
        return leaf if leaf.dtype == np.float32 else leaf.astype(kind, order="K")
    if isinstance(leaf, float) and np.dtype(kind).kind == "c":
        return leaf + 0.2j
    return leaf


def _is_inexact(leaf: Any) -> bool:
    kinds = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fc"
    return isinstance(leaf, float | complex) or kinds


def _difference(found: Any, expected: Any) -> str | None:
    """Say how a result differs; a Python number is as good as NumPy's."""
    if not hasattr(expected, "dtype"):
        if isinstance(found, bool | int | float | complex | np.generic):
            same = found == expected or str(found) == str(expected)  # NaN
            return None if same else f"{found!r} instead of {expected!r}"
        return None
    if isinstance(expected, type):
        return None if found is expected else f"{found} instead of {expected}"
    if not hasattr(found, "dtype"):
        found = np.asarray(found)[()]
    if found.dtype != expected.dtype:
        return f"{found.dtype} instead of {expected.dtype}"
    if np.shape(found) != np.shape(expected):
        return f"shape {np.shape(found)} instead of {np.shape(expected)}"
    if isinstance(found, np.ndarray) != isinstance(expected, np.ndarray):
        return f"a {type(found).__name__} instead of a {type(expected).__name__}"
    return None if found.tobytes() == expected.tobytes() else "other bits"


OPERATORS: dict[str, Callable[..., Any]] = {
    f"operator.{name}": getattr(operator, name)
    for name in (
        *("abs", "add", "floordiv", "matmul", "mod", "mul", "neg", "pos", "pow", "sub", "truediv"),
        *("iadd", "isub", "imul", "itruediv", "ipow", "imatmul", "imod", "ifloordiv"),
        *("eq", "ne", "lt", "le", "gt", "ge", "getitem", "invert"),
    )
} | {
    "divmod": divmod,
    "round": round,
    **{
        f"** {n!r}": functools.partial(lambda n, x: x**n, n)
        for n in (2, 0.5, -1, 3, 1, 0, 2.0, -0.5)
    },
    **{f"{n!r} **": functools.partial(lambda n, x: n**x, n) for n in (2, 0.5)},
}
