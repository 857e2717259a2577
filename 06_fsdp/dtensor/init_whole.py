"""`nn.init` on sharded parameters, with one process's values: carry away this one file.

Seed all ranks alike, then: `with DrawWhole(): module.reset_parameters()`. PyTorch shows
it `uniform_`, `normal_`, `constant_` and `kaiming_uniform_` only; others go unchanged,
and an embedding's `padding_idx` row, which `reset_parameters` should zero, is drawn.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode


class DrawWhole(TorchFunctionMode):
    """While active, four functions of `nn.init` draw a DTensor whole, and keep a shard.

    With the same seed on all ranks the values are those of one process.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function, on a whole tensor where it would draw a DTensor."""
        kwargs = kwargs or {}
        target = kwargs.get("tensor")  # as the functions of nn.init call it
        is_init = getattr(func, "__module__", "") == "torch.nn.init"
        if not is_init or not isinstance(target, DTensor):
            return func(*args, **kwargs)
        whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        func(**kwargs | {"tensor": whole})
        place = target.device_mesh, target.placements
        with torch.no_grad():
            # None: nothing is sent, since every rank has drawn the same.
            shard = distribute_tensor(whole, *place, src_data_rank=None)
            target.to_local().copy_(shard.to_local())
        return target
