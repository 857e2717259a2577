"""Send to the right neighbour and wait for it too, instead of for the left one.

Run: torchrun --nproc-per-node=3 01_communication/failures/wrong_peer.py
Expect: all ranks fail after two seconds at most; the stacks show `recv` on each.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Pass a number on in a circle."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right = (rank + 1) % world_size
    received = torch.empty(1)
    sending = dist.isend(torch.ones(1), dst=right)
    # WRONG: the right neighbour sends to its own right, not to this rank. Write
    # src=(rank - 1) % world_size.
    dist.recv(received, src=right)
    sending.wait()  # type: ignore[union-attr]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
