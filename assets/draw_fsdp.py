"""Draw one step of FSDP2: what is sent, computed and whole, and when.

Run: python assets/draw_fsdp.py
Expect: 06_fsdp.png from 06_fsdp.json, which record_fsdp.py has written, and a `check:`
    of what is seen in it.
"""

from typing import Any

from draw_zero_3 import UNITS, Span, draw_step, hidden, most_whole
from pictures import numbers_from, picture_parser, save_picture

ROOT = "R"


def spans_of(events: list[Any]) -> dict[str, list[Span]]:
    """Lay out events as a GPU's streams may run them; one message after the other.

    The host puts all work of a pass into the streams at once: an event begins as soon
    as what was put into its stream before, and what it waits for, is done. The host
    begins backward when the loss is there.

    Returns:
        The spans of each of UNITS, and those for which a unit's weights are "whole".
    """
    spans: dict[str, list[Span]] = {kind: [] for kind in (*UNITS, "whole")}
    link_is_free = computed = held = 0.0
    gathered: dict[str, float] = {}
    copied: dict[str, float] = {}
    whole_since: dict[str, float] = {}
    for event, unit in events:
        if event == "gather":
            whole_since[unit] = start = max(link_is_free, held)
            gathered[unit] = link_is_free = start + UNITS[event]
            spans[event].append((unit, start, link_is_free))
        elif event == "reduce-scatter":
            start = max(link_is_free, computed)
            link_is_free = start + UNITS[event]
            spans[event].append((unit, start, link_is_free))
        elif event == "copy out":
            copied[unit] = computed = max(computed, gathered[unit])
        elif event == "hold":
            held = copied[unit]
        elif event == "loss":
            held = computed
        elif event == "free":
            spans["whole"].append((unit, whole_since.pop(unit), computed))
        elif event in UNITS:
            # The root's embeddings, and its norm and head, are half a block each.
            length = UNITS[event] / (2 if unit == ROOT else 1)
            spans[event].append((unit, computed, computed + length))
            computed += length
        else:
            raise ValueError(event)
    return spans


def main() -> None:
    """Read what was recorded, check it, draw it."""
    parser = picture_parser("Draw a step of FSDP2.", "06_fsdp.json")
    args = parser.parse_args()
    with numbers_from("record_fsdp.py"):
        first, *others = args.numbers
        spans = spans_of(first)
        figure = draw_step(spans)
    gathers, early, most = spans["gather"], hidden(spans, "gather"), most_whole(spans)
    root = [unit for unit, *_ in gathers].count(ROOT)
    if any(other != first for other in others) or (root, most) != (1, 4):
        raise RuntimeError(f"the picture would lie: {root}, {early}, {most}")
    save_picture(figure, args.out, "06_fsdp.png")
    print(
        f"check: {early} of {len(gathers)} gathers while a unit computes, the root's "
        f"once, {most} units whole at most; wrote 06_fsdp.png"
    )


if __name__ == "__main__":
    main()
