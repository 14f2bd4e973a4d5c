"""A loop of unknown length: iterate until it converges."""

import numpy as np

import remat


def square_root(a):
    def newton(x):
        return 0.5 * (x + a / x)

    root, _ = remat.checkpointed_while(
        lambda x: np.max(np.abs(x * x - a)) > 1e-12, newton, np.ones_like(a), num_checkpoints=4
    )
    return root


a = np.array([2.0, 9.0, 100.0])
print("gradient:", remat.grad(square_root)(a))
print("expected:", 0.5 / np.sqrt(a))
