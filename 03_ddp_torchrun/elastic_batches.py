"""A step of fixed size, dealt to however many ranks there are, and the proof of it."""

from collections.abc import Iterator

import torch
import torch.distributed as dist


class ElasticBatches(torch.utils.data.Sampler[list[int]]):
    """Deal steps of one fixed size to however many ranks there are today.

    Where the ranks divide a step evenly, a rank gets the samples that it would get from
    `DistributedSampler`, in the same order.
    """

    def __init__(
        self, samples: int, samples_per_step: int, batch_size: int, seed: int
    ) -> None:
        """Cut a rank's share of each step into batches of at most `batch_size`."""
        self.samples, self.samples_per_step, self.seed = samples, samples_per_step, seed
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # The ranks may differ by one sample, so even in how many batches they make.
        self.share = len(range(self.rank, samples_per_step, self.world_size))
        self.batches_per_step = -(-self.share // batch_size)
        self.epoch = self.first_step = 0

    def set_position(self, epoch: int, first_step: int) -> None:
        """Choose where to begin: at this step of this epoch."""
        self.epoch, self.first_step = epoch, first_step

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of one batch after the other, `batches_per_step` a step."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.samples, generator=generator).tolist()
        for step in range(self.first_step, self.samples // self.samples_per_step):
            start = step * self.samples_per_step
            everyones = order[start : start + self.samples_per_step]
            own = everyones[self.rank :: self.world_size]
            for number in range(self.batches_per_step):
                first = number * self.share // self.batches_per_step
                end = (number + 1) * self.share // self.batches_per_step
                yield own[first:end]


def samples_report(seen: torch.Tensor, steps: int, samples_per_step: int) -> str:
    """Check that no sample of an epoch was lost or counted twice; all call this.

    Args:
        seen: how often this rank saw each sample, shape (samples,).
        steps: taken in this epoch, by this run and by those that it goes on from.
        samples_per_step: of all ranks together.

    Raises:
        RuntimeError: a sample was lost or counted twice.
    """
    total = seen.clone()
    dist.all_reduce(total)
    different, all_together = int((total > 0).sum()), int(total.sum())
    expected = steps * samples_per_step
    if not different == all_together == expected:
        raise RuntimeError(
            f"{steps} steps of {samples_per_step} saw {all_together} samples, "
            f"{different} of them different"
        )
    return f"{steps} steps x {samples_per_step} samples = {expected} different samples"
