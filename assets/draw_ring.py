"""Draw the ring all-reduce step by step, as three ranks have carried it out.

Run: python assets/draw_ring.py
Expect: 01_ring.png from 01_ring.json, which record_ring.py has written, and a `check:`
    that the drawn steps end in the sum.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from pictures import new_drawing, numbers_from, picture_parser, save_picture

RANKS = 3
BOX = 1.4  # the width of a chunk
# Two colours that people with any colour vision tell apart (Okabe and Ito), and ink.
PARTIAL, FINISHED, INK = "#E69F00", "#009E73", "#222222"
# (sender, chunk, value): a message of one number.
Message = tuple[int, int, int]


def replay(steps: list[list[Message]]) -> list[list[list[int]]]:
    """Return what each rank holds before the first step and after each: [row][rank]."""
    # Rank r has put 2**r everywhere, so the bits of a sum tell whose numbers are in it.
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
    """Spell out whose numbers a sum holds: 5 is r0+r2."""
    return "+".join(f"r{rank}" for rank in range(RANKS) if value >> rank & 1)


def draw_steps(
    steps: list[list[Message]], rows: list[list[list[int]]], folder: Path
) -> None:
    """Draw a row for each step, a box for each rank, an arrow for each message."""
    figure, axes = new_drawing(6.6, (-3.0, 13.7), (-len(rows) * 2 + 1.4, 2.1))
    titles = ["start"]
    for number in range(len(steps)):
        phase = "reduce-scatter" if number < RANKS - 1 else "all-gather"
        titles.append(f"{phase}\nstep {number % (RANKS - 1) + 1}")

    def corner(rank: int, row: int, chunk: int) -> tuple[float, float]:
        return 4.7 * rank + BOX * chunk, -2.0 * row

    for row, holds in enumerate(rows):
        axes.text(-2.9, -2.0 * row, titles[row], va="center", color=INK)
        for rank in range(RANKS):
            if row == 0:
                x, _ = corner(rank, 0, 1)
                look = {"ha": "center", "weight": "bold", "color": INK}
                axes.text(x + BOX / 2, 0.75, f"rank {rank}", **look)
            for chunk, value in enumerate(holds[rank]):
                x, y = corner(rank, row, chunk)
                done = value == 2**RANKS - 1
                new = row > 0 and value != rows[row - 1][rank][chunk]
                shade = FINISHED if done else PARTIAL if value & (value - 1) else INK
                axes.add_patch(
                    plt.Rectangle(
                        (x, y - 0.38),
                        BOX,
                        0.76,
                        fc=shade + ("60" if new else "18"),
                        ec=INK,
                    )
                )
                look = {"ha": "center", "va": "center", "color": INK, "size": 10}
                axes.text(x + BOX / 2, y, members(value), **look)
    for row, messages in enumerate(steps):
        for sender, chunk, _ in messages:
            x, y = corner(sender, row, chunk)
            to_x, to_y = corner((sender + 1) % RANKS, row + 1, chunk)
            start, end = (x + BOX / 2, y - 0.4), (to_x + BOX / 2, to_y + 0.4)
            style = {"arrowstyle": "-|>", "color": "#0072B2", "lw": 1.4}
            axes.annotate("", end, start, arrowprops=style)
    axes.text(
        -2.9,
        1.6,
        "A box is a chunk. r0+r1 is the sum of rank 0's and rank 1's values. "
        "Strong colour: just arrived. Green: complete.",
        color=INK,
    )
    save_picture(figure, folder, "01_ring.png")


def main() -> None:
    """Replay what the ranks sent, compare with what they ended with, draw it."""
    args = picture_parser("Draw the steps of the ring.", "01_ring.json").parse_args()
    with numbers_from("record_ring.py"):
        # A rank sends once in each step, in order.
        messages = [
            [(rank, chunk, value) for chunk, value in one["sent"]]
            for rank, one in enumerate(args.numbers)
        ]
        steps = [list(step) for step in zip(*messages, strict=True)]
        results = [one["after"] for one in args.numbers]
        rows = replay(steps)
    if rows[-1] != results or results != [[2**RANKS - 1] * RANKS] * RANKS:
        raise RuntimeError(f"the picture would lie: {rows[-1]}, {results}")
    draw_steps(steps, rows, args.out)
    count = sum(len(step) for step in steps)
    print(f"check: {count} recorded messages add up to the sum; wrote 01_ring.png")


if __name__ == "__main__":
    main()
