"""A pipeline stage: what it receives, computes and sends.

Shapes: B samples of a micro-batch, T tokens, D width.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from part import Part, add_tied_gradients, clip_grad_norm, even_cut

# What a script with a Stage needs besides it.
__all__ = ["Part", "Stage", "clip_grad_norm", "even_cut"]


class Stage:
    """This rank's part of a pipeline whose stages are the ranks, in order.

    A schedule calls `forward(i)` and `backward(i)` once for each micro-batch i.
    """

    def __init__(self, part: Part) -> None:
        """Connect a part, some of it trained, with its neighbours; all ranks do so."""
        self.part, self.index = part, dist.get_rank()
        self.stages = dist.get_world_size()
        self.is_first, self.is_last = self.index == 0, self.index == self.stages - 1
        # On NCCL the messages of one group wait for each other, and two neighbours
        # that both send first may deadlock. So activations and gradients have one each.
        self.activations: Any = dist.new_group()
        self.gradients: Any = dist.new_group()
        self.ends = dist.new_group(sorted({0, self.stages - 1}))  # may share a matrix
        self.in_flight: dict[int, tuple[Tensor, Tensor]] = {}  # input and output of i
        self.most_in_flight = 0
        self.sending: dict[str, tuple[Any, Tensor]] = {}  # by the call that sends

    def run(
        self, schedule: Callable, inputs: Tensor, labels: Tensor, micro_batch_size: int
    ) -> Tensor:
        """Compute this part's gradients of a batch's mean loss; every rank calls this.

        Every rank passes the same (samples, T) tokens, each sample with equally many
        labels that count: the first stage reads the inputs, the last the labels. Call
        it once a step: a second run would add up a tied matrix's sums again. Returns
        the loss on the last stage, at least in float32, elsewhere 0.
        """
        parts = (tokens.split(micro_batch_size) for tokens in (inputs, labels))
        self.micro_batches = list(zip(*parts, strict=True))
        self.samples = len(inputs)
        self.losses, self.like = list[Tensor](), next(self.part.parameters())
        schedule(self, len(self.micro_batches))
        for work, _ in self.sending.values():
            work.wait()
        self.sending.clear()
        add_tied_gradients(self.part, self.ends)
        return sum(self.losses, self.like.new_zeros(()).float())

    def forward(self, i: int) -> None:
        """Receive micro-batch i, run it through the layers, send it on."""
        x, labels = self.micro_batches[i]
        if not self.is_first:
            # (B, T, D), with the parameters' dtype and device.
            x = self.like.new_empty(*x.shape, self.part.config.width)
            dist.recv(x, self.index - 1, group=self.activations)
            x.requires_grad_()
        y = self.compute_forward(i, x, labels)
        if self.is_last:
            y = y * len(labels) / self.samples  # its part of the mean over the batch
            self.losses.append(y.detach())
        else:
            self.send(f"F{i}", y.detach(), self.index + 1, self.activations)
        self.in_flight[i] = x, y  # and with y all activations that backward(i) needs
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))

    def backward(self, i: int) -> None:
        """Receive the gradient of what forward(i) sent; send that of what it received.

        Gradients of the parameters add up over the micro-batches. Call this in the
        order 0, 1, 2 on every stage: before a stage sends gradient i, it waits until
        the stage before has received gradient i - 1.
        """
        x, y = self.in_flight.pop(i)
        gradient = None
        if not self.is_last:
            gradient = y.new_empty(y.shape)  # contiguous, even if y is not
            dist.recv(gradient, self.index + 1, group=self.gradients)
            # The wait ends at once: the gradient shows that the activations arrived.
            work, _ = self.sending.pop(f"F{i}")  # the tensor lives until it is sent
            work.wait()
        self.compute_backward(i, y, gradient)
        if x.grad is not None:  # tokens have none
            # Wait for the one before: then at most one is under way, and not m.
            if i > 0:
                work, _ = self.sending.pop(f"B{i - 1}")
                work.wait()
            self.send(f"B{i}", x.grad, self.index - 1, self.gradients)

    def compute_forward(self, i: int, x: Tensor, labels: Tensor) -> Tensor:
        """Run the layers of this stage: the computing of forward(i), and no message."""
        return self.part(x, labels)

    def compute_backward(self, i: int, y: Tensor, gradient: Tensor | None) -> None:
        """Run autograd through this stage: the computing of backward(i)."""
        y.backward(gradient)

    def send(self, call: str, tensor: Tensor, to: int, group: Any) -> None:
        """Begin to send; a later call waits for the end, and computing goes on."""
        tensor = tensor.contiguous()
        self.sending[call] = (dist.isend(tensor, to, group=group), tensor)
