"""While a link is down collectives wait: until the group's timeout, or TCP's.

Run: python 03_ddp_torchrun/cluster/lab.py --down-when="step 3" --up-after=4
    --max-restarts=1 -- 03_ddp_torchrun/cluster/link_down.py
Expect: both ranks time out, neither says whose link it was, both are started again and
    finish once the link is up. With --timeout=30 the run only waits, and goes on.
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ranks import check, join, leave, number, read_options, say

STEPS = 6


def add_up(step: int, group: dist.ProcessGroup) -> tuple[int, float]:
    """All-reduce one number; return the sum, and how many seconds that took."""
    value = torch.tensor(step + dist.get_rank(group))
    started = time.perf_counter()
    dist.all_reduce(value, group=group)
    return int(value), time.perf_counter() - started


def main() -> None:
    """Take some steps, each with time enough for a link to go down after it."""
    seconds = {"type": number(0.5, 300.0), "default": 2.0, "help": "of the group (2)"}
    options = read_options(timeout=seconds)
    join(at_least=2, only_cpu=True)
    # The group that `join` makes waits for five minutes; this one for so many seconds.
    group = dist.new_group(timeout=timedelta(seconds=options.timeout))
    assert isinstance(group, dist.ProcessGroup)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    ranks, sums = range(dist.get_world_size()), []
    for step in range(1, STEPS + 1):
        total, waited = add_up(step, group)
        sums.append(total)
        say(f"attempt {attempt} | step {step}" + " | waited" * (waited > 1))
        time.sleep(0.5)
    expected = [sum(step + rank for rank in ranks) for step in range(1, STEPS + 1)]
    check(sums == expected, f"{STEPS} sums are right in attempt {attempt}")
    leave()


if __name__ == "__main__":
    main()
