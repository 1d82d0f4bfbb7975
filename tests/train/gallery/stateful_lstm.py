"""The hidden state goes from one batch to the next: the samples of a batch are streams."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Streams(Dataset):
    """Item i is the next piece of stream i % streams."""

    def __init__(self, streams, pieces, length):
        t = torch.arange(pieces * length + 1) / 6.0
        g = torch.Generator().manual_seed(0)
        self.series = torch.sin(t + 6.28 * torch.rand(streams, 1, generator=g))
        self.streams, self.pieces, self.length = streams, pieces, length

    def __len__(self):
        return self.streams * self.pieces

    def __getitem__(self, i):
        piece, stream = divmod(i, self.streams)
        part = self.series[stream, piece * self.length : (piece + 1) * self.length + 1]
        return part[:-1].unsqueeze(1), part[1:].unsqueeze(1)


class LSTMNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(1, 12, batch_first=True), nn.Linear(12, 1)

    def forward(self, x, state=None):
        out, state = self.lstm(x, state)
        return self.fc(out), state


torch.manual_seed(0)
loader = DataLoader(Streams(12, 10, 8), batch_size=12, shuffle=False)
model = LSTMNet()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(15):
    state, total = None, 0.0
    for x, y in loader:
        if state is not None:
            state = tuple(s.detach() for s in state)
        out, state = model(x, state)
        loss = nn.functional.mse_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total / len(loader):.6f}")
torch.save(model.state_dict(), "model.pt")
