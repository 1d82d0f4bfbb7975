"""Classification of graphs: the graphs of a batch are joined into one, as PyG does."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Graphs(Dataset):
    def __init__(self, count):
        g = torch.Generator().manual_seed(11)
        self.items = []
        for _ in range(count):
            nodes = int(torch.randint(4, 9, (1,), generator=g))
            x = torch.randn(nodes, 4, generator=g)
            edges = torch.randint(0, nodes, (2, 2 * nodes), generator=g)
            y = int((x[edges[0], 0] * x[edges[1], 1]).mean() > 0)
            self.items.append((x, edges, y))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    xs, edges, batch, ys, offset = [], [], [], [], 0
    for i, (x, e, y) in enumerate(items):
        xs.append(x)
        edges.append(e + offset)
        batch.append(torch.full((len(x),), i))
        ys.append(y)
        offset += len(x)
    return torch.cat(xs), torch.cat(edges, 1), torch.cat(batch), torch.tensor(ys)


class GNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2, self.out = nn.Linear(8, 16), nn.Linear(32, 16), nn.Linear(16, 2)

    def conv(self, lin, x, edges):
        messages = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        return torch.relu(lin(torch.cat([x, messages], 1)))

    def forward(self, x, edges, batch):
        x = self.conv(self.lin2, self.conv(self.lin1, x, edges), edges)
        size = int(batch.max()) + 1
        pooled = torch.zeros(size, x.shape[1]).index_add(0, batch, x)
        return self.out(pooled / torch.bincount(batch, minlength=size).unsqueeze(1))


torch.manual_seed(11)
loader = DataLoader(Graphs(300), batch_size=30, shuffle=True, collate_fn=collate)
model = GNN()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(15):
    loss_all = correct = 0
    for x, edges, batch, y in loader:
        optimizer.zero_grad()
        out = model(x, edges, batch)
        loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        loss_all += loss.item() * len(y)
        correct += int((out.argmax(1) == y).sum())
        optimizer.step()
    print(f"Epoch: {epoch:03d}, Loss: {loss_all / 300:.5f}, Acc: {correct / 300:.4f}")
torch.save(model.state_dict(), "gnn.pt")
