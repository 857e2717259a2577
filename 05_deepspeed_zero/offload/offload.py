"""Offload: what waits in host memory or on disk leaves the device, and losses stay.

Run: deepspeed --num_gpus=2 05_deepspeed_zero/offload/offload.py
Expect: the same model trained with everything on the device, then with optimizer state
    and weights elsewhere; the bytes in each place, a step's time, and the same losses
    to the last bit. --disk=FOLDER also uses a disk; it compiles for minutes once.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_setup import SETUP_OPTIONS, join, leave, prepare
from offloaded_training import CONFIG, STEPS, WIDTH, missing_libaio, train_offloaded
from ranks import check, fail, gather, read_options, say, start_ranks

HOST = {"device": "cpu"}
LIMIT = 0.01  # of the weights' bytes: files are padded, small parts stay in memory


def ways_to_offload(disk: Path | None) -> dict[str, dict[str, Any]]:
    """Return settings of "zero_optimization" by name, with those for a disk if any."""
    ways: dict[str, dict[str, Any]] = {
        "nothing": {},
        "optimizer state": {"offload_optimizer": HOST},
        "that and weights": {"offload_optimizer": HOST, "offload_param": HOST},
    }
    if disk:
        on_disk = {"device": "nvme", "nvme_path": str(disk)}
        # Optimizer state is read, used and written back in parts of so many values,
        # through buffers for four of them. By default a part is a billion values.
        parts = {"sub_group_size": WIDTH * WIDTH // 2}
        ways["state to disk"] = {"offload_optimizer": on_disk, **parts}
        # By default a billion values stay in memory, and there is room for 100 million
        # in each of five buffers.
        small = {"max_in_cpu": 0, "buffer_size": WIDTH * WIDTH}
        ways["weights to disk"] = {"offload_param": on_disk | small, **parts}
    return ways


def find_faults(found: dict[str, dict[str, Any]]) -> list[str]:
    """Name all that is not as this lesson says, on this rank."""
    faults, plain = [], found["nothing"]
    device = next(iter(plain["places"]))
    for name, one in found.items():
        if one["losses"] != plain["losses"]:
            faults.append(f"{name}: losses {one['losses']}, not {plain['losses']}")
        # Master weights and two moments in fp32 are 12 bytes a value, in one place.
        values, state = one["values"], 12 * sum(one["values"])
        expected = {"state": state, "weights": plain["weights"], "disk": 0}
        if name == "state to disk":
            expected |= {"state": 0, "disk": state}
        if name == "weights to disk":
            # What takes less than 1 MB in bf16, such as a bias, stays in memory.
            matrices = 2 * sum(n for n in values if n >= 1 << 19)
            expected |= {"weights": plain["weights"] - matrices, "disk": matrices}
        counted = {**one, "disk": one["places"]["disk"]}
        for kind, count in expected.items():
            if abs(counted[kind] - count) > LIMIT * 2 * sum(values):
                faults.append(f"{name}: {kind} {counted[kind]:,} bytes, not {count:,}")
        freed = plain["places"][device] - one["places"][device]
        if device != "cpu" and "state" in name and freed < (1 - LIMIT) * state:
            faults.append(f"{name}: only {freed:,} bytes have left the device")
    return faults


def main(options: argparse.Namespace) -> None:
    """Train in every way, print rank 0's figures, check every rank's."""
    device, disk = prepare(CONFIG), options.disk
    if disk and not disk.is_dir():
        fail(f"--disk {disk}: there is no such folder")
    if disk and (missing := missing_libaio(device)):
        fail(f"--disk needs DeepSpeed's async_io, and there is {missing}")
    join()
    say(f"stage 3 on {dist.get_world_size()} rank(s), on rank 0:")
    found = {}
    for name, settings in ways_to_offload(disk).items():
        one = found[name] = train_offloaded(settings, disk)
        dist.barrier()  # every rank has counted its files
        if disk and dist.get_rank() == 0:
            shutil.rmtree(disk / "zero_stage_3", ignore_errors=True)
        if len(found) == 1:
            say(
                "offloaded       "
                + "".join(f"{p:>11}" for p in one["places"])
                + "  ms/step"
            )
        row = "".join(f"{count / 1e6:8.1f} MB" for count in one["places"].values())
        say(f"{name:16}{row}{one['ms']:9.0f}")
    faults = [fault for each in gather(find_faults(found)) for fault in each]
    claim = f"{len(found)} ways, {STEPS} losses each, equal to the last bit"
    check(not faults, "; ".join([claim, *faults]))
    leave()


if __name__ == "__main__":
    folder = {"type": Path, "metavar": "FOLDER", "help": "use a disk as well"}
    start_ranks(main, 2, read_options(disk=folder, **SETUP_OPTIONS))
