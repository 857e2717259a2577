"""Three mistakes, each of which raises no error and trains a model: another one."""

from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import ScheduleGPipe

from parallel_layers import CopyToRanks
from training import Trained
from ways_data_parallel import naive
from ways_split import pipeline, tensor


def sum_over_ranks(settings: Any) -> Trained:
    """Sum the gradients over the ranks."""
    # WRONG: each is the gradient of a mean already. Write dist.ReduceOp.AVG.
    return naive(settings, dist.ReduceOp.SUM)


def term_of_input_gradient(settings: Any) -> Trained:
    """Let each rank go on with its own term of the gradient of what all ranks read."""
    trained = tensor(settings)
    right = trained.backward

    def backward(inputs: Tensor, labels: Tensor) -> Tensor:
        # WRONG: write all_reduced(grad) in place of grad, as parallel_layers.py does.
        wrong = staticmethod(lambda ctx, grad: (grad, None))
        with mock.patch.object(CopyToRanks, "backward", wrong):
            return right(inputs, labels)

    trained.backward = backward
    return trained


def sum_of_means(settings: Any) -> Trained:
    """Add up the mean losses of the micro-batches."""
    # WRONG: divide each by the number of micro-batches.
    return pipeline(ScheduleGPipe, settings, divisor=1)
