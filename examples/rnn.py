"""A recurrent network over 1000 steps, differentiated with 31 states in memory."""

import numpy as np

import remat

random = np.random.default_rng(0)
hidden = 128
x = random.normal(size=hidden)
W = random.normal(size=(hidden, hidden)) / np.sqrt(hidden)
b = random.normal(size=hidden) * 0.1


def rnn_model(x, W, b, seq_length=1000):
    def rnn_step(state):
        return np.tanh(state @ W + b)

    final_state, _ = remat.checkpointed_loop(rnn_step, x, seq_length, num_checkpoints=31)
    return final_state


dx, dW, db = remat.grad(rnn_model, wrt=(0, 1, 2))(x, W, b)
print("gradients:", dx.shape, dW.shape, db.shape)
