"""A training loop with a Lightning `Trainer`: `ekiden run fedavg --loop with_lightning.py:train`."""

import lightning
import torch

import ekiden


class Classifier(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@ekiden.train
def train(model, loader):
    trainer = lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(model), loader)
    return model
