"""Cut query, key and value of three heads for two ranks.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/mistakes/heads_do_not_divide.py
Expect: no error, though each rank has a head and a half; it computes one larger head.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# WRONG: 12 columns divide by two ranks, 3 heads do not. Choose a number of heads that
# does, or refuse all others: if HEADS % world_size: raise ValueError.
# Write: HEADS = 4
HEADS = 3


def attend(columns: list[Tensor], heads: int) -> Tensor:
    """Split query, key and value, (T, columns), into heads; return (T, columns)."""
    q, k, v = (c.unflatten(-1, (heads, -1)).transpose(0, 1) for c in columns)
    return scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)


def main() -> None:
    """Compare this rank's columns of the result with one process's."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = list(torch.randn(3, 5, 12).unbind())
    mine = [part.chunk(world_size, dim=1)[rank] for part in whole]
    heads = HEADS // world_size
    right = attend(whole, HEADS).chunk(world_size, dim=1)[rank]
    apart = torch.dist(attend(mine, heads), right).item()
    print(f"{HEADS} heads of {12 // HEADS}; here {heads} of {6 // heads}")
    print(f"{apart:.1f} away from one process's result")
    dist.barrier()  # nobody leaves while another rank still connects
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
