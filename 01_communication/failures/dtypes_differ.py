"""Send float32 to a rank that expects int32: as many bytes, so nothing complains.

Run: torchrun --nproc-per-node=2 01_communication/failures/dtypes_differ.py
Expect: no error; rank 1 has [1069547520, 1075838976] where rank 0 sent [1.5, 2.5].
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Broadcast two numbers from rank 0."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    x = torch.tensor([1.5, 2.5])
    if dist.get_rank() == 1:
        # WRONG: int32 takes the same four bytes and reads them as something else.
        # Write torch.empty(2): the dtype has to be the sender's.
        x = torch.empty(2, dtype=torch.int32)
    dist.broadcast(x, src=0)
    print(f"{x.dtype}: {x.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
