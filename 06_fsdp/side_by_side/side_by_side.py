"""Train one GPT in every way of chapters 03, 05 and 06: what does each keep and send?

Run: torchrun --nproc-per-node=2 06_fsdp/side_by_side/side_by_side.py
Expect: a row for each way: the last loss, how far a parameter is from one process's,
    what a rank keeps and takes at the peak, in how many collectives it sends what, and
    the time of a step. On four ranks also two replicas of two shards.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ranks import check, fail, gather, join, say
from ways import SAMPLES, WAYS, Run, alone, global_batches, train_and_count
from ways import leave_deepspeed as leave

HEAD = (
    f"{'bytes for each parameter':29}    loss  apart   kept   peak calls   sent     ms"
)


def largest_distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference of two models' parameters."""
    pairs = zip(ours, theirs, strict=True)
    # A NaN stays in a tensor's maximum; Python's max() would drop it.
    return torch.stack([(a - b).abs().max() for a, b in pairs]).max().item()


def table_row(name: str, run: Run, apart: float, parameters: int) -> str:
    """Format what one way came to."""
    counts = (run.kept, run.peak, run.sent)
    kept, peak, sent = (f"{count / parameters:6.2f}" for count in counts)
    numbers = f"{kept} {peak} {run.calls:5} {sent} {run.milliseconds:5.1f}"
    return f"{name:29} {run.losses[-1]:7.4f} {apart:6.0e} {numbers}"


def main() -> None:
    """Train alone, then in each way; compare parameters, losses and bytes."""
    device = join(at_least=2, at_most=4)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if SAMPLES % world_size:
        fail(f"{SAMPLES} samples cannot be sharded evenly over {world_size} ranks")
    batches = global_batches(device)
    shards = [
        (x.chunk(world_size)[rank], y.chunk(world_size)[rank]) for x, y in batches
    ]
    expected = train_and_count(alone, batches)
    parameters = sum(p.numel() for p in expected.parameters)
    say(f"{parameters:,} parameters in fp32, {world_size} ranks")
    say(HEAD)
    say(table_row("one process", expected, 0, parameters))
    is_right, ways = True, 0
    for name, way in WAYS.items():
        if "HSDP" in name and (world_size < 4 or world_size % 2):
            continue
        run = train_and_count(way.prepare, shards)
        losses = torch.tensor(gather(run.losses)).mean(dim=0).tolist()
        apart = largest_distance(run.parameters, expected.parameters)
        say(table_row(name, run._replace(losses=losses), apart, parameters))
        kept, due = run.kept / parameters, way.kept(world_size)
        # The loss of bf16 logits is itself rounded to 8 bits.
        is_near = torch.allclose(
            torch.tensor(losses), torch.tensor(expected.losses), rtol=way.limit, atol=0
        )
        is_right &= is_near and apart < way.limit and abs(kept / due - 1) < 0.05
        ways += 1
    check(
        is_right, f"{ways} ways: losses, parameters and what is kept are as they should"
    )
    leave()


if __name__ == "__main__":
    main()
