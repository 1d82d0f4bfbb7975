"""A small GPT that learns to write like the standard library's documentation, from the copy you have.

    python examples/tiny_gpt.py
    swell run --workers 1:4 --name gpt examples/tiny_gpt.py --mode adaptive

Characters of the docstrings of every top-level module are the text; the last tenth of it is for validation.
Knowing nothing costs 4.6 nats for each character, knowing their frequencies 3.1; a minute of training gets
to about 2.0, and the sample at the end begins to look like words.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import swell

ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A character-level GPT on Python's own documentation.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of a step, over all workers")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--mode", choices=["fixed", "adaptive", "consistent"], default="fixed")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--windows", type=int, default=6000, help="pieces of text in one epoch")
    parser.add_argument("--fetch-ms", type=float, default=0.0, help="as if a sample came from slow storage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, weights stay float32")
    return parser.parse_args()


def documentation() -> Tensor:
    """The docstrings of the standard library's top-level modules, as numbers of characters."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        documented = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
        texts += [ast.get_docstring(node) or "" for node in documented]
    number = {character: index for index, character in enumerate(ALPHABET)}
    return torch.tensor([number[c] for c in "\n".join(filter(None, texts)) if c in number])


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """`count` pieces of `context` characters, evenly spread over the text, each with what follows."""

    def __init__(self, text: Tensor, context: int, count: int) -> None:
        self.text, self.context, self.count = text, context, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * (len(self.text) - self.context - 1) // self.count
        piece = self.text[begin : begin + self.context + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Attention to what came before, then a little thinking."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.queries_keys_values(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in split)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Next-character prediction."""

    def __init__(self, context: int, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        here = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.characters(x) + self.positions(here))))

    @torch.no_grad()
    def write(self, opening: str, length: int, seed: int) -> str:
        """Go on from `opening`."""
        generator = torch.Generator().manual_seed(seed)
        device = self.head.weight.device
        text = torch.tensor([[ALPHABET.index(c) for c in opening]])
        for _ in range(length):
            odds = self(text[:, -self.context :].to(device))[:, -1].float().softmax(-1).cpu()
            text = torch.cat([text, torch.multinomial(odds, 1, generator=generator)], dim=1)
        return "".join(ALPHABET[i] for i in text[0].tolist())


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    text = documentation()
    cut = len(text) * 9 // 10
    train_set = Windows(text[:cut], args.context, args.windows)
    valid_set = Windows(text[cut:], args.context, 512)
    model = GPT(args.context, args.width, args.layers).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    job = swell.elastic(model, optimizer, mode=args.mode, clip_norm=1.0, seed=args.seed)  # swell
    train_loader = job.loader(train_set, batch_size=args.batch_size)  # swell
    valid_loader = job.loader(valid_set, batch_size=64, train=False)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            logits = model(x.to(args.device))
        return F.cross_entropy(logits.float().flatten(0, 1), y.to(args.device).flatten())

    def validation() -> float:
        model.eval()
        total = samples = 0.0
        with torch.no_grad():
            for x, y in valid_loader:
                total += loss_of(x, y).item() * len(x)
                samples += len(x)
        return job.mean(total / max(samples, 1), weight=samples)  # over all workers

    loss = float("nan")
    for epoch in job.epochs(args.epochs):  # swell
        model.train()
        for x, y in train_loader:
            time.sleep(args.fetch_ms / 1000 * len(x))
            job.step(loss_of(x, y))  # swell
        loss = validation()
        job.log(validation_loss=loss)
        if job.is_leader:
            print(f"epoch {epoch + 1}  workers {job.world}  validation loss {loss:.4f}", flush=True)
    if job.is_leader:
        print(model.write("Return the ", 120, args.seed))
        print(f"final validation loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
