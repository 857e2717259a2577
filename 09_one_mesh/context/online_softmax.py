"""Attend to four keys in two parts, as two ranks of a ring do.

Run: python 09_one_mesh/context/online_softmax.py
Expect: each rank's mean and sum of exponentials; together, the softmax over all keys.
"""

import torch

from ranks import fail

# Of one query, a row for each rank: scores, with exponentials 1 3 and 4 2, and values.
SCORES = torch.tensor([[1, 3], [4, 2]], dtype=torch.float64).log()
VALUES = torch.tensor([[2, 6], [1, 7]], dtype=torch.float64)


def attend(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return means over the last axis, and the logs of their sums of exponentials."""
    return (scores.softmax(-1) * values).sum(-1), scores.logsumexp(-1)


def attend_in_parts(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the mean over all keys of (ranks, keys), of which each rank has a row."""
    means, lse = attend(scores, values)  # each rank: over its own keys
    return attend(lse, means)[0]  # a rank's mean is a value now, and its lse the score


def main() -> None:
    """Write out each rank's mean and the mean of both; compare with one softmax."""
    rows = [*zip(SCORES, VALUES, strict=True), attend(SCORES, VALUES)[::-1]]
    for name, (scores, values) in zip(("rank 0", "rank 1", "both"), rows, strict=True):
        terms = [f"{e:g} * {v:g}" for e, v in zip(scores.exp(), values, strict=True)]
        mean, total = attend(scores, values)[0], scores.exp().sum()
        print(f"{name:6} | ({' + '.join(terms)}) / {total:g} = {mean:g}")
    right = SCORES.flatten().softmax(0) @ VALUES.flatten()
    if not abs(attend_in_parts(SCORES, VALUES) - right) < 1e-12:
        fail("the mean in parts is not that of one softmax over the four keys")
    print(f"check: one softmax over the four keys gives {right:g} too")


if __name__ == "__main__":
    main()
