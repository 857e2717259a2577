"""All ways of training the one GPT, who starts them, and what a rank is to keep."""

from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from model import GPT
from training import CONFIG, SAMPLES, USUAL_EPS, Way
from ways_data_parallel import (
    alone,
    bucketed,
    flat,
    in_ddp,
    in_ddp_accumulating,
    in_ddp_killed,
    naive,
)
from ways_sharded import in_deepspeed, in_fsdp, zero_by_hand
from ways_split import (
    fsdp_and_tensor,
    on_three_axes,
    pipeline,
    tensor,
    tensor_and_sequence,
)
from ways_tokens import EXPERTS, context, experts, experts_alone
from wrong_ways import sum_of_means, sum_over_ranks, term_of_input_gradient

with torch.device("meta"):
    COUNTS = {name: p.numel() for name, p in GPT(CONFIG).named_parameters()}


def count(words: str = "", without: str = "-") -> int:
    """Return the parameters whose names hold these words, in one copy of the model."""
    return sum(n for x, n in COUNTS.items() if words in x and without not in x)


P, EMBEDDING, POSITIONS = count(), count("token_emb"), count("position_emb")
NORMS, MLPS = count("norm"), count(".mlp_", "norm")
ROUTERS = CONFIG.layers * EXPERTS * CONFIG.width
# Bytes for a parameter, its gradient and Adam's two moments, all in fp32.
ADAM = 4 + 4 + 8


def kept(parameters: float, each: float = ADAM) -> Callable[[int], float]:
    """Return what every rank is to keep: bytes for each of so many parameters."""
    return lambda rank: each * parameters


def kept_by_stage(rank: int) -> float:
    """Return what a rank keeps of two stages; the embedding is on both.

    PyTorch keeps a buffer as well for what each micro-batch of a batch receives.
    """
    ends = count("final_norm") if rank else POSITIONS
    received = 4 * SAMPLES * CONFIG.block_size * CONFIG.width
    return ADAM * (count("blocks.0.") + EMBEDDING + ends) + received


def kept_of_both(rank: int) -> float:
    """Return what a rank keeps of a stage that is split by four, norms by two."""
    return (kept_by_stage(rank // 2 % 2) + ADAM * NORMS / 2) / 4


def kept_of_experts(n: int) -> Callable[[int], float]:
    """Return what every rank is to keep that has an n-th of the experts."""
    return kept(P + ROUTERS + (EXPERTS / n - 1) * MLPS)


EXPERTS_ALONE = "experts, one process"
# In the order of the table.
WAYS: dict[str, Way] = {
    "one process": Way(alone, kept(P), 1, ""),
    "naive": Way(naive, kept(P)),
    "flat buffer": Way(flat, kept(P)),
    "buckets, by hooks": Way(bucketed, kept(P)),
    "DDP, mp.spawn": Way(in_ddp, kept(P)),
    "DDP, no_sync": Way(in_ddp_accumulating, kept(P)),
    "ZeRO 1 by hand": Way(partial(zero_by_hand, 1), kept(P, 8 + 8 / 2)),
    "ZeRO 2 by hand": Way(partial(zero_by_hand, 2), kept(P, 4 + 12 / 2)),
    "ZeRO 3 by hand": Way(partial(zero_by_hand, 3), kept(P / 2)),
    "FSDP2": Way(in_fsdp, kept(P / 2)),
    "tensor": Way(tensor, kept((P + POSITIONS + NORMS) / 2), shards=1),
    "tensor + sequence": Way(tensor_and_sequence, kept((P + NORMS) / 2), shards=1),
    "GPipe": Way(partial(pipeline, ScheduleGPipe), kept_by_stage, shards=1),
    "1F1B": Way(partial(pipeline, Schedule1F1B), kept_by_stage, shards=1),
    "context, by a ring": Way(context, kept(P), shards=1),
    EXPERTS_ALONE: Way(experts_alone, kept_of_experts(1), 1, "", alone=EXPERTS_ALONE),
    "experts": Way(experts, kept_of_experts(2), alone=EXPERTS_ALONE),
    "DDP, torchrun": Way(in_ddp, kept(P), 2, "torchrun"),
    "DDP, killed, resumed": Way(in_ddp_killed, kept(P), 2, "torchrun"),
    "DDP, 4 ranks": Way(in_ddp, kept(P), 4, "torchrun"),
    "HSDP, 2 x 2": Way(partial(in_fsdp, replicas=2), kept(P / 2), 4, "torchrun"),
    "FSDP2 x tensor": Way(
        fsdp_and_tensor, kept((P + NORMS) / 4), 4, "torchrun", shards=2
    ),
    # From stage 1 on DeepSpeed keeps fp32 master weights although weights are in fp32.
    # Stage 3 keeps its bucket as well, here for a quarter of the parameters.
    "DeepSpeed, ZeRO 0": Way(partial(in_deepspeed, 0), kept(P), 2, "deepspeed"),
    "DeepSpeed, ZeRO 1": Way(partial(in_deepspeed, 1), kept(P, 12), 2, "deepspeed"),
    "DeepSpeed, ZeRO 2": Way(partial(in_deepspeed, 2), kept(P, 12), 2, "deepspeed"),
    "DeepSpeed, ZeRO 3": Way(partial(in_deepspeed, 3), kept(P, 11), 2, "deepspeed"),
}
ON_REQUEST = "2x2x2"  # eight ranks take long on two cores
WAYS[ON_REQUEST] = Way(on_three_axes, kept_of_both, 8, "torchrun", shards=2)
# On two ranks a sum has two parts, and a + b is b + a. Only with more parts, in other
# micro-batches, or from parts of a matrix product may other last bits come.
SAME_BITS = [
    *("naive", "flat buffer", "buckets, by hooks", "DDP, mp.spawn", "DDP, torchrun"),
    *("DDP, killed, resumed", "FSDP2"),
    *(f"ZeRO {stage} by hand" for stage in (1, 2, 3)),
    *(f"DeepSpeed, ZeRO {stage}" for stage in range(4)),
]
WRONG: dict[str, Way] = {
    "gradients: a sum over ranks": Way(sum_over_ranks, kept(P)),
    "tensor: a term of a gradient": WAYS["tensor"]._replace(
        prepare=term_of_input_gradient
    ),
    "pipeline: a sum of means": WAYS["GPipe"]._replace(prepare=sum_of_means),
}


def usual(name: str) -> str:
    """Return the name of the same way with Adam's usual eps."""
    return f"{name}, eps {USUAL_EPS:.0e}"


# A mistake is trained with the usual eps too, and what is right, to compare with.
USUAL = {
    usual(name): way._replace(eps=USUAL_EPS, alone=usual(way.alone))
    for name, way in {
        **{name: WAYS[name] for name in ("one process", "naive")},
        **WRONG,
    }.items()
}
ALL = WAYS | WRONG | USUAL


def asked_for(only: list[str]) -> dict[str, Way]:
    """Return the ways whose names or launchers hold one of the words; without any, all.

    Eight ranks are started only where their way is asked for by its name.

    Raises ValueError if a word is in none, or blank.
    """
    if not only:
        return {name: way for name, way in ALL.items() if name != ON_REQUEST}
    found = {"one process": WAYS["one process"]}
    for word in only:
        chosen = {
            name: way
            for name, way in (WAYS | WRONG).items()
            if word.strip()
            and word.lower() in f"{name} {way.start}".lower()
            and (name != ON_REQUEST or word.lower() == name)
        }
        if not chosen or not word.strip():
            raise ValueError(f"no way is called {word!r}; there are {', '.join(WAYS)}")
        found |= chosen
    if found.keys() & WRONG.keys():  # beside what is right, and with either eps
        names = [*(found.keys() & WRONG.keys()), "one process", "naive"]
        found |= {name: ALL[name] for one in names for name in (one, usual(one))}
    found |= {way.alone: ALL[way.alone] for way in [*found.values()]}
    return {name: way for name, way in ALL.items() if name in found}
