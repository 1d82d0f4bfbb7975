"""A recurrent language model: the batch is the second dimension, the rate is divided when validation stalls
(after pytorch/examples/word_language_model)."""

import math

import torch
import torch.nn as nn

torch.manual_seed(1111)
corpus = torch.tensor([(7 * i + i * i // 5 + i // 3) % 31 for i in range(4200)])
bptt, eval_batch_size, clip = 12, 4, 0.25
lr = 8.0


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


train_data, val_data = batchify(corpus[:3600], 12), batchify(corpus[3600:], eval_batch_size)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(31, 16), nn.LSTM(16, 16, 1)
        self.decoder = nn.Linear(16, 31)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return nn.functional.log_softmax(self.decoder(output).view(-1, 31), dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(1, bsz, 16), weight.new_zeros(1, bsz, 16)


model = RNNModel()
criterion = nn.NLLLoss()


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def evaluate(data_source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(eval_batch_size)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train(epoch):
    model.train()
    total_loss = 0.0
    hidden = model.init_hidden(12)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        if batch % 10 == 0 and batch > 0:
            print(f"| epoch {epoch} | {batch} batches | lr {lr:.2f} | loss {total_loss / 10:5.3f}")
            total_loss = 0.0


best_val_loss = None
for epoch in range(1, 8):
    train(epoch)
    val_loss = evaluate(val_data)
    print(f"| end of epoch {epoch} | valid loss {val_loss:5.3f} | valid ppl {math.exp(val_loss):8.3f}")
    if not best_val_loss or val_loss < best_val_loss:
        with open("model.pt", "wb") as f:
            torch.save(model, f)
        best_val_loss = val_loss
    else:
        lr /= 4.0
torch.save(model.state_dict(), "final.pt")
