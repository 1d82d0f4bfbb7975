"""The script behind `quality` and `disaster`: two small tasks trained to a validation score, in any batch
mode.

    python -m benchmarks.runtime.quality_task --task digits --out result.json
    swell run --workers 1:3 benchmarks/runtime/quality_task.py --task gpt --mode adaptive --out result.json

The leader writes a JSON with the score (higher is better), steps, passes over the data and the noise scale.
With `--measure-noise` training ends with steps at a learning rate of 0, after which the noise scale is also
measured directly, from many gradients at those weights.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import swell
from swell.train.modes.noise import direct_noise_scale

TOKENS = 48
"""Length of the text windows the language model sees."""


@dataclass(frozen=True, slots=True)
class Task:
    """Model, data, optimizer and score of one task."""

    model: nn.Module
    train: Dataset[Any]
    optimizer: torch.optim.Optimizer
    batch_size: int
    max_batch: int
    epochs: int
    loss: Callable[[nn.Module, Any], Tensor]
    score: Callable[[nn.Module], float]


def digits() -> Task:
    """A convolutional network on scikit-learn's handwritten digits; scored by accuracy."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(7))
    x = (torch.tensor(images, dtype=torch.float32) / 16).reshape(-1, 1, 8, 8)[order]
    y = torch.tensor(labels)[order]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def score(model: nn.Module) -> float:
        return float((model(x[1400:]).argmax(1) == y[1400:]).float().mean())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    return Task(model, TensorDataset(x[:1400], y[:1400]), optimizer, 32, 448, 12, loss, score)


class SmallGPT(nn.Module):
    """Two causal transformer layers over bytes."""

    def __init__(self, vocabulary: int, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(TOKENS, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TOKENS), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next byte at every position."""
        hidden = self.token(tokens) + self.position
        out: Tensor = self.head(self.body(hidden, mask=self.mask, is_causal=True))
        return out


def gpt() -> Task:
    """A small GPT on the help texts that come with Python; scored by the negative validation loss."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))[:170_000]
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([letters[letter] for letter in text])
    windows = tokens[: len(tokens) // (TOKENS + 1) * (TOKENS + 1)].reshape(-1, TOKENS + 1)
    held_out = windows[-200:]
    model = SmallGPT(len(letters))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        (rows,) = batch
        scores = model(rows[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())

    @torch.no_grad()
    def score(model: nn.Module) -> float:
        return -float(loss(model, (held_out,)))

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return Task(model, TensorDataset(windows[:-200]), optimizer, 16, 256, 2, loss, score)


TASKS = {"digits": digits, "gpt": gpt}


def gradients(task: Task, draws: int, batch: int, weights: list[Tensor] | None) -> Iterator[Tensor]:
    """Independent gradients at the present weights, preconditioned as the job does it."""
    generator = torch.Generator().manual_seed(12345)
    data = task.train
    size = len(data)  # type: ignore[arg-type]
    for _ in range(draws):
        picked = torch.randint(size, (batch,), generator=generator).tolist()
        task.model.zero_grad()
        task.loss(task.model, torch.utils.data.default_collate([data[i] for i in picked])).backward()
        parts = [p.grad.reshape(-1) for p in task.model.parameters() if p.grad is not None]
        if weights is not None:
            parts = [g * w for g, w in zip(parts, weights, strict=True)]
        yield torch.cat(parts)


def main() -> None:
    """Train one task and write its result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=list(TASKS), default="digits")
    parser.add_argument("--mode", choices=["fixed", "adaptive", "consistent"], default="fixed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--epochs", type=float, default=1.0, help="multiple of the task's own number of epochs"
    )
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
    parser.add_argument("--measure-noise", type=int, default=0, metavar="STEPS")
    parser.add_argument("--checkpoint-steps", type=int, default=None)
    parser.add_argument("--checkpoints", type=Path, default=None)
    parser.add_argument("--trace", type=Path, help="file that gets the number of every committed step")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    task = TASKS[options.task]()
    job = swell.elastic(
        task.model,
        task.optimizer,
        mode=options.mode,
        seed=options.seed,
        max_batch=task.max_batch,
        checkpoint_dir=options.checkpoints,
        checkpoint_every_s=None,
        checkpoint_every_steps=options.checkpoint_steps,
    )
    loader = job.loader(task.train, batch_size=task.batch_size)
    train_epochs = max(1, round(task.epochs * options.epochs))
    worlds: set[int] = set()
    freeze_at: int | None = None
    over = False
    for epoch in job.epochs(
        train_epochs if not options.measure_noise else 1000, by="data" if options.measure_noise else None
    ):
        if options.measure_noise and epoch >= train_epochs and freeze_at is None:
            freeze_at = job.steps
        for batch in loader:
            if options.pace:
                time.sleep(options.pace)
            if not job.step(task.loss(task.model, batch)):
                continue
            worlds.add(job.world)
            if options.trace is not None and job.is_leader:
                with options.trace.open("a") as file:
                    file.write(f"{job.steps}\n")
            if freeze_at is not None and job.steps == freeze_at + 1:
                for group in task.optimizer.param_groups:
                    group["lr"] = 0.0
                job.adaptive.noise.restart()
            over = freeze_at is not None and job.steps >= freeze_at + 1 + options.measure_noise
            if over:
                break
        if over:
            break
    if not job.is_leader:
        return
    result: dict[str, Any] = {
        "task": options.task,
        "mode": options.mode,
        "seed": options.seed,
        "score": task.score(task.model),
        "steps": job.steps,
        "passes": job.epoch,
        "worlds": sorted(worlds),
    }
    if options.measure_noise:
        result["noise_scale"] = job.adaptive.noise_scale
        result["noise_biased"] = job.adaptive.noise.biased
        weights = job.adaptive.preconditioner
        result["direct_noise_scale"] = direct_noise_scale(
            gradients(task, 600, task.batch_size, weights), task.batch_size
        )
    options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
