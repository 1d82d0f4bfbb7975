"""A script that logs by itself: to TensorBoard, MLflow and Weights & Biases (offline)."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(Path(__file__).parent))
from tools.pace import Pace

epochs, pace, folder = int(sys.argv[1]), Pace(sys.argv[2]), sys.argv[3]
os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
import mlflow
import wandb

mlflow.set_tracking_uri(f"file:{folder}/mlruns")
mlflow.set_experiment("plain")
run = wandb.init(project="plain", dir=folder, config={"epochs": epochs})
writer = SummaryWriter(f"{folder}/board")
torch.manual_seed(3)
x = torch.randn(160, 4)
y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
step = 0
with mlflow.start_run():
    mlflow.log_param("epochs", epochs)
    for epoch in range(epochs):
        for a, b in loader:
            pace.pause(len(a) / 20)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(a), b)
            loss.backward()
            optimizer.step()
            step += 1
            writer.add_scalar("loss", loss.item(), step)
            mlflow.log_metric("loss", loss.item(), step=step)
            wandb.log({"loss": loss.item(), "at": step})
writer.close()
run.finish()
print(json.dumps({"steps": step}))
