"""Split each layer of a Hugging Face causal language model over ranks; save it whole.

Carry away this one file. It fits what is built like Llama: Qwen 2 and 3, Mistral ...
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from torch.distributed import checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

# How hidden states (B, T, D) lie on the ranks, and logits (B, T, V).
TOKENS, WHOLE, VOCABULARY = Shard(1), Replicate(), Shard(-1)
PLAN: dict[str, Any] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=WHOLE),
    "model.layers.0": PrepareModuleInput(
        input_layouts=WHOLE, desired_input_layouts=TOKENS, use_local_output=True
    ),
    "model.layers.*.input_layernorm": SequenceParallel(),
    "model.layers.*.self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": TOKENS},
        desired_input_kwarg_layouts={"hidden_states": WHOLE},
    ),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=TOKENS),
    "model.layers.*.post_attention_layernorm": SequenceParallel(),
    "model.layers.*.mlp": PrepareModuleInput(
        input_layouts=TOKENS, desired_input_layouts=WHOLE
    ),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=TOKENS),
    "model.norm": SequenceParallel(use_local_output=True),
    "lm_head": ColwiseParallel(
        input_layouts=TOKENS, output_layouts=VOCABULARY, use_local_output=False
    ),
}
# Qwen3 has norms that read each head (B, T, heads, D / heads), and heads are split.
HEAD_NORMS: dict[str, Any] = {
    f"model.layers.*.self_attn.{x}_norm": SequenceParallel(
        sequence_dim=2, use_local_output=True
    )
    for x in "qk"
}


def build_on_meta(name: str, tensor_ranks: int) -> Any:
    """Build a model that has shapes and no memory; `name` is a folder's, or the hub's.

    Raises OSError or ValueError if there is none, or if sizes or buffers are others.
    """
    # A name on the hub has one slash at most, and does not begin with it.
    is_path = name.startswith((".", "/")) or name.count("/") > 1
    if is_path and not Path(name).is_dir():
        raise ValueError(f"{name}: there is no such folder")
    config = AutoConfig.from_pretrained(name)
    for field in ("num_key_value_heads", "intermediate_size"):
        number = getattr(config, field, None)
        if not isinstance(number, int) or number % tensor_ranks:
            said = f"{tensor_ranks} ranks cannot share {field} = {number}"
            said = said if number else f"no {field}, so it is not like Llama"
            raise ValueError(f"{type(config).__name__}: {said}")
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with suppress(OSError):  # not all have one
        model.generation_config = GenerationConfig.from_pretrained(name)
    stored, kind = model.state_dict(), type(model).__name__
    others = {n.rpartition(".")[0] for n, _ in model.named_buffers() if n not in stored}
    if others != {"model.rotary_emb"}:
        raise ValueError(f"{kind} has buffers in {others or None}, not in a rotary_emb")
    if Path(name).is_dir() and not any(Path(name).glob("model*.safetensors")):
        raise ValueError(f"{name}: there is no model*.safetensors")
    return model


def split_over_ranks(model: Any, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Make all parameters DTensors: split by PLAN, then sharded over data's ranks.

    Forward and backward cast them to `dtype`.

    Raises ValueError if one would stay a plain tensor.
    """
    attention = getattr(model.model.layers[0], "self_attn", None)  # not in all
    plan = PLAN | HEAD_NORMS if hasattr(attention, "q_norm") else PLAN
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    parallelize_module(model, mesh["tensor"], plan)
    for name in frozen:  # SequenceParallel makes new parameters
        model.get_parameter(name).requires_grad_(False)
    if model.config.tie_word_embeddings:  # of one matrix it has made two
        model.lm_head.weight = model.model.embed_tokens.weight
    # Each rank would compute a term of its gradient, and nobody add them up.
    if plain := [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]:
        raise ValueError(f"{type(model).__name__}: no style in PLAN for {plain[0]}")
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    if mesh["data"].size() > 1 or dtype:  # FSDP casts on one rank, too
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh["data"], mp_policy=policy)


def load_split(name: str, mesh: DeviceMesh, dtype: torch.dtype | None) -> Any:
    """Build a split model; each rank reads from the files its slices alone.

    Raises ValueError if a file has what the model has not, or of `build_on_meta`.
    """
    model = build_on_meta(name, mesh["tensor"].size())
    split_over_ranks(model, mesh, dtype)
    model.to_empty(device=mesh.device_type)
    # Its buffers are undefined now: compute them again.
    rotary = type(model.model.rotary_emb)(model.config)
    model.model.rotary_emb = rotary.to(mesh.device_type)
    weights, files = model.state_dict(), "model*.safetensors"
    for twin in model.all_tied_weights_keys:
        del weights[twin]  # a tied matrix is in the files once
    is_folder = Path(name).is_dir()
    folder = name if is_folder else snapshot_download(name, allow_patterns=files)
    reader = HuggingFaceStorageReader(folder)
    # It passes over what has no place here, as the scales of weights in fp8.
    stored, ours = reader.read_metadata().state_dict_metadata, model.state_dict()
    if others := [n for n in stored if n not in ours and "inv_freq" not in n]:
        raise ValueError(f"{name}: no place for {min(others)}")
    checkpoint.load(weights, storage_reader=reader)
    return model


def save_gathered(model: Any, folder: str) -> None:
    """Let rank 0 write what `from_pretrained` reads; every rank calls this."""
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        for twin in model.all_tied_weights_keys:
            del weights[twin]
        model.save_pretrained(folder, state_dict=weights)
    dist.barrier()
