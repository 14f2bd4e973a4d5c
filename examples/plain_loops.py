"""An ODE solver with adaptive steps, written as plain Python, and differentiated in little memory.

python examples/plain_loops.py
"""

import numpy as np

import remat


def pendulum(y: np.ndarray, friction: float) -> np.ndarray:
    angle, speed = y[0], y[1]
    return np.stack([speed, -np.sin(angle) - friction * speed])


def simulate(start: np.ndarray, friction: float, end: float = 40.0) -> np.ndarray:
    """Heun's method; the step size follows the estimated error."""
    y, t, dt = start, 0.0, 0.05
    while t < end:
        k1 = pendulum(y, friction)
        k2 = pendulum(y + dt * k1, friction)
        error = dt * np.max(np.abs(k2 - k1))
        if error > 0.01:
            dt = dt / 2
            continue
        y = y + dt * (k1 + k2) / 2
        t = t + dt
        if error < 0.001:
            dt = dt * 1.5
    return y


def main() -> None:
    start = np.array([1.0, 0.0])
    arguments = start, np.array(0.01)
    plain = remat.grad(simulate, wrt=(0, 1))(*arguments)
    with remat.CheckpointProfiler() as profiler:
        ours = remat.grad_with_checkpointing(simulate, wrt=(0, 1), num_checkpoints=20)(*arguments)
    print("gradient of the final state:", *ours)
    print("the same as without checkpoints:", all(map(np.array_equal, plain, ours)))
    print(profiler.report())


if __name__ == "__main__":
    main()
