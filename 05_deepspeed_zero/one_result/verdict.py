"""What has to be the same in every way of training, and the table that shows it."""

import math
from typing import Any

import torch

from paper import KINDS, bytes_for_each, bytes_held, paper_bytes, values_added
from traffic import times_sent_by_gloo
from ways import EPS, USUAL_EPS, Run

ALONE, BY_HAND, TWIN = "one process", "averaged by hand", "mp.spawn, DDP"
LAUNCHED, RESUMED = "torchrun, DDP", "torchrun, killed, resumed"
FOUR_RANKS = "torchrun, DDP, 4 ranks"
HAND_STAGES = {f"by hand, ZeRO {stage}": stage for stage in (1, 2, 3)}
STAGES = {f"deepspeed, ZeRO {stage}": stage for stage in range(4)}
# Each way, and how many ranks it has, by who starts them; the order of the table.
STARTED_BY: dict[str, dict[str, int]] = {
    "nobody": {ALONE: 1},
    "spawn": dict.fromkeys([BY_HAND, TWIN, "mp.spawn, DDP, no_sync", *HAND_STAGES], 2),
    "torchrun": {LAUNCHED: 2, RESUMED: 2, FOUR_RANKS: 4},
    "deepspeed": dict.fromkeys(STAGES, 2),
}
WAYS = {name: n for ways in STARTED_BY.values() for name, n in ways.items()}
# On two ranks a sum has two parts, and a + b is b + a. Only with more parts, in other
# micro-batches or on more ranks, may another order of adding end in other bits.
SAME_BITS = [name for name, ranks in WAYS.items() if ranks == 2 and "sync" not in name]
# The mistake, and what it is compared with, by Adam's eps.
SUMMED = {eps: f"summed, eps {eps:.0e}" for eps in (EPS, USUAL_EPS)}
AVERAGED = f"averaged, eps {USUAL_EPS:.0e}"
MISTAKES = [AVERAGED, *SUMMED.values()]

LIMIT = 1e-5  # of a loss, which is 5.5 at first, and of a weight, which is up to 1
BYTES_LIMIT = 0.05  # gloo adds some bytes to each message, Python sees some more


def distances(run: Run, reference: Run) -> tuple[float, float]:
    """Return the largest difference of a loss and of a weight; NaN if there is one."""
    losses = torch.tensor(run.losses) - torch.tensor(reference.losses)
    weights = run.weights - reference.weights
    return losses.abs().max().item(), weights.abs().max().item()


def faults_of(name: str, run: Run, reference: Run) -> list[str]:
    """Say how one rank's result is not that of one process; each rank asks this."""
    if len(run.losses) != len(reference.losses):
        return [f"{name}: {len(run.losses)} losses"]
    loss, weight = distances(run, reference)
    # Written so that NaN is a fault too.
    if loss <= LIMIT and weight <= LIMIT:
        return []
    return [f"{name}: a loss is {loss:.0e} apart and a weight {weight:.0e}"]


def is_same_run(run: Run, other: Run) -> bool:
    """Tell whether all losses and the last bit of all weights are equal."""
    bits = [one.weights.view(torch.int32) for one in (run, other)]
    return torch.equal(*bits) and run.losses == other.losses


def bytes_by_gloo(run: Run, ranks: int) -> float:
    """Return what gloo should send for the collectives that a rank has called."""
    messages = {call: sum(counts) for call, counts in run.calls.items()}
    once = sum(times_sent_by_gloo(call, ranks) * n for call, n in messages.items())
    return once * (ranks - 1) / ranks


def bytes_sent(run: Run, ranks: int) -> float:
    """Return what TCP has counted, or where nobody counts, what must have been sent."""
    return bytes_by_gloo(run, ranks) if math.isnan(run.sent) else run.sent


def all_held(run: Run) -> int:
    """Return all bytes that a rank holds, but for samples and activations."""
    return sum(count for kind, count in run.held.items() if kind != "other")


def byte_faults(name: str, runs: list[Run], sizes: list[int]) -> list[str]:
    """Hold the counted bytes of all ranks against the collectives and the paper.

    Args:
        name: the way.
        runs: of its ranks.
        sizes: the number of values in each tensor of the model.
    """
    faults, ranks, is_hand = [], WAYS[name], name in HAND_STAGES
    stage = (HAND_STAGES | STAGES).get(name, 0)
    for rank, run in enumerate(runs):
        expected = bytes_by_gloo(run, ranks)
        # Where the bytes are not known, they are nan.
        if abs(run.sent - expected) > BYTES_LIMIT * expected:
            faults.append(f"{name}: rank {rank} sent {run.sent}, not {expected:.0f}")
        paper = paper_bytes(sum(sizes), stage, ranks, "fp32")
        each = bytes_for_each("fp32", stage)
        deepspeed = bytes_held(sum(sizes), stage, ranks, "fp32")
        more = values_added(sizes, stage, rank, ranks, threshold=0)
        for kind, number in zip(KINDS, each, strict=True):
            must = paper[kind] if is_hand else deepspeed[kind] + number * more[kind]
            if abs(run.held[kind] - must) > BYTES_LIMIT * must:
                found = f"{run.held[kind]} bytes of {kind}, not {must:.0f}"
                faults.append(f"{name}: rank {rank} holds {found}")
    return faults


def all_faults(
    runs: dict[str, list[Run]],
    sizes: list[int],
    is_cpu: bool,
    ways: dict[str, int] = WAYS,
) -> list[str]:
    """Say all that is wrong with the results of all ranks of all ways.

    Args:
        runs: by way, the runs of its ranks in order; some may be missing.
        sizes: the number of values in each tensor of the model.
        is_cpu: whether all was computed on the CPU, where bits can be relied on.
        ways: those that have been run, with their ranks.
    """
    reference, faults = runs[ALONE][0], []
    compared = SAME_BITS if is_cpu and TWIN in runs else []
    for name, ranks in ways.items():
        found = runs.get(name, [])
        if len(found) != ranks:
            faults.append(f"{name}: {len(found)} of {ranks} ranks have ended")
            continue
        for rank, run in enumerate(found):
            faults += faults_of(f"{name}, rank {rank}", run, reference)
            if not is_same_run(run, found[0]):
                faults.append(f"{name}: rank {rank} and rank 0 have different results")
        if name in compared and name not in twins(runs):
            faults.append(f"{name}: not the bits of {TWIN}")
        faults += byte_faults(name, found, sizes)
    return faults


def twins(runs: dict[str, list[Run]]) -> list[str]:
    """Name the ways that end with the same bits as TWIN, which is one of them."""
    first = runs[TWIN][0]
    return [name for name in WAYS if name in runs and is_same_run(runs[name][0], first)]


def shown(distance: float) -> str:
    """Write a distance in the width of a column."""
    return f"{distance:9.0e}" if distance else f"{0:9}"


HEAD = (
    "way                       ranks     loss    apart  weights  seconds"
    "  kB sent  kB held"
)


def row(name: str, runs: list[Run], reference: Run) -> str:
    """Return a way's line: how far the worst rank is off, and what a rank needs."""
    apart = [distances(run, reference) for run in runs]
    loss, weight = (max(one) for one in zip(*apart, strict=True))
    sent = sum(bytes_sent(run, len(runs)) for run in runs) / len(runs)
    held, seconds = max(map(all_held, runs)), max(run.seconds for run in runs)
    return (
        f"{name:<26}{len(runs):5}{runs[0].losses[-1]:9.5f}{shown(loss)}{shown(weight)}"
        f"{seconds:9.2f}{sent / 1e3:9.1f}{held / 1e3:9.1f}"
    )


def mistake_lines(mistakes: dict[str, Run], references: dict[float, Run]) -> list[str]:
    """Return what a sum in place of a mean does, with either eps.

    Raises:
        RuntimeError: it is not found, or the usual eps does not hide it.
    """
    lines, apart = ["gradients summed over the ranks, not averaged:"], {}
    for eps, name in SUMMED.items():
        apart[eps] = distances(mistakes[name], references[eps])
    usual = distances(mistakes[AVERAGED], references[USUAL_EPS])
    found = bool(faults_of(SUMMED[EPS], mistakes[SUMMED[EPS]], references[EPS]))
    for eps, (loss, weight) in apart.items():
        lines.append(
            f"  Adam with eps {eps:.0e}: a loss {loss:.0e} apart, a weight {weight:.0e}"
        )
    lines[-1] += f" (averaged: {usual[0]:.0e}, {usual[1]:.0e})"
    if not found or not apart[USUAL_EPS][0] < apart[EPS][0] / 100:
        raise RuntimeError(" ".join(lines))
    return lines


def closing_lines(runs: dict[str, list[Run]]) -> str:
    """Say what was compared and how close it was, once no fault was found."""
    reference = runs[ALONE][0]
    every = [distances(run, reference) for found in runs.values() for run in found]
    loss, weight = (max(one) for one in zip(*every, strict=True))
    pairs = [name for name in runs if WAYS[name] == 2]
    equal = set(pairs) & set(twins(runs)) if TWIN in runs else set()
    return (
        f"{len(equal)} of {len(pairs)} ways on two ranks end with the same bits\n"
        f"check: {len(runs)} ways, {len(every)} ranks: losses {loss:.0e} from one "
        f"process's, weights {weight:.0e} (limit {LIMIT:.0e})"
    )


def record_of(
    runs: dict[str, list[Run]], mistake: Run, parameters: int
) -> dict[str, Any]:
    """Return what the picture is drawn from."""
    reference = runs[ALONE][0]
    ways = {}
    for name, found in runs.items():
        sent = sum(bytes_sent(run, len(found)) for run in found) / len(found)
        kinds = found[0].held
        ways[name] = {
            "ranks": len(found),
            "losses": found[0].losses,
            "distances": list(distances(found[0], reference)),
            "seconds": max(run.seconds for run in found),
            "sent": sent,
            "held": {kind: max(run.held[kind] for run in found) for kind in kinds},
        }
    return {"parameters": parameters, "ways": ways, "mistake": mistake.losses}
