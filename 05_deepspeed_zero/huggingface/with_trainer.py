"""Let Hugging Face's Trainer hand the model to DeepSpeed, and see whether it has.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/huggingface/with_trainer.py
Expect: the engine, how many processes Trainer believes in, and which samples the ranks
    have seen. On a CPU without `use_cpu` each rank believes that it is alone.
"""

import tempfile
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import PrinterCallback, Trainer, TrainingArguments

from deepspeed_setup import join, leave, prepare
from qwen import small_model
from ranks import check, gather, same_on_all_ranks, say

CONFIG: dict[str, Any] = {
    # Trainer fills in what is "auto" from its own arguments, and refuses what differs.
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 2},
}
SAMPLES = 48  # 12 batches: for 2, 3, 4 or 6 ranks equally many


def train_with_trainer(use_cpu: bool) -> tuple[Any, str, list[int]]:
    """Train for an epoch; return the engine, what Trainer believes, what was seen."""
    seen: list[int] = []

    def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.extend(int(sample[0]) for sample in samples)
        return {"input_ids": torch.stack(samples), "labels": torch.stack(samples)}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            deepspeed=CONFIG,
            use_cpu=use_cpu,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            dataloader_pin_memory=torch.accelerator.is_available(),
            disable_tqdm=True,
        )
        dataset = [torch.full((16,), number) for number in range(SAMPLES)]
        trainer = Trainer(
            small_model(), arguments, train_dataset=dataset, data_collator=collate
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    engine = trainer.model_wrapped
    believes = f"{type(engine).__name__} in {arguments.world_size} process(es)"
    AcceleratorState._reset_state(reset_partial_state=True)
    return engine, believes, seen


def main() -> None:
    """Train with and without `use_cpu`; compare what the ranks have seen."""
    device = prepare(CONFIG)
    join(at_least=2)
    is_right = False
    for use_cpu in (False, True) if device.type == "cpu" else (False,):
        engine, believes, seen = train_with_trainer(use_cpu)
        numbers = [number for of_rank in gather(seen) for number in of_rank]
        count = f"{len(numbers)} samples, {len(set(numbers))} different"
        say(f"use_cpu={use_cpu!s:5} | {believes} | {count}")
        is_right = believes == f"DeepSpeedEngine in {len(gather(0))} process(es)"
        is_right &= sorted(numbers) == list(range(SAMPLES))
        is_right &= same_on_all_ranks(engine.parameters())
    check(is_right, "the last way: DeepSpeed, each sample once, the same model")
    leave()


if __name__ == "__main__":
    main()
