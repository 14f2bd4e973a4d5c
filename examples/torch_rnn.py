"""A recurrent network on PyTorch, trained through 600 steps in the memory of some of them."""

import torch

import remat

torch.manual_seed(0)
torch.set_num_threads(1)  # steps this small gain nothing from more
length, batch, features, hidden = 600, 16, 4, 32
inputs = torch.randn(length, batch, features)
target = inputs.cumsum(0).mean(-1).tanh()
cell = torch.nn.GRUCell(features, hidden)
readout = torch.nn.Linear(hidden, 1)
optimizer = torch.optim.Adam([*cell.parameters(), *readout.parameters()], lr=3e-3)


def step(state, x):
    state = cell(x, state)
    return state, readout(state).squeeze(-1)


for iteration in range(3):
    optimizer.zero_grad()
    _, outputs = remat.checkpointed_scan(step, torch.zeros(batch, hidden), inputs)
    loss = (outputs - target).square().mean()
    loss.backward()
    optimizer.step()
    print(f"iteration {iteration}: loss {loss.item():.4f}")
