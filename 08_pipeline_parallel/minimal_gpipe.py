"""GPipe by PyTorch: each rank trains its part of a small model.

Run: torchrun --nproc-per-node=4 08_pipeline_parallel/minimal_gpipe.py
Expect: the losses of four micro-batches; on every rank, one process's gradients.
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def main() -> None:
    """Take a step on 2, 3 or 4 ranks of one host, and compare with one process."""
    if not 2 <= int(os.environ.get("WORLD_SIZE", "1")) <= 4:
        raise SystemExit("4 layers take 2 to 4 ranks: torchrun --nproc-per-node=4")
    dist.init_process_group()
    rank, stages = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= stages:  # a GPU for each rank, on one host
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    torch.manual_seed(0)  # the same model and batch on every rank
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    model, loss_fn = nn.Sequential(*layers).to(device), nn.functional.mse_loss
    inputs, labels = torch.randn(2, 32, 16, device=device)

    # This rank's layers, under their names in the model. (Copied for the check below.
    # A model too large for each rank begins on the meta device: minimal.py.)
    first, end = (len(model) * i // stages for i in (rank, rank + 1))
    part = copy.deepcopy(model[first:end])
    stage = PipelineStage(part, stage_index=rank, num_stages=stages, device=device)
    # Or PyTorch cuts by tracing, for two ranks in front of layer "2":
    # cuts = {"2": SplitPoint.BEGINNING}
    # traced = pipeline(copy.deepcopy(model), (inputs[:8],), split_spec=cuts)
    # stage = traced.build_stage(rank, device)
    # part = stage.submod  # which the optimizer steps
    # step() cuts the 32 samples, in their order, into 4 micro-batches of 8. For each
    # the last stage calls loss_fn(output, target). As that returns a mean, step() also
    # divides all gradients by 4; if yours returns a sum, pass scale_grads=False.
    # Schedule1F1B takes the same arguments.
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)

    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(inputs)  # all passes, forward and backward, and the messages
    elif rank < stages - 1:
        schedule.step()  # in the middle: activations come from the rank before
    else:
        schedule.step(target=labels, losses=losses)  # appends the 4 losses
    optimizer.step()  # and optimizer.zero_grad() before the next schedule.step()

    loss = loss_fn(model(inputs), labels)  # one process, the whole batch
    loss.backward()
    for name, p in part.named_parameters():
        torch.testing.assert_close(p.grad, model.get_parameter(name).grad)
    dist.barrier()  # reached by all ranks if no gradient differs
    if rank == stages - 1:
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
        print("losses:", *(f"{one.item():.3f}" for one in losses))
        count = len(list(model.parameters()))
        print(f"check: their mean, and {count} gradients, are one process's")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
