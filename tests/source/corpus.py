"""Loop programs, each to be run plain and transformed, on NumPy and on PyTorch.

They take the array module, a vector, a matrix and a table of rows, and return anything.
"""

# Code as users write it, so not as a linter wants it.
# ruff: noqa

from __future__ import annotations

import functools
import itertools
import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import remat


class Program(NamedTuple):
    function: Any
    is_plain: bool  # no loop of it is run as steps
    engines: tuple[str, ...]


PROGRAMS: dict[str, Program] = {}
BOTH = ("numpy", "torch")


def program(function=None, *, plain=False, engines=BOTH):
    if function is None:
        return functools.partial(program, plain=plain, engines=engines)
    PROGRAMS[function.__name__] = Program(function, plain, engines)
    return function


# -- ranges ------------------------------------------------------------------------------------


@program
def for_range(xp, x, W, xs):
    for i in range(12):
        x = xp.tanh(x @ W)
    return x


@program
def for_range_start_stop(xp, x, W, xs):
    for i in range(3, 15):
        x = xp.tanh(x @ W) * (i * 0.1)
    return x


@program
def for_range_backward(xp, x, W, xs):
    for i in range(20, 0, -2):
        x = xp.tanh(x @ W + i * 0.01)
    return x, i


@program(plain=True)
def for_range_empty(xp, x, W, xs):
    i = -1
    for i in range(5, 5):
        x = x * 2
    return x, i


@program(plain=True)
def for_range_once(xp, x, W, xs):
    for i in range(1):
        x = x * 2
    return x, i


@program
def range_of_a_length(xp, x, W, xs):
    n = len(xs)
    for i in range(n):
        x = xp.tanh(x + xs[i])
    return x


@program
def underscore(xp, x, W, xs):
    for _ in range(10):
        x = xp.sin(x) * 1.1
    return x


# -- iterables ---------------------------------------------------------------------------------


@program
def over_rows(xp, x, W, xs):
    for row in xs:
        x = xp.tanh(x @ W + row)
    return x


@program
def over_rows_reads_last(xp, x, W, xs):
    for row in xs:
        x = xp.tanh(x @ W + row)
    return x * row


@program
def over_enumerate(xp, x, W, xs):
    for i, row in enumerate(xs):
        x = xp.tanh(x @ W + row * i * 0.1)
    return x, i


@program
def over_enumerate_start(xp, x, W, xs):
    for i, row in enumerate(xs, start=3):
        x = xp.tanh(x + row / i)
    return x


@program
def over_zip(xp, x, W, xs):
    for row, k in zip(xs, range(100)):
        x = xp.tanh(x @ W + row * k * 0.1)
    return x, k


@program
def over_zip_of_rows(xp, x, W, xs):
    for one, other in zip(xs, xs[1:]):
        x = xp.tanh(x + one * other)
    return x


@program
def over_enumerate_of_zip(xp, x, W, xs):
    for i, (row, name) in enumerate(zip(xs, "abcdefghijkl")):
        if name in "aeiou":
            x = xp.tanh(x + row)
        else:
            x = x * 0.9 + i * 0.01
    return x


@program
def over_list(xp, x, W, xs):
    for factor in [0.5, 1.5, 0.7, 1.1, 0.9]:
        x = xp.tanh(x * factor)
    return x


@program
def over_list_of_arrays(xp, x, W, xs):
    rows = [row * 2 for row in xs]
    for row in rows:
        x = xp.tanh(x + row)
    return x


@program
def over_tuple(xp, x, W, xs):
    for a, b in ((1, 2), (3, 4), (5, 6), (7, 8)):
        x = xp.sin(x * a / b)
    return x


@program
def over_reversed_list(xp, x, W, xs):
    for factor in reversed([0.5, 1.5, 0.7, 1.1]):
        x = xp.tanh(x * factor)
    return x


@program
def over_reversed_range(xp, x, W, xs):
    for i in reversed(range(len(xs))):
        x = xp.tanh(x + xs[i])
    return x


@program
def over_dict_items(xp, x, W, xs):
    table = {"one": x, "two": x * 2, "three": xs[0], "four": xs[1]}
    for name, value in table.items():
        x = xp.tanh(x + value * len(name))
    return x


@program
def over_dict_values(xp, x, W, xs):
    for value in {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}.values():
        x = xp.cos(x * value)
    return x


@program
def over_dict(xp, x, W, xs):
    weights = {"a": W, "b": W * 0.5, "c": W * 0.1, "d": W}
    for key in weights:
        x = xp.tanh(x @ weights[key])
    return x


@program
def over_text(xp, x, W, xs):
    for letter in "checkpoint":
        x = xp.tanh(x * (ord(letter) / 100))
    return x


@program
def over_functions(xp, x, W, xs):
    for f in (xp.tanh, xp.sin, xp.cos, xp.tanh, lambda y: y * 2):
        x = f(x)
    return x


@program(plain=True)
def over_generator(xp, x, W, xs):
    for row in (row * 2 for row in xs):
        x = xp.tanh(x + row)
    return x


@program(plain=True)
def over_count(xp, x, W, xs):
    for i in itertools.count():
        x = xp.tanh(x + i * 0.1)
        if i == 10:
            break
    return x


@program
def over_steps(xp, x, W, xs):
    for i in remat.steps(range(12), num_checkpoints=3):
        x = xp.tanh(x @ W)
    return x


@program(plain=True)
def over_steps_that_are_too_few(xp, x, W, xs):
    for i in remat.steps(range(12), min_steps=100):
        x = xp.tanh(x @ W)
    return x


@program
def over_steps_of_zip(xp, x, W, xs):
    for row, k in remat.steps(zip(xs, range(12)), schedule="revolve"):
        x = xp.tanh(x @ W + row * k)
    return x


# -- while -------------------------------------------------------------------------------------


@program
def while_counter(xp, x, W, xs):
    n = 0
    while n < 12:
        x = xp.tanh(x @ W)
        n += 1
    return x, n


@program
def while_on_data(xp, x, W, xs):
    steps = 0
    while x.sum() < 30:
        x = x * 1.2 + 0.1
        steps += 1
    return x, steps


@program
def while_true_break(xp, x, W, xs):
    n = 0
    while True:
        x = xp.tanh(x @ W + 0.1)
        n += 1
        if n > 10:
            break
        x = x * 1.1
    return x


@program
def while_walrus(xp, x, W, xs):
    n = 0
    while (n := n + 1) < 10:
        x = xp.tanh(x @ W) * n
    return x, n


@program
def while_else(xp, x, W, xs):
    n = 10
    while n:
        x = xp.tanh(x + n * 0.01)
        n -= 1
    else:
        x = x * 2
    return x


@program
def while_two_conditions(xp, x, W, xs):
    n = 0
    while n < 50 and x.sum() > -20:
        x = x * 1.1 - 0.3
        n = n + 1
    return x, n


@program
def while_with_list(xp, x, W, xs):
    found = []
    n = 0
    while n < 40:
        x = xp.tanh(x @ W + n * 0.01)
        found.append(x)
        n += 1
    return found


@program
def while_with_list_and_break(xp, x, W, xs):
    found = []
    while True:
        x = x * 1.07 + 0.01
        if x.sum() > 40:
            break
        found.append(x * 2)
    return x, found


# -- names of comprehensions -------------------------------------------------------------------

scale = 1.1


@program
def comprehension_with_the_name_of_a_global(xp, x, W, xs):
    for _ in range(12):
        x = xp.tanh(x @ W) * scale * sum([scale for scale in (0.5, 0.4)])
    return x


def _with_a_free_variable():
    k = 1.1

    @program
    def comprehension_with_the_name_of_a_free_variable(xp, x, W, xs):
        nonlocal k
        for _ in range(12):
            x = xp.tanh(x @ W) * k * sum([k for k in (0.5, 0.4)])
        return x


_with_a_free_variable()


@program
def comprehension_over_its_own_name(xp, x, W, xs):
    for _ in range(12):
        x = xp.stack([x * 0.9 for x in x])
    return x


# -- jumps -------------------------------------------------------------------------------------


@program
def break_on_data(xp, x, W, xs):
    for i in range(30):
        x = x * 1.2 + 0.1
        if x.sum() > 20:
            break
    return x, i


@program
def break_never(xp, x, W, xs):
    for i in range(12):
        x = xp.tanh(x @ W)
        if x.sum() > 100:
            break
    else:
        x = x + 1
    return x, i


@program
def break_skips_else(xp, x, W, xs):
    for i in range(12):
        x = xp.tanh(x @ W)
        if i == 7:
            break
    else:
        x = x + 100
    return x


@program
def continue_on_index(xp, x, W, xs):
    for i in range(12):
        if i % 3 == 1:
            continue
        x = xp.tanh(x @ W + i * 0.1)
    return x


@program
def continue_on_data(xp, x, W, xs):
    for row in xs:
        y = x + row
        if y.sum() > 0.2:
            x = x * 0.9
            continue
        x = xp.tanh(y)
    return x, y


@program
def return_in_loop(xp, x, W, xs):
    for i in range(30):
        x = x * 1.2 + 0.1
        if x.sum() > 20:
            return x * 2, i
    return x, -1


@program
def return_not_reached(xp, x, W, xs):
    for i in range(12):
        x = xp.tanh(x @ W)
        if x.sum() > 100:
            return None
    return x


@program
def return_of_something_new(xp, x, W, xs):
    for i in range(30):
        x = x * 1.2 + 0.1
        if x.sum() > 20:
            found = x * x
            pair = (found, found + 1)
            return pair
    return x


@program
def return_in_inner_loop(xp, x, W, xs):
    for i in range(6):
        for j in range(6):
            x = x * 1.1 + 0.05
            if x.sum() > 15:
                return x * 3, i, j
    return x, -1, -1


@program
def several_returns(xp, x, W, xs):
    for i in range(20):
        x = x * 1.1 + 0.1
        if i == 17:
            return "late", x
        if x.sum() > 12:
            return "large", x
        elif x.sum() < -12:
            return "small", x
    return "none", x


@program
def break_in_with(xp, x, W, xs):
    import contextlib

    for i in range(12):
        with contextlib.nullcontext():
            x = xp.tanh(x @ W)
            if i == 8:
                break
    return x, i


@program(plain=True)
def break_in_try(xp, x, W, xs):
    for i in range(12):
        try:
            x = xp.tanh(x @ W)
            if i == 8:
                break
        finally:
            x = x + 1
    return x


@program
def try_in_body(xp, x, W, xs):
    for i in range(12):
        try:
            x = xp.tanh(x @ W) / (i - 5)
            1 // (i - 5)
        except ZeroDivisionError:
            x = x * 0 + 1
    return x


# -- conditions --------------------------------------------------------------------------------


@program
def if_on_data(xp, x, W, xs):
    for row in xs:
        if (x * row).sum() > 0:
            x = xp.tanh(x + row)
        elif x.sum() > 1:
            x = x * 0.5
        else:
            x = x @ W
    return x


@program
def conditional_expression(xp, x, W, xs):
    for i in range(12):
        x = xp.tanh(x @ W) if i % 2 else xp.sin(x)
    return x


@program
def match_statement(xp, x, W, xs):
    for i in range(12):
        match i % 3:
            case 0:
                x = xp.tanh(x @ W)
            case 1:
                x = x * 1.1
            case other:
                x = x + other * 0.01
    return x


@program
def best_so_far(xp, x, W, xs):
    best = None
    for row in xs:
        score = (x * row).sum()
        if best is None or score > best:
            best = score
        x = xp.tanh(x + row)
    return x, best


@program
def best_appears_late(xp, x, W, xs):
    best, where = None, None
    for i in range(20):
        x = xp.tanh(x @ W + 0.1)
        if i > 12 and best is None:
            best, where = x * 2, i
    return x, best, where


# -- variables ---------------------------------------------------------------------------------


@program
def several_variables(xp, x, W, xs):
    h, c = x, x * 0.5
    for row in xs:
        c = c * 0.9 + xp.tanh(h @ W + row)
        h = xp.tanh(c)
    return h, c


@program
def swapped(xp, x, W, xs):
    a, b = x, x * 2
    for i in range(11):
        a, b = b, xp.tanh(a + b)
    return a, b


@program
def tuple_variable(xp, x, W, xs):
    state = (x, x * 0.5)
    for row in xs:
        h, c = state
        state = (xp.tanh(h + c + row), c * 0.9 + h)
    return state


@program
def dict_variable(xp, x, W, xs):
    state = {"h": x, "c": x * 0.5}
    for row in xs:
        state = {"h": xp.tanh(state["h"] + row), "c": state["c"] * 0.9 + state["h"]}
    return state["h"], state["c"]


Pair = namedtuple("Pair", "h c")


@program
def namedtuple_variable(xp, x, W, xs):
    state = Pair(x, 0)
    for row in xs:
        state = Pair(xp.tanh(state.h + row), state.c + 1)
    return state.h, state.c


@dataclass
class Model:
    h: Any
    steps: int


@program
def dataclass_variable(xp, x, W, xs):
    state = Model(x, 0)
    for row in xs:
        state = Model(xp.tanh(state.h + row), state.steps + 1)
    return state.h, state.steps


@program
def list_variable_with_stores(xp, x, W, xs):
    hs = [x, x * 0.5, x * 0.1]
    for row in xs:
        y = row
        for k in range(3):
            hs[k] = xp.tanh(hs[k] @ W + y)
            y = hs[k]
    return hs


@program
def fresh_in_loop_used_after(xp, x, W, xs):
    for i in range(12):
        y = xp.tanh(x @ W) * i
        x = x + y * 0.1
    return x, y


@program
def bound_on_one_path(xp, x, W, xs):
    for i in range(12):
        x = xp.tanh(x @ W)
        if i == 4:
            special = x * 3
    return x + special


@program
def never_bound(xp, x, W, xs):
    for i in range(12):
        x = xp.tanh(x @ W)
        if i == 40:
            special = x * 3
    return x + special


@program
def read_before_it_is_bound(xp, x, W, xs):
    for i in range(12):
        if i == 10:
            x = x + late  # noqa: F821
        x = xp.tanh(x @ W)
        if i == 40:
            late = x
    return x


@program
def read_in_the_next_turn(xp, x, W, xs):
    for i in range(12):
        if i > 0:
            x = x + before * 0.1  # noqa: F821
        before = xp.tanh(x @ W)
        x = before
    return x


@program
def counters(xp, x, W, xs):
    n, t, name = 0, 0.0, ""
    for i in range(12):
        n += 2
        t += 0.25
        name += "ab"[i % 2]
        x = xp.tanh(x @ W + t)
    return x, n, t, name


@program
def python_floats_stay_python_floats(xp, x, W, xs):
    t = 0.0
    for i in range(12):
        t = t + 0.1
        x = xp.tanh(x @ W + math.sin(t))
    return x, f"{t:.3f}"


@program
def augmented(xp, x, W, xs):
    total = 0.0
    h = x * 1
    for i in range(12):
        h = h * 0.9
        h += x
        total += h.sum()
    return h, total


@program
def walrus(xp, x, W, xs):
    for row in xs:
        x = (y := xp.tanh(x + row)) * 0.9 + y * y
    return x, y


@program(plain=True)
def starred(xp, x, W, xs):
    for first, *rest in [(1, 2, 3), (4, 5), (6,), (7, 8, 9)]:
        x = xp.tanh(x * first + sum(rest))
    return x, first, rest


@program
def number_becomes_array(xp, x, W, xs):
    total = 0
    for row in xs:
        x = xp.tanh(x + row)
        total = total + x
    return total


@program
def shapes_change(xp, x, W, xs):
    for i in range(10):
        x = xp.tanh(x)
        if i % 2:
            x = x[:2] if len(x) > 2 else x[[0, 1, 0]]
    return x


@program
def variable_that_goes_away(xp, x, W, xs):
    memory = x
    for i in range(12):
        x = xp.tanh(x @ W)
        if memory is not None and i > 6:
            x = x + memory
            memory = None
    return x, memory is None


@program
def shadowed_parameter(xp, x, W, xs):
    for W_ in [W, W * 2, W * 0.5, W]:
        W = xp.tanh(W_ + W)
        x = x @ W
    return x


@program
def name_gets_another_value_after_the_loop(xp, x, W, xs):
    scale = x * 0.1
    h = x
    for i in range(12):
        h = xp.tanh(h @ W + scale)
    scale = h * 100
    W = W * 0
    return h + scale * 0.001


# -- lists and stores --------------------------------------------------------------------------


@program
def appended(xp, x, W, xs):
    out = []
    for row in xs:
        x = xp.tanh(x @ W + row)
        out.append(x)
    return out


@program
def appended_pairs(xp, x, W, xs):
    out = []
    for i, row in enumerate(xs):
        x = xp.tanh(x @ W + row)
        out.append((i, x, {"y": x * 2, "name": f"step {i}"}))
    return out


@program
def appended_sometimes(xp, x, W, xs):
    out = []
    for i, row in enumerate(xs):
        x = xp.tanh(x @ W + row)
        if i % 3 == 0:
            out.append(x)
    return out


@program
def appended_numbers(xp, x, W, xs):
    sizes, losses = [], []
    for i, row in enumerate(xs):
        x = xp.tanh(x @ W + row)
        sizes.append(i * 2)
        losses.append((x * x).sum())
    return x, sizes, losses


@program
def appended_and_extended(xp, x, W, xs):
    out = [x]
    for row in xs:
        x = xp.tanh(x + row)
        out.append(x)
        out.extend([x * 2, x * 3])
        out += [x * 4]
    return out


@program
def appended_only(xp, x, W, xs):
    out = []
    for row in xs:
        out.append(xp.tanh(row @ W) * x)
    return out


@program
def appended_in_inner_loop(xp, x, W, xs):
    out = []
    for i in range(5):
        for row in xs:
            x = xp.tanh(x + row)
            out.append(x)
    return out


@program
def appended_two_shapes(xp, x, W, xs):
    out = []
    for row in xs:
        x = xp.tanh(x + row)
        out.append(x)
        out.append(x.sum())
    return out


@program
def looks_back(xp, x, W, xs):
    hs = [x]
    for row in xs:
        hs.append(xp.tanh(hs[-1] @ W + row))
    return hs


@program
def looks_back_twice(xp, x, W, xs):
    hs = [x, x * 0.5]
    for row in xs:
        hs.append(xp.tanh(hs[-1] + hs[-2] * 0.5 + row))
    return hs


@program(plain=True)
def looks_back_anywhere(xp, x, W, xs):
    hs = [x]
    for i in range(12):
        hs.append(xp.tanh(hs[i // 2] + hs[-1]))
    return hs


@program(plain=True)
def tuple_that_grows(xp, x, W, xs):
    hs = (x,)
    for i in range(12):
        hs = hs + (xp.tanh(hs[-1] @ W),)
    return hs


@program
def stored_into_list(xp, x, W, xs):
    out = [None] * 12
    for i in range(12):
        x = xp.tanh(x @ W)
        out[i] = x
    return out


@program
def stored_into_dict(xp, x, W, xs):
    out = {}
    for i in range(12):
        x = xp.tanh(x @ W)
        out[i, "x"] = x
    return list(out.items())


@program
def stored_into_array(xp, x, W, xs):
    out = xs * 0
    for i in range(12):
        x = xp.tanh(x @ W)
        out[i] = x
    return out


@program
def stored_into_slices(xp, x, W, xs):
    out = xs * 0
    for i in range(6):
        x = xp.tanh(x @ W)
        out[2 * i : 2 * i + 2, 1] = x[:2]
        out[i, ...] = x
    return out


@program(engines=("numpy",))
def stored_and_read(xp, x, W, xs):
    out = xs * 1
    for i in range(1, 12):
        out[i] = xp.tanh(out[i - 1] @ W + out[i])
    return out


@program(engines=("torch",))
def stored_and_read_from_copies(xp, x, W, xs):
    out = xs * 1
    for i in range(1, 12):
        out[i] = xp.tanh(out[i - 1].clone() @ W + out[i].clone())
    return out


@program
def stored_conditionally(xp, x, W, xs):
    out = xs * 1
    for i in range(12):
        x = xp.tanh(x @ W)
        if x.sum() > 0:
            out[i] = x
    return out, x


@program
def accumulated_in_place(xp, x, W, xs):
    total = x * 0
    for row in xs:
        x = xp.tanh(x + row)
        total += x
    return total


@program(plain=True)
def shared_array_changed_in_place(xp, x, W, xs):
    total = x * 1
    view = total
    for row in xs:
        total += xp.tanh(row)
    return total, view


@program(plain=True)
def shared_list(xp, x, W, xs):
    out = []
    other = out
    for row in xs:
        x = xp.tanh(x + row)
        out.append(x)
    return other


@program(plain=True)
def row_changed_in_place(xp, x, W, xs):
    rows = [[0.0] for _ in range(12)]
    for row in rows:
        x = xp.tanh(x @ W)
        row.append(len(row))
    return x, rows


@program(plain=True)
def entry_changed_in_place(xp, x, W, xs):
    counts = [[0] for _ in range(12)]
    for i in range(12):
        x = xp.tanh(x @ W)
        count = counts[i // 2]
        count += [i]
    return x, counts


@program
def copy_changed_in_place(xp, x, W, xs):
    for row in xs:
        mine = row * 1
        mine += x
        x = xp.tanh(mine)
    return x


# -- nesting -----------------------------------------------------------------------------------


@program
def two_loops(xp, x, W, xs):
    for i in range(6):
        for row in xs:
            x = xp.tanh(x @ W + row * i * 0.1)
        x = x * 1.1
    return x


@program
def three_loops(xp, x, W, xs):
    for i in range(3):
        for j in range(3):
            for k in range(4):
                x = xp.tanh(x @ W + (i + j + k) * 0.1)
    return x, i, j, k


@program
def four_loops(xp, x, W, xs):
    for i in range(2):
        for j in range(2):
            for k in range(3):
                for l in range(3):
                    x = xp.tanh(x @ W + (i + j + k + l) * 0.1)
    return x


@program
def triangular(xp, x, W, xs):
    for i in range(7):
        for j in range(i):
            x = xp.tanh(x + xs[j] * 0.3)
    return x


@program
def inner_break(xp, x, W, xs):
    for i in range(5):
        for row in xs:
            x = xp.tanh(x + row) * 1.2
            if x.sum() > 1:
                break
        else:
            x = x + 1
    return x


@program
def while_in_for(xp, x, W, xs):
    for row in xs:
        n = 0
        while n < 4:
            x = xp.tanh(x + row * n)
            n += 1
    return x


@program
def for_in_while(xp, x, W, xs):
    n = 0
    while n < 5:
        for row in xs:
            x = xp.tanh(x + row * 0.5)
        n += 1
    return x


@program
def loops_in_a_row(xp, x, W, xs):
    for row in xs:
        x = xp.tanh(x + row)
    y = x * 2
    for row in xs:
        y = xp.sin(y * row) + x
    for i in range(9):
        x, y = y, x + y
    return x, y


@program
def loop_in_if(xp, x, W, xs):
    if x.sum() < 100:
        for row in xs:
            x = xp.tanh(x + row)
    else:
        for row in xs:
            x = x - row
    return x


@program
def loop_in_with(xp, x, W, xs):
    import contextlib

    with contextlib.nullcontext():
        for row in xs:
            x = xp.tanh(x + row)
    return x


@program
def comprehensions(xp, x, W, xs):
    for i in range(8):
        rows = [row * i for row in xs]
        x = xp.tanh(x + sum(rows) * 0.01)
        x = x + sum(row * 0.001 for row in rows)
    return x, len(rows)


# -- functions ---------------------------------------------------------------------------------


@program
def lambda_in_body(xp, x, W, xs):
    for row in xs:
        f = lambda y: y @ W + row
        x = xp.tanh(f(x))
    return x


@program
def function_in_body(xp, x, W, xs):
    def apply(f, y):
        return f(f(y))

    for row in xs:

        def field(y):
            return xp.tanh(y @ W + row * dt)

        dt = 0.1
        x = apply(field, x)
    return x


@program
def function_before_loop(xp, x, W, xs):
    def field(y, row):
        return xp.tanh(y @ W + row)

    for row in xs:
        x = field(x, row)
    return x


@program(plain=True)
def function_that_sees_the_variable(xp, x, W, xs):
    def twice():
        return x * 2

    for row in xs:
        x = xp.tanh(twice() + row)
    return x


@program(plain=True)
def functions_that_are_kept(xp, x, W, xs):
    fs = []
    for i in range(10):
        fs.append(lambda y: y * i)
        x = xp.tanh(fs[0](x))
    return x


@program(plain=True)
def function_that_outlives_the_loop(xp, x, W, xs):
    for i in range(10):
        scale = lambda y: y * i
        x = xp.tanh(scale(x))
    i = 3
    return scale(x)


@program(plain=True)
def nonlocal_write(xp, x, W, xs):
    total = 0

    def run(x):
        nonlocal total
        for row in xs:
            x = xp.tanh(x + row)
            total = total + 1
        return x

    return remat.checkpoint_loops(run, min_steps=2)(x), total


@program(plain=True)
def deleted(xp, x, W, xs):
    for row in xs:
        y = xp.tanh(x + row)
        x = y * 2
        del y
    return x


@program(plain=True)
def sees_locals(xp, x, W, xs):
    for row in xs:
        x = xp.tanh(x + row)
    return x, sorted(locals())


@program(plain=True)
def attribute_write(xp, x, W, xs):
    model = Model(x, 0)
    for row in xs:
        x = xp.tanh(x + row)
        model.steps += 1
    return x, model.steps


@program(plain=True)
def except_clause_reads(xp, x, W, xs):
    try:
        for i in range(12):
            x = xp.tanh(x @ W)
            if i == 9:
                raise ValueError("enough")
    except ValueError:
        return x, i
    return None


@program
def try_around_reads_nothing(xp, x, W, xs):
    try:
        for i in range(12):
            x = xp.tanh(x @ W)
    except ValueError:
        return None
    return x


@program
def raises_in_turn_nine(xp, x, W, xs):
    for i in range(12):
        x = xp.tanh(x @ W)
        if i == 9:
            raise KeyError("enough")
    return x


@program
def index_error(xp, x, W, xs):
    for i in range(20):
        x = xp.tanh(x + xs[i])
    return x
