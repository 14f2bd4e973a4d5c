"""What is known of a loop before it runs: its state, its outputs, what it reads."""

from __future__ import annotations

import ast
import textwrap

import pytest

from remat.source.analysis import LoopSpec, find_loops
from remat.source.refusals import Refusal


def loops(body: str, arguments: str = "x, y"):
    source = f"def f({arguments}):\n{textwrap.indent(textwrap.dedent(body), '    ')}"
    return list(find_loops(ast.parse(source).body[0]).values())


def plan(body: str) -> LoopSpec:
    (found, *_) = loops(body)
    assert isinstance(found, LoopSpec)
    return found


STATES = {
    "what goes from turn to turn": ("for i in y:\n    x = x + i\nreturn x", ["x"]),
    "what is needed after": ("for i in y:\n    z = i\nreturn z", ["z"]),
    "the loop variable after": ("for i in y:\n    x = x + 1\nreturn x, i", ["i", "x"]),
    "not what is bound first": ("for i in y:\n    z = i\n    x = x + z\nreturn x", ["x"]),
    "nor what nobody reads": ("for i in y:\n    z = i\n    x = x + i\nreturn x", ["x"]),
    "unless on one path": (
        "for i in y:\n    if i:\n        z = i\n    x = z + x\nreturn x",
        ["x", "z"],
    ),
    "what a continue takes along": (
        "for i in y:\n    if i:\n        continue\n    z = i\nreturn z",
        ["z"],
    ),
    "what a break takes along": (
        "for i in y:\n    z = i\n    if z:\n        break\nelse:\n    return 0\nreturn z",
        ["z"],
    ),
    "what a return needs": ("for i in y:\n    z = i\n    if z:\n        return z\n", ["z"]),
    "what a condition needs": ("while x < 3:\n    x = x + y\n", ["x"]),
    "what changes in place": ("for i in y:\n    x[i] = x[i - 1]\nreturn x", ["x"]),
    "what a nested function reads": ("for i in y:\n    x = max(x, key=lambda k: k)\n", ["x"]),
    "a walrus in a comprehension": ("for i in y:\n    [z := k for k in y]\nreturn z", ["z"]),
    "not targets of comprehensions": (
        "for i in y:\n    x = x + sum([k for k in y])\nreturn x",
        ["x"],
    ),
}


@pytest.mark.parametrize(("body", "names"), STATES.values(), ids=STATES.keys())
def test_the_state(body: str, names: list[str]) -> None:
    assert list(plan(body).state) == names


def test_a_loop_that_leaves_nothing_is_no_loop_to_transform() -> None:
    assert loops("for i in y:\n    print(i)\nreturn x") == [None]


def test_what_is_read_and_what_may_have_no_value() -> None:
    found = plan("if x:\n    w = 1\nfor i in y:\n    x = x + w + k(y)\nreturn x")
    assert found.reads == ("y",)
    assert found.unbound == {"w"}
    assert found.state == ("w", "x")


OUTPUTS = {
    "append": ("for i in y:\n    out.append(i)\n", [("out", "list", 0, True, None)]),
    "sometimes": (
        "for i in y:\n    if i:\n        out.append(i)\n",
        [("out", "list", 0, False, 1)],
    ),
    "at most two": (
        "for i in y:\n    if i:\n        out.append(i)\n    else:\n        out += [1, 2]\n",
        [("out", "list", 0, False, 2)],
    ),
    "with a look back": (
        "for i in y:\n    out.append(out[-2])\n",
        [("out", "list", 2, True, None)],
    ),
    "stores": ("for i in y:\n    out[i] = i\n", [("out", "store", 0, True, None)]),
    "stores that depend": ("for i in y:\n    if i:\n        out[i] = i\n", []),
    "read, too": ("for i in y:\n    out.append(len(out))\n", []),
    "bound, too": ("for i in y:\n    out = []\n    out.append(i)\n", []),
}


@pytest.mark.parametrize(("body", "outputs"), OUTPUTS.values(), ids=OUTPUTS.keys())
def test_the_outputs(body: str, outputs: list[tuple]) -> None:
    found = plan(f"out = y * 1\n{body}return out, x")
    assert [(o.name, o.kind, o.window, o.is_steady, o.most) for o in found.outputs] == outputs


REFUSALS = {
    "a list in an inner while": (
        "for i in y:\n    while x:\n        out.append(i)\n",
        "any number of items to out",
    ),
    "what it iterates over": ("for i in out:\n    out.append(x)\n", "which it iterates over"),
    "an attribute": ("for i in y:\n    out = i\n    x.a = 1\n", "writes to the attribute .a"),
    "an object inside": ("for i in y:\n    out = i\n    x.a[0] = 1\n", "writes into x.a"),
    "out=": ("for i in y:\n    out = f(i, out=x.a)\n", "writes into x.a"),
    "a target": ("for x.a in y:\n    out = x\n", "not a name"),
    "a class": ("for i in y:\n    class C: pass\n    out = C\n", "defines the class C"),
    "a kept lambda": (
        "for i in y:\n    out = lambda: i\n",
        "the nested function out outlives a turn",
    ),
}


@pytest.mark.parametrize(("body", "reason"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals(body: str, reason: str) -> None:
    (found, *_) = loops(f"out = [1]\n{body}return out")
    assert isinstance(found, Refusal)
    assert reason in found.reason
    assert found.line >= 3


def test_the_outer_loop_may_stay_plain_when_the_inner_one_does_not() -> None:
    outer, inner = loops("for i in y:\n    x.a = 1\n    for j in y:\n        x = x + j\nreturn x")
    assert isinstance(outer, Refusal)
    assert isinstance(inner, LoopSpec)
