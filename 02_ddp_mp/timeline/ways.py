"""One step in five ways: without synchronisation, by hand in three ways, and by DDP.

Shapes: B samples of a rank, W numbers in a sample, which is the width of every layer.
"""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from bucketed import BucketedDDP
from flat import FlatDDP
from naive import NaiveDDP
from tracing import is_possible, whole_steps

LAYERS = 8
LIMIT = 1e-5  # what rounding may change in a gradient, relative to the largest
# How to wrap a model, given the MB of a bucket. The first way trains no common model:
# its step time is the least that this machine can reach.
WAYS: dict[str, Callable[[nn.Module, float], nn.Module]] = {
    "no synchronisation": lambda model, _: model,
    "naive": lambda model, _: NaiveDDP(model),
    "flat": lambda model, _: FlatDDP(model),
    "bucketed": BucketedDDP,
    "DDP": lambda model, megabytes: DistributedDataParallel(
        model, bucket_cap_mb=megabytes, gradient_as_bucket_view=True
    ),
}


def make_models(width: int, megabytes: float) -> tuple[nn.Module, dict]:
    """Make a plain model, and a replica of it wrapped in each way.

    Its layers are equal: there is as much to all-reduce from each of them.
    """
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)]
    plain = nn.Sequential(*blocks)
    return plain, {n: WAYS[n](copy.deepcopy(plain), megabytes) for n in WAYS}


def compute_gradients(model: nn.Module, inputs: torch.Tensor) -> None:
    """Go forward and backward, synchronise, and name each part for the profiler."""
    with record_function("part: forward"):
        loss = model(inputs).square().mean()
    with record_function("part: backward"):
        loss.backward()
    with record_function("part: finish"):
        # The wrappers made by hand need this call. DDP waits within backward.
        if isinstance(model, NaiveDDP):
            model.finish_gradient_sync()


def take_step(model: nn.Module, inputs: torch.Tensor) -> None:
    """Take a whole step on this rank's inputs, (B, W)."""
    compute_gradients(model, inputs)
    with record_function("part: optimizer"):
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        model.zero_grad()


def take_gradients(model: nn.Module) -> torch.Tensor:
    """Return the gradients as one flat tensor, and clear them."""
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    flat = torch.cat(gradients)
    model.zero_grad()
    return flat


def gradient_errors(
    plain: nn.Module, models: dict[str, nn.Module], both: torch.Tensor
) -> dict[str, float]:
    """Compare each way's gradients with those that one process computes on all samples.

    Returns the largest difference of each way, relative to the largest gradient. The
    models wrap replicas of `plain`; the ranks' inputs are `both`, (ranks, B, W).
    """
    compute_gradients(plain, both.flatten(0, 1))
    expected, errors = take_gradients(plain), {}
    for name, model in models.items():
        for _ in range(2):  # DDP rebuilds its buckets after its first backward
            compute_gradients(model, both[dist.get_rank()])
            difference = (take_gradients(model) - expected).abs().max()
            errors[name] = (difference / expected.abs().max()).item()
    return errors


def find_faults(name: str, errors: list, seconds: list, traces: list) -> list[str]:
    """Name all that is not as the lesson says with one way, as it was measured.

    The lists are those of `timeline.measure_ways`.
    """
    is_alone, steps = name == "no synchronisation", whole_steps(traces)
    faults = [] if steps and seconds else ["no step was traced without a gap"]
    worst = torch.tensor(errors).max()  # max() would drop a NaN
    if not (worst >= LIMIT if is_alone else worst < LIMIT):
        faults.append(f"gradients {max(errors):.0e} from one process's")
    if not all(map(is_possible, steps)):
        faults.append("an all-reduce ended before it had begun")
    for calls, early in {(one["calls"], one["early"]) for two in steps for one in two}:
        # The last bucket is full when the last gradient has been computed. The options
        # allow no bucket that holds everything.
        if early != (max(1, calls - 1) if name in ("bucketed", "DDP") else 0):
            faults.append(f"{early} of {calls} all-reduces started during backward")
    return [f"{name}: {fault}" for fault in faults]
