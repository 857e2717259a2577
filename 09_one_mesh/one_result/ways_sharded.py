"""Ways in which each rank holds shards, and computes on its own samples."""

import importlib
import os
import sys
import warnings
from typing import Any, NoReturn
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ranks
from model import GPT
from training import CONFIG, SAMPLES, Trained
from ways_data_parallel import named_weights, with_adamw
from zero_by_hand import ZeRO


def zero_by_hand(stage: int, settings: Any) -> Trained:
    """Shard by chapter 06's short ZeRO."""
    model = GPT(CONFIG)
    zero = ZeRO(model, model.blocks, stage, **settings)

    def backward(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = model(inputs, labels)
        loss.backward()
        if stage == 1:
            zero.average_gradients()
        return loss.detach()

    def whole() -> dict[str, Tensor]:
        weights = zero.whole_parameters()
        return {**weights, "head.weight": weights["token_embedding.weight"]}

    return Trained(backward, zero.step, whole)


def in_fsdp(settings: Any, replicas: int = 1) -> Trained:
    """Shard by FSDP2, each block and then the rest; all of that in so many replicas."""
    model, n = GPT(CONFIG), dist.get_world_size()
    names = ("replicas", "shards")
    mesh = init_device_mesh("cpu", (replicas, n // replicas), mesh_dim_names=names)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh if replicas > 1 else mesh["shards"])
    return with_adamw(model, model, settings)


def in_deepspeed(stage: int, settings: Any) -> Trained:
    """Let DeepSpeed do it, by a config."""
    deepspeed, model = import_deepspeed(), GPT(CONFIG)
    few = sum(p.numel() for p in model.parameters()) // 4
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
        "optimizer": {"type": "Adam", "params": {**settings, "torch_adam": True}},
        # Nobody clips here: a gradient twice too large would be clipped to the same.
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            # The defaults are for models a thousand times as large: the first would
            # be 2 GB, and with the others stage 3 would free nothing.
            "reduce_bucket_size": few,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": few,
            "stage3_max_live_parameters": few,
            "stage3_max_reuse_distance": 0,
        },
    }
    weights: Any = model.parameters()  # DeepSpeed's annotation is too narrow
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=weights, config=config
    )

    def backward(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = engine(inputs, labels)
        engine.backward(loss)
        return loss.detach()

    def whole() -> dict[str, Tensor]:
        # In stage 3 this gathers from all ranks; else it does nothing.
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            copies = {name: p.clone() for name, p in named_weights(model).items()}
        engine.destroy()
        return copies

    return Trained(backward, engine.step, whole)


def import_deepspeed() -> Any:
    """Import DeepSpeed for ranks that have joined, so that it compiles nothing."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    # It calls collectives by names that PyTorch 2.13 has renamed: all ranks would say.
    renamed = r"`torch.distributed.\w+` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    import deepspeed.ops

    # A file of an optimizer that nobody uses here loads PyTorch's compiler: 2 seconds.
    with mock.patch("torch.compile", lambda *_, **__: lambda function: function):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # type: ignore
    return deepspeed


def leave_deepspeed() -> NoReturn:
    """Leave the process group and end this process with status 0; all ranks call this.

    An engine holds on to the group, so gloo's threads outlive destroy_process_group. If
    one of them frees a tensor while Python takes itself apart, the process aborts.
    """
    dist.barrier()
    ranks.leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
