"""The exercises: what their checkers say to right answers and to wrong ones.

Each stub is run by its chapter's README. Here the checkers themselves are called in the
pool's workers, with answers in the place of the stub, many of them in one run.
"""

import ast
import contextlib
import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from launch import ROOT, clean_environment, python
from worker_pool import WorkerPool

Answers = list[Any]
# For each answer what each rank must be told; of a hint the first words, "" if right.
Hints = list[tuple[Any, list[Any]]]


def load_exercise(chapter: str, name: str) -> ModuleType:
    """Import one script of a chapter; only that stays in `sys.modules`.

    Its neighbours, of which other chapters have others of the same names, are taken out
    again. (`load_chapter` imports all of a chapter, of which some is slow to import.)
    """
    neighbours = {path.stem for path in (ROOT / chapter).glob("*.py")} - {name}
    hidden = {one: sys.modules.pop(one) for one in neighbours & set(sys.modules)}
    sys.path.insert(0, str(ROOT / chapter))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / chapter))
        for one in neighbours:
            sys.modules.pop(one, None)
        sys.modules.update(hidden)


MEAN = load_exercise("01_communication/exercises", "check_uneven_mean")
BUCKETS = load_exercise("02_ddp_mp/exercises", "check_buckets")
LOOP = load_exercise("02_ddp_mp/exercises", "check_broken_loop")
BROKEN_LOOP = ROOT / "02_ddp_mp" / "exercises" / "broken_loop.py"
ACCUMULATION = load_exercise("03_ddp_torchrun/exercises", "check_accumulation")
TRAINING = load_exercise("03_ddp_torchrun/exercises", "check_broken_training")
SCRIPT = load_exercise("03_ddp_torchrun/exercises", "check_your_own_script")
STOPPING = load_exercise("03_ddp_torchrun/exercises", "check_stop_and_resume")
# What the reader edits, as it stands.
UNTOUCHED = load_exercise("03_ddp_torchrun/exercises", "your_own_script")
EPOCH = load_exercise("03_ddp_torchrun/exercises", "accumulation").train_epoch
BROKEN = load_exercise("03_ddp_torchrun/exercises", "broken_training").train_and_save
STOPS_ALONE = load_exercise("03_ddp_torchrun/exercises", "stop_and_resume")
LOST = load_exercise("04_rpc_parameter_server/exercises", "check_lost_steps")
WAITING = load_exercise("04_rpc_parameter_server/exercises", "check_waiting_server")
LOST_STUB = load_exercise("04_rpc_parameter_server/exercises", "lost_steps")
WAITING_STUB = load_exercise("04_rpc_parameter_server/exercises", "waiting_server")
BY_RPC = load_exercise("04_rpc_parameter_server/exercises", "rpc_between_ranks")
ADAM = load_exercise("05_deepspeed_zero/exercises", "check_sharded_adam")
ENGINE = load_exercise("05_deepspeed_zero/exercises", "check_broken_engine")

# Those of chapter 04 import the exercise.
from answers import broken_engine, your_own_script  # noqa: E402
from answers.accumulation import train_epoch  # noqa: E402
from answers.broken_training import train_and_save  # noqa: E402
from answers.buckets import average_in_buckets  # noqa: E402
from answers.lost_steps import add_to_rows, step_on_server  # noqa: E402
from answers.sharded_adam import ShardedAdam  # noqa: E402
from answers.stop_and_resume import train_until_told  # noqa: E402
from answers.uneven_mean import mean_and_std  # noqa: E402
from answers.waiting_server import push  # noqa: E402


def imported_names(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [alias.asname or alias.name for node in imports for alias in node.names]
    return {name.partition(".")[0] for name in names}


def test_an_answer_runs_where_its_page_says_to_write_it() -> None:
    answers = sorted((ROOT / "tests/support/answers").glob("*.py"))
    assert len(answers) == 19
    for answer in answers:
        (script,) = ROOT.glob(f"0*/exercises/{answer.name}")
        assert imported_names(answer) <= imported_names(script), script.name


@contextlib.contextmanager
def group_that_reports(file: str) -> Iterator[None]:
    """Put a group like that of `ask_ranks` in the place of the pool's.

    Its ranks are told when they make different calls, and do not wait for long.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.destroy_process_group()
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    # One rank may still be importing what the last answer asked for, on a busy machine.
    store = dist.FileStore(file, world_size)
    store.set(f"here {rank}", "")
    everyone = [f"here {other}" for other in range(world_size)]
    store.wait(everyone, timedelta(seconds=60))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=6),
    )
    # A rank whose answer calls nothing would leave before the other has connected.
    dist.barrier()
    try:
        yield
    finally:
        dist.set_debug_level(level)


def judge(
    prefix: str, module: ModuleType, stub: str, checker: str, answers: Answers
) -> list[str]:
    """Let a checker judge answers on this rank, each in a group of its own.

    `prefix` is the beginning of the names of the files at which the ranks meet.
    """
    told = []
    for number, answer in enumerate(answers):
        with (
            group_that_reports(f"{prefix}{number}"),
            mock.patch.object(module, stub, answer),
        ):
            told.append(getattr(module, checker)(dist.get_rank()))
    return told


def ask(prefix: str, checker: Callable[[Any], str], answers: Answers) -> list[str]:
    """Let a checker try answers on this rank, each in a group of its own.

    For exercises whose checker takes the answer; `judge` is for those whose checker
    stands in the script that the reader edits.
    """
    told = []
    for number, answer in enumerate(answers):
        with group_that_reports(f"{prefix}{number}"):
            told.append(checker(answer))
    return told


def expect(by_rank: list[list[str]], hints: Hints) -> None:
    """Every rank must have been told of every answer what is expected.

    A hint of several texts expects one of them.
    """
    assert len(by_rank) > 1
    count = 0
    wrong = []
    for number, (answer, expected) in enumerate(hints):
        told = [one[number] for one in by_rank]
        assert len(expected) == len(told)
        for text, hint in zip(told, expected, strict=True):
            count += 1
            if not text.startswith(hint) or bool(text) != bool(hint):
                wrong.append(f"{answer}: {text!r}, not {hint!r}")
    assert wrong == []
    assert count == len(by_rank) * len(hints) > 0


# 01: a mean over ranks that have unequally many numbers.


def try_means(folder: str, answers: Answers) -> list[str]:
    return ask(f"{folder}/", MEAN.try_cases, answers)


def global_mean(own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.tensor([own.sum(), len(own)])
    dist.all_reduce(total)
    return total[0] / total[1], total[1]


def repairs_only_the_mean(own: torch.Tensor) -> tuple[float, float]:
    mean, _ = global_mean(own)
    variance = (own - mean).square().mean()
    dist.all_reduce(variance, op=dist.ReduceOp.AVG)
    return mean.item(), variance.sqrt().item()


def averages_deviations(own: torch.Tensor) -> tuple[float, float]:
    deviation = own.std(correction=0)
    dist.all_reduce(deviation, op=dist.ReduceOp.AVG)
    return global_mean(own)[0].item(), deviation.item()


def measures_from_own_mean(own: torch.Tensor) -> tuple[float, float]:
    mean, count = global_mean(own)
    squares = (own - own.mean()).square().sum()
    dist.all_reduce(squares)
    return mean.item(), (squares / count).sqrt().item()


def divides_by_one_less(own: torch.Tensor) -> tuple[float, float]:
    mean, count = global_mean(own)
    squares = (own - mean).square().sum()
    dist.all_reduce(squares)
    return mean.item(), (squares / (count - 1)).sqrt().item()


def weighs_means(own: torch.Tensor) -> tuple[float, float]:
    # Right, until a rank has no number and thus no mean.
    count = torch.tensor(float(len(own)))
    total = torch.stack([own.mean() * count, own.square().mean() * count, count])
    dist.all_reduce(total)
    mean, square = (total[:2] / total[2]).tolist()
    return mean, max(0.0, square - mean**2) ** 0.5


def subtracts_squares(own: torch.Tensor) -> tuple[float, float]:
    total = torch.tensor([own.sum(), own.square().sum(), len(own)])
    dist.all_reduce(total)
    mean, square = (total[:2] / total[2]).tolist()
    return mean, max(0.0, square - mean**2) ** 0.5


def stays_away(own: torch.Tensor) -> tuple[float, float]:
    return mean_and_std(own) if len(own) else (0.0, 0.0)


def reduces_to_rank_zero(own: torch.Tensor) -> tuple[float, float]:
    total = torch.tensor([own.sum(), own.square().sum(), len(own)])
    dist.reduce(total, dst=0)
    mean, square = (total[:2] / total[2]).tolist()
    return mean, max(0.0, square - mean**2) ** 0.5


def returns_nothing(own: torch.Tensor) -> None:
    mean_and_std(own)


def measures_from_a_pilot(own: torch.Tensor) -> tuple[float, float]:
    # The last rank's mean, which is nan where that rank has no number.
    pilot = own.mean()
    dist.broadcast(pilot, src=2)
    far = own - pilot
    total = torch.tensor([far.sum(), far.square().sum(), len(own)])
    dist.all_reduce(total)
    mean, square = (total[:2] / total[2]).tolist()
    return mean + pilot.item(), max(0.0, square - mean**2) ** 0.5


def takes_a_root_of_less_than_zero(own: torch.Tensor) -> tuple[float, float]:
    mean, std = mean_and_std(own)
    return mean, torch.tensor(-std).sqrt().item()


def centres_in_place(own: torch.Tensor) -> tuple[float, float]:
    mean, std = mean_and_std(own)
    own -= mean
    return mean, std


def reduces_in_another_order(own: torch.Tensor) -> tuple[float, float]:
    # The calls are alike in name and shape.
    both = [own.sum(), torch.tensor(len(own))]
    for one in both if dist.get_rank() == 0 else both[::-1]:
        dist.all_reduce(one)
    return (both[0] / both[1]).item(), 0.0


def test_mean(worker_pool: WorkerPool, tmp_path: Path) -> None:
    no_mean = "of 4, 4, 4 numbers: your mean is "
    no_deviation = "of 4, 4, 4 numbers: your deviation is "
    hints: Hints = [
        (mean_and_std, [""] * 3),
        (
            repairs_only_the_mean,
            ["of 2, 3, 7 numbers: your deviation is 6.23, not 6.48: the ranks' mean sq"]
            * 3,
        ),
        (
            averages_deviations,
            [f"{no_deviation}2.24, not 3.16: the mean of the ranks' deviations; "] * 3,
        ),
        (
            measures_from_own_mean,
            [f"{no_deviation}2.42, not 3.16: measured from each rank's own mean; "] * 3,
        ),
        (
            divides_by_one_less,
            [f"{no_deviation}3.30, not 3.16: it is divided by n - 1, not by n"] * 3,
        ),
        (
            weighs_means,
            ["of 0, 5, 7 numbers: your mean is nan: the mean of no numbers"] * 3,
        ),
        (subtracts_squares, ["of 2, 3, 7 numbers near 10000: your deviation is "] * 3),
        (
            stays_away,
            ["of 0, 5, 7 numbers: your mean is 0.00, not 8.50"]
            + ["of 0, 5, 7 numbers: waited in a collective, to which not all"] * 2,
        ),
        (
            reduces_to_rank_zero,
            [
                "of 4, 4, 4 numbers: this rank is right",
                f"{no_mean}3.50, not 4.00; rank 0 has the right ones",
                f"{no_mean}3.25, not 4.00; rank 0 has the right ones",
            ],
        ),
        (returns_nothing, ["of 4, 4, 4 numbers: it does not return two numbers"] * 3),
        (
            measures_from_a_pilot,
            ["of 2, 3, 0 numbers: your mean is nan: the mean of no numbers"] * 3,
        ),
        (
            takes_a_root_of_less_than_zero,
            [f"{no_deviation}nan: the root of less than 0, or that of no"] * 3,
        ),
        (centres_in_place, ["of 4, 4, 4 numbers: it has changed the numbers"] * 3),
        (
            reduces_in_another_order,
            [
                f"of 4, 4, 4 numbers: this rank calls ALLREDUCE of shape [] in {mine}, "
                f"another rank ALLREDUCE of shape [] in {other}"
                for mine, other in (("Float", "Long"), *[("Long", "Float")] * 2)
            ],
        ),
    ]
    answers = [answer for answer, _ in hints]
    by_rank = worker_pool.run(try_means, str(tmp_path), answers, world_size=3)
    expect(by_rank, hints)


# 02: gradients averaged in buckets.


def try_buckets(folder: str, answers: Answers) -> list[str]:
    return ask(f"{folder}/", BUCKETS.try_cases, answers)


def fill_buckets(parameters: list[Any], cap: int, flaw: str) -> None:
    """Average gradients as the answer does, but for one flaw."""
    buckets: list[list[torch.Tensor]] = []
    room = 0
    if flaw == "begins with one":
        buckets, room = [[]], cap
    for parameter in parameters:
        if parameter.grad is None:
            if flaw == "skips what is None":
                continue
            parameter.grad = torch.zeros_like(parameter)
        full = parameter.numel() > room or flaw == "one for each"
        if flaw == "fills on behind a larger one" and parameter.numel() > cap:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            continue
        if flaw == "an exact fit is too large":
            full = parameter.numel() >= room
        if not buckets or full:
            if flaw != "one for all" or not buckets:
                buckets.append([])
            room = cap
        buckets[-1].append(parameter.grad)
        room -= parameter.numel()
    if flaw == "forgets the last":
        buckets.pop()
    if flaw == "last layer first":
        buckets.reverse()
    op = dist.ReduceOp.SUM if flaw == "sum" else dist.ReduceOp.AVG
    for bucket in buckets:
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, op=op)
        if flaw == "mixes them up":
            bucket = bucket[::-1]
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            if flaw != "does not write back":
                gradient.copy_(part.view_as(gradient))
            if flaw == "writes into a parameter":
                parameters[0].data.fill_(1)


def test_buckets(worker_pool: WorkerPool, tmp_path: Path) -> None:
    first = "cap 32: "
    hints: Hints = [(average_in_buckets, [""] * 3)]
    hints += [
        (functools.partial(fill_buckets, flaw=flaw), [hint] * 3)
        for flaw, hint in {
            "one for each": f"{first}7 messages were sent, where 5 would do",
            "one for all": f"{first}one message has 111 numbers, but only 32 fit",
            "sum": f"{first}gradient 0 is 3 times the mean: it is the sum (and 6 more)",
            "forgets the last": f"{first}gradient 6 is still this rank's local grad",
            "last layer first": f"{first}the messages have [3, 40, 13, 30, 25] numbers",
            "mixes them up": f"{first}gradient 0 begins with number 5 of gradient 0",
            "does not write back": f"{first}111 numbers were sent, but gradient 0",
            "writes into a parameter": f"{first}right, but parameter 0 has changed",
            "an exact fit is too large": "cap 36: the messages have [25, 30, 13, 40",
            "fills on behind a larger one": f"{first}the messages have [40, 25, 30, 1",
            "begins with one": "cap 19: it ended with: ",
        }.items()
    ]
    mine = (
        "this rank calls ALLREDUCE of shape [13], another rank ALLREDUCE of shape [7]"
    )
    other = (
        "this rank calls ALLREDUCE of shape [7], another rank ALLREDUCE of shape [13]"
    )
    skips = functools.partial(fill_buckets, flaw="skips what is None")
    case = "cap 32, no gradient 3 on rank 1: "
    hints.append((skips, [case + mine, case + other, case + mine]))
    answers = [answer for answer, _ in hints]
    by_rank = worker_pool.run(try_buckets, str(tmp_path), answers, world_size=3)
    expect(by_rank, hints)


# 02: a training loop that averages its gradients, and nobody reads the mean.

UNREAD = "        dist.all_reduce(mean)\n"


def trains_by_ddp(model: torch.nn.Module, batches: list[Any]) -> list[float]:
    # Which needs a group that does not compare the ranks' calls.
    ddp_model, losses = DistributedDataParallel(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for places, heights in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(ddp_model(places), heights)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trains_without_losses(model: torch.nn.Module, batches: list[Any]) -> list[float]:
    trains_by_ddp(model, batches)
    return []


def trains_to_nan(model: torch.nn.Module, batches: list[Any]) -> list[float]:
    torch.nn.utils.vector_to_parameters(
        torch.full((33_153,), torch.nan), model.parameters()
    )
    return [0.0] * len(batches)


def trains_too_far(model: torch.nn.Module, batches: list[Any]) -> list[float]:
    return batches[len(batches)]


def try_loops(folder: str, repairs: list[Any]) -> list[str]:
    """Put each repair in the place of UNREAD, and let the checker try the loop.

    A repair that is a function stands for the whole loop.
    """
    loops, text = [], BROKEN_LOOP.read_text()
    assert text.count(UNREAD) == 1
    sys.modules.setdefault("check_broken_loop", LOOP)
    for repair in repairs:
        if callable(repair):
            loops.append(repair)
            continue
        loop: dict[str, Any] = {"__name__": "broken_loop"}
        exec(text.replace(UNREAD, repair), loop)
        loops.append(loop["train"])
    with mock.patch.object(LOOP, "STEPS", 16):
        return ask(f"{folder}/", LOOP.try_loop, loops)


def test_broken_loop(worker_pool: WorkerPool, tmp_path: Path) -> None:
    copied = f"{UNREAD}        parameter.grad.copy_(mean)\n"
    replaced = f"{UNREAD}        parameter.grad = mean\n"
    text = "the loss fell from {} to {}, but 33,153 weights differ from rank {}'s"
    equal = "the loss fell from {} to {}, but the weights, equal on both ranks, are not"
    doubled = f"{equal} one process's: each gradient was 2 times the mean"
    hints: Hints = [
        (UNREAD, [text.format(1.03, 0.76, 1), text.format(1.08, 0.76, 0)]),
        (copied, [""] * 2),
        (replaced, [""] * 2),
        # The sum: with plain SGD that is a step twice as long, and not one process's.
        (
            "        dist.all_reduce(parameter.grad)\n",
            [doubled.format("1.00", 0.55), doubled.format(1.05, 0.58)],
        ),
        # The mean, but only on rank 1.
        (
            f"{UNREAD}        if dist.get_rank(): parameter.grad = mean\n",
            [text.format(1.03, 0.76, 1), text.format(1.08, 0.76, 0)],
        ),
        # The same gradients on both ranks, and nobody has asked rank 1 for its own.
        (
            "        dist.broadcast(parameter.grad, src=0)\n",
            [equal.format(1.03, 0.76), equal.format(1.07, 0.78)],
        ),
        # Ranks that make different calls.
        (
            "        dist.all_reduce(mean.flatten()[: 1 + dist.get_rank()])\n",
            [
                "this rank calls ALLREDUCE of shape [1], another rank ALLREDUCE of sh",
                "this rank calls ALLREDUCE of shape [2], another rank ALLREDUCE of sh",
            ],
        ),
    ]
    hints += [
        (trains_by_ddp, [""] * 2),
        (trains_without_losses, ["it returned [], not a list of 16 losses"] * 2),
        (trains_to_nan, ["its weights are nan: is each gradient cleared"] * 2),
        (trains_too_far, ["it ended with: IndexError: list index out of range"] * 2),
    ]
    repairs = [repair for repair, _ in hints]
    by_rank = worker_pool.run(try_loops, str(tmp_path), repairs, world_size=2)
    expect(by_rank, hints)
    assert sum("each gradient was" in text for told in by_rank for text in told) == 2


# 03: accumulation over an epoch, a training loop, and one of one process.


def try_accumulation(folder: str, answers: Answers) -> list[str]:
    return ask(f"{folder}/", ACCUMULATION.try_epochs, answers)


def no_sync(ddp_model: DistributedDataParallel, wanted: bool) -> Any:
    return ddp_model.no_sync() if wanted else contextlib.nullcontext()


def accumulate(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: list[Any],
    grad_accum_steps: int,
    flaw: str,
) -> None:
    """Go through an epoch in the way that most people write first, with one flaw."""
    for number, (inputs, labels) in enumerate(batches, start=1):
        at_end = number == len(batches) and flaw not in {"rest not sent", "no rest"}
        is_last = number % grad_accum_steps == 0 or at_end
        if flaw == "its numbers written in":
            is_last = number in (4, 8, 10)
        begun = (number - 1) // grad_accum_steps * grad_accum_steps
        divisor = min(grad_accum_steps, len(batches) - begun)
        if flaw == "always divided by 4":
            divisor = grad_accum_steps
        if flaw == "not divided":
            divisor = 1
        if flaw == "the rest is a half" and divisor < grad_accum_steps:
            divisor = grad_accum_steps / 2
        quiet = not is_last and flaw != "never quiet"
        too_late, left_early = flaw == "quiet too late", flaw == "quiet in forward only"
        with no_sync(ddp_model, quiet and not too_late):
            loss = F.mse_loss(ddp_model(inputs), labels)
        with no_sync(ddp_model, quiet and not left_early):
            (loss / divisor).backward()
        if is_last or (flaw == "rest not sent" and number == len(batches)):
            optimizer.step()
        if flaw == "last not cleared" and number % grad_accum_steps:
            continue
        if flaw != "never cleared" and (is_last or flaw == "always cleared"):
            optimizer.zero_grad()


def accumulate_in_groups(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: list[Any],
    grad_accum_steps: int,
    flaw: str,
) -> None:
    """Take a step for each group of batches; all-reduce by hand; with one flaw."""
    steps = -(-len(batches) // grad_accum_steps)
    if flaw == "always one step more":
        steps = len(batches) // grad_accum_steps + 1
    for step in range(steps):
        group = batches[step * grad_accum_steps : (step + 1) * grad_accum_steps]
        optimizer.zero_grad()
        if flaw == "one large batch":
            group = [tuple(map(torch.cat, zip(*group, strict=True)))]
        if flaw == "one backward":
            losses = [F.mse_loss(ddp_model(inputs), labels) for inputs, labels in group]
            torch.stack(losses).mean().backward()
            optimizer.step()
            continue
        last, _ = group[-1]
        for inputs, labels in group:
            with ddp_model.no_sync():
                (F.mse_loss(ddp_model(inputs), labels) / len(group)).backward()
            for gradient in [
                p.grad for p in ddp_model.parameters() if p.grad is not None
            ]:
                if inputs is last:
                    dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
                elif flaw == "by hand after each batch":
                    dist.all_reduce(gradient.clone())
        optimizer.step()


def test_accumulation(worker_pool: WorkerPool, tmp_path: Path) -> None:
    of, second = "the gradient of step", "in an epoch of 6 batches, 3 in a step: "
    hints: Hints = [
        (train_epoch, [""] * 2),
        (EPOCH, ["10 steps, where 3 are due"] * 2),
    ]
    hints += [
        (functools.partial(accumulate, flaw=flaw), [hint] * 2)
        for flaw, hint in {
            "always divided by 4": f"{of} 3 is divided by 4, but this step has 2",
            "not divided": f"{of} 1 is 4 times too large: add up losses that are",
            "never quiet": "right, but with 10 all-reduces, where 3 do: only the last",
            "quiet too late": "right, but with 10 all-reduces, where 3 do: DDP must be",
            "rest not sent": f"{of} 3 is local: it has not been all-reduced",
            "no rest": "2 steps, and the last 2 batches are left over",
            "never cleared": f"{of} 2 still holds that of the step before it",
            "always cleared": f"{of} 1 is that of its last batch alone, divided",
            "last not cleared": f"{second}{of} 1 still holds that of the step before",
            "its numbers written in": f"{second}{of} 1 is ",
            "the rest is a half": "in an epoch of 7 batches, 3 in a step: the gradient",
        }.items()
    ]
    # The comparison above would accept a flaw that this function did not make. And DDP
    # asks for no_sync in the forward pass only.
    for no_flaw in ("", "quiet in forward only"):
        hints.append((functools.partial(accumulate, flaw=no_flaw), [""] * 2))
    hints += [
        (functools.partial(accumulate_in_groups, flaw=flaw), [hint] * 2)
        for flaw, hint in {
            "": "",
            "always one step more": f"{second}it ended with: IndexError: list index ",
            "one backward": "right, but with the graphs of 4 batches at once: call b",
            "one large batch": "right, but with 3 forward passes for 10 batches: one",
            "by hand after each batch": "right, but with 10 all-reduces, where 3 do: o",
        }.items()
    ]
    answers = [answer for answer, _ in hints]
    by_rank = worker_pool.run(try_accumulation, str(tmp_path), answers, world_size=2)
    expect(by_rank, hints)


def try_trainings(folder: str, answers: Answers) -> list[str]:
    with mock.patch.object(TRAINING, "PATIENCE", timedelta(seconds=4)):
        return ask(f"{folder}/", TRAINING.try_training, answers)


def train_with_flaw(
    ddp_model: DistributedDataParallel,
    dataset: Dataset,
    epochs: int,
    path: Path,
    flaw: str,
) -> Any:
    """Train as the answer does, but for one flaw."""
    rank = dist.get_rank()
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, 4, sampler=sampler)
    if flaw == "shuffles without a sampler":
        torch.manual_seed(rank)
        loader = DataLoader(dataset, 4, shuffle=True)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    forward = ddp_model.module if flaw == "passes DDP by" else ddp_model
    losses = []
    for epoch in range(epochs):
        if flaw != "forgets the epoch":
            sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, labels in loader:
            loss = F.mse_loss(forward(inputs), labels)
            if flaw not in {"clears too late", "never clears"}:
                optimizer.zero_grad()
            loss.backward()
            if flaw == "clears too late":
                optimizer.zero_grad()
            optimizer.step()
            total += loss.detach()
        if flaw == "index":
            losses[len(loader)] = total
        if flaw == "sum":
            dist.all_reduce(total)
        elif flaw == "averages objects":  # each of which is pickled, on each rank
            totals: list[Any] = [None] * 2
            dist.all_gather_object(totals, total)
            total = torch.stack(totals).mean()
        elif flaw != "local loss" and (flaw != "rank 0 alone" or rank == 0):
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append((total / len(loader)).item())
    model = ddp_model if flaw == "wrapped names" else ddp_model.module
    saved: Any = model if flaw == "saves the model" else model.state_dict()
    if flaw == "saves a checkpoint":
        saved = {"model": saved, "epoch": epochs}
    saves = rank == 1 if flaw == "rank 1 saves" else rank == 0
    if (saves or flaw == "all save") and flaw != "nobody saves":
        torch.save(saved, path)
    return None if flaw == "returns nothing" else losses


def test_training(worker_pool: WorkerPool, tmp_path: Path) -> None:
    loss, mean = "the loss of epoch 0 is", "over all ranks 0.448: it is"
    waits = "waited in a collective for rank 1, who did not come"
    alone = "one process has another 0.weight"
    hints: Hints = [
        (train_and_save, [""] * 2),
        (BROKEN, ["epoch 1 has the order of an epoch before"] * 2),
    ]
    hints += [
        (functools.partial(train_with_flaw, flaw=flaw), expected)
        for flaw, expected in {
            "": [""] * 2,
            "averages objects": [""] * 2,
            "forgets the epoch": ["epoch 1 has the order of an epoch before"] * 2,
            "shuffles without a sampler": ["in epoch 0 the ranks saw 48 samples"] * 2,
            "local loss": [
                f"{loss} 0.417, {mean} this rank's local loss",
                f"{loss} 0.479, {mean} this rank's local loss",
            ],
            "sum": [f"{loss} 0.896, {mean} the sum over the ranks"] * 2,
            "returns nothing": ["it returned None, not a list of 3 losses"] * 2,
            "all save": ["2 ranks save: one is enough, and two at once may"] * 2,
            "rank 1 saves": [""] * 2,
            "saves a checkpoint": ["the file holds model, epoch: save the state_d"] * 2,
            "index": ["it ended with: IndexError: list assignment index out of"] * 2,
            "never clears": [f"{alone}: 3"] * 2,
            "clears too late": [f"{alone}: 100 % of its way off"] * 2,
            "wrapped names": ["the names in the file begin with `module.`"] * 2,
            "saves the model": ["the file holds something else than weights"] * 2,
            "nobody saves": ["nobody has saved the weights"] * 2,
            "passes DDP by": ["", "its weights are not those of rank 0"],
            # Who waits for DDP's exchange loses it when the other has given up.
            "rank 0 alone": [waits, "it ended with: "],
        }.items()
    ]
    answers = [answer for answer, _ in hints]
    by_rank = worker_pool.run(try_trainings, str(tmp_path), answers, world_size=2)
    expect(by_rank, hints)


# 03: a loop that stops on a signal and resumes.


def try_stops(folder: str, answers: Answers) -> list[str]:
    with mock.patch.object(STOPPING, "PATIENCE", timedelta(seconds=2)):
        return ask(f"{folder}/", STOPPING.try_stopping, answers)


def stop_with_flaw(
    ddp_model: DistributedDataParallel,
    batches: Any,
    path: Path,
    is_told: Callable[[], bool],
    flaw: str,
) -> None:
    """Train, stop and resume as the answer does, but for one flaw."""
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1, momentum=0.9)
    step, told = 0, torch.zeros(1)
    if path.exists():
        content = torch.load(path, weights_only=True)
        ddp_model.module.load_state_dict(content["model"])
        if flaw != "forgets the optimizer":
            optimizer.load_state_dict(content["optimizer"])
        if flaw != "forgets the step":
            step = content["step"]
    begun, last = step, len(batches) - (flaw == "ends early")
    while step < last:
        inputs, labels = batches[step]
        F.mse_loss(ddp_model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if flaw == "asks a step late":  # the answer of train.py, and right as well
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
            is_stop = told.item() > 0
            told = torch.tensor([float(is_told())])
        elif flaw == "asks by objects":  # each of which is pickled, on each rank
            everyone: list[Any] = [None] * 2
            dist.all_gather_object(everyone, torch.tensor([float(is_told())]))
            is_stop = bool(sum(everyone) > 0)
        elif flaw in ("listens to rank 0", "listens to rank 1"):
            told = torch.tensor([float(is_told())])
            dist.broadcast(told, src=int(flaw[-1]))
            is_stop = told.item() > 0
        else:
            told = torch.tensor([float(is_told())])
            op = dist.ReduceOp.MIN if flaw == "waits for all" else dist.ReduceOp.MAX
            dist.all_reduce(told, op=op)
            is_stop = told.item() > 0
        if flaw == "never stops":
            continue
        if is_stop:
            if flaw == "counts from the resume":
                step -= begun
            if flaw == "saves the first time only" and path.exists():
                return
            states = ddp_model.module.state_dict(), optimizer.state_dict()
            content = {"model": states[0], "optimizer": states[1], "step": step}
            saves = rank == 1 if flaw == "rank 1 saves" else rank == 0
            if (saves or flaw == "all save") and flaw != "nobody saves":
                torch.save(content, path)
            if flaw == "all save to one open file":
                with path.open("wb") as file:
                    torch.save(content, file)
            return


def saves_in_shards(
    ddp_model: DistributedDataParallel,
    batches: Any,
    path: Path,
    is_told: Callable[[], bool],
) -> None:
    """Do what the answer does, with a folder in which each rank writes a file."""
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1, momentum=0.9)
    step, told = 0, torch.zeros(1)
    if path.exists():
        states = get_state_dict(ddp_model, optimizer)
        content: Any = {"model": states[0], "optimizer": states[1], "step": 0}
        dcp.load(content, checkpoint_id=path)
        set_state_dict(
            ddp_model,
            optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )
        step = content["step"]
    while step < len(batches):
        inputs, labels = batches[step]
        F.mse_loss(ddp_model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        told.fill_(is_told())
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        if told:
            states = get_state_dict(ddp_model, optimizer)
            content = {"model": states[0], "optimizer": states[1], "step": step}
            dcp.save(content, checkpoint_id=path)
            return


def test_stop_and_resume(worker_pool: WorkerPool, tmp_path: Path) -> None:
    other = "its weights are not those of an uninterrupted run"
    again = "resumed after step 6: this rank took {} steps, where 6 are due"
    later = "resumed after step 3, counted from there"
    told_0, told_1 = (f"it left after step {{}}; rank {r} was told to" for r in (0, 1))
    left = "this rank left after step 3, and another waited for it"
    waited = "rank 0 left after step 3, and this rank waited for it in step 4"
    hints: Hints = [
        (train_until_told, [""] * 2),
        (STOPS_ALONE.train_until_told, [left, waited]),
        (saves_in_shards, [""] * 2),
    ]
    hints += [
        (functools.partial(stop_with_flaw, flaw=flaw), expected)
        for flaw, expected in {
            "": [""] * 2,
            "asks a step late": [""] * 2,
            "asks by objects": [""] * 2,
            "waits for all": [told_0.format(12)] * 2,
            "listens to rank 1": [told_0.format(12)] * 2,
            "listens to rank 0": [f"{later}: {told_1.format(9)}"] * 2,
            "forgets the optimizer": [other] * 2,
            "forgets the step": [again.format(12)] * 2,
            "counts from the resume": [again.format(9)] * 2,
            "saves the first time only": [f"{later}: nobody has saved anything"] * 2,
            "ends early": ["without a signal: this rank took 11 steps"] * 2,
            "never stops": [told_0.format(12)] * 2,
            "rank 1 saves": [""] * 2,
            "all save": ["2 ranks save: one is enough, and two at once may"] * 2,
            "all save to one open file": ["2 ranks save: one is enough, and two"] * 2,
            "nobody saves": ["nobody has saved anything"] * 2,
        }.items()
    ]
    answers = [answer for answer, _ in hints]
    by_rank = worker_pool.run(try_stops, str(tmp_path), answers, world_size=2)
    expect(by_rank, hints)


def try_scripts(folder: str, answers: Answers) -> list[str]:
    with mock.patch.object(SCRIPT, "PATIENCE", timedelta(seconds=4)):
        models = [(UNTOUCHED.Throw, answer) for answer in answers]
        return ask(f"{folder}/", SCRIPT.try_script, models)


def fit_with_flaw(
    model: torch.nn.Module, dataset: Dataset, epochs: int, flaw: str
) -> Any:
    """Train as the answer does, but for one flaw."""
    rank = dist.get_rank()
    by_hand = flaw in {"no DDP", "sum", "rank 0's gradient", "averages each epoch"}
    wrapped = model if by_hand else DistributedDataParallel(model)
    sampler = DistributedSampler(dataset)
    batch_size = 32 if flaw == "batch size of one process" else 16
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    lr = 0.2 if flaw == "doubled learning rate" else 0.1
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=lr)
    forward = model if flaw == "bypasses DDP" else wrapped
    losses = []
    for epoch in range(epochs):
        if flaw != "forgets the epoch":
            sampler.set_epoch(epoch)
        total = torch.zeros(())
        optimizer.zero_grad()
        for throws, lengths in loader:
            if flaw != "clears each epoch":
                optimizer.zero_grad()
            loss = F.mse_loss(forward(throws), lengths)
            (loss / 2 if flaw == "divided twice" else loss).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            for gradient in gradients if by_hand else []:
                if flaw == "sum":
                    dist.all_reduce(gradient)
                if flaw == "rank 0's gradient":
                    dist.broadcast(gradient, src=0)
            optimizer.step()
            total += loss.detach()
            for buffer in [] if "buffer" in flaw else model.buffers():
                dist.all_reduce(buffer, op=dist.ReduceOp.AVG)
        if flaw == "averages each epoch":
            for tensor in model.state_dict().values():
                dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        for buffer in model.buffers() if flaw == "buffer each epoch" else []:
            dist.all_reduce(buffer, op=dist.ReduceOp.AVG)
        if flaw == "prints the local loss" and rank == 0:
            print(f"epoch {epoch} | loss {total.item() / len(loader):.3f}")
        if flaw == "sum of losses":
            dist.all_reduce(total)
        elif flaw != "local loss" and (flaw != "rank 0 alone" or rank == 0):
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append((total / len(loader)).item())
        prints = rank == 1 if flaw == "rank 1 prints" else rank == 0
        if flaw in {"nobody prints", "prints the local loss"}:
            prints = False
        if prints or flaw == "all print":
            print(f"epoch {epoch} | loss {losses[-1]:.3f}")
    return None if flaw == "returns nothing" else losses


@pytest.mark.slow
def test_your_own_script(worker_pool: WorkerPool, tmp_path: Path) -> None:
    weight, loss = "after step 1: layers.0.weight moved", "the loss of epoch 0 is"
    differ = f"{weight} {{0: 1.048, 1: 0.952}} times as far: the ranks' weights differ"
    agree = f"{weight} {{{{0: {{}}, 1: {{}}}}}} times as far: "
    longer = "a step is right, but after epochs of 4 steps one process has another "
    waits = "waited in a collective for rank 1, who did not come"
    hints: Hints = [
        (your_own_script.fit, [""] * 2),
        (UNTOUCHED.fit, ["in epoch 0 the ranks saw 256 samples, 128 of them ag"] * 2),
    ]
    hints += [
        (functools.partial(fit_with_flaw, flaw=flaw), expected)
        for flaw, expected in {
            "": [""] * 2,
            "batch size of one process": ["4 steps of 64 samples, where one process"]
            * 2,
            "no DDP": [differ] * 2,
            "bypasses DDP": [differ] * 2,
            "sum": [agree.format(2.0, 2.0) + "is it a sum over the ranks, or"] * 2,
            "doubled learning rate": [agree.format(2.0, 2.0) + "is it a sum"] * 2,
            "divided twice": [agree.format(0.5, 0.5) + "the ranks agree, but not"] * 2,
            "rank 0's gradient": [agree.format(1.048, 1.048) + "the ranks agree"] * 2,
            "buffer": ["after step 1: mean moved {0: 1.035, 1: 0.967} times as far: "]
            * 2,
            "sum of losses": ["after step 1: loss moved {0: 2.0, 1: 2.0} times as f"]
            * 2,
            "forgets the epoch": ["epoch 1 has the order of an epoch before"] * 2,
            "local loss": [
                f"{loss} 2.923, over all ranks 2.276: it is this rank's local loss",
                f"{loss} 1.628, over all ranks 2.276: it is this rank's local loss",
            ],
            "returns nothing": ["it returned None, not a list of 2 losses"] * 2,
            "all print": ["the ranks print [2, 2] lines: one prints, a line for"] * 2,
            "nobody prints": ["the ranks print [0, 0] lines: one prints, a line f"] * 2,
            "rank 1 prints": [""] * 2,
            "prints the local loss": [
                "'epoch 0 | loss 2.923' does not tell the loss over all ranks, 2.276"
            ]
            * 2,
            "clears each epoch": [f"{longer}layers.0.weight: "] * 2,
            "averages each epoch": [f"{longer}layers.0.weight: "] * 2,
            "buffer each epoch": [longer] * 2,
            "rank 0 alone": [waits, "it ended with: "],
        }.items()
    ]
    answers = [answer for answer, _ in hints]
    by_rank = worker_pool.run(try_scripts, str(tmp_path), answers, world_size=2)
    expect(by_rank, hints)


# 04: steps that are lost, and a server that waits for all trainers.


def read_again_under_a_lock(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    # A lock of the trainer's own process.
    with LOST.TABLE_LOCK:
        rows = rpc.rpc_sync("server", LOST_STUB.read_rows, args=(numbers,))
        new = rows - LOST.LR * gradient
        rpc.rpc_sync("server", LOST_STUB.write_rows, args=(numbers, new))


def add_by_index(numbers: torch.Tensor, amount: torch.Tensor) -> None:
    with LOST.TABLE_LOCK:
        LOST.TABLE[numbers] += amount


def counts_twins_once(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    rpc.rpc_sync("server", add_by_index, args=(numbers, -LOST.LR * gradient))


def add_without_lock(numbers: torch.Tensor, amount: torch.Tensor) -> None:
    LOST.TABLE.index_add_(0, numbers, amount)


def locks_nothing(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    rpc.rpc_sync("server", add_without_lock, args=(numbers, -LOST.LR * gradient))


def adds_behind_the_lock(numbers: torch.Tensor, amount: torch.Tensor) -> None:
    with LOST.TABLE_LOCK:
        pass
    LOST.TABLE.index_add_(0, numbers, amount)


def locks_too_early(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    arguments = numbers, -LOST.LR * gradient
    rpc.rpc_sync("server", adds_behind_the_lock, args=arguments)


def looks_before_it_locks(numbers: torch.Tensor, amount: torch.Tensor) -> None:
    rows = LOST.TABLE[numbers]
    with LOST.TABLE_LOCK:
        LOST.TABLE.index_add_(0, numbers, rows * 0 + amount)


def locks_too_late(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    arguments = numbers, -LOST.LR * gradient
    rpc.rpc_sync("server", looks_before_it_locks, args=arguments)


def add_to_data(numbers: torch.Tensor, amount: torch.Tensor) -> None:
    LOST.TABLE.data.index_add_(0, numbers, amount)


def locks_no_data(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    rpc.rpc_sync("server", add_to_data, args=(numbers, -LOST.LR * gradient))


def waits_for_nothing(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    rpc.rpc_async("server", add_to_rows, args=(numbers, -LOST.LR * gradient))


def waits_for_its_call(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    amount = -LOST.LR * gradient
    rpc.rpc_async("server", add_to_rows, args=(numbers, amount)).wait()


def leaves_its_result_there(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    rpc.remote("server", add_to_rows, args=(numbers, -LOST.LR * gradient))


def fetches_its_result(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    amount = -LOST.LR * gradient
    rpc.remote("server", add_to_rows, args=(numbers, amount)).to_here()


def adds_the_gradient(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    rpc.rpc_sync("server", add_to_rows, args=(numbers, LOST.LR * gradient))


def forgets_the_amount(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    rpc.rpc_sync("server", add_to_rows, args=(numbers,))


def indexes_too_far(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    rpc.rpc_sync("server", add_to_rows, args=(numbers, -LOST.LR * [gradient][1]))


def stays_at_home(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    add_to_rows(numbers, -LOST.LR * gradient)


def goes_uphill(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    rpc.rpc_sync("server", add_to_rows, args=(numbers, 2 * -LOST.LR * gradient))


def try_by_rpc(folder: str, answers: Answers) -> list[str]:
    """Let the checkers of chapter 04 try answers, with calls between processes."""
    rank = dist.get_rank()
    BY_RPC.open_rpc(LOST.NAMES[rank], rank, len(LOST.NAMES), f"file://{folder}/rpc")
    told = []
    # The stub has imported a checker of its own.
    with mock.patch.multiple(LOST_STUB, TABLE=LOST.TABLE, TABLE_LOCK=LOST.TABLE_LOCK):
        for answer in answers:
            LOST.ROWS.zero_()
            LOST.GuardedTable.unlocked = 0
            dist.barrier()
            told.append(LOST.try_steps(answer))
            dist.barrier()
    # The answer to the other exercise, with calls between processes too. It has two
    # processes; the third only takes part in the barriers.
    with mock.patch.object(WAITING_STUB.Server, "push", push):
        if rank == 2:
            for _ in WAITING.CASES:
                dist.barrier()
                dist.barrier()
            told.append("")
        else:
            told.append(WAITING.try_by_rpc(WAITING_STUB.Server))
    dist.barrier()
    rpc.shutdown()
    return told


def test_steps_by_rpc(worker_pool: WorkerPool, tmp_path: Path) -> None:
    lost = "row 0, which both trainers change, has "
    unlocked = (
        "no step is missing this time, but who uses the table has not locked it",
        # Seldom, two threads that add to one row at a time lose some of its numbers.
        "the numbers in a row differ, though all get the same gradient: did both",
        lost,
    )
    hints: Hints = [
        (step_on_server, ["", "", ""]),
        (read_again_under_a_lock, ["", lost, lost]),
        (
            counts_twins_once,
            ["", "row 1 has 20 of 40 steps: its", "row 2 has 20 of 40 steps: its"],
        ),
        (waits_for_its_call, ["", "", ""]),
        (locks_nothing, ["", *[unlocked] * 2]),
        (locks_no_data, ["", *[unlocked] * 2]),
        (locks_too_early, ["", *[unlocked] * 2]),
        (locks_too_late, ["", *[unlocked] * 2]),
        (
            waits_for_nothing,
            ["", *["a step returns before its call has: who waits"] * 2],
        ),
        (
            leaves_its_result_there,
            ["", *["a step returns before its call has: who waits"] * 2],
        ),
        (fetches_its_result, ["", "", ""]),
        (adds_the_gradient, ["", *["row 0 moved the wrong way"] * 2]),
        (
            forgets_the_amount,
            ["", *['a call ended with: TypeError("add_to_rows() missing 1 req'] * 2],
        ),
        (
            indexes_too_far,
            ["", *["it ended with: IndexError: list index out of range"] * 2],
        ),
        (stays_at_home, ["", *["none of 40 steps has reached the server's table"] * 2]),
        (
            goes_uphill,
            ["", "rows 0 and 1 hold 80 and 80", "rows 0 and 2 hold 80 and 80"],
        ),
    ]
    answers = [answer for answer, _ in hints]
    by_rank = worker_pool.run(try_by_rpc, str(tmp_path), answers, world_size=3)
    # The last is the answer to the other exercise, with calls between processes too.
    expect(by_rank, [*hints, (push, ["", "", ""])])
    torn = torch.tensor([[40.0, 39], [40, 40], [40, 40]])
    assert LOST.explain_table(torn, 1).startswith(unlocked[1])


class Asked:
    """A call of `push` in a thread of its own, to be waited for as a call by RPC is."""

    def __init__(self, gradient: torch.Tensor) -> None:
        """Start the call."""
        self.result: Any = None
        threading.Thread(target=self.call, args=(gradient,), daemon=True).start()

    def call(self, gradient: torch.Tensor) -> None:
        """Keep what comes of it."""
        self.result = WAITING.push_here(gradient)

    def wait(self) -> Any:
        """Return the weights, or raise what RPC would raise."""
        deadline = time.monotonic() + WAITING.PATIENCE
        while time.monotonic() < deadline:
            if self.result is not None and self.result.done():
                return self.result.wait()
            time.sleep(0.01)
        raise RuntimeError("RPC ran for more than set timeout")


def push_with_flaw(self: Any, gradient: torch.Tensor, flaw: str) -> Any:
    """Do what the answer does, but for one flaw."""
    if flaw == "locks the sum only":
        with self.lock:
            self.sum += gradient
            self.count += 1
        answer = self.answer
        if self.count == self.trainers:
            self.count, self.answer = 0, torch.futures.Future()
            self.weights, self.sum = (
                self.weights - self.lr * self.sum / self.trainers,
                0,
            )
            answer.set_result(self.weights.clone())
        return answer
    trainers = 3 if flaw == "always three" else self.trainers
    guard = contextlib.nullcontext() if flaw == "no lock" else self.lock
    if flaw == "acquires":
        guard = contextlib.closing(self.lock)
        self.lock.close = self.lock.release
        self.lock.acquire()
    with guard:
        self.sum = gradient if flaw == "last only" else self.sum + gradient
        self.count += 1
        if flaw == "steps at once":
            self.weights = self.weights - self.lr * gradient / trainers
        answer = self.answer
        if self.count == trainers:
            count = 1 if flaw == "sum" else trainers
            if flaw != "steps at once":
                self.weights -= self.lr * self.sum / count
            self.count = 0
            if flaw != "sum kept":
                self.sum = torch.zeros_like(self.weights)
            if flaw != "old future":
                self.answer = torch.futures.Future()
            if flaw == "future swapped too early":
                answer = self.answer
            new = self.weights if flaw == "no copy" else self.weights.clone()
            answer.set_result(new)
        elif flaw == "waits in the lock":
            answer.wait()
        if flaw == "answers at once" and not answer.done():
            answer = torch.futures.Future()
            answer.set_result(self.weights.clone())
    if flaw == "waits":
        answer.wait()
    if flaw == "chained":
        return answer.then(lambda future: future.value())
    return None if flaw == "returns nothing" else answer


@pytest.mark.parametrize(
    ("flaw", "hint"),
    [
        ("", ""),
        (
            "answers at once",
            "3 trainers, step 1: trainer 0 was answered before trainer 1 had push",
        ),
        (
            "sum",
            "3 trainers, step 1: trainer 0 got weights that moved by the sum of",
        ),
        (
            "last only",
            "3 trainers, step 1: trainer 0 got weights that only the last gradient has",
        ),
        (
            "sum kept",
            "3 trainers, step 2: trainer 0 got weights that the gradients of earlier",
        ),
        (
            "old future",
            "3 trainers, step 2: trainer 0 was answered before trainer 1 had pushed",
        ),
        (
            "future swapped too early",
            "3 trainers, step 1: trainer 0 got no answer: its future",
        ),
        (
            "waits",
            "3 trainers, step 1: push has not returned to trainer 0 after 0.5 s",
        ),
        (
            "waits in the lock",
            "3 trainers, step 1: push has not returned to trainer 0 after 0.5 s",
        ),
        ("no lock", "right this time, but not every push has taken the lock"),
        ("locks the sum only", "3 trainers, step 3, all at once: trainer "),
        ("always three", "2 trainers, step 1: trainer 0 got no answer: its future"),
        ("no copy", "right this time, but a later step changes what was answered"),
        (
            "returns nothing",
            "3 trainers, step 1: trainer 0 got no answer: TypeError('pu",
        ),
        ("acquires", ""),
        ("chained", ""),
    ],
)
def test_waiting_server(flaw: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if hint:
        monkeypatch.setattr(WAITING, "PATIENCE", 0.5)
    if flaw == "locks the sum only":  # on a busy machine too, all come in the meantime
        monkeypatch.setattr(WAITING, "PAUSE", 0.2)
    answer = functools.partialmethod(push_with_flaw, flaw=flaw) if flaw else push
    monkeypatch.setattr(WAITING_STUB.Server, "push", answer)
    told = ""
    for trainers in WAITING.CASES:
        WAITING.serve(WAITING_STUB.Server, trainers)
        told = told or WAITING.try_server(Asked, lambda asked: asked(), trainers)
    assert WAITING.CASES == (3, 2)
    assert told.startswith(hint) and bool(told) == bool(hint), told


# 05: Adam sharded by hand, and an engine.


def try_adams(folder: str, answers: Answers) -> list[str]:
    return ask(f"{folder}/", ADAM.try_lengths, answers)


class FlawedAdam:
    """Adam sharded over the ranks, but for one flaw."""

    def __init__(self, weights: torch.Tensor, lr: float, flaw: str) -> None:
        """Take a share."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.weights, self.lr, self.flaw = weights, lr, flaw
        self.share = -(-len(weights) // world_size)
        self.own = slice(rank * self.share, (rank + 1) * self.share)
        self.padded = F.pad(weights, (0, self.share * world_size - len(weights)))
        if flaw == "no padding":
            self.padded = weights
        self.make_adam()

    def make_adam(self) -> None:
        """Make the optimizer of the shard."""
        values = self.weights if self.flaw == "keeps all" else self.padded[self.own]
        self.parameter = torch.nn.Parameter(values.clone())
        lr = 0.1 if self.flaw == "rate written in" else self.lr
        self.adam = torch.optim.Adam([self.parameter], lr)

    def step(self, gradient: torch.Tensor) -> None:
        """Take a step."""
        if self.flaw == "new Adam":
            self.make_adam()
        if self.flaw in ("sums", "sums a copy"):
            gradient = gradient if self.flaw == "sums" else gradient.clone()
            dist.all_reduce(gradient)
        given = gradient
        missing = 0 if self.flaw == "no padding" else len(self.padded) - len(gradient)
        gradient = F.pad(gradient, (0, missing))
        everything = self.flaw == "keeps all"
        self.parameter.grad = gradient if everything else gradient[self.own]
        self.adam.step()
        own = self.parameter.detach()
        if everything:
            self.weights.copy_(own)
            return
        if self.flaw == "does not send":
            self.weights[self.own] = own[: len(self.weights[self.own])]
            return
        shares = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, own)
        if self.flaw == "wrong order":
            shares.reverse()
        new = torch.cat(shares)[: len(self.weights)]
        if self.flaw == "another tensor":
            self.weights = new
        else:
            self.weights.copy_(new)
        self.padded = torch.cat(shares)
        if self.flaw == "clears":
            given.zero_()


class AdamOfUnequalShards:
    """Another right answer: no padding, and a broadcast for each shard."""

    def __init__(self, weights: torch.Tensor, lr: float) -> None:
        """Take a shard, which is a view."""
        self.parts = weights.tensor_split(dist.get_world_size())
        self.adam = torch.optim.Adam([torch.nn.Parameter(self.own(self.parts))], lr)

    def own(self, parts: Any) -> torch.Tensor:
        """Return this rank's part."""
        return parts[dist.get_rank()]

    def step(self, gradient: torch.Tensor) -> None:
        """Step for the shard, and send it."""
        [parameter] = self.adam.param_groups[0]["params"]
        parameter.grad = self.own(gradient.tensor_split(dist.get_world_size()))
        self.adam.step()
        for rank, part in enumerate(self.parts):
            dist.broadcast(part, rank)


class AdamOfDTensor:
    """A third: a DTensor, whose state is one too."""

    def __init__(self, weights: torch.Tensor, lr: float) -> None:
        """Take a shard."""
        self.weights = weights
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.parameter = torch.nn.Parameter(self.shard(weights))
        self.adam = torch.optim.Adam([self.parameter], lr)

    def shard(self, whole: torch.Tensor) -> DTensor:
        """Return this rank's shard."""
        return distribute_tensor(whole, self.mesh, [Shard(0)])

    def step(self, gradient: torch.Tensor) -> None:
        """Step for the shard, and gather all."""
        self.parameter.grad = self.shard(gradient)
        self.adam.step()
        whole: Any = self.parameter.detach()
        self.weights.copy_(whole.full_tensor())


def divides_by_a_word(weights: torch.Tensor, lr: float) -> Any:
    return weights / "three"  # type: ignore[operator]


def test_sharded_adam(worker_pool: WorkerPool, tmp_path: Path) -> None:
    hints: Hints = [(ShardedAdam, [""] * 3), (AdamOfUnequalShards, [""] * 3)]
    hints += [
        (AdamOfDTensor, [""] * 3),
        (
            divides_by_a_word,
            ["36 weights: it ended with: TypeError: unsupported op"] * 3,
        ),
    ]
    part = "36 weights: step 1 changes 12 of 36 weights, from number"
    sizes = "35 weights: this rank calls ALLGATHER of shape "
    hints += [
        (functools.partial(FlawedAdam, flaw=flaw), expected)
        for flaw, expected in {
            "": [""] * 3,
            "keeps all": [
                "36 weights: right, but this rank keeps state for 36 weights; a shard"
            ]
            * 3,
            "does not send": [
                f"{part} 0 to 11: who sends the others?",
                f"{part} 12 to 23: who sends the others?",
                f"{part} 24 to 35: who sends the others?",
            ],
            "new Adam": [
                "36 weights: step 1 is right; after step 2 36 of 36 weights are wrong: "
                "is Adam's state kept?"
            ]
            * 3,
            "wrong order": ["36 weights: step 1 puts the right weights in the wrong"]
            * 3,
            "another tensor": ["36 weights: step 1 does not change the tensor that"]
            * 3,
            "sums": ["36 weights: step 1 changes the gradient that it was given"] * 3,
            "clears": ["36 weights: step 1 changes the gradient that it was given"] * 3,
            "sums a copy": ["36 weights: the weights are right, but exp_avg is not"]
            * 3,
            "rate written in": ["4 weights: after step 1 4 of 4 weights are wrong"] * 3,
            "no padding": [f"{sizes}[12]", f"{sizes}[12]", f"{sizes}[11]"],
        }.items()
    ]
    # Of four weights `chunk` makes two shards for three ranks.
    assert 4 in ADAM.CASES and len(torch.zeros(4).chunk(ADAM.WORLD_SIZE)) == 2
    answers = [answer for answer, _ in hints]
    by_rank = worker_pool.run(try_adams, str(tmp_path), answers, world_size=3)
    expect(by_rank, hints)


def try_engines(folder: str, answers: Answers) -> list[str]:
    """Let the checker try pairs of a config and a loop on this rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    told = []
    for number, answer in enumerate(answers):
        # DeepSpeed keeps the group that it has first seen.
        deepspeed.comm.comm.cdb = None
        importlib.reload(groups)
        told += ask(f"{folder}/{number}-", ENGINE.try_engine, [answer])
    return told


def train_engine(model: Any, batches: list[Any], config: Any, flaw: str) -> Any:
    """Train by the config, and with one flaw in the loop."""
    import deepspeed

    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for number, (inputs, labels) in enumerate(batches, start=1):
        loss = F.mse_loss(engine(inputs), labels)
        engine.backward(loss / 2 if flaw == "divided" else loss)
        if flaw != "steps at the end" or number % 2 == 0:
            engine.step()
    return None if flaw == "returns nothing" else engine


def test_engine(worker_pool: WorkerPool, tmp_path: Path) -> None:
    one_each = broken_engine.CONFIG | {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
    }
    small = broken_engine.CONFIG | {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    }
    clipped = broken_engine.CONFIG | {"gradient_clipping": 0.1}
    by_default = dict(broken_engine.CONFIG)
    del by_default["gradient_clipping"]
    faster = broken_engine.CONFIG | {
        "optimizer": {"type": "SGD", "params": {"lr": 0.2}}
    }
    misspelt = broken_engine.CONFIG | {"gradient_acumulation_steps": 2}
    loop = functools.partial
    hints: Hints = [
        ((broken_engine.CONFIG, broken_engine.train_with_engine), [""] * 2),
        ((broken_engine.CONFIG, loop(train_engine, flaw="")), [""] * 2),
        (
            (
                broken_engine.CONFIG | {"train_batch_size": 8},
                broken_engine.train_with_engine,
            ),
            ["DeepSpeed refuses: Check batch related parameters. train_batch_size is "]
            * 2,
        ),
        (
            (broken_engine.CONFIG, loop(train_engine, flaw="steps at the end")),
            ["2 steps of 16 samples, where 4 are due: it has been told of 4 batches"]
            * 2,
        ),
        (
            (broken_engine.CONFIG, loop(train_engine, flaw="divided")),
            ["all gradients were 2 times too small: divided twice?"] * 2,
        ),
        (
            (broken_engine.CONFIG, loop(train_engine, flaw="returns nothing")),
            ["train_with_engine returned NoneType, not the engine"] * 2,
        ),
        (
            (faster, loop(train_engine, flaw="divided")),
            ["the learning rate is 0.2, and is to stay 0.1"] * 2,
        ),
        (
            (one_each, broken_engine.train_with_engine),
            ["a step takes 8 samples, and is to take"] * 2,
        ),
        (
            (small, broken_engine.train_with_engine),
            ["the config says 2 samples at a time, but"] * 2,
        ),
        (
            (clipped, broken_engine.train_with_engine),
            ["it clips gradients at a norm of 0.1"] * 2,
        ),
        (
            (by_default, broken_engine.train_with_engine),
            ["it clips gradients at a norm of 1.0"] * 2,
        ),
        (
            (misspelt, broken_engine.train_with_engine),
            ["config: unknown key 'gradient_acumul"] * 2,
        ),
    ]
    answers = [answer for answer, _ in hints]
    by_rank = worker_pool.run(try_engines, str(tmp_path), answers, world_size=2)
    expect(by_rank, hints)


@pytest.mark.slow
def test_sharded_adam_answered_by_pasting_from_the_page(tmp_path: Path) -> None:
    folder = ROOT / "05_deepspeed_zero" / "exercises"
    start = "class ShardedAdam:\n"
    *_, answer = (folder / "README.md").read_text().split(start)
    above, _, exercise = (folder / "sharded_adam.py").read_text().partition(start)
    _, main, below = exercise.partition("\n\nif __name__")
    script = tmp_path / "sharded_adam.py"
    script.write_text(above + start + answer.partition("```")[0] + main + below)
    result = python(script, env=clean_environment(PYTHONPATH=str(folder)))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(
        "check: 4 steps on 3 ranks are those of one process"
    )
