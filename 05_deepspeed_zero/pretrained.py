"""A Hugging Face checkpoint and a text of one's own, or in one line why not."""

import argparse
import logging
import os
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from qwen import small_model
from ranks import fail
from text import read_tokens

# What a script passes to `ranks.read_options`, and `model_and_tokens` reads.
MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"metavar": "PATH_OR_NAME", "help": "a Hugging Face checkpoint to train"},
    "text": {"type": Path, "help": "a text file of your own"},
}
LONGEST = 1_000_000  # bytes of text; more would only take longer to read


def read_text(path: Path) -> bytes:
    """Read a file.

    Raises:
        ValueError: there is no such file, it cannot be read, or it is no text.
    """
    try:
        text = path.read_bytes()[:LONGEST]
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror}") from error
    if b"\0" in text:
        raise ValueError(f"--text {path} is not a text file")
    return text


def to_tokens(text: bytes, tokenizer: Any, needed: int) -> torch.Tensor:
    """Turn text into token numbers, shape (tokens,); without a tokenizer, its bytes.

    Raises:
        ValueError: the text is shorter than the `needed` tokens.
    """
    if tokenizer is None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    else:
        # A checkpoint's tokenizer may be slow, and some steps need no more than this.
        numbers = tokenizer(text[:100_000].decode(errors="replace"))["input_ids"]
        tokens = torch.tensor(numbers, dtype=torch.long)
    if len(tokens) < needed:
        raise ValueError(
            f"the text has {len(tokens)} tokens and {needed} are needed: give more text"
        )
    return tokens


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
        f"rank(s) takes {needed / 1e9:.3g} GB on each for weights, gradients and "
        f"optimizer state, and {available / 1e9:.3g} GB are free for each; a model of "
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
    return model.train(), tokenizer  # from_pretrained has called eval()


def model_and_tokens(
    options: argparse.Namespace,
    config: dict[str, Any],
    device: torch.device,
    needed: int,
) -> tuple[Any, torch.Tensor]:
    """Load what the command line asks for: the model, and the text in its tokens.

    This ends the program with one line if it cannot be done, before the ranks meet.

    Args:
        options: with MODEL_OPTIONS; `model` and `text` are None for the defaults.
        config: DeepSpeed's; the stage and the precision decide what fits.
        device: where the model will train; it is loaded on the CPU.
        needed: the fewest tokens that will do.

    Returns:
        The model, and the tokens: shape (tokens,).
    """
    try:
        default = bytes(read_tokens().tolist())
        text = read_text(options.text) if options.text else default
        if options.model is None:
            model, tokenizer = small_model(), None
        else:
            model, tokenizer = load_checkpoint(
                options.model,
                value=2 if config["bf16"]["enabled"] else 4,
                stage=config["zero_optimization"]["stage"],
                world_size=int(os.environ["WORLD_SIZE"]),
                available=free_bytes(device, int(os.environ["LOCAL_WORLD_SIZE"])),
            )
        return model, to_tokens(text, tokenizer, needed)
    except ValueError as error:
        fail(str(error))
