"""What do late updates do to the loss? One process that applies gradients k steps late.

Run: python 04_rpc_parameter_server/staleness/late_updates.py
Expect: with a small learning rate late updates cost little. With a larger one, the
    later they are the higher the loss, more so if the dense part's are late as well.
"""

from collections import deque
from itertools import islice

import torch
from torch.nn.functional import cross_entropy

from classifier import (
    ROWS,
    WIDTH,
    Batch,
    HybridModel,
    Table,
    dense_part,
    load_samples,
    train_in_one_process,
)
from ranks import fail, read_options

LAGS = 0, 1, 4, 16  # steps
LAST = 30  # steps whose mean loss is compared
LIMIT = 1e-5  # of a loss


def train_late(batches: list[Batch], lr: float, lag: int, is_all: bool) -> list[float]:
    """Train with gradients that are applied `lag` steps late; return the losses.

    They are those of the table, or with `is_all` those of the dense part too.
    """
    model, losses = HybridModel(Table(ROWS, WIDTH, seed=0), dense_part()), []
    optimizer = torch.optim.SGD(model.parameters(), lr)
    late = list((model if is_all else model.table).parameters())
    under_way: deque[list] = deque([[None] * len(late)] * lag)
    for indices, offsets, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(indices, offsets), labels)
        loss.backward()
        under_way.append([weight.grad for weight in late])
        for weight, gradient in zip(late, under_way.popleft(), strict=True):
            weight.grad = gradient  # SGD passes over a weight that has None
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train with each rate and each lag; compare without lag with one process."""
    samples = load_samples()[0]
    batches = list(islice(samples.batches(32), len(samples) // 32))
    far, hurts = [], True
    print("steps late             " + "".join(f"{lag:7}" for lag in LAGS))
    for lr in (0.05, 0.2):
        alone = HybridModel(Table(ROWS, WIDTH, seed=0), dense_part())
        expected = train_in_one_process(alone, ([one] for one in batches), lr, lr)
        for is_all in (False, True):
            runs = [train_late(batches, lr, lag, is_all) for lag in LAGS]
            ends = [sum(losses[-LAST:]) / LAST for losses in runs]
            name = "all late" if is_all else "table late"
            numbers = "".join(f"{end:7.3f}" for end in ends)
            print(f"rate {lr:<4} | {name:10} |{numbers}", flush=True)
            pairs = zip(runs[0], expected, strict=True)
            far += [abs(loss - of_alone) for loss, of_alone in pairs]
            hurts &= lr < 0.1 or ends == sorted(set(ends))
    apart = torch.tensor(far).max()  # max() would drop a NaN
    if not (apart <= LIMIT and hurts):
        fail(f"{apart} from one process, or later is not always worse: {hurts}")
    text = f"0 steps late, each loss is within {apart:.0e} of one process's"
    print(f"check: {text} (limit {LIMIT:.0e})")
    print("check: with the rate 0.2 each further delay has raised the loss")


if __name__ == "__main__":
    read_options()
    torch.set_num_threads(1)  # such small tensors do not need more
    main()
