"""Draw one matrix product on two ranks, cut by columns and by rows, both ways.

Run: python assets/draw_matrix_parallel.py
Expect: 07_matrix.png, and a `check:` that its numbers are those of the whole product.
"""

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

from pictures import new_drawing, picture_parser, save_picture

# One colour for each rank, which people with any colour vision tell apart (Okabe and
# Ito); what both ranks hold is grey, and the result of an all-reduce green.
RANKS, BOTH, SUM = ["#0072B2", "#E69F00"], "#888888", "#009E73"
INK = "#222222"
CELL, GAP = 0.62, 0.36  # the gap parts the terms of a sum
# The numbers of 07_tensor_parallel/matrix.py: digits tell where a number comes from.
X, A = torch.tensor([[1.0, 10.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
GRAD_Y = torch.tensor([[1.0, 100.0]])


def draw_matrix(
    axes: Axes, left: float, middle: float, matrix: Tensor, colours: list[list[str]]
) -> float:
    """Draw a matrix cell by cell from its left edge; return its right edge."""
    top = middle + len(matrix) * CELL / 2
    for i, row in enumerate(matrix.tolist()):
        for j, number in enumerate(row):
            x, y, colour = left + j * CELL, top - (i + 1) * CELL, colours[i][j]
            axes.add_patch(
                plt.Rectangle((x, y), CELL, CELL, facecolor=colour + "40", ec=colour)
            )
            middle_of = (x + CELL / 2, y + CELL / 2)
            axes.text(*middle_of, f"{number:g}", ha="center", va="center", color=INK)
    return left + matrix.shape[1] * CELL


def draw_sign(axes: Axes, x: float, y: float, sign: str) -> float:
    """Write a sign between two matrices; return where the next one begins."""
    axes.text(x + 0.2, y, sign, ha="center", va="center", color=INK)
    return x + 0.4


def draw_product(
    axes: Axes, left: float, y: float, vector: Tensor, matrix: Tensor, is_sum: bool
) -> Tensor:
    """Draw vector times matrix: the results side by side, or terms and their sum.

    With `is_sum` each rank has an element of the vector and a row of the matrix, else
    all of the vector and a column. Returns the result that is drawn.
    """
    by_column = [RANKS]
    by_row = [[colour] * 2 for colour in RANKS]
    parts = by_column if is_sum else [[BOTH] * 2]
    x = draw_sign(axes, draw_matrix(axes, left, y, vector, parts), y, r"$\times$")
    parts = by_row if is_sum else by_column * 2
    x = draw_sign(axes, draw_matrix(axes, x, y, matrix, parts), y, "=")
    if not is_sum:
        result = torch.cat([vector @ matrix[:, [rank]] for rank in range(2)], dim=1)
        draw_matrix(axes, x, y, result, by_column)
        return result
    terms = torch.cat([vector[:, [rank]] @ matrix[[rank]] for rank in range(2)])
    for row, sign in ((0, 1), (1, -1)):
        shifted = y + sign * (CELL + GAP) / 2
        right = draw_matrix(axes, x, shifted, terms[[row]], by_row[row : row + 1])
    axes.text(x + CELL, y, "+", ha="center", va="center", color=INK)
    x = right
    arrow = {"arrowstyle": "->", "color": INK}
    axes.annotate("", (x + 1.05, y), (x + 0.08, y), arrowprops=arrow)
    axes.text(x + 0.56, y + 0.2, "all-reduce", ha="center", color=INK, fontsize=9)
    result = terms.sum(dim=0, keepdim=True)
    draw_matrix(axes, x + 1.12, y, result, [[SUM] * 2])
    return result


def draw_cuts() -> tuple[plt.Figure, list[Tensor]]:
    """Lay out a row for each cut, forward and backward side by side."""
    figure, axes = new_drawing(3.5, (-0.1, 16.0), (-0.9, 4.7))
    forward, backward, results = 1.5, 9.05, []
    for left, text in ((forward, "forward: x A"), (backward, "backward: grad y Aᵀ")):
        axes.text(left, 4.3, text, color=INK, weight="bold")
    for y, text, is_sum in ((3.1, "columns", False), (1.1, "rows", True)):
        axes.text(0, y, f"A cut by\n{text}", va="center", color=INK, weight="bold")
        results += [
            draw_product(axes, forward, y, X, A, is_sum),
            draw_product(axes, backward, y, GRAD_Y, A.T, not is_sum),
        ]
    for left, text, colour in (
        (1.5, "rank 0", RANKS[0]),
        (3.7, "rank 1", RANKS[1]),
        (5.9, "both ranks", BOTH),
        (9.05, "both, after the all-reduce", SUM),
    ):
        axes.add_patch(
            plt.Rectangle((left, -0.7), 0.4, 0.35, facecolor=colour + "40", ec=colour)
        )
        axes.text(left + 0.55, -0.53, text, va="center", color=INK)
    return figure, results


def main() -> None:
    """Draw, and compare each result with the whole product."""
    out = picture_parser("Draw a product on two ranks.").parse_args().out
    figure, results = draw_cuts()
    expected = [X @ A, GRAD_Y @ A.T] * 2
    if not all(map(torch.equal, results, expected)):
        raise RuntimeError(f"the picture would lie: {results}")
    save_picture(figure, out, "07_matrix.png")
    print(
        f"check: {len(results)} products are those of one process; wrote 07_matrix.png"
    )


if __name__ == "__main__":
    main()
