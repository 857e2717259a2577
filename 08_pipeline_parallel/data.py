"""Real text with no download: Python's own standard library, read as bytes.

And its way to the ranks: samples, a sampler that can begin at any step, evaluation.
"""

import multiprocessing
import os
import sys
import sysconfig
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import islice
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ranks import gather

HELD_OUT = 0.05  # the last part of the text, which no rank trains on


def find_files(text: Path | None) -> list[Path]:
    """List the files of the corpus in an order that every rank agrees on.

    Without `text`, these are the source files of the standard library that runs this
    script. With it, the file itself or every file below the folder that is not hidden.

    Raises:
        FileNotFoundError: there is nothing at `text`, or no file in the folder.
    """
    if text is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        # The names Python itself lists leave out its test suite and installed packages,
        # which may be a hundred times as many files.
        known = sys.stdlib_module_names
        files = [
            path
            for top in folder.iterdir()
            if top.name.removesuffix(".py") in known
            for path in (top.rglob("*.py") if top.is_dir() else [top])
        ]
    elif not text.exists():
        raise FileNotFoundError(f"--text {text}: no such file or folder")
    elif text.is_dir():
        folder = text
        files = [
            path
            for path in folder.rglob("*")
            if path.is_file()
            and not any(part[0] == "." for part in path.relative_to(folder).parts)
        ]
    else:
        return [text]
    if not files:
        raise FileNotFoundError(f"no text below {folder}; --text PATH names another")
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def load_text(text: Path | None, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the corpus and split it into a training and a held-out part.

    Returns:
        Two uint8 tensors of shape (bytes,).

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: a part is too short for one window of `block_size` + 1 bytes, or
            the only file is not text.
    """
    contents = [path.read_bytes() for path in find_files(text)]
    # A file with a zero byte is not text; in a folder such files are passed over.
    data = b"".join(content for content in contents if b"\0" not in content)
    cut = int(len(data) * (1 - HELD_OUT))
    needed = block_size + 1
    if min(cut, len(data) - cut) < needed:
        raise ValueError(
            f"{text or 'the standard library'} holds {len(data)} bytes of text; "
            f"with windows of {needed} bytes and {HELD_OUT:.0%} held out it takes "
            f"at least {int(needed / HELD_OUT) + 1}: give more text or a smaller "
            "--block-size"
        )
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return whole[:cut], whole[cut:]


class WindowDataset(Dataset):
    """`samples` windows spread evenly over a text, and for each its next bytes.

    An item is (index, inputs, labels), the last two of shape (block_size,) and dtype
    int64. Label t is the byte after input t: a model that only copies its input learns
    nothing. The index tells a reader which rank saw which sample.
    """

    def __init__(self, text: torch.Tensor, block_size: int, samples: int) -> None:
        """Take at most `samples` windows, fewer where they would overlap."""
        self.text = text
        self.block_size = block_size
        last_start = len(text) - block_size - 1
        count = min(samples, last_start // block_size + 1)
        # Integers throughout: rounding in floating point could differ on another host.
        step = last_start // (count - 1) if count > 1 else 0
        self.starts = [i * step for i in range(count)]

    def __len__(self) -> int:
        """Count the windows: the samples in one epoch."""
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Cut one window out of the text."""
        start = self.starts[index]
        window = self.text[start : start + self.block_size + 1].long()
        return index, window[:-1], window[1:]

    def batch(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Stack some items: inputs and labels, both of shape (len(indices), T)."""
        _, inputs, labels = zip(*(self[i] for i in indices), strict=True)
        return torch.stack(inputs), torch.stack(labels)


def load_sets(options: Namespace) -> tuple[WindowDataset, WindowDataset]:
    """Return the samples to train on, and 256 held out, as train.py's options say.

    Raises OSError or ValueError as `load_text` does.
    """
    train_text, held_out_text = load_text(options.text, options.block_size)
    train_set = WindowDataset(train_text, options.block_size, options.samples)
    return train_set, WindowDataset(held_out_text, options.block_size, samples=256)


class StepSampler(Sampler[list[int]]):
    """Shard steps of one global batch size over however many ranks there are.

    `DistributedSampler` fixes the batch size of a rank; a run that resumes on another
    number of ranks has to keep that of all ranks together. Where the ranks divide it
    evenly, each gets the samples that `DistributedSampler` gives it, in that order.
    """

    def __init__(
        self,
        samples: int,
        global_batch_size: int,
        batch_size: int,
        seed: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Cut a rank's shard of each step into micro-batches of `batch_size` at most.

        Shards may differ by one sample; the ranks' micro-batches are equally many, or
        FSDP would hang. So where `batch_size` is 1 some may hold two samples.
        `group` holds the ranks that shard the samples; None: all ranks.
        """
        self.samples, self.global_batch_size = samples, global_batch_size
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.shard = len(range(self.rank, global_batch_size, self.world_size))
        least = global_batch_size // self.world_size
        most = -(-global_batch_size // self.world_size)
        self.micro_batches = min(-(-most // batch_size), least)  # of one step
        self.seed, self.epoch, self.first_step = seed, 0, 0

    def start_at(self, epoch: int, first_step: int) -> None:
        """Choose where the next iteration begins: at this step of this epoch."""
        self.epoch, self.first_step = epoch, first_step

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of one micro-batch after the other."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.samples, generator=generator)
        steps = order.split(self.global_batch_size)
        # A last step that would be smaller is left out; each epoch, of other samples.
        for step in steps[self.first_step : self.samples // self.global_batch_size]:
            shard = step[self.rank :: self.world_size]
            for indices in shard.tensor_split(self.micro_batches):
                yield indices.tolist()


def end_with_rank(worker: int) -> None:
    """Let a worker end when its rank has ended, however that died.

    Otherwise it would wait for ever: it ends only after its parent, the server.
    """
    rank: Any = multiprocessing.parent_process()  # the one that asked for this worker

    def wait_and_end() -> None:
        connection.wait([rank.sentinel])
        os._exit(1)

    threading.Thread(target=wait_and_end, daemon=True).start()


class StepLoader:
    """Loads a step's micro-batches at a time, in worker processes of each rank."""

    def __init__(
        self,
        dataset: WindowDataset,
        global_batch_size: int,
        options: Namespace,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Load as train.py's options say; `options.workers` is 0 for none."""
        self.sampler = StepSampler(
            len(dataset), global_batch_size, options.batch_size, options.seed, group
        )
        self.generator = torch.Generator()
        # A worker that is forked from a rank can wait for ever for a lock that one of
        # its threads held (pytorch#130610). A server without threads forks it instead.
        multiprocessing.set_forkserver_preload(["torch.distributed.nn"])
        self.loader = DataLoader(
            dataset,
            batch_sampler=self.sampler,
            num_workers=options.workers,
            multiprocessing_context="forkserver" if options.workers else None,
            pin_memory=device.type != "cpu",  # a copy to the GPU need not wait then
            generator=self.generator,
            worker_init_fn=end_with_rank,
        )

    def steps(self, epoch: int, first: int, end: int) -> Iterator[list[Any]]:
        """Yield, for each step from `first` to `end` of an epoch, its micro-batches.

        A micro-batch is (indices, inputs, labels), the last two (B, T).
        """
        self.sampler.start_at(epoch, first)
        # A worker draws its seed from here. From a global generator that all ranks have
        # seeded alike, worker 0 of all ranks would draw the same random numbers; from
        # one seeded by the rank alone, each run that resumes those of the first epoch.
        number = epoch * self.sampler.world_size + self.sampler.rank
        self.generator.manual_seed(self.sampler.seed + number)
        batches = iter(self.loader)
        for _ in range(first, end):
            yield list(islice(batches, self.sampler.micro_batches))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: WindowDataset,
    batch_size: int = 32,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Return the mean loss over all samples, each counted once; every rank calls it."""
    device = next(model.parameters()).device
    total = torch.zeros(2, device=device)  # the sum of the losses, how many they are
    training = [module for module in model.modules() if module.training]
    model.eval()
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for buffer in model.buffers():  # BatchNorm's statistics, as rank 0 saves them
        dist.broadcast(values := buffer.contiguous(), group=group, group_src=0)
        if not values.equal(buffer):  # contiguous() has copied a strided one
            buffer.copy_(values)
    together = world_size * batch_size
    for start in range(0, len(dataset), together):
        shard = range(len(dataset))[start : start + together][rank::world_size]
        # A rank that has none left runs sample 0, uncounted: FSDP needs all ranks.
        inputs, labels = dataset.batch(shard or [0])
        loss = model(inputs.to(device), labels.to(device))
        total += torch.stack([loss * len(shard), loss.new_tensor(len(shard))])
    for module in training:  # a frozen part may have been in eval() before
        module.training = True
    # The mean of the ranks' means would be another number: shards differ in size.
    dist.all_reduce(total, group=group)
    return (total[0] / total[1]).item()


class Tally:
    """This rank's samples and losses of an epoch, to be read out with the others'."""

    def __init__(self, dataset: WindowDataset, sampler: StepSampler) -> None:
        """Start with no sample of the epoch seen."""
        self.dataset, self.sampler = dataset, sampler
        # How often this rank saw each sample; a checkpoint carries it over.
        self.seen = torch.zeros(len(dataset), dtype=torch.int32)
        self.start()

    def start(self) -> None:
        """Begin an epoch, or resume one: losses and time are those of this run."""
        self.sums: list[torch.Tensor] = []  # of this rank's losses, one a step
        self.reported, self.started = 0, time.perf_counter()

    def add(self, micro_batches: list[list[torch.Tensor]], loss: torch.Tensor) -> None:
        """Count a step: its samples, and the sum of their losses."""
        for indices, _, _ in micro_batches:
            self.seen[indices] += 1
        self.sums.append(loss)

    def recent(self) -> tuple[float, float]:
        """Return mean loss and tokens per second since the last call; all call it."""
        sums = torch.stack(self.sums[self.reported :])
        batch_size = self.sampler.global_batch_size
        loss = sum(gather(sums.mean().item(), self.sampler.group)) / batch_size
        now = time.perf_counter()
        tokens = len(sums) * batch_size * self.dataset.block_size
        rate = tokens / (now - self.started)
        self.reported, self.started = len(self.sums), now
        return loss, rate

    def end(self, steps: int) -> list[str]:
        """End an epoch of `steps` steps: say what each rank did; all call this.

        Raises:
            RuntimeError: an index was lost or counted twice, by this run or by those
                that it resumes. (Of a text that was changed it is other samples'.)
        """
        sampler = self.sampler
        local_loss = torch.stack(self.sums).mean().item() / sampler.shard
        # Its micro-batches: ranks that do not divide a step evenly have different ones.
        batch = -(-sampler.shard // sampler.micro_batches)
        local = gather((batch, local_loss), sampler.group)
        total = torch.stack(gather(self.seen, sampler.group)).sum(dim=0)
        self.seen.zero_()
        batch_size = sampler.global_batch_size
        different, counted = int((total > 0).sum()), int(total.sum())
        if not different == counted == batch_size * steps:
            raise RuntimeError(
                f"{steps} steps of {batch_size} samples saw {counted}, {different} of "
                "them different"
            )
        done = f"steps {len(self.sums)}"
        lines = [
            f"rank {rank} | batch size {batch} | {done} | local loss {loss:.3f}"
            for rank, (batch, loss) in enumerate(local)
        ]
        product = f"{batch_size} x {steps} = {counted}"
        return [*lines, f"global batch size x steps = {product} different samples"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor; if ranks hold shards of it (DTensor), all call this."""
    return getattr(tensor, "full_tensor", tensor.detach)()


def gradient_error(
    parallel_model: nn.Module,
    plain_model: nn.Module,
    dataset: WindowDataset,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Return the largest relative error of the ranks' gradient, next to one process's.

    Each rank computes it alone with `plain_model` (which may be the one inside DDP) on
    two samples of every rank of the group, then with the others on two of its own;
    every rank calls this.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    parallel_model.eval()  # dropout would draw other values in each of the two
    plain_model.eval()
    parameters = [p for p in plain_model.parameters() if p.requires_grad]
    batch = dataset.batch([i % len(dataset) for i in range(2 * world_size)])
    inputs, labels = (part.to(parameters[0].device) for part in batch)
    alone = torch.autograd.grad(plain_model(inputs, labels), parameters)
    parallel_model.zero_grad()
    own_inputs, own_labels = (x.chunk(world_size)[rank] for x in (inputs, labels))
    parallel_model(own_inputs, own_labels).backward()
    ours = [whole(p.grad) for p in parallel_model.parameters() if p.grad is not None]
    # A NaN stays in a tensor's maximum; Python's max() would drop it.
    errors = [(mine - g).abs().max() for mine, g in zip(ours, alone, strict=True)]
    largest = torch.stack([g.abs().max() for g in alone]).max()
    return (torch.stack(errors).max() / largest).item()
