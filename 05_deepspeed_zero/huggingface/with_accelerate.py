"""Let accelerate hand the model to DeepSpeed, and see whether it really has.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/huggingface/with_accelerate.py
Expect: what accelerate makes of the model, and how many processes it believes in, as
    it comes and in two ways to tell it of the CPU. Only with the backend named does a
    CPU run get DeepSpeed and a shard of the samples for each rank. A checkpoint of that
    run brings its weights back.
"""

import tempfile
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from torch.utils.data import DataLoader, TensorDataset

from deepspeed_setup import join, leave, prepare
from qwen import small_model
from ranks import check, gather, same_on_all_ranks, say

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",  # accelerate reads it off the loader
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
SAMPLES, BATCH_SIZE = 48, 4  # 12 batches: for 2, 3, 4 or 6 ranks equally many


def train_with_accelerate(
    samples: torch.Tensor, **settings: Any
) -> tuple[Accelerator, Any, list[int]]:
    """Train for an epoch; return the accelerator, the engine, what was seen.

    Args:
        samples: (SAMPLES, T) tokens; the first of each is its number.
        settings: for `Accelerator`.
    """
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG)
    accelerator = Accelerator(deepspeed_plugin=plugin, **settings)
    torch.manual_seed(0)
    model, seen = small_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(samples), batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (batch,) in loader:
        with accelerator.accumulate(model):  # without it every batch takes a step
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)  # with DeepSpeed this takes the step as well
            optimizer.step()  # with DeepSpeed this and the next line do nothing
            optimizer.zero_grad()
        seen += batch[:, 0].tolist()
    return accelerator, model, seen


def save_and_load(accelerator: Accelerator, model: Any, folder: str) -> bool:
    """Save, lose the weights, load; all call this. Return whether they are back.

    In stage 3 gather them to compare: between passes most are empty tensors.
    """
    accelerator.save_state(folder)  # to resume: every rank writes its shards
    accelerator.save_model(model, f"{folder}/weights")  # rank 0: model.safetensors
    saved = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.zero_()
    accelerator.load_state(folder)
    return all(map(torch.equal, saved, model.parameters()))


def main() -> None:
    """Train in three ways; compare what the ranks have seen, and their weights."""
    device = prepare(CONFIG)
    join(at_least=2)
    backend = torch.distributed.get_default_backend_for_device(device)
    named = InitProcessGroupKwargs(backend=backend)
    ways: dict[str, dict[str, Any]] = {
        "as it comes": {},
        "cpu=True": {"cpu": True},
        "backend named": {"kwargs_handlers": [named]},
    }
    if device.type != "cpu":
        ways = {"as it comes": {}}
    samples = torch.arange(SAMPLES)[:, None] + torch.zeros(16, dtype=torch.long)
    is_right = False
    for way, settings in ways.items():
        accelerator, model, seen = train_with_accelerate(samples, **settings)
        believes = f"{type(model).__name__} in {accelerator.num_processes} process(es)"
        numbers = [number for of_rank in gather(seen) for number in of_rank]
        count = f"{len(numbers)} samples, {len(set(numbers))} different"
        say(f"{way:13} | {believes} | {count}")
        is_right = believes == f"DeepSpeedEngine in {len(gather(0))} process(es)"
        is_right &= sorted(numbers) == list(range(SAMPLES))
        is_right &= same_on_all_ranks(model.parameters())
        if is_right:
            with tempfile.TemporaryDirectory() as own_folder:
                folder = gather(own_folder)[0]
                is_right = save_and_load(accelerator, model, folder)
                is_right &= same_on_all_ranks(model.parameters())
        AcceleratorState._reset_state(reset_partial_state=True)
    claim = "DeepSpeed, each sample once, the same model, saved and loaded"
    check(is_right, f"the last way: {claim}")
    leave()


if __name__ == "__main__":
    main()
