"""An LSTM: the state is a tuple, the parameters are a dict, the inputs come one by one."""

import numpy as np

import remat

random = np.random.default_rng(0)
hidden, features, length = 32, 8, 400
xs = random.normal(size=(length, features))
target = np.sin(np.linspace(0, 20, length))
params = {
    "W": random.normal(size=(features + hidden, 4 * hidden)) * 0.1,
    "b": np.zeros(4 * hidden),
    "out": random.normal(size=hidden) * 0.1,
}


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def loss(params):
    def step(state, x):
        h, c = state
        i, f, o, g = np.split(np.concatenate([x, h]) @ params["W"] + params["b"], 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        return (h, c), h @ params["out"]

    start = (np.zeros(hidden), np.zeros(hidden))
    _, predictions = remat.checkpointed_scan(step, start, xs)
    return np.mean((predictions - target) ** 2)


for epoch in range(3):
    value, gradient = remat.value_and_grad(loss)(params)
    params = {name: params[name] - 0.5 * gradient[name] for name in params}
    print(f"epoch {epoch}: loss {value:.4f}")
