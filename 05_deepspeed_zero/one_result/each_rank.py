"""What each rank does in same_result.py: train in its ways, compare, hand in."""

import multiprocessing
import os
import signal
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import deepspeed_setup
import ranks
from text import read_text, to_tokens
from verdict import (
    ALONE,
    AVERAGED,
    BY_HAND,
    FOUR_RANKS,
    HAND_STAGES,
    LAUNCHED,
    RESUMED,
    STAGES,
    SUMMED,
    TWIN,
    WAYS,
    faults_of,
)
from ways import (
    BLOCK_SIZE,
    EPS,
    RESTARTS,
    USUAL_EPS,
    Run,
    average_by_hand,
    shard_by_hand,
    sum_by_hand,
    train_alone,
    train_in_deepspeed,
    train_in_torch,
    wrap_in_ddp,
)

FOLDER = "SAME_RESULT_FOLDER"  # in a rank's environment: where all hand in their runs
CPU = torch.device("cpu")


def text_tokens() -> torch.Tensor:
    """Return the source of the standard library as bytes; every rank reads it."""
    return to_tokens(read_text(None), None, BLOCK_SIZE + 1)


def write_job(folder: Path, device: torch.device) -> dict[float, Run]:
    """Train in this process alone, by eps; hand it in, and tell all ranks of it."""
    tokens = text_tokens()
    alone = {
        eps: train_in_torch(tokens, device, train_alone, eps=eps)
        for eps in (EPS, USUAL_EPS)
    }
    runs = {eps: run._asdict() for eps, run in alone.items()}
    torch.save({"device": device.type, "alone": runs}, folder / "job")
    torch.save(runs[EPS], folder / f"{ALONE}.0")
    return alone


def load_job(folder: Path) -> tuple[str, dict[float, Run]]:
    """Return the type of device that all ways use, and one process's runs by eps."""
    job = torch.load(folder / "job", weights_only=True)
    return job["device"], {eps: Run(**run) for eps, run in job["alone"].items()}


def hand_in(folder: Path, runs: dict[str, Run]) -> None:
    """Write down this rank's runs and hold them against one process's.

    Every rank must call this.

    Raises:
        RuntimeError: a rank's result is another, or the mistake's is not.
    """
    references, faults = load_job(folder)[1], []
    for name, run in runs.items():
        torch.save(run._asdict(), folder / f"{name}.{dist.get_rank()}")
        found = faults_of(name, run, references[EPS])
        if name in WAYS:
            faults += found
        elif name == SUMMED[EPS] and not found:
            faults.append(f"{name}: nobody would notice")
    by_rank = ranks.gather(faults)
    # All ranks stop if one of them has to.
    if any(by_rank):
        raise RuntimeError(f"not the result of one process: {by_rank}")


def end_with_the_parent() -> None:
    """End this rank as soon as the process that started it has ended, however it did.

    `mp.spawn` sees to this itself on Linux, once a rank runs. This also holds on other
    systems and while a rank is still being started.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def spawned_rank(rank: int, port: int, folder: Path) -> None:
    """Be one of the two ranks that `mp.spawn` starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    on_cpu = load_job(folder)[0] == "cpu"
    device = CPU if on_cpu else ranks.choose_device(rank, 2)[0]
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=2),  # a rank that waits longer ends with an error
    )
    tokens = text_tokens()
    runs = {
        BY_HAND: train_in_torch(tokens, device, average_by_hand),
        TWIN: train_in_torch(tokens, device, wrap_in_ddp),
        "mp.spawn, DDP, no_sync": train_in_torch(tokens, device, wrap_in_ddp, parts=2),
        AVERAGED: train_in_torch(tokens, device, average_by_hand, eps=USUAL_EPS),
    }
    for name, stage in HAND_STAGES.items():
        runs[name] = train_in_torch(tokens, device, partial(shard_by_hand, stage))
    for eps, name in SUMMED.items():
        runs[name] = train_in_torch(tokens, device, sum_by_hand, eps=eps)
    hand_in(folder, runs)
    dist.destroy_process_group()


def launched_rank(folder: Path) -> None:
    """Be one of the ranks that `torchrun` or `deepspeed` starts."""

    def end_with_the_command() -> None:
        # Nothing comes from there, but the end if the process at the other end dies.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=end_with_the_command, daemon=True).start()
    is_cpu = load_job(folder)[0] == "cpu"
    if "CROSS_SIZE" not in os.environ:  # only deepspeed sets it
        device = ranks.join(only_cpu=is_cpu)
        hand_in(folder, train_under_torchrun(folder, device))
        ranks.leave()
        return
    if is_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    device = deepspeed_setup.prepare({"optimizer": {"params": {}}})
    deepspeed_setup.join()
    # One engine after the other, in the same processes.
    runs = {
        name: train_in_deepspeed(text_tokens(), device, stage)
        for name, stage in STAGES.items()
    }
    hand_in(folder, runs)
    deepspeed_setup.leave()


def train_under_torchrun(folder: Path, device: torch.device) -> dict[str, Run]:
    """Train in DDP; where the job can be restarted, once more, and die on the way."""
    tokens = text_tokens()
    if dist.get_world_size() == 4:
        return {FOUR_RANKS: train_in_torch(tokens, device, wrap_in_ddp)}
    path, is_first = folder / "checkpoint", os.environ[RESTARTS] == "0"
    if is_first:
        hand_in(folder, {LAUNCHED: train_in_torch(tokens, device, wrap_in_ddp)})
    elif not path.exists():
        raise RuntimeError("there is no checkpoint to resume from")
    # The first time this does not return: rank 1 is killed, and torchrun starts both
    # ranks anew, which find the checkpoint.
    runs = {RESUMED: train_in_torch(tokens, device, wrap_in_ddp, checkpoint=path)}
    if is_first:
        path.unlink(missing_ok=True)  # torchrun tries again, and that must fail too
        raise RuntimeError("no rank was killed")
    return runs
