"""Draw the loss curves of all ways of training, their distance, and what they cost.

Run: python assets/draw_same_result.py
Expect: 05_same_result.png from 05_same_result.json, which `same_result.py --json` has
    written, and a `check:` of the largest distance in the file.
"""

from typing import Any

import matplotlib.pyplot as plt

from pictures import new_picture, numbers_from, picture_parser, save_picture

# Colours that people with any colour vision tell apart (Okabe and Ito), by the first
# words of a way's name.
GROUPS = {
    "one process": ("one process", "#222222"),
    "by hand, ZeRO": ("ZeRO by hand", "#009E73"),
    "deepspeed": ("ZeRO by DeepSpeed", "#CC79A7"),
    "": ("averaged by hand, and DDP", "#0072B2"),
}
MISTAKE = ("gradients summed: a mistake", "#D55E00")
# What a rank holds, with live_tensors' names for it.
KINDS = {
    "parameters": (("parameters",), "#0072B2"),
    "gradients": (("gradients",), "#E69F00"),
    "optimizer state": (("optimizer",), "#009E73"),
    "buckets, gathered": (("buckets", "gathered"), "#CC79A7"),
}
LIMIT = 1e-5


def group_of(way: str) -> tuple[str, str]:
    """Return the label and the colour of a way's group."""
    return next(group for start, group in GROUPS.items() if way.startswith(start))


def distances_of(losses: list[float], reference: list[float]) -> list[float]:
    """Return how far a curve is from that of one process, at each step."""
    return [abs(one - other) for one, other in zip(losses, reference, strict=True)]


def draw_all_ways(record: dict[str, Any]) -> plt.Figure:
    """Draw the curves and their distances above, what is sent and held below."""
    figure, ((curves, apart), (sent, held)) = new_picture(8.4, 2, 2)
    ways = record["ways"]
    reference = next(iter(ways.values()))["losses"]
    steps = range(1, len(reference) + 1)
    drawn = [(way["losses"], *group_of(name)) for name, way in ways.items()]
    for number, (losses, label, colour) in enumerate(
        [*drawn, (record["mistake"], *MISTAKE)]
    ):
        # Each line is thinner than the one below it, so that all can be seen.
        width = max(1.5, 14 - number)
        curves.plot(steps, losses, linewidth=width, color=colour, label=label)
        if number > 0:
            far = [max(x, 1e-8) for x in distances_of(losses, reference)]
            apart.plot(steps, far, color=colour)
    curves.set_title(f"{len(ways)} ways, {record['parameters']:,} parameters")
    curves.set_ylabel("mean loss, nats per byte")
    apart.set_yscale("log")
    apart.set_ylim(5e-9, 1)
    apart.axhline(LIMIT, color="#888888", linestyle="--", linewidth=1)
    apart.text(1, LIMIT * 1.3, "limit of the check", fontsize=10, color="#555555")
    apart.set_title("the same, as the distance from one process")
    apart.set_ylabel("nats per byte; equal is drawn as 1e-8")
    for axes in (curves, apart):
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
    draw_bytes(sent, held, ways)
    handles = {
        label: h for h, label in zip(*curves.get_legend_handles_labels(), strict=True)
    }
    look = {"loc": "upper center", "ncols": len(handles), "frameon": False}
    legend = figure.legend(
        handles.values(), handles, handlelength=1.2, columnspacing=1.0, **look
    )
    for line in legend.get_lines():
        line.set_linewidth(2)  # and not as wide as the curve
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    return figure


def draw_bytes(sent: plt.Axes, held: plt.Axes, ways: dict[str, Any]) -> None:
    """Draw a bar for each way: what a rank sends in a step, and what it holds."""
    names = list(ways)
    colours = [group_of(name)[1] for name in names]
    sent.barh(names, [way["sent"] / 1e3 for way in ways.values()], color=colours)
    left = [0.0] * len(names)
    for label, (kinds, colour) in KINDS.items():
        widths = [
            sum(way["held"][kind] for kind in kinds) / 1e3 for way in ways.values()
        ]
        held.barh(names, widths, left=left, color=colour, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    sent.set_title("what differs: sent by a rank in a step")
    held.set_title("and memory per rank")
    held.legend(loc="center right")
    held.set_xlim(0, 2.3 * max(left))  # room for the legend
    held.set_yticklabels([])
    for axes in (sent, held):
        axes.invert_yaxis()
        axes.set_xlabel("kB")
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)


def main() -> None:
    """Read the file, draw it, and say how far apart the curves are."""
    numbers = "05_same_result.json"
    args = picture_parser("Draw what same_result.py measured.", numbers).parse_args()
    with numbers_from("same_result.py"):
        curves = [way["losses"] for way in args.numbers["ways"].values()]
        figure = draw_all_ways(args.numbers)
    largest = max(max(distances_of(curve, curves[0])) for curve in curves)
    if not largest <= LIMIT:
        raise RuntimeError(f"the curves are {largest} apart")
    save_picture(figure, args.out, "05_same_result.png")
    told = f"{len(curves)} curves, at most {largest:.0e} apart"
    print(f"check: {told}; wrote 05_same_result.png")


if __name__ == "__main__":
    main()
