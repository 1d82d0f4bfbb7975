"""A recommender: who likes what, from 60,000 ratings, by matrix factorisation.

    python examples/recommender.py
    swell run --workers 1:4 --name films examples/recommender.py

The ratings are made up here, from hidden tastes and a known amount of noise, so we know how good a model can
possibly be: its error cannot go below 0.30. A few epochs get within a fifth of that; guessing the mean costs
about 1.0.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import swell

USERS, ITEMS, TASTES, NOISE = 600, 400, 4, 0.3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Matrix factorisation with embeddings.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=256, help="of a step, over all workers")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--mode", choices=["fixed", "adaptive", "consistent"], default="fixed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, weights stay float32")
    return parser.parse_args()


def ratings() -> tuple[TensorDataset, TensorDataset]:
    """60,000 ratings to learn from and 6,000 to be tested with, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    users = torch.randn(USERS, TASTES, generator=generator) / TASTES**0.25
    items = torch.randn(ITEMS, TASTES, generator=generator) / TASTES**0.25
    pairs = torch.randperm(USERS * ITEMS, generator=generator)[:66_000]
    who, what = pairs // ITEMS, pairs % ITEMS
    rating = (users[who] * items[what]).sum(1) + NOISE * torch.randn(len(pairs), generator=generator)
    columns = (who, what, rating)
    return TensorDataset(*(c[:60_000] for c in columns)), TensorDataset(*(c[60_000:] for c in columns))


class Factors(nn.Module):
    """A rating is how well the user's taste and the item's character agree, plus what each adds alone."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        self.user_bias, self.item_bias = nn.Embedding(USERS, 1), nn.Embedding(ITEMS, 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)
        for table in (self.user_bias, self.item_bias):
            nn.init.zeros_(table.weight)

    def forward(self, who: Tensor, what: Tensor) -> Tensor:
        agreement = (self.users(who) * self.items(what)).sum(-1)
        return agreement + self.user_bias(who).squeeze(-1) + self.item_bias(what).squeeze(-1)


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    train_set, test_set = ratings()
    model = Factors().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    job = swell.elastic(model, optimizer, scheduler=scheduler, mode=args.mode, seed=args.seed)  # swell
    train_loader = job.loader(train_set, batch_size=args.batch_size)  # swell
    test_loader = job.loader(test_set, batch_size=2000, train=False)

    def loss_of(who: Tensor, what: Tensor, rating: Tensor) -> Tensor:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            guess = model(who.to(args.device), what.to(args.device))
        return F.mse_loss(guess.float(), rating.to(args.device))

    def error() -> float:
        """Root mean square error over the test ratings of all workers."""
        squares = seen = 0.0
        with torch.no_grad():
            for who, what, rating in test_loader:
                squares += loss_of(who, what, rating).item() * len(rating)
                seen += len(rating)
        total = job.reduce(squares=squares, seen=seen)
        return (total["squares"] / total["seen"]) ** 0.5

    score = float("nan")
    for epoch in job.epochs(args.epochs):  # swell
        for who, what, rating in train_loader:
            job.step(loss_of(who, what, rating))  # swell
        score = error()
        job.log(rmse=score)
        if job.is_leader:
            print(f"epoch {epoch + 1:2d}  workers {job.world}  test error {score:.4f}", flush=True)
    if job.is_leader:
        print(f"final test error {score:.4f} (noise alone: {NOISE:.4f})", flush=True)


if __name__ == "__main__":
    main()
