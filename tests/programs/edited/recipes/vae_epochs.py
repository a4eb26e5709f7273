"""PyTorch's VAE example: the test pass of every epoch forgets torch.no_grad()."""
import torch
from torch import nn, optim
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 400)
        self.fc21 = nn.Linear(400, 20)
        self.fc22 = nn.Linear(400, 20)
        self.fc3 = nn.Linear(20, 400)
        self.fc4 = nn.Linear(400, 784)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))  #? redundant allocation -> return torch.sigmoid_(self.fc4(F.relu_(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 784))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
train_data, test_data = torch.rand(512, 1, 28, 28), torch.rand(2048, 1, 28, 28)


def train():
    model.train()
    for data in train_data.split(64):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()


def test():
    model.eval()
    test_loss = 0
    for data in test_data.split(1024):
        recon_batch, mu, logvar = model(data)  #! forward without backward -> recon_batch, mu, logvar = torch.no_grad()(model)(data)
        test_loss += loss_function(recon_batch, data, mu, logvar).item()
    return test_loss / len(test_data)


for epoch in range(3):
    train()
    test()
