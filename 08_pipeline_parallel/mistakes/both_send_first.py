"""Let both stages send first: an activation one way, a gradient the other way.

Run: torchrun --nproc-per-node=2 08_pipeline_parallel/mistakes/both_send_first.py
Expect: one rank or both time out in `send` after two seconds.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Exchange what 1F1B exchanges between one backward pass and the next forward."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    neighbour = 1 - dist.get_rank()
    own, other = torch.ones(4, 8), torch.empty(4, 8)
    # WRONG: send returns once the other rank receives, and that is sending, too.
    # Write sending = dist.isend(own, neighbour), receive, then sending.wait(); for
    # GPUs batch_isend_irecv.
    dist.send(own, neighbour)
    dist.recv(other, neighbour)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
