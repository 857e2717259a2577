"""Chapter 05: what is saved in shards can be read, by whom, and who is refused."""

import contextlib
import inspect
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch import ROOT, torchrun
from pages import words_of
from scripts import load_chapter
from worker_pool import WorkerPool
from zero_ranks import Pools, forget_earlier_group, run_zero_lesson

ROOM = "05_deepspeed_zero/checkpoints"
STEPS, SAVED_AT = 4, 2


# --- What runs on each rank. ----------


def master_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return the fp32 master weights by name, whole; every rank calls this."""
    from deepspeed.utils import safe_get_full_fp32_param

    whole: Any = safe_get_full_fp32_param
    named = engine.module.named_parameters()
    return {name: whole(p).detach().clone() for name, p in named}


def save_in_every_stage(folder: str) -> list[str]:
    """Save half-way, resume, and consolidate, in each stage; note what was saved."""
    script, said = load_chapter(ROOM)["save_and_resume"], []
    save, train, losses = script.save_shards, script.train_steps, []

    def save_and_note(engine: Any, path: Path, tag: str, **state: Any) -> None:
        save(engine, path, tag, **state)
        weights = master_weights(engine)
        if dist.get_rank() == 0:
            torch.save(weights, path / "weights.pt")

    def train_and_note(*arguments: Any) -> list[float]:
        losses.append(train(*arguments))
        return losses[-1]

    # An engine of stage 3 replaces `torch.nn.functional.linear` for the rest of the
    # process. The other one rounds bf16 otherwise, so all shall use the same.
    for stage in (3, 1, 2):
        path = Path(folder, str(stage))
        path.mkdir(exist_ok=True)
        if dist.get_rank() == 0:
            # As if one of three ranks had died while they saved here.
            (path / "half_1").mkdir()
            (path / "half_1" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").touch()
        with (
            mock.patch.object(script, "save_shards", save_and_note),
            mock.patch.object(script, "train_steps", train_and_note),
            mock.patch.multiple(script, STEPS=STEPS, SAVED_AT=SAVED_AT),
        ):
            options = {"folder": path, "stage": stage}
            said.append(run_zero_lesson(ROOM, "save_and_resume", **options))
        uninterrupted = losses[-2]
        if dist.get_rank() == 0:
            (path / "losses.json").write_text(json.dumps(uninterrupted))
    return said


def save_again_twice(folder: str) -> list[str]:
    """Save to a folder that has a checkpoint, and fail before, then after it is named.

    Return what stood in `latest` after each of the two.
    """
    script, named = load_chapter(ROOM)["save_and_resume"], []
    for breaks_off_early in (True, False):
        ends: Any = [[], MemoryError("in mid-run")]
        write = mock.Mock(side_effect=MemoryError("in mid-run"))
        with (
            mock.patch.object(script, "train_steps", mock.Mock(side_effect=ends)),
            mock.patch.object(json, "dumps", write if breaks_off_early else json.dumps),
            pytest.raises(MemoryError, match="in mid-run"),
        ):
            run_zero_lesson(ROOM, "save_and_resume", folder=Path(folder), stage=1)
        dist.barrier()
        named.append((Path(folder) / "latest").read_text())
        dist.barrier()
    return named


def resume_in_every_stage(folder: str, tag: str) -> dict[str, str]:
    """Resume in each stage from what each stage has saved; say how it ended."""
    forget_earlier_group()
    modules, said = load_chapter(ROOM), {}
    modules["deepspeed_setup"].prepare(modules["shards"].CONFIG)
    for saved, stage in itertools.product((1, 2, 3), repeat=2):
        path, is_universal = Path(folder, str(saved)), tag == "universal"
        if is_universal and stage == 1:
            modules["resume_elsewhere"].to_universal(path, "half_1")
        uninterrupted = json.loads((path / "losses.json").read_text())
        engine = modules["shards"].new_engine(stage, is_universal)
        try:
            engine.load_checkpoint(str(path), tag=tag)
            noted = torch.load(path / "weights.pt", weights_only=True)
            weights = master_weights(engine) if is_universal else noted
            changed = [n for n in noted if not torch.equal(weights[n], noted[n])]
            losses = modules["shards"].train_steps(engine, range(SAVED_AT, STEPS))
            pairs = zip(losses, uninterrupted, strict=True)
            apart = max(abs(one - other) for one, other in pairs)
            limit = modules["resume_elsewhere"].LIMIT if is_universal else 0
            fits = len(noted) == 26 and not changed and apart <= limit
            said[f"{saved} to {stage}"] = "" if fits else f"{changed}, {apart}"
        except Exception as error:
            said[f"{saved} to {stage}"] = f"{type(error).__name__}: {error}"
        engine.destroy()
    return said


def resume_with_less(folder: str) -> dict[str, list[float] | str]:
    """Load weights alone, in every stage from stages 0, 1 and 3; return two losses.

    Under "0" and so on are the losses of the uninterrupted run.
    """
    forget_earlier_group()
    modules, said = load_chapter(ROOM), {}
    modules["deepspeed_setup"].prepare(modules["shards"].CONFIG)
    new_engine, train = modules["shards"].new_engine, modules["shards"].train_steps
    for stage in (0, 1, 3):
        engine = new_engine(stage)
        train(engine, range(5))
        engine.save_checkpoint(f"{folder}/{stage}", tag="all")
        said[str(stage)] = train(engine, range(5, 7))
        engine.destroy()
    pairs = itertools.product((0, 1, 3), range(4))
    for saved, stage in pairs:
        for less in ({"load_module_only": True}, {"load_optimizer_states": False}):
            engine, name = new_engine(stage), f"{saved} to {stage}, {next(iter(less))}"
            try:
                engine.load_checkpoint(f"{folder}/{saved}", tag="all", **less)
                said[name] = train(engine, range(5, 7))
            except AssertionError as error:
                said[name] = f"refused: {error}"
            engine.destroy()
    return said


def what_loads_too_little(folder: str) -> dict[str, Any]:
    """Save each stage of a net in float32, and load it into another; say what came.

    Part 0 of the net is frozen, part 1 has buffers, and the weight of part 2 has a
    parameter group of its own. Under a stage is, for each part, whether the universal
    checkpoint has changed it, and the groups' weight decay; under "alone" the same
    after `load_module_only` in stage 3; under "consolidated" what it lacks,
    and how shards whose gradients are accumulated in fp32 are refused.
    """
    forget_earlier_group()
    modules, said = load_chapter(ROOM), {}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    modules["deepspeed_setup"].prepare(config)
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    def new_engine(
        stage: int, seed: int, is_universal: bool = False, weights: Any = None
    ) -> Any:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
        )
        net[0].requires_grad_(False)
        torch.nn.init.constant_(net[1].running_mean, seed)  # type: ignore[arg-type]
        if weights is not None:
            net.load_state_dict(weights)
        groups = [
            {"params": [net[2].weight], "weight_decay": 0.1},
            {"params": [*net[1].parameters(), net[2].bias], "weight_decay": 0.0},
        ]
        more = {"checkpoint": {"load_universal": True}} if is_universal else {}
        zero = {**config["zero_optimization"], "stage": stage}
        return deepspeed.initialize(
            model=net,
            optimizer=torch.optim.AdamW(groups, lr=0.01),
            config={**config, **more, "zero_optimization": zero},
        )[0]

    def step(engine: Any) -> None:
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()

    def values(engine: Any) -> list[torch.Tensor]:
        frozen, norm, last = engine.module
        whole: Any = safe_get_full_fp32_param
        with deepspeed.zero.GatheredParameters(list(frozen.parameters())):
            kept = frozen.weight.detach().clone()
        return [kept, norm.running_mean.clone(), whole(last.weight).clone()]

    def loaded(engine: Any, path: Path, tag: str, **less: bool) -> list[Any]:
        before = values(engine)
        engine.load_checkpoint(str(path), tag=tag, **less)
        pairs = zip(before, values(engine), strict=True)
        changed = [not torch.equal(one, other) for one, other in pairs]
        decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
        engine.destroy()
        return [changed, decays]

    said["consolidated"] = {}
    for stage in (1, 2, 3):
        path, engine = Path(folder, str(stage)), new_engine(stage, seed=0)
        step(engine)
        engine.save_checkpoint(str(path), tag="half")
        names, saved = set(engine.module.state_dict()), values(engine)
        engine.destroy()
        dist.barrier()
        whole: Any = get_fp32_state_dict_from_zero_checkpoint(str(path), tag="half")
        said["consolidated"][stage] = sorted(names - set(whole))
        modules["resume_elsewhere"].to_universal(path, "half")
        other = new_engine(stage, seed=1, is_universal=True)
        step(other)
        said[str(stage)] = loaded(other, path, "universal")
        if stage > 1:  # a consolidated checkpoint brings what the universal one lacks
            other = new_engine(stage, seed=1, is_universal=True, weights=whole)
            other.load_checkpoint(str(path), tag="universal")
            pairs = zip(saved, values(other), strict=True)
            said[f"both in {stage}"] = [torch.equal(a, b) for a, b in pairs]
            other.destroy()
    other = new_engine(3, seed=1)
    step(other)
    said["alone"] = loaded(other, Path(folder, "3"), "half", load_module_only=True)
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    for weights, stage in (("float", 1), ("bf16", 1), ("bf16", 2)):
        config["bf16"] = {"enabled": weights == "bf16"}
        engine, tag = new_engine(stage, seed=0), f"{weights} {stage}"
        engine.save_checkpoint(f"{folder}/fp32", tag=tag)
        engine.destroy()
        dist.barrier()
        try:
            get_fp32_state_dict_from_zero_checkpoint(f"{folder}/fp32", tag=tag)
            said[f"fp32 of {tag}"] = ""
        except ValueError as error:
            said[f"fp32 of {tag}"] = str(error).split("/")[-1]
    return said


def round_robin_elsewhere(folder: str) -> list[list[float]]:
    """Save stage 1 and load it in stage 2, with equal `round_robin_gradients` or not.

    Return how far the weights of a small net in bf16 are from those of the run that
    went on: after loading, and two steps later.
    """
    forget_earlier_group()
    setup = load_chapter(ROOM)["deepspeed_setup"]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
    }
    setup.prepare(config)
    import deepspeed

    def new_engine(stage: int, is_robin: bool, seed: int) -> Any:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)]
        net = torch.nn.Sequential(*layers)
        adam = torch.optim.Adam(net.parameters(), lr=1e-3)
        zero = {"stage": stage, "round_robin_gradients": is_robin}
        settings = {**config, "zero_optimization": zero}
        return deepspeed.initialize(model=net, optimizer=adam, config=settings)[0]

    def steps(engine: Any, seeds: range) -> None:
        for seed in seeds:
            torch.manual_seed(seed)
            inputs = torch.randn(2, 3, 4)[dist.get_rank()].bfloat16()
            engine.backward(engine(inputs).float().square().mean())
            engine.step()

    def weights(engine: Any) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in engine.module.parameters()])

    apart = []
    for is_robin in (False, True):
        saved = new_engine(1, False, seed=0)
        steps(saved, range(3))
        saved.save_checkpoint(folder, tag="here")
        loaded = new_engine(2, is_robin, seed=1)
        loaded.load_checkpoint(folder, tag="here")
        found = []
        for seeds in (range(0), range(3, 5)):
            for engine in (saved, loaded):
                steps(engine, seeds)
            found.append((weights(saved) - weights(loaded)).abs().max().item())
        for engine in (saved, loaded):
            engine.destroy()
        apart.append(found)
    return apart


def files_of_zero_to_fp32(folder: str) -> tuple[list[str], Any]:
    """Call what DeepSpeed's script calls; return its files, and the most in each."""
    from deepspeed.utils import zero_to_fp32

    convert = zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
    convert(f"{folder}/2", f"{folder}/fp32", tag="half_1")
    most = inspect.signature(convert).parameters["max_shard_size"].default
    return sorted(path.name for path in Path(folder, "fp32").iterdir()), most


def ranks_that_fit(config: dict[str, Any]) -> list[int]:
    """Return on how many ranks, of up to nine, DeepSpeed takes this config."""
    from deepspeed.runtime import config as deepspeed_config

    fits = []
    for n in range(1, 10):
        ranks = mock.Mock(**{"get_world_size.return_value": n})
        with (
            mock.patch.object(deepspeed_config, "dist", ranks),
            contextlib.suppress(AssertionError),
        ):
            deepspeed_config.DeepSpeedConfig(config)
            fits.append(n)
    return fits


# --- What the page says. ----------


def test_minimal_resumable_runs_on_as_many_ranks_as_it_says(zero_pools: Pools) -> None:
    script: Any = load_chapter(ROOM)["minimal_resumable"]
    says = "resumes on 1, 2 or 4 ranks, with the same global batch size"
    assert says in words_of(ROOM)
    assert "universal checkpoint on 1, 2 or 4 ranks" in script.__doc__
    fits = zero_pools(1).run(ranks_that_fit, script.CONFIG, world_size=1)
    assert fits == [[1, 2, 4]]


@pytest.fixture(scope="module")
def shards(
    zero_pools: Pools, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[str]]]:
    """Return a folder with what two ranks have saved in each stage, and their words."""
    folder = tmp_path_factory.mktemp("shards")
    said = zero_pools(2).run(save_in_every_stage, str(folder), world_size=2)
    return folder, said


@pytest.mark.slow
def test_shards_resume_to_the_last_bit_and_can_be_consolidated(
    shards: tuple[Path, list[list[str]]],
) -> None:
    said, said_by_rank_1 = shards[1]
    assert said_by_rank_1 == [""] * 3
    assert len(said) == 3
    for text in said:
        assert len(re.findall(r"^ *[\d,]+ bytes in \w+\.pt$", text, re.M)) in (3, 4)
        assert text.endswith(
            "check: 2 losses, the same to the last bit\n"
            "check: the consolidated weights give transformers alone the same loss\n"
        )


@pytest.mark.slow
def test_zero_to_fp32_writes_no_config(
    zero_pools: Pools, shards: tuple[Path, list[list[str]]]
) -> None:
    (found,) = zero_pools(1).run(files_of_zero_to_fp32, str(shards[0]), world_size=1)
    assert found == (["pytorch_model.bin"], "5GB")
    assert "writes weights alone, in files of at most 5 GB" in words_of(ROOM)


OTHER_RANKS = (
    "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 2 but "
    "the current world size is 1. Automatic adjustment of ZeRO's optimizer state "
    "partitioning with a new world size is not currently supported."
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "tag", "says"),
    [
        (2, "half_1", ""),
        pytest.param(1, "half_1", OTHER_RANKS, marks=pytest.mark.slow),
        pytest.param(1, "universal", "", marks=pytest.mark.slow),
        pytest.param(3, "universal", "", marks=pytest.mark.slow),
    ],
)
def test_which_stage_resumes_from_which(
    ranks: int,
    tag: str,
    says: str,
    shards: tuple[Path, list[list[str]]],
    zero_pools: Pools,
) -> None:
    said = zero_pools(ranks).run(
        resume_in_every_stage, str(shards[0]), tag, world_size=ranks
    )
    # Between stages 1 and 2, and from 3 to 3. Else DeepSpeed looks for a file that the
    # other family of stages names otherwise, and says no word more.
    works = {"1 to 1", "1 to 2", "2 to 1", "2 to 2", "3 to 3"}
    fails = {"1 to 3", "2 to 3", "3 to 1", "3 to 2"}
    expected = dict.fromkeys(works, says) | dict.fromkeys(fails, "AssertionError: ")
    assert said == [expected] * ranks


@pytest.mark.slow
def test_stages_1_and_2_read_each_other_s_shards_with_equal_round_robin(
    zero_pools: Pools, tmp_path: Path
) -> None:
    said, other = zero_pools(2).run(round_robin_elsewhere, str(tmp_path), world_size=2)
    assert said == other
    equal, unequal = said
    assert equal == [0, 0] and unequal[0] == 0 and unequal[1] > 0.1
    assert "(silently wrong if `round_robin_gradients` differs)" in words_of(ROOM)


@pytest.mark.slow
def test_an_older_checkpoint_stays_until_the_new_one_is_whole(
    shards: tuple[Path, list[list[str]]], zero_pools: Pools, tmp_path: Path
) -> None:
    folder = tmp_path / "1"
    shutil.copytree(shards[0] / "1", folder)

    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (folder / "half_1").iterdir()}

    before = contents()
    assert len(before) == 4  # weights, two shards and the record
    named = zero_pools(2).run(save_again_twice, str(folder), world_size=2)
    assert named == [["half_1", "half_2"]] * 2
    assert contents() == before
    find_problem = load_chapter(ROOM)["resume_elsewhere"].find_problem
    assert find_problem(folder, 1) == ""
    nothing = f"no checkpoint in {folder}; save_and_resume.py writes one"
    os.truncate(folder / "half_2" / "record.json", 9)
    assert find_problem(folder, 1) == nothing
    (folder / "half_2" / "record.json").unlink()
    assert find_problem(folder, 1) == nothing


@pytest.mark.slow
def test_a_damaged_shard_is_named_and_a_move_that_fails_is_refused(
    shards: tuple[Path, list[list[str]]], tmp_path: Path
) -> None:
    find_problem = load_chapter(ROOM)["resume_elsewhere"].find_problem
    folder = tmp_path / "1"
    shutil.copytree(shards[0] / "1", folder)
    assert [find_problem(folder, stage) for stage in (1, 2)] == ["", ""]
    assert find_problem(folder, 3) == (
        f"the shards in {folder / 'half_1'} are of stage 1 or 2, which stage 3 cannot "
        f"read; the weights alone are in {folder / 'whole'}"
    )
    found = find_problem(shards[0] / "3", 2)
    assert " are of stage 3, which stage 2 cannot read; " in found
    assert find_problem(shards[0] / "3", 3) == ""
    shard = folder / "half_1" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    os.truncate(shard, 1000)
    cut = re.escape(f"{shard} has 1,000 bytes and was saved with ")
    rest = r"2,5\d\d,\d\d\d; nothing was loaded or changed"
    assert re.fullmatch(cut + rest, find_problem(folder, 1))
    shard.unlink()
    assert find_problem(folder, 1).startswith(f"{shard} has 0 bytes")
    nothing = f"no checkpoint in {tmp_path}; save_and_resume.py writes one"
    assert find_problem(tmp_path, 1) == nothing


@pytest.mark.slow
def test_a_damaged_shard_is_refused_before_the_ranks_meet(tmp_path: Path) -> None:
    script = ROOT / ROOM / "resume_elsewhere.py"
    result = torchrun(script, f"--folder={tmp_path}", nproc=2)
    assert result.returncode != 0
    line = (
        f"resume_elsewhere.py: no checkpoint in {tmp_path}; save_and_resume.py writes"
    )
    assert line in result.stderr and "device:" not in result.stdout


@pytest.mark.slow
def test_weights_alone_go_between_stages_0_and_1_and_two_calls_load_too_little(
    zero_pools: Pools, tmp_path: Path
) -> None:
    said, other = zero_pools(2).run(resume_with_less, str(tmp_path), world_size=2)
    assert said == other and len(said) == 3 + 3 * 4 * 2
    untrained = 5.5  # about log(256)
    compared = 0
    for saved, stage in itertools.product((0, 1, 3), range(4)):
        compared += 1
        module_only, no_state = (
            said[f"{saved} to {stage}, {less}"]
            for less in ("load_module_only", "load_optimizer_states")
        )
        if 3 in (saved, stage) and saved != stage:
            assert (module_only, no_state) == ("refused: ", "refused: ")
            continue
        first = said[str(saved)][0]
        assert no_state[0] == pytest.approx(first, abs=1e-2)
        if stage == 3:
            assert module_only[0] == pytest.approx(untrained, abs=0.1)
        else:
            assert module_only[0] == pytest.approx(first, abs=1e-2)
        # In stage 0 the step begins at the master weights, which are untrained.
        assert (no_state[1] > first + 1) == (stage == 0)
    assert compared == 12
    assert [f"{loss:.2f}" for loss in said["0 to 0, load_optimizer_states"]] == [
        "4.02",
        "5.48",
    ]


@pytest.mark.slow
def test_what_loads_too_little_without_an_error(tmp_path: Path) -> None:
    # A job of stage 3 may leave its `zero.Init` open: workers of its own.
    with WorkerPool(2) as workers:
        said, other = workers.run(what_loads_too_little, str(tmp_path), world_size=2)
    assert said == other
    assert said == {
        "consolidated": {1: ["0.bias", "0.weight"], 2: [], 3: []},
        # Frozen weights, a buffer, trained weights; and the groups' weight decay.
        "1": [[False, False, True], [0.1, 0.0]],
        "2": [[False, False, True], [0.1, 0.0]],
        "3": [[False, False, True], [0.1, 0.1]],
        "both in 2": [True, True, True],
        "both in 3": [True, True, True],
        "alone": [[True, True, False], [0.1, 0.0]],
        # With gradients accumulated in fp32, only stage 1 cannot be consolidated.
        "fp32 of float 1": "",
        "fp32 of bf16 1": (
            "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt is not a zero checkpoint"
        ),
        "fp32 of bf16 2": "",
    }
