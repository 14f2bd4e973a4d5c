"""`checkpoint_loops`, `grad_with_checkpointing`, `steps`: what they take and what they return."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import linecache
import sys
import traceback
import warnings
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import numpy as np
import pytest

import remat

X = np.array([0.1, 0.4, -0.3])


def power(x, n=12, *, scale: float = 1.1) -> np.ndarray:
    """Shrink and stretch."""
    for _ in range(n):
        x = np.tanh(x) * scale
    return x


def assert_same_gradient(plain, transformed, *args) -> None:
    one, other = (remat.value_and_grad(f)(*args) for f in (plain, transformed))
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(one[1], other[1])


def regions(function, *args) -> int:
    with remat.CheckpointProfiler() as profiler:
        remat.grad(function)(*args)
    return profiler.checkpoint_count()


def doubled(f):
    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        return f(*args, **kwargs) * 2

    return wrapper


class Base:
    def step(self, x):
        return np.tanh(x)


class Model(Base):
    __scale = 1.2

    def __init__(self) -> None:
        self.weight = 0.9

    def run(self, x):
        for _ in range(12):
            x = super().step(x) * self.weight * self.__scale
        return x

    def __call__(self, x):
        return self.run(x)

    @staticmethod
    def still(x):
        for _ in range(12):
            x = np.sin(x)
        return x

    @classmethod
    def classy(cls, x):
        for _ in range(12):
            x = np.sin(x) * cls.__scale
        return x

    def __private(self, x):
        __state = x
        for _ in range(12):
            __state = np.sin(__state) * self.__scale
        return __state

    private = __private


class Callable:
    def __call__(self, x):
        return power(x)


MODEL = Model()
KINDS = {
    "function": power,
    "lambda": lambda x: power(x) * 2,
    "partial": functools.partial(power, n=15),
    "method": MODEL.run,
    "private method": MODEL.private,
    "static": MODEL.still,
    "class method": MODEL.classy,
    "object": MODEL,
    "wrapped": doubled(power),
}


@pytest.mark.parametrize("function", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_function_gives_the_same(function) -> None:
    assert_same_gradient(function, remat.checkpoint_loops(function, strict=True), X)


@pytest.mark.parametrize("name", ["function", "partial", "method", "private method", "wrapped"])
def test_these_really_run_in_steps(name: str) -> None:
    assert regions(remat.checkpoint_loops(KINDS[name]), X) == 1


def test_all_that_a_function_is_stays() -> None:
    transformed = remat.checkpoint_loops(power)
    assert inspect.signature(transformed) == inspect.signature(power)
    for name in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"):
        assert getattr(transformed, name) == getattr(power, name)
    assert transformed.__defaults__ == power.__defaults__
    assert transformed.__kwdefaults__ == power.__kwdefaults__
    assert transformed.__globals__ is power.__globals__
    assert transformed.__code__.co_filename == power.__code__.co_filename


def from_file(path: Path, source: str) -> ModuleType:
    """Return a module with code that not every version of Python can read."""
    path.write_text(dedent(source))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.version_info < (3, 12), reason="no type parameters")
def test_a_function_with_type_parameters(tmp_path: Path) -> None:
    source = """
        import numpy as np

        class Scaled[S]:
            def run[T](self, x: T, scale: float = 1.1) -> T:
                kinds = []
                for _ in range(12):
                    x = np.tanh(x) * scale
                    kinds.append((S, T))
                return x, kinds
    """
    run = from_file(tmp_path / "generic.py", source).Scaled.run
    transformed = remat.checkpoint_loops(run, strict=True)
    assert transformed.__type_params__ == run.__type_params__
    assert transformed.__annotations__ == run.__annotations__
    assert transformed(None, X)[1] == run(None, X)[1]
    one, other = (functools.partial(lambda f, x: f(None, x)[0], f) for f in (run, transformed))
    assert_same_gradient(one, other, X)
    assert regions(other, X) == 1


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated at once")
def test_annotations_may_name_what_comes_later(tmp_path: Path) -> None:
    source = """
        import numpy as np
        import remat

        @remat.checkpoint_loops
        def run(x: Later) -> Later:
            for _ in range(12):
                x = np.tanh(x)
            return x

        gradient = remat.grad(run)(np.ones(3))

        class Later: ...
    """
    module = from_file(tmp_path / "deferred.py", source)
    assert module.run.__annotations__ == {"x": module.Later, "return": module.Later}


def test_as_a_decorator_with_and_without_options() -> None:
    @remat.checkpoint_loops
    def one(x):
        for _ in range(12):
            x = np.tanh(x)
        return x

    @doubled
    @remat.checkpoint_loops(num_checkpoints=3, min_steps=5)
    def two(x):
        for _ in range(12):
            x = np.tanh(x)
        return x

    @staticmethod
    def three(x):
        for _ in range(12):
            x = np.tanh(x)
        return x

    still = remat.checkpoint_loops(three)
    assert isinstance(still, staticmethod)
    assert regions(one, X) == regions(two, X) == regions(still.__func__, X) == 1
    np.testing.assert_array_equal(remat.grad(one)(X) * 2, remat.grad(two)(X))


def test_the_source_is_readable_python() -> None:
    source = remat.checkpoint_loops(power).transformed_source
    compile(source, "transformed", "exec")
    assert source.startswith("def power(x, n=12, *, scale: float=1.1) -> np.ndarray:")
    assert "def loop_at_line_" in source


def test_cells_stay_shared() -> None:
    scale = 1.0

    @remat.checkpoint_loops
    def f(x):
        for _ in range(12):
            x = np.tanh(x) * scale
        return x

    before = f(X)
    scale = 0.5
    assert not np.allclose(before, f(X))


def test_steps_are_functions_of_the_users_module_and_file() -> None:
    seen = []

    def spy(x):
        frame = inspect.currentframe().f_back
        seen.append((frame.f_globals["__name__"], frame.f_code.co_filename))
        return x

    @remat.checkpoint_loops
    def f(x):
        for _ in range(12):
            x = spy(np.tanh(x))
        return x

    remat.grad(f)(X)
    assert set(seen) == {(__name__, __file__)}


def test_a_traceback_points_to_the_line_that_raised() -> None:
    @remat.checkpoint_loops
    def f(x):
        for i in range(12):
            x = np.tanh(x)
            if i == 8:
                raise KeyError("the line")
        return x

    with pytest.raises(KeyError, match="the line") as caught:
        remat.grad(f)(X)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.filename == __file__
    assert last.line == 'raise KeyError("the line")'


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"num_checkpoints": 2},
        {"memory_budget": "1MB"},
        {"memory_budget": 0.5},
        {"schedule": "uniform"},
        {"schedule": "all"},
        {"store": "disk"},
        {"num_checkpoints": 3, "schedule": "revolve"},
    ],
    ids=str,
)
def test_options_change_no_result(options) -> None:
    def f(x):
        total = 0
        for i in range(40):
            x = np.tanh(x) * (1 + 0.01 * i)
            total = total + x
        return x + total

    assert_same_gradient(f, remat.checkpoint_loops(f, **options), X)
    np.testing.assert_array_equal(
        remat.grad(f)(X), remat.grad_with_checkpointing(f, 0, **options)(X)
    )


def test_a_store_that_rounds_gives_about_the_same() -> None:
    transformed = remat.checkpoint_loops(power, store="bfloat16", num_checkpoints=3)
    np.testing.assert_allclose(remat.grad(transformed)(X), remat.grad(power)(X), rtol=0.1)


def test_short_loops_stay_plain() -> None:
    assert regions(remat.checkpoint_loops(power), X) == 1
    assert regions(remat.checkpoint_loops(power, min_steps=13), X) == 0


def test_steps_has_options_for_one_loop() -> None:
    @remat.checkpoint_loops(min_steps=100)
    def f(x):
        for _ in remat.steps(range(12), min_steps=2, num_checkpoints=3):
            x = np.tanh(x)
        for _ in range(12):
            x = np.sin(x)
        return x

    assert regions(f, X) == 1


def test_steps_just_iterates_elsewhere() -> None:
    given = remat.steps([3, 4, 5], num_checkpoints=2)
    assert list(given) == [3, 4, 5]
    assert len(given) == 3
    assert list(reversed(given)) == [5, 4, 3]


BAD = {
    "num_checkpoints": -1,
    "memory_budget": "much",
    "schedule": "best",
    "store": "cloud",
    "min_steps": 1.5,
}


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_bad_options_are_named(name: str, value) -> None:
    with pytest.raises((TypeError, ValueError), match=name.split("_", maxsplit=1)[0]):
        remat.checkpoint_loops(power, **{name: value})
    with pytest.raises((TypeError, ValueError), match=name.split("_", maxsplit=1)[0]):
        remat.steps(range(3), **{name: value})


def test_unknown_options_are_named() -> None:
    with pytest.raises(TypeError, match="colour"):
        remat.steps(range(3), colour="red")


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="f must be a function, got 3"):
        remat.checkpoint_loops(3)


# -- what stays plain --------------------------------------------------------------------------


def with_yield(x):
    for _ in range(12):
        x = np.tanh(x)
        yield x


def with_global(x):
    global COUNT  # noqa: PLW0603
    for _ in range(12):
        x = np.tanh(x)
        COUNT = COUNT + 1
    return x


COUNT = 0


def with_attribute(x):
    model = Model()
    for _ in range(12):
        x = np.tanh(x)
        model.weight = 3
    return x


def with_outer_list(x):
    for _ in range(12):
        x = np.tanh(x)
        LOG.append(1)
    return x


LOG: list[int] = []


def with_del(x):
    for _ in range(12):
        y = np.tanh(x)
        x = y * 2
        del y
    return x


def with_try(x):
    for i in range(12):
        try:
            x = np.tanh(x)
            if i == 9:
                break
        finally:
            x = x + 1
    return x


def with_locals(x):
    for _ in range(12):
        x = np.tanh(x)
    return x, locals()


async def with_await(x):
    for _ in range(12):
        x = await x
    return x


REASONS = {
    with_yield: "yield in its body",
    with_global: "writes to COUNT, which is global",
    with_attribute: "writes to the attribute .weight",
    with_outer_list: r"calls .append\(\) on LOG",
    with_del: "del y in its body",
    with_try: "break inside of try",
    with_locals: r"calls locals\(\)",
    with_await: "await in its body",
}


@pytest.mark.parametrize(("function", "reason"), REASONS.items(), ids=lambda x: str(x)[:20])
def test_a_loop_that_cannot_be_transformed(function, reason: str) -> None:
    place = rf"test_source\.py:\d+: the loop cannot be checkpointed: .*{reason}"
    with pytest.raises(remat.LoopTransformError, match=place):
        remat.checkpoint_loops(function, strict=True)
    with pytest.warns(remat.RematWarning, match=place):
        transformed = remat.checkpoint_loops(function)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remat.checkpoint_loops(function)  # once is enough
    assert transformed.__code__ is function.__code__ or "_remat" not in (
        transformed.transformed_source
    )


def over_generator(x):
    for k in (k * 0.1 for k in range(12)):
        x = np.tanh(x + k)
    return x


def growing(x):
    seen = ()
    for _ in range(30):
        x = np.tanh(x)
        seen = (*seen, x)
    return x + seen[-1]


def shared(x):
    total = x * 1
    other = total
    for _ in range(12):
        total += np.tanh(x)
    return total + other


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (over_generator, "iterates over a generator"),
        (growing, "another structure in every turn"),
        (shared, "changes total in place, and something else refers to it"),
    ],
)
def test_what_shows_when_a_loop_runs(function, reason: str) -> None:
    expected = remat.grad(function)(X)
    with pytest.raises(remat.LoopTransformError, match=reason):
        remat.grad(remat.checkpoint_loops(function, strict=True))(X)
    transformed = remat.checkpoint_loops(function)
    with pytest.warns(remat.RematWarning, match=reason):
        found = remat.grad(transformed)(X)
    np.testing.assert_array_equal(expected, found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remat.grad(transformed)(X)


def test_a_loop_over_a_differentiated_python_number_stays_plain() -> None:
    def f(x):
        for _ in range(12):
            x = x * 1.1
        return x

    with pytest.raises(remat.LoopTransformError, match="x is a Python number that is different"):
        remat.grad(remat.checkpoint_loops(f, strict=True))(0.5)
    with pytest.warns(remat.RematWarning, match=r"use np.float64\(…\)"):
        assert remat.grad(remat.checkpoint_loops(f))(0.5) == remat.grad(f)(0.5)
    assert regions(remat.checkpoint_loops(f), np.float64(0.5)) == 1


def test_no_source() -> None:
    namespace: dict = {"np": np}
    exec("def f(x):\n    for i in range(12): x = np.tanh(x)\n    return x", namespace)
    with pytest.raises(remat.LoopTransformError, match="source is not available"):
        remat.checkpoint_loops(namespace["f"], strict=True)
    with pytest.warns(remat.RematWarning, match="source is not available"):
        transformed = remat.checkpoint_loops(namespace["f"])
    assert_same_gradient(namespace["f"], transformed, X)


def test_no_python_function() -> None:
    with pytest.raises(remat.LoopTransformError, match="no Python function"):
        remat.checkpoint_loops(np.tanh, strict=True)
    with pytest.warns(remat.RematWarning, match="no Python function"):
        assert remat.checkpoint_loops(np.tanh) is np.tanh


def test_a_list_that_a_called_function_changes_is_an_error() -> None:
    def note(into, value):
        into.append(value)

    def f(x):
        seen = []
        for _ in range(12):
            x = np.tanh(x)
            note(seen, 1)
        return x * len(seen)

    with pytest.raises(remat.RematError):
        remat.grad(remat.checkpoint_loops(f))(X)


def test_errors_that_are_swallowed_leave_no_old_value() -> None:
    @remat.checkpoint_loops
    def f(x):
        with contextlib.suppress(KeyError):
            for i in range(20):
                x = np.tanh(x)
                if i == 15:
                    raise KeyError
        return x

    with pytest.raises(UnboundLocalError):
        remat.grad(f)(X)


def test_a_loop_runs_in_its_own_code_unless_it_is_differentiated() -> None:
    frames = []

    def spy(x):
        frames.append(inspect.currentframe().f_back.f_code.co_name)
        return x

    @remat.checkpoint_loops
    def f(x):
        for _ in range(12):
            x = spy(np.tanh(x))
        return x

    f(X)
    assert set(frames) == {"f"}
    frames.clear()
    remat.grad(f)(X)
    assert {name.rstrip("0123456789") for name in frames} == {"loop_at_line_"}


def test_transforming_is_cached() -> None:
    one, other = remat.checkpoint_loops(power), remat.checkpoint_loops(power)
    assert one.__code__ is other.__code__


def test_called_functions_repeat_their_effects() -> None:
    calls = []

    def noisy(x):
        calls.append(None)
        return np.tanh(x)

    def f(x):
        for _ in range(12):
            x = noisy(x)
        return x

    remat.grad(remat.checkpoint_loops(f, num_checkpoints=2, schedule="revolve"))(X)
    assert len(calls) > 12


# -- torch -------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_module_can_be_copied_afterwards() -> None:
    module = remat.checkpoint_loops(Layers())
    copied = copy.deepcopy(module)
    x = torch.randn(2, 3)
    assert torch.equal(module(x), copied(x))
    with torch.no_grad():
        copied.layers[0].weight.zero_()
    assert not torch.equal(module(x), copied(x))


def test_without_gradients_a_loop_is_plain() -> None:
    module = remat.checkpoint_loops(Layers())
    with remat.CheckpointProfiler() as profiler, torch.no_grad():
        module(torch.randn(2, 3))
    assert profiler.checkpoint_count() == 0


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_a_compiled_graph_has_plain_loops() -> None:
    @remat.checkpoint_loops
    def f(x, xs):
        n = 0
        for i, row in enumerate(xs):
            x = torch.tanh(x + row * i)
        while n < 9:
            x = x * 1.1
            n += 1
        for _ in remat.steps(range(9), num_checkpoints=3):
            x = torch.sin(x)
        return x

    torch._dynamo.reset()
    x, xs = torch.randn(3), torch.randn(9, 3, requires_grad=True)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, xs), f(x, xs))


LOOPS = {
    "loop": lambda x, W: remat.checkpointed_loop(lambda s: torch.tanh(s @ W), x, 12)[0],
    "scan": lambda x, W: remat.checkpointed_scan(
        lambda s, row: (torch.tanh(s @ W + row), s), x, torch.ones(9, 3)
    )[0],
    "while": lambda x, W: remat.checkpointed_while(
        lambda s: s.sum() < 30, lambda s: s @ W * 1.5, x.abs() + 1, 4
    )[0],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
def test_a_loop_by_hand_ends_the_graph(loop) -> None:
    def f(x, W):
        return loop(x, W) * 2

    torch._dynamo.reset()
    x, W = torch.ones(3) * 0.3, torch.eye(3).requires_grad_()
    expected = f(x, W)
    found = torch.compile(f, backend="aot_eager")(x, W)
    assert torch.equal(found, expected)
    (one,) = torch.autograd.grad(expected.sum(), W)
    (other,) = torch.autograd.grad(found.sum(), W)
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("before", "after"),
    [("x * 2.0", "x * 3.0"), ("x * 2.0", "x + 2.0"), ("x * 2.0", "y * 2.0"), ("np.sin", "np.cos")],
)
def test_a_file_that_was_edited_after_it_was_imported(before, after, tmp_path, monkeypatch) -> None:
    """The file is read when a function is transformed: it may be another one by then."""
    source = dedent(
        """
        import numpy as np


        def run(x):
            y = x + 1.0
            for _ in range(8):
                x = np.sin(x * 2.0) + y
            return np.sum(x)
        """
    )
    file = tmp_path / "edited_while_it_runs.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    program = importlib.import_module("edited_while_it_runs")
    expected = remat.grad(program.run)(np.ones(3))
    file.write_text(source.replace(before, after))
    linecache.checkcache()
    try:
        with pytest.warns(remat.RematWarning, match="not what it was"):
            found = remat.grad(remat.checkpoint_loops(program.run))(np.ones(3))
        assert found.tolist() == expected.tolist()
        with pytest.raises(remat.LoopTransformError, match="not what it was"):
            remat.checkpoint_loops(program.run, strict=True)
    finally:
        del sys.modules["edited_while_it_runs"]
