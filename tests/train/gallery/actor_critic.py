"""Rollouts, then some epochs of minibatches over them, drawn by a permutation (PPO, after CleanRL)."""

import numpy as np
import torch
import torch.nn as nn
from torch.distributions.normal import Normal

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
np.random.seed(1)
num_envs, num_steps, update_epochs, num_minibatches = 8, 8, 2, 4
batch_size = num_envs * num_steps


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor_mean = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor_logstd = nn.Parameter(torch.zeros(1, 1))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        mean = self.actor_mean(x)
        probs = Normal(mean, torch.exp(self.actor_logstd.expand_as(mean)))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
obs = torch.from_numpy(np.random.uniform(-1, 1, (num_envs, 2)))
for update in range(1, 21):
    optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / 20) * 3e-3
    rows = []
    for _ in range(num_steps):
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(obs)
        step = torch.cat([obs[:, 1:], action.clamp(-1, 1)], 1)
        following = (obs + 0.2 * step).clamp(-2, 2)
        reward = -following.pow(2).sum(1)
        rows.append((obs, action, logprob, value.flatten(), reward))
        obs = following
    with torch.no_grad():
        next_value, advantage, advantages = agent.get_value(obs).flatten(), 0.0, []
        for _, _, _, value, reward in reversed(rows):
            advantage = reward + 0.95 * next_value - value + 0.95 * 0.9 * advantage
            advantages.insert(0, advantage)
            next_value = value
    b_obs, b_actions, b_logprobs, b_values = (torch.cat([r[i] for r in rows]) for i in range(4))
    b_advantages = torch.cat(advantages)
    b_returns = b_advantages + b_values
    b_inds = np.arange(batch_size)
    for _ in range(update_epochs):
        np.random.shuffle(b_inds)
        for start in range(0, batch_size, batch_size // num_minibatches):
            mb = b_inds[start : start + batch_size // num_minibatches]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions[mb])
            ratio = (newlogprob - b_logprobs[mb]).exp()
            adv = b_advantages[mb]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
            v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb]) ** 2).mean()
            loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    print(f"update {update} value_loss {v_loss.item():.5f} policy_loss {pg_loss.item():.5f}")
torch.save(agent.state_dict(), "agent.pt")
