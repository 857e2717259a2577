"""Split what tensor parallelism leaves whole, norms and dropout, over the tokens.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/sequence_parallel.py
Expect: as many bytes as with all-reduces, fewer activations kept for backward, and
    fewer still where no logits are gathered; each time the gradient of one process.
"""

import copy
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)

from minimal import PLAN, split_over_ranks
from model import GPT, GPTConfig
from ranks import check, fail, join, leave, say
from sent_and_kept import Collectives, kept_for_backward

B, T, D, V, L = 4, 64, 64, 256, 2
TOKENS, WHOLE = Shard(1), Replicate()  # of (B, T, D): some tokens, or all of it
# PLAN, where what was all-reduced is now left in tokens (a reduce-scatter), and what
# reads it gathers them. SequenceParallel() computes a norm of this rank's tokens.
SEQUENCE_PLAN = PLAN | {
    "token_embedding": RowwiseParallel(input_layouts=WHOLE, output_layouts=TOKENS),
    # The positions' rows are (T, D), the same for all samples: tokens are dimension 0.
    "position_embedding": RowwiseParallel(input_layouts=WHOLE, output_layouts=Shard(0)),
    "blocks.*.attention_norm": SequenceParallel(),
    "blocks.*.attention_out": RowwiseParallel(output_layouts=TOKENS),
    "blocks.*.mlp_norm": SequenceParallel(),
    "blocks.*.mlp_in": ColwiseParallel(input_layouts=TOKENS),
    "blocks.*.mlp_out": RowwiseParallel(output_layouts=TOKENS),
    "final_norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=TOKENS, output_layouts=WHOLE),
}
# Query, key and value read one norm: gather its output once. A plan by itself, since
# the norm has a style above: split_over_ranks(model, mesh, SEQUENCE_PLAN, GATHER_PLAN).
GATHER_PLAN = {
    "blocks.*.attention_norm": PrepareModuleOutput(
        output_layouts=TOKENS,
        desired_output_layouts=WHOLE,
        use_local_output=False,  # a DTensor sums three gradients before it sends
    )
}
LOSS_PLAN = SEQUENCE_PLAN | {
    "head": ColwiseParallel(
        input_layouts=TOKENS,
        output_layouts=Shard(-1),
        use_local_output=False,  # loss_parallel needs the DTensor
    )
}
WAYS = {
    "tensor": ([PLAN], nullcontext),
    "+ sequence": ([SEQUENCE_PLAN, GATHER_PLAN], nullcontext),
    "+ loss": ([LOSS_PLAN, GATHER_PLAN], loss_parallel),
}


def main() -> None:
    """Run a step in three ways; compare bytes, memory and gradients."""
    if GPTConfig().heads % int(os.environ.get("WORLD_SIZE", 1)):
        fail(f"{GPTConfig().heads} heads take 2 or 4 ranks; type --nproc-per-node=2")
    device = join(at_least=2)
    n = dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(0)
    alone = GPT(GPTConfig(T, width=D, layers=L, dropout=0.1)).double().to(device)
    inputs, labels = torch.randint(V, (2, B, T), device=device)
    loss = alone.eval()(inputs, labels)  # without dropout
    right = torch.autograd.grad(loss, list(alone.parameters()))
    # How many (B, T, D) a rank keeps for the blocks, the last norm, the logits; means
    # and variances come to less than 3 % of it.
    formula = [L * (6 + 12 / n) + 2 + V / D, L * (2 + 16 / n) + 1 + 1 / n + V / D]
    formula.append(formula[1] - V / D + V / D / n)
    sent, results = [], []
    for (name, (plans, context)), expected in zip(WAYS.items(), formula, strict=True):
        model = split_over_ranks(copy.deepcopy(alone), mesh, *plans)
        with context():
            kept = kept_for_backward(model.train(), inputs, labels) / (B * T * D * 8)
            with Collectives() as calls:
                model.eval()(inputs, labels).backward()
        sent.append(calls.sent_on_a_ring())
        say(f"{name:10} | sends {sent[-1]:,} bytes | keeps {kept:.1f} x (B, T, D)")
        grads = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore
        is_same = all(distance < 1e-9 for distance in map(torch.dist, grads, right))
        results.append(is_same and expected <= kept < 1.03 * expected)
    is_right = all(results) and sent[0] == sent[1] > sent[2]
    check(
        is_right,
        "each of the three gives one process's gradient; memory by the formula",
    )
    leave()


if __name__ == "__main__":
    main()
