"""Give each rank samples of its own, as data parallelism does.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/mistakes/other_samples.py
Expect: no error; the sum over ranks is the result of no sample at all.
"""

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset


def main() -> None:
    """Multiply the first sample that the sampler gives by this rank's rows."""
    dist.init_process_group("gloo")
    data = TensorDataset(torch.tensor([[1.0, 1.0], [10.0, 10.0], [100.0, 100.0]]))
    # WRONG: without more arguments it shards the samples over all ranks. Shard them
    # over the mesh's data-parallel dimension, here of one: tensor-parallel ranks share.
    # Write: sampler = DistributedSampler(data, 1, 0, shuffle=False)
    sampler = DistributedSampler(data, shuffle=False)
    sample = next(iter(sampler))
    (x,) = data[sample]
    whole = torch.tensor([[3.0], [4.0]])
    mine = slice(dist.get_rank(), dist.get_rank() + 1)
    y = x[mine] @ whole[mine]
    dist.all_reduce(y)
    print(f"sample {sample}: {y.item():g}, in one process {(x @ whole).item():g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
