"""Advantage actor-critic whose rollouts run under torch.no_grad(), without a defect."""
import torch
from torch import nn
from torch.distributions import Categorical


class ActorCritic(nn.Module):
    def __init__(self, states=32, actions=6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(states, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        self.policy, self.value = nn.Linear(256, actions), nn.Linear(256, 1)

    def forward(self, states):
        hidden = self.body(states)
        return Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)


@torch.no_grad()
def collect(model, num_steps, num_envs):
    states, actions, rewards = [], [], []
    state = torch.randn(num_envs, 32)
    for _ in range(num_steps):
        policy, _ = model(state)
        action = policy.sample()
        states.append(state)
        actions.append(action)
        rewards.append((action == 0).float() + 0.1 * state.mean(1))
        state = torch.tanh(state + torch.randn_like(state))
    return torch.stack(states), torch.stack(actions), torch.stack(rewards)


def returns_of(rewards, discount=0.99):
    total, out = torch.zeros_like(rewards[0]), []
    for reward in rewards.flip(0):
        total = reward + discount * total
        out.append(total)
    return torch.stack(out[::-1])


def update(model, optimizer):
    states, actions, rewards = collect(model, 16, 32)
    returns = returns_of(rewards)
    policy, values = model(states)
    advantage = returns - values
    loss = -(policy.log_prob(actions) * advantage.detach()).mean() + 0.5 * advantage.square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def main():
    model = ActorCritic()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    for _ in range(8):
        update(model, optimizer)


main()
