"""Handwritten digits with Lightning's Trainer.fit, as its documentation writes it: no line is swell's.

    python examples/lightning_digits.py
    swell run --auto --workers 1:3 --name lightning examples/lightning_digits.py
    swell resize lightning 3                                    (from a second terminal)

It needs `pip install lightning`. The data are scikit-learn's.
"""

import argparse
import logging
import sys
import warnings

try:
    import lightning as L
except ImportError as missing:
    sys.exit(f"this example needs Lightning: pip install lightning ({missing})")

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Digits(L.LightningModule):
    def __init__(self, lr, epochs):
        super().__init__()
        self.lr, self.epochs = lr, epochs
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            print(
                f"epoch {self.current_epoch + 1}  accuracy {self.trainer.callback_metrics['accuracy']:.4f}",
                flush=True,
            )

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]


def main():
    parser = argparse.ArgumentParser(description="Digits, with Lightning.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    L.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, valid = torch.utils.data.random_split(data, [1437, 360])
    trainer = L.Trainer(
        max_epochs=args.epochs, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    model = Digits(args.lr, args.epochs)
    trainer.fit(model, DataLoader(train, 32, shuffle=True), DataLoader(valid, 360))
    print(f"final accuracy {trainer.callback_metrics['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    main()
