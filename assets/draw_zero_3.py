"""Draw one step of stage 3 by hand: what is sent, computed and whole, and when.

Run: python assets/draw_zero_3.py
Expect: 05_zero_3.png from 05_zero_3.json, which record_zero_3.py has written, and a
    `check:` of what is seen in it.
"""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from pictures import new_drawing, numbers_from, picture_parser, save_picture

# Weights are blue and gradients orange, as in 05_stages.png (Okabe and Ito).
WEIGHTS, GRADIENTS, COMPUTED, INK = "#0072B2", "#E69F00", "#D5D5D5", "#222222"
# The order is recorded. How long a box is, is not: a backward pass takes about twice as
# long as a forward pass, and messages are meant to take a little less.
UNITS = {"gather": 0.8, "reduce-scatter": 0.8, "forward": 1.0, "backward": 2.0}
SENT = {"gathered": "gather", "reduced": "reduce-scatter"}
Span = tuple[Any, float, float]  # a module's number, where it begins, where it ends
# In points; a phone shows the picture's 10 inches on two and a half.
LETTERS: dict[str, Any] = {"fontsize": 15, "va": "center"}
GAP = 0.03  # at both ends of a box, to tell it from the next


def spans_of(events: list[Any]) -> dict[str, list[Span]]:
    """Lay out events in their order; one message is sent after the other.

    Returns:
        The spans of each of UNITS, and those for which a module's weights are "whole".
    """
    spans: dict[str, list[Span]] = {kind: [] for kind in (*UNITS, "whole")}
    now = link_is_free = 0.0
    whole_since: dict[int, float] = {}
    for event, module in events:
        if event in SENT.values():
            start = max(now, link_is_free)
            link_is_free = start + UNITS[event]
            spans[event].append((module, start, link_is_free))
            if event == "gather":
                whole_since[module] = now  # its memory is allocated first
        elif event in SENT:
            sent = [end for one, _, end in spans[SENT[event]] if one == module]
            now = max(now, sent[-1])
        elif event in UNITS:
            spans[event].append((module, now, now + UNITS[event]))
            now += UNITS[event]
        elif event == "free":
            spans["whole"].append((module, whole_since.pop(module), now))
        elif event not in ("forward ends", "backward ends"):
            raise ValueError(event)
    return spans


def most_whole(spans: dict[str, list[Span]]) -> int:
    """Count the modules whose weights are whole at the same time, at most."""
    starts = [start for _, start, _ in spans["whole"]]
    return max(sum(a <= t < b for _, a, b in spans["whole"]) for t in starts)


def hidden(spans: dict[str, list[Span]], kind: str) -> int:
    """Count the messages of a kind that are sent while a module computes."""
    computed = spans["forward"] + spans["backward"]
    return sum(
        any(a <= start and end <= b + 1e-9 for _, a, b in computed)
        for _, start, end in spans[kind]
    )


def draw_lane(axes: Axes, spans: list[Span], y: float, look: dict[str, Any]) -> None:
    """Draw spans in a row, each with its module's number."""
    for module, start, end in spans:
        place, width = (start + GAP, y - 0.4), end - start - 2 * GAP
        axes.add_patch(plt.Rectangle(place, width, 0.8, **look))
        ink = "white" if look["fc"] == WEIGHTS else INK
        where = (start + end) / 2, y - 0.03
        axes.text(*where, str(module), ha="center", color=ink, **LETTERS)


def draw_step(spans: dict[str, list[Span]]) -> plt.Figure:
    """Draw the messages, the computation, and the whole weights below each other."""
    modules = list(dict.fromkeys(module for module, *_ in spans["gather"]))
    end = max(end for _, _, end in spans["reduce-scatter"])
    bottom = -3.6 - len(modules)
    figure, axes = new_drawing(4.6, (-3.4, end + 0.15), (bottom, 0.65))
    for kind in ("forward", "backward"):
        middle = (spans[kind][0][1] + spans[kind][-1][2]) / 2
        axes.text(middle, 0.1, kind, ha="center", weight="bold", color=INK, **LETTERS)
    for y, lane, kinds, colour in (
        (-0.8, "all-gather", ["gather"], WEIGHTS),
        (-1.8, "computation", ["forward", "backward"], COMPUTED),
        (-2.8, "reduce-scatter", ["reduce-scatter"], GRADIENTS),
    ):
        axes.text(-0.3, y, lane, ha="right", color=INK, **LETTERS)
        for kind in kinds:
            draw_lane(axes, spans[kind], y, {"fc": colour, "ec": "none"})
    middle = -3.6 - len(modules) / 2
    lane = "whole weights\nin memory"
    axes.text(-0.3, middle, lane, ha="right", color=INK, **LETTERS)
    look = {"fc": WEIGHTS + "40", "ec": WEIGHTS}
    for lane, module in enumerate(modules):
        own = [span for span in spans["whole"] if span[0] == module]
        draw_lane(axes, own, -4.1 - lane, look)
    return figure


def main() -> None:
    """Read what was recorded, check it, draw it."""
    parser = picture_parser("Draw a step of stage 3.", "05_zero_3.json")
    args = parser.parse_args()
    with numbers_from("record_zero_3.py"):
        first, *others = args.numbers
        spans = spans_of(first)
        figure = draw_step(spans)
    most, gathers = most_whole(spans), len(spans["gather"])
    early = hidden(spans, "gather")
    if any(other != first for other in others) or (most, early) != (2, gathers - 2):
        raise RuntimeError(f"the picture would lie: {most}, {early} of {gathers}")
    save_picture(figure, args.out, "05_zero_3.png")
    print(
        f"check: {early} of {gathers} gathers while a module computes, {most} modules "
        "whole at most; wrote 05_zero_3.png"
    )


if __name__ == "__main__":
    main()
