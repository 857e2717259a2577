"""Chapter 09, its rooms: what goes wrong with the axes of a mesh."""

import contextlib
import io
import itertools
import os
import re
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from launch import ROOT, python
from pages import words_of
from scripts import load_chapter
from worker_pool import RankError, WorkerPool

MISTAKES = "09_one_mesh/mistakes"
HALF_AN_HOUR = timedelta(minutes=30)

# --- mistakes/: each is provoked, and mended. ----------

MISSING = "DistStoreError: wait timeout after 2000ms, keys: /default_pg/0//2//cpu//0/1"
NOT_PART = "ValueError: Global rank 0 is not part of group"
WARNED = "UserWarning: Running all_reduce on global rank {} which does not belong to"
FEW, MANY = "3.1 MB leave a host", "16.8 MB leave a host"
# What each rank prints, for every script as it is and mended: on rank 0, 1, 2 and 3.
ENDS: dict[str, list[str]] = {
    "axes_swapped": [f"('data', 'tensor'): {FEW}", "", "", ""],
    "made_by_members_only": [MISSING, "group [0, 1]: a sum of 2", "", ""],
    "made_by_members_only, mended": [
        *("group [0, 2]: a sum of 2", "group [0, 1]: a sum of 2"),
        *("group [0, 2]: a sum of 2", ""),
    ],
    "not_a_member": [
        *("mean 1.5, shard [0, 1]", "mean 1.5, shard [2, 3]"),
        *("mean -3, shard [2, 3]", "mean -4, shard [2, 3]"),
    ],
    "not_a_member, mended": [
        *("mean 1.5, shard [0, 1]", "mean 1.5, shard [2, 3]"),
        *("mean 3.5, shard [0, 1]", "mean 3.5, shard [2, 3]"),
    ],
    "first_of_the_world": ["seed 0", "seed 0", NOT_PART, NOT_PART],
    "first_of_the_world, mended": ["seed 0", "seed 0", "seed 2", "seed 2"],
    "rank_zero_alone": ["RuntimeError: [", "", "", ""],
    "rank_zero_alone, mended": ["norm 5", "norm 5", "", ""],
    "seeded_by_global_rank": [f"mask: the same on ranks [{rank}]" for rank in range(4)],
    "seeded_by_global_rank, mended": ["mask: the same on ranks [0, 1]"] * 2
    + ["mask: the same on ranks [2, 3]"] * 2,
    "one_seed_for_all": [": 4 different masks of 16"] * 4,
    "one_seed_for_all, mended": [": 16 different masks of 16"] * 4,
    "norm_of_one_axis": ["norm 7, times 0.1429"] * 2 + ["norm 24, times 0.0417"] * 2,
    "norm_of_one_axis, mended": ["norm 25, times 0.0400"] * 4,
    "ddp_over_the_world": ["weight 10, gradient 6"] * 4,
    "ddp_over_the_world, mended": ["weight 10, gradient 2", "weight 20, gradient 10"]
    * 2,
}
# Who ends with an error of its own. On rank 2 of the first, show.py may come before it.
FAILED: dict[str, list[bool | None]] = {
    "made_by_members_only": [True, False, None, False],
    "first_of_the_world": [False, False, True, True],
    "rank_zero_alone": [True, False, False, False],
}
Ends = dict[str, list[tuple[str, int]]]


def ends_in(text: str) -> Ends:
    """Return what each rank said, and its exit code, from what show.py printed."""
    found: Ends = {}
    for part in text.split("--- ")[1:]:
        way, *lines = part.splitlines()
        found[way] = []
        for rank in map(str, range(4)):
            split = [line.removeprefix("rank ").split(" | ", 1) for line in lines]
            said = [line for ranks, line in split if rank in ranks.split(", ")]
            code = re.fullmatch("exit code (-?[0-9]+)", said[-1]) if said else None
            found[way].append((" ".join(said), int(code[1]) if code else 0))
    return found


@pytest.fixture(scope="module")
def shown() -> Ends:
    """Run all mistakes at once, as they are and mended."""
    names = [way for way in ENDS if "mended" not in way]
    result = python(f"{MISTAKES}/show.py", *names)
    assert result.returncode == 0, result.output
    ends = ends_in(result.stdout)
    assert list(ends) == list(ENDS)
    # Ranks that say the same are together, without places that differ by the run.
    assert "\nrank 2, 3 | exit code 1\n" in result.stdout
    assert not re.search(r"\| \[rank| at 0x|[ (\[]/\S+/\w+\.(py|cc)", result.stdout)
    return ends


def is_as_described(ends: Ends, way: str) -> bool:
    """Tell whether all ranks said what the page says, and ended so."""
    ended = zip(ENDS[way], FAILED.get(way, [False] * 4), ends[way], strict=True)
    return all(
        text in said and failed in (None, code > 0)
        for text, failed, (said, code) in ended
    )


@pytest.mark.parametrize("way", ENDS)
def test_mistake_of_a_mesh_ends_as_described(shown: Ends, way: str) -> None:
    assert is_as_described(shown, way), shown[way]


def test_mended_is_not_what_is_described_as_wrong(shown: Ends) -> None:
    names = [way for way in ENDS if f"{way}, mended" in ENDS]
    mended = {name: shown[f"{name}, mended"] for name in names}
    assert len(names) == 8
    assert [name for name in names if is_as_described(mended, name)] == []


def test_every_mistake_of_a_mesh_is_shown() -> None:
    files = {path.stem for path in (ROOT / MISTAKES).glob("*.py")} - {"show"}
    assert files == {way.partition(",")[0] for way in ENDS}


def run_changed(name: str, old: str = "", new: str = "") -> str:
    """Run a script in the group that is there, with something in it changed."""
    code, output = (ROOT / MISTAKES / f"{name}.py").read_text(), io.StringIO()
    assert old in code
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(output),
    ):
        exec(compile(code.replace(old, new), name, "exec"), {"__name__": "__main__"})
    return output.getvalue()


# --- The order of the axes. ----------


def test_swapped_axes_send_the_activations_over_the_link(shown: Ends) -> None:
    # A ring of two ranks: each sends what it has. Two ranks of a host send.
    gradients = 2 * 4 * 4 * 12 * 128**2 / 2
    activations = 2 * 4 * 16 * 1024 * 128
    said = shown["axes_swapped"][0][0]
    sent = dict(re.findall(r"\('(\w+)', '\w+'\): ([\d.]+) MB", said))
    assert sent == {
        "data": f"{gradients / 1e6:.1f}",
        "tensor": f"{activations / 1e6:.1f}",
    }


def peers_on_the_first_axis(is_transposed: bool) -> list[int]:
    """Make a mesh with the tensor axis first; return the ranks of this rank's row."""
    names, ranks = ("tensor", "data"), torch.arange(4).view(2, 2)
    mesh = (
        DeviceMesh("cpu", ranks.t(), mesh_dim_names=names)
        if is_transposed
        else init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    )
    return dist.get_process_group_ranks(mesh["tensor"].get_group())


def test_a_mesh_of_given_ranks_counts_as_they_lie(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(peers_on_the_first_axis, False, world_size=4)
    assert found == [[0, 2], [1, 3], [0, 2], [1, 3]]
    found = worker_pool.run(peers_on_the_first_axis, True, world_size=4)
    assert found == [[0, 1], [0, 1], [2, 3], [2, 3]]


def with_fewer_tokens() -> tuple[str, list[tuple[int, list[int]]]]:
    """Run axes_swapped.py with 192 tokens; return its words, and bytes and ranks."""
    sent, all_reduce = [], dist.all_reduce

    def noted(message: torch.Tensor, group: Any) -> None:
        sent.append((message.nbytes, dist.get_process_group_ranks(group)))
        all_reduce(message, group=group)

    old, new = "TOKENS = 4, 128, 1024", "TOKENS = 4, 128, 192"
    clock = mock.Mock(side_effect=itertools.count(0, 2.5))
    with (
        mock.patch.object(dist, "all_reduce", noted),
        mock.patch.object(time, "perf_counter", clock),
    ):
        return run_changed("axes_swapped", old, new), sent


def test_gradients_are_larger_below_one_and_a_half_widths(
    worker_pool: WorkerPool,
) -> None:
    # 192 tokens are 1.5 times the width; then both orders send as much.
    found = worker_pool.run(with_fewer_tokens, world_size=4)
    said = [text for text, _ in found]
    assert re.findall(r"([\d.]+) MB leave", said[0]) == ["3.1", "3.1"]
    assert re.findall(r"host, (.*) s", said[0]) == ["2.50"] * 2
    assert said[1:] == [""] * 3
    # In each order 16 messages of activations and one of gradients, as it counts.
    activations, gradients = 192 * 128 * 4, 4 * 12 * 128**2 // 2 * 4
    assert len(found) == 4
    for rank, (_, sent) in enumerate(found):
        row, column = [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]
        tensor_last = [(activations, row)] * 16 + [(gradients, column)]
        tensor_first = [(activations, column)] * 16 + [(gradients, row)]
        assert sent == tensor_last + tensor_first


@pytest.mark.slow
def test_link_carries_what_the_script_counts(laboratory: None) -> None:
    words = ["--hosts=2", "--nproc-per-node=2", "--link-rate=200mbit", "--"]
    script = f"{MISTAKES}/axes_swapped.py"
    lab = "03_ddp_torchrun/cluster/lab.py"
    result = python(lab, *words, script)
    assert result.returncode == 0, result.output
    counted = re.findall(r"([\d.]+) MB leave a host, ([\d.]+) s", result.stdout)
    (few, quick), (many, slow) = [tuple(map(float, pair)) for pair in counted]
    # By the rate alone, the first takes a fifth of the time of the second.
    assert 8 * few / 200 < quick < slow and 8 * many / 200 < slow
    sent = [float(x) for x in re.findall(r"^host\d sent ([\d.]+)", result.stdout, re.M)]
    # For each 1448 bytes there are 66 of headers.
    assert sent == pytest.approx([(few + many) * 1514 / 1448] * 2, rel=0.03)


# --- Groups. ----------


def name_of_own_row() -> str:
    """Let each rank make the group of its own row; return what name it would get."""
    rank = dist.get_rank()
    asked = mock.Mock(side_effect=InterruptedError)
    helper = mock.patch.object(
        dist.distributed_c10d, "_new_process_group_helper", asked
    )
    with helper, contextlib.suppress(InterruptedError):
        dist.new_group([0, 1] if rank < 2 else [2, 3])
    return f"{asked.call_args.args[5]}"


def test_rows_of_their_own_get_one_name(worker_pool: WorkerPool) -> None:
    names = worker_pool.run(name_of_own_row, world_size=4)
    assert len(set(names)) == 1 and names[0].isdigit()


def sum_over_own_row() -> tuple[float, str]:
    """Make only the group of this rank's row, named by its ranks."""
    own = [0, 1] if dist.get_rank() < 2 else [2, 3]
    group: Any = dist.new_group(own, use_local_synchronization=True)
    dist.all_reduce(x := torch.tensor(float(dist.get_rank())), group=group)
    return x.item(), group.group_name


def test_local_synchronization_names_a_group_by_its_ranks(
    worker_pool: WorkerPool,
) -> None:
    sums = worker_pool.run(sum_over_own_row, world_size=4)
    assert [total for total, _ in sums] == [1, 1, 5, 5]
    assert len({name for _, name in sums}) == 2


def name_of_second_group(destroys: bool) -> str:
    """Make [0, 1], then [0, 2], members alone; return the name the second would get."""
    synchronized: dict[str, Any] = {"use_local_synchronization": True}
    if dist.get_rank() < 2:
        first: Any = dist.new_group([0, 1], **synchronized)
        if destroys:
            dist.barrier(first)  # until both have joined it
            dist.destroy_process_group(first)
    asked = mock.Mock(side_effect=InterruptedError)
    helper = mock.patch.object(
        dist.distributed_c10d, "_new_process_group_helper", asked
    )
    if dist.get_rank() == 1:
        return ""
    with helper, contextlib.suppress(InterruptedError):
        dist.new_group([0, 2], **synchronized)
    return f"{asked.call_args.args[5]}"


def test_local_synchronization_wants_equally_many_groups_on_its_ranks(
    worker_pool: WorkerPool,
) -> None:
    # `_hash_ranks_to_str` hashes the number of groups that this rank has beside the
    # ranks. With two names both would wait for the other until the timeout.
    first, _, third = worker_pool.run(name_of_second_group, False, world_size=3)
    assert first and third and first != third
    # It counts those that a rank has, not those that it has made.
    first, _, third = worker_pool.run(name_of_second_group, True, world_size=3)
    assert first and first == third


def test_members_alone_can_make_a_group_and_the_next_one_fails(shown: Ends) -> None:
    first, second, third, fourth = shown["made_by_members_only"]
    assert "group [0, 1]: a sum of 2" in first[0] and second[1] == fourth[1] == 0
    assert "group [0, 2]" not in first[0] + third[0]
    assert first[1] == 1 and third[1] != 0


def awaited_by_members() -> list[int]:
    """Make [0, 1], members alone, with a barrier; return how many ranks it awaits."""
    if dist.get_rank() == 2:
        return []
    called = mock.Mock()
    with (
        mock.patch.object(dist.distributed_c10d, "_store_based_barrier", called),
        mock.patch.dict(os.environ, TORCH_DIST_INIT_BARRIER="1"),
    ):
        dist.new_group([0, 1])
    return [call.args[3] for call in called.call_args_list]


def test_a_barrier_of_new_group_awaits_all_ranks(worker_pool: WorkerPool) -> None:
    # On three ranks members alone would wait until the timeout.
    assert worker_pool.run(awaited_by_members, world_size=3) == [[3], [3], []]


def test_rank_zero_waits_for_its_partner_on_the_axis(shown: Ends) -> None:
    said = shown["rank_zero_alone"][0][0]
    # On a busy machine the partner may have ended before the two seconds are over.
    assert "2000ms for recv operation" in said or "Connection closed by peer" in said
    assert "norm" not in said


def limits_of_the_groups() -> tuple[list[timedelta], str]:
    """Run rank_zero_alone.py mended, without its next step; note its groups' limits."""
    code = (ROOT / MISTAKES / "rank_zero_alone.py").read_text()
    assert code.count("    time.sleep(3)") == code.count(" and tensor == 0\n") == 1
    changed = code.replace("    time.sleep(3)", "").replace(" and tensor == 0\n", "\n")
    limits, new_group = [], dist.new_group

    def noted(ranks: list[int], timeout: timedelta) -> Any:
        limits.append(timeout)
        return new_group(ranks, timeout=timeout)

    with mock.patch.object(dist, "new_group", noted):
        return limits, run_changed("rank_zero_alone", code, changed)


def test_rank_zero_waits_less_than_the_next_step_takes(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(limits_of_the_groups, world_size=4)
    limits = [timedelta(seconds=2)] * 2
    assert found == [(limits, "norm 5\n")] * 2 + [(limits, "")] * 2


def axes_of_a_whole_state_dict(by_fsdp: bool) -> set[str]:
    """Return the axes over which ranks gather weights that are to be saved whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    if by_fsdp:
        fully_shard(model, mesh=mesh["data"])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with load_chapter("09_one_mesh")["gpt_on_mesh"].CallsByAxis(mesh) as log:
        get_model_state_dict(model, options=options)
    return {axis for axis, _ in log.calls}


def test_whole_weights_are_gathered_over_data_under_fsdp_only(
    worker_pool: WorkerPool,
) -> None:
    found = [
        worker_pool.run(axes_of_a_whole_state_dict, by_fsdp, world_size=4)
        for by_fsdp in (False, True)
    ]
    assert found == [[{"tensor"}] * 4, [{"data", "tensor"}] * 4]
    page = words_of(MISTAKES)
    assert "where `data` only replicates, those with `mesh.get_local_rank(" in page
    assert "under FSDP all ranks gather." in page


def timeouts() -> list[timedelta]:
    """Return those of the world, of a mesh's groups, and of one that was told."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=7)
    names = ("data", "tensor")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    told: Any = {"tensor": ("gloo", options)}
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=told)
    groups: list[Any] = [dist.group.WORLD, mesh.get_group("tensor")]
    groups.append(other.get_group("tensor"))
    # An axis of all ranks is the world's own group.
    groups += [init_device_mesh("cpu", (4,)).get_group()]
    groups += [mesh["data", "tensor"]._flatten("all").get_group()]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout for backend in backends]


def test_a_mesh_ignores_the_timeout_of_the_world(worker_pool: WorkerPool) -> None:
    of_ranks = worker_pool.run(timeouts, world_size=4, timeout=20)
    world = timedelta(seconds=0.7 * 20)
    # PyTorch makes a new one for gloo where it sees a GPU.
    of_all = HALF_AN_HOUR if torch.cuda.is_available() else world
    told = [world, HALF_AN_HOUR, timedelta(seconds=7), of_all, of_all]
    assert of_ranks == [told] * 4


def test_a_rank_outside_of_a_group_is_only_warned(shown: Ends) -> None:
    ends = shown["not_a_member"]
    assert [code for _, code in ends] == [0] * 4
    assert ["Warning" in said for said, _ in ends] == [False, False, True, True]
    for rank in (2, 3):
        assert WARNED.format(rank) in ends[rank][0]


def calls_from_outside() -> list[str]:
    """Return how calls end on a group of others: an error's name, or the result."""
    others: Any = [dist.new_group([rank]) for rank in (0, 1)][1 - dist.get_rank()]
    one, ends, other = torch.ones(1), [], 1 - dist.get_rank()
    mine = dist.get_rank()
    for call in (
        lambda: dist.all_reduce(one, group=others, async_op=True),
        lambda: dist.send(one, other, group=others),
        lambda: funcol.all_reduce(one, "sum", others),
        lambda: dist.isend(one, other, group=others),
        lambda: dist.broadcast(one, mine, group=others),
        lambda: dist.broadcast(one, other, group=others),
        lambda: dist.reduce(one, mine, group=others),
        lambda: dist.reduce(one, other, group=others),
        lambda: dist.scatter(one, src=mine, group=others),
        lambda: dist.gather(one, dst=other, group=others),
    ):
        try:
            ends.append(str(call()))
        except ValueError:
            ends.append("ValueError")
    return ends


def test_only_some_calls_from_outside_of_a_group_are_errors(
    worker_pool: WorkerPool,
) -> None:
    ends = worker_pool.run(calls_from_outside)
    none, error = "None", "ValueError"
    assert ends == [[none, error, error, none, *[error, none] * 3]] * 2


def outside(option: str) -> tuple[int, int, str]:
    """Return rank and size of a group of others, and what a warning as an error says.

    The option is one of PYTHONWARNINGS, which Python reads when it starts.
    """
    others: Any = [dist.new_group([rank]) for rank in (0, 1)][1 - dist.get_rank()]
    said = ""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings._setoption(option)  # type: ignore
        try:
            dist.all_reduce(torch.ones(1), group=others)
        except ValueError as error:
            said = f"{error}, after {error.__context__}"
    return dist.get_rank(others), dist.get_world_size(others), said


def seed_of_the_first(shape: str) -> str:
    """Run first_of_the_world.py on two ranks, of which a mesh is made."""
    try:
        return run_changed("first_of_the_world", "(2, 2)", shape).strip()
    except ValueError as error:
        return str(error)


def test_source_zero_of_the_world_is_found_with_two_groups(
    worker_pool: WorkerPool,
) -> None:
    assert worker_pool.run(seed_of_the_first, "(1, 2)") == ["seed 0"] * 2
    first, second = worker_pool.run(seed_of_the_first, "(2, 1)")
    assert first == "seed 0" and "Global rank 0 is not part of group" in second


def test_warnings_as_errors_find_another_s_group(worker_pool: WorkerPool) -> None:
    said = "Invalid process group specified, after Running all_reduce on global rank {}"
    said += " which does not belong to the given group."
    # A variable, since torchrun hands `python -W` to no rank, nor pytest its own `-W`.
    (option,) = re.findall(r"`PYTHONWARNINGS=(\S+)`", words_of(MISTAKES))
    ends = worker_pool.run(outside, option)
    assert ends == [(-1, -1, said.format(rank)) for rank in (0, 1)]


def gathered_by_some(file: str) -> tuple[list[float], list[float]]:
    """Gather where `data` is 0, write where the rank is 0; return shard and file."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    weight = distribute_tensor(torch.arange(8.0), mesh["tensor"], [Shard(0)])
    gathers = mesh.get_local_rank("data") == 0
    if gathers:
        whole = weight.full_tensor()
        if mesh.get_rank() == 0:
            torch.save(whole, file)
    dist.barrier()
    return weight.to_local().tolist() if gathers else [], torch.load(file).tolist()


def test_all_of_the_tensor_axis_gather_and_one_writes(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    ends = worker_pool.run(gathered_by_some, str(tmp_path / "file"), world_size=4)
    # Two gather, of whom each has half: if both wrote it, one file would be left.
    assert [shard for shard, _ in ends] == [[0, 1, 2, 3], [4, 5, 6, 7], [], []]
    assert [file for _, file in ends] == [[*range(8)]] * 4
    page = words_of(MISTAKES)
    assert (
        '`mesh.get_local_rank("data") == 0` gather, and **rank 0 alone writes**' in page
    )


# --- Seeds. ----------


def test_whole_weights_are_equal_on_all_ranks_if_mended(shown: Ends) -> None:
    wrong, right = (
        shown["seeded_by_global_rank"],
        shown["seeded_by_global_rank, mended"],
    )
    for rank in range(4):
        assert f"weight: the same on ranks [{rank}]" in wrong[rank][0]
        assert "weight: the same on ranks [0, 1, 2, 3]" in right[rank][0]


def test_stages_alone_do_not_make_masks_differ(worker_pool: WorkerPool) -> None:
    # Seeded by the stage, which is the usual seed of weights, replicas drop the same.
    old, new = (
        "    torch.manual_seed(0)\n    masks",
        "    torch.manual_seed(stage)\n    masks",
    )
    said = worker_pool.run(run_changed, "one_seed_for_all", old, new, world_size=4)
    assert [": 8 different masks of 16" in text for text in said] == [True] * 4


# --- A norm of one axis. ----------


def test_clipping_by_each_stage_turns_the_gradient(shown: Ends) -> None:
    wrong, right = shown["norm_of_one_axis"], shown["norm_of_one_axis, mended"]
    for rank in range(4):
        assert "clipped to norm 1.41, direction: cosine 0.88" in wrong[rank][0]
        assert "clipped to norm 1.00, direction: cosine 1.00" in right[rank][0]


BOTH_AXES = '["tensor", "pipeline"]'


def norms_and_factors(*cases: tuple[str, str]) -> list[list[float]]:
    """Run norm_of_one_axis.py with other axes, and another rule for copies."""
    code = (ROOT / MISTAKES / "norm_of_one_axis.py").read_text()
    found = []
    for axes, condition in cases:
        assert code.count('["tensor"]\n') == code.count("if place == 0:") == 1
        changed = code.replace('["tensor"]\n', f"{axes}\n")
        changed = changed.replace("if place == 0:", condition)
        said = run_changed("norm_of_one_axis", code, changed)
        pairs = re.findall(r"norm (\d+), times ([\d.]+)", said)
        found += [[float(x) for x in pair] for pair in pairs]
    assert len(found) == len(cases)
    return found


def test_norms_of_other_sums(worker_pool: WorkerPool) -> None:
    own, twice, once = ("[]", "if place == 0:"), (BOTH_AXES, "if True:"), BOTH_AXES
    cases = own, twice, (once, "if place == 0:")
    found = worker_pool.run(norms_and_factors, *cases, world_size=4)
    # Of this rank's shards alone: even the copies of one weight get other factors.
    assert len({factor for (_, factor), _, _ in found}) == 4
    # Copies that are counted twice make all ranks' norm too large alike.
    too_large = (25**2 + 2**2 + 8**2) ** 0.5
    expected = [round(too_large), pytest.approx(1 / too_large, abs=1e-4)]
    assert [second for _, second, _ in found] == [expected] * 4
    assert [third for _, _, third in found] == [[25, 0.04]] * 4


def small_and_large() -> str:
    """Run norm_of_one_axis.py with a stage whose gradient is short enough."""
    code = (ROOT / MISTAKES / "norm_of_one_axis.py").read_text()
    changed = code.replace("[[6.0, 3.0], [16.0, 16.0]]", "[[0.3, 0.4], [3.0, 4.0]]")
    changed = changed.replace("[2.0, 8.0]", "[0.0, 0.0]")
    return run_changed("norm_of_one_axis", code, changed)


def test_a_short_gradient_is_left_as_it_is(worker_pool: WorkerPool) -> None:
    said = worker_pool.run(small_and_large, world_size=4)
    norms = ["stage 0: norm 0, times 1.0000"] * 2 + [
        "stage 1: norm 5, times 0.2000"
    ] * 2
    # (0.3, 0.4, 3, 4) becomes (0.3, 0.4, 0.6, 0.8).
    norm, cosine = 1.25**0.5, 5.25 / (25.25 * 1.25) ** 0.5
    clipped = f"clipped to norm {norm:.2f}, direction: cosine {cosine:.2f}"
    assert [text.splitlines() for text in said] == [[x, clipped] for x in norms]


# --- An average over the world. ----------


def test_ddp_sends_rank_0_s_shard_to_all(shown: Ends) -> None:
    wrong, right = shown["ddp_over_the_world"], shown["ddp_over_the_world, mended"]
    for rank in range(4):
        assert f"column {rank % 2}: weight 10, gradient 6" in wrong[rank][0]
        assert f"column {rank % 2}: weight {10 + 10 * (rank % 2)}," in right[rank][0]


def wrap_uneven_shards() -> str:
    """Wrap a shard that is larger on rank 1 in DDP."""
    shard = nn.Linear(1, 1 + dist.get_rank(), bias=False)
    DistributedDataParallel(shard)
    return "accepted"


def test_ddp_notices_shards_of_other_shapes(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError, match="appears not to match sizes of the same param"):
        worker_pool.run(wrap_uneven_shards)


def wrap_dtensors() -> tuple[list[str], bool]:
    """Wrap a column-parallel layer in DDP: return what is refused, and one replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    said: list[str] = []
    ways: list[dict[str, Any]] = [
        {},
        {"process_group": mesh["data"].get_group()},
        {"device_mesh": mesh["data"]},
    ]
    for settings in ways:
        torch.manual_seed(dist.get_rank())
        layer: Any = nn.Linear(2, 2, bias=False)
        parallelize_module(layer, mesh["tensor"], ColwiseParallel())
        try:
            DistributedDataParallel(layer, **settings)
        except NotImplementedError as error:
            said.append(str(error))
            continue
        # DDP has put the local shards in the place of the DTensors.
        shard = layer.weight.detach().contiguous()
        first = [torch.empty_like(shard) for _ in range(2)]
        dist.all_gather(first, shard, group=mesh["data"].get_group())
        return said, torch.equal(*first)
    return said, False


def test_ddp_takes_dtensors_only_with_a_device_mesh(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(wrap_dtensors, world_size=4)
    words = (
        "Operator c10d.broadcast_.default does not have a sharding strategy registered."
    )
    assert found == [([words] * 2, True)] * 4


def train_dtensors_by_ddp() -> list[tuple[list[str], list[str], float]]:
    """Train a layer of DTensors by DDP, and alone; return what is left after each step.

    That is the names of the parameters, those in the state dict, and how far the
    gradients are from one process's.
    """
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    layer, alone = nn.Linear(2, 2), nn.Linear(2, 2)
    alone.load_state_dict(layer.state_dict())
    parallelize_module(layer, mesh["tensor"], ColwiseParallel())
    ddp_model = DistributedDataParallel(layer, device_mesh=mesh["data"])
    parameters, found = list(ddp_model.parameters()), []
    assert len(parameters) == 2
    batch = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        ddp_model(batch.chunk(2)[dist.get_rank()]).square().mean().backward()
        alone(batch).square().mean().backward()
        pairs = zip(parameters, alone.parameters(), strict=True)
        apart = max(torch.dist(ours.grad, one.grad) for ours, one in pairs)  # type: ignore
        names = [name for name, _ in ddp_model.named_parameters()]
        found.append((names, list(ddp_model.state_dict()), float(apart)))
    return found


def test_dtensors_under_ddp_train_and_are_in_no_state_dict(
    worker_pool: WorkerPool,
) -> None:
    close = pytest.approx(0.0, abs=1e-6)
    assert worker_pool.run(train_dtensors_by_ddp) == [[([], [], close)] * 2] * 2


def moved_by_an_optimizer(is_before: bool) -> tuple[bool, float]:
    """Build it before or after DDP wraps DTensors, and step.

    Returns whether it has this rank's gradients, and how far the weights have moved.
    """
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    layer = nn.Linear(2, 2)
    parallelize_module(layer, mesh["tensor"], ColwiseParallel())
    early = torch.optim.SGD(layer.parameters(), lr=0.1)
    ddp_model = DistributedDataParallel(layer, device_mesh=mesh["data"])
    late = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    optimizer, batch = early if is_before else late, torch.ones(1, 2)
    before = ddp_model(batch)
    before.sum().backward()
    optimizer.step()
    (group,) = optimizer.param_groups
    has_gradients = [p.grad is not None for p in group["params"]]
    assert len(has_gradients) == 2
    return all(has_gradients), (ddp_model(batch) - before).abs().max().item()


def test_optimizer_built_before_ddp_wraps_dtensors_moves_nothing(
    worker_pool: WorkerPool,
) -> None:
    assert worker_pool.run(moved_by_an_optimizer, True) == [(False, 0.0)] * 2
    after = worker_pool.run(moved_by_an_optimizer, False)
    # Two weights of each output, and its bias, by a tenth of a gradient of 1.
    assert after == [(True, pytest.approx(0.3, abs=1e-6))] * 2


def average_by_hand() -> tuple[float, float]:
    """Average a column's gradient, without a group and over the data axis."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    means = []
    for group in (None, groups[rank % 2]):
        gradient = torch.tensor(1.0 + 4 * (rank % 2))
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=group)
        means.append(gradient.item())
    return means[0], means[1]


def test_all_reduce_without_a_group_mixes_columns(worker_pool: WorkerPool) -> None:
    means = worker_pool.run(average_by_hand, world_size=4)
    assert means == [(3.0, 1.0), (3.0, 5.0)] * 2


# --- show.py. ----------


@pytest.mark.parametrize(
    ("words", "said"), [(["unknown"], "there is no unknown; "), ([], "")], ids=str
)
def test_show_says_which_names_it_knows(words: list[str], said: str) -> None:
    result = python(f"{MISTAKES}/show.py", *words)
    names = sorted({way.partition(",")[0] for way in ENDS})
    assert result.returncode == 2
    assert result.stderr == f"show.py: {said}choose from {', '.join(names)}\n"


def test_ranks_end_two_seconds_after_one_has_failed() -> None:
    show: Any = load_chapter(MISTAKES)["show"]
    failed, hangs = mock.Mock(exitcode=1), mock.Mock(exitcode=None)
    failed.is_alive.return_value, waited = False, []
    hangs.is_alive.side_effect = lambda: not hangs.terminate.called

    def wait(seconds: float) -> None:
        waited.append((seconds, hangs.terminate.called))
        assert len(waited) < 9, "what hangs is never ended"

    with mock.patch.object(show.time, "sleep", wait):
        show.wait_for_ranks([failed, hangs])
    assert waited == [(2, False), (0.05, True)]


def test_mended_code_differs_in_one_line() -> None:
    show: Any = load_chapter(MISTAKES)["show"]
    changed = 0
    for name, code in show.SCRIPTS.items():
        mended = show.WRITE.sub(r"\1\2\n", code)
        if mended != code:
            assert len(code.splitlines()) == len(mended.splitlines()) + 1, name
            changed += 1
    assert changed == 8
