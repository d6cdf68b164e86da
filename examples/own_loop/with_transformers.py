"""A training loop with a `Trainer` of transformers: `ekiden run fedavg --loop with_transformers.py:train`."""

import torch
import transformers

import ekiden


class Trainer(transformers.Trainer):
    def compute_loss(self, model, inputs, **others):
        x, y = inputs
        return torch.nn.functional.cross_entropy(model(x), y)


@ekiden.train
def train(model, loader):
    how = transformers.TrainingArguments(
        "trainer", num_train_epochs=1, learning_rate=1e-3, save_strategy="no", report_to=[]
    )
    trainer = Trainer(model, how, train_dataset=loader.dataset)
    trainer.get_train_dataloader = lambda: loader
    trainer.train()
    return model
