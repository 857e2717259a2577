"""Which bag does a row number of a batch belong to, and which shard of the table?"""

import torch


def bag_of_each(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Tell for each row number of a batch which bag it is in: (words,), from 0."""
    ends = torch.cat([offsets[1:], offsets.new_tensor([len(indices)])])
    return torch.repeat_interleave(ends - offsets)


def shard_bags(
    indices: torch.Tensor, offsets: torch.Tensor, shards: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each shard the numbers of its rows, and how many each bag has, (B,).

    Of n shards, row r of the table is row r // n of shard r % n.
    """
    bag_of = bag_of_each(indices, offsets)
    found = []
    for shard in range(shards):
        mine = indices % shards == shard
        counts = bag_of[mine].bincount(minlength=len(offsets))
        found.append((indices[mine] // shards, counts))
    return found
