"""Provoke one of the errors that the pages cite of NCCL, and end with it.

Run: torchrun --standalone --nproc-per-node=2 tests/gpu/cases/nccl_says.py one_device
Expect: the error's text, and a status that is not 0.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def one_device(device: torch.device) -> None:
    """Have all ranks use the first device, as without `set_device_index`."""
    dist.all_reduce(torch.ones(1, device="cuda:0"))


def cpu_tensor(device: torch.device) -> None:
    """Give NCCL a tensor that lies on the CPU."""
    dist.all_reduce(torch.ones(1))


def strides(device: torch.device) -> None:
    """Give NCCL a transposed view."""
    dist.all_reduce(torch.ones(2, 3, device=device).t())


def skipped_call(device: torch.device) -> None:
    """Let the last rank skip a collective; the watchdog ends the others."""
    if dist.get_rank() < dist.get_world_size() - 1:
        dist.all_reduce(torch.ones(1, device=device))
        torch.accelerator.synchronize()
    time.sleep(60)


def main() -> None:
    """Join with a short timeout, and make the mistake."""
    index = int(os.environ["LOCAL_RANK"])
    what = {f.__name__: f for f in (one_device, cpu_tensor, strides, skipped_call)}
    if sys.argv[1] == "one_device":
        index = 0
    torch.cuda.set_device(index)
    dist.init_process_group("nccl", timeout=timedelta(seconds=15))
    what[sys.argv[1]](torch.device("cuda", index))
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
