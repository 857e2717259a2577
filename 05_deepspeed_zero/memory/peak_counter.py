"""Follow every tensor that an operation of PyTorch returns: memory over time."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakCounter(TorchDispatchMode):
    """While it is active, counts the bytes that tensors own: `now`, and the `peak`.

    Every operation goes through PyTorch's dispatcher, those of an optimizer and of
    DeepSpeed included. The memory that an operation returns is added once, however many
    tensors are views of it, and subtracted when it is freed. `history` holds the number
    of operations so far and the bytes, after every change. What an operation allocates
    for itself is not seen, nor a storage that is resized.
    """

    def __init__(self) -> None:
        """Count nothing until `start` is called."""
        super().__init__()
        self.bytes: dict[int, int] = {}
        self.history: list[tuple[int, int]] = []
        self.now = self.peak = self.operations = 0
        self.started = False

    def start(self, storages: Iterable[torch.UntypedStorage] = ()) -> None:
        """Begin with memory that is there already."""
        self.started = True
        for storage in storages:
            self.follow(storage)

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Add memory that is not known yet."""
        address, count = storage.data_ptr(), storage.nbytes()
        # On the meta device a tensor has no address, and no memory.
        if count and address and address not in self.bytes:
            self.bytes[address] = count
            self.change(count)
            # Called when the memory is freed, whoever held it last.
            weakref.finalize(storage, self.forget, address)

    def forget(self, address: int) -> None:
        """Subtract memory that has been freed."""
        self.change(-self.bytes.pop(address))

    def change(self, count: int) -> None:
        """Add `count` bytes, which may be negative."""
        self.now += count
        self.peak = max(self.peak, self.now)
        self.history.append((self.operations, self.now))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else PyTorch imports its compiler first, which takes two seconds, and fails
        # inside `deepspeed.zero.Init`. Nothing is compiled here.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let an operation happen, and follow what it returns."""
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in tree_leaves(result) if self.started else ():
            if isinstance(tensor, torch.Tensor):
                self.follow(tensor.untyped_storage())
        return result
