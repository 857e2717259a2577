"""Find the mistakes: a loop that stops on a signal and resumes, wrong in three places.

Run: python 03_ddp_torchrun/exercises/stop_and_resume.py
Expect: for each rank the first thing that is wrong with what it did, and status 1; once
    the loop is right, a `check:`.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from check_stop_and_resume import Batches, check_stopping


def train_until_told(
    ddp_model: DistributedDataParallel,
    batches: Batches,
    path: Path,
    is_told: Callable[[], bool],
) -> None:
    """Train on all batches; stop soon after a rank is told to, and resume from `path`.

    `is_told()` is whether this rank has got the signal; another may get it a step
    later. A run that was stopped and resumed ends with the bits of one that was not.
    """
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1, momentum=0.9)
    step = 0
    if path.exists():
        content = torch.load(path, weights_only=True)
        ddp_model.module.load_state_dict(content["model"])
    while step < len(batches):
        inputs, labels = batches[step]
        mse_loss(ddp_model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if is_told():
            if dist.get_rank() == 0:
                torch.save({"model": ddp_model.module.state_dict()}, path)
            return


if __name__ == "__main__":
    check_stopping(train_until_told)
