"""Lightning's Trainer.fit: accumulation, bf16, clipping, schedule, validation, checkpoints, resume."""

import json
import logging
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from tools.pace import WIDTH, Pace

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
epochs, pace, folder = int(sys.argv[1]), Pace(sys.argv[2]), sys.argv[3]
# stop (after so many epochs), resume, best (0: each epoch saves one checkpoint, the last)
options = dict(option.split("=") for option in sys.argv[4:])


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.batches = 0

    def training_step(self, batch, batch_idx):
        pace.pause(len(batch[0]) / 20)
        self.batches += 1
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.4 / WIDTH, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)]


torch.manual_seed(3)
x = torch.randn(168, 4)
y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]]) + 0.1 * torch.randn(168, 1)
train = DataLoader(TensorDataset(x[:160], y[:160]), batch_size=20, shuffle=True)
valid = DataLoader(TensorDataset(x[160:], y[160:]), batch_size=4)
best = ModelCheckpoint(
    folder, monitor="val_loss", filename="best", save_last=True, save_top_k=int(options.get("best", 1))
)
trainer = L.Trainer(
    max_epochs=int(options.get("stop", epochs)),
    accelerator="cpu",
    devices=1,
    logger=False,
    callbacks=[best],
    enable_progress_bar=False,
    enable_model_summary=False,
    gradient_clip_val=5.0,
    accumulate_grad_batches=2,
    precision="bf16-mixed",
)
model = Regression()
trainer.fit(model, train, valid, ckpt_path=f"{folder}/last.ckpt" if "resume" in options else None)
result = {
    "final": trainer.callback_metrics["val_loss"].item(),
    "steps": trainer.global_step,
    "epoch": trainer.current_epoch,
    "batches": model.batches,
    "lr": trainer.optimizers[0].param_groups[0]["lr"],
    "best": best.best_model_path.rsplit("/", 1)[-1],
}
print("result", json.dumps(result))
