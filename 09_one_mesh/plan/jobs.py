"""What is planned: a model on a cluster with a batch, and one way to lay it out.

Here too are the options of plan.py, which name both.

The mesh, from the outside in: pipeline, data, context, tensor. Ranks next to each other
in the tensor dimension are in one host.
"""

import argparse
import sys
from typing import Any, NamedTuple

from models import MODELS, Model, read_model

RECOMPUTE = ("none", "selective", "full")
SHARDING = ("none", "zero-1", "zero-2", "fsdp")  # zero-3 is fsdp
# NVIDIA's datasheets; a network link of 200 Gb/s for each A100, 400 for each H100. Of
# the peak, FlashAttention-2 reaches 50 to 73 % on an A100 (arXiv 2307.08691, abstract;
# here the lower end) and 35 % on an H100 (2407.08608, abstract). Memory is in GB.
A100_40 = {"memory": 40.0, "flops": 312e12, "hbm": 1.555e12, "flash": 0.5}
A100_40 |= {"inside": 300e9, "between": 25e9}
CLUSTERS = {
    "a100-40": A100_40,
    "a100-80": A100_40 | {"memory": 80.0, "hbm": 2.039e12},
    "h100": {"memory": 80.0, "flops": 989e12, "hbm": 3.35e12, "flash": 0.35}
    | {"inside": 450e9, "between": 50e9},
}


NUMBERS = {  # least, most, and what it is
    "devices": (1, 131_072, "all of them"),
    "memory": (0.01, 10_000, "GB (10^9 bytes) of a device"),
    "flops": (1e11, 1e17, "peak of a device in bf16, operations a second"),
    "hbm": (1e9, 1e15, "bytes a second of its memory"),
    "flash": (0.01, 1, "of the peak, what flash attention reaches"),
    "inside": (1e7, 1e14, "bytes a second between devices of a host, one direction"),
    "between": (1e6, 1e13, "bytes a second of a device's network link"),
    "per_host": (1, 131_072, "devices of a host"),
    "batch": (1, 10**9, "global batch, in sequences"),
    "sequence": (1, 10**9, "tokens of a sequence"),
    "rows": (1, 1000, "shapes to show"),
}
DEFAULTS = {"devices": 32, "per_host": 8, "batch": 1024, "sequence": 4096, "rows": 5}
FIXED = ("tensor", "pipeline", "context", "micro_batch", "interleaved")


class Cluster(NamedTuple):
    """Devices and links; bytes, operations and bytes a second, of one device."""

    devices: int
    memory: float
    flops: float  # peak in bf16
    hbm: float  # the device's memory, bytes a second
    inside: float  # between devices of a host, in one direction
    between: float  # between hosts, in one direction
    flash: float  # of the peak, in flash attention
    per_host: int = 8


class Job(NamedTuple):
    """A step to take: `batch` sequences of `sequence` tokens."""

    model: Model
    cluster: Cluster
    batch: int
    sequence: int
    fp8: bool = False  # the blocks' matrices are multiplied in fp8
    compiled: bool = True  # element-wise operations are fused
    overlap: bool = True  # data-parallel communication hides behind computation
    balanced: bool = False  # the causal mask's work is the same on all context ranks
    async_tensor: bool = False  # tensor-parallel communication behind matrix products


class Layout(NamedTuple):
    """Ranks along each dimension of the mesh, and what each does with its part."""

    data: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sharding: str = "fsdp"
    micro_batch: int = 1
    recompute: str = "none"
    interleaved: int = 1  # stages on each rank of the pipeline

    @property
    def devices(self) -> int:
        """Return the number of ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def shards(self) -> int:
        """Return the ranks that FSDP or ZeRO shards over: data times context."""
        return self.data * self.context

    def micro_batches(self, job: Job) -> int:
        """Return how many micro-batches a rank has in a step."""
        return job.batch // (self.data * self.micro_batch)

    def tokens(self, job: Job) -> int:
        """Return the tokens of a micro-batch on one rank."""
        return self.micro_batch * job.sequence // self.context

    def blocks(self, job: Job) -> int:
        """Return the blocks of the longest stage."""
        return -(-job.model.layers // self.pipeline)

    def __str__(self) -> str:
        """Name the layout by what is not 1 in it."""
        named = zip(("data", "tensor", "pipeline", "context"), self, strict=False)
        mesh = " x ".join(f"{axis} {n}" for axis, n in named if n != 1)
        how = f"sharding {self.sharding}, micro-batch {self.micro_batch}"
        return f"{mesh or 'one rank'} ({how}, recompute {self.recompute})"


def flag(name: str) -> str:
    """Return the option of a name."""
    return f"--{name.replace('_', '-')}"


def read_arguments(**defaults: Any) -> argparse.Namespace:
    """Read the options; refuse in one line what is none, or is out of its range.

    An option whose default is None may be left out.
    """
    parser = argparse.ArgumentParser(description="Plan a training run.")
    parser.error = lambda message: sys.exit(f"{parser.prog}: {message}")  # type: ignore
    parser.add_argument(
        "--model",
        default="llama2-13b",
        help="a name, or layers,width,heads,kv_heads,inner,vocabulary",
    )
    text = "the next six options at once (a100-40)"
    parser.add_argument("--cluster", default="a100-40", choices=CLUSTERS, help=text)
    for name in sorted(NUMBERS, key=DEFAULTS.__contains__):
        values = ", ".join(
            f"{of}: {c[name]:g}" for of, c in CLUSTERS.items() if name in c
        )
        default, text = DEFAULTS.get(name), NUMBERS[name][2]
        kind, text = (int if default else float), f"{text} ({default or values})"
        parser.add_argument(flag(name), type=kind, default=default, help=text)
    for name in FIXED:
        parser.add_argument(flag(name), type=int, help="choose it")
    zero_3 = {"zero-3": "fsdp"}
    parser.add_argument(
        "--sharding",
        type=lambda text: zero_3.get(text, text),
        choices=SHARDING,
        help="choose it; zero-3 is fsdp",
    )
    parser.add_argument("--recompute", choices=RECOMPUTE, help="choose it")
    parser.add_argument("--fp8", action="store_true", help="multiply in fp8")
    text = "the causal mask's work is the same on all context ranks"
    parser.add_argument("--balanced", action="store_true", help=text)
    parser.set_defaults(**defaults)
    options = parser.parse_args()
    for name, value in CLUSTERS[options.cluster].items():
        if vars(options)[name] is None:
            setattr(options, name, value)
    for name, (least, most, text) in NUMBERS.items():
        value = vars(options)[name]
        if value is not None and not least <= value <= most:
            bounds = f"not from {least:g} to {most:g}"
            shown = f"{value:,}" if isinstance(value, int) else f"{value:g}"
            parser.error(f"{flag(name)} is {shown}: {bounds} ({text})")
    for name in FIXED:
        if (value := vars(options)[name]) is not None and value < 1:
            parser.error(f"{flag(name)} is {value}: not above 0")
    return options


def read_job(options: dict[str, Any]) -> Job:
    """Return the job that a command's options name, with memory in GB.

    Raises ValueError, with one line, if there is no such model.
    """
    values = {name: options[name] for name in Cluster._fields}
    cluster = Cluster(**values | {"memory": 1e9 * options["memory"]})
    names = [name for name in Job._fields[2:] if name in options]
    model = read_model(options["model"])
    return Job(model, cluster, **{name: options[name] for name in names})


def read_jobs(
    options: dict[str, Any], devices: tuple[int, ...]
) -> dict[str, list[Job]]:
    """Return the jobs of the model that the options name, or of all known models.

    Each has a job for the options' number of devices, or for each of `devices`.
    Raises ValueError as `read_job`.
    """
    return {
        model: [
            read_job(options | {"model": model, "devices": n})
            for n in ([options["devices"]] if options["devices"] else devices)
        ]
        for model in ([options["model"]] if options["model"] else MODELS)
    }


def why_not(job: Job, layout: Layout) -> str:
    """Return in one line why a layout cannot be, or nothing if it can."""
    model, t, p, c = job.model, layout.tensor, layout.pipeline, layout.context
    if model.kv_heads % t:  # which divide the heads
        return f"{model.heads} heads, {model.kv_heads} kv heads: not divisible by {t}"
    if t > job.cluster.per_host:
        return f"tensor={t} crosses hosts of {job.cluster.per_host}"
    if job.cluster.devices > job.cluster.per_host and job.cluster.per_host % t:
        return f"tensor={t} does not divide hosts of {job.cluster.per_host}"
    if job.batch % (layout.data * layout.micro_batch):
        each = f"{layout.data} data ranks x micro-batches of {layout.micro_batch}"
        return f"a batch of {job.batch} sequences: not divisible by {each}"
    if p * layout.interleaved > model.layers:
        return f"{p * layout.interleaved} stages, but {model.layers} layers"
    if layout.interleaved > 1 and (p == 1 or layout.micro_batches(job) % p):
        return f"interleaving: {layout.micro_batches(job)} micro-batches, {p} stages"
    # A balanced causal mask gives each rank an early and a late chunk.
    chunks = t * (2 * c if c > 1 else 1)
    if job.sequence % chunks:
        return f"a sequence of {job.sequence} tokens: not divisible by {chunks}"
    if p > 1 and layout.sharding == "zero-2":
        return "zero-2 shards gradients, which a pipeline accumulates whole"
    if layout.devices != job.cluster.devices:
        return f"{layout.devices} ranks on {job.cluster.devices} devices"
    return ""
