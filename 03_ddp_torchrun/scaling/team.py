"""The first ranks of the world, which train together while the others wait.

A step computes gradients and nothing else. Its buckets are all-reduced during backward,
after backward, or never.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from model import GPT, GPTConfig
from ranks import gather


def clock(device: torch.device) -> float:
    """Return the time in seconds, once the device has caught up."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


class Synchroniser:
    """A communication hook that all-reduces at once, or leaves buckets for later."""

    def __init__(self, group: Any, device: torch.device) -> None:
        """Begin with a step that communicates nothing."""
        # It must not know the DDP model, which holds it: neither would ever be freed.
        self.group, self.device, self.when, self.started = group, device, "never", 0.0
        self.buckets: list[tuple[float, torch.Tensor]] = []

    def hook(
        self, _: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket from DDP: all-reduce it now, or note when it was ready."""
        gradients = bucket.buffer()
        if self.when == "during backward":
            mean: Any = {"op": dist.ReduceOp.AVG, "group": self.group}
            work: Any = dist.all_reduce(gradients, async_op=True, **mean)
            return work.get_future().then(lambda done: done.value()[0])
        self.buckets.append((clock(self.device) - self.started, gradients))
        unchanged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        unchanged.set_result(gradients)
        return unchanged


class Team:
    """Some ranks, each with a replica of the model under DDP."""

    def __init__(
        self,
        world_size: int,
        bucket_cap_mb: float,
        device: torch.device,
        hook: Callable[..., Any] | None = None,
    ) -> None:
        """Form a group; every rank of the world must call this.

        A communication `hook` of the caller's, which is told the group, all-reduces
        during backward, always.
        """
        is_all = world_size == dist.get_world_size()
        group = dist.group.WORLD if is_all else dist.new_group(list(range(world_size)))
        self.group: Any = group
        self.is_in, self.device = dist.get_rank() < world_size, device
        self.sync = Synchroniser(group, device)
        torch.manual_seed(0)
        self.model = GPT(GPTConfig()).to(device)
        if self.is_in:
            look: dict[str, Any] = {"bucket_cap_mb": bucket_cap_mb}
            look |= {"process_group": group, "gradient_as_bucket_view": True}
            self.ddp_model = DDP(self.model, **look)
            self.ddp_model.register_comm_hook(group, hook or self.sync.hook)

    def step(self, samples: int, when: str, micro_batches: int = 1) -> None:
        """Compute gradients; all-reduce their buckets `when`, in the last micro-batch.

        Every rank has other tokens, `samples` times 128 in each micro-batch.
        """
        self.sync.when, self.sync.buckets = when, []
        self.sync.started = clock(self.device)
        self.ddp_model.zero_grad()
        draw = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(256, (samples, 128), generator=draw).to(self.device)
        for left in reversed(range(micro_batches)):
            with self.ddp_model.no_sync() if left else nullcontext():
                self.ddp_model(tokens, tokens.roll(-1, dims=1)).backward()
        if when == "never":
            dist.barrier(self.group)  # one waits for the other, as an all-reduce does
        elif when == "after backward":
            for _, gradients in self.sync.buckets:
                dist.all_reduce(gradients, op=dist.ReduceOp.AVG, group=self.group)

    def all_reduce(self, message: torch.Tensor) -> None:
        """Sum a message over the team."""
        dist.all_reduce(message, group=self.group)

    def gradient(self, when: str) -> torch.Tensor:
        """Return the gradient that a step leaves on this rank, (parameters,)."""
        self.step(2, when)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return torch.cat([grad.flatten() for grad in grads])

    def seconds(self, call: Callable[..., object], *arguments: Any) -> float:
        """Time a call on the slowest rank; every rank of the world must call this."""
        time.sleep(0.02)  # so that a link's token bucket is full again
        dist.barrier()
        started = clock(self.device)
        if self.is_in:
            call(*arguments)
        return max(gather(clock(self.device) - started if self.is_in else 0.0))


def distance_from(team: Team, when: str, exact: Team) -> float:
    """Compare an all-reduced gradient with the mean of another team's local ones.

    Both are of all ranks, and all of them must call this. Returns the largest
    difference, of the largest entry.
    """
    mean = exact.gradient("never")
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    error = (team.gradient(when) - mean).abs().max() / mean.abs().max()
    return error.item()


def json_path(text: str) -> Path:
    """Take the name of a file that can be written later, for argparse."""
    if not Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {Path(text).parent}")
    return Path(text)


def add_to_file(path: Path | None, name: str, found: Any) -> None:
    """Keep what was found under a name, beside what else a JSON file holds."""
    if path and dist.get_rank() == 0:
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | {name: found}) + "\n")
