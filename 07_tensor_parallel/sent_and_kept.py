"""What a rank gives to collectives in a step, and what it keeps for backward.

Both count what this process runs; of a DTensor they see the shard.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")
# Those that are given room for the result first.
RESULT_FIRST = ("_allgather_base_", "allgather_", "_reduce_scatter_base_")


class Collectives(TorchDispatchMode):
    """Notes each collective's name, and the bytes that this rank gives it."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.noted: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call what was to be called; a DTensor's call comes again with its shard."""
        if DTensor in types:
            return NotImplemented
        name = func.overloadpacket.__name__
        if "c10d" in func.namespace and name not in NO_COLLECTIVES:
            given = tree_leaves(args[name in RESULT_FIRST])[0]
            self.noted.append((name, given.nbytes))
        return func(*args, **(kwargs or {}))

    def sent_on_a_ring(self) -> int:
        """Return the bytes that each rank sends, if each call is a ring of all ranks.

        Raises `KeyError` for a collective that is none of these.
        """
        n = dist.get_world_size()
        times = {"all_reduce": 2, "allreduce_": 2, "reduce_scatter_tensor": 1}
        times["all_gather_into_tensor"] = n  # of which a rank gives an n-th
        times |= {"_allgather_base_": n, "allgather_": n, "_reduce_scatter_base_": 1}
        return sum(times[name] * nbytes for name, nbytes in self.noted) * (n - 1) // n


def kept_for_backward(model: nn.Module, *inputs: Tensor) -> int:
    """Run a forward pass; return the bytes of the activations that this rank keeps."""
    kept: dict[int, int] = {}  # by address: a storage counts once

    @torch.no_grad()
    def note(tensor: Tensor) -> Tensor:
        mine = getattr(tensor, "to_local", lambda: tensor)()
        storage = getattr(mine, "elem", mine).untyped_storage()  # may be in flight
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(*inputs)
    for p in model.parameters():
        mine = p.to_local() if isinstance(p, DTensor) else p
        kept.pop(mine.untyped_storage().data_ptr(), None)
    return sum(kept.values())
