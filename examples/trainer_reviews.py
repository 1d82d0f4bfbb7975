"""Fine-tune a text classifier with Hugging Face's Trainer, as its docs write it: no line is swell's.

    python examples/trainer_reviews.py
    swell run --auto --workers 1:3 --name reviews examples/trainer_reviews.py
    swell resize reviews 3                                      (from a second terminal)

It needs `pip install transformers accelerate`. Nothing is downloaded: the reviews are made up from word
lists, with words of the other kind and negations among them, and the model is a small BERT with random
weights. Put your own data and `from_pretrained(...)` in their place. Guessing is right half of the time.
"""

import argparse
import random
import sys
import tempfile

try:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
except ImportError as missing:
    sys.exit(f"this example needs transformers: pip install transformers accelerate ({missing})")

import torch

GOOD = ["great", "fine", "lovely", "superb", "bright", "warm", "honest", "clever", "moving", "funny"]
BAD = ["poor", "dull", "awful", "weak", "cold", "flat", "tired", "clumsy", "boring", "messy"]
REST = ["the", "a", "film", "book", "play", "plot", "actor", "scene", "end", "of", "in", "and", "it", "was"]
WORDS = ["[pad]", "[cls]", "not", *GOOD, *BAD, *REST]
LENGTH = 24


def parse():
    parser = argparse.ArgumentParser(description="Good and bad reviews, with Trainer.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--reviews", type=int, default=3000)
    return parser.parse_args()


def review(chance):
    """A made-up review and its label: mostly words of one kind; "not" turns the next word around."""
    words, sum_, mood = [], 0, chance.random() < 0.5
    while len(words) < LENGTH - 3:
        if chance.random() < 0.4:
            praise, turned = mood == (chance.random() < 0.85), chance.random() < 0.1
            words += ["not"] * turned + [chance.choice(GOOD if praise != turned else BAD)]
            sum_ += 1 if praise else -1
        else:
            words.append(chance.choice(REST))
    return (words, int(sum_ > 0)) if sum_ else review(chance)


def reviews(count, seed):
    """A data set: a list of dicts, which Trainer takes as it is."""
    number, chance = {word: i for i, word in enumerate(WORDS)}, random.Random(seed)
    made = []
    for _ in range(count):
        words, label = review(chance)
        ids = [number["[cls]"], *(number[word] for word in words)]
        ids += [number["[pad]"]] * (LENGTH - len(ids))
        made.append({"input_ids": ids, "attention_mask": [int(i != 0) for i in ids], "labels": label})
    return made


def small_bert():
    """A BERT of two layers."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=LENGTH, num_labels=2,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def fine_tune(model, args, lr):
    """Train with Trainer, and return the accuracy on reviews that the model has not seen."""
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder, num_train_epochs=args.epochs, per_device_train_batch_size=32, learning_rate=lr,
            warmup_steps=50, eval_strategy="epoch", save_strategy="no", logging_steps=50, report_to=[],
            disable_tqdm=True, use_cpu=not torch.cuda.is_available(), seed=0,
        )  # fmt: skip
        trainer = Trainer(
            model=model,
            args=options,
            train_dataset=reviews(args.reviews, seed=0),
            eval_dataset=reviews(500, seed=1),
            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        )
        trainer.train()
        return trainer.evaluate()["eval_accuracy"]


if __name__ == "__main__":
    print(f"final accuracy {fine_tune(small_bert(), parse(), lr=1e-3):.4f}", flush=True)
