"""Fine-tune adapters with Hugging Face's Trainer and PEFT, activations in 4 bits. About 15 seconds.

    pip install 'laconic[train]' peft accelerate
    python examples/trainer_lora.py

Adapters have few gradients and moments, so activations are what is worth saving. Prints the Trainer's log with what is
saved beside the loss.
"""

from __future__ import annotations

import tempfile

from common import batches, llama
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

from laconic.integrations.huggingface import LaconicConfig, LaconicTrainer


def main() -> None:
    """Train 20 steps."""
    adapters = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj", "gate_proj", "up_proj"])
    model = get_peft_model(llama(), adapters)
    rows = [{"input_ids": ids[0], "labels": ids[0]} for ids in batches(160, size=1)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            learning_rate=1e-2,
            max_steps=20,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            per_device_train_batch_size=8,
            use_cpu=True,
        )
        trainer = LaconicTrainer(model, arguments, train_dataset=rows, laconic=LaconicConfig(activations=4))
        trainer.train()
        print(trainer.laconic_report)


if __name__ == "__main__":
    main()
