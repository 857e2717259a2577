"""Choose layouts by the rules, and compare each with the planner's fastest.

Run: python 09_one_mesh/which_to_choose/choose.py --cluster=a100-80
Expect: for models and numbers of devices a layout each, and a `check:` how much slower
    they are than the fastest of all that fit with headroom.
"""

import sys
from statistics import median

from jobs import FIXED, Layout, read_arguments, read_jobs
from rules import LONGEST, try_rules

DEVICES = (8, 32, 256, 1024)
STAR, WORST = 0.1, 0.25  # how much slower than the fastest a choice is or may be


def cell(layout: Layout | str, slower: float | None = None) -> str:
    """Write a layout in a few letters, with a star if it is slow; a text stays."""
    if isinstance(layout, str):
        return layout
    axes = (("t", layout.tensor), ("p", layout.pipeline), ("c", layout.context))
    sharding = layout.sharding.replace("none", "ddp" if layout.data > 1 else "")
    if layout.devices == 1:
        sharding = "alone"
    recompute = {"none": "", "selective": "sel", "full": "full"}[layout.recompute]
    words = [sharding, *(f"{name}{n}" for name, n in axes if n > 1), recompute]
    star = "*" if slower is not None and slower > STAR else ""
    return " ".join(word for word in words if word) + star


def main() -> None:
    """Choose for each model and number of devices, print, and compare."""
    options, losses = vars(read_arguments(model=None, devices=None)), {}
    for name in (*FIXED, "sharding", "recompute"):
        if options[name] is not None:
            sys.exit(f"choose.py: it chooses {name} itself; plan.py takes your choice")
    try:
        jobs = read_jobs(options, DEVICES)
    except ValueError as error:
        sys.exit(f"choose.py: {error}")
    print(f"{options['batch']:,} sequences of {options['sequence']:,} tokens", end=", ")
    print(f"devices of {options['memory']:g} GB; t, p, c: ranks of each axis")
    counts = (job.cluster.devices for job in next(iter(jobs.values())))
    print(f"{'devices':15}" + "".join(f"{n:<18}" for n in counts).rstrip())
    for model, row in jobs.items():
        name = "your model" if "," in model else model
        found = {f"{name} on {job.cluster.devices}": try_rules(job) for job in row}
        line = "".join(f"{cell(*choice):17} " for choice in found.values())
        print(f"{name:15}{line.rstrip()}")
        losses |= {
            where: loss for where, (_, loss) in found.items() if loss is not None
        }
    if not losses:
        sys.exit("choose.py: no rule fits: ask plan.py")
    worst = max(losses, key=losses.__getitem__)
    slower = f"slower than the planner's fastest: {worst}, by {losses[worst]:.0%}"
    if options["sequence"] <= LONGEST and losses[worst] > WORST:
        sys.exit(f"choose.py: {slower}: ask plan.py")
    half, most = median(losses.values()), losses[worst]
    choices = f"{len(losses)} choice{'s' if len(losses) > 1 else ''}"
    print(f"check: {choices}, slower than the fastest by ", end="")
    print(f"{half:.1%} (median) to {most:.1%} ({worst})")


if __name__ == "__main__":
    main()
