"""Plan a training run: layouts that fit, one of them recommended, and why that one.

Run: python 09_one_mesh/plan/plan.py --model=llama2-13b --devices=32 --cluster=a100-40
Expect: the recommended layout and the fastest ones; for the first its memory by kind,
    its seconds by term, what it sends along each axis, and what the next ones lose.
"""

import sys
import textwrap

from jobs import FIXED, Job, read_arguments, read_job
from ranking import (
    Plan,
    best_of_each_shape,
    has_headroom,
    other_batch,
    rank_plans,
    what_it_loses,
    why_not_more,
)

COLUMNS = (
    "data tensor pipeline context sharding micro recompute stages     GB  step s MFU"
)


def table_row(job: Job, plan: Plan) -> str:
    """Return a plan as a line of the table.

    MFU counts three forward passes of all matrices but the embedding, and the half of
    attention that the causal mask leaves; nothing for recomputation.
    """
    a, model = plan.layout, job.model
    forward = model.block_operations() + model.attention_operations(job.sequence)
    operations = 3 * (model.layers * forward + model.head_operations())
    rate = job.batch * job.sequence / plan.cost.step / job.cluster.devices
    mesh = f"{a.data:4}{a.tensor:7}{a.pipeline:9}{a.context:8} {a.sharding:>8}"
    how = f"{a.micro_batch:6} {a.recompute:>9}{a.pipeline * a.interleaved:7}"
    mfu = rate * operations / job.cluster.flops
    return f"{mesh}{how}{plan.need / 1e9:7.1f}{plan.cost.step:8.2f}{mfu:4.0%}"


def wrapped(text: str, indent: str = "") -> str:
    """Return a text in lines of 86 columns; what a "~" joins stays in one line."""
    wrap = textwrap.TextWrapper(86, initial_indent=indent, subsequent_indent="  ")
    wrap.break_on_hyphens = False
    return wrap.fill(text).replace("~", " ")


def parts(values: dict[str, float], unit: float = 1.0) -> str:
    """Write numbers with their names, the largest first, without those that are 0."""
    ordered = sorted(values.items(), key=lambda value: -value[1])
    texts = [f"{n}~{x / unit:.2f}" for n, x in ordered if x / unit >= 0.005]
    return wrapped(", ".join(texts), "  ")


def main() -> None:
    """Read the job, rank its layouts, show the best ones, and explain the first."""
    options = vars(read_arguments())
    fixed = {n: options[n] for n in (*FIXED, "sharding", "recompute") if options[n]}
    try:
        job = read_job(options)
        plans, count = rank_plans(job, fixed)
    except ValueError as error:
        sys.exit(f"plan.py: {error}")
    first, *others = best_of_each_shape(plans)[: options["rows"]]
    parameters = f"{job.model.parameters() / 1e9:.2f} billion parameters"
    step = f"a step of {job.batch:,} sequences of {job.sequence:,} tokens"
    print(f"{options['model']}: {parameters}, {step}")
    roomy = sum(has_headroom(job, plan) for plan in plans)
    fits = f"{len(plans):,} fit in {options['memory']:g} GB"
    print(f"{count:,} layouts are possible, {fits}, {roomy:,} with 15 % of headroom")
    these = "these" if roomy else "all that fit"
    print(
        f"1 is the simplest of {these} within 5 % of the fastest; then others by time"
    )
    print(f" # {COLUMNS}")
    for number, plan in enumerate([first, *others], 1):
        print(f"{number:2} {table_row(job, plan)}")
    print(f"1, memory of a rank, GB:\n{parts(first.kinds, 1e9)}")
    print(f"1, seconds of a step:\n{parts(first.cost.seconds)}")
    for axis, sent in first.cost.sent.items():
        seconds, exposed = first.cost.sending[axis], first.cost.seconds[axis]
        if sent:
            print(f"1, {axis}: sends {sent / 1e9:,.1f} GB in {seconds:.2f} s, ", end="")
            print(f"{exposed:.2f} s of it not hidden")
    for number, plan in enumerate(others, 2):
        print(wrapped(f"why not {number}: {what_it_loses(job, plan, first)}"))
    for line in why_not_more(job, first) + other_batch(job, fixed, first):
        print(wrapped(line))


if __name__ == "__main__":
    main()
