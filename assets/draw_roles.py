"""Draw who holds what and who sends what to whom, for chapter 04.

Run: python assets/draw_roles.py
Expect: 04_roles.png, and a `check:` that the numbers in it are the model's.
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from pictures import chapter_module, new_drawing, picture_parser, save_picture

classifier = chapter_module("04_rpc_parameter_server/classifier.py")

# Colours that people with any colour vision tell apart (Okabe and Ito).
TRAINERS = ["#0072B2", "#E69F00"]
SERVER, MASTER = "#009E73", "#777777"
INK = "#222222"


def role_box(
    axes: Axes, middle: tuple[float, float], half: tuple[float, float], colour: str
) -> None:
    """Draw an empty box around its middle."""
    corner = (middle[0] - half[0], middle[1] - half[1])
    axes.add_patch(
        plt.Rectangle(
            corner, 2 * half[0], 2 * half[1], facecolor=colour + "30", ec=colour
        )
    )


def write(axes: Axes, x: float, y: float, text: str, bold: bool = False) -> None:
    """Write text around a point."""
    weight = "bold" if bold else "normal"
    axes.text(x, y, text, ha="center", va="center", color=INK, weight=weight)


def pointer(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], style: str = "->"
) -> None:
    """Draw an arrow from start to end; `<->` has two heads, dashes mean only once."""
    line = "--" if style == "-->" else "-"
    properties = {"arrowstyle": style.replace("-->", "->"), "color": INK, "ls": line}
    axes.annotate("", end, start, arrowprops=properties)


def draw_roles(numbers_in_table: int, numbers_in_dense: int) -> plt.Figure:
    """Lay out the server on the left, two trainers beside it, the master above."""
    figure, axes = new_drawing(4.6, (-0.1, 12.3), (-1.1, 5.3))
    role_box(axes, (1.7, 1.6), (1.6, 1.0), SERVER)
    write(axes, 1.7, 2.25, "parameter server", bold=True)
    write(
        axes,
        1.7,
        1.5,
        f"table: {classifier.ROWS:,} rows\nof {classifier.WIDTH} numbers\n",
    )
    write(axes, 1.7, 0.95, f"{numbers_in_table:,} in all")
    role_box(axes, (5.9, 4.6), (1.6, 0.5), MASTER)
    write(axes, 5.9, 4.75, "master", bold=True)
    write(axes, 5.9, 4.4, "starts the run, waits")
    for rank, y in enumerate([2.8, 0.4]):
        role_box(axes, (10.2, y), (1.9, 0.75), TRAINERS[rank])
        write(axes, 10.2, y + 0.35, f"trainer {rank}", bold=True)
        write(axes, 10.2, y - 0.2, f"dense part: {numbers_in_dense:,}\nown samples")
    pointer(axes, (8.3, 2.95), (3.3, 2.3))
    write(axes, 5.8, 3.0, "row numbers")
    pointer(axes, (3.3, 1.95), (8.3, 2.6))
    write(axes, 6.3, 1.95, "a sum of rows for each sample")
    pointer(axes, (8.3, 0.3), (3.3, 1.0))
    write(axes, 5.8, 1.1, "gradient of each sum, then: step")
    pointer(axes, (10.2, 2.05), (10.2, 1.15), "<->")
    write(axes, 11.25, 1.6, "all-reduce\n(DDP)")
    pointer(axes, (4.3, 4.45), (1.7, 2.6), "-->")
    write(axes, 2.3, 3.9, "make a table")
    pointer(axes, (7.5, 4.45), (10.2, 3.55), "-->")
    write(axes, 9.9, 4.25, "run_trainer(table)")
    write(
        axes, 5.2, -0.75, "Solid: at every step, each trainer the same.  Dashed: once."
    )
    return figure


def main() -> None:
    """Count the model's numbers, draw, check."""
    out = picture_parser("Draw the chapter's first picture.").parse_args().out
    table, dense = (
        sum(p.numel() for p in part.parameters())
        for part in (
            classifier.Table(classifier.ROWS, classifier.WIDTH, 0),
            classifier.dense_part(),
        )
    )
    save_picture(draw_roles(table, dense), out, "04_roles.png")
    print(
        f"check: {table:,} numbers in the table, {dense:,} in the dense part; ", end=""
    )
    print("wrote 04_roles.png")


if __name__ == "__main__":
    main()
