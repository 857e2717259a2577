"""Draw a step of each way to average gradients, as the profiler saw it on both ranks.

Run: python assets/draw_timeline.py
Expect: 02_timeline.png from 02_timeline.json, which `timeline.py --json` has written,
    and a `check:` of what is seen in it.
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from pictures import new_picture, numbers_from, picture_parser, save_picture

INK = "#222222"
# A colour for each rank, after Okabe and Ito; forward is the same, but lighter.
RANKS = ["#0072B2", "#E69F00"]
FORWARD, WAIT, OPTIMIZER, ALL_REDUCE = "66", "#E4E4E4", "#8C8C8C", "#009E73"
TITLES = {
    "naive": "naive: an all-reduce for each parameter, after backward",
    "flat": "flat: one all-reduce of a flat buffer, after backward",
    "bucketed": "bucketed, by hand: an all-reduce as soon as a bucket is full",
    "DDP": "DDP, with the same buckets",
}


def lanes_of(spans: list[list[float]]) -> list[int]:
    """Give each span the first lane that is free when it begins."""
    free_from, lanes = [], []
    for start, end in spans:
        lane = next((n for n, t in enumerate(free_from) if t <= start), len(free_from))
        free_from[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


def draw_rank(axes: Axes, rank: int, step: dict) -> None:
    """Draw what a rank computes, and below it, in green, gloo's work."""
    top = 1.15 * rank  # the axis points down
    look = {
        "forward": RANKS[rank] + FORWARD,
        "backward": RANKS[rank],
        "finish": WAIT,
        "optimizer": OPTIMIZER,
    }
    for part, colour in look.items():
        start, end = step[part]
        axes.broken_barh([(start, end - start)], (top, 0.5), color=colour, lw=0)
    spans, look = step["all_reduces"], {"color": ALL_REDUCE, "ec": "white", "lw": 0.4}
    for (start, end), lane in zip(spans, lanes_of(spans), strict=True):
        place = (top + 0.54 + 0.2 * lane, 0.17)
        axes.broken_barh([(start, end - start)], place, **look)
    axes.text(-0.6, top + 0.27, f"rank {rank}", ha="right", va="center")


def draw_ways(measured: dict) -> plt.Figure:
    """Put the ways below each other on one axis; `measured` is timeline.py's JSON."""
    figure, rows = new_picture(7.4, rows=len(TITLES), sharex=True)
    steps = {name: measured["steps"][name] for name in TITLES}
    longest = max(rank["optimizer"][1] for step in steps.values() for rank in step)
    for axes, (name, step) in zip(rows, steps.items(), strict=True):
        for rank, of_rank in enumerate(step):
            draw_rank(axes, rank, of_rank)
        end = max(rank["optimizer"][1] for rank in step)
        axes.plot([end, end], [-0.1, 2.2], color=INK, lw=1)
        axes.text(end + 0.006 * longest, 1.05, f"{end:.0f} ms", va="center")
        axes.set_title(TITLES[name], loc="left", weight="bold", pad=3)
        axes.set_ylim(2.25, -0.15)
        axes.set_yticks([])
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.grid(axis="x", color="#DDDDDD", lw=0.6)
        axes.set_axisbelow(True)
    rows[-1].set_xlim(0, 1.09 * longest)
    rows[-1].set_xlabel("milliseconds since the first rank began its step")
    looks = {
        "forward, rank 0 and 1": [colour + FORWARD for colour in RANKS],
        "backward, rank 0 and 1": RANKS,
        "waits or copies": [WAIT],
        "optimizer": [OPTIMIZER],
        "gloo works at an all-reduce": [ALL_REDUCE],
    }
    figure.legend(
        handles=[tuple(Patch(color=c) for c in colours) for colours in looks.values()],
        labels=list(looks),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="upper center",
        ncols=6,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.2,
    )
    figure.subplots_adjust(left=0.075, right=0.995, top=0.91, bottom=0.075, hspace=0.3)
    return figure


def count_overlaps(step: list[dict]) -> list[int]:
    """Count on each rank the all-reduces that gloo begins before backward is over."""
    return [
        sum(start < rank["backward"][1] for start, _ in rank["all_reduces"])
        for rank in step
    ]


def main() -> None:
    """Read the numbers, check them, draw them."""
    parser = picture_parser("Draw what timeline.py measured.", "02_timeline.json")
    args = parser.parse_args()
    with numbers_from("timeline.py"):
        early = {name: count_overlaps(args.numbers["steps"][name]) for name in TITLES}
        figure = draw_ways(args.numbers)
    for name, counts in early.items():
        if (min(counts) > 0) != (name in ("bucketed", "DDP")):
            raise RuntimeError(f"{name}: {counts} all-reduces begin during backward")
    save_picture(figure, args.out, "02_timeline.png")
    told = ", ".join(f"{name} {min(counts)}" for name, counts in early.items())
    print(f"check: all-reduces begun during backward: {told}; wrote 02_timeline.png")


if __name__ == "__main__":
    main()
