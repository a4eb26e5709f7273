"""A Trainer class in the style of Hugging Face, which keeps the outputs of the last batch for its logger."""
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class ModelOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Classifier(nn.Module):
    def __init__(self, vocabulary=2000, width=96, num_labels=400):
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True), 2)
        self.classifier = nn.Linear(width, num_labels)

    def forward(self, input_ids, labels=None):
        logits = self.classifier(self.encoder(self.embeddings(input_ids)))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
        return ModelOutput(loss, logits)


class Trainer:
    def __init__(self, model, train_dataset, eval_dataset, batch_size=16):
        self.model, self.batch_size = model, batch_size
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: max(0.0, 1 - step / 100))
        self.last_outputs = None
        self.history = []

    def compute_loss(self, inputs):
        outputs = self.model(*inputs)
        self.last_outputs = outputs  #! late deallocation -> pass
        return outputs.loss

    def training_step(self, inputs):
        self.model.train()
        loss = self.compute_loss(inputs)
        loss.backward()
        return loss.detach()

    def evaluate(self):
        self.model.eval()
        correct = total = 0
        with torch.no_grad():
            for input_ids, labels in DataLoader(self.eval_dataset, self.batch_size):
                predictions = self.model(input_ids).logits.argmax(-1)
                correct += (predictions == labels).sum().item()
                total += labels.numel()
        return correct / total

    def train(self, num_epochs):
        tr_loss = torch.tensor(0.0)
        for _ in range(num_epochs):
            for inputs in DataLoader(self.train_dataset, self.batch_size, shuffle=True):
                tr_loss += self.training_step(inputs)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.model.zero_grad()
            self.history.append((tr_loss.item(), self.evaluate()))


def dataset(size):
    return TensorDataset(torch.randint(2000, (size, 48)), torch.randint(400, (size, 48)))


if __name__ == "__main__":
    trainer = Trainer(Classifier(), dataset(96), dataset(32))
    trainer.train(2)
