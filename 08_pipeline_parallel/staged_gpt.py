"""The GPT in stages, used like the whole one: evaluated, sampled from, saved, loaded.

Shapes: B batch, T tokens, D width, V vocabulary.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from data import WindowDataset
from model import GPT, GPTConfig
from part import Part, add_tied_gradients, clip_grad_norm, even_cut
from ranks import gather

# What train.py needs besides this file.
__all__ = ["GPT", "GPTConfig", "add_tied_gradients", "clip_grad_norm"]

# PyTorch's schedules, and how they place stages on ranks, here on two: around, or there
# and back.
PLACES = {
    "GPipe": "0 1",
    "1F1B": "0 1",
    "Interleaved1F1B": "0 1 0 1",
    "InterleavedZeroBubble": "0 1 0 1",
    "ZBVZeroBubble": "0 1 1 0",
}


def owners(schedule: str, ranks: int) -> list[int]:
    """Return the rank that holds each stage."""
    there = list(range(ranks))
    second = {"0 1": [], "0 1 0 1": there, "0 1 1 0": there[::-1]}
    return there + second[PLACES[schedule]]


def check_cut(options: Namespace, global_batch_size: int, ranks: int) -> None:
    """Refuse too few layers or micro-batches, and unequal ones (ValueError)."""
    even_cut(options.layers, len(owners(options.schedule, ranks)))
    count, rest = divmod(global_batch_size, options.batch_size)
    if rest:
        raise ValueError(
            f"a global batch size of {global_batch_size} does not divide by "
            f"--batch-size={options.batch_size}: micro-batches must be equal"
        )
    if options.schedule == "1F1B" and count < ranks:
        raise ValueError(f"{count} micro-batch(es) are too few for {ranks} ranks")
    rounds = max(1, count // ranks)
    if "Interleaved" in options.schedule and count % rounds:
        raise ValueError(f"{count} micro-batches do not divide into {rounds} rounds")


class StagedGPT(GPT):
    """The stages that this rank holds of a GPT; every rank calls each method.

    One stage, or two for schedules that ask for them.
    """

    def __init__(self, model: GPT, schedule: str) -> None:
        """Keep this rank's layers of a model. ValueError: it has too few of them."""
        nn.Module.__init__(self)
        self.config = model.config
        self.owners = owners(schedule, dist.get_world_size())
        cut = even_cut(model.config.layers, len(self.owners))
        own = [i for i, owner in enumerate(self.owners) if owner == dist.get_rank()]
        self.parts = nn.ModuleDict({str(i): Part(model, i, cut) for i in own})
        self.is_first, self.is_last = 0 in own, len(cut) - 1 in own
        self.ends = dist.new_group(sorted({self.owners[0], self.owners[-1]}))

    @torch.no_grad()
    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits or a mean loss on all ranks, as GPT does; for evaluation.

        The whole batch goes through one stage after the other: nothing overlaps.
        """
        x, rank, floats = inputs, dist.get_rank(), next(self.parameters())
        for i, owner in enumerate(self.owners):
            before = self.owners[i - 1] if i > 0 else owner
            if rank == before != owner:
                dist.send(x, owner)
            if rank == owner != before:
                x = floats.new_empty(*inputs.shape, self.config.width)
                dist.recv(x, before)
            if rank == owner:
                # Under autocast it computes in bf16; the others receive in float32.
                x = self.parts[str(i)](x, labels).to(floats.dtype)
        if not self.is_last:
            logits = (*inputs.shape, self.config.vocabulary)
            x = floats.new_empty(logits if labels is None else ())
        dist.broadcast(x, self.owners[-1])
        return x

    def tied_weight(self) -> Tensor | None:
        """Return the matrix that another rank holds too, if any."""
        if self.is_first == self.is_last:
            return None  # a rank with both ends has one tensor for both
        parts: list[Any] = list(self.parts.values())
        tied = [part.tied_weight() for part in parts]
        return next((weight for weight in tied if weight is not None), None)

    def flops_per_token(self) -> int:
        """Count those of the whole model."""
        return on_no_device(self).flops_per_token()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the whole model's, on the CPU, with the names that GPT gives them."""
        own = {
            name: value.cpu()
            for part in self.parts.values()
            for name, value in part.state_dict().items()
        }
        whole = {name: value for one in gather(own) for name, value in one.items()}
        return {name: whole[name] for name in on_no_device(self).state_dict()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Take this rank's layers out of a whole model's; raise what GPT would."""
        keys = on_no_device(self).load_state_dict(state_dict, assign=True)
        for part in self.parts.values():
            own = {name: state_dict[name] for name in part.state_dict()}
            part.load_state_dict(own)
        return keys


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss in nats of (B, T, V) logits."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def on_no_device(model: StagedGPT) -> GPT:
    """Return the whole model without its values: names, shapes, and their order."""
    with torch.device("meta"):
        return GPT(model.config)


def save_whole_state(model: StagedGPT, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer's `state_dict` be the whole model's too; all ranks call that.

    An optimizer, here of one parameter group, numbers its parameters. What is saved has
    the whole model's numbers, so that any number of stages can load it.
    """
    names = [name for name, _ in on_no_device(model).named_parameters()]
    tied = {"head.weight": "token_embedding.weight"} if model.config.tied else {}
    number_of = {}  # in the whole model, by the parameter
    for part in model.parts.values():
        for name, p in part.named_parameters():
            number_of[p] = names.index(tied.get(name, name))
    numbers = [number_of[p] for p in optimizer.param_groups[0]["params"]]

    def after_saving(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        own = {numbers[i]: values for i, values in state["state"].items()}
        whole = {number: v for one in gather(own) for number, v in one.items()}
        group = {**state["param_groups"][0], "params": list(range(len(names)))}
        return {"state": dict(sorted(whole.items())), "param_groups": [group]}

    def before_loading(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        saved = state["state"]
        own = {i: saved[n] for i, n in enumerate(numbers) if n in saved}
        group = {**state["param_groups"][0], "params": list(range(len(numbers)))}
        return {"state": own, "param_groups": [group]}

    optimizer.register_state_dict_post_hook(after_saving)
    optimizer.register_load_state_dict_pre_hook(before_loading)


def largest_error(
    model: StagedGPT, add_gradients: Callable, dataset: WindowDataset, samples: int
) -> float:
    """Return the largest relative error of this rank's gradient, next to one process's.

    Every rank computes it alone too, with the whole model; a model that needs stages
    cannot be checked so, a small one of the same kind can.
    """
    alone = GPT(model.config)
    alone.load_state_dict(model.state_dict())
    device = next(model.parameters()).device
    tokens = dataset.batch([i % len(dataset) for i in range(samples)])
    batch = [part.to(device) for part in tokens]
    alone.to(device).eval()(*batch).backward()
    model.eval().zero_grad()
    add_gradients([[torch.arange(samples), *batch]])
    named = alone.named_parameters(remove_duplicate=False)
    expected: Any = {name: p.grad for name, p in named}
    errors = [
        (p.grad - expected[name]).abs().max()
        for part in model.parts.values()
        for name, p in part.named_parameters()
    ]
    largest = torch.stack([gradient.abs().max() for gradient in expected.values()])
    return (torch.stack(errors).max() / largest.max()).item()
