"""Qwen2's architecture from transformers: small and fresh, or a real checkpoint."""

import argparse
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

# The file of the one model, not `from transformers import ...`: the short form would
# look through every model that transformers knows.
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from ranks import fail
from text import global_batch, read_text, to_tokens

# What a script passes to `ranks.read_options`, and `model_and_batches` reads.
MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "precision": {"choices": ["bf16", "fp32"], "default": "bf16"},
    "model": {"metavar": "PATH_OR_NAME", "help": "a Hugging Face checkpoint to train"},
    "text": {"type": Path, "help": "a text file of your own"},
}


def small_config() -> Qwen2Config:
    """Describe a Qwen2 of 427,136 parameters that reads bytes.

    It has all that the large ones have: grouped heads, biases on query, key and value,
    rotary positions, a gated MLP, one matrix for embedding and output (as Qwen2-1.5B).
    """
    return Qwen2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        # Neither token exists in a text of bytes.
        bos_token_id=None,
        eos_token_id=None,
    )


def small_model(seed: int = 0) -> Qwen2ForCausalLM:
    """Build the small model; the same seed gives the same weights on every rank."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(small_config())


def count_parameters(model: torch.nn.Module) -> int:
    """Count a model's weights; ZeRO stage 3 keeps the true number aside as ds_numel."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def bytes_per_rank(parameters: int, value: int, stage: int, world_size: int) -> int:
    """Bytes that training with Adam keeps on one rank, without activations.

    Weights and gradients take `value` bytes a parameter each, 2 in bf16, and the
    optimizer state 12: master weights and two moments in fp32. Stage 1 partitions the
    optimizer state, stage 2 the gradients too, stage 3 all of it (Rajbhandari et al.,
    ZeRO, 2020, figure 1). In fp32 too DeepSpeed has master weights, but not in stage 0.
    All ranks first read the whole checkpoint, in fp32.
    """
    whole = {0: 16, 1: 2 * value, 2: value, 3: 0}[stage]
    partitioned = 2 * value + 12 - whole if stage else 0
    kept = whole * parameters + partitioned * parameters // world_size
    return max(4 * parameters, kept)


def free_bytes(device: torch.device, local_world_size: int) -> int:
    """Return the memory that one rank may take now on its device."""
    if device.type == "cpu":
        return psutil.virtual_memory().available // local_world_size
    return torch.accelerator.get_memory_info(device)[0]


def fits_or_raise(
    name: str, parameters: int, value: int, stage: int, world_size: int, available: int
) -> None:
    """Say before anything is allocated that a model is too large, and what would fit.

    Raises:
        ValueError: one line with the model's size, the room, and a way out.
    """
    needed = bytes_per_rank(parameters, value, stage, world_size)
    if needed <= available:
        return
    per_parameter = needed / parameters
    raise ValueError(
        f"--model {name} has {parameters:,} parameters: stage {stage} on {world_size} "
        f"rank(s) takes {needed / 1e9:.3g} GB on each before activations, and "
        f"{available / 1e9:.3g} GB are free for each; a model of "
        f"{available / per_parameter:,.0f} parameters would fit, or use a higher stage "
        "or more machines"
    )


def load_checkpoint(
    source: str, value: int, stage: int, world_size: int, available: int
) -> tuple[Any, Any]:
    """Read a Hugging Face checkpoint and its tokenizer, in float32.

    Args:
        source: a folder that `save_pretrained` wrote, or a name on the hub.
        value: bytes of a weight and of a gradient in training.
        stage: the ZeRO stage that it is to be trained with.
        world_size: the ranks that will share it.
        available: bytes that one rank may take.

    Raises:
        ValueError: in one line, why this cannot be trained here.
    """
    # These take a second to import, so only a run that needs them pays for them.
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    def give_up(what: str, error: Exception) -> NoReturn:
        raise ValueError(f"--model {source}: {what}") from error

    # It would tell of every attempt to reach a hub that cannot be reached.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    # A name on the hub has one slash at most, and does not begin with it.
    is_path = source.startswith((".", os.sep)) or source.count(os.sep) > 1
    if is_path and not os.path.isdir(source):
        raise ValueError(f"--model {source}: there is no such folder")
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        where = "in that folder" if os.path.isdir(source) else "here, or on the hub"
        give_up(f"no checkpoint {where}, that transformers can read", error)
    kinds = config.architectures or []
    try:
        # On the meta device a model has shapes and no memory.
        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(config)
        if not any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds):
            raise ValueError("it was saved without an output layer")
    except ValueError as error:
        kind = ", ".join(kinds) or type(config).__name__
        give_up(f"{kind} is not a causal language model", error)
    parameters = count_parameters(shapes)
    fits_or_raise(source, parameters, value, stage, world_size, available)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        if not tokenizer("a")["input_ids"]:
            raise ValueError("it knows no token")
    except Exception as error:
        # A missing tokenizer raises whatever its class happens to trip over.
        give_up("no tokenizer there; tokenizer.save_pretrained writes one", error)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except Exception as error:
        # As above: a damaged file raises an exception of the library that reads it.
        give_up("the weights are missing or damaged", error)
    return model, tokenizer


def model_and_batches(
    options: argparse.Namespace,
    stage: int,
    device: torch.device,
    samples: int,
    block_size: int,
) -> tuple[Any, Callable[[int], torch.Tensor]]:
    """Load what the command line asks for: the model, and the text in its tokens.

    This ends the program with one line if it cannot be done, before the ranks meet.

    Args:
        options: with MODEL_OPTIONS; `model` and `text` are None for the defaults.
        stage: the ZeRO stage, which decides what fits.
        device: where the model will train; it is loaded on the CPU.
        samples: of each rank in a step.
        block_size: tokens in a sample.

    Returns:
        The model, and what returns the global batch of a step, for all ranks together:
        token numbers of shape (samples x ranks, block_size).
    """
    world_size = int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    try:
        text = read_text(options.text)
        if options.model is None:
            model, tokenizer = small_model(), None
        else:
            available = free_bytes(device, local_world_size)
            value = 2 if options.precision == "bf16" else 4
            model, tokenizer = load_checkpoint(
                options.model, value, stage, world_size, available
            )
        tokens = to_tokens(text, tokenizer, block_size)
    except ValueError as error:
        fail(str(error))
    samples *= world_size
    return model, partial(global_batch, tokens, samples=samples, block_size=block_size)
