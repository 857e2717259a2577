"""What a run leaves on disk, and what another needs in order to resume from it.

A checkpoint is written whole or not at all, the one before it is kept, and reading one
asks for no code to run. It belongs to the run, not to its ranks, of which the next may
have more.
"""

import csv
import errno
import os
import signal
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import Tally, whole
from model import GPT, GPTConfig
from ranks import fail, gather, say

# Options that must be the same when a run is resumed, besides the model's. Of the text
# only the name is compared: whoever changes the file resumes on other samples.
LASTING = ("seed", "lr", "amp", "samples", "max_epochs", "max_steps", "text")


class Start(NamedTuple):
    """Where a run begins: at step 0, or at a checkpoint."""

    global_batch_size: int
    step: int = 0
    path: Path | None = None  # the newest checkpoint, or the one before it
    content: dict[str, Any] | None = None


class StopSignal:
    """Ends all ranks after the same step, whichever of them gets a signal first.

    In each step they add up how many signals they have noted, and all leave when the
    sum is not 0. A rank that left by itself would make the others wait, or fail.
    """

    def __init__(self, number: int = signal.SIGUSR1, has_workers: bool = False) -> None:
        """Note the signal from now on, not die of it; every rank calls this."""
        self.noted, self.total = list[int](), torch.zeros(1)
        self.reducing: dist.Work | None = None
        noted = self.noted  # the handler, which lasts, must not hold self and its group
        signal.signal(number, lambda number, _: noted.append(number))
        if has_workers:
            # The workers' server, and so the workers, inherit that it is blocked.
            for start in (resource_tracker, forkserver):  # the first unblocks SIGTERM
                signal.pthread_sigmask(signal.SIG_BLOCK, [number])
                start.ensure_running()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        # On the CPU, by gloo: to read a GPU's tensor is to wait for all of its work.
        is_cpu = dist.get_backend() == "gloo"
        self.group = None if is_cpu else dist.new_group(backend="gloo")

    def is_agreed(self) -> bool:
        """Tell all ranks alike whether to stop; every rank calls this after each step.

        The answer is a step old: its all-reduce travels while the next step is taken.
        """
        if self.reducing is not None:
            self.reducing.wait()
        if self.total.item() > 0:
            return True
        self.total = torch.tensor([float(len(self.noted))])
        self.reducing = dist.all_reduce(self.total, group=self.group, async_op=True)
        return False


@dataclass
class TrainingState:
    """All that changes in a run, and what it must have in common with the next."""

    model: GPT
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    tally: Tally
    options: Namespace
    step: int = 0
    stop: StopSignal | None = None

    def count(
        self, micro_batches: list[list[torch.Tensor]], loss: torch.Tensor
    ) -> None:
        """Count a step that was taken: its samples, and the sum of their losses."""
        self.step += 1
        self.tally.add(micro_batches, loss)

    def note_signals(self) -> None:
        """Let SIGUSR1 stop the run after a step; every rank calls this."""
        if dist.get_rank() == 0:  # the marker is about the run before
            requeue_marker(self.options.checkpoint).unlink(missing_ok=True)
        self.stop = StopSignal(has_workers=self.options.workers > 0)

    def save_when_due(self) -> bool:
        """Save every so many steps, and before a stop; every rank calls this.

        Returns:
            Whether a signal has stopped the run. A marker beside the checkpoint then
            tells whoever started it that it is not done.
        """
        is_stop = self.stop is not None and self.stop.is_agreed()
        if is_stop or self.step % self.options.checkpoint_every == 0:
            self.save()
        if is_stop:
            marker = requeue_marker(self.options.checkpoint)
            if dist.get_rank() == 0:
                marker.touch()
            say(f"checkpoint: stopped by a signal after step {self.step}; see {marker}")
            # A launcher may kill all others when one has left: wait for the file.
            dist.barrier()
        return is_stop

    def save(self, validation_loss: float | None = None) -> None:
        """Write the newest checkpoint, keep the one before; every rank calls this."""
        sampler, text = self.tally.sampler, self.options.text
        training = {
            "step": self.step,
            "global_batch_size": sampler.global_batch_size,
            "settings": lasting_settings(self.options),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "seen": sum(gather(self.tally.seen, sampler.group)),
            "random": gather(self.random_states()),
        }
        content = {
            "config": asdict(self.model.config),
            # The plain model's: DDP would put "module." before every name.
            "model": self.model.state_dict(),
            "validation_loss": validation_loss,
            "text": text and str(text.resolve()),
            "training": training,
        }
        content = gathered(content)
        if dist.get_rank() == 0:
            write_whole(self.options.checkpoint, content)

    def random_states(self) -> list[torch.Tensor]:
        """Return the states of this rank's random numbers: the CPU's, its device's."""
        states = [torch.get_rng_state()]
        device = next(self.model.parameters()).device
        if device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
        return states

    def restore(self, start: Start) -> str:
        """Take over a checkpoint's values; every rank calls this.

        Returns:
            What to say about it. A damaged newest checkpoint is moved out of the way.
        """
        if start.content is None:
            return "checkpoint: none yet"
        training, rank = start.content["training"], dist.get_rank()
        self.step = start.step
        load_sharded(self.model, self.optimizer, start.content)
        self.schedule.load_state_dict(training["schedule"])
        # The counts of the others that share out the samples are added when needed.
        if dist.get_rank(self.tally.sampler.group) == 0:
            self.tally.seen += training["seen"]
        # On another number of ranks nobody is the rank that it was: all go on with the
        # new random numbers that they have begun.
        if len(training["random"]) == dist.get_world_size():
            states = training["random"][rank]
            torch.set_rng_state(states[0])
            device = next(self.model.parameters()).device
            if len(states) > 1 and device.type != "cpu":  # it may come from GPUs
                torch.get_device_module(device).set_rng_state(states[1], device)
        start.content.clear()  # else its tensors would take memory until the end
        note = (
            f"checkpoint: resuming from {start.path}, step {start.step}, "
            f"global batch size {start.global_batch_size}"
        )
        newest = self.options.checkpoint
        if start.path == newest or not newest.exists():
            return note
        if rank == 0:
            os.replace(newest, f"{newest}.damaged")
        return (
            f"checkpoint: {newest} is damaged and now called {newest}.damaged\n{note}"
        )


def gathered(state: Any) -> Any:
    """Return a state dict without shards, on the CPU; every rank calls this.

    Chapters that shard parameters use this file too: a DTensor is gathered, one at a
    time, and what is written is what one process would write. A number of NumPy's, such
    as `np.cos` leaves in a schedule, becomes Python's: `weights_only` refuses it.
    """
    if isinstance(state, torch.Tensor):
        return whole(state).cpu()
    if isinstance(state, dict):
        plain = {gathered(name): gathered(value) for name, value in state.items()}
        return Counter(plain) if isinstance(state, Counter) else plain  # MultiStepLR's
    if isinstance(state, list | tuple):
        return type(state)([gathered(value) for value in state])
    return state.item() if hasattr(state, "item") else state


def load_sharded(
    model: GPT, optimizer: torch.optim.Optimizer, content: dict[str, Any]
) -> None:
    """Load a checkpoint's model and optimizer; each rank keeps what it has to hold.

    The parameters' own layout decides: plain tensors are copied, of a tensor whose
    parameter is a DTensor the rank keeps its shard.
    """

    def like(value: torch.Tensor, own: Any) -> torch.Tensor:
        if not hasattr(own, "placements") or value.shape != own.shape:
            return value
        from torch.distributed.tensor import distribute_tensor

        value = value.to(own.device)
        return distribute_tensor(value, own.device_mesh, own.placements)

    own = model.state_dict()
    weights = {name: like(v, own[name]) for name, v in content["model"].items()}
    model.load_state_dict(weights)
    saved = content["training"]["optimizer"]
    # The optimizer of a pipeline stage has fewer than the file.
    held = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = dict(enumerate(held))
    state = {
        number: {n: like(value, parameters.get(number)) for n, value in one.items()}
        for number, one in saved["state"].items()
    }
    optimizer.load_state_dict(saved | {"state": state})


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write the newest checkpoint; a crash at any moment leaves the one before whole.

    The bytes go to a temporary file in the same folder and onto the disk. Then the
    newest becomes the one before it, and an atomic rename puts the new one in place.

    Raises:
        OSError, RuntimeError: the folder cannot be written, or the disk is full.
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with open(unfinished, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except Exception:
        unfinished.unlink(missing_ok=True)  # else a full disk would stay full
        raise
    if path.exists():
        os.replace(path, previous(path))
    os.replace(unfinished, path)


def previous(path: Path) -> Path:
    """Name the checkpoint before the newest."""
    return path.with_name(path.name + ".previous")


def requeue_marker(path: Path) -> Path:
    """Name the file that says that a run was stopped and wants to be started again."""
    return path.with_name(path.name + ".requeue")


def lasting_settings(options: Namespace) -> dict[str, Any]:
    """Return by option what must stay the same when a run is resumed."""
    values = {name: getattr(options, name) for name in LASTING}
    return values | {"text": str(options.text)}


def load_checkpoint(path: Path) -> tuple[GPT, dict[str, Any]]:
    """Build the model that a checkpoint holds, on the CPU.

    Returns:
        The model with its weights, and the checkpoint's dictionary.

    Raises:
        ValueError: the file is missing, damaged, or holds something else.
        OSError, MemoryError: it cannot be read now, and may be whole.
    """
    if not path.is_file():
        raise ValueError(
            f"no checkpoint at {path}; train.py --checkpoint={path} writes one"
        )
    try:
        with ZipFile(path) as archive:
            if archive.testzip() is not None:  # `torch.load` does not look at checksums
                raise ValueError
        # weights_only: tensors, numbers and text are read; nothing in the file can run.
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged archive raises any of half a dozen types, none of them public, among
        # them an OSError: no such position. Other OSErrors are the disk's.
        is_of_the_disk = isinstance(error, OSError) and error.errno != errno.EINVAL
        if is_of_the_disk or isinstance(error, MemoryError):
            raise
        raise ValueError(f"{path} is damaged or is no checkpoint") from error
    try:
        model = GPT(GPTConfig(**content["config"]))
        model.load_state_dict(content["model"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} holds another model than this GPT") from error
    return model, content


def find_start(
    config: GPTConfig, options: Namespace, world_size: int, samples: int
) -> Start:
    """Load the newest checkpoint that is whole; every rank does so by itself.

    Args:
        config: of the model to be trained.
        options: of this run; `options.checkpoint` is where the newest should stand,
            with the one before it beside it, or None.
        world_size: how many ranks there are now.
        samples: in an epoch.

    Raises:
        ValueError: the path cannot be written, what is there cannot be resumed, or the
            ranks cannot share its global batch size out of so many samples.
    """
    check_restarts()
    start = Start(options.batch_size * options.grad_accum_steps * world_size)
    path: Path | None = options.checkpoint
    if path is not None:
        start = newest_whole(path, config, lasting_settings(options)) or start
    if not world_size <= start.global_batch_size <= samples:
        raise ValueError(
            f"{world_size} rank(s) with a global batch size of "
            f"{start.global_batch_size}, and an epoch of {samples} samples: use fewer "
            "ranks or a smaller --batch-size"
        )
    return start


def newest_whole(
    path: Path, config: GPTConfig, settings: dict[str, Any]
) -> Start | None:
    """Load the checkpoint at `path` or, if that is damaged, the one before it.

    Returns None if there is neither; raises ValueError as `find_start` does.
    """
    if not path.parent.is_dir():
        raise ValueError(f"--checkpoint={path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--checkpoint={path}: cannot write in {path.parent}")
    if path.is_dir():
        raise ValueError(f"--checkpoint={path} is a folder; name a file in it")
    present = [one for one in (path, previous(path)) if one.exists()]
    for one in present:
        try:
            model, content = load_checkpoint(one)
        except ValueError:
            continue
        if model.config != config:
            raise ValueError(
                f"{one} belongs to a model of {model.config}; give --checkpoint "
                "another name"
            )
        if "training" not in content:
            raise ValueError(
                f"{one} holds weights alone, which is too little to resume; give "
                "--checkpoint another name"
            )
        training = content["training"]
        for name, value in training["settings"].items():
            if value != settings.get(name):
                raise ValueError(
                    f"{one} comes from a run with --{name.replace('_', '-')}={value}, "
                    f"this one has {settings.get(name)}; move it away to train from "
                    "the beginning"
                )
        return Start(training["global_batch_size"], training["step"], one, content)
    if present:
        raise ValueError(
            f"{' and '.join(map(str, present))}: damaged, or no checkpoint; move it "
            "away to train from the beginning"
        )
    return None


def agree_on_step(step: int) -> None:
    """End in one line unless all ranks begin at the same step; all call this."""
    if len(set(steps := gather(step))) > 1:
        fail(
            f"the ranks find checkpoints of steps {steps}: --checkpoint must name a "
            "file that all machines share"
        )


def check_restarts() -> None:
    """Refuse to be started again by torchrun where that cannot be relied on.

    By default torch 2.13's agent holds the store in which its ranks meet, and keeps it
    when it starts them again. A rank that is first to arrive finds the addresses of
    those that have died there, and fails or waits for them (pytorch#135712). A variable
    makes the ranks bring a store of their own, but not under the static rendezvous.

    Raises:
        ValueError: torchrun is to start ranks again, and uses such a store.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ValueError(
            "ranks that are started again would find the addresses of dead ones; first "
            "type: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and give torchrun "
            "--rdzv-backend=c10d in place of --master-port"
        )


def settle_buckets(
    ddp_model: DistributedDataParallel, inputs: torch.Tensor, labels: torch.Tensor
) -> None:
    """Let DDP arrange its buckets now, not after the first step; all call this.

    DDP fills buckets in one order for the first backward, and from the second on in the
    order in which gradients arrived. Where a value stands in a bucket decides in which
    order the ranks' values are added: with more than two ranks, the last bit of the
    sum. A run that resumes must not make a first step of its own. It runs in eval():
    without find_unused_parameters, all parameters must be used in eval(), too.
    """
    training = [module for module in ddp_model.modules() if module.training]
    ddp_model.eval()  # BatchNorm must not learn from these, nor refuse a single one
    ddp_model(inputs, labels).backward()
    ddp_model.zero_grad()
    for module in training:
        module.training = True


def log_folder(text: str) -> Path:
    """Make the folder that an option names, if there is none; a converter."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentTypeError(str(error)) from error
    return Path(text)


def open_log(folder: Path | None, step: int) -> Callable[..., None]:
    """Return `write(step, name=number, ...)`, which does nothing but on rank zero.

    It writes TensorBoard's event files where tensorboard is installed, else `log.csv`.
    What a run logged after `step`, at which this one resumes, is dropped.
    """
    if folder is None or dist.get_rank() > 0:
        return lambda step, **numbers: None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return open_csv(folder / "log.csv", step)
    writer = SummaryWriter(folder, purge_step=step + 1)

    def write(step: int, **numbers: float) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def open_csv(path: Path, step: int) -> Callable[..., None]:
    """Return `write`, as `open_log` does, for a table with one line a step.

    The first line decides on the names; `write` raises ValueError for any other.
    """
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = lines[:1] + [line for line in lines[1:] if int(line.split(",")[0]) <= step]
    path.write_text("".join(kept))
    fields = kept[0].rstrip().split(",") if kept else []

    def write(step: int, **numbers: float) -> None:
        with open(path, "a", newline="") as file:
            table = csv.DictWriter(file, fields, lineterminator="\n")
            if not fields:
                fields.extend(["step", *numbers])
                table.writeheader()
            table.writerow({"step": step, **numbers})

    return write
