"""Will it fit? What training a model of any size takes on a rank, allocating nothing.

Run: python 05_deepspeed_zero/memory/will_it_fit.py --shape=1.5B --ranks=2 --memory=32
Expect: for each stage the GB or MB of each kind on a rank, its need, and whether that
    fits.
"""

import argparse
import logging
import runpy
import site
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
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


def half_frozen() -> tuple[nn.Module, Callable]:
    """Return a module, and what makes the loss of a batch; an example of --module."""
    layer = nn.TransformerEncoderLayer(1024, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=24)
    model.layers[:12].requires_grad_(False)
    return model, lambda: model(torch.zeros(8, 512, 1024)).square().mean()


def job_of_module(place: str, precision: str = "bf16", **settings: Any) -> Job:
    """Describe the training of your own model; `place` is FILE.py:FUNCTION.

    The function returns a module and a function that computes a loss with it. What
    activation checkpointing computes again in backward is not counted.
    """
    file, _, function = place.rpartition(":")
    site.addsitedir(str(Path(file).parent))  # what it imports may lie beside it
    build, kept = runpy.run_path(file)[function], {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()  # what several views share is kept once
        kept[storage] = storage.nbytes()
        return tensor

    torch.set_default_dtype(torch.bfloat16 if precision == "bf16" else torch.float32)
    with torch.device("meta"):
        model, loss_of_model = build()
    # Fake tensors have no memory either, but the kernels of a real device: attention on
    # the meta device would keep more, and oneDNN's LSTM shows little of what it keeps.
    fake: dict[torch.Tensor, torch.Tensor] = {}
    as_it_is: Any = None  # setting it would warn
    with (
        FakeTensorMode(),
        torch.backends.mkldnn.flags(enabled=False, allow_tf32=as_it_is),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
    ):
        for module in model.modules():
            for named in (module._parameters, module._buffers):
                for name, tensor in named.items():
                    if tensor is not None and tensor not in fake:
                        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                        fake[tensor] = empty.requires_grad_(tensor.requires_grad)
                    named[name] = tensor if tensor is None else fake[tensor]
        loss = loss_of_model()
    torch.set_default_dtype(torch.float32)
    for tensor in fake.values():
        kept.pop(tensor.untyped_storage(), None)
    trained, frozen = (
        [p.numel() for p in model.parameters() if p.requires_grad is wanted]
        for wanted in (True, False)
    )
    if not trained:
        raise ValueError("none of the model's parameters requires a gradient")
    if loss is None or not loss.requires_grad:
        raise ValueError("the second function returns no loss of the model's")
    counted: Any = {"frozen": tuple(frozen), "activations": sum(kept.values())}
    # DeepSpeed casts parameters only: buffers stay in float32.
    counted["buffers"] = sum(
        b.numel() * (4 if b.is_floating_point() else b.element_size())
        for b in model.buffers()
    )
    return Job(trained, None, precision, **settings, **counted)


def breakdown(job: Job, world_size: int, memory: float) -> tuple[str, list[str]]:
    """Return GB, or MB for a small job, and a line for each stage in that unit.

    A line has the bytes of each kind on one rank, and says whether they fit.
    """
    last = ("step", "need") if job.offload == "none" else ("need", "host")
    columns = (*KINDS, *last)
    heads = "".join(f"{KINDS.get(column, column):>7}" for column in columns)
    lines, found = [f"stage   Adam's count{heads}  fits  from"], {}
    for stage in range(4):
        try:
            found[stage] = rank_bytes(job, stage, world_size)
        except ValueError as error:
            lines.append(f"{stage:5}  {error}")
    largest = max(
        (of[column] for of in found.values() for column in columns), default=0
    )
    unit, in_bytes = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    for stage, of in found.items():
        amounts = [of[column] / in_bytes for column in columns]
        row = "".join(f"{x:7.0f}" if x >= 1000 else f"{x:7.2f}" for x in amounts)
        fits = "yes" if of["need"] <= memory else "no"
        ranks = fewest_ranks(job, stage, memory) or "never"
        lines.append(f"{stage:5} {of['count']:14,}{row}{fits:>6}{ranks:>6}")
    return unit, lines


def main(options: argparse.Namespace) -> None:
    """Work out the bytes of the model that was asked for, and print them."""
    given = {k: v for k, v in vars(options).items() if v is not None}
    settings = {k: v for k, v in given.items() if k in Job._fields}
    if len(models := given.keys() & {"shape", "model", "module"}) > 1:
        fail(f"give one of --{', --'.join(sorted(models))}")
    if options.module and options.tokens:
        fail("--tokens is of --shape and --model: FUNCTION makes the inputs itself")
    shape = options.shape or "1.5B"
    name, job = SHAPES[shape][0], job_of_shape(shape, **settings)
    if options.module:
        try:
            name = options.module.rpartition(":")[2]
            job = job_of_module(options.module, **settings)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            what = f"depends on values, as .item() or nonzero(): {error.func}"
            fail(f"--module {options.module}: its code {what}; here tensors have none")
        except Exception as error:  # of the reader's own code
            what = f"{type(error).__name__}: {error}".split("\n")[0]
            expected = (
                "write FILE.py:FUNCTION like this script's half_frozen, inputs made "
                "in the loss"
            )
            fail(f"--module {options.module}: {what[:99]}; {expected}")
    if options.model:  # the hub would tell of every attempt to reach it
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
        try:
            config = AutoConfig.from_pretrained(options.model).get_text_config()
            name, job = options.model, Job(tensor_sizes_of(config), config, **settings)
        except Exception as error:  # of the hub, of the file, or of the model's code
            fail(f"--model {options.model}: no causal model there: {str(error)[:60]!r}")
    count = f"{sum(job.sizes) + sum(job.frozen):,} parameters"
    count += f", {sum(job.frozen):,} of them frozen," if job.frozen else ""
    unit, lines = breakdown(job, options.ranks, options.memory * 1e9)
    print(f"{name}: {count} on {options.ranks} rank(s), {unit}")
    print("\n".join(lines))


if __name__ == "__main__":
    words = {"precision": ("bf16", "fp32"), "grad_accum_dtype": ("", "fp32")}
    words |= {"offload": ("none", "optimizer", "all"), "adam": tuple(ADAMS)}
    amounts = Job([], None)._asdict() | {"ranks": 2, "memory": 80}
    options = {k: {"choices": v, "default": v[0]} for k, v in words.items()}
    for name in ("ranks", "memory", "tokens", "bucket", "micro_batches"):
        options[name] = {"type": number(1, 1 << 40), "default": amounts[name]}
    options["bucket"]["type"] = number(1.0, 1e12)  # 5e6 too
    options["tokens"] |= {"default": None, "help": "at a time on a rank; else 2048"}
    options["shape"] = {"choices": SHAPES, "help": "1.5B, if you give no model"}
    options["model"] = {"metavar": "PATH_OR_NAME", "help": "a checkpoint's config"}
    options["module"] = {"metavar": "FILE.py:FUNCTION", "help": "a model of your own"}
    main(read_options(**options))
