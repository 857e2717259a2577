"""A checkpoint in shards: each rank writes its own, any number of ranks loads it.

Run: torchrun --nproc-per-node=3 06_fsdp/sharded_checkpoint.py
Expect: two of the ranks train and save. All three load it and go on, and so does one
    process, from the folder and from one file: the weights of the next step are equal.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from checkpoint import gathered
from model import GPT, GPTConfig
from ranks import check, gather, join, leave, say
from stateful import Training

SAMPLES, BLOCK_SIZE = 12, 32  # 1, 2, 3 and 4 ranks divide the samples


def new_training(device: torch.device, mesh: DeviceMesh | None = None) -> Training:
    """Build a GPT in float64, with other weights each time; shard it over a mesh."""
    model = GPT(GPTConfig(block_size=BLOCK_SIZE, width=64)).to(device, torch.float64)
    for module in () if mesh is None else (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def step(training: Training, tokens: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """Take a step on this rank's part of the samples; return all weights, flat."""
    rank, world_size = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    mine = tokens.chunk(world_size)[rank]
    training.model(mine[:, :-1], mine[:, 1:]).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    weights = gathered(training.model.state_dict())
    return torch.cat([tensor.flatten() for tensor in weights.values()])


def main() -> None:
    """Save on two ranks; load on three, on one, and on one from a single file."""
    device, rank = join(at_least=3, at_most=3), dist.get_rank()
    three, two = (DeviceMesh(device.type, list(range(n))) for n in (3, 2))
    torch.manual_seed(0)
    batches = torch.randint(256, (3, SAMPLES, BLOCK_SIZE + 1), device=device)
    with tempfile.TemporaryDirectory() as own:
        folder, due = Path(gather(own)[0]), None  # rank 0's: one that all can reach
        if rank < 2:
            training = new_training(device, two)
            for tokens in batches[:2]:
                step(training, tokens, two)
            pair, run = two.get_group(), {"run": training}
            dcp.save(run, checkpoint_id=folder, process_group=pair)
            due = step(training, batches[2], two)
        dist.barrier()
        say(f"saved by 2 ranks: {', '.join(sorted(os.listdir(folder)))}")

        spread, one, other = (new_training(device, m) for m in (three, None, None))
        dcp.load({"run": spread}, checkpoint_id=folder)
        alone: Any = dist.new_group([rank], use_local_synchronization=True)
        dcp.load({"run": one}, checkpoint_id=folder, process_group=alone)
        dcp_to_torch_save(folder, f"{own}/run.pt")
        content = torch.load(f"{own}/run.pt", map_location="cpu", weights_only=True)
        other.load_state_dict(content["run"])

        due, far = gather(due)[0], []
        loaded = [("by 3 ranks", spread, three), ("by 1 process", one, None)]
        for place, training, mesh in [*loaded, ("from 1 file", other, None)]:
            far.append(torch.dist(step(training, batches[2], mesh), due).item())
            say(f"loaded {place:12} | after one more step {far[-1]:.0e} apart")
        check(
            len(far) == 3 and all(apart < 1e-10 for apart in far),
            "model and optimizer resume alike on 3 ranks, on 1, and from one file",
        )
    leave()


if __name__ == "__main__":
    main()
