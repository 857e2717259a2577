"""Draw which rank computes which part of causal attention, in two orders of tokens.

Run: python assets/draw_09_ring_attention.py
Expect: 09_ring_attention.png, from the positions that the chapter's own code gives each
    rank, and a `check:` of what the slowest rank computes next to the mean.
"""

from fractions import Fraction

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Polygon

from pictures import chapter_module, new_picture, picture_parser, save_picture

# Okabe and Ito's colours, which people with any colour vision tell apart, and the ink
# that is legible on each.
RANKS = ["#0072B2", "#E69F00", "#56B4E9", "#D55E00"]
INKS = ["white", "#222222", "#222222", "white"]
N, CHUNKS = 4, 8


def owners_of(shards: list[torch.Tensor]) -> list[int]:
    """Return the rank that holds each position."""
    owners = {int(p): rank for rank, shard in enumerate(shards) for p in shard}
    return [owners[position] for position in range(CHUNKS)]


def work_of(owners: list[int]) -> list[Fraction]:
    """Count the blocks that each rank computes; those on the diagonal are halves."""
    work = [Fraction(0)] * N
    for query, owner in enumerate(owners):
        work[owner] += query + Fraction(1, 2)
    return work


def draw_matrix(axes: Axes, owners: list[int], title: str) -> None:
    """Draw queries downwards and keys to the right, a block for each pair of chunks."""
    for query, rank in enumerate(owners):
        for key in range(query + 1):
            corners = [(key, query), (key, query + 1), (key + 1, query + 1)]
            if key < query:
                corners.append((key + 1, query))
            look = {"facecolor": RANKS[rank], "edgecolor": "white", "linewidth": 1.5}
            axes.add_patch(Polygon(corners, **look))
            step = (rank - owners[key]) % N
            x, y = (
                (key + 0.5, query + 0.53) if key < query else (key + 0.3, query + 0.72)
            )
            axes.text(x, y, str(step), ha="center", va="center", color=INKS[rank])
    names = [f"rank {rank}" for rank in owners]
    axes.set_yticks([y + 0.5 for y in range(CHUNKS)], names)
    axes.set_xticks([x + 0.5 for x in range(CHUNKS)], map(str, owners))
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set(xlim=(0, CHUNKS), ylim=(CHUNKS, 0), aspect="equal")
    axes.set(xlabel="keys, by the rank that holds them")
    axes.set_title(title, loc="left", weight="bold", pad=10)


def main() -> None:
    """Draw both orders, and compare what the ranks compute."""
    out = picture_parser("Draw who computes what.").parse_args().out
    zigzag = chapter_module("09_one_mesh/context/ring_attention.py").zigzag(CHUNKS, N)
    contiguous = list(torch.arange(CHUNKS).tensor_split(N))
    figure, panels = new_picture(5.6, columns=2)
    found = []
    for axes, name, shards in zip(
        panels, ("contiguous", "zigzag"), (contiguous, zigzag), strict=True
    ):
        work = work_of(owners_of(shards))
        found.append(max(work) / (sum(work) / N))
        blocks = ", ".join(map(str, work))
        draw_matrix(axes, owners_of(shards), f"{name}: ranks compute {blocks} blocks")
    panels[0].set_ylabel("queries, in the order of the text")
    if found != [2 - Fraction(1, N), 1]:
        raise RuntimeError(f"the picture would lie: {found}")
    figure.legend(
        handles=[Patch(color=c, label=f"rank {r}") for r, c in enumerate(RANKS)],
        title="computed by (the number in a block: in which step of the ring)",
        loc="lower center",
        ncols=N,
        frameon=False,
    )
    figure.subplots_adjust(left=0.1, right=0.99, top=0.92, bottom=0.21, wspace=0.16)
    save_picture(figure, out, "09_ring_attention.png")
    plt.close(figure)
    shown = " and ".join(f"{float(ratio):g}" for ratio in found)
    print(f"check: the slowest by the mean is {shown}; wrote 09_ring_attention.png")


if __name__ == "__main__":
    main()
