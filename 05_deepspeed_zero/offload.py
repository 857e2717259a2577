"""Offload: what stage 3 can move to the host's memory or to disk, and what it costs.

Run: deepspeed --num_gpus=2 05_deepspeed_zero/offload.py
Needs: requirements.txt. --disk FOLDER also needs libaio's header and a C++ compiler,
    and compiles for a minute or more when it is first used.
Expect: the same model trained three or four times: with everything where it computes,
    then with the optimizer's states, and the weights, elsewhere; the bytes in each
    place and the time of a step; a `check:` that the losses are the same.
Before: 05_deepspeed_zero/sent.py
Next: 05_deepspeed_zero/will_it_fit.py, which works out what fits where.
"""

import argparse
import gc
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from live_tensors import bytes_by_kind, bytes_by_place, live_storages
from paper import PRECISIONS
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
# A share of fewer bfloat16 values, 1 MB, is never written to disk.
FEWEST_ON_DISK = 1 << 19


def ways_to_offload(
    count: int, largest: int, precision: str, disk: Path | None
) -> dict[str, dict[str, Any]]:
    """Return settings of "zero_optimization" by name.

    Args:
        count: the values in the model.
        largest: the values in the largest share of a tensor.
        precision: "fp32" or "bf16".
        disk: a folder for what is moved to disk, or None.
    """
    ways: dict[str, dict[str, Any]] = {"nothing": {}}
    # "nvme" is any folder. pin_memory: pages that an accelerator can read directly.
    on_disk = {"device": "nvme", "nvme_path": str(disk), "pin_memory": False}
    # States are read, used and written back in parts of so many values. There are
    # buffers for four of them; by default a part is a billion values.
    parts = {"sub_group_size": count // 16}
    if precision == "bf16":
        # In float32 only an accelerator could: on a CPU, DeepSpeed 0.19 reads back what
        # it wrote as bfloat16. By default a billion values stay in memory, and each of
        # five buffers has room for 100 million.
        small = {"max_in_cpu": 0, "buffer_size": largest}
        ways["weights to disk"] = {"offload_param": on_disk | small, **parts}
        return ways
    ways["states"] = {"offload_optimizer": HOST}
    ways["states, weights"] = {"offload_optimizer": HOST, "offload_param": HOST}
    if disk:
        ways["states to disk"] = {"offload_optimizer": on_disk, **parts}
    return ways


def bytes_on_disk(folder: Path | None, rank: int) -> int:
    """Add up the files that hold a rank's states or weights, gradients left out."""
    if folder is None:
        return 0
    files = folder.glob(f"zero_stage_3/*/rank{rank}/*.swp")
    return sum(file.stat().st_size for file in files if "_gradient_" not in file.name)


def train_offloaded(
    args: argparse.Namespace, moved: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Train a new model with some of it moved away; every rank must call this.

    Returns:
        `losses`, one for each step; `ms`, the median of all steps but the first;
        `places`, bytes by type of device, and on disk, after the last step; `states`
        and `weights`, bytes of these in memory; `shares`, this rank's values of each
        tensor.
    """
    gc.collect()
    before, rank = live_storages([]), dist.get_rank()
    model = new_model(args.width, args.layers)
    settings = buckets_for(count_parameters(model), args.width) | moved
    # Without this key DeepSpeed insists on its own Adam for the CPU, and compiles it.
    own_adam = {"zero_force_ds_cpu_optimizer": False}
    engine = make_engine(model, 3, args.precision, settings, **own_adam)
    del model
    inputs = one_sample(rank, device)
    losses, seconds = [], []
    for _ in range(args.steps):
        started = time.perf_counter()
        losses.append(step_once(engine, inputs))
        seconds.append(time.perf_counter() - started)
    places, kinds = bytes_by_place(engine, before), bytes_by_kind(engine, before)
    found = {
        "losses": losses,
        "ms": 1000 * statistics.median(seconds[1:]),
        "places": {**places, "disk": bytes_on_disk(args.disk, rank)},
        "states": kinds["optimizer"],
        "weights": kinds["parameters"],
        "shares": [p.ds_tensor.ds_numel for p in engine.module.parameters()],
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
        states, on_disk = 12 * sum(one["shares"]), one["places"]["disk"]
        where = {"in memory": one["states"], "on disk": on_disk}
        place = "on disk" if name == "states to disk" else "in memory"
        if name == "weights to disk":
            due = 2 * sum(n for n in one["shares"] if n >= FEWEST_ON_DISK)
            gone = plain["weights"] - one["weights"]
            if max(abs(on_disk - due), abs(gone - due)) > STATES_LIMIT * due:
                faults.append(
                    f"{name}: {on_disk:,} bytes there and {gone:,} fewer in memory, of "
                    f"{due:,}"
                )
            del where["on disk"]
        faults += [
            f"{name}: {count:,} bytes of states {there}, of {states:,}"
            for there, count in where.items()
            if not abs(count / states - (there == place)) <= STATES_LIMIT
        ]
        if device.type != "cpu" and name not in {"nothing", "weights to disk"}:
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
    add("--precision", choices=PRECISIONS, default="fp32", help="bf16: weights to disk")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.width % 128 or args.steps < 2:
        refuse("--width must be a multiple of 128, --steps 2 or more")
    if args.disk and not args.disk.is_dir():
        refuse(f"--disk {args.disk}: there is no such folder")
    if args.precision == "bf16" and not args.disk:
        refuse("--precision=bf16 needs --disk=FOLDER, for the weights")
    device, reason = find_place()
    if args.disk and (missing := missing_libaio(device)):
        refuse(f"--disk needs DeepSpeed's async_io, and there is {missing}")
    sizes = [p.numel() for p in new_model(args.width, args.layers).parameters()]
    largest = -(-max(sizes) // int(os.environ["WORLD_SIZE"]))
    if args.precision == "bf16" and largest < FEWEST_ON_DISK:
        refuse(
            f"no share of a tensor has {FEWEST_ON_DISK:,} values or more, so that none "
            f"would be written to disk; try --width={args.width + 128}, or fewer ranks"
        )
    join_group(device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print_once(f"device: {device.type} with {dist.get_backend()} ({reason})")
    choose_parts({"optimizer": {"params": {}}}, device, False)
    found = {}
    ways = ways_to_offload(sum(sizes), largest, args.precision, args.disk)
    for name, moved in ways.items():
        found[name] = train_offloaded(args, moved, device)
        one = found[name]
        if name == "nothing":
            share = f"{sum(one['shares']):,} values each, {args.precision}"
            print_once(f"stage 3 on {world_size} rank(s), {share}")
            print_once(
                "moved           "
                + "".join(f"{p:>11}" for p in one["places"])
                + "  ms/step"
            )
        row = "".join(f"{count / 1e6:8.1f} MB" for count in one["places"].values())
        print_once(f"{name:16}{row}{one['ms']:9.0f}")
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
