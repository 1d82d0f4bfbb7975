"""Encoder, decoder and attention over padded sequences, collated time first; teacher forcing
is drawn with `random`."""

import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD, SOS = 0, 1
random.seed(4)
torch.manual_seed(4)
pairs = []
for _ in range(240):
    source = torch.randint(2, 12, (random.randint(3, 7),))
    pairs.append((source, torch.cat([torch.tensor([SOS]), source.flip(0)])))


def collate(batch):
    src, trg = zip(*batch, strict=True)
    return pad_sequence(src, padding_value=PAD), pad_sequence(trg, padding_value=PAD)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(12, 12), nn.GRU(12, 20)

    def forward(self, src):
        return self.rnn(self.embedding(src))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(12, 12), nn.GRU(32, 20)
        self.fc_out = nn.Linear(40, 12)

    def forward(self, input, hidden, outputs):
        attention = torch.softmax((outputs * hidden).sum(2), dim=0)
        context = (attention.unsqueeze(2) * outputs).sum(0, keepdim=True)
        output, hidden = self.rnn(torch.cat([self.embedding(input.unsqueeze(0)), context], 2), hidden)
        return self.fc_out(torch.cat([output[0], context[0]], 1)), hidden


class Seq2Seq(nn.Module):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        steps = []
        outputs, hidden = self.encoder(src)
        input = trg[0]
        for t in range(1, trg.shape[0]):
            output, hidden = self.decoder(input, hidden, outputs)
            steps.append(output)
            input = trg[t] if random.random() < teacher_forcing_ratio else output.argmax(1)
        return torch.stack(steps)


loader = DataLoader(pairs, batch_size=24, shuffle=True, collate_fn=collate)
model = Seq2Seq(Encoder(), Decoder())
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
for epoch in range(12):
    epoch_loss = 0.0
    for src, trg in loader:
        optimizer.zero_grad()
        output = model(src, trg)
        loss = criterion(output.view(-1, 12), trg[1:].view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        epoch_loss += loss.item()
    print(f"Epoch: {epoch + 1:02} | Train Loss: {epoch_loss / len(loader):.3f}")
torch.save(model.state_dict(), "seq2seq.pt")
