"""Train a small model in ZeRO stage 3, and find where its bytes are afterwards.

Shapes: B samples of a rank, W width of all layers.
"""

import gc
import importlib.util
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from live_tensors import bytes_by_kind, bytes_by_place, live_storages

WIDTH, LAYERS, STEPS = 1024, 6, 5
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    # With clipping, an offloaded state ends in other last bits: see the page.
    "gradient_clipping": 0.0,
}
# In values: room for one layer. The defaults are for much larger models.
ZERO: dict[str, Any] = {
    "stage": 3,
    "reduce_bucket_size": WIDTH * WIDTH,
    "stage3_prefetch_bucket_size": WIDTH * WIDTH,
    "stage3_max_live_parameters": WIDTH * WIDTH,
    "stage3_max_reuse_distance": 0,
}


def missing_libaio(device: torch.device) -> str:
    """Name what is missing to compile DeepSpeed's disk access, or return ''."""
    from torch.utils.cpp_extension import CUDA_HOME

    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler})"
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        return "no ninja"
    if device.type == "cuda" and CUDA_HOME is None:
        return "no nvcc"
    from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore

    if not AsyncIOBuilder().is_compatible(verbose=False):
        return "no libaio.h; on Debian: apt-get install libaio-dev"
    return ""


def new_engine(settings: dict[str, Any]) -> Any:
    """Hand a new model to DeepSpeed; `settings` are of "zero_optimization"."""
    import deepspeed

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*(m for one in layers for m in (one, torch.nn.GELU())))
    weights: Any = model.parameters()  # DeepSpeed's annotation is too narrow
    config = CONFIG | {"zero_optimization": ZERO | settings}
    return deepspeed.initialize(model=model, model_parameters=weights, config=config)[0]


def learn_targets(engine: Any) -> tuple[list[float], list[float]]:
    """Learn this rank's random targets; return loss and seconds of each step."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    pairs = torch.randn(2, 4, WIDTH, generator=generator).to(engine.device)  # (2, B, W)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    losses, seconds = [], []
    for _ in range(STEPS):
        started = time.perf_counter()
        loss = torch.nn.functional.mse_loss(
            engine(pairs[0].to(dtype)).float(), pairs[1]
        )
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return losses, seconds


def train_offloaded(settings: dict[str, Any], disk: Path | None) -> dict[str, Any]:
    """Train a new model; every rank must call this.

    Returns:
        `losses` of all steps; `ms`, the median of all steps but the first; `places`,
        bytes by type of device, and on disk, after the last step; `state` and
        `weights`, bytes of these in memory; `values` of this rank's partitions.
    """
    gc.collect()
    before = live_storages([])
    engine = new_engine(settings)
    losses, seconds = learn_targets(engine)
    kinds = bytes_by_kind(engine, before)
    files = disk.glob(f"zero_stage_3/*/rank{dist.get_rank()}/*.swp") if disk else ()
    swapped = [file.stat().st_size for file in files if "_gradient_" not in file.name]
    found = {
        "losses": losses,
        "ms": 1000 * statistics.median(seconds[1:]),
        "places": bytes_by_place(engine, before) | {"disk": sum(swapped)},
        "state": kinds["optimizer"],
        "weights": kinds["parameters"],
        "values": [p.ds_tensor.ds_numel for p in engine.module.parameters()],
    }
    engine.destroy()
    return found
