"""Hugging Face's Trainer on a small model of one's own, with accumulation and a linear schedule."""

import json

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


set_seed(0)
x = torch.randn(280, 6)
y = (x[:, 0] + x[:, 1] > 0).long()
rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
arguments = TrainingArguments(
    "out",
    num_train_epochs=14,
    per_device_train_batch_size=12,
    gradient_accumulation_steps=2,
    learning_rate=5e-3,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    remove_unused_columns=False,
)
model = Tiny()
trainer = Trainer(model=model, args=arguments, train_dataset=rows[:240], eval_dataset=rows[240:])
trainer.train()
history = [
    {k: e[k] for k in ("step", "loss", "learning_rate")} for e in trainer.state.log_history if "loss" in e
]
with open("history.json", "w") as f:
    json.dump(history, f)
print(f"eval {trainer.evaluate()['eval_loss']:.4f} steps {trainer.state.global_step}")
torch.save(model.state_dict(), "model.pt")
