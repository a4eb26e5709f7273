"""Forward hooks that capture the activations of every layer for a monitor whose report is switched off."""
import torch
from torch import nn


class Monitor:
    def __init__(self, model):
        self.outputs = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self.capture(name))

    def capture(self, name):
        def hook(module, inputs, output):
            self.outputs[name] = output  #! late deallocation -> pass

        return hook

    def report(self):
        return {name: output.std().item() for name, output in self.outputs.items()}


def main():
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 32))
    monitor, log_every = Monitor(model), 0
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(8):
        x, y = torch.randn(1024, 256), torch.randint(32, (1024,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if log_every and step % log_every == 0:
            print(monitor.report())


main()
