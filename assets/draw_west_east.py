"""Draw what two ranks learn of a landscape, each alone and both under DDP.

Run: python assets/draw_west_east.py
Expect: the table of west_and_east.py, whose training this runs, and 02_west_east.png.
"""

import io
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from matplotlib.axes import Axes
from matplotlib.colors import LightSource, LinearSegmentedColormap
from PIL import Image

from pictures import chapter_module, new_picture, picture_parser

INK, GREY = "#222222", "#666666"
# The ranks' two colours, by Okabe and Ito, which people with any colour vision tell
# apart, and the second one darker: on white, words need more contrast than bars.
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


def label_half(
    axes: Axes, half: int, rank: int | None, above: str, rmse: float
) -> None:
    """Write above and below half of a map; `rank` is the one that saw it, if any."""
    bar, word, weight = "#DDDDDD", GREY, "bold"
    if rank is not None:
        bar, word, weight = BARS[rank], WORDS[rank], "normal"
    strip = plt.Rectangle((half / 2, 1.012), 0.5, 0.022, color=bar, lw=0)
    axes.add_patch(strip).set(transform=axes.transAxes, clip_on=False)
    middle, below = half / 2 + 0.25, f"RMSE {rmse:.0f} m"
    place = {"transform": axes.transAxes, "ha": "center"}
    look = {"fontsize": 11, "weight": weight, "color": INK}
    axes.text(middle, 1.052, above, fontsize=10.5, color=word, va="bottom", **place)
    axes.text(middle, -0.03, below, va="top", **look, **place)


def draw_four(terrain: Any, maps: torch.Tensor, errors: list[list[float]]) -> Any:
    """Lay the truth and the three models' maps side by side.

    Args:
        terrain: the truth, as `terrain.load_terrain` returns it.
        maps: (3, C, 1), what rank 0, rank 1 and DDP draw.
        errors: for each of them the RMSE in the west and in the east, in metres.
    """
    truth, *drawn = (
        (terrain.mean + terrain.std * heights).reshape(terrain.shape)
        for heights in [terrain.heights, *maps]
    )
    lowest, highest = truth.min().item(), truth.max().item()
    figure, row = new_picture(3.66, columns=4)
    figure.subplots_adjust(left=0.005, right=0.995, top=0.82, bottom=0.1, wspace=0.05)
    titles = ["the truth", "rank 0 alone", "rank 1 alone", "both, under DDP"]
    for axes, title, heights in zip(row, titles, [truth, *drawn], strict=True):
        draw_map(axes, heights, lowest, highest)
        axes.set_title(title, fontsize=13, weight="bold", pad=25)
    for column, axes in enumerate(row[1:]):
        axes.axvline(terrain.shape[1] // 2 - 0.5, color="white", lw=0.8, ls=(0, (4, 3)))
        for half in (0, 1):
            if column == 2:  # what was trained under DDP
                rank, above = half, f"seen by rank {half}"
            elif column == half:
                rank, above = half, "seen half"
            else:
                rank, above = None, "unseen half"
            label_half(axes, half, rank, above, errors[column][half])
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


def errors_of(maps: torch.Tensor, terrain: Any, chapter: ModuleType) -> list:
    """Return the RMSE of each map in the west and in the east, in metres.

    They are counted at the points that west_and_east.py holds out.
    """
    points, errors = len(terrain.places) - 4096, []
    places, truth = chapter.sample_points(terrain, points)[1].tensors
    for heights in maps:
        _, held_out = chapter.sample_points(terrain._replace(heights=heights), points)
        squares = (held_out.tensors[1] - truth).square().flatten()
        halves = squares[places[:, 0] < 0], squares[places[:, 0] >= 0]
        errors.append([terrain.std * half.mean().sqrt().item() for half in halves])
    return errors


def be_rank(rank: int, port: int, steps: int, maps: torch.Tensor) -> None:
    """Be a rank of west_and_east.py, which puts what it draws into `maps`."""
    lesson = chapter_module("02_ddp_mp/west_and_east.py").main
    chapter_module("02_ddp_mp/ranks.py").be_local_rank(
        rank, 2, port, lesson, (steps, maps)
    )


def main() -> None:
    """Train on two ranks, draw."""
    parser = picture_parser("Draw what two ranks learn of a landscape.")
    parser.add_argument("--steps", type=int, default=400, help="of each training")
    args = parser.parse_args()
    chapter = chapter_module("02_ddp_mp/terrain.py")
    terrain = chapter.load_terrain()
    maps = torch.zeros(3, *terrain.heights.shape)
    # `ranks.start_ranks` finds its function by the module's name, which is hidden here.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(be_rank, (store.port, args.steps, maps), nprocs=2)
    figure = draw_four(terrain, maps, errors_of(maps, terrain, chapter))
    save_small(figure, args.out / "02_west_east.png")
    print("wrote 02_west_east.png")


if __name__ == "__main__":
    main()
