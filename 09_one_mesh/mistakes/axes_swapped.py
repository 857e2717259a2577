"""Name the axes of a mesh in either order, on two hosts of two ranks each.

Run: torchrun --nproc-per-node=4 09_one_mesh/mistakes/axes_swapped.py
Expect: with "tensor" first, its all-reduces cross the link between the hosts, and with
    them five times as many bytes as with "data" first.
"""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

RANKS_OF_A_HOST = 2
# Of a GPT with these sizes, cut in two, a step sends this much over each axis.
BLOCKS, WIDTH, TOKENS = 4, 128, 1024
ACTIVATION, ALL_REDUCES = TOKENS * WIDTH, 4 * BLOCKS  # two forward, two backward
GRADIENTS = BLOCKS * 12 * WIDTH**2 // 2

ORDERS = [
    ("data", "tensor"),
    # WRONG: the last name counts fastest, so ranks 0 and 1, of one host, share the last
    # axis. Put last what sends most: leave this line out.
    ("tensor", "data"),
]


def main() -> None:
    """Send what a step sends, in both orders; count what crosses the link."""
    dist.init_process_group("gloo")
    for names in ORDERS:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        crossing, messages = 0, []
        for axis, elements, times in [
            ("tensor", ACTIVATION, ALL_REDUCES),
            ("data", GRADIENTS, 1),
        ]:
            ranks = dist.get_process_group_ranks(group := mesh.get_group(axis))
            # Of two ranks, each sends the other as much as it has, in an all-reduce.
            if len({rank // RANKS_OF_A_HOST for rank in ranks}) > 1:
                crossing += RANKS_OF_A_HOST * elements * 4 * times
            messages += [(torch.ones(elements), group)] * times
        dist.barrier()
        start = time.perf_counter()
        for message, group in messages:
            dist.all_reduce(message, group=group)
        dist.barrier()
        if dist.get_rank() == 0:
            took = time.perf_counter() - start
            print(f"{names}: {crossing / 1e6:.1f} MB leave a host, {took:.2f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
