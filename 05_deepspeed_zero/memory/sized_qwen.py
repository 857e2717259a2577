"""A Qwen2 of any size that reads bytes, and a DeepSpeed engine for it."""

from typing import Any

import torch
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

# Tokens in the one sample of a step: few, since activations are not what is counted.
BLOCK_SIZE = 64
# What any stage takes for a parameter, in either precision, if nothing is divided: 20
# bytes kept (stage 1 in float32), and 12 for Adam's gradient and temporaries.
MOST_BYTES = 32


def sized_config(width: int, layers: int) -> Qwen2Config:
    """Describe a Qwen2 with heads of 64 values; `width` is a multiple of 128."""
    heads = width // 64
    return Qwen2Config(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def buckets_for(parameters: int, width: int) -> dict[str, Any]:
    """Return settings for a model that is small beside DeepSpeed's default buckets.

    All of them count values, not bytes. The default of the first is 500 million. Here
    it is a small part of the model, but the embedding has room in it.
    """
    few = max(256 * width, parameters // 64)
    return {
        # Gradients are collected in a buffer of this many and sent when it is full.
        "reduce_bucket_size": few,
        # Stage 3: how many weights are gathered ahead, how many may be there at a time,
        # and how soon they must be used again to stay.
        "stage3_prefetch_bucket_size": few,
        "stage3_max_live_parameters": few,
        "stage3_max_reuse_distance": 0,
    }


def make_engine(
    model: Any, stage: int, precision: str, settings: dict[str, Any], **more: Any
) -> Any:
    """Hand a model to DeepSpeed; every rank must call this.

    Args:
        model: in float32; DeepSpeed turns it into bfloat16 if need be.
        stage: the ZeRO stage.
        precision: "fp32" or "bf16".
        settings: of "zero_optimization".
        more: other keys of the config.
    """
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **settings},
        "bf16": {"enabled": precision == "bf16"},
        **more,
    }
    made = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return made[0]


def one_sample(
    rank: int, device: torch.device, tokens: int = BLOCK_SIZE
) -> torch.Tensor:
    """Return random bytes of this rank's own, of shape (1, tokens)."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(256, (1, tokens), generator=generator).to(device)


def step_once(engine: Any, inputs: torch.Tensor) -> float:
    """Train one step and return this rank's loss; every rank must call this."""
    loss = engine(input_ids=inputs, labels=inputs).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def parameters_of(width: int, layers: int) -> int:
    """Count the parameters of such a model without allocating any."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(sized_config(width, layers))
    return sum(p.numel() for p in model.parameters())


def fit_into(room: int, width: int, layers: int) -> None:
    """Say before anything is allocated that a model is too large, and what would fit.

    Args:
        room: bytes that one rank may take.
        width: of the model.
        layers: of the model.

    Raises:
        ValueError: one line with the model's size, the room, and a way out.
    """
    parameters = parameters_of(width, layers)
    if MOST_BYTES * parameters <= room:
        return
    smaller = width
    while smaller > 128 and MOST_BYTES * parameters_of(smaller, layers) > room:
        smaller = smaller // 256 * 128
    needed, free = (
        f"{count / 1e9:,.1f} GB" for count in (MOST_BYTES * parameters, room)
    )
    raise ValueError(
        f"--width={width} --layers={layers} has {parameters:,} parameters: that is up "
        f"to {needed} on each rank, and {free} are free for each; try "
        f"--width={smaller}, or fewer layers"
    )


def new_model(width: int, layers: int) -> Qwen2ForCausalLM:
    """Build the model on the CPU with the same weights on every rank."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(sized_config(width, layers))
