"""Offload: what stage 3 can move to the host's memory or to disk, and what it costs.

Run: deepspeed --num_gpus=2 05_deepspeed_zero/offload.py
Needs: requirements.txt. --disk FOLDER also needs libaio's header and a C++ compiler,
    and compiles for a minute or more when it is first used.
Expect: the same model trained three or four times: with everything where it computes,
    then with the optimizer's states, and the parameters, elsewhere; the bytes in each
    place and the time of a step; a `check:` that the losses are the same.
Before: 05_deepspeed_zero/sent.py
Next: 05_deepspeed_zero/will_it_fit.py, which works out what fits where.
"""

import argparse
import gc
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from live_tensors import bytes_by_kind, bytes_by_place, live_storages
from qwen import count_parameters
from sized_qwen import buckets_for, make_engine, new_model, one_sample, step_once
from start import (
    choose_parts,
    find_place,
    join_group,
    leave_group,
    missing_libaio,
    positive_int,
    print_once,
    refuse,
)

LOSS_LIMIT = 1e-6  # the arithmetic is the same, wherever the numbers lie
HOST = {"device": "cpu"}
# How far the states may be from 12 bytes a value, in parts of them: DeepSpeed pads its
# files, and leaves a part of less than 1 MB in memory.
STATES_LIMIT = 0.01


def ways_to_offload(count: int, disk: Path | None) -> dict[str, dict[str, Any]]:
    """Return settings of "zero_optimization" by name, for a model of `count` values."""
    ways: dict[str, dict[str, Any]] = {
        "nothing": {},
        "states": {"offload_optimizer": HOST},
        "states, weights": {"offload_optimizer": HOST, "offload_param": HOST},
    }
    if disk:
        # "nvme" is any folder. pin_memory: pages that an accelerator can read directly.
        on_disk = {"device": "nvme", "nvme_path": str(disk), "pin_memory": False}
        ways["states to disk"] = {
            "offload_optimizer": on_disk,
            # States are read, used and written back in parts of so many values. There
            # are buffers for four of them; by default a part is a billion values.
            "sub_group_size": count // 16,
        }
    return ways


def bytes_on_disk(folder: Path | None, rank: int) -> int:
    """Add up the files that hold a rank's optimizer states, gradients left out."""
    if folder is None:
        return 0
    files = folder.glob(f"zero_stage_3/optimizer/rank{rank}/*.swp")
    return sum(file.stat().st_size for file in files if "_gradient_" not in file.name)


def train_offloaded(
    args: argparse.Namespace, moved: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Train a new model with some of it moved away; every rank must call this.

    Returns:
        `losses`, one for each step; `ms`, the median of all steps but the first;
        `places`, bytes by type of device, and on disk, after the last step; `states`,
        bytes of the optimizer's states in memory; `share`, this rank's values.
    """
    gc.collect()
    before, rank = live_storages([]), dist.get_rank()
    model = new_model(args.width, args.layers)
    settings = buckets_for(count_parameters(model), args.width) | moved
    # Without this key DeepSpeed insists on its own Adam for the CPU, and compiles it.
    engine = make_engine(model, 3, "fp32", settings, zero_force_ds_cpu_optimizer=False)
    del model
    inputs = one_sample(rank, device)
    losses, seconds = [], []
    for _ in range(args.steps):
        started = time.perf_counter()
        losses.append(step_once(engine, inputs))
        seconds.append(time.perf_counter() - started)
    places = bytes_by_place(engine, before)
    found = {
        "losses": losses,
        "ms": 1000 * statistics.median(seconds[1:]),
        "places": {**places, "disk": bytes_on_disk(args.disk, rank)},
        "states": bytes_by_kind(engine, before)["optimizer"],
        "share": sum(p.ds_tensor.numel() for p in engine.module.parameters()),
    }
    engine.destroy()
    return found


def find_misplaced(found: dict[str, dict[str, Any]], device: torch.device) -> list[str]:
    """Name all that is not as this lesson says, on this rank."""
    faults, plain = [], found["nothing"]
    for name, one in found.items():
        losses, expected = torch.tensor([one["losses"], plain["losses"]])
        apart = (losses - expected).abs().max().item()  # nan if one of them is
        if not apart <= LOSS_LIMIT:
            faults.append(f"{name}: losses {apart:.0e} apart")
        # Adam's two averages and the float32 copy that DeepSpeed keeps of its share.
        states, on_disk = 12 * one["share"], one["places"]["disk"]
        where = {"in memory": one["states"], "on disk": on_disk}
        place = "on disk" if name == "states to disk" else "in memory"
        faults += [
            f"{name}: {count:,} bytes of states {there}, of {states:,}"
            for there, count in where.items()
            if not abs(count / states - (there == place)) <= STATES_LIMIT
        ]
        if device.type != "cpu" and name != "nothing":
            moved = plain["places"][device.type] - one["places"][device.type]
            if moved < 0.99 * states:
                faults.append(f"{name}: only {moved:,} bytes have left the device")
    return faults


def main() -> None:
    """Train in every way, print rank 0's figures, check every rank's."""
    parser = argparse.ArgumentParser(description="Move parts of a model elsewhere.")
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--width", type=positive_int, default=512, help="a multiple of 128")
    add("--layers", type=positive_int, default=2, help="transformer blocks")
    add("--steps", type=positive_int, default=5, help="of each way, 2 or more")
    add("--disk", type=Path, metavar="FOLDER", help="move states to disk as well")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.width % 128 or args.steps < 2:
        refuse("--width must be a multiple of 128, --steps 2 or more")
    if args.disk and not args.disk.is_dir():
        refuse(f"--disk {args.disk}: there is no such folder")
    device, reason = find_place()
    if args.disk and (missing := missing_libaio(device)):
        refuse(f"--disk needs DeepSpeed's async_io, and there is {missing}")
    join_group(device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print_once(f"device: {device.type} with {dist.get_backend()} ({reason})")
    choose_parts({"optimizer": {"params": {}}}, device, False)
    found = {}
    count = count_parameters(new_model(args.width, args.layers))
    for name, moved in ways_to_offload(count, args.disk).items():
        found[name] = train_offloaded(args, moved, device)
        one = found[name]
        if name == "nothing":
            print_once(f"stage 3 on {world_size} rank(s), {one['share']:,} values each")
            print_once(
                "moved           "
                + "".join(f"{p:>11}" for p in one["places"])
                + "  ms/step"
            )
        sizes = "".join(f"{count / 1e6:8.1f} MB" for count in one["places"].values())
        print_once(f"{name:16}{sizes}{one['ms']:9.0f}")
    faults: list[list[str]] = [[]] * world_size
    dist.all_gather_object(faults, find_misplaced(found, device))
    if args.disk and rank == 0:
        shutil.rmtree(args.disk / "zero_stage_3", ignore_errors=True)
    if all_faults := [fault for own in faults for fault in own]:
        raise RuntimeError("not as it should be: " + "; ".join(all_faults))
    print_once(
        f"check: {len(found)} ways, {args.steps} losses each, at most {LOSS_LIMIT:.0e} "
        "apart; the states are 12 bytes a value wherever they are"
    )
    leave_group()


if __name__ == "__main__":
    main()
