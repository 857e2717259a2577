"""Draw a step of five schedules on four ranks, as recorded: who waits, and when.

Run: python assets/draw_bubble.py
Expect: 08_bubble.png from 08_bubble.json, which `bubble.py --json` has written, and a
    `check:` of the idle shares.
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from pictures import new_picture, numbers_from, picture_parser, save_picture

# After Okabe and Ito; the second stage of a rank is lighter.
LOOK = {
    "F": ("#0072B2", "#7FB8D8", "forward"),
    "B": ("#E69F00", "#F2CF80", "backward (zero bubble: of the input)"),
    "W": ("#009E73", "#80CEB9", "backward of the weights"),
}
IDLE, INK = "#E4E4E4", "#222222"
TITLES = {
    "GPipe": "GPipe",
    "1F1B": "1F1B",
    "Interleaved1F1B": "Interleaved 1F1B: two stages on a rank",
    "InterleavedZeroBubble": "Interleaved zero bubble",
    "ZBVZeroBubble": "ZBV: two stages on a rank, there and back",
}


def draw_step(axes: Axes, ranks: list, width: float) -> float:
    """Draw what each rank does, its calls as boxes; return the idle share."""
    calls = [span for spans in ranks for span in spans]
    first = min(start for *_, start, _ in calls)
    total = max(end for *_, end in calls) - first
    for rank, spans in enumerate(ranks):
        axes.broken_barh([(0, total)], (rank + 0.06, 0.88), color=IDLE, lw=0)
        for kind, stage, i, start, end in spans:
            dark, light, _ = LOOK[kind.replace("I", "B")]
            own = min(stage for _, stage, *_ in spans)
            look = {"color": dark if stage == own else light, "ec": "white", "lw": 0.6}
            axes.broken_barh(
                [(start - first, end - start)], (rank + 0.06, 0.88), **look
            )
            ink = "white" if kind != "B" and kind != "I" and stage == own else INK
            place = ((start + end) / 2 - first, rank + 0.54)
            axes.text(*place, f"{i}", ha="center", va="center", color=ink, fontsize=8)
        where = (-0.008 * width, rank + 0.5)
        axes.text(*where, f"rank {rank}", ha="right", va="center", fontsize=10)
    axes.set(xlim=(0, width), ylim=(len(ranks), 0), yticks=[], xticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    return 1 - sum(end - start for *_, start, end in calls) / (total * len(ranks))


def draw_schedules(measured: dict) -> tuple[plt.Figure, dict[str, float]]:
    """Put the schedules below each other on one axis; `measured` is bubble.py's."""
    figure, rows = new_picture(8.6, rows=len(TITLES))
    steps = {name: measured["spans"][name] for name in TITLES}
    width = max(
        max(end for spans in step for *_, end in spans)
        - min(start for spans in step for *_, start, _ in spans)
        for step in steps.values()
    )
    shares = {}
    for axes, (name, step) in zip(rows, steps.items(), strict=True):
        shares[name] = draw_step(axes, step, width)
        title = f"{TITLES[name]}: idle {shares[name]:.0%}"
        axes.set_title(title, loc="left", weight="bold", pad=3)
    seconds = width * 1000
    what = "numbers are those of the micro-batches; light: the rank's second stage"
    rows[-1].set_xlabel(f"time, {seconds:.0f} ms; {what}")
    patches = [Patch(color=dark, label=name) for dark, _, name in LOOK.values()]
    patches.append(Patch(color=IDLE, label="idle"))
    figure.legend(handles=patches, loc="upper right", ncols=4, frameon=False)
    figure.subplots_adjust(left=0.07, right=0.99, top=0.92, bottom=0.04, hspace=0.28)
    return figure, shares


def main() -> None:
    """Draw the recorded steps."""
    options = picture_parser(
        str(__doc__).splitlines()[0], "08_bubble.json"
    ).parse_args()
    with numbers_from("08_pipeline_parallel/bubble/bubble.py --json"):
        figure, shares = draw_schedules(options.numbers)
    save_picture(figure, options.out, "08_bubble.png")
    plt.close(figure)
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    print(f"check: idle {told}; wrote 08_bubble.png")


if __name__ == "__main__":
    main()
