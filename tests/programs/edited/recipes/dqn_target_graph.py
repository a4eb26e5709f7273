"""PyTorch's DQN tutorial without torch.no_grad() around the target network."""
import random
from collections import deque, namedtuple

import torch
from torch import nn

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


class DQN(nn.Module):
    def __init__(self, n_observations, n_actions):
        super().__init__()
        self.layer1 = nn.Linear(n_observations, 256)
        self.layer2 = nn.Linear(256, 256)
        self.layer3 = nn.Linear(256, n_actions)

    def forward(self, x):
        return self.layer3(torch.relu(self.layer2(torch.relu(self.layer1(x)))))


random.seed(0)
BATCH_SIZE, GAMMA, TAU = 256, 0.99, 0.005
policy_net, target_net = DQN(32, 4), DQN(32, 4)
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-4, amsgrad=True)
memory = ReplayMemory(1000)


def select_action(state):
    if random.random() > 0.3:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(4)]], dtype=torch.long)


def optimize_model():
    if len(memory) < BATCH_SIZE:
        return
    batch = Transition(*zip(*memory.sample(BATCH_SIZE)))
    state_batch, next_states = torch.cat(batch.state), torch.cat(batch.next_state)
    action_batch, reward_batch = torch.cat(batch.action), torch.cat(batch.reward)
    next_state_values = target_net(next_states).max(1).values  #! forward without backward -> next_state_values = torch.no_grad()(target_net)(next_states).max(1).values
    expected = (next_state_values * GAMMA) + reward_batch
    state_action_values = policy_net(state_batch).gather(1, action_batch)
    loss = nn.functional.smooth_l1_loss(state_action_values, expected.detach().unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()


state = torch.randn(1, 32)
for t in range(300):
    action = select_action(state)
    next_state = torch.randn(1, 32)
    memory.push(state, action, next_state, torch.randn(1))
    state = next_state
    if t % 5 == 0:
        optimize_model()
        weights, target_weights = policy_net.state_dict(), target_net.state_dict()
        for key in weights:
            target_weights[key] = weights[key] * TAU + target_weights[key] * (1 - TAU)
        target_net.load_state_dict(target_weights)  #? late deallocation@target_weights[key] -> target_net.load_state_dict(target_weights); del target_weights
