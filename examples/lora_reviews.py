"""The fine-tune of trainer_reviews.py with LoRA: only small matrices beside the frozen ones are trained.

    python examples/lora_reviews.py
    swell run --auto --workers 1:3 --name lora examples/lora_reviews.py
    swell resize lora 3                                         (from a second terminal)

It needs `pip install transformers accelerate peft`. Workers exchange gradients of what is trained, a small
part of the model. The frozen part is random, since nothing is downloaded; put `from_pretrained(...)` in its
place. Guessing is right half of the time.
"""

import sys

from trainer_reviews import fine_tune, parse, small_bert

try:
    from peft import LoraConfig, TaskType, get_peft_model
except ImportError as missing:
    sys.exit(f"this example needs peft: pip install peft ({missing})")

if __name__ == "__main__":
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["query", "value", "dense"],
        modules_to_save=["classifier"],
    )  # fmt: skip
    model = get_peft_model(small_bert(), lora)
    model.print_trainable_parameters()
    print(f"final accuracy {fine_tune(model, parse(), lr=2e-3):.4f}", flush=True)
