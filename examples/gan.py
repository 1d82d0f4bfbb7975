"""A GAN that learns to draw scikit-learn's handwritten digits: two models, two optimizers, one elastic job.

    python examples/gan.py
    swell run --workers 1:3 --name gan examples/gan.py
    swell resize gan 3                                          (from a second terminal)

The quality is the Frechet distance between 1,000 drawn digits and the real ones, on their pixels: 0 for
drawings like the data, about 10 for noise. A minute on two cores gets below 2. The last drawings are shown.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import swell

NOISE = 32


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A GAN on 8x8 digits.")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64, help="of a step, over all workers")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def distance(drawn: Tensor, real: Tensor) -> float:
    """The Frechet distance between two sets of images, as if their pixels were normally distributed."""
    (mean_a, cov_a), (mean_b, cov_b) = (
        (x.mean(0), np.cov(x, rowvar=False)) for x in (drawn.numpy(), real.numpy())
    )
    overlap = np.sqrt(np.clip(np.linalg.eigvals(cov_a @ cov_b).real, 0, None)).sum()
    return float(((mean_a - mean_b) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * overlap)


def show(images: Tensor) -> str:
    """Some digits side by side, in characters."""
    rows = images.view(-1, 8, 8).clamp(0, 1).mul(4).round().int()
    return "\n".join(
        "   ".join("".join(" .+#@"[p] * 2 for p in image[row]) for image in rows) for row in range(8)
    )


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    real = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16
    maker = nn.Sequential(
        nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
    )
    critic = nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)
    )
    make = torch.optim.Adam(maker.parameters(), lr=args.lr, betas=(0.0, 0.99))
    judge = torch.optim.Adam(critic.parameters(), lr=args.lr, betas=(0.0, 0.99))

    job = swell.elastic([maker, critic], [make, judge], seed=args.seed)  # swell
    loader = job.loader(TensorDataset(real), batch_size=args.batch_size)  # swell
    fixed = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(args.seed))

    for epoch in job.epochs(args.epochs):  # swell
        for (images,) in loader:
            images.requires_grad_()
            drawn, yes = maker(torch.randn(len(images), NOISE)), critic(images)
            (slope,) = torch.autograd.grad(yes.sum(), images, create_graph=True)
            critics = F.softplus(-yes).mean() + F.softplus(critic(drawn.detach())).mean()
            critics = critics + 0.05 * slope.square().sum(1).mean()  # a flat critic keeps the two in balance
            makers = F.softplus(-critic(drawn)).mean()
            job.step([makers, critics])  # swell: each loss changes the parameters of its own optimizer
        if (epoch + 1) % 10 == 0 and job.is_leader:
            with torch.no_grad():
                print(
                    f"epoch {epoch + 1}  workers {job.world}  distance {distance(maker(fixed), real):.3f}",
                    flush=True,
                )
    if job.is_leader:
        with torch.no_grad():
            print(show(maker(fixed[:6])))
            print(f"final distance {distance(maker(fixed), real):.4f}", flush=True)


if __name__ == "__main__":
    main()
