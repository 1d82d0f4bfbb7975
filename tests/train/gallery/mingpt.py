"""minGPT's trainer class: callbacks, and a loader that is begun anew when it is used up."""

from collections import defaultdict

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader


class SortDataset(Dataset):
    def __init__(self, length=6, num_digits=3):
        g = torch.Generator().manual_seed(9)
        self.rows = torch.randint(num_digits, (512, length), generator=g)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, idx):
        inp = self.rows[idx]
        cat = torch.cat((inp, torch.sort(inp)[0]), dim=0)
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: len(inp) - 1] = -1
        return x, y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(3, 16), nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=True, activation="gelu", bias=False
        )
        self.h = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(11), persistent=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe.weight
        logits = self.head(self.h(x, mask=self.mask, is_causal=True))
        loss = F.cross_entropy(logits.view(-1, 3), targets.view(-1), ignore_index=-1)
        return logits, loss


class Trainer:
    def __init__(self, model, train_dataset, max_iters):
        self.model, self.train_dataset, self.max_iters = model, train_dataset, max_iters
        self.optimizer = None
        self.callbacks = defaultdict(list)
        self.iter_num = 0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        sampler = torch.utils.data.RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e7))
        train_loader = DataLoader(self.train_dataset, sampler=sampler, shuffle=False, batch_size=32)
        self.model.train()
        self.iter_num = 0
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = batch
            _, self.loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            if self.iter_num >= self.max_iters:
                break


def batch_end_callback(trainer):
    if trainer.iter_num % 20 == 0:
        print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}")


torch.manual_seed(3407)
trainer = Trainer(Model(), SortDataset(), 150)
trainer.add_callback("on_batch_end", batch_end_callback)
trainer.run()
torch.save(trainer.model.state_dict(), "model.pt")
