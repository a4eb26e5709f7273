"""PPO that collects its rollouts under autograd and detaches them only when it learns from them."""
import torch
from torch import nn
from torch.distributions import Normal


class Agent(nn.Module):
    def __init__(self, observations=48, actions=6):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, actions))
        self.logstd = nn.Parameter(torch.zeros(1, actions))

    def act(self, x, action=None):
        mean = self.actor(x)
        dist = Normal(mean, self.logstd.expand_as(mean).exp())
        if action is None:
            action = dist.sample()
        return action, dist.log_prob(action).sum(1), dist.entropy().sum(1), self.critic(x).flatten()


def rollout(agent, num_steps, num_envs):
    obs, actions, logprobs, values, rewards = [], [], [], [], []
    state = torch.randn(num_envs, 48)
    for _ in range(num_steps):
        action, logprob, _, value = agent.act(state)  #! forward without backward -> action, logprob, _, value = torch.no_grad()(agent.act)(state)
        obs.append(state)
        actions.append(action)
        logprobs.append(logprob)
        values.append(value)
        rewards.append(torch.randn(num_envs))
        state = torch.randn(num_envs, 48)
    return [torch.stack(part).flatten(0, 1) for part in (obs, actions, logprobs, values, rewards)]


def main():
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), 3e-4, eps=1e-5)
    for _ in range(4):
        obs, actions, logprobs, values, rewards = rollout(agent, 16, 32)  #? late deallocation@torch.stack -> obs = actions = None; obs, actions, logprobs, values, rewards = rollout(agent, 16, 32)
        old_logprobs, advantages = logprobs.detach(), (rewards - values).detach()
        for _ in range(2):
            for index in torch.randperm(len(obs)).split(128):
                _, newlogprob, entropy, newvalue = agent.act(obs[index], actions[index])
                ratio = (newlogprob - old_logprobs[index]).exp()
                pg_loss = torch.max(-advantages[index] * ratio, -advantages[index] * ratio.clamp(0.8, 1.2)).mean()
                loss = pg_loss - 0.01 * entropy.mean() + 0.5 * (newvalue - rewards[index]).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()  #? gradients kept through forward -> optimizer.step(); optimizer.zero_grad()


main()
