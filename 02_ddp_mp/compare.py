"""One process, three wrappers made by hand, and DDP: all end with the same weights.

Run: python 02_ddp_mp/compare.py
Needs: this folder and requirements.txt. Runs on the CPU, by gloo.
Expect: how far each way ends from one process that took every batch whole, and a
    `check:` that nothing but rounding is behind it. `--nprocs=4` takes four ranks.
Before: 02_ddp_mp/one_process.py, and by_hand.py, which holds the three wrappers.
Next: 02_ddp_mp/train.py, where DDP does this work.
"""

import argparse
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

# Imported late, by an optimizer or DDP, this would hold the group beyond its end, and
# the process might abort when it ends: chapter 03, "What people get wrong".
import torch.distributed.nn
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from by_hand import BucketedDDP, FlatDDP, NaiveDDP
from options import positive_int, refuse
from terrain import TerrainModel, load_terrain, sample_points

WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "no exchange": lambda module: module,
    "naive": NaiveDDP,
    "flat": FlatDDP,
    # So small a model would all fit into one bucket of the usual 25 MB.
    "bucketed": lambda module: BucketedDDP(module, bucket_cap_mb=0.05),
    "DDP": lambda module: DistributedDataParallel(module, bucket_cap_mb=0.05),
}
# The largest difference that rounding may leave in any weight. Adam divides a gradient
# by its own size, so that a gradient near zero passes on its rounding error nearly at
# full step length (3e-3). With twice the digits, the error is a billion times smaller;
# were it anything but rounding, it would stay as it is.
LIMITS = {torch.float32: 3e-3, torch.float64: 1e-11}

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def make_batches(dtype: torch.dtype, batch_size: int, steps: int) -> Batches:
    """Cut `steps` batches of places and heights, the same on every rank."""
    train_set, _ = sample_points(load_terrain(), batch_size * steps)
    places, heights = (tensor.to(dtype) for tensor in train_set.tensors)
    return list(zip(places.split(batch_size), heights.split(batch_size), strict=True))


def train_replica(model: nn.Module, batches: Batches) -> None:
    """Train any model, wrapped or not."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for places, heights in batches:
        optimizer.zero_grad()
        mse_loss(model(places), heights).backward()
        # The one call that the wrappers made by hand need and DDP does not.
        if isinstance(model, NaiveDDP | FlatDDP | BucketedDDP):
            model.finish_gradient_sync()
        optimizer.step()


def flat_weights(model: nn.Module) -> torch.Tensor:
    """Return all parameters as one row of numbers."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def compare_ways(dtype: torch.dtype, steps: int) -> dict[str, tuple[float, bool]]:
    """Train in each way on one's own share; compare with one process, and all ranks.

    Returns:
        For each way the largest difference of a weight from those of one process (the
        worst of all ranks), and whether all ranks hold the same bits.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = make_batches(dtype, 32 * world_size, steps)
    shares = [
        (p.chunk(world_size)[rank], h.chunk(world_size)[rank]) for p, h in batches
    ]
    torch.manual_seed(0)
    alone = TerrainModel().to(dtype)
    train_replica(alone, batches)
    results = {}
    for name, wrap in WAYS.items():
        # Every rank starts elsewhere; wrapping has to give it the weights of rank 0.
        torch.manual_seed(rank)
        model = TerrainModel().to(dtype)
        train_replica(wrap(model), shares)
        mine = flat_weights(model)
        error = (mine - flat_weights(alone)).abs().max()
        everyones = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(everyones, mine)
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        is_equal = all(torch.equal(other, everyones[0]) for other in everyones)
        results[name] = (error.item(), is_equal)
    return results


def end_with_the_parent() -> None:
    """End this rank as soon as the process that started it has ended, however it did.

    `mp.spawn` sees to this itself on Linux, once a rank runs. This also holds on other
    systems and while a rank is still being started.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def compare_rank(rank: int, world_size: int, port: int, steps: int) -> None:
    """Be one rank; rank zero prints the table, all ranks check it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(minutes=5))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
    results = {dtype: compare_ways(dtype, steps) for dtype in LIMITS}
    wrong = []
    if rank == 0:
        print(f"{world_size} ranks, {steps} steps; the largest difference of a weight")
        print("from one process    float32   float64   between ranks")
    for name in WAYS:
        errors = [results[dtype][name][0] for dtype in LIMITS]
        is_equal = all(results[dtype][name][1] for dtype in LIMITS)
        is_close = all(e < lim for e, lim in zip(errors, LIMITS.values(), strict=True))
        # The first way shows that this comparison can fail.
        expected = name != "no exchange"
        if (is_close, is_equal) != (expected, expected):
            wrong.append(name)
        if rank == 0:
            agree = "none, bit for bit" if is_equal else "they differ"
            print(f"  {name:<16}  {errors[0]:7.0e}   {errors[1]:7.0e}   {agree}")
    if wrong:
        raise RuntimeError(f"not as it should be: {', '.join(wrong)}")
    if rank == 0:
        limits = " and ".join(f"{limit:.0e}" for limit in LIMITS.values())
        print(
            f"check: {len(WAYS) - 1} ways end as one process does (limits {limits}), "
            "without exchange none",
            flush=True,
        )
    dist.destroy_process_group()


def main() -> None:
    """Read the command line, start the ranks."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it in silence
    parser = argparse.ArgumentParser(description="Compare ways to average gradients.")
    add = parser.add_argument
    add("--nprocs", type=positive_int, default=2, help="ranks, 2 to 8")
    add("--steps", type=positive_int, default=50, help="steps of training, 20 to 100")
    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    if not 2 <= args.nprocs <= 8:
        refuse(
            f"--nprocs must be 2 to 8, not {args.nprocs}: one has none to agree with"
        )
    if not 20 <= args.steps <= 100:
        refuse(f"--steps must be 20 to 100, not {args.steps}: the limits are for those")
    # The ranks meet at this store. With port 0 the system chooses one that is free.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(compare_rank, (args.nprocs, store.port, args.steps), nprocs=args.nprocs)


if __name__ == "__main__":
    main()
