"""Measure who waits, and how long: each schedule's timeline, recorded from a run.

Run: torchrun --nproc-per-node=4 08_pipeline_parallel/bubble/bubble.py
Expect: each schedule's idle share, by the formula and measured, and its micro-batches
    in flight. The computing is a wait; the order, the sends and the receives are real.
"""

import json
from fractions import Fraction
from pathlib import Path

import torch.distributed as dist

from ranks import check, gather, join, leave, number, read_options, say
from timed_pipeline import record
from timelines import idle_share, most_in_flight, replay

# How many stages a rank holds: by this chapter's schedules, and by PyTorch's.
STAGES_ON_A_RANK = {
    "gpipe": 1,
    "one_f_one_b": 1,
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}


def formula(name: str, p: int, m: int) -> Fraction:
    """Return the idle share of a schedule on p ranks with m micro-batches."""
    v = STAGES_ON_A_RANK[name]
    if "Zero" in name:  # the gradients of weights, a third of the work, fill the gaps
        return Fraction(p - 1, 3 * v * m + p - 1)
    return Fraction(p - 1, v * m + p - 1)


def main() -> None:
    """Record a step of each schedule, show the idle shares, compare the orders."""
    options = read_options(
        rounds={"type": number(2, 16), "default": 2, "help": "m / p"},
        ms={"type": number(1.0, 1000.0), "default": 20.0, "help": "of a forward pass"},
        json={"type": Path, "help": "file for the timelines"},
    )
    join(at_least=2, at_most=4, only_cpu=True)
    p = dist.get_world_size()
    m = options.rounds * p  # PyTorch's schedules of two stages want a multiple
    say(f"{p} ranks, {m} micro-batches of {options.ms:g} ms forward, twice that back")
    say("schedule               formula  replayed  measured  in flight, by rank")
    recorded, wrong = {}, []
    for name, v in STAGES_ON_A_RANK.items():
        spans = gather(record(name, v, m, options.ms / 1000))
        recorded[name] = spans
        expected, ideal = formula(name, p, m), idle_share(replay(spans))
        shares = f"{float(expected):7.1%} {ideal:9.1%} {idle_share(spans):9.1%}"
        flying = ", ".join(f"{most_in_flight(row, v):g}" for row in spans)
        say(f"{name:22} {shares}  {flying}")
        if abs(ideal - expected) > 1e-9 or idle_share(spans) < expected - 0.01:
            wrong.append(name)
    if options.json and dist.get_rank() == 0:
        numbers = {"p": p, "m": m, "unit": options.ms / 1000, "spans": recorded}
        options.json.write_text(json.dumps(numbers) + "\n")
    right = f"{len(recorded)} orders, replayed, wait as long as their formulas say"
    check(not wrong, f"{right}{': not ' if wrong else ''}{', '.join(wrong)}")
    leave()


if __name__ == "__main__":
    main()
