"""A deep network in segments: what checkpointing saves and costs, and that it changes nothing."""

import numpy as np

import remat

rng = np.random.default_rng(0)
weights = [rng.normal(size=(64, 64)) / 8 for _ in range(32)]


@remat.checkpoint
def block(x, matrices):
    for matrix in matrices:
        x = np.tanh(x @ matrix) + x
    return x


def loss(weights, x):
    for i in range(0, len(weights), 4):
        x = block(x, weights[i : i + 4])
    return np.mean(x**2)


x = rng.normal(size=(512, 64))
print(remat.verify(block, x, weights[:4]))
with remat.CheckpointProfiler() as profiler:
    gradients = remat.grad(loss)(weights, x)
print(profiler.report())
