"""Time all-reduces and training steps of 1, 2, ... ranks: what predict.py is held to.

Run: torchrun --nproc-per-node=4 03_ddp_torchrun/scaling/scaling.py --json=here.json
Expect: milliseconds of messages, and of steps without communication and all in all, by
    ranks; idle cores if these are to mean anything. A `check:` that buckets all-reduced
    during and after backward hold the mean of the ranks' gradients.
"""

import gc
from copy import deepcopy
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ranks import check, join, leave, number, read_options, say
from team import Team, add_to_file, distance_from, json_path

# Far below and far above what a link lets pass at once (64 kB in the laboratory).
MESSAGES = (100, 1_000_000, 4_000_000)
# By name: DDP's bucket_cap_mb, and when the buckets are all-reduced. Under strong
# scaling the ranks share one batch, elsewhere each has a batch of its own.
WAYS = {
    "one bucket": (25, "after backward"),
    "strong scaling": (25, "after backward"),
    "small buckets": (0.4, "after backward"),
    "overlap": (0.4, "during backward"),
}
LIMIT = 1e-5  # of the largest entry: sums of float32 in another order are 1e-7 apart


def list_cases(samples: int, device: torch.device) -> list[tuple[Team, dict[str, Any]]]:
    """Form the teams; say what to time in each, and where to note the seconds."""
    sizes = range(1, dist.get_world_size() + 1)
    caps = sorted({cap for cap, _ in WAYS.values()})
    teams = {(n, cap): Team(n, cap, device) for n in sizes for cap in caps}
    cases: list[tuple[Team, dict[str, Any]]] = []
    for n, nbytes in product(sizes[1:], MESSAGES):
        case = {"way": f"{nbytes:,} bytes", "ranks": n, "measured": []}
        cases.append((teams[n, caps[-1]], case | {"nbytes": nbytes}))
    for (way, (cap, _)), n in product(WAYS.items(), sizes):
        batch = 3 * samples // n if way == "strong scaling" else samples
        case = {"way": way, "ranks": n, "samples": batch, "measured": []}
        cases.append((teams[n, cap], case | {"compute": [], "ready": []}))
    return cases


def measure_case(team: Team, case: dict[str, Any]) -> None:
    """Time a case once; every rank must call this."""
    if "nbytes" in case:
        message = torch.ones(case["nbytes"] // 4, device=team.device)
        case["measured"].append(team.seconds(team.all_reduce, message))
        return
    case["compute"].append(team.seconds(team.step, case["samples"], "never"))
    case["ready"].append([ready for ready, _ in team.sync.buckets])
    case["nbytes_of_buckets"] = [bucket.nbytes for _, bucket in team.sync.buckets]
    _, when = WAYS[case["way"]]
    case["measured"].append(team.seconds(team.step, case["samples"], when))


def measure_all(
    rounds: int, samples: int, device: torch.device
) -> tuple[list[dict[str, Any]], list[float]]:
    """Time all cases in turn; return them, and the errors of the gradients."""
    cases = list_cases(samples, device)
    for turn in range(-2, rounds):  # two to warm up: DDP rebuilds its buckets
        for team, case in cases:
            measure_case(team, case if turn >= 0 else deepcopy(case))
    whole = [team for team, case in cases if case["ranks"] == dist.get_world_size()]
    pairs = product(dict.fromkeys(whole), ("during backward", "after backward"))
    errors = [distance_from(team, when, team) for team, when in pairs]
    return [case for _, case in cases], errors


def main() -> None:
    """Measure all cases, check the gradients, show medians."""
    options = read_options(
        rounds={"type": number(1, 999), "default": 9, "help": "of all cases"},
        samples={"type": number(2, 9999), "default": 8, "help": "of a rank"},
        link={"default": "one machine", "help": "its name in the file"},
        json={"type": json_path, "help": "file to add the times to"},
    )
    device = join(at_least=2)
    found, errors = measure_all(options.rounds, options.samples, device)
    gc.collect()  # the teams' groups end before the threads that serve them
    say("                  ranks  samples of each  compute  all in all, ms")
    for case in found:
        compute = 1e3 * median(case.get("compute", [0.0]))
        measured, samples = 1e3 * median(case["measured"]), case.get("samples", 0)
        start = f"{case['way']:16}{case['ranks']:7}{samples:17}"
        say(f"{start}{compute:9.1f}{measured:16.1f}")
    add_to_file(options.json, options.link, found)
    claim = f"{len(errors)} ways leave the mean of the ranks' gradients"
    error = torch.tensor(errors).max()  # max() would drop a NaN
    check(error < LIMIT, f"{claim}, {error:.0e} apart (limit {LIMIT:.0e})")
    leave()


if __name__ == "__main__":
    main()
