"""Every layout that is possible, those that fit, and which of them to recommend."""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import log, prod
from typing import Any, NamedTuple

from jobs import RECOMPUTE, SHARDING, Job, Layout, why_not
from memory import peak_bytes
from step_time import Cost, step_cost

SHORTEST = 2048  # tokens of a sequence on one rank, where context is not asked for
MICRO_BATCHES = (1, 2, 4, 8, 16)
INTERLEAVED = (1, 2, 4)
# A plan has headroom if it fits with 15 % more memory: the largest error that the tests
# allow on published peaks. Times within 5 % are taken as equal, which is less than the
# worst error on published rows: simplicity decides between them.
HEADROOM, SAME = 1.15, 1.05


class Plan(NamedTuple):
    """A layout that fits: its bytes by kind on the fullest rank, and its cost."""

    layout: Layout
    kinds: dict[str, float]
    cost: Cost

    @property
    def shape(self) -> tuple[Any, ...]:
        """Return the mesh and the sharding: what makes two plans different ones."""
        return self.layout[:5]

    @property
    def need(self) -> float:
        """Return the bytes that the fullest rank needs."""
        return sum(self.kinds.values())

    @property
    def simplicity(self) -> tuple[int, bool, int]:
        """Return axes beside data, if context is one, and sharding: less is simpler.

        Context ranks need an attention of their own. ZeRO-2 comes last: in PyTorch it
        is FSDP with two settings more.
        """
        a, is_cut = self.layout, self.layout.context > 1
        axes = (a.tensor > 1) + (a.pipeline > 1) + is_cut
        return axes, is_cut, ("none", "zero-1", "fsdp", "zero-2").index(a.sharding)


def divisors(n: int) -> list[int]:
    """Return the divisors of a number."""
    return [i for i in range(1, n + 1) if n % i == 0]


def candidates(job: Job, fixed: dict[str, Any]) -> Iterator[Layout]:
    """Yield layouts, possible or not; `fixed` holds what the user has chosen."""
    n = job.cluster.devices
    context = [c for c in divisors(n) if c == 1 or job.sequence // c >= SHORTEST]
    choices = {
        "tensor": [t for t in divisors(n) if t <= job.cluster.per_host],
        "pipeline": [p for p in divisors(n) if p <= job.model.layers],
        "context": context,
        "sharding": SHARDING,
        "micro_batch": MICRO_BATCHES,
        "recompute": RECOMPUTE,
        "interleaved": INTERLEAVED,
    }
    choices |= {name: [value] for name, value in fixed.items()}
    for t, p, c, *rest in product(*choices.values()):
        layout = Layout(max(1, n // (t * p * c)), t, p, c, *rest)
        # On one rank there is nothing to shard.
        if layout.shards > 1 or "sharding" in fixed or layout.sharding == "none":
            yield layout


def possible(job: Job, fixed: dict[str, Any]) -> list[Layout]:
    """Return the layouts that can be.

    Raises ValueError if there is none, with the reason that most candidates have.
    """
    chosen = {n: fixed[n] for n in ("pipeline", "tensor", "context") if n in fixed}
    if job.cluster.devices % prod(chosen.values()):
        names = " x ".join(f"{name}={n}" for name, n in chosen.items() if n > 1)
        raise ValueError(f"{job.cluster.devices} devices: not divisible by {names}")
    micro_batch = fixed.get("micro_batch", 1)
    if job.batch % micro_batch:
        each = f"not divisible by micro-batch={micro_batch}"
        raise ValueError(f"a batch of {job.batch} sequences: {each}")
    reasons: Counter[str] = Counter()
    layouts = []
    for layout in candidates(job, fixed):
        if reason := why_not(job, layout):
            reasons[reason] += 1
        else:
            layouts.append(layout)
    if not layouts:
        raise ValueError(f"no layout is possible: {reasons.most_common(1)[0][0]}")
    return layouts


def smallest(job: Job, fixed: dict[str, Any]) -> tuple[float, Layout]:
    """Return the layout that needs the least memory, after its bytes."""
    layouts = possible(job, fixed)
    return min((sum(peak_bytes(job, layout).values()), layout) for layout in layouts)


def refuse(job: Job, fixed: dict[str, Any]) -> str:
    """Say in one line what the smallest layout needs, and what would make it fit."""
    need, layout = smallest(job, fixed)
    line = f"nothing fits in {job.cluster.memory / 1e9:g} GB: the smallest layout, "
    line += f"{layout}, needs {need / 1e9:.1f} GB; "
    for factor in (2, 4, 8, 16, 32, 64, 128):
        devices = factor * job.cluster.devices
        more = job._replace(cluster=job.cluster._replace(devices=devices))
        try:
            need, layout = smallest(more, fixed)
            if need <= job.cluster.memory:
                return f"{line}{devices} devices would do, as {layout}"
        except ValueError:  # of so many devices no layout can be
            continue
    line += "2 to 128 times the devices do not help: "
    return line + "shorten the sequence, or offload"


def plan_of(job: Job, layout: Layout) -> Plan:
    """Return a layout with what it needs and takes, whether it fits or not."""
    return Plan(layout, peak_bytes(job, layout), step_cost(job, layout))


def has_headroom(job: Job, plan: Plan) -> bool:
    """Tell if a plan would fit if it needed 15 % more than is predicted."""
    return HEADROOM * plan.need <= job.cluster.memory


def recommend(job: Job, plans: list[Plan]) -> Plan:
    """Return the simplest of the plans with headroom that are 5 % slower at most.

    If none has headroom, the simplest of all that are as fast.
    """
    choice = [plan for plan in plans if has_headroom(job, plan)] or plans
    fastest = min(plan.cost.step for plan in choice)
    near = [plan for plan in choice if plan.cost.step <= SAME * fastest]
    return min(near, key=lambda plan: plan.simplicity)  # of these the fastest


def rank_plans(job: Job, fixed: dict[str, Any]) -> tuple[list[Plan], int]:
    """Return all plans that fit, and how many layouts are possible.

    The first is the recommended one; the others follow, fastest first.

    Raises ValueError, with one line, if none can be or none fits.
    """
    layouts, plans = possible(job, fixed), []
    for layout in layouts:
        kinds = peak_bytes(job, layout)
        if sum(kinds.values()) <= job.cluster.memory:
            plans.append(Plan(layout, kinds, step_cost(job, layout)))
    if not plans:
        raise ValueError(refuse(job, fixed))
    # Of plans within 0.1 % the one that needs less memory is the better one.
    plans.sort(key=lambda p: (round(1e3 * log(p.cost.step)), p.need))
    first = recommend(job, plans)
    return [first, *(plan for plan in plans if plan is not first)], len(layouts)


def best_of_each_shape(plans: list[Plan]) -> list[Plan]:
    """Return the first plan of each shape."""
    best: dict[tuple[Any, ...], Plan] = {}
    for plan in plans:
        best.setdefault(plan.shape, plan)
    return list(best.values())


def what_it_loses(job: Job, plan: Plan, first: Plan) -> str:
    """Say why a plan is not the first: time and its terms, headroom, simplicity."""
    longer = plan.cost.step - first.cost.step
    if abs(longer) < 0.001 * first.cost.step:
        more = plan.need - first.need
        text = f"as fast, {abs(more) / 1e9:.1f} GB {'less' if more < 0 else 'more'}"
    else:
        how = "slower" if longer > 0 else "faster"
        text = f"{abs(longer) / first.cost.step:.1%} {how}"
    if has_headroom(job, first) and not has_headroom(job, plan):
        text += ", no headroom"
    elif longer < 0.001 * first.cost.step and plan.simplicity > first.simplicity:
        (axes, is_cut, _), (least, is_ours_cut, _) = plan.simplicity, first.simplicity
        extra = "settings" if first.layout.sharding == "fsdp" else "sharding"
        extra = "context ranks" if is_cut > is_ours_cut else extra
        text += f", more {'axes' if axes > least else extra}"
    terms = {n: plan.cost.seconds[n] - s for n, s in first.cost.seconds.items()}
    large = sorted(terms.items(), key=lambda term: -abs(term[1]))[:3]
    smallest = max(0.05 * abs(longer), 0.001 * first.cost.step)
    changes = [f"{name}~{s:+.2f}~s" for name, s in large if abs(s) > smallest]
    return f"{text}: {', '.join(changes)}" if changes else text


def why_not_more(job: Job, first: Plan) -> list[str]:
    """Say what is wrong with less recomputation, and with a larger micro-batch."""
    layout, lines = first.layout, []
    less = RECOMPUTE[: RECOMPUTE.index(layout.recompute)]
    changes: list[dict[str, Any]] = [{"recompute": name} for name in less]
    changes += [{"micro_batch": 2 * layout.micro_batch}]
    for change in changes:
        other = layout._replace(**change)
        ((name, value),) = change.items()
        if why_not(job, other):
            continue
        plan = plan_of(job, other)
        text = f"it needs {plan.need / 1e9:.1f} GB"
        if plan.need <= job.cluster.memory:
            text = what_it_loses(job, plan, first)
        lines.append(f"why not 1 with {name.replace('_', '-')} {value}: {text}")
    return lines


def other_batch(job: Job, fixed: dict[str, Any], first: Plan) -> list[str]:
    """Say if a smaller batch, divisible by the devices, is faster by the sequence."""
    devices, batch = job.cluster.devices, job.batch - job.batch % job.cluster.devices
    if batch in (0, job.batch):
        return []
    try:
        plans, _ = rank_plans(job._replace(batch=batch), fixed)
    except ValueError:
        return []
    seconds = plans[0].cost.step
    if 1.01 * seconds / batch > first.cost.step / job.batch:
        return []
    text = f"the batch is not divisible by {devices} devices: with --batch={batch} "
    return [f"{text}a step takes {seconds:.2f} s"]
