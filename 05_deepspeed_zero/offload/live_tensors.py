"""Find every tensor that is alive in this process, and say what it is for."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import torch

# In this order: a tensor that could be two things is the first of them.
LIVE_KINDS = ("parameters", "gathered", "buckets", "gradients", "optimizer", "other")


def live_storages(
    extra: list[torch.Tensor], place: str | None = None
) -> dict[int, torch.UntypedStorage]:
    """Return by its address all memory that tensors of this process own.

    Tensors that are views of one another share their storage, which counts once. None
    of it is freed, nor its address given to another, while somebody keeps the result.

    Args:
        extra: tensors to count in any case: Python does not see a gradient before
            somebody has asked for it.
        place: a type of device, such as "cpu", to count only what is there.
    """
    # type() and not isinstance: some objects import a library when asked what they are.
    seen = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    storages = {}
    for tensor in [*seen, *extra]:
        if tensor.device.type == (place or tensor.device.type) != "meta":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
    return {address: one for address, one in storages.items() if one.nbytes()}


def named_tensors(engine: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the tensors of an engine that we can name, with their kind.

    The names of DeepSpeed's attributes were found by reading 0.19.8. What is missed
    here is not lost: it turns up as "other".
    """
    parameters = list(engine.module.parameters())
    wrapper, adam = engine.optimizer, getattr(engine.optimizer, "optimizer", None)
    for parameter in parameters:
        # Stage 3 keeps a rank's share aside. The parameter itself is empty, or holds
        # the whole tensor for as long as it is needed.
        share = getattr(parameter, "ds_tensor", None)
        yield "parameters", parameter.data if share is None else share
        if share is not None:
            yield "gathered", parameter.data
        yield "gradients", parameter.grad
    for tensors in getattr(wrapper, "averaged_gradients", {}).values():
        yield from (("gradients", one) for one in tensors or [])
    yield "gradients", getattr(wrapper, "grad_partitions_flat_buffer", None)
    # Gradients that are accumulated in float32 in stage 1.
    whole = getattr(wrapper, "fp32_groups_gradients_flat", [])
    yield from (("gradients", one) for one in whole)
    # In stage 3 the optimizer's groups have `params` during a step only.
    copies = list(getattr(wrapper, "fp32_partitioned_groups_flat", []))
    copies += [p for group in (adam or wrapper).param_groups for p in group["params"]]
    yield from (("optimizer", copy) for copy in copies)
    for state in (adam or wrapper).state.values():
        yield from (
            ("optimizer", one) for one in state.values() if torch.is_tensor(one)
        )
    for bucket in getattr(wrapper, "ipg_buckets", {}).values():
        buffers = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
        yield from (("buckets", buffer) for buffer in buffers)


def own_storages(
    engine: Any, before: dict[int, torch.UntypedStorage], place: str | None = None
) -> dict[int, torch.UntypedStorage]:
    """Return by its address all memory on this rank that came after `before`.

    Args:
        engine: what `deepspeed.initialize` returned.
        before: `live_storages` before there was a model; it is left out.
        place: a type of device, to count only what is there.
    """
    named = [one for _, one in named_tensors(engine) if one is not None]
    found = live_storages(named, place).items()
    return {address: one for address, one in found if address not in before}


def bytes_by_kind(
    engine: Any, before: dict[int, torch.UntypedStorage]
) -> dict[str, int]:
    """Return the bytes of each of LIVE_KINDS on this rank, now; see own_storages."""
    kinds: dict[int, str] = {}
    named = [(kind, one) for kind, one in named_tensors(engine) if one is not None]
    # The parameters come first and are never mistaken for what is cut out of them.
    for kind, tensor in sorted(named, key=lambda pair: LIVE_KINDS.index(pair[0])):
        kinds.setdefault(tensor.untyped_storage().data_ptr(), kind)
    counted: dict[str, int] = dict.fromkeys(LIVE_KINDS, 0)
    for address, storage in own_storages(engine, before).items():
        counted[kinds.get(address, "other")] += storage.nbytes()
    return counted


def bytes_by_place(
    engine: Any, before: dict[int, torch.UntypedStorage]
) -> dict[str, int]:
    """Return the bytes that tensors take on this rank by type of device, host last."""
    return {
        place: sum(s.nbytes() for s in own_storages(engine, before, place).values())
        for place in dict.fromkeys([engine.device.type, "cpu"])
    }


def return_freed_memory() -> bool:
    """Make the C library give freed memory back to the system, if it is glibc.

    Otherwise it keeps some for later, and the size of a process would tell how much it
    once had. Returns whether that could be done.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return False
    # M_MMAP_THRESHOLD: from 64 KB on, what is asked for gets a mapping of its own.
    library.mallopt(-3, 1 << 16)
    library.malloc_trim(0)
    return True


def process_bytes(device: torch.device) -> int:
    """Return what this process has taken, without asking which tensor it is for.

    On the CPU these are the pages that it has touched (the resident set); on an
    accelerator, what the allocator has handed out.
    """
    if device.type == "cpu":
        return_freed_memory()
        return psutil.Process().memory_info().rss
    return torch.accelerator.memory_allocated()
