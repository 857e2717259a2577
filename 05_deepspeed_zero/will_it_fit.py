"""Will it fit? What a model of any size takes on one rank, allocating none of it.

Run: python 05_deepspeed_zero/will_it_fit.py --shape 1.5B --ranks 2
Needs: requirements.txt. No accelerator and no launcher; `--model` reads the config of a
    Hugging Face checkpoint, not its weights.
Expect: for each stage, gigabytes by kind on one rank, the most in a step, and on how
    many ranks the model fits into --memory; a `check:` that the shares of all ranks
    make up the model. All but the activations, an estimate, is as held.py counts it.
Before: 05_deepspeed_zero/offload.py; held.py measures what this works out.
Next: 05_deepspeed_zero/losses.py
"""

import argparse
import logging
import os
from typing import Any, NamedTuple

import torch
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from paper import KINDS, PRECISIONS, bytes_for_each, bytes_held, values_added
from peak import ADAMS, most_in_step
from proof import expected_count
from start import positive_int, refuse

# Width, width of the MLP, layers, heads, heads of keys and values, vocabulary, and
# whether one matrix is both embedding and output: as in their config.json on the hub.
SHAPES = {
    "1.5B": ("Qwen2-1.5B", 1536, 8960, 28, 12, 2, 151936, True),
    "7B": ("Qwen2-7B", 3584, 18944, 28, 28, 4, 152064, False),
    "70B": ("Qwen2-72B", 8192, 29568, 80, 64, 8, 152064, False),
}
WORLDS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
ALL_KINDS = (*KINDS, "buckets", "gathered", "activations")


class Job(NamedTuple):
    """What is to be trained, and how; DeepSpeed's defaults where it has some."""

    sizes: list[int]  # values in each tensor of the model
    config: Any
    precision: str = "bf16"
    offload: str = "none"  # or "optimizer", or "all"
    seq_length: int = 2048
    micro_batch_size: int = 1
    bucket: int = 500_000_000  # reduce_bucket_size
    live: int = 1_000_000_000  # stage3_max_live_parameters
    adam: str = "foreach"  # one of ADAMS
    threshold: int = 100_000  # stage3_param_persistence_threshold


def named_shape(name: str) -> Qwen2Config:
    """Return the config of one of SHAPES."""
    _, width, inner, layers, heads, kv_heads, vocabulary, is_tied = SHAPES[name]
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=is_tied,
    )


def tensor_sizes_of(config: Any) -> list[int]:
    """Count the values in each tensor of a model that has shapes and no memory."""
    # On the meta device a tensor knows its shape and holds nothing.
    with torch.device("meta"):
        if isinstance(config, Qwen2Config):
            model = Qwen2ForCausalLM(config)
        else:
            from transformers import AutoModel, AutoModelForCausalLM

            try:
                model = AutoModelForCausalLM.from_config(config)
            except ValueError:  # not a language model
                model = AutoModel.from_config(config)
    assert all(p.is_meta for p in model.parameters())
    return [p.numel() for p in model.parameters()]


def activation_bytes(job: Job) -> int:
    """Estimate what the forward pass leaves for the backward pass, on one rank.

    Counted from the code of transformers' Qwen2 with PyTorch's fused attention. In each
    layer: two norms keep their input in float32, its normalised form and the result;
    attention keeps query, key, value and twice its output; the MLP keeps four tensors
    of its own width. The loss keeps the logits, and their logarithms in float32. All
    this is without activation checkpointing.
    """
    c, wide = job.config, 2 if job.precision == "bf16" else 4
    tokens = job.seq_length * job.micro_batch_size
    width, inner = c.hidden_size, getattr(c, "intermediate_size", 4 * c.hidden_size)
    layer = 2 * width * (4 + 2 * wide) + wide * (5 * width + 4 * inner)
    logits = c.vocab_size * (wide + 4)
    return tokens * (c.num_hidden_layers * layer + logits)


def bytes_on_a_rank(job: Job, stage: int, world_size: int) -> dict[str, float]:
    """Return bytes by kind on rank 0, which is never the one with least; and "host".

    "step" is the most after the last gradient; with offload it is not worked out.

    Raises:
        ValueError: this combination does not exist in DeepSpeed.
    """
    first = {"none": 0, "optimizer": 1, "all": 3}[job.offload]
    if stage < first:
        raise ValueError(f"--offload {job.offload} exists from stage {first} on")
    total, each = sum(job.sizes), bytes_for_each(job.precision, stage)
    paper = bytes_held(total, stage, world_size, job.precision)
    added = values_added(job.sizes, stage, 0, world_size, job.threshold)
    counted: dict[str, float] = {
        kind: paper[kind] + number * added[kind]
        for kind, number in zip(KINDS, each, strict=True)
    }
    # The bucket is as large as it is set, also if the whole model would fit into it.
    counted["buckets"] = job.bucket * each.gradient if stage else 0
    present = min(added["gathered"] + job.live, total) if stage == 3 else 0
    counted["gathered"] = present * each.weight if world_size > 1 else 0
    counted["activations"] = activation_bytes(job)
    how = (job.sizes, stage, 0, world_size, job.precision, job.adam)
    counted["step"] = most_in_step(counted, *how) if job.offload == "none" else 0
    counted["host"] = 0
    if job.offload != "none":
        # Beside the states the host keeps two buffers for the share's gradients, one in
        # float32 and one in the model's precision. From stage 2 on they are collected
        # there, and the accelerator keeps its bucket only.
        buffers = (4 + each.gradient) * total / world_size
        counted["host"] = counted["optimizer"] + buffers
        counted["optimizer"] = 0
        counted["gradients"] *= stage < 2
    if job.offload == "all":
        counted["host"] += counted["parameters"]
        counted["parameters"] = 0
    return counted


def fewest_ranks(job: Job, stage: int, memory: float) -> int | None:
    """Return the smallest of WORLDS on which a rank needs no more than `memory`."""
    for world_size in WORLDS:
        try:
            counted = bytes_on_a_rank(job, stage, world_size)
        except ValueError:
            return None
        in_all = sum(counted[kind] for kind in ALL_KINDS)
        if max(in_all, counted["step"]) <= memory:
            return world_size
    return None


def breakdown(job: Job, world_size: int, memory: float) -> list[str]:
    """Return the table for one number of ranks: a line for each stage."""
    heads = " params  grads states bucket  fetch  ~act. in all   step   host"
    lines = [f"stage   Adam's count{heads}"]
    for stage in range(4):
        count = expected_count(job.sizes, stage, world_size)
        try:
            held = bytes_on_a_rank(job, stage, world_size)
        except ValueError as error:
            lines.append(f"{stage:5}   {error}")
            continue
        amounts = [held[kind] / 1e9 for kind in ALL_KINDS]
        amounts += [sum(amounts), held["step"] / 1e9, held["host"] / 1e9]
        row = "".join(f"{x:7.0f}" if x >= 100 else f"{x:7.2f}" for x in amounts)
        lines.append(f"{stage:5}{count:>15,}{row}")
    found = [(stage, fewest_ranks(job, stage, memory)) for stage in range(4)]
    fits = ", ".join(f"stage {stage}: {ranks or 'never'}" for stage, ranks in found)
    return [*lines, f"ranks it takes to stay below {memory / 1e9:g} GB: {fits}"]


def table_of_shapes(precision: str) -> list[str]:
    """Return GB of parameters, gradients and states for all SHAPES and WORLDS."""
    lines = ["model  stage" + "".join(f"{world:>6}" for world in WORLDS)]
    for name in SHAPES:
        total = sum(tensor_sizes_of(named_shape(name)))
        for stage in range(4):
            held = [bytes_held(total, stage, w, precision).values() for w in WORLDS]
            amounts = [sum(one) / 1e9 for one in held]
            row = "".join(f"{x:6.0f}" if x >= 100 else f"{x:6.2f}" for x in amounts)
            lines.append(f"{name:5} {stage:6}{row}")
    return lines


def load_config(source: str) -> Any:
    """Read the config of a Hugging Face checkpoint; one line if that cannot be done."""
    from transformers import AutoConfig

    # It would tell of every attempt to reach a hub that cannot be reached.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    if os.sep in source and not os.path.exists(source):
        refuse(f"--model {source}: there is no such file or folder")
    try:
        config = AutoConfig.from_pretrained(source)
        # Models of several parts, such as images and text, have a config for each.
        config = config.get_text_config()
        tensor_sizes_of(config)
        return config
    except Exception as error:
        # What is raised depends on the hub, the file and the model's own code.
        known = " ".join(str(error).split())[:90] or type(error).__name__
        refuse(f"--model {source}: no config there that transformers knows ({known})")


def main() -> None:
    """Read the shape, work out the bytes, print them, check the shares."""
    parser = argparse.ArgumentParser(description="Work out what fits on a rank.")
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--model", metavar="PATH_OR_NAME", help="a Hugging Face checkpoint or config")
    add("--shape", choices=SHAPES, default="1.5B", help="or one of these")
    add("--ranks", type=positive_int, default=2, help="number of ranks")
    add("--precision", choices=PRECISIONS, default="bf16")
    add("--offload", choices=("none", "optimizer", "all"), default="none")
    add("--seq-length", type=positive_int, default=2048, help="tokens in a sample")
    add("--micro-batch-size", type=positive_int, default=1, help="samples on a rank")
    add("--bucket", type=positive_int, default=500_000_000, help="reduce_bucket_size")
    add("--live", type=positive_int, default=10**9, help="stage3_max_live_parameters")
    add("--adam", choices=ADAMS, default="foreach", help="PyTorch's on a GPU")
    add("--memory", type=positive_int, default=80, help="GB that a rank has")
    add("--table", action="store_true", help="all shapes on 1 to 1024 ranks, in GB")
    args = parser.parse_args()
    if args.table:
        print("\n".join(table_of_shapes(args.precision)))
    config = load_config(args.model) if args.model else named_shape(args.shape)
    name = args.model or SHAPES[args.shape][0]
    values = args.seq_length, args.micro_batch_size, args.bucket, args.live, args.adam
    job = Job(tensor_sizes_of(config), config, args.precision, args.offload, *values)
    total = sum(job.sizes)
    if not args.table:
        print(
            f"{name}: {total:,} parameters, {args.ranks} rank(s), {args.precision}, GB"
        )
        print("\n".join(breakdown(job, args.ranks, args.memory * 1e9)))
    short = 0
    for stage in range(1, 4):
        for world in {args.ranks, *WORLDS}:
            # Shares are rounded up, by less than 2 values for each rank and tensor.
            rest = expected_count(job.sizes, stage, world) * world - total
            short += not 0 <= rest < 2 * world * len(job.sizes)
    assert short == 0, f"{short} divisions lose parameters"
    print(f"check: {total:,} parameters on the meta device; the shares add up to them")


if __name__ == "__main__":
    main()
