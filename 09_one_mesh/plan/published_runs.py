"""Published training runs as jobs and layouts, each with what was measured.

assets/09_torchtitan.csv and assets/09_megatron.csv say where their rows come from.
"""

import csv
import math
from pathlib import Path
from typing import Any, NamedTuple

from computation import FITTED, Constants
from jobs import CLUSTERS, Cluster, Job, Layout
from memory import ALLOCATOR, kept_by_block, peak_bytes
from models import MODELS, Model
from step_time import step_cost

ASSETS = Path(__file__).resolve().parent.parent.parent / "assets"
# H100 with 96 GB of HBM2e, 500 W and 400 Gb/s: the header of the file.
SXM, SXM_WATTS, WATTS = 989e12, 700, 500
# That is the peak of 700 W. A chip's power grows about with the clock's third power
# (the clock, and the square of a voltage that rises with it): 500 W allow 0.89 of it.
H100: dict[str, Any] = CLUSTERS["h100"] | {"hbm": 2.4e12, "memory": 96 * 2**30}
H100["flops"] = SXM * (WATTS / SXM_WATTS) ** (1 / 3)
# 8 InfiniBand links of 200 Gb/s a host: arXiv 2104.04473, section 5.
A100: dict[str, Any] = CLUSTERS["a100-80"] | {"memory": 80e9}
CONTEXT, VOCABULARY = 2048, 51200  # of the GPTs: the header of the file


class Run(NamedTuple):
    """A row: what was run, and its tokens per second and device, and GiB or None."""

    name: str
    job: Job
    layout: Layout
    tokens_per_second: float
    gib: float | None
    counted: float  # operations a token, as the source counts them for its MFU
    peak: float  # that the source's MFU is a part of


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a file in assets/, without its comments."""
    lines = (ASSETS / name).read_text("utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def torchtitan() -> list[Run]:
    """Return the runs of Llama 3.1 on 8 to 512 H100."""
    runs = []
    for row in rows("09_torchtitan.csv"):
        model, t = MODELS[f"llama3-{row['model'].lower()}"], int(row["sequence"])
        mesh = [int(row[axis]) for axis in ("fsdp", "tp", "pp", "cp")]
        cluster = Cluster(int(row["devices"]), **H100)
        kind = {"fp8": row["precision"] == "fp8", "compiled": row["compiled"] == "yes"}
        job = Job(model, cluster, int(row["global_batch"]), t, **kind)
        # Where nothing else is set torchtitan makes as many micro-batches as stages.
        of_rank = 2 if row["schedule"].lower().startswith("interleaved") else 1
        micro_batch = max(1, int(row["local_batch"]) // (mesh[2] * of_rank))
        layout = Layout(mesh[0], mesh[1], mesh[2], mesh[3], recompute=row["ac"])
        layout = layout._replace(micro_batch=micro_batch, interleaved=of_rank)
        # 6 for each weight, and no causal mask.
        weights = model.parameters() - model.embedding()
        counted = 6 * weights + 12 * model.layers * model.width * t
        what = row["precision"] if job.compiled else "eager"
        name = f"{row['model']:>4} {describe(job, layout)} {what}"
        measured = float(row["tps"]), float(row["memory_gib"] or "nan")
        runs.append(Run(name, job, layout, *measured, counted, SXM))
    return runs


def megatron() -> list[Run]:
    """Return the runs of GPT on 32 to 3072 A100, with micro-batches of one sequence.

    The file says neither the size of a micro-batch nor the number of heads: heads of
    128 columns are assumed. Pipelines are interleaved (section 5.1), here with as few
    stages a rank as the layers allow.
    """
    runs = []
    for row in rows("09_megatron.csv"):
        width, layers, batch = (int(row[k]) for k in ("hidden", "layers", "batch"))
        ways, devices = int(row["model_parallel"]), int(row["devices"])
        t, p = min(8, ways), max(1, ways // 8)
        sizes = layers, width, width // 128, width // 128, 4 * width, VOCABULARY
        model = Model(*sizes, is_gpt=True, positions=CONTEXT)
        job = Job(model, Cluster(devices, **A100), batch, CONTEXT, overlap=False)
        of_rank = [v for v in range(2, layers // p + 1) if layers // p % v == 0]
        stages = of_rank[0] if p > 1 and of_rank else 1
        layout = Layout(devices // ways, t, p, 1, "none", 1, "full", stages)
        # Equation 3 of the paper: with recomputation, without a causal mask.
        terms = 1 + CONTEXT / (6 * width) + VOCABULARY / (16 * layers * width)
        counted = 96 * layers * width**2 * terms
        rate = float(row["tflops"]) * 1e12 / counted
        name = f"{row['model']:>4} {describe(job, layout)} fp16"
        runs.append(Run(name, job, layout, rate, None, counted, A100["flops"]))
    return runs


def llama3() -> list[tuple[str, Job, Layout]]:
    """Return Llama 3 405B on 8,192 and 16,384 H100: arXiv 2407.21783, table 4.

    The memory of a device, 80 GB, is known; what a rank needed is not. Nothing was
    recomputed, and of the state only gradients and optimizer were sharded (section
    3.3.2); the planner's nearest is ZeRO-1, as a pipeline accumulates whole gradients.
    """
    runs = []
    devices_of: dict[str, Any] = CLUSTERS["h100"] | {"memory": 80e9}
    for devices, data in ((8192, 64), (16384, 128)):
        cluster = Cluster(devices, **devices_of)
        job = Job(MODELS["llama3-405b"], cluster, 2048, 8192)
        layout = Layout(data, 8, 16, 1, "zero-1", 1, "none")
        runs.append((f"405B {describe(job, layout)}", job, layout))
    return runs


def describe(job: Job, layout: Layout) -> str:
    """Return devices, sequence and mesh in columns."""
    mesh = " x".join(f"{n:2}" for n in layout[:4])
    return f"{job.cluster.devices:4} {job.sequence:6} {mesh}"


def predicted_rate(run: Run, constants: Constants = FITTED) -> float:
    """Return the tokens per second and device that the planner predicts."""
    job = run.job
    step = step_cost(job, run.layout, constants).step
    return job.batch * job.sequence / step / job.cluster.devices


def predicted_gib(run: Run) -> float:
    """Return the peak that the planner predicts, in GiB."""
    return sum(peak_bytes(run.job, run.layout).values()) / 2**30


def predicted_with_inputs(job: Job, layout: Layout) -> tuple[float, float]:
    """Return the peak in GB, and what it is if no gathered input is kept for backward.

    Tensor-parallel ranks can keep the shard and gather it again: 2205.05198, section
    4.2.2.
    """
    kinds = peak_bytes(job, layout)
    kept = kept_by_block(job, layout.recompute, layout.tensor)
    inputs = kinds["activations"] * 4 * job.model.width / kept * ALLOCATOR
    need = sum(kinds.values())
    return need / 1e9, (need - inputs) / 1e9


def best_utilisation(runs: list[Run]) -> float:
    """Return the one MFU that predicts the given runs with the least error."""
    mfu = [math.log(r.tokens_per_second * r.counted / r.peak) for r in runs]
    return math.exp(sum(mfu) / len(mfu))
