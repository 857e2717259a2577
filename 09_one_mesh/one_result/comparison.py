"""What has to be the same in every way of training, and the table that shows it."""

import math
from typing import Any

import torch

from table_of_ways import ALL, SAME_BITS, USUAL, WAYS, WRONG, usual
from training import EPS, USUAL_EPS, Run

TWIN = "naive"  # the way whose bits those in SAME_BITS end with
LIMIT = 1e-5  # of a loss, which is 5.5 at first, and of a weight, which is up to 1
# Gloo adds some bytes to each message, and a few small ones; tensors of some bytes are
# kept besides weights, gradients and moments.
BYTES_LIMIT, SMALL_BYTES = 0.05, 8_000


def distances(run: Run, reference: Run) -> tuple[float, float]:
    """Return the largest difference of a loss and of a weight; NaN if there is none."""
    is_alike = len(run.losses) == len(reference.losses)
    if not is_alike or run.weights.shape != reference.weights.shape:
        return math.nan, math.nan
    losses = torch.tensor(run.losses) - torch.tensor(reference.losses)
    weights = run.weights - reference.weights
    return losses.abs().max().item(), weights.abs().max().item()


def is_same_run(run: Run, other: Run) -> bool:
    """Tell whether all losses and the last bit of all weights are equal."""
    bits = [one.weights.view(torch.int32) for one in (run, other)]
    return torch.equal(*bits) and run.losses == other.losses


def faults_of(name: str, run: Run, reference: Run) -> list[str]:
    """Say how one rank's result is not that of one process."""
    if len(run.losses) != len(reference.losses):
        return [f"{name}: {len(run.losses)} losses"]
    if run.weights.shape != reference.weights.shape:
        return [f"{name}: {len(run.weights)} weights"]
    loss, weight = distances(run, reference)
    # Written so that NaN is a fault too.
    if loss <= LIMIT and weight <= LIMIT:
        return []
    return [f"{name}: a loss is {loss:.0e} apart and a weight {weight:.0e}"]


def byte_faults(name: str, runs: list[Run]) -> list[str]:
    """Hold the counted bytes of all ranks against the messages and the formula."""
    faults = []
    for rank, run in enumerate(runs):
        due = ALL[name].kept(rank)
        if not abs(run.kept - due) <= BYTES_LIMIT * due + SMALL_BYTES:
            faults.append(f"{name}: rank {rank} keeps {run.kept} bytes, not {due:.0f}")
        # Where the bytes are not known, they are nan.
        if abs(run.sent - run.due) > BYTES_LIMIT * run.due + SMALL_BYTES:
            sent = f"{run.sent:.0f} bytes, not {run.due:.0f}"
            faults.append(f"{name}: rank {rank} sent {sent}")
    return faults


def all_faults(runs: dict[str, list[Run]], ways: Any) -> list[str]:
    """Say all that is wrong with the results of all ranks of these ways.

    Args:
        runs: by way, the runs of its ranks in order; some may be missing.
        ways: the names of those that were asked for.
    """
    faults = []
    for name in (name for name in ways if name in WAYS):
        found, reference = runs.get(name, []), runs.get(ALL[name].alone)
        if len(found) != ALL[name].ranks or not reference:
            faults.append(f"{name}: {len(found)} of {ALL[name].ranks} ranks have ended")
            continue
        for rank, run in enumerate(found):
            faults += faults_of(f"{name}, rank {rank}", run, reference[0])
            if not is_same_run(run, found[0]):
                faults.append(f"{name}: rank {rank} and rank 0 have different results")
        if name in SAME_BITS and TWIN in runs and name not in twins(runs):
            faults.append(f"{name}: not the bits of {TWIN}")
        faults += byte_faults(name, found)
    return faults + wrong_faults(runs)


def twins(runs: dict[str, list[Run]]) -> list[str]:
    """Name the ways that end with the same bits as TWIN, which is one of them."""
    first = runs[TWIN][0]
    return [name for name in WAYS if name in runs and is_same_run(runs[name][0], first)]


def bytes_sent(runs: list[Run]) -> float:
    """Return what a rank sent, the mean; where TCP does not tell, what it should."""
    is_known = not any(math.isnan(run.sent) for run in runs)
    return sum(run.sent if is_known else run.due for run in runs) / len(runs)


def shown(distance: float) -> str:
    """Write a distance in the width of a column."""
    return f"{distance:9.0e}" if distance else f"{0:9}"


HEAD = f"{'way':20} ranks    loss    apart  weights  kB sent  kB kept  kB peak  seconds"


def apart(name: str, runs: dict[str, list[Run]]) -> tuple[float, float]:
    """Return how far the worst rank of a way is off, in a loss and in a weight."""
    reference = runs[ALL[name].alone][0]
    both = torch.tensor([distances(run, reference) for run in runs[name]])
    # A NaN stays in a tensor's maximum; Python's max() would drop it.
    loss, weight = both.max(dim=0).values.tolist()
    return loss, weight


def row(name: str, runs: dict[str, list[Run]]) -> str:
    """Return a way's line: how far the worst rank is off, and what a rank needs."""
    found, (loss, weight) = runs[name], apart(name, runs)
    kept, peak = (max(getattr(run, x) for run in found) for x in ("kept", "peak"))
    kilobytes = "".join(f"{x / 1e3:9.1f}" for x in (bytes_sent(found), kept, peak))
    return (
        f"{name:20}{len(found):6}{found[0].losses[-1]:8.4f}{shown(loss)}{shown(weight)}"
        f"{kilobytes}{max(run.seconds for run in found):9.2f}"
    )


WRONG_HEAD = f"{'mistakes, with eps':28}{EPS:9.0e}  weights{USUAL_EPS:9.0e}  weights"


def wrong_row(name: str, runs: dict[str, list[Run]]) -> str:
    """Return how far a way is off with either eps of Adam, each with its own twin."""
    each = [apart(one, runs) for one in (name, usual(name))]
    return f"{name:28}" + "".join(shown(x) for both in each for x in both)


def wrong_faults(runs: dict[str, list[Run]]) -> list[str]:
    """Say which mistake was not found, or not hidden where the page says that it is."""
    faults = []
    for name in (name for name in WRONG if name in runs):
        loss = apart(name, runs)[0]
        if not loss > 100 * LIMIT:
            faults.append(f"{name}: nobody would notice")
        is_scaled = "sum" in name  # by a factor, that Adam divides by again
        if (
            usual(name) in runs
            and is_scaled
            and apart(usual(name), runs)[0] > loss / 100
        ):
            faults.append(f"{usual(name)}: it shows")
    return faults


def closing_lines(runs: dict[str, list[Run]]) -> list[str]:
    """Say what was compared and how close it was, once no fault was found."""
    lines = []
    if wrong := [name for name in WRONG if name in runs]:
        lines += [WRONG_HEAD, *(wrong_row(name, runs) for name in [*wrong, TWIN])]
    right = {name: found for name, found in runs.items() if name in WAYS}
    losses, weights = zip(*(apart(name, runs) for name in right), strict=True)
    if TWIN in runs:
        lines.append(f"{len(twins(runs))} ways end with the same bits")
    lines.append(
        f"check: {len(right)} ways, {sum(map(len, right.values()))} ranks: losses "
        f"{max(losses):.0e} from one process's, weights {max(weights):.0e} "
        f"(limit {LIMIT:.0e})"
    )
    return lines


def record_of(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Return what the pictures are drawn from."""
    record: dict[str, Any] = {"ways": {}, "wrong": {}, "usual_eps": {}}
    for name in [TWIN, *WRONG]:
        if usual(name) in runs:
            record["usual_eps"][name] = apart(usual(name), runs)
    for name, found in runs.items():
        if name in USUAL:
            continue
        record["ways" if name in WAYS else "wrong"][name] = {
            "ranks": len(found),
            "distances": apart(name, runs),
            "losses": found[0].losses,
            "sent": bytes_sent(found),
            "kept": max(run.kept for run in found),
            "peak": max(run.peak for run in found),
        }
    return record
