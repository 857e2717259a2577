"""Find the mistake: a mean over all ranks that is right while all have equally many.

Run: python 01_communication/exercises/uneven_mean.py
Expect: a line for each of three ranks that says what is wrong with what it returns, and
    status 1; once the function is right, a `check:`.
"""

import torch
import torch.distributed as dist

from check_uneven_mean import check_uneven_mean


def mean_and_std(own: torch.Tensor) -> tuple[float, float]:
    """Return mean and standard deviation of all ranks' numbers; every rank calls this.

    The deviation is the root of the mean squared distance from the mean: divided by n.

    Args:
        own: this rank's numbers, (n,), float32. Every rank may have another n, or none.
            A deviation of 1 or more has to be right within 0.1 %, also near 10,000.
    """
    mean = own.mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    variance = (own - mean).square().mean()
    dist.all_reduce(variance, op=dist.ReduceOp.AVG)
    return mean.item(), variance.sqrt().item()


if __name__ == "__main__":
    check_uneven_mean(mean_and_std)
