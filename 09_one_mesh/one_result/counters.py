"""What a step takes: the memory of its tensors, and the collectives that it starts.

Both see the operators of this process, those of FSDP included.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

# What PyTorch's dispatcher calls the collectives, and how often a rank sends a message
# of all ranks together in each, where (n - 1) / n counts as once.
COLLECTIVES = {
    "_allgather_base_": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "allreduce_": ("all-reduce", 2),
}


class PeakMemory(TorchDispatchMode):
    """While it is active, follows the memory of all tensors that operators return.

    `peak` is the highest sum of their bytes. What an operator needs for itself is not
    seen, nor what was there before, unless `follow` or a view tells of it.
    """

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.storages, self.peak = WeakIdKeyDictionary(), 0

    def follow(self, *tensors: Any) -> None:
        """Add memory that is not known yet; a view has that of its base."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.storages[tensor.untyped_storage()] = None
        # FSDP frees a tensor by resizing its storage to nothing.
        self.peak = max(self.peak, sum(s.nbytes() for s in self.storages))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let an operator run, and add up what is alive after it."""
        if DTensor in types:  # comes again, as the operators on its shards
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.follow(*tree_leaves(result))
        return result


class Call(NamedTuple):
    """A collective: its kind, the dtype and bytes of its largest tensor, its ranks."""

    name: str
    dtype: torch.dtype
    nbytes: int
    ranks: tuple[int, ...]

    @property
    def sent(self) -> float:
        """Bytes that this rank has to send for it."""
        times, n = dict(COLLECTIVES.values()).get(self.name, 1), len(self.ranks)
        return times * self.nbytes * (n - 1) / n


class CollectiveLog(TorchDispatchMode):
    """While it is active, `calls` gets what goes through `c10d`: not DTensor's own."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note a collective, and let it and everything else go on."""
        if DTensor in types:
            return NotImplemented
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            message = max(tensors, key=lambda tensor: tensor.nbytes)
            boxed = next(a for a in args if isinstance(a, torch.ScriptObject))
            ranks = tuple(get_process_group_ranks(ProcessGroup.unbox(boxed)))
            known, _ = COLLECTIVES.get(name, (name, 1))
            self.calls.append(Call(known, message.dtype, message.nbytes, ranks))
        return func(*args, **(kwargs or {}))
