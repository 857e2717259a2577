"""Count what a rank sends in one step of each ZeRO stage, in three ways that agree.

Run: deepspeed --num_gpus=2 05_deepspeed_zero/communication/communication_volume.py
Expect: the collectives of a step, and the communication volume in multiples of the
    parameters, with one micro-batch and two: the paper's, DeepSpeed's, and TCP's.
"""

import argparse
import math
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from deepspeed_setup import SETUP_OPTIONS, join, leave, prepare
from ranks import check, gather, read_options, say, start_ranks
from traffic import CollectiveCounter, bytes_due, logged_calls, tcp_bytes_sent

MODEL: dict[str, Any] = {"vocab_size": 256, "hidden_size": 512, "num_hidden_layers": 2}
MODEL |= {"intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": True},
}
SMALL = 100_000  # values; in stage 3 every rank keeps whole tensors of up to so many
# In values, too, and by default for models a thousand times as large.
ZERO = dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), 131_072)
ZERO |= {"stage3_max_live_parameters": 131_072, "stage3_max_reuse_distance": 0}
TO_OWNER = {"use_multi_rank_bucket_allreduce": False}
VARIANTS = [(0, {}), (1, {}), (1, TO_OWNER), (2, {}), (2, TO_OWNER), (3, {})]
PAPER = (2, 2, 2, 3)  # Rajbhandari et al., 2020, section 7, for one micro-batch


def count_step(
    stage: int, settings: dict[str, Any], micro_batches: int, device: torch.device
) -> dict[str, Any]:
    """Train a few steps; count the last one in three ways. Every rank calls this."""
    import deepspeed

    model = Qwen2ForCausalLM(Qwen2Config(**MODEL, tie_word_embeddings=True))
    sizes = [p.numel() for p in model.parameters()]
    config = CONFIG | {"gradient_accumulation_steps": micro_batches}
    config |= {"zero_optimization": ZERO | settings | {"stage": stage}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    tokens = torch.randint(256, (1, 64), device=device)

    def train_step() -> None:
        for _ in range(micro_batches):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()

    for _ in range(2 if stage == 3 else 0):
        train_step()  # stage 3 learns in which order it needs the weights
    logged_calls()
    before = tcp_bytes_sent()
    with CollectiveCounter() as counter:
        train_step()
    sent = tcp_bytes_sent() - before
    engine.destroy()
    counted = {name: (len(each), sum(each)) for name, each in counter.calls.items()}
    return {"sizes": sizes, "logged": logged_calls(), "counted": counted, "sent": sent}


def volume(stage: int, to_owner: bool, micro_batches: int, sizes: list[int]) -> float:
    """Return what DeepSpeed needs a rank to send, in multiples of the parameters.

    (n - 1)/n counts as 1. `sizes` are the values of each tensor, the embedding first.
    """
    # From stage 2 on a rank keeps no sums that are another's: each micro-batch sends.
    times = micro_batches if stage >= 2 else 1
    if stage < 3:
        return times * (1 if to_owner else 2) + (stage > 0)
    total, small = sum(sizes), sum(count for count in sizes if count <= SMALL)
    tied = sizes[0] if sizes[0] > SMALL else 0  # it is the output matrix as well
    return (times * (2 * (total - small + tied) + total) + small) / total


def main(options: argparse.Namespace) -> None:
    """Count every stage with one micro-batch and with two; compare the counts."""
    device, is_right = prepare(CONFIG), True
    join(at_least=2)
    n = dist.get_world_size()
    say(f"{'in multiples of the parameters':53}paper  DeepSpeed   TCP")
    for (stage, settings), parts in product(VARIANTS, (1, 2)):
        by_rank = gather(count_step(stage, settings, parts, device))
        counted, sizes = by_rank[0]["counted"], by_rank[0]["sizes"]
        whole = 4 * sum(sizes)
        needed, gloo = (bytes_due(counted, n, g) / whole for g in (False, True))
        tcp = sum(one["sent"] for one in by_rank) / (n - 1) / whole
        if parts == 1:
            name = f"stage {stage}" + (f", {settings}" if settings else "")
            say(f"{name:53}{PAPER[stage]:5}{needed:11.2f}{tcp:6.2f}")
            for call, (calls, total) in counted.items():
                say(f"  {call:14}{calls:4} calls{total / 1e6:8.1f} MB")
        else:
            say(f"  with two micro-batches{needed:46.2f}{tcp:6.2f}")
        due = volume(stage, bool(settings), parts, sizes)
        same = [one["logged"] == one["counted"] == counted for one in by_rank]
        is_right &= all(same) and math.isclose(needed, due, rel_tol=0.01)
        is_right &= not abs(tcp / gloo - 1) > 0.05  # nan where it is not gloo
    check(is_right, f"on {n} ranks 3 counts agree in 12 steps, TCP's less gloo's extra")
    leave()


if __name__ == "__main__":
    start_ranks(main, 2, read_options(**SETUP_OPTIONS))
