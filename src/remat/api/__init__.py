"""The public functions: check the arguments, find the engine, hand over."""
