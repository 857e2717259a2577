"""Let every rank send before it receives: on gloo none ever comes to receive.

Run: torchrun --nproc-per-node=2 01_communication/failures/all_send_first.py
Expect: all ranks fail after two seconds at most, though the message is one number.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Pass a number on in a circle."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    received = torch.empty(1)
    # WRONG: all ranks are in send, and none is in recv. Let the odd ranks receive
    # first, or write isend and wait for it below, or batch_isend_irecv.
    dist.send(torch.ones(1), dst=right)
    dist.recv(received, src=left)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
