"""Q-learning with a replay memory and a target network (after PyTorch's DQN tutorial)."""

import math
import random
from collections import deque, namedtuple

import torch
import torch.nn as nn
import torch.optim as optim

torch.set_default_dtype(torch.float64)
random.seed(0)
torch.manual_seed(0)
Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)


def make_net():
    return nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 3))


policy_net, target_net = make_net(), make_net()
target_net.load_state_dict(policy_net.state_dict())
optimizer = optim.AdamW(policy_net.parameters(), lr=3e-3, amsgrad=True)
memory, steps_done = ReplayMemory(400), 0


def select_action(state):
    global steps_done
    eps = 0.05 + 0.85 * math.exp(-steps_done / 80)
    steps_done += 1
    if random.random() > eps:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(3)]])


def optimize_model():
    if len(memory) < 24:
        return None
    batch = Transition(*zip(*memory.sample(24), strict=True))
    states, actions = torch.cat(batch.state), torch.cat(batch.action)
    values = policy_net(states).gather(1, actions)
    with torch.no_grad():
        following = target_net(torch.cat(batch.next_state)).max(1).values
    expected = following * 0.9 + torch.cat(batch.reward)
    loss = nn.SmoothL1Loss()(values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    return loss.item()


for i_episode in range(18):
    position, velocity, total, loss = random.uniform(-1, 1), 0.0, 0.0, None
    state = torch.tensor([[position, velocity]])
    for _ in range(12):
        action = select_action(state)
        velocity = 0.8 * velocity + 0.1 * (action.item() - 1)
        position = max(-1.5, min(1.5, position + velocity))
        reward = torch.tensor([-abs(position)])
        next_state = torch.tensor([[position, velocity]])
        memory.push(state, action, next_state, reward)
        state = next_state
        total += reward.item()
        loss = optimize_model()
        target, source = target_net.state_dict(), policy_net.state_dict()
        for key in source:
            target[key] = source[key] * 0.05 + target[key] * 0.95
        target_net.load_state_dict(target)
    print(f"episode {i_episode} return {total:.4f} loss {loss if loss is None else round(loss, 5)}")
torch.save(policy_net.state_dict(), "dqn.pt")
