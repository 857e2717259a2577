"""Count which of six tokens, on two ranks, go to which of four experts.

Run: python 09_one_mesh/experts/who_goes_where.py
Expect: how many rows each rank sends to each expert, and so to each rank. One token
    finds no place, and gets zeros from the layer.
"""

import math

import torch
from torch import Tensor, nn

from mixture import Mixture, choose_experts, pairs_with_a_place
from ranks import fail

NAMES = ["abc", "xyz"]  # three tokens of each rank
# What a router says of them: (2 ranks, 3 tokens, 4 experts).
PROBABILITIES = torch.tensor(
    [
        [[0.1, 0.2, 0.6, 0.1], [0.7, 0.1, 0.1, 0.1], [0.2, 0.1, 0.4, 0.3]],
        [[0.5, 0.2, 0.2, 0.1], [0.1, 0.1, 0.2, 0.6], [0.3, 0.4, 0.2, 0.1]],
    ]
)


def rows_of_rank(probabilities: Tensor, capacity: int) -> tuple[list, list, Tensor]:
    """Return each token's expert, the tokens to send, and how many to each expert."""
    tokens, count = probabilities.shape
    _, experts = choose_experts(probabilities, k=1)
    kept = pairs_with_a_place(experts, count, capacity)  # sorted by expert
    chosen = experts.view(tokens)
    return chosen.tolist(), kept.tolist(), chosen[kept].bincount(minlength=count)


def main() -> None:
    """Count the rows of both ranks; compare whom the layer drops, and who is due."""
    ranks, tokens, count = PROBABILITIES.shape
    layer = Mixture(width=count, experts=count, k=1, senders=ranks)
    factor, k = layer.capacity_factor, layer.k
    capacity = math.ceil(round(factor * tokens * k / count, 6))
    print(f"capacity: {factor} * {tokens} * {k} / {count}, rounded up, is {capacity}")
    print("       | expert of token | sends  | rows to experts | rows to ranks")
    dropped, due = [], []
    for rank, names in enumerate(NAMES):
        chosen, kept, rows = rows_of_rank(PROBABILITIES[rank], capacity)
        dropped += [name for i, name in enumerate(names) if i not in kept]
        asked = ", ".join(f"{name} {e}" for name, e in zip(names, chosen, strict=True))
        sent = " ".join(names[i] for i in kept)
        to_ranks = rows.view(ranks, -1).sum(1).tolist()
        print(
            f"rank {rank} | {asked:15} | {sent:6} | {rows.tolist()!s:15} | {to_ranks}"
        )
        # By hand: the first tokens that want an expert get its places.
        best = PROBABILITIES[rank].argmax(1).tolist()
        full = [best[:i].count(e) >= capacity for i, e in enumerate(best)]
        due += [name for name, is_full in zip(names, full, strict=True) if is_full]
    # With the identity as its router, the layer gets these probabilities.
    nn.init.eye_(layer.router.weight)
    is_zero = (layer(PROBABILITIES.log()) == 0).all(-1)
    zeros = [name for i, name in enumerate("".join(NAMES)) if is_zero.flatten()[i]]
    claim = f"the layer's output is zero for {', '.join(due)}, and no other token"
    if not zeros == dropped == due:
        fail(f"not so: {claim}")
    print(f"check: {claim}")


if __name__ == "__main__":
    main()
