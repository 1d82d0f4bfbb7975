"""A character model whose parameters the loop changes by itself, after the makemore lectures."""

import random

import torch
import torch.nn.functional as F

words = ["emma", "olivia", "ava", "isabella", "sophia", "mia", "amelia", "luna", "liam", "noah", "oliver"]
words += ["elijah", "james", "lucas", "mason", "ethan", "logan", "aria", "ella", "nora", "lily", "zoe"]
stoi = {s: i + 1 for i, s in enumerate(sorted(set("".join(words))))}
stoi["."] = 0
block_size = 3


def build_dataset(words):
    X, Y = [], []
    for w in words:
        context = [0] * block_size
        for ch in w + ".":
            X.append(context)
            Y.append(stoi[ch])
            context = [*context[1:], stoi[ch]]
    return torch.tensor(X), torch.tensor(Y)


random.seed(42)
random.shuffle(words)
n = int(0.8 * len(words))
Xtr, Ytr = build_dataset(words[:n])
Xdev, Ydev = build_dataset(words[n:])
g = torch.Generator().manual_seed(2147483647)
C = torch.randn((len(stoi), 4), generator=g)
W1 = torch.randn((12, 32), generator=g) * 0.2
b1 = torch.randn(32, generator=g) * 0.01
W2 = torch.randn((32, len(stoi)), generator=g) * 0.01
b2 = torch.randn(len(stoi), generator=g) * 0
parameters = [C, W1, b1, W2, b2]
for p in parameters:
    p.requires_grad = True

lossi = []
for i in range(200):
    ix = torch.randint(0, Xtr.shape[0], (32,), generator=g)
    emb = C[Xtr[ix]]
    h = torch.tanh(emb.view(-1, 12) @ W1 + b1)
    logits = h @ W2 + b2
    loss = F.cross_entropy(logits, Ytr[ix])
    for p in parameters:
        p.grad = None
    loss.backward()
    lr = 0.1 if i < 150 else 0.01
    for p in parameters:
        p.data += -lr * p.grad
    lossi.append(loss.log10().item())
    if i % 20 == 0:
        print(f"{i:7d}/{200:7d}: {loss.item():.4f}")
with torch.no_grad():
    logits = torch.tanh(C[Xdev].view(-1, 12) @ W1 + b1) @ W2 + b2
    print("dev", round(F.cross_entropy(logits, Ydev).item(), 4))
torch.save({"parameters": parameters, "lossi": lossi}, "makemore.pt")
