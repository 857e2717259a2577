"""Fewer calls in a step are more steps in a second: four ways, side by side.

Run: python 04_rpc_parameter_server/lookup_cost/steps_per_second.py
Expect: how many steps a second the trainers make with one server in each of four ways,
    in the same processes and with the same batches. (Times need idle cores.)
"""

import statistics
from argparse import Namespace

import torch.distributed as dist
from torch.distributed.nn import RemoteModule

from comparison import ALONE_LIMIT, OFTEN, SUM_LIMIT, make_tables, take_turns
from ranks import check, number, read_options, say
from roles import names_of_roles, on_all_trainers, start_roles


def print_rates(rates: dict, found: dict) -> None:
    """Print a row for each way; the first of its rounds was for warming up."""
    say(f"{'':16}  steps/s   from     to   times   lost updates in")
    first = statistics.median(rates[OFTEN][1:])
    for name, (_, *counted) in rates.items():
        median, one = statistics.median(counted), found[name]
        times = f"{median:9.1f}{min(counted):7.1f}{max(counted):7.1f}"
        entries = f"{one.lost:9,} of {one.moved:,} entries"
        say(f"{name:16}{times}{median / first:8.2f}{entries}")


def compare_four_ways(remotes: list[RemoteModule], options: Namespace) -> None:
    """Be a trainer: train in all ways; end unless all is right."""
    trainers, steps = dist.get_world_size(), options.steps
    say(
        f"{trainers} trainer(s), 1 server, {options.batch_size} bags in a batch; "
        f"{options.rounds} round(s) of {steps} steps"
    )
    rates, found = take_turns(remotes, options.rounds + 1, steps, options.batch_size)
    print_rates(rates, found)
    ways = list(found.values())
    are_equal = not any(one.different for one in ways)
    check(are_equal, "4 ways: the dense weights of all trainers are equal")
    updates = trainers * steps * (options.rounds + 1)
    missing = sum(one.missing for one in ways)
    claim = f"{missing} of {updates} updates of the table are missing"
    check(missing == 0 and min(one.moved for one in ways) > 0, f"4 ways: {claim}")
    in_turn = [found[name] for name in found if name != OFTEN or trainers == 1]
    lost = sum(one.lost for one in in_turn)
    claim = f"{lost} entries of the table are not the sum of what was sent"
    check(lost == 0, f"{len(in_turn)} ways: {claim} (limit {SUM_LIMIT:.0e})")
    if trainers == 1:
        apart = max(one.apart for one in ways)
        claim = f"{apart:.0e} from one process alone (limit {ALONE_LIMIT:.0e})"
        check(apart <= ALONE_LIMIT, f"4 ways: {claim}")


def measure_all_ways(options: Namespace) -> None:
    """Have the server make its tables, and the trainers use them."""
    tables = make_tables()
    on_all_trainers(options.trainers, compare_four_ways, tables, options)


def main() -> None:
    """Start all processes, and wait for them."""
    options = read_options(
        trainers={"type": number(1, 16), "default": 2},
        rounds={"type": number(1, 100), "default": 9, "help": "the median counts"},
        steps={"type": number(1, 100), "default": 25, "help": "in a round"},
        batch_size={"type": number(1, 512), "default": 5, "help": "in bags"},
    )
    start_roles(names_of_roles(options.trainers), measure_all_ways, options)


if __name__ == "__main__":
    main()
