"""Chains of layers: the activations of some layers are held, the others are recomputed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from .. import trees
from ..engines.locate import engine_for
from ..errors import StoreError
from ..loops import LoopOptions
from ..schedules import Given
from ..schedules.check import keep_whole, whole_number
from ..sizes import shown
from ..stores import MemoryStore, ReducedPrecisionStore, Store
from .activations import Activation, Activations, PassStore, nbytes_of

__all__ = ["ActivationCheckpointer", "CheckpointConfig"]

Forward = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class CheckpointConfig:
    """Which activations of a chain are held, how many, and in which precision.

    Args:
        checkpoint_every_n_layers: The activations of layers whose number is a multiple of this are
            held: with 3 those of layers 0, 3, 6, … With 0 none are.
        max_checkpoints: The largest number of activations that are held.
        use_mixed_precision: Hold them in float16: half the bytes of float32. Gradients are then
            approximate, and a value beyond 65504 is a `StoreError`.

    >>> CheckpointConfig(checkpoint_every_n_layers=3)
    CheckpointConfig(checkpoint_every_n_layers=3, max_checkpoints=64, use_mixed_precision=False)
    """

    checkpoint_every_n_layers: int = 4
    max_checkpoints: int = 64
    use_mixed_precision: bool = False

    def __post_init__(self) -> None:
        keep_whole(self, checkpoint_every_n_layers=0, max_checkpoints=0)
        if not isinstance(self.use_mixed_precision, bool):
            raise TypeError(
                f"use_mixed_precision must be True or False, got {shown(self.use_mixed_precision)}"
            )


class ActivationCheckpointer:
    """Holds activations of a chain of layers, and recomputes the others.

    Layers are addressed by number. Activations are arrays, tensors, or pytrees of them. Copies are
    held until `clear()`; no gradient flows through them.

    >>> import numpy as np
    >>> import remat
    >>> weights = [np.eye(3) * 0.5 for _ in range(6)]
    >>> def forward(x, layer):
    ...     return np.tanh(x @ weights[layer])
    >>> checkpointer = ActivationCheckpointer(CheckpointConfig(checkpoint_every_n_layers=3))
    >>> y = checkpointer.checkpointed_forward(np.ones(3), range(6), forward)
    >>> checkpointer
    <ActivationCheckpointer: layers 0, 3 held in 48 bytes, 96 bytes saved>
    >>> bool(np.all(checkpointer.recompute_from_checkpoint(5, range(6), forward) == y))
    True
    """

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        config = CheckpointConfig() if config is None else config
        if not isinstance(config, CheckpointConfig):
            raise TypeError(f"config must be a CheckpointConfig, got {shown(config)}")
        self._config = config
        self._store: Store = MemoryStore()
        if config.use_mixed_precision:
            self._store = ReducedPrecisionStore("float16")
        self._activations = Activations(config.max_checkpoints)

    @property
    def config(self) -> CheckpointConfig:
        """The configuration."""
        return self._config

    # -- by hand -------------------------------------------------------------------------------

    def save(self, layer: int, activation: Any) -> None:
        """Hold a copy of a layer's activation; it replaces one that is held already.

        It can be any layer. If `max_checkpoints` others are held, this is a `StoreError`, so that
        nothing is evicted silently.
        """
        layer = whole_number(layer, "layer")
        held, most = self._activations, self._config.max_checkpoints
        if layer not in held and len(held) >= most:
            raise StoreError(
                f"no room for layer {layer}: {len(held)} of {most} checkpoints are held "
                f"({self._present()}); call clear() or raise max_checkpoints"
            )
        self._keep(layer, activation)

    def get(self, layer: int) -> Any:
        """Return a copy of the activation that is held for a layer."""
        layer = whole_number(layer, "layer")
        if layer not in self._activations:
            raise StoreError(
                f"no activation is held for layer {layer}, only for {self._present()}; save it, or "
                "use recompute_from_checkpoint"
            )
        return self._activations[layer].value()

    def clear(self) -> None:
        """Drop all activations and reset the counters.

        Passes whose backward has not run keep what they need.
        """
        self._activations.clear()

    # -- figures -------------------------------------------------------------------------------

    def num_checkpoints(self) -> int:
        """Return the number of activations that are held."""
        return len(self._activations)

    def memory_stored_bytes(self) -> int:
        """Return the bytes of the held activations, as they are stored."""
        return self._activations.stored_bytes

    def memory_saved_bytes(self) -> int:
        """Return the bytes of the layers' latest activations that are not held.

        Those are the activations that `checkpointed_forward` has dropped or evicted.
        """
        return self._activations.saved_bytes

    def is_checkpoint_layer(self, layer: int) -> bool:
        """Return whether `checkpointed_forward` holds the activation of a layer, given room."""
        every = self._config.checkpoint_every_n_layers
        return every > 0 and whole_number(layer, "layer") % every == 0

    def __repr__(self) -> str:
        stored, saved = self.memory_stored_bytes(), self.memory_saved_bytes()
        return (
            f"<ActivationCheckpointer: {self._present()} held in {stored} bytes, {saved} bytes "
            "saved>"
        )

    # -- passes --------------------------------------------------------------------------------

    def checkpointed_forward(
        self, input: Any, layers: Iterable[Any], forward_fn: Callable[[Any, Any], Any]
    ) -> Any:
        """Run `activation = forward_fn(activation, layer)` over the layers; hold checkpoints.

        The last `max_checkpoints` checkpoint layers are held; older activations are evicted. The
        result is differentiable, also with respect to what `forward_fn` and the layers refer to.
        Backward runs the layers between two checkpoints again. Layers after the last checkpoint run
        once: backward needs them first, so their activations are kept.

        Args:
            input: The input of the first layer. It is never modified.
            layers: The numbers of the layers in order, each once; or the layers themselves
                (modules, functions, weights), which then have the numbers 0, 1, 2, …
            forward_fn: Runs one layer. It gets an activation and an item of `layers`, and returns
                an activation of the same structure; shapes may change.

        >>> import numpy as np
        >>> import remat
        >>> def loss(x, weights):
        ...     checkpointer = ActivationCheckpointer()
        ...     y = checkpointer.checkpointed_forward(x, weights, lambda x, W: np.sin(x @ W))
        ...     return np.sum(y)
        >>> weights = [np.eye(2)] * 8
        >>> remat.grad(loss)(np.zeros(2), weights)
        array([1., 1.])
        """
        _check_callable(forward_fn)
        items, numbers = _numbered(layers)
        steps = len(items)
        if not steps:
            return input
        leaves, structure = trees.flatten(input)
        engine = engine_for(leaves, forward_fn)
        held = self._activations
        for number in numbers:
            held.forget(number)  # from an earlier pass
        positions = self._positions(numbers)
        layer_at = {position: numbers[position - 1] for position in positions}
        schedule = Given(steps, tuple(p for p in positions if p < steps))
        store = PassStore(self._store, structure, layer_at, held)
        options = LoopOptions(steps, None, None, schedule, store)
        sizes = _LayerSizes()
        # A partial, not a closure: engines search the parts of a `partial` for captured arrays, but
        # not closures of this library.
        step = functools.partial(_run_layer, forward_fn, items, sizes)
        try:
            final, _, _ = engine.run_loop(step, input, options, xs=np.arange(steps))
        finally:
            store.end_forward()
            for place, size in sizes.known.items():
                held.passed(numbers[place], size)
        if steps in positions:
            held.keep(numbers[-1], Activation(numbers[-1], final, engine.ARRAYS, self._store))
        return final

    def recompute_from_checkpoint(
        self, target: int, layers: Iterable[Any], forward_fn: Callable[[Any, Any], Any]
    ) -> Any:
        """Return the activation of layer `target`, recomputed from the nearest one that is held.

        That is the activation of `target` itself, or of the nearest layer before it in `layers`,
        which are the same as for `checkpointed_forward`.
        """
        _check_callable(forward_fn)
        target = whole_number(target, "target")
        items, numbers = _numbered(layers)
        if target not in numbers:
            raise ValueError(f"target must be one of the layers, {_listed(numbers)}, got {target}")
        end = numbers.index(target)
        held = [place for place in range(end + 1) if numbers[place] in self._activations]
        if not held:
            raise StoreError(
                f"no activation is held at or before layer {target} of {_listed(numbers)}; held: "
                f"{self._present()}. Save one, or run checkpointed_forward"
            )
        activation = self.get(numbers[held[-1]])
        for item in items[held[-1] + 1 : end + 1]:
            activation = forward_fn(activation, item)
        return activation

    def _positions(self, numbers: list[int]) -> list[int]:
        """Return the positions of activations to hold; position p is after p layers."""
        found = [p for p, number in enumerate(numbers, 1) if self.is_checkpoint_layer(number)]
        return found[max(0, len(found) - self._config.max_checkpoints) :]

    def _keep(self, layer: int, activation: Any) -> None:
        arrays = engine_for(trees.flatten(activation)[0]).ARRAYS
        self._activations.keep(layer, Activation(layer, activation, arrays, self._store))

    def _present(self) -> str:
        return _listed(sorted(self._activations))


class _LayerSizes:
    """The bytes of activations, by position."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}


def _run_layer(
    forward_fn: Forward, items: list[Any], sizes: _LayerSizes, activation: Any, place: Any
) -> tuple[Any, tuple[()]]:
    activation = forward_fn(activation, items[int(place)])
    sizes.known[int(place)] = nbytes_of(activation)
    return activation, ()


def _numbered(layers: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """Return the layers and their numbers: the items if they are integers, else their positions."""
    try:
        items = list(layers)
    except TypeError:
        raise TypeError(f"layers must be a sequence, got {shown(layers)}") from None
    if not all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
        return items, list(range(len(items)))
    numbers = [whole_number(item, "a layer") for item in items]
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ValueError(
            f"layer {twice} is in layers {numbers.count(twice)} times; one activation is held for "
            "each number: number the calls, and let forward_fn find the layer of each"
        )
    return items, numbers


def _listed(numbers: list[int]) -> str:
    """Format layer numbers; a range by its ends.

    >>> _listed([0, 1, 2, 3]), _listed([0, 4]), _listed([])
    ('layers 0 to 3', 'layers 0, 4', 'no layer')
    """
    if not numbers:
        return "no layer"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]} to {numbers[-1]}"
    return f"layer{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _check_callable(forward_fn: Any) -> None:
    if not callable(forward_fn):
        raise TypeError(
            f"forward_fn must be a function of activation and layer, got {shown(forward_fn)}"
        )
