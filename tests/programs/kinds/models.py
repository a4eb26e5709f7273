"""Models of many fields."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

from tests.programs.kinds import Result, kind
from tests.programs.kinds.common import make_mlp, state, train


@kind
def packed_sequences() -> Result:
    model = nn.LSTM(8, 16, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)
    lengths = torch.tensor([7, 5, 2])

    def loss() -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 7, 8), lengths, batch_first=True)
        output, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        return output.square().mean()

    return train(model, loss)


@kind
def recurrent_cells_in_a_loop() -> Result:
    cell = nn.GRUCell(8, 16)

    def loss() -> torch.Tensor:
        hidden = torch.zeros(4, 16)
        for _ in range(5):
            hidden = cell(torch.randn(4, 8), hidden)
        return hidden.square().mean()

    return train(cell, loss)


@kind
def transformer_decoder_with_masks() -> Result:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return train(model, lambda: model(torch.randn(2, 7, 16), torch.randn(2, 5, 16), tgt_mask=mask).square().mean())


@kind
def transformer_fast_path() -> Result:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with torch.inference_mode():
        return encoder(torch.randn(2, 6, 16), src_key_padding_mask=padding).sum().item()


@kind
def scaled_dot_product_attention() -> Result:
    query, key, value = (torch.randn(2, 2, 6, 8, requires_grad=True) for _ in range(3))
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1)
    output.square().mean().backward()
    return [output, query.grad, key.grad, value.grad]


@kind
def generative_adversarial_network() -> Result:
    generator, critic = nn.Linear(4, 16), make_mlp()
    optimizers = [torch.optim.Adam(model.parameters()) for model in (generator, critic)]
    for _ in range(3):
        fake = generator(torch.randn(8, 4))
        optimizers[1].zero_grad()
        (critic(fake.detach()).mean() - critic(torch.randn(8, 16)).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(fake).mean()).backward()
        optimizers[0].step()
    return [*state(generator), *state(critic)]


@kind
def variational_autoencoder() -> Result:
    encoder, decoder = nn.Linear(16, 8), nn.Linear(4, 16)

    def loss() -> torch.Tensor:
        x = torch.rand(8, 16)
        mean, log_scale = encoder(x).chunk(2, dim=1)
        posterior = torch.distributions.Normal(mean, log_scale.exp())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        divergence = torch.distributions.kl_divergence(posterior, prior).sum(1).mean()
        return functional.mse_loss(decoder(posterior.rsample()), x) + divergence

    return train(nn.ModuleList([encoder, decoder]), loss)


@kind
def policy_gradient() -> Result:
    policy = make_mlp()
    optimizer = torch.optim.Adam(policy.parameters())
    returns = []
    for _ in range(3):
        observation, log_probabilities, rewards = torch.randn(16), [], []
        for _ in range(6):
            distribution = torch.distributions.Categorical(logits=policy(observation))
            action = distribution.sample()
            log_probabilities.append(distribution.log_prob(action))
            observation = observation.roll(int(action)) * 0.9
            rewards.append(float(observation[0]))
        loss = -(torch.stack(log_probabilities) * torch.tensor(rewards).cumsum(0).flip(0)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        returns.append(sum(rewards))
    return [returns, state(policy)]


@kind
def q_learning_with_replay_buffer_and_target_network() -> Result:
    import random
    from collections import deque

    random.seed(0)
    network = make_mlp()
    target = copy.deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.RMSprop(network.parameters())
    replay: deque[tuple[torch.Tensor, int, float, torch.Tensor]] = deque(maxlen=20)
    for step in range(12):
        replay.append((torch.randn(16), step % 4, float(step), torch.randn(16)))
        if len(replay) < 6:
            continue
        before, action, reward, after = zip(*random.sample(list(replay), 6), strict=True)
        expected = torch.tensor(reward) + 0.9 * target(torch.stack(after)).max(1).values
        value = network(torch.stack(before)).gather(1, torch.tensor(action)[:, None])[:, 0]
        optimizer.zero_grad()
        functional.smooth_l1_loss(value, expected).backward()
        optimizer.step()
        if step % 4 == 0:
            target.load_state_dict(network.state_dict())
    return [*state(network), *state(target)]


@kind
def graph_network_by_scatter() -> Result:
    layer = nn.Linear(16, 16)
    edges = torch.randint(10, (2, 30))

    def loss() -> torch.Tensor:
        nodes = torch.randn(10, 16)
        summed = torch.zeros_like(nodes).index_add(0, edges[1], layer(nodes)[edges[0]])
        return torch.zeros_like(nodes).scatter_reduce(0, edges[:1].T.expand(-1, 16), summed[edges[1]], "amax").mean()

    return train(layer, loss)


@kind
def mixture_of_experts() -> Result:
    router, experts = nn.Linear(16, 3), nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def loss() -> torch.Tensor:
        x = torch.randn(12, 16)
        weight, expert = router(x).softmax(1).topk(2)
        output = torch.zeros_like(x)
        for number, module in enumerate(experts):
            token, slot = torch.where(expert == number)
            if len(token):
                output.index_add_(0, token, module(x[token]) * weight[token, slot, None])
        return output.square().mean()

    return train(nn.ModuleList([router, experts]), loss)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1)
        self.time = nn.Embedding(10, 8)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = functional.silu(self.norm(self.down(x)) + self.time(time)[:, :, None, None])
        return self.up(hidden) + x


@kind
def diffusion_with_moving_average() -> Result:
    model = _UNet()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        x, noise, time = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8), torch.randint(10, (2,))
        level = time[:, None, None, None] / 10
        functional.mse_loss(model(x * (1 - level) + noise * level, time), noise).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return state(average)


@kind
def connectionist_temporal_classification() -> Result:
    model = nn.Linear(8, 6)
    targets = torch.randint(1, 6, (2, 4))

    def loss() -> torch.Tensor:
        output = model(torch.randn(12, 2, 8)).log_softmax(2)
        return functional.ctc_loss(output, targets, torch.tensor([12, 10]), torch.tensor([4, 3]))

    return train(model, loss)


@kind
def embedding_bags() -> Result:
    model = nn.EmbeddingBag(20, 8, mode="mean")
    offsets = torch.tensor([0, 4, 9])
    return train(model, lambda: model(torch.randint(20, (15,)), offsets).square().mean())


@kind
def convolutions_in_channels_last() -> Result:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=8))
    model = model.to(memory_format=torch.channels_last)
    return train(model, lambda: model(torch.randn(2, 4, 12, 12).to(memory_format=torch.channels_last)).square().mean())


@kind
def three_dimensional_convolutions() -> Result:
    model = nn.Sequential(nn.Conv3d(1, 4, 3), nn.InstanceNorm3d(4, affine=True), nn.AdaptiveAvgPool3d(1))
    return train(model, lambda: model(torch.randn(2, 1, 6, 6, 6)).square().mean())


@kind
def autoregressive_generation_with_cache() -> Result:
    embedding, layer, head = nn.Embedding(12, 16), nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 12)
    tokens, cache = [1], torch.zeros(1, 0, 16)
    with torch.no_grad():
        for _ in range(6):
            cache = torch.cat([cache, embedding(torch.tensor([[tokens[-1]]]))], dim=1)
            output, _ = layer(cache[:, -1:], cache, cache)
            tokens.append(int(head(output[0, 0]).argmax()))
    return [tokens, cache]


@kind
def adaptive_softmax() -> Result:
    model = nn.AdaptiveLogSoftmaxWithLoss(16, 30, cutoffs=[5, 15])
    return train(model, lambda: model(torch.randn(8, 16), torch.randint(30, (8,))).loss)
