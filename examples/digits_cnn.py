"""A small convolutional network on scikit-learn's handwritten digits: 98% in under a minute.

    python examples/digits_cnn.py                               (one device, nothing else needed)
    swell run --workers 1:4 --name digits examples/digits_cnn.py
    swell resize digits 3                                       (from a second terminal)

What makes the plain loop elastic are the five lines marked with `# swell`.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import swell


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A CNN on 8x8 digits.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="of a step, over all workers")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--mode", choices=["fixed", "adaptive", "consistent"], default="fixed")
    parser.add_argument("--fetch-ms", type=float, default=0.0, help="as if a sample came from slow storage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, weights stay float32")
    return parser.parse_args()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train on and 360 to test with, the same split every time."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 10),
    )


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    train_set, test_set = digits()
    model = network().to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    job = swell.elastic(model, optimizer, scheduler=scheduler, mode=args.mode, seed=args.seed)  # swell
    train_loader = job.loader(train_set, batch_size=args.batch_size)  # swell
    test_loader = job.loader(test_set, batch_size=360, train=False)  # swell

    def forward(images: torch.Tensor) -> torch.Tensor:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            return model(images.to(args.device)).float()

    def accuracy() -> float:
        model.eval()
        right = seen = 0
        with torch.no_grad():
            for images, labels in test_loader:
                right += (forward(images).argmax(1).cpu() == labels).sum().item()
                seen += len(labels)
        total = job.reduce(right=right, seen=seen)  # over all workers
        return total["right"] / total["seen"]

    score = 0.0
    for epoch in job.epochs(args.epochs):  # swell
        model.train()
        for images, labels in train_loader:
            time.sleep(args.fetch_ms / 1000 * len(images))
            job.step(F.cross_entropy(forward(images), labels.to(args.device)))  # swell
        score = accuracy()
        job.log(accuracy=score)
        if job.is_leader:
            print(f"epoch {epoch + 1:2d}  workers {job.world}  accuracy {score:.4f}", flush=True)
    if job.is_leader:
        print(f"final accuracy {score:.4f}", flush=True)


if __name__ == "__main__":
    main()
