"""Draw how far each way of training is from one process, and what each takes.

Run: python assets/draw_one_result.py
Expect: 09_one_result.png and 09_sent_and_kept.png from 09_one_result.json, which
    `one_result.py --json` has written, and a `check:` of the largest distance.
"""

from typing import Any

import matplotlib.pyplot as plt

from pictures import new_picture, numbers_from, picture_parser, save_picture

LIMIT = 1e-5
RIGHT, WRONG = "#0072B2", "#D55E00"
# Colours that people with any colour vision tell apart (Okabe and Ito), by the first
# words of a way's name; what is none of these is data parallel.
FAMILIES = {
    ("ZeRO", "DeepSpeed", "FSDP2", "HSDP"): ("sharded", "#009E73"),
    ("tensor",): ("tensor parallel", "#D55E00"),
    ("GPipe", "1F1B"): ("pipeline", "#CC79A7"),
    ("context",): ("context parallel", "#222222"),
    ("",): ("data parallel", "#0072B2"),
}
# What stands beside a point of several ways, by the first of them; and how far from the
# point, where others are near.
LABELS = {
    "naive": "naive, flat, buckets, DDP\non 2 ranks; DeepSpeed, ZeRO 0",
    "GPipe": "GPipe and 1F1B",
    "DeepSpeed, ZeRO 1": "DeepSpeed, ZeRO 1 and 2",
    "FSDP2 x tensor": "FSDP2 x tensor, 4 ranks",
    "HSDP, 2 x 2": "HSDP, 4 ranks",
}
BESIDE = {
    "naive": (9, -9),
    "ZeRO 3 by hand": (-9, -1),
    "FSDP2": (9, -8),
    "ZeRO 2 by hand": (-9, -4),
    "ZeRO 1 by hand": (3, 9),
    "DeepSpeed, ZeRO 1": (-20, -18),
}


def family_of(way: str) -> tuple[str, str]:
    """Return the label and the colour of a way's family."""
    return next(f for starts, f in FAMILIES.items() if way.startswith(starts))


def rows_of(record: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return the rows of the picture: a label, and a (loss, weight) for each way in it.

    One process has no distance from itself, and so no place here.
    """
    ways = [
        way["distances"] for way in record["ways"].values() if any(way["distances"])
    ]
    right = next(iter(record["usual_eps"]))
    return {
        f"eps 1e-3: {len(ways)} ways": ways,
        **{
            f"eps 1e-3, {name}": [w["distances"]] for name, w in record["wrong"].items()
        },
        f"eps 1e-8: {right}": [record["usual_eps"][right]],
        **{
            f"eps 1e-8, {name}": [record["usual_eps"][name]] for name in record["wrong"]
        },
    }


def draw_distances(record: dict[str, Any]) -> plt.Figure:
    """Draw a row of losses and weights for what is right, and for each mistake."""
    figure, axes = new_picture(4.6)
    rows = rows_of(record)
    for row, (label, distances) in enumerate(rows.items()):
        colour = WRONG if "," in label else RIGHT
        for loss, weight in distances:
            axes.plot(loss, row, "o", mec=colour, mfc=colour, markersize=9)
            axes.plot(weight, row, "D", mec=colour, mfc="none", markersize=9)
    for marker, fill, label in (("o", "#555555", "a loss"), ("D", "none", "a weight")):
        axes.plot([], [], marker, mec="#555555", mfc=fill, label=label, markersize=9)
    axes.set_xscale("log")
    axes.set_xlim(3e-8, 1)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.axvline(LIMIT, color="#888888", linestyle="--", linewidth=1)
    axes.text(LIMIT * 1.2, 0.15, "limit of the check", color="#555555")
    axes.axhline(len(rows) / 2 - 0.5, color="#888888", linewidth=1)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_xlabel("largest distance from one process")
    axes.legend(loc="upper right")
    figure.tight_layout()
    return figure


def places_of(ways: dict[str, Any]) -> dict[tuple[float, float], str]:
    """Return the ways in the plane, in kB; of those near each other the first.

    With experts the model has other weights than all others: they have no place here.
    """
    places: dict[tuple[float, float], str] = {}
    for name, way in ways.items():
        kept, sent = way["kept"] / 1e3, way["sent"] / 1e3
        is_new = all(abs(k - kept) > 5 or abs(s - sent) > 15 for k, s in places)
        if is_new and not name.startswith("experts"):
            places[kept, sent] = name
    return places


def draw_bytes(record: dict[str, Any]) -> plt.Figure:
    """Draw a point for each way: what a rank keeps, and what it sends in a step."""
    figure, axes = new_picture(6)
    for place, name in places_of(record["ways"]).items():
        family, colour = family_of(name)
        axes.plot(*place, "o", color=colour, markersize=9, label=family)
        beside = BESIDE.get(name, (9, -4))
        side = {"ha": "left" if beside[0] > 0 else "right", "fontsize": 10}
        if name == "DeepSpeed, ZeRO 1":
            side["ha"] = "left"
        text = LABELS.get(name, name)
        axes.annotate(text, place, beside, textcoords="offset points", **side)
    handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    axes.legend(handles.values(), handles)
    axes.set_xlim(0, 2600)
    axes.set_xlabel("kept by a rank between backward and optimizer.step(), kB")
    axes.set_ylabel("sent by a rank in a step over gloo, kB")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def main() -> None:
    """Read the file, draw it twice, and say how far apart the ways are."""
    numbers = "09_one_result.json"
    args = picture_parser("Draw what one_result.py measured.", numbers).parse_args()
    with numbers_from("one_result.py"):
        apart = draw_distances(args.numbers)
        takes = draw_bytes(args.numbers)
        ways, wrong = (
            [max(way["distances"]) for way in args.numbers[kind].values()]
            for kind in ("ways", "wrong")
        )
    if not max(ways) <= LIMIT < min(wrong):
        raise RuntimeError(f"the ways are {max(ways)} apart, the wrong {min(wrong)}")
    save_picture(apart, args.out, "09_one_result.png")
    save_picture(takes, args.out, "09_sent_and_kept.png")
    told = f"{len(ways)} ways at most {max(ways):.0e} apart"
    print(f"check: {told}, {len(wrong)} mistakes at least {min(wrong):.0e}; 2 pictures")


if __name__ == "__main__":
    main()
