"""Policy gradients over whole episodes (after pytorch/examples/reinforcement_learning/reinforce.py)."""

from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical

torch.set_default_dtype(torch.float64)


class Line:
    """Walk to the right end of a line of nine places."""

    def reset(self):
        self.place, self.time = 4, 0
        return self._state()

    def _state(self):
        return F.one_hot(torch.tensor(self.place), 9).to(torch.float64)

    def step(self, action):
        self.place += 1 if action else -1
        self.time += 1
        done = self.place in (0, 8) or self.time >= 20
        return self._state(), (1.0 if self.place == 8 else -0.02), done


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(9, 16), nn.Linear(16, 2)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)


torch.manual_seed(543)
env, policy = Line(), Policy()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)


def select_action(state):
    m = Categorical(policy(state.unsqueeze(0)))
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode():
    R, returns = 0, deque()
    for r in policy.rewards[::-1]:
        R = r + 0.95 * R
        returns.appendleft(R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std(unbiased=False) + 1e-6)
    loss = torch.cat([-p * R for p, R in zip(policy.saved_log_probs, returns, strict=True)]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]


running_reward = 0
for i_episode in range(1, 161):
    state, ep_reward, done = env.reset(), 0, False
    while not done:
        state, reward, done = env.step(select_action(state))
        policy.rewards.append(reward)
        ep_reward += reward
    running_reward = 0.05 * ep_reward + 0.95 * running_reward
    finish_episode()
    if i_episode % 10 == 0:
        print(f"Episode {i_episode}\tLast reward: {ep_reward:.2f}\tAverage reward: {running_reward:.4f}")
torch.save(policy.state_dict(), "policy.pt")
