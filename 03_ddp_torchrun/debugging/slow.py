"""One of two ranks is slow, and both take equally long: which is it, and at what?

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/debugging/slow.py
Expect: the parts of a step on each rank, timed and then traced, with the sorted
    documents sharded in blocks and in turn; the traces themselves in traces/.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import check, gather, join, leave, say
from step_timer import StepTimer, trace

STEPS, BATCH_SIZE, WORDS = 12, 8, 64
TIMED = ["step", "load", "compute", "wait"]
TRACED = ["step", "load", "compute", "gloo:all_reduce"]


def tokenise(document: str) -> torch.Tensor:
    """Return the ids of a document's first words, (WORDS,)."""
    ids = [sum(map(ord, word)) % 256 for word in document.split()]
    return torch.tensor(ids[:WORDS])


def take_step(
    ddp_model: DistributedDataParallel, batch: list[str], timer: StepTimer, wait: bool
) -> None:
    """Compute gradients; to `wait` keeps the wait for others out of backward's time."""
    with timer.part("step"):
        with timer.part("load"):
            tokens = torch.stack([tokenise(document) for document in batch])
        with timer.part("compute"):
            loss = ddp_model(tokens).square().mean()
        if wait:
            with timer.part("wait"):
                dist.barrier()
        with timer.part("compute"):
            loss.backward()  # all-reduces


def timed_steps(
    ddp_model: DistributedDataParallel, shard: list[str], path: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the milliseconds of a step's parts, timed and traced."""
    batches = [shard[i : i + BATCH_SIZE] for i in range(0, len(shard), BATCH_SIZE)]
    timer = StepTimer()
    for batch in batches:
        take_step(ddp_model, batch, timer, wait=True)
    timed = {part: 1000 * timer.seconds[part] / len(batches) for part in TIMED}
    middle = batches[len(batches) // 2]
    return timed, trace(lambda: take_step(ddp_model, middle, timer, wait=False), path)


def show(title: str, names: list[str], by_rank: Sequence[dict[str, float]]) -> None:
    """Print a line for each name, with the ranks' milliseconds."""
    say(f"{title:24}" + "".join(f"{f'rank {rank}':>9}" for rank in range(len(by_rank))))
    for name in names:
        say(f"  {name:22}" + "".join(f"{of_rank[name]:9.1f}" for of_rank in by_rank))


def main() -> None:
    """Measure both ways to shard documents that are sorted by their length."""
    join(at_least=2, at_most=2, only_cpu=True)
    rank, share = dist.get_rank(), STEPS * BATCH_SIZE
    documents = ["lorem " * (WORDS + 3 * n * n // 2) for n in range(2 * share)]
    shards = {
        "blocks": documents[rank * share : (rank + 1) * share],
        "turns": documents[rank::2],
    }
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * WORDS, 32)
    )
    ddp_model, folder = DistributedDataParallel(model), Path("traces")
    folder.mkdir(exist_ok=True)
    found = []
    for name, shard in shards.items():
        both = gather(timed_steps(ddp_model, shard, folder / f"{name}_{rank}.json"))
        timed, traced = zip(*both, strict=True)
        show(f"{name}: ms a step", TIMED, timed)
        show(f"{name}: a traced step", TRACED, traced)
        found += timed
    fast, slow, *_ = found
    loads_longer = slow["load"] - fast["load"] > fast["wait"] / 2
    waits = fast["wait"] > max(2 * slow["wait"], fast["compute"])
    check(loads_longer and waits, "in blocks, rank 0 waits for rank 1")
    leave()


if __name__ == "__main__":
    main()
