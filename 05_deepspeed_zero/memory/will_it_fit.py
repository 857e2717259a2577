"""Will it fit? What training a model of any size takes on a rank, allocating nothing.

Run: python 05_deepspeed_zero/memory/will_it_fit.py --shape=1.5B --ranks=2 --memory=32
Expect: for each stage the GB of each kind on a rank, its need, and whether that fits.
"""

import argparse
import logging
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from peak import ADAMS, Job, fewest_ranks, rank_bytes
from ranks import fail, number, read_options

# Width, width of the MLP, layers, heads, heads of keys and values, vocabulary, and
# whether one matrix is both embedding and output: as in their config.json on the hub.
SHAPES = {
    "1.5B": ("Qwen2-1.5B", 1536, 8960, 28, 12, 2, 151936, True),
    "7B": ("Qwen2-7B", 3584, 18944, 28, 28, 4, 152064, False),
    "70B": ("Qwen2-72B", 8192, 29568, 80, 64, 8, 152064, False),
}
SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPE += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
WORLDS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
KINDS = {"parameters": "params", "gradients": "grads", "optimizer": "optim"}
KINDS |= {"buckets": "bucket", "gathered": "gather", "activations": "act."}


def tensor_sizes_of(config: Any) -> list[int]:
    """Count the values in each tensor of a model that has shapes and no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return [p.numel() for p in model.parameters()]


def job_of_shape(shape: str, **settings: Any) -> Job:
    """Describe the training of one of SHAPES; `settings` are fields of Job."""
    values = dict(zip(SHAPE, SHAPES[shape][1:], strict=True))
    config = AutoConfig.for_model("qwen2", **values)
    return Job(tensor_sizes_of(config), config, **settings)


def breakdown(job: Job, world_size: int, memory: float) -> list[str]:
    """Return a line for each stage: GB by kind on one rank, and whether they fit."""
    last = ("step", "need") if job.offload == "none" else ("need", "host")
    columns = (*KINDS, *last)
    heads = "".join(f"{KINDS.get(column, column):>7}" for column in columns)
    lines = [f"stage   Adam's count{heads}  fits  from"]
    for stage in range(4):
        try:
            found = rank_bytes(job, stage, world_size)
        except ValueError as error:
            lines.append(f"{stage:5}  {error}")
            continue
        amounts = [found[column] / 1e9 for column in columns]
        row = "".join(f"{x:7.0f}" if x >= 1000 else f"{x:7.2f}" for x in amounts)
        fits = "yes" if found["need"] <= memory else "no"
        ranks = fewest_ranks(job, stage, memory) or "never"
        lines.append(f"{stage:5} {found['count']:14,}{row}{fits:>6}{ranks:>6}")
    return lines


def table_of_needs(jobs: dict[str, Job]) -> list[str]:
    """Return the GB that a rank needs, for all jobs, stages and WORLDS."""
    lines = ["model  stage" + "".join(f"{world:>6}" for world in WORLDS)]
    for name, job in jobs.items():
        for stage in range(4):
            needs = [rank_bytes(job, stage, n)["need"] / 1e9 for n in WORLDS]
            row = "".join(f"{x:6.0f}" if x >= 100 else f"{x:6.1f}" for x in needs)
            lines.append(f"{name:5}{stage:7}{row}")
    return lines


def main(options: argparse.Namespace) -> None:
    """Work out the bytes of the model that was asked for, and print them."""
    settings = {k: v for k, v in vars(options).items() if k in Job._fields}
    if options.table:
        jobs = {name: job_of_shape(name, tokens=options.tokens) for name in SHAPES}
        return print("\n".join(table_of_needs(jobs)))
    name, job = SHAPES[options.shape][0], job_of_shape(options.shape, **settings)
    if options.model:  # the hub would tell of every attempt to reach it
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
        try:
            config = AutoConfig.from_pretrained(options.model).get_text_config()
            name, job = options.model, Job(tensor_sizes_of(config), config, **settings)
        except Exception as error:  # of the hub, of the file, or of the model's code
            fail(f"--model {options.model}: no causal model there: {str(error)[:60]!r}")
    print(f"{name}: {sum(job.sizes):,} parameters on {options.ranks} rank(s), GB")
    print("\n".join(breakdown(job, options.ranks, options.memory * 1e9)))


if __name__ == "__main__":
    words = {"precision": ("bf16", "fp32"), "grad_accum_dtype": ("", "fp32")}
    words |= {"offload": ("none", "optimizer", "all"), "adam": tuple(ADAMS)}
    amounts = Job([], None)._asdict() | {"ranks": 2, "memory": 80}
    options = {k: {"choices": v, "default": v[0]} for k, v in words.items()}
    for name in ("ranks", "memory", "tokens", "bucket", "micro_batches"):
        options[name] = {"type": number(1, 1 << 40), "default": amounts[name]}
    options["shape"] = {"choices": SHAPES, "default": "1.5B"}
    options["model"] = {"metavar": "PATH_OR_NAME", "help": "a checkpoint's config"}
    options["table"] = {"action": "store_true", "help": "GB for 1 to 1024 ranks"}
    main(read_options(**options))
