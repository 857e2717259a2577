"""Load a Hugging Face causal language model in shards, and save it whole.

Carry away this one file. It fits what is built like Llama: dense Qwen, Mistral ...
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as activations
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping


def build_on_meta(name: str) -> Any:
    """Build a model that has shapes and no memory; `name` is a folder's, or the hub's.

    Raises OSError or ValueError if there is none, or for much unlike Llama.
    """
    config = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with suppress(OSError):  # not all have one
        model.generation_config = GenerationConfig.from_pretrained(name)
    stored, kind = model.state_dict(), type(model).__name__
    others = {n.rpartition(".")[0] for n, _ in model.named_buffers() if n not in stored}
    if others != {"model.rotary_emb"}:
        raise ValueError(f"{kind} has buffers in {others or None}, not in a rotary_emb")
    if get_checkpoint_conversion_mapping(config.model_type):  # a matrix for each expert
        raise ValueError(f"{kind} has other names in its files than in memory")
    return model


def load_in_shards(
    name: str, device: torch.device, policy: MixedPrecisionPolicy
) -> Any:
    """Shard the model, and fill it from rank 0's files; every rank calls this.

    Parameters that are added afterwards, such as LoRA's, are not sharded, and each rank
    trains its own: add them before `fully_shard`, and to rank 0's `weights`.
    """
    model = build_on_meta(name)
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = activations.checkpoint_wrapper(layer)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*layers, model):  # the root's are embedding, last norm and head
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    # Its buffers are undefined now: compute them again.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    weights: dict[str, Any] = {}
    if dist.get_rank() == 0:
        weights = read_weights(name)
        for twin, stored in model.all_tied_weights_keys.items():
            weights[twin] = weights[stored]  # a tied matrix is in the files once
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, weights, options=options)
    return model


def read_weights(name: str) -> dict[str, Any]:
    """Read all safetensors files of a folder, or of a model on the hub."""
    files, is_folder = "model*.safetensors", Path(name).is_dir()
    folder = name if is_folder else snapshot_download(name, allow_patterns=files)
    read = [load_file(f) for f in Path(folder).glob(files)]
    # Llama 2's files have a buffer that is in no new model's state.
    return {k: w for part in read for k, w in part.items() if "inv_freq" not in k}


def save_whole(model: Any, folder: str) -> None:
    """Let rank 0 write what `from_pretrained` reads; every rank calls this."""
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        for twin in model.all_tied_weights_keys:
            del weights[twin]
        model.save_pretrained(folder, state_dict=weights)
    dist.barrier()
