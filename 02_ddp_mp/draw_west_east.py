"""Draw what two ranks know of a landscape, each alone and both under DDP.

Run: python 02_ddp_mp/draw_west_east.py
Needs: west_and_east.py beside it, which trains the models that draw.
Expect: that script's table, and assets/02_west_east.png with the same figures.
Before: 02_ddp_mp/west_and_east.py
Next: README.md of the whole repository, which shows the picture.
"""

import io
import signal
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LightSource, LinearSegmentedColormap
from PIL import Image

from terrain import Terrain, load_terrain
from west_and_east import read_steps, train_both

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
from pictures import new_picture, picture_parser

INK, GREY = "#222222", "#666666"
# The ranks' two colours, by Okabe and Ito, whom people of any colour vision can follow,
# and the second one darker: on white, words need more contrast than bars.
BARS, WORDS = ["#0072B2", "#E69F00"], ["#0072B2", "#A66F00"]
# From valley to summit the lightness rises in equal steps (CIELAB, 22 to 96), so that
# heights can be compared without telling the colours apart.
EARTH = LinearSegmentedColormap.from_list(
    "earth", ["#1b3942", "#365d59", "#648366", "#a3a572", "#e0c69d", "#faf2ea"]
)
# A cell of the map in metres: 3 seconds of arc, at 36.6 degrees north.
CELL_WIDTH, CELL_HEIGHT = 74.4, 92.7


def draw_map(axes: Axes, heights: torch.Tensor, lowest: float, highest: float) -> None:
    """Draw heights in metres, (rows, columns), in colour and lit from the north-west.

    A model may draw a place deeper or higher than any real one. There the map has the
    colour of the lowest or the highest real place.
    """
    lit = LightSource(azdeg=315, altdeg=40).shade(
        heights.clamp(lowest, highest).numpy(),
        EARTH,
        vmin=lowest,
        vmax=highest,
        blend_mode="soft",
        vert_exag=2.2,
        dx=CELL_WIDTH,
        dy=CELL_HEIGHT,
    )
    axes.imshow(lit, aspect=CELL_HEIGHT / CELL_WIDTH)
    axes.set_axis_off()


def label_half(axes: Axes, half: int, rank: int | None, above: str, off: float) -> None:
    """Write above and below half of a map; `rank` is the one that saw it, if any."""
    bar, word, weight = "#DDDDDD", GREY, "bold"
    if rank is not None:
        bar, word, weight = BARS[rank], WORDS[rank], "normal"
    strip = plt.Rectangle((half / 2, 1.012), 0.5, 0.022, color=bar, lw=0)
    axes.add_patch(strip).set(transform=axes.transAxes, clip_on=False)
    middle, below = half / 2 + 0.25, f"off by {off:.0f} m"
    place = {"transform": axes.transAxes, "ha": "center"}
    look = {"fontsize": 11, "weight": weight, "color": INK}
    axes.text(middle, 1.052, above, fontsize=10.5, color=word, va="bottom", **place)
    axes.text(middle, -0.03, below, va="top", **look, **place)


def draw_four(terrain: Terrain, maps: torch.Tensor, errors: torch.Tensor) -> plt.Figure:
    """Lay the truth and the three models' maps side by side.

    Args:
        terrain: the truth.
        maps: (3, C, 1), what rank 0, rank 1 and DDP draw.
        errors: (3, 2), how far each is off in the west and in the east, in metres.
    """
    truth = terrain.metres(terrain.heights)
    lowest, highest = truth.min().item(), truth.max().item()
    figure, row = new_picture(3.66, columns=4)
    figure.subplots_adjust(left=0.005, right=0.995, top=0.82, bottom=0.1, wspace=0.05)
    for axes, title, drawn in zip(
        row,
        ["the truth", "rank 0 alone", "rank 1 alone", "both, under DDP"],
        [terrain.heights, *maps],
        strict=True,
    ):
        draw_map(axes, terrain.metres(drawn), lowest, highest)
        axes.set_title(title, fontsize=13, weight="bold", pad=25)
    for column, axes in enumerate(row[1:]):
        axes.axvline(terrain.shape[1] // 2 - 0.5, color="white", lw=0.8, ls=(0, (4, 3)))
        for half in (0, 1):
            if column == 2:  # what was trained under DDP
                rank, above = half, f"rank {half}'s half"
            elif column == half:
                rank, above = half, "its half"
            else:
                rank, above = None, "never seen"
            label_half(axes, half, rank, above, errors[column, half].item())
    # The truth has no error; below it stands what the colours mean.
    scale = row[0].inset_axes([0.26, -0.082, 0.43, 0.045])
    scale.imshow([range(256)], EARTH, aspect="auto")
    scale.set_axis_off()
    place = {"transform": row[0].transAxes, "fontsize": 11, "color": INK, "va": "top"}
    row[0].text(0, -0.03, f"{lowest:.0f} m", **place)
    row[0].text(1, -0.03, f"{highest:.0f} m", ha="right", **place)
    return figure


def save_small(figure: plt.Figure, path: Path) -> None:
    """Save with a palette of 256 colours: a hillshade's file is four times as large."""
    drawn = io.BytesIO()
    figure.savefig(drawn)
    picture = Image.open(drawn).convert("RGB")
    few = picture.quantize(
        256, method=Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE
    )
    few.save(path, "PNG", optimize=True)


def main() -> None:
    """Refuse what cannot work, train, draw."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    args = read_steps(picture_parser("Draw what two ranks know of a map."))
    maps, errors = train_both(args.steps)
    save_small(draw_four(load_terrain(), maps, errors), args.out / "02_west_east.png")
    print("wrote 02_west_east.png")


if __name__ == "__main__":
    main()
