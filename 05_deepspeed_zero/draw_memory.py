"""Draw where memory goes when a model is trained, before anything is divided.

Run: python 05_deepspeed_zero/draw_memory.py
Needs: matplotlib. Nothing is measured here: the bars are what will_it_fit.py works out.
Expect: assets/05_memory.png, which the front page shows, and a `check:` of the sums.
Before: 05_deepspeed_zero/will_it_fit.py
Next: 05_deepspeed_zero/held.py, which counts it in a running process.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from will_it_fit import SHAPES, Job, bytes_on_a_rank, named_shape, tensor_sizes_of

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
from pictures import new_picture, picture_parser, save_picture

SHAPE = "1.5B"
# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#CC79A7",
}
DARK = ("#0072B2", "#009E73")  # on which white is easier to read


def bars() -> dict[str, dict[str, float]]:
    """Return gigabytes by kind, for two precisions and two lengths of a sample."""
    config = named_shape(SHAPE)
    sizes = tensor_sizes_of(config)
    found = {}
    for precision, length in (("fp32", 512), ("bf16", 512), ("bf16", 4096)):
        job = Job(sizes, config, precision=precision, seq_length=length)
        held = bytes_on_a_rank(job, stage=0, world_size=1)
        name = f"{precision}, {length} tokens"
        found[name] = {kind: held[kind] / 1e9 for kind in COLOURS}
    return found


def draw_kinds(found: dict[str, dict[str, float]]) -> plt.Figure:
    """Stack the kinds, a bar for each way to train."""
    figure, axes = new_picture(3.4)
    for row, held in enumerate(found.values()):
        left = 0.0
        for kind, amount in held.items():
            colour = COLOURS[kind]
            label = kind if row == 0 else None
            axes.barh(row, amount, left=left, color=colour, height=0.6, label=label)
            if amount > 1.2:
                ink = "white" if colour in DARK else "#222222"
                place, text = (left + amount / 2, row), f"{amount:.0f}"
                axes.text(*place, text, color=ink, ha="center", va="center")
            left += amount
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("GB for one sample at a time; activations are an estimate")
    axes.set_title(f"training {SHAPES[SHAPE][0]} in one process")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    figure.tight_layout()
    return figure


def main() -> None:
    """Work out the bars, check them, draw them."""
    out = picture_parser("Draw where memory goes.").parse_args().out
    found = bars()
    count = sum(tensor_sizes_of(named_shape(SHAPE)))
    lasting = [sum(held.values()) - held["activations"] for held in found.values()]
    # Adam takes 16 bytes a parameter in float32, and as many in mixed precision.
    if any(abs(gigabytes * 1e9 / count - 16) > 1e-6 for gigabytes in lasting):
        raise RuntimeError(f"{lasting} GB are not 16 bytes for {count:,} parameters")
    save_picture(draw_kinds(found), out, "05_memory.png")
    print(
        f"check: {len(lasting)} x {lasting[0]:.1f} GB are 16 bytes for {count:,} "
        f"parameters; wrote 05_memory.png"
    )


if __name__ == "__main__":
    main()
