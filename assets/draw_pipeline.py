"""Draw who is idle when: one batch on two stages, then GPipe and 1F1B on four.

Run: python assets/draw_pipeline.py
Expect: 08_pipeline.png, from the calls that the chapter's own schedules make, and a
    `check:` of the idle share next to (p - 1) / (m + p - 1).
"""

from fractions import Fraction

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from pictures import chapter_module, new_picture, picture_parser, save_picture

# Okabe and Ito's colours, which people with any colour vision tell apart.
LOOK = {"F": ("#0072B2", "white"), "B": ("#E69F00", "#222222")}
IDLE = "#E4E4E4"
# A backward pass takes about twice as long: gradients of activations and of weights.
UNITS = {"F": 1, "B": 2}
Span = tuple[str, int, int]  # a call, where it begins, where it ends


def spans_of(calls: list[list[str]], needed) -> list[list[Span]]:
    """Return when each stage makes each of its calls: as soon as it can."""
    ends: dict[tuple[str, int] | None, int] = {None: 0}
    rows: list[list[Span]] = [[] for _ in calls]
    while any(len(row) < len(made) for row, made in zip(rows, calls, strict=True)):
        for stage, row in enumerate(rows):
            call = calls[stage][len(row)] if len(row) < len(calls[stage]) else ""
            if call and (before := needed(call, stage, len(calls))) in ends:
                start = max(ends[before], row[-1][2] if row else 0)
                ends[call, stage] = start + UNITS[call[0]]
                row.append((call, start, ends[call, stage]))
    return rows


def idle_share(rows: list[list[Span]]) -> Fraction:
    """Return which part of the time a stage waits, on average."""
    total = max(row[-1][2] for row in rows) * len(rows)
    busy = sum(end - start for row in rows for _, start, end in row)
    return 1 - Fraction(busy, total)


def most_in_flight(row: list[Span]) -> int:
    """Count the micro-batches whose backward pass a stage still owes, at most."""
    counts, now = [], 0
    for call, _, _ in row:
        now += 1 if call[0] == "F" else -1
        counts.append(now)
    return max(counts)


def draw_rows(axes: Axes, rows: list[list[Span]], title: str) -> None:
    """Draw the stages below each other, each call as a box with its micro-batch."""
    total = max(row[-1][2] for row in rows)
    for stage, row in enumerate(rows):
        axes.broken_barh([(0, total)], (stage + 0.08, 0.84), color=IDLE, lw=0)
        for call, start, end in row:
            colour, ink = LOOK[call[0]]
            box = {"facecolor": colour, "edgecolor": "white", "linewidth": 1.2}
            axes.broken_barh([(start, end - start)], (stage + 0.08, 0.84), **box)
            middle = (start + end) / 2
            axes.text(
                middle, stage + 0.52, call[1:], ha="center", va="center", color=ink
            )
        axes.text(-0.01 * total, stage + 0.5, f"stage {stage}", ha="right", va="center")
    axes.set_title(title, loc="left", weight="bold", pad=4)
    axes.set(xlim=(0, total), ylim=(len(rows), 0), yticks=[], xticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)


def main() -> None:
    """Work out the three timelines, check them, draw them."""
    out = picture_parser("Draw who is idle when.").parse_args().out
    timeline = chapter_module("08_pipeline_parallel/call_timeline.py")
    schedules = chapter_module("08_pipeline_parallel/schedules.py")
    ways = [
        ("one batch, two stages", schedules.gpipe, 2, 1),
        ("GPipe: 8 micro-batches, four stages", schedules.gpipe, 4, 8),
        ("1F1B", schedules.one_f_one_b, 4, 8),
    ]
    figure, panels = new_picture(6.2, rows=3, gridspec_kw={"height_ratios": [2, 4, 4]})
    told = []
    for axes, (name, schedule, p, m) in zip(panels, ways, strict=True):
        rows = spans_of(timeline.calls_of(schedule, p, m), timeline.needed)
        idle, flying = idle_share(rows), [most_in_flight(row) for row in rows]
        if idle != Fraction(p - 1, m + p - 1):
            raise RuntimeError(f"{name}: idle {idle}")
        in_flight = ", ".join(map(str, flying))
        title = (
            f"{name}: idle {float(idle):.0%} of the time; in flight at most {in_flight}"
        )
        draw_rows(axes, rows, title)
        told.append(f"{float(idle):.0%}")
    panels[-1].set_xlabel("time; the number in a box is that of the micro-batch")
    names = {"forward": LOOK["F"][0], "backward": LOOK["B"][0], "idle": IDLE}
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in names.items()],
        loc="upper right",
        ncols=3,
        frameon=False,
    )
    figure.subplots_adjust(left=0.075, right=0.99, top=0.92, bottom=0.05, hspace=0.3)
    save_picture(figure, out, "08_pipeline.png")
    plt.close(figure)
    print(
        f"check: idle {', '.join(told)}, (p - 1) / (m + p - 1); wrote 08_pipeline.png"
    )


if __name__ == "__main__":
    main()
