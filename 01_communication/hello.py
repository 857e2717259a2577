"""The smallest complete script: rank 0 sends three numbers, rank 1 receives them.

Run: torchrun --nproc-per-node=2 01_communication/hello.py
Expect: rank 1 prints what rank 0 has sent.
"""

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")  # joins the others
    if dist.get_world_size() == 1:  # else rank 0 would wait for a rank 1
        raise SystemExit("start two ranks: torchrun --nproc-per-node=2")
    x = torch.zeros(3)  # each process has an x of its own
    if dist.get_rank() == 0:
        x += 7
        dist.send(x, dst=1)
    elif dist.get_rank() == 1:
        dist.recv(x, src=0)  # waits for rank 0, and overwrites x
        print(f"rank 1 of {dist.get_world_size()} has {x.tolist()}")
    dist.destroy_process_group()
