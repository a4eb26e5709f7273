"""A Siamese network with a triplet loss, without a defect."""
import torch
from torch import nn


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.convnet = nn.Sequential(
            nn.Conv2d(1, 32, 5), nn.PReLU(), nn.MaxPool2d(2, stride=2), nn.Conv2d(32, 64, 5), nn.PReLU(), nn.MaxPool2d(2, stride=2)
        )
        self.fc = nn.Sequential(nn.Linear(64 * 16, 128), nn.PReLU(), nn.Linear(128, 32))

    def forward(self, x):
        return nn.functional.normalize(self.fc(self.convnet(x).flatten(1)))


class Triplets(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return tuple(torch.randn(1, 28, 28, generator=generator) for _ in range(3))


def train_epoch(model, loader, optimizer, criterion):
    total = 0.0
    for anchor, positive, negative in loader:
        optimizer.zero_grad()
        loss = criterion(model(anchor), model(positive), model(negative))
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def main():
    model = Embedding()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Triplets(), batch_size=16, shuffle=True)
    for _ in range(2):
        train_epoch(model, loader, optimizer, nn.TripletMarginLoss(margin=0.2))


if __name__ == "__main__":
    main()
