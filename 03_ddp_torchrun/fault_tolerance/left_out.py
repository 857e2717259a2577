"""Resume a run without one entry of its checkpoint, for each of them: what goes wrong?

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/fault_tolerance/left_out.py
Expect: with all entries, the bits of the uninterrupted run. Without one of them either
    the weights are others, or (step, seen) the samples of the epoch do not add up.
"""

import copy
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import checkpoint
import train
from ranks import check, gather, join, leave, say

MIDDLE, STEPS = 4, 8  # where the run is resumed; where it ends, and so does its epoch

# The run resumes after 4 of 8 steps of 16 samples (8 on each of two ranks): 64 samples
# have been seen and 64 remain. Each entry in turn is taken from step 0:
#   step: again 8 steps, and 64 + 8 x 16 = 192 seen;
#   seen, the count of that: 4 steps, and 0 + 4 x 16 = 64 seen (below, "8 steps" is
#       the counter `step`, which is not left out);
#   model, optimizer, schedule (of learning rates), random (each rank's numbers): the
#       right 4 steps, but from, or with, what was there at step 0.
ENTRIES = ("nothing", "model", "optimizer", "schedule", "step", "seen", "random")
OPTIONS = {"seed": 0, "lr": 3e-3, "amp": False, "max_epochs": 1, "max_steps": STEPS}
OPTIONS |= {"text": None, "block_size": 32, "batch_size": 8, "workers": 0}


def train_until(step: int, options: Namespace, device: torch.device, content: Any):
    """Resume from a checkpoint's content, or begin; every rank calls this.

    Returns the state at `step`, and how the samples of an epoch that ended add up.
    """
    batch_size = options.batch_size * dist.get_world_size()
    train_set, held_out = options.sets
    torch.manual_seed(options.seed)
    config = train.GPTConfig(block_size=32, width=32, layers=1, heads=2, dropout=0.1)
    model = train.GPT(config).to(device)
    ddp_model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    schedule = train.LambdaLR(optimizer, partial(train.lr_factor, total_steps=STEPS))
    loader = train.data.StepLoader(train_set, batch_size, options, device)
    tally = train.data.Tally(train_set, loader.sampler)
    run = checkpoint.TrainingState(model, optimizer, schedule, tally, options)
    checkpoint.settle_buckets(ddp_model, *(t.to(device) for t in held_out.batch([0])))
    torch.manual_seed(options.seed + dist.get_rank())
    if content is not None:
        begin = content["training"]["step"]
        run.restore(checkpoint.Start(batch_size, begin, options.checkpoint, content))
    for batches in loader.steps(0, run.step, step):
        loss = train.add_gradients(ddp_model, ddp_model, batches, batch_size, False)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        run.count(batches, loss)
    try:
        return run, tally.end(STEPS)[-1] if step == STEPS else ""
    except RuntimeError as error:
        return run, str(error)


def main() -> None:
    """Train uninterrupted; then resume without one entry after the other; compare."""
    device = join()
    options = Namespace(**OPTIONS)
    options.samples = STEPS * options.batch_size * dist.get_world_size()
    options.sets = train.data.load_sets(options)
    contents = []
    with tempfile.TemporaryDirectory() as folder:
        options.checkpoint = Path(folder, "run.pt")
        for step in (0, MIDDLE):
            train_until(step, options, device, None)[0].save()
            # Rank 0 has written it.
            written = dist.get_rank() == 0 and torch.load(options.checkpoint)
            contents.append(gather(written)[0])
    uninterrupted, in_order = train_until(STEPS, options, device, None)
    whole = torch.nn.utils.parameters_to_vector(uninterrupted.model.parameters())

    say("left out    weights off by  samples of the epoch")
    wrong = []
    for entry in ENTRIES:
        beginning, content = copy.deepcopy(contents)
        if entry == "model":
            content[entry] = beginning[entry]
        elif entry != "nothing":
            content["training"][entry] = beginning["training"][entry]
        run, counted = train_until(STEPS, options, device, content)
        weights = torch.nn.utils.parameters_to_vector(run.model.parameters())
        off = torch.tensor(gather((weights - whole).abs().max().item())).max()
        say(f"{entry:12}{off:14.1e}  {counted}")
        wrong += [entry] if off or counted != in_order else []
    is_right = tuple(wrong) == ENTRIES[1:]
    claim = f"the same with all {len(wrong)} entries, other weights or samples without"
    check(is_right, f"{claim} any one")
    leave()


if __name__ == "__main__":
    main()
