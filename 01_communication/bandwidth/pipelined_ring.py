"""A ring with several pieces in flight, about as fast as gloo's own all-reduce.

Run: torchrun --nproc-per-node=2 01_communication/bandwidth/pipelined_ring.py
Expect: for each size, in MB, the times of three all-reduces measured in turn, and their
    speed beside gloo's own; a `check:` that every timed call gave the sum.
"""

import statistics
from functools import partial

import torch
import torch.distributed as dist

from ranks import check, join, leave, number, read_options, say
from timing import Call, time_in_turn

PIECE = 2**20  # elements in a message: small ones overlap better, large ones are fewer
IN_FLIGHT = 3  # receives that are open at a time


def pipelined_all_reduce(tensor: torch.Tensor, scratch: torch.Tensor) -> None:
    """Replace a contiguous tensor by its sum over all ranks; all ranks must call this.

    A rank sends to its right neighbour only and hears from its left one only (Patarasuk
    and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002).

    Args:
        tensor: of one shape and dtype on all ranks.
        scratch: (IN_FLIGHT * PIECE,) of the same dtype, to be overwritten. A fresh one
            would cost the time in which the system finds and clears memory.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    chunks, slots = tensor.view(-1).tensor_split(world_size), scratch.split(PIECE)

    def pieces(step: int) -> list[torch.Tensor]:
        """Cut up what this rank sends in a step, and has received in the one before."""
        chunk = chunks[(rank - step) % world_size]
        return [piece for piece in chunk.split(PIECE) if piece.numel()]

    # The first half of the steps is the reduce-scatter, the second the all-gather.
    half, steps = world_size - 1, 2 * (world_size - 1)
    arriving = [(step, piece) for step in range(steps) for piece in pieces(step + 1)]
    # A summand is received beside the piece that it is added to, a sum in its place.
    buffers = [
        slots[i % IN_FLIGHT][: len(piece)] if step < half else piece
        for i, (step, piece) in enumerate(arriving)
    ]
    # Receives come first: a sender waits for word that a receive is open, and that word
    # would have to queue behind whatever this rank is sending itself.
    receives: list = [dist.irecv(buffer, left) for buffer in buffers[:IN_FLIGHT]]
    sends: list = [dist.isend(piece, right) for piece in pieces(0) if steps]
    for i, (step, piece) in enumerate(arriving):
        receives[i].wait()
        if step < half:
            piece += buffers[i]
        if i + IN_FLIGHT < len(arriving):
            receives.append(dist.irecv(buffers[i + IN_FLIGHT], left))
        if step < steps - 1:
            sends.append(dist.isend(piece, right))
    # Until its `wait` returns, a send may still be reading from the tensor.
    for send in sends:
        send.wait()


def all_reduce_through_rank_zero(tensor: torch.Tensor, received: torch.Tensor) -> None:
    """Do the same naively: rank 0 receives everything, adds it up and sends it back."""
    if dist.get_rank() > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    for other in range(1, dist.get_world_size()):
        dist.recv(received, other)
        tensor += received
    for other in range(1, dist.get_world_size()):
        dist.send(tensor, other)


def main() -> None:
    """Time the three ways on each size, and compare their sums with one process's."""
    options = read_options(
        sizes={"nargs": "+", "type": number(0.0, 1024.0), "default": [1.0, 4.0, 16.0]},
        rounds={"type": number(1, 10_000), "default": 15},
    )
    join(at_most=16, only_cpu=True)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    scratch, right = torch.empty(IN_FLIGHT * PIECE), []
    for megabytes in options.sizes:
        # Small whole numbers, others on each rank: their sums are exact in any order.
        pattern = torch.arange(int(megabytes * 2**18)).remainder(97).float()
        mine, total = pattern * 2**rank, pattern * (2**world_size - 1)
        ring = partial(pipelined_all_reduce, scratch=scratch)
        naive = partial(all_reduce_through_rank_zero, received=torch.zeros_like(mine))
        ways = {"ring": ring, "naive": naive, "gloo": dist.all_reduce}
        calls = {name: Call(way, total, start=mine) for name, way in ways.items()}
        timings = time_in_turn(calls, options.rounds)
        best = statistics.median(timings["gloo"].seconds)
        say(f"{megabytes:g} MB, median of {options.rounds} (middle half)")
        for name, (seconds, is_right) in timings.items():
            low, middle, high = statistics.quantiles(seconds * 2, n=4)
            spread = f"{1e3 * middle:8.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f})"
            say(f"  {name:5} {spread}, {best / middle:.2f} of gloo's speed")
            right.append(is_right)
    check(all(right), f"ring = naive = gloo = the sum in {len(options.sizes)} sizes")
    leave()


if __name__ == "__main__":
    main()
