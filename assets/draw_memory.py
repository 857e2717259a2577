"""Draw where memory goes when a model is trained, before anything is sharded.

Run: python assets/draw_memory.py
Expect: 05_memory.png, which the front page shows, from what the calculator works out,
    and a `check:` of the sums.
"""

import matplotlib.pyplot as plt

from pictures import chapter_module, new_picture, picture_parser, save_picture

fit = chapter_module("05_deepspeed_zero/memory/will_it_fit.py")
SHAPE = "1.5B"
# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#CC79A7",
}
NAMES = {"parameters": "weights", "optimizer": "optimizer state"}
DARK = ("#0072B2", "#009E73")  # on which white is easier to read


def bars() -> dict[str, dict[str, float]]:
    """Return gigabytes by kind, for two precisions and two lengths of a sample."""
    found = {}
    for precision, tokens in (("bf16", 512), ("bf16", 4096), ("fp32", 512)):
        job = fit.job_of_shape(SHAPE, precision=precision, tokens=tokens)
        needed = fit.rank_bytes(job, stage=0, world_size=1)
        name = f"{precision}, {tokens} tokens"
        found[name] = {kind: needed[kind] / 1e9 for kind in COLOURS}
    return found


def draw_kinds(found: dict[str, dict[str, float]]) -> plt.Figure:
    """Stack the kinds, a bar for each way to train."""
    figure, axes = new_picture(3.4)
    for row, needed in enumerate(found.values()):
        left = 0.0
        for kind, amount in needed.items():
            colour = COLOURS[kind]
            label = NAMES.get(kind, kind) if row == 0 else None
            axes.barh(row, amount, left=left, color=colour, height=0.6, label=label)
            if amount > 1.2:
                ink = "white" if colour in DARK else "#222222"
                place, text = (left + amount / 2, row), f"{amount:.0f}"
                axes.text(*place, text, color=ink, ha="center", va="center")
            left += amount
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("GB for one sample at a time; activations are an estimate")
    axes.set_title(f"training {fit.SHAPES[SHAPE][0]} in one process")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    figure.tight_layout()
    return figure


def main() -> None:
    """Work out the bars, check them, draw them."""
    out = picture_parser("Draw where memory goes.").parse_args().out
    found = bars()
    count = sum(fit.job_of_shape(SHAPE).sizes)
    lasting = [
        sum(needed.values()) - needed["activations"] for needed in found.values()
    ]
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
