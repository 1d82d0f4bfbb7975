"""A training loop in the style of nanoGPT: steps, not epochs; batches of random offsets into one long text.

    python examples/nano_gpt.py
    swell run --workers 1:3 --name nano examples/nano_gpt.py
    swell resize nano 3                                         (from a second terminal)

Five lines are swell's; each says what a plain script has in its place. The model and the text are those of
tiny_gpt.py beside it. Knowing nothing costs 4.6 nats for each character, knowing their frequencies 3.1.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from tiny_gpt import GPT, documentation
from torch import Tensor

import swell


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A character-level GPT, trained by steps.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=32, help="of a step, over all workers")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    text = documentation()
    cut = len(text) * 9 // 10
    train_text, valid_text = text[:cut], text[cut:]
    model = GPT(args.context, args.width, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, betas=(0.9, 0.95))

    def windows(source: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        pieces = torch.stack([source[i : i + args.context + 1] for i in offsets.tolist()])
        return pieces[:, :-1], pieces[:, 1:]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    @torch.no_grad()
    def validation() -> float:
        model.eval()
        chosen = torch.Generator().manual_seed(1)
        offsets = torch.randint(len(valid_text) - args.context, (256,), generator=chosen)
        loss = loss_of(*windows(valid_text, offsets)).item()
        model.train()
        return loss

    def lr_at(step: int) -> float:
        if step < args.warmup:
            return args.lr * (step + 1) / args.warmup
        done = (step - args.warmup) / max(args.steps - args.warmup, 1)
        return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    job = swell.elastic(model, optimizer, clip_norm=1.0, seed=args.seed)  # swell 1: instead of nothing
    for step in job.loop(args.steps):  # swell 2: instead of range(args.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        # swell 3: instead of torch.randint(len(train_text) - args.context, (args.batch_size,))
        offsets = job.sample(len(train_text) - args.context, args.batch_size)
        loss = loss_of(*windows(train_text, offsets))
        job.step(loss)  # swell 4: instead of zero_grad(), backward(), clip_grad_norm_() and step()
        if step % args.eval_every == 0 and job.is_leader:  # swell 5: instead of every worker
            print(f"step {step}  workers {job.world}  validation loss {validation():.4f}", flush=True)
    if job.is_leader:
        print(model.write("Return the ", 120, args.seed))
        print(f"final validation loss {validation():.4f}", flush=True)


if __name__ == "__main__":
    main()
