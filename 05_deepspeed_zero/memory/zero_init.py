"""Build a model that no rank ever holds as a whole: `deepspeed.zero.Init`.

Run: deepspeed --num_gpus=2 05_deepspeed_zero/memory/zero_init.py
Expect: the peak memory of rank 0 while the model is built and while DeepSpeed takes it
    over, with zero.Init and without, and that both train to the same losses.
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_setup import SETUP_OPTIONS, join, leave, prepare
from peak_counter import PeakCounter
from ranks import check, gather, read_options, say, start_ranks

WIDTH, LAYERS, STEPS = 768, 24, 3
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    # Small beside the model, so that the bucket is not what one sees.
    "zero_optimization": {"stage": 3, "reduce_bucket_size": WIDTH * WIDTH},
}


def build_layers(partition: bool) -> nn.Module:
    """Build the layers; with `partition`, each is divided as soon as it has weights.

    Every rank calls this, with the same seed.
    """
    import deepspeed

    torch.manual_seed(0)
    context: Any = contextlib.nullcontext()
    if partition:
        context = deepspeed.zero.Init(config_dict_or_path=CONFIG)
    with context:
        layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS)]
        return nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in layers))


def train_layers(partition: bool, device: torch.device) -> dict[str, Any]:
    """Build, hand over to DeepSpeed, train; return two peaks in bytes, and losses."""
    import deepspeed

    with PeakCounter() as counter:
        counter.start()
        model = build_layers(partition)
        peak_of_build, counter.peak = counter.peak, counter.now
        parameters: Any = model.parameters()
        engine = deepspeed.initialize(
            model=model, model_parameters=parameters, config=CONFIG
        )[0]
    losses = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(4, WIDTH, generator=generator).to(device, torch.bfloat16)
    for _ in range(STEPS):
        loss = (engine(inputs) - inputs).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return {"build": peak_of_build, "initialize": counter.peak, "losses": losses}


def main() -> None:
    """Train with zero.Init and without; compare peaks and losses."""
    device = prepare(CONFIG)
    join()
    whole = 2 * LAYERS * (WIDTH * WIDTH + WIDTH)  # bytes of all weights in bf16
    say(f"the weights take {whole / 1e6:.1f} MB; peak in MB   build  initialize")
    runs = {}
    for name, partition in {"with zero.Init": True, "without": False}.items():
        runs[name] = run = train_layers(partition, device)
        peaks = (run["build"] / 1e6, run["initialize"] / 1e6)
        say(f"{name:42}{peaks[0]:8.1f}{peaks[1]:12.1f}")
    divided, plain = runs.values()
    # One layer is whole for as long as it is drawn and sent to the others.
    most = whole / dist.get_world_size() + 3 * whole / LAYERS
    is_right = divided["losses"] == plain["losses"] and divided["build"] < most
    peaks = max(gather(divided["build"]))
    is_right &= plain["build"] >= whole
    most_of = f"no rank had more than {peaks / whole:.0%} of the weights"
    check(is_right, f"{most_of}; the same {STEPS} losses")
    leave()


if __name__ == "__main__":
    read_options(**SETUP_OPTIONS)
    start_ranks(main, 1)
