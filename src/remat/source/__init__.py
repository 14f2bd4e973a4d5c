"""Python function in, Python function out: its loops checkpoint themselves.

    names, flow, effects   what a piece of code reads and binds, in which order, and changes
    refusals    what keeps a loop from being transformed, and what to write instead
    analysis    what is known of a loop: its state, its outputs, or why it stays as it is
    rewriting   a loop becomes a step function and a call of the loop runner
    transform   all of these in a row, once for each function
    identity    any values as arrays and the rest; which objects are the same ones
    iterables, frames, runtime   what generated code calls when it runs

No engine is known here: `protocols` says what the caller has to provide.
"""

from .iterables import Items, IterableWithOptions
from .protocols import Options, Runner, Values
from .transform import transform

__all__ = ["Items", "IterableWithOptions", "Options", "Runner", "Values", "transform"]
