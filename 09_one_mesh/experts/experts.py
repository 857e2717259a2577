"""Train a mixture whose experts are sharded over the ranks; compare with one process.

Run: torchrun --nproc-per-node=2 09_one_mesh/experts/experts.py
Expect: four all-to-alls of rows in a step, and one process's gradients, if those of
    experts are not averaged as all others are; a balancing loss keeps experts busy.
"""

import os
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mixture import mean_gradients
from ranks import check, fail, gather, join, leave, number, read_options, say
from whole_and_sharded import (
    CONFIG,
    B,
    E,
    T,
    add_gradients_of_both,
    both_models,
    largest_error,
)

STEPS = 40
EXPERT_RANKS = {"type": number(1, E), "help": "how many share E experts; all"}


def main() -> None:
    """Compare a step, then two short trainings, with one process; count the load."""
    n = int(os.environ.get("WORLD_SIZE", "1"))
    e = read_options(expert_ranks=EXPERT_RANKS).expert_ranks or n
    if E % e or n % e:
        fail(f"of {n} ranks, {e} cannot share {E} experts; see --expert-ranks")
    device = join()
    mesh = init_device_mesh(device.type, (n // e, e), mesh_dim_names=("data", "expert"))
    copies, group = mesh["data"].get_group(), mesh["expert"].get_group()
    real = dist.all_to_all_single
    for among, name in (
        (None, "averaged over all ranks"),
        (copies, "summed over copies"),
    ):
        alone, ours = both_models(device, group)
        with mock.patch.object(dist, "all_to_all_single", wraps=real) as calls:
            add_gradients_of_both(0, alone, ours)
        mean_gradients(ours, among)
        error = largest_error(ours, alone, "grad")
        say(f"experts {name:23} | gradients {error:.0%} wrong")
    rows = [call.args[1] for call in calls.call_args_list]
    nbytes = gather([row.nbytes for row in rows if row.is_floating_point()])
    say(f"all-to-all bytes, by rank | {' '.join(map(str, nbytes))}")
    mixture = alone.blocks[0].mixture
    kept = mixture.k * n * B * T - mixture.dropped  # pairs, on all ranks
    is_right = [error < 1e-12, sum(map(sum, nbytes)) == 4 * kept * CONFIG.width * 8]
    say(f"choices, fresh router | {mixture.chosen.tolist()}, {mixture.dropped} dropped")
    for alpha in (0.0, 0.03):
        alone, ours = both_models(device, group)
        optimizer = torch.optim.SGD([*alone.parameters(), *ours.parameters()], lr=0.3)
        for step in range(STEPS):
            optimizer.zero_grad()
            add_gradients_of_both(step, alone, ours, alpha)
            mean_gradients(ours, copies)
            optimizer.step()
        mixture = alone.blocks[0].mixture
        load = f"{mixture.chosen.tolist()}, {mixture.dropped} dropped"
        say(f"choices, alpha {alpha:<6} | {load}")
        is_right.append(largest_error(ours, alone, "data") < 1e-9)
    claim = f"a gradient and {2 * STEPS} steps are one process's, bytes the formula's"
    check(all(is_right), claim)
    leave()


if __name__ == "__main__":
    main()
