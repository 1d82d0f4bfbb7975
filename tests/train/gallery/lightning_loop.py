"""Lightning's Trainer with a schedule per epoch, validation and a checkpoint of the best."""

import json
import logging
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Rates(Callback):
    def __init__(self):
        self.lrs = []

    def on_train_epoch_end(self, trainer, module):
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])


L.seed_everything(7)
x = torch.randn(300, 5)
y = x.sin().sum(1, keepdim=True)
train = DataLoader(TensorDataset(x[:240], y[:240]), batch_size=20, shuffle=True)
val = DataLoader(TensorDataset(x[240:], y[240:]), batch_size=30)
rates, best = Rates(), ModelCheckpoint("checkpoints", "best", monitor="val_loss", save_weights_only=True)
trainer = L.Trainer(
    max_epochs=14, accelerator="cpu", logger=False, callbacks=[rates, best], enable_progress_bar=False,
    enable_model_summary=False, gradient_clip_val=1.0,
)  # fmt: skip
net = Net()
trainer.fit(net, train, val)
print(f"steps {trainer.global_step} best {best.best_model_score.item():.5f}")
with open("lrs.json", "w") as f:
    json.dump(rates.lrs, f)
torch.save(net.state_dict(), "net.pt")
