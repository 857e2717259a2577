"""Let Hugging Face's Trainer hand the model to DeepSpeed, and see whether it has.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/huggingface/with_trainer.py
Expect: the engine, how many processes Trainer believes in, and which samples the ranks
    have seen. On a CPU each rank is alone without `use_cpu`; with it all train as one.
"""

import tempfile
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import PrinterCallback, Trainer, TrainingArguments

from deepspeed_setup import join, leave, prepare
from qwen import small_model
from ranks import check, gather, say

CONFIG: dict[str, Any] = {
    # Trainer fills in what is "auto" from its own arguments, and refuses what differs.
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}
RATE, DECAY, SAMPLES = 1e-3, 0.5, 48  # 12 batches: for 2, 3, 4 or 6 ranks equally many


def train_with_trainer(use_cpu: bool) -> tuple[Any, str, list[int]]:
    """Train for an epoch; return Trainer, what it believes, the samples seen."""
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
            learning_rate=RATE,
            weight_decay=DECAY,
            logging_steps=1,
            save_strategy="no",
            dataloader_pin_memory=torch.accelerator.is_available(),
            disable_tqdm=True,
        )
        dataset = [torch.full((16,), number) for number in range(SAMPLES)]
        trainer = Trainer(small_model(), arguments, collate, dataset)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    engine = type(trainer.model_wrapped).__name__
    believes = f"{engine} in {arguments.world_size} process(es)"
    AcceleratorState._reset_state(reset_partial_state=True)
    return trainer, believes, seen


def train_alone(batches: list[list[int]]) -> list[tuple[float, float, float]]:
    """Take Trainer's steps: norms and biases do not decay. Return what it logs."""
    model = small_model()
    decays = [(p, DECAY if p.ndim > 1 else 0.0) for p in model.parameters()]
    groups = [{"params": p, "weight_decay": decay} for p, decay in decays]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(batches))
    found = []
    for numbers in batches:
        rows = torch.tensor(numbers)[:, None].expand(-1, 16)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item(), schedule.get_last_lr()[0]))
        schedule.step()
    return found


def equals_one_process(trainer: Any, seen: list[list[int]]) -> bool:
    """Compare what this rank's Trainer logged with a loop over all ranks' samples."""
    starts = range(0, len(seen[0]), 4)
    batches = [[n for of_rank in seen for n in of_rank[i : i + 4]] for i in starts]
    *log, _ = trainer.state.log_history  # the last is a summary
    kinds = ("loss", "grad_norm", "learning_rate")
    logged = torch.tensor([[step[kind] for kind in kinds] for step in log])
    return logged.allclose(torch.tensor(train_alone(batches)), rtol=1e-5)


def main() -> None:
    """Train with and without `use_cpu`; compare with a loop in one process."""
    device = prepare(CONFIG)
    join(at_least=2)
    is_right = False
    for use_cpu in (False, True) if device.type == "cpu" else (False,):
        trainer, believes, mine = train_with_trainer(use_cpu)
        seen = gather(mine)
        numbers = [number for of_rank in seen for number in of_rank]
        count = f"{len(numbers)} samples, {len(set(numbers))} different"
        say(f"use_cpu={use_cpu!s:5} | {believes} | {count}")
        is_right = believes == f"DeepSpeedEngine in {len(seen)} process(es)"
        is_once = sorted(numbers) == list(range(SAMPLES))
        is_right &= is_once and equals_one_process(trainer, seen)
    check(is_right, "the last way: DeepSpeed, one process's losses, norms and rates")
    leave()


if __name__ == "__main__":
    main()
