"""Segmentation with a Dice loss on one-hot targets; predictions and targets stay in variables through backward."""
import torch
from torch import nn
from torch.nn import functional as F

NUM_CLASSES = 12


class FCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
        self.decoder = nn.Conv2d(32, NUM_CLASSES, 1)

    def forward(self, x):
        return F.interpolate(self.decoder(self.encoder(x)), scale_factor=4, mode="bilinear", align_corners=False)


def dice_loss(pred, target):
    probs = torch.softmax(pred, dim=1)
    onehot = F.one_hot(target, NUM_CLASSES).permute(0, 3, 1, 2).float()
    intersection = (probs * onehot).sum((0, 2, 3))
    union = probs.sum((0, 2, 3)) + onehot.sum((0, 2, 3))
    return 1 - (2 * intersection / (union + 1e-6)).mean()


def train(net, optimizer, scheduler, num_steps):
    net.train()
    for step in range(num_steps):
        images, masks = torch.randn(4, 3, 64, 64), torch.randint(NUM_CLASSES, (4, 64, 64))
        masks_pred = net(images)
        loss = F.cross_entropy(masks_pred, masks) + dice_loss(masks_pred, masks)
        pass  #! late deallocation -> del masks_pred
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()


def main():
    net = FCN()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.9)
    train(net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10), 8)


if __name__ == "__main__":
    main()
