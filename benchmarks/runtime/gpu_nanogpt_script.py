"""A small GPT in the style of nanoGPT, in bf16: `gpu_nanogpt_script.py WEIGHTS FORM REST_S`.

FORM is `nanogpt` or `nanogpt-compiled`. Its batches are drawn by hand, and it knows nothing of swell. Every
step rests REST_S seconds.
"""

import math
import sys
import time
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

out, form, rest_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"
batch_size, block_size, n_layer, n_head, n_embd, vocabulary = 32, 128, 4, 4, 256, 97
learning_rate, max_iters, warmup_iters, grad_clip = 1e-3, 240, 20, 1.0
torch.manual_seed(1337)
numbers = np.arange(200_000, dtype=np.int64)
text = ((numbers * numbers + 3 * numbers) % 89 + numbers % 8).astype(np.uint16)
cast = torch.amp.autocast(device_type=device, dtype=torch.bfloat16) if device == "cuda" else nullcontext()


def get_batch():
    ix = torch.randint(len(text) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(text[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(text[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    if device == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn, self.proj = nn.Linear(n_embd, 3 * n_embd, bias=False), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.attn(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocabulary, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    return learning_rate * 0.5 * (1.0 + math.cos(math.pi * it / max_iters))


raw_model = GPT().to(device)
model = torch.compile(raw_model) if form == "nanogpt-compiled" else raw_model
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
X, Y = get_batch()
iter_num = 0
while iter_num < max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    with cast:
        logits, loss = model(X, Y)
    X, Y = get_batch()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    time.sleep(rest_s)
    iter_num += 1
    if iter_num % 20 == 0:
        print(f"epoch {iter_num} loss {loss.item():.6f}", flush=True)
torch.save({name: tensor.cpu() for name, tensor in raw_model.state_dict().items()}, out)
