"""Save while training goes on, and find the newest checkpoint that is whole.

Run: torchrun --nproc-per-node=2 06_fsdp/checkpoints/async_checkpoint.py
Expect: a save in the background holds the weights of its call, not those of its end.
    One that fails half-way has no `.metadata`; the one before it is loaded.
"""

import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from ranks import check, gather, join, leave, say
from sharded_checkpoint import BLOCK_SIZE, SAMPLES, new_training, step
from stateful import Training


class FullDisk(dcp.FileSystemWriter):
    """Fails on rank 1, while rank 0 writes its shards."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's shards, or fail."""
        if dist.get_rank() == 1:
            raise OSError("No space left on device")
        return super().write_data(plan, planner)


def save_in_background(
    training: Training,
    folder: Path,
    step_number: int,
    group: Any,
    writer: type[dcp.FileSystemWriter] = dcp.FileSystemWriter,
) -> Future:
    """Copy the state, and begin to write it; every rank calls this.

    A thread writes, and its ranks speak to each other meanwhile: `group` must be one
    that training does not use, and on gloo.
    """
    place = folder / f"step_{step_number}"
    future = dcp.async_save(
        {"run": training}, storage_writer=writer(place), process_group=group
    )
    assert isinstance(future, Future)
    return future


def newest_whole(folder: Path) -> Path | None:
    """Return the newest checkpoint whose last file, `.metadata`, is there, if any."""
    names = [path.parent.name for path in folder.glob("step_*/.metadata")]
    whole = {int(name[5:]): folder / name for name in names if name[5:].isdecimal()}
    return whole[max(whole)] if whole else None


def main() -> None:
    """Save twice in the background, the second time in vain, and load."""
    device = join(at_least=2)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    group = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    batches = torch.randint(256, (3, SAMPLES, BLOCK_SIZE + 1), device=device)
    training = new_training(device, mesh)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(gather(own)[0])
        saved = step(training, batches[0], mesh)
        future = save_in_background(training, folder, 1, group)
        is_under_way = not future.done()
        later = step(training, batches[1], mesh)  # while it is being written
        future.result()
        say(f"step 2 was taken before the save of step 1 had ended: {is_under_way}")

        failed = save_in_background(training, folder, 2, group, FullDisk)
        error = failed.exception()
        files = sorted(path.name for path in (folder / "step_2").iterdir())
        say(f"saving step 2 failed: {type(error).__name__}; it left {files}")
        newest: Any = newest_whole(folder)
        dcp.load({"run": training}, checkpoint_id=newest)
        weights = training.model.state_dict().values()
        loaded = torch.cat([w.full_tensor().flatten() for w in weights])
        say(f"the newest that is whole: {newest.name}")
        is_right = torch.equal(loaded, saved) and not torch.equal(loaded, later)
        check(is_right, "loaded: the weights at the call, to the last bit")
    leave()


if __name__ == "__main__":
    main()
