"""The smallest complete script: join the group, sum a number over it, leave.

Run: torchrun --nproc-per-node=3 01_communication/hello.py
Expect: rank 0 prints the sum 1 + 10 + 100.
"""

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    x = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        print(f"rank 0 of {dist.get_world_size()} has {x.item()}")
    dist.destroy_process_group()
