"""Five folds, each with a model and an optimizer of its own, and the mean of their scores."""

import numpy as np
import torch
from sklearn.model_selection import KFold
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

torch.manual_seed(42)
X = torch.randn(250, 5)
dataset = TensorDataset(X, (X[:, :1] * X[:, 1:2] + X[:, 2:3]))


def reset_weights(m):
    if hasattr(m, "reset_parameters"):
        m.reset_parameters()


results = {}
for fold, (train_ids, test_ids) in enumerate(KFold(n_splits=5, shuffle=True, random_state=0).split(X)):
    print(f"FOLD {fold}")
    trainloader = DataLoader(dataset, batch_size=20, sampler=SubsetRandomSampler(train_ids))
    testloader = DataLoader(dataset, batch_size=50, sampler=SubsetRandomSampler(test_ids))
    network = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    network.apply(reset_weights)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for epoch in range(5):
        current_loss = 0.0
        for inputs, targets in trainloader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(network(inputs), targets)
            loss.backward()
            optimizer.step()
            current_loss += loss.item()
        print(f"Loss after epoch {epoch + 1}: {current_loss / len(trainloader):.4f}")
    torch.save(network.state_dict(), f"model-fold-{fold}.pth")
    with torch.no_grad():
        scores = [nn.functional.mse_loss(network(a), b).item() for a, b in testloader]
    results[fold] = float(np.mean(scores))
for key, value in results.items():
    print(f"Fold {key}: {value:.4f}")
print(f"Average: {np.mean(list(results.values())):.4f}")
