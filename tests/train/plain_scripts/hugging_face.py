"""Hugging Face's Trainer as its documentation writes it: accumulation, clipping, schedule, evaluation."""

import json
import sys
import time

import torch
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

epochs, pace, folder = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, x, labels=None):
        time.sleep(pace)
        logits = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(logits, labels), "logits": logits}


class Data(TensorDataset):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return {"x": x, "labels": y}


class Count(TrainerCallback):
    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


torch.manual_seed(3)
x = torch.randn(648, 4)
y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]]) + 0.1 * torch.randn(648, 1)
options = TrainingArguments(
    output_dir=folder,
    num_train_epochs=epochs,
    per_device_train_batch_size=10,
    gradient_accumulation_steps=2,
    learning_rate=0.05,
    optim="sgd",
    max_grad_norm=5.0,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=2,
    load_best_model_at_end=True,
    logging_steps=5,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    seed=3,
)
count = Count()
trainer = Trainer(
    Net(),
    options,
    train_dataset=Data(x[:640], y[:640]),
    eval_dataset=Data(x[640:], y[640:]),
    callbacks=[count],
)
trainer.train()
state = trainer.state
logged = [entry["step"] for entry in state.log_history if "loss" in entry]
result = {
    "final": trainer.evaluate()["eval_loss"],
    "steps": state.global_step,
    "counted": count.steps,
    "epoch": state.epoch,
    "logged": logged,
    "lr": trainer.lr_scheduler.get_last_lr()[0],
}
print("result", json.dumps(result))
