"""Draw what rank 0 of four keeps, and which tokens it sees, in each way to split a run.

Run: python assets/draw_09_ways.py
Expect: 09_ways.png, and a `check:` that the marked areas are the bytes by formula.
"""

from collections.abc import Callable, Iterator
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from pictures import chapter_module, new_drawing, picture_parser, save_picture

paper = chapter_module("05_deepspeed_zero/memory/paper.py")
MINE, INK, LINE = "#0072B2", "#222222", "#999999"
SMALL: dict[str, Any] = {"fontsize": 9, "color": INK}  # the heads of columns
RANKS, LAYERS, BILLIONS = 4, 4, 7
# Bytes for each parameter: weights and gradients in bf16, Adam's state in fp32.
KINDS = {"W": 2, "G": 2, "optimizer state": 12}
BYTE, GAP, ROW = 0.073, 0.06, 0.21  # inches: a byte's width, between kinds, a layer
BATCH = (1.52, 0.72)  # where the batch begins, and its width
Box = tuple[float, float, float, float]  # left, top, width, height, as parts of a cell

ALL: list[Box] = [(0, 0, 1, 1)]
STRIP: list[Box] = [(0, 0, 1, 1 / RANKS)]  # FSDP: a quarter of each tensor's rows
SLICE: list[Box] = [(0, 0, 1 / RANKS, 1)]  # tensor: a quarter of its columns
# Expert: the upper half of a layer is attention, the lower half are the experts.
EXPERT: list[Box] = [(0, 0, 1, 0.5), (0, 0.5, 1 / RANKS, 0.5)]


def zero(stage: int) -> Callable[[str, int], list[Box]]:
    """Return what a stage of ZeRO keeps of a kind: the last kinds are sharded first."""
    sharded = list(KINDS)[len(KINDS) - stage :]
    return lambda kind, _: STRIP if kind in sharded else ALL


# For each way: its name, what it keeps of a kind in a layer, which parts of a sequence
# it sees, and what it sends.
WAYS = {
    "data parallel (DDP)": (zero(0), "sample", "gradients"),
    "ZeRO-1": (zero(1), "sample", "gradients, new weights"),
    "ZeRO-2": (zero(2), "sample", "gradients often, weights"),
    "FSDP, ZeRO-3": (zero(3), "sample", "weights, gradients"),
    "tensor": (lambda *_: SLICE, "all", "activations in layers"),
    "pipeline": (lambda _, i: ALL * (i == 0), "all", "activations between layers"),
    "context": (lambda *_: ALL, "tokens", "keys, values, gradients"),
    "expert": (lambda *_: EXPERT, "sample", "tokens, gradients"),
}
# Into how many parts activations are divided. A tensor rank keeps the inputs of its
# matrices whole; a pipeline's first rank has a micro-batch in flight for each stage.
PARTS_OF_A = {"tensor": 3, "context": 4}
SEEN: dict[str, Callable[[int], list[Box]]] = {
    "sample": lambda i: ALL * (i == 0),
    "all": lambda i: ALL,
    "tokens": lambda i: SLICE,
}


def draw_cell(axes: Axes, box: Box, parts: list[Box]) -> float:
    """Draw a cell, and mark the parts of it that rank 0 has; return their area."""
    left, top, width, height = box
    for x, y, w, h in parts:
        corner = (left + x * width, top - (y + h) * height)
        axes.add_patch(plt.Rectangle(corner, w * width, h * height, fc=MINE, lw=0))
    corner = (left, top - height)
    axes.add_patch(plt.Rectangle(corner, width, height, fill=False, ec=LINE, lw=0.9))
    return sum(w * h for *_, w, h in parts)


def draw_way(axes: Axes, left: float, top: float, name: str) -> float:
    """Draw one way; return the bytes for each parameter that rank 0 keeps."""
    keeps, sees, sends = WAYS[name]
    axes.text(left, top + 0.34, name, weight="bold", color=INK)
    kept, x = 0.0, left
    for kind, count in KINDS.items():
        axes.text(x + count * BYTE / 2, top + 0.07, kind, ha="center", **SMALL)
        for i in range(LAYERS):
            box = (x, top - i * ROW, count * BYTE, ROW)
            kept += count * draw_cell(axes, box, keeps(kind, i)) / LAYERS
        x += count * BYTE + GAP
    begin, width = left + BATCH[0], BATCH[1]
    axes.text(begin + width / 2, top + 0.07, "batch", ha="center", **SMALL)
    for i in range(RANKS):
        draw_cell(axes, (begin, top - i * ROW, width, ROW), SEEN[sees](i))
    bottom = top - LAYERS * ROW
    activations = f"A/{PARTS_OF_A[name]}" if name in PARTS_OF_A else "A"
    text = f"{kept * BILLIONS:g} GB + {activations}"
    axes.text(left, bottom - 0.24, text, weight="bold", color=INK)
    axes.text(left, bottom - 0.46, f"sends {sends}", color=INK, fontsize=10)
    return kept


def draw_ways() -> tuple[plt.Figure, list[float]]:
    """Lay out two rows of four ways; return what each keeps, in bytes a parameter."""
    figure, axes = new_drawing(4.7, (0, 10), (0, 4.7))
    places = ((0.15 + 2.5 * (i % 4), 4.15 - 2.1 * (i // 4)) for i in range(len(WAYS)))
    kept = [draw_way(axes, *at, name) for at, name in zip(places, WAYS, strict=True)]
    for y, text in (
        (
            0.32,
            "7 billion parameters, 4 ranks; blue: on rank 0. W: weights, G: gradients.",
        ),
        (0.08, "Rows: 4 layers; in the batch 4 sequences, their tokens side by side."),
    ):
        axes.text(0.15, y, text, color=INK, fontsize=10)
    return figure, kept


def expected() -> Iterator[float]:
    """Yield what each way keeps, by formula."""
    for stage in range(4):
        yield sum(paper.paper_bytes(1, stage, RANKS, "bf16").values())
    whole = sum(KINDS.values())
    yield from (whole / RANKS, whole / RANKS, whole, whole / 2 + whole / 2 / RANKS)


def main() -> None:
    """Draw, and compare the marked areas with the bytes by formula."""
    out = picture_parser("Draw the ways to split a run.").parse_args().out
    figure, kept = draw_ways()
    if kept != list(expected()):
        raise RuntimeError(f"the picture would lie: {kept}")
    save_picture(figure, out, "09_ways.png")
    told = ", ".join(f"{one:g}" for one in kept)
    print(f"check: {told} bytes a parameter on {RANKS} ranks; wrote 09_ways.png")


if __name__ == "__main__":
    main()
