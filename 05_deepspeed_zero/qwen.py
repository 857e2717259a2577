"""Qwen2's architecture from transformers: small and fresh, or a real checkpoint."""

import argparse
import logging
import os
from typing import Any, NoReturn

import psutil
import torch

# The file of the one model, not `from transformers import ...`: the short form would
# look through every model that transformers knows.
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from data import read_text, to_tokens
from start import ranks_on_this_machine, refuse

BYTES_PER_VALUE = 4  # float32


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


def bytes_per_rank(parameters: int, stage: int, world_size: int) -> int:
    """Bytes that float32 training with Adam keeps on one rank, without activations.

    Weights and gradients take 4 bytes a parameter each and Adam's two states 8. Stage 1
    divides the states among the ranks, stage 2 the gradients too, stage 3 all of it
    (Rajbhandari et al., ZeRO, 2020, figure 1, there with 2 + 2 + 12 bytes in mixed
    precision). DeepSpeed's master copy of the weights in stages 1 to 3 is one more
    divided 4 bytes. All ranks read the whole checkpoint at the start, so that no stage
    takes less than its weights.
    """
    weights = gradients = BYTES_PER_VALUE * parameters
    states = 2 * BYTES_PER_VALUE * parameters
    if stage == 0:
        return weights + gradients + states
    divided = states + weights + (gradients if stage >= 2 else 0)
    kept = 0 if stage == 3 else weights + (gradients if stage == 1 else 0)
    return max(weights, kept + divided // world_size)


def free_bytes(device: torch.device, local_world_size: int) -> int:
    """Return the memory that one rank may take now on its device."""
    if device.type == "cpu":
        return psutil.virtual_memory().available // local_world_size
    return torch.accelerator.get_memory_info(device)[0]


def fits_or_raise(
    name: str, parameters: int, stage: int, world_size: int, available: int
) -> None:
    """Say before anything is allocated that a model is too large, and what would fit.

    Raises:
        ValueError: one line with the model's size, the room, and a way out.
    """
    needed = bytes_per_rank(parameters, stage, world_size)
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
    source: str, stage: int, world_size: int, available: int
) -> tuple[Any, Any]:
    """Read a Hugging Face checkpoint and its tokenizer, in float32.

    Args:
        source: a folder that `save_pretrained` wrote, or a name on the hub.
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
    fits_or_raise(source, count_parameters(shapes), stage, world_size, available)
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


def model_and_tokens(
    args: argparse.Namespace, stage: int, device: torch.device, block_size: int
) -> tuple[Any, torch.Tensor]:
    """Load what the command line asks for: the model, and the text in its tokens.

    This ends the program with one line if it cannot be done, before the ranks meet.

    Args:
        args: with `model` and `text`, both None for the defaults.
        stage: the ZeRO stage, which decides what fits.
        device: where the model will train; it is loaded on the CPU.
        block_size: tokens in a sample.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    try:
        text = read_text(args.text)
        if args.model is None:
            model, tokenizer = small_model(), None
        else:
            room = free_bytes(device, ranks_on_this_machine())
            model, tokenizer = load_checkpoint(args.model, stage, world_size, room)
        return model, to_tokens(text, tokenizer, block_size)
    except ValueError as error:
        refuse(str(error))
