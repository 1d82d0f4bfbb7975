"""Hugging Face's Trainer and a model of its own: accumulation, clipping, schedule, bf16, resume."""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

sys.path.insert(0, str(Path(__file__).parent))
from tools.pace import WIDTH, Pace

epochs, pace, folder = int(sys.argv[1]), Pace(sys.argv[2]), sys.argv[3]
options = dict(option.split("=") for option in sys.argv[4:])  # seed, stop (after so many epochs), resume


class Counting(Dataset):
    """Sequences that count in threes."""

    def __init__(self, first, count):
        self.tokens = (torch.arange(first, first + count)[:, None] + 3 * torch.arange(8)) % 16

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


class PacedTrainer(Trainer):
    def training_step(self, model, inputs, *args, **kwargs):
        pace.pause(len(inputs["input_ids"]) / 12)
        return super().training_step(model, inputs, *args, **kwargs)


class Count(TrainerCallback):
    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def on_epoch_end(self, args, state, control, **kwargs):
        if state.epoch >= float(options.get("stop", epochs)):
            control.should_training_stop = True


set_seed(3)
shape = {"vocab_size": 16, "n_positions": 8, "n_embd": 2 * WIDTH, "n_layer": 1, "n_head": 2}
tokens = {"bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(**shape, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
arguments = TrainingArguments(
    output_dir=folder,
    num_train_epochs=epochs,
    per_device_train_batch_size=12,
    gradient_accumulation_steps=2,
    learning_rate=0.15,
    optim="sgd",
    max_grad_norm=5.0,
    bf16=True,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=2,
    load_best_model_at_end=True,
    logging_steps=5,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    seed=3,
    data_seed=int(options.get("seed", 3)),
)
count = Count()
trainer = PacedTrainer(
    model, arguments, train_dataset=Counting(0, 480), eval_dataset=Counting(0, 16), callbacks=[count]
)
trainer.train(resume_from_checkpoint="resume" in options)
state = trainer.state
result = {
    "final": trainer.evaluate()["eval_loss"],
    "steps": state.global_step,
    "counted": count.steps,
    "epoch": state.epoch,
    "logged": [entry["step"] for entry in state.log_history if "loss" in entry],
    "evaluated": [entry["step"] for entry in state.log_history if "eval_loss" in entry],
    "lr": trainer.lr_scheduler.get_last_lr()[0],
}
print("result", json.dumps(result))
