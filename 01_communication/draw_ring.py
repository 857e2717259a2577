"""Draw the ring all-reduce step by step, as three ranks really carry it out.

Run: python 01_communication/draw_ring.py
Needs: matplotlib. Starts three ranks of its own, on the CPU with gloo.
Expect: assets/01_ring.png, and a `check:` that the drawn steps end in the sum.
Before: 01_communication/ring_all_reduce.py, whose sends are recorded here.
Next: 01_communication/README.md, which shows the picture.
"""

import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ring_all_reduce import ring_all_reduce

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
from pictures import new_drawing, picture_parser, save_picture

RANKS = 3
# Two colours that people with any colour vision tell apart (Okabe and Ito), and ink.
PARTIAL, FINISHED, INK = "#E69F00", "#009E73", "#222222"
# (sender, chunk, value): a message of one number.
Message = tuple[int, int, int]


def record(rank: int, folder: str) -> None:
    """Sum up a tensor with one element for each chunk; save what this rank sent.

    Rank r puts 2**r everywhere, so the bits of a sum tell whose numbers are in it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    store = dist.FileStore(f"{folder}/store", RANKS)
    limit = timedelta(seconds=30)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=limit
    )
    tensor = torch.full((RANKS,), 2**rank)
    sent: list[Message] = []

    def isend(piece: torch.Tensor, to: int) -> dist.Work | None:
        sent.append((rank, int(piece.storage_offset()), int(piece)))
        return dist.isend(piece, to)

    ring_all_reduce(tensor, isend)
    torch.save({"sent": sent, "result": tensor}, f"{folder}/{rank}")
    dist.destroy_process_group()


def replay(steps: list[list[Message]]) -> list[list[list[int]]]:
    """Return what each rank holds before the first step and after each: [row][rank]."""
    rows = [[[2**rank] * RANKS for rank in range(RANKS)]]
    for number, messages in enumerate(steps):
        holds = [list(row) for row in rows[-1]]
        for sender, chunk, value in messages:
            if rows[-1][sender][chunk] != value:
                raise RuntimeError(f"rank {sender} sent {value}, which it did not hold")
            receiver = (sender + 1) % RANKS
            adds = number < RANKS - 1
            holds[receiver][chunk] = value + (holds[receiver][chunk] if adds else 0)
        rows.append(holds)
    return rows


def members(value: int) -> str:
    """Spell out whose numbers a sum holds: 5 is 0+2."""
    return "+".join(str(rank) for rank in range(RANKS) if value >> rank & 1)


def draw_steps(
    steps: list[list[Message]], rows: list[list[list[int]]], folder: Path
) -> None:
    """Draw a row for each step, a box for each rank, an arrow for each message."""
    import matplotlib.pyplot as plt  # here, since the ranks have no use for it

    figure, axes = new_drawing(6.6, (-3.2, 12.6), (-len(rows) * 2 + 0.7, 1.3))
    titles = ["start"]
    for number in range(len(steps)):
        phase = "reduce-scatter" if number < RANKS - 1 else "all-gather"
        titles.append(f"{phase}\nstep {number % (RANKS - 1) + 1}")

    def corner(rank: int, row: int, chunk: int) -> tuple[float, float]:
        return 4.4 * rank + 1.2 * chunk, -2.0 * row

    for row, holds in enumerate(rows):
        axes.text(-3.0, -2.0 * row, titles[row], va="center", color=INK)
        for rank in range(RANKS):
            if row == 0:
                x, _ = corner(rank, 0, 1)
                axes.text(
                    x + 0.6, 0.75, f"rank {rank}", ha="center", weight="bold", color=INK
                )
            for chunk, value in enumerate(holds[rank]):
                x, y = corner(rank, row, chunk)
                done = value == 2**RANKS - 1
                new = row > 0 and value != rows[row - 1][rank][chunk]
                shade = FINISHED if done else PARTIAL if value & (value - 1) else INK
                axes.add_patch(
                    plt.Rectangle(
                        (x, y - 0.38),
                        1.2,
                        0.76,
                        fc=shade + ("60" if new else "18"),
                        ec=INK,
                    )
                )
                axes.text(
                    x + 0.6, y, members(value), ha="center", va="center", color=INK
                )
    for row, messages in enumerate(steps):
        for sender, chunk, _ in messages:
            x, y = corner(sender, row, chunk)
            to_x, to_y = corner((sender + 1) % RANKS, row + 1, chunk)
            start, end = (x + 0.6, y - 0.4), (to_x + 0.6, to_y + 0.4)
            style = {"arrowstyle": "-|>", "color": "#0072B2", "lw": 1.4}
            axes.annotate("", end, start, arrowprops=style)
    axes.text(
        4.4,
        -2.0 * len(rows) + 0.95,
        "A box is a chunk; the numbers in it say whose values its sum holds. "
        "Strong colour: just arrived. Green: complete.",
        ha="center",
        color=INK,
    )
    save_picture(figure, folder, "01_ring.png")


def main() -> None:
    """Run the ring on three processes, replay what they sent, draw it."""
    out = picture_parser("Draw the steps of the ring.").parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(record, (folder,), RANKS)
        traces = [torch.load(f"{folder}/{rank}") for rank in range(RANKS)]
    # A rank sends once in each step, in order.
    steps = [list(step) for step in zip(*(t["sent"] for t in traces), strict=True)]
    rows = replay(steps)
    results = [trace["result"].tolist() for trace in traces]
    if rows[-1] != results or results != [[2**RANKS - 1] * RANKS] * RANKS:
        raise RuntimeError(f"the picture would lie: {rows[-1]}, {results}")
    draw_steps(steps, rows, out)
    count = sum(len(step) for step in steps)
    print(f"check: {count} recorded messages add up to the sum; wrote 01_ring.png")


if __name__ == "__main__":
    main()
