"""Choose a layout by a few rules, and compare it with the planner's fastest.

Run: python 09_one_mesh/which_to_choose/choose.py --cluster=a100-80
Expect: for models and numbers of devices a layout each, and a `check:` how much slower
    they are than the fastest of all that fit with headroom.
"""

import sys
from collections.abc import Iterator
from itertools import chain, product
from statistics import median

from jobs import FIXED, Job, Layout, read_arguments, read_jobs, why_not
from ranking import has_headroom, plan_of, rank_plans

DEVICES = {8, 256, 1024}  # and those that were asked for
LONGEST = 32_768  # tokens of a sequence on one rank
WORST = 0.25  # how much slower than the fastest a choice may be


def splits() -> Iterator[tuple[int, int, str]]:
    """Yield tensor ranks, stages and what is recomputed, in the order to try them."""
    for recompute in ("none", "selective"):
        yield from ((t, 1, recompute) for t in (1, 2, 4))
    for stages in (1, 2, 4, 8, 16, 32, 64):
        yield from ((8, stages, recompute) for recompute in ("none", "selective"))
    yield from ((t, 1, "full") for t in (1, 2, 4))
    yield from ((8, stages, "full") for stages in (1, 2, 4, 8, 16, 32, 64))


def hides_from(job: Job) -> float:
    """Return from how many tokens of a micro-batch on FSDP's gathers can hide."""
    cluster = job.cluster
    is_one_host = cluster.devices <= cluster.per_host
    link = cluster.inside if is_one_host else cluster.between
    return 6 * 0.6 * cluster.flops / (4 * cluster.per_host * link)


def choose(job: Job) -> Layout | None:
    """Return the first layout that fits with headroom and hides FSDP's gathers."""
    context = max(1, -(-job.sequence // LONGEST))
    for (t, p, recompute), sharding in product(splits(), ("none", "zero-1", "fsdp")):
        data = max(1, job.cluster.devices // (t * p * context))
        tokens = job.sequence / context / t  # of a micro-batch, for each tensor rank
        if sharding == "fsdp" and tokens < hides_from(job):
            continue
        for stages in (4, 2, 1) if p > 1 else (1,):
            layout = Layout(data, t, p, context, sharding, 1, recompute, stages)
            if not why_not(job, layout) and has_headroom(job, plan_of(job, layout)):
                return layout
    return None


def cell(layout: Layout) -> str:
    """Write a layout in a few letters."""
    axes = (("t", layout.tensor), ("p", layout.pipeline), ("c", layout.context))
    sharding = layout.sharding.replace("none", "ddp" if layout.data > 1 else "")
    recompute = {"none": "", "selective": "sel", "full": "full"}[layout.recompute]
    words = [sharding, *(f"{name}{n}" for name, n in axes if n > 1), recompute]
    return " ".join(word for word in words if word)


def try_rules(job: Job) -> tuple[str, list[float]]:
    """Return what is chosen, and how much slower it is than the fastest with headroom.

    The text is "-" if nothing fits, and "?" if only the planner finds what does.
    """
    layout = choose(job)
    try:
        plans = [plan for plan in rank_plans(job, {})[0] if has_headroom(job, plan)]
    except ValueError:
        plans = []
    if layout is None:
        return "?" if plans else "-", []
    fastest = min(plan.cost.step for plan in plans)
    return cell(layout), [plan_of(job, layout).cost.step / fastest - 1]


def main() -> None:
    """Choose for each model and number of devices, print, and compare."""
    options, losses = vars(read_arguments()), list[float]()
    for name in (*FIXED, "sharding", "recompute"):
        if options[name] is not None:
            sys.exit(f"choose.py: it chooses {name} itself; plan.py takes your choice")
    devices = sorted(DEVICES | {options["devices"]})
    try:
        jobs = read_jobs(options, devices)
    except ValueError as error:
        sys.exit(f"choose.py: {error}")
    print(f"{options['batch']:,} sequences of {options['sequence']:,} tokens", end=", ")
    print(f"devices of {options['memory']:g} GB; t, p, c: ranks of each axis")
    print(f"{'devices':15}" + "".join(f"{n:<18}" for n in devices).rstrip())
    for model, row in jobs.items():
        cells, found = zip(*map(try_rules, row), strict=True)
        line = "".join(f"{text:17} " for text in cells)
        print(f"{model if ',' not in model else 'your model':15}{line.rstrip()}")
        losses += chain.from_iterable(found)
    if not losses or (options["sequence"] <= LONGEST and max(losses) > WORST):
        slow = f"over {WORST:.0%} slower than the planner's fastest, or none is found"
        sys.exit(f"choose.py: a choice is {slow}: ask plan.py")
    print(
        f"check: {len(losses)} choices, slower than the planner's fastest by "
        f"{median(losses):.1%} (median), {max(losses):.0%} at most"
    )


if __name__ == "__main__":
    main()
