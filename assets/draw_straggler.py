"""Draw a step of two ranks, one of which loads longer, and the other waits.

Run: python assets/draw_straggler.py
Expect: 03_straggler.png from 03_straggler.json, which record_straggler.py has written,
    and a `check:` of what is seen in it.
"""

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from pictures import new_picture, numbers_from, picture_parser, save_picture

# After Okabe and Ito; grey is time in which a rank does nothing.
COLOURS = {
    "load": "#E69F00",
    "compute": "#0072B2",
    "wait for the other rank": "#D4D4D4",
    "all-reduce": "#009E73",
}
TITLES = {
    "blocks": "sharded in blocks: rank 1 has the long documents, rank 0 waits",
    "turns": "sharded in turn: both have as much to load",
}


def split_step(step: list[dict]) -> list[dict]:
    """Split what a trace calls compute and all-reduce: computing, waiting, sending.

    The call that computes gradients lasts until they are all-reduced. Until the last
    rank begins to all-reduce, the others' all-reduces only wait.
    """
    starts = [rank["gloo:all_reduce"][0][0] for rank in step]
    parts = []
    for rank, start in zip(step, starts, strict=True):
        forward, backward = rank["compute"]
        parts.append(
            {
                "load": rank["load"],
                "compute": [forward, [backward[0], start]],
                "wait for the other rank": [[start, max(starts)]],
                "all-reduce": [[max(starts), max(backward[1], max(starts))]],
            }
        )
    return parts


def draw_way(axes: Axes, title: str, parts: list[dict]) -> None:
    """Draw a bar for each rank."""
    for rank, of_rank in enumerate(parts):
        for name, spans in of_rank.items():
            bars = [(start, end - start) for start, end in spans]
            axes.broken_barh(bars, (rank - 0.35, 0.7), color=COLOURS[name], lw=0)
    axes.set_title(title, loc="left", weight="bold", pad=4)
    axes.set_yticks([0, 1], ["rank 0", "rank 1"])
    axes.set_ylim(1.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["left"]].set_visible(False)
    axes.grid(axis="x", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)


def waited(parts: list[dict]) -> list[float]:
    """Return the milliseconds for which each rank waits."""
    spans = [of_rank["wait for the other rank"][0] for of_rank in parts]
    return [end - start for start, end in spans]


def main() -> None:
    """Read the numbers, check them, draw them."""
    parser = picture_parser("Draw two ranks' steps.", "03_straggler.json")
    args = parser.parse_args()
    with numbers_from("record_straggler.py"):
        parts = {way: split_step(args.numbers[way]) for way in TITLES}
        figure, rows = new_picture(3.9, rows=2, sharex=True)
        for axes, (way, title) in zip(rows, TITLES.items(), strict=True):
            draw_way(axes, title, parts[way])
    rows[-1].set_xlabel("milliseconds since the first rank began its step")
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items()],
        loc="upper center",
        ncols=4,
        frameon=False,
        handlelength=1.2,
    )
    figure.subplots_adjust(left=0.07, right=0.99, top=0.84, bottom=0.13, hspace=0.42)
    (long, short), others = waited(parts["blocks"]), waited(parts["turns"])
    if not long > 10 * short or max(others) > long / 3:
        raise RuntimeError(f"the ranks wait {long}, {short} and {others} ms")
    save_picture(figure, args.out, "03_straggler.png")
    told = f"{long:.0f} and {short:.0f} ms in blocks, at most {max(others):.0f} in turn"
    print(f"check: the ranks wait {told}; wrote 03_straggler.png")


if __name__ == "__main__":
    main()
