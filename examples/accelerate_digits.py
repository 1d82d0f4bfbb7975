"""Handwritten digits with an Accelerate loop, as its documentation writes it: no line is swell's.

    python examples/accelerate_digits.py
    swell run --auto --workers 1:3 --name accelerate examples/accelerate_digits.py
    swell resize accelerate 3                                   (from a second terminal)

It needs `pip install accelerate`. Gradients of two batches are added up before each step. The data are
scikit-learn's.
"""

import argparse
import sys

try:
    from accelerate import Accelerator
except ImportError as missing:
    sys.exit(f"this example needs Accelerate: pip install accelerate ({missing})")

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def main():
    parser = argparse.ArgumentParser(description="Digits, with Accelerate.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    train, valid = random_split(TensorDataset(images, torch.tensor(digits.target)), [1437, 360])
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.7)
    model, optimizer, train_loader, valid_loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(train, 16, shuffle=True), DataLoader(valid, 360), scheduler
    )
    accuracy = 0.0
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = [(model(images).argmax(1) == labels).float().mean() for images, labels in valid_loader]
        accuracy = sum(right).item() / len(right)
        accelerator.print(f"epoch {epoch + 1}  accuracy {accuracy:.4f}", flush=True)
    accelerator.print(f"final accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
