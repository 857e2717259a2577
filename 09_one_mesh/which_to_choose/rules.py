"""The rules that choose a layout: splits from the cheapest on, the first that fits.

Here too is how much slower a choice is than the planner's fastest layout.
"""

from collections.abc import Iterator
from itertools import product

from jobs import Job, Layout, why_not
from ranking import has_headroom, plan_of, rank_plans

LONGEST = 32_768  # tokens of a sequence on one rank


def splits() -> Iterator[tuple[int, int, str]]:
    """Yield tensor ranks, stages and what is recomputed, in the order to try them."""
    for recompute in ("none", "selective"):
        yield from ((t, 1, recompute) for t in (1, 2, 4))
    for stages in (1, 2, 4, 8, 16, 32, 64):
        yield from ((8, stages, recompute) for recompute in ("none", "selective"))
    yield from ((t, 1, "full") for t in (1, 2, 4))
    yield from ((8, stages, "full") for stages in (1, 2, 4, 8, 16, 32, 64))


def hides_from(job: Job) -> float:
    """Return from how many tokens of a micro-batch on FSDP's gathers can hide.

    A host's devices need one copy of what other hosts send, and share its links. All
    of a block's computation, which hides them, reaches about 55 % of the peak.
    """
    cluster = job.cluster
    link = cluster.inside
    if cluster.devices > cluster.per_host:
        link = cluster.per_host * cluster.between
    return 6 * 0.55 * cluster.flops / (4 * link)


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


def try_rules(job: Job) -> tuple[Layout | str, float | None]:
    """Return what is chosen, and how much slower it is than the fastest with headroom.

    For none it is "-" if there is no such layout, and "?" if the planner finds one.
    """
    layout = choose(job)
    try:
        plans = [plan for plan in rank_plans(job, {})[0] if has_headroom(job, plan)]
    except ValueError:
        plans = []
    if layout is None:
        return "?" if plans else "-", None
    fastest = min(plan.cost.step for plan in plans)
    return layout, plan_of(job, layout).cost.step / fastest - 1
