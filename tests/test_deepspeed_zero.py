"""Chapter 05: the stages of ZeRO come to what one process would have come to."""

import contextlib
import importlib
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from launch import ROOT, Result, clean_environment, python, run, torchrun
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "05_deepspeed_zero"
FOLDER = ROOT / CHAPTER
PARAMETERS = 427_136
BLOCK = 64
Pools = Callable[[int], WorkerPool]


# --- What runs on each rank. ----------


def prepare() -> dict[str, Any]:
    """Import the chapter, and let DeepSpeed forget an earlier job's process group."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    importlib.reload(groups)
    return load_chapter(CHAPTER)


def make_engine(stage: int, **changes: Any) -> Any:
    """Return an engine as stage_N.py makes it; `changes` go to the config."""
    modules = load_chapter(CHAPTER)
    config = json.loads(json.dumps(modules[f"stage_{stage}"].CONFIG)) | changes
    modules["start"].choose_parts(config, torch.device("cpu"), False)
    import deepspeed

    model = modules["qwen"].small_model()
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )[0]


def train(engine: Any, steps: int, shift: int = 0) -> tuple[list[float], torch.Tensor]:
    """Train as the stage scripts do; return the mean losses and the text.

    With `shift`, the ranks after the first take samples of another step.
    """
    modules = load_chapter(CHAPTER)
    data, proof = modules["data"], modules["proof"]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokens = data.to_tokens(data.read_text(None), None, BLOCK)
    losses = []
    for step in range(steps):
        batch = data.global_batch(tokens, step + shift * rank, 8 * world_size, BLOCK)
        inputs = data.own_rows(batch, rank, world_size)
        loss = engine(input_ids=inputs, labels=inputs).loss
        engine.backward(loss)
        engine.step()
        losses.append(proof.mean_over_ranks(loss))
    return losses, tokens


def all_stages(steps: int) -> list[tuple[list[str], list[int], list[float], str]]:
    """Train with every stage; return its lines, counts, losses and its check."""
    modules, results = prepare(), []
    proof = modules["proof"]
    for stage in range(4):
        engine = make_engine(stage)
        lines = proof.describe_ranks(engine)
        losses, tokens = train(engine, steps)
        counts = [proof.optimizer_count(engine), proof.adam_count(engine)]
        untrained = modules["qwen"].small_model()
        result = proof.check_engine(engine, untrained, tokens, BLOCK, losses)
        results.append((lines, counts, losses, result))
        engine.destroy()
    return results


def check_after(stage: int, mistake: str) -> str:
    """Make a mistake, and return what the check of the stage scripts says to it."""
    modules = prepare()
    changes = {"gradient_clipping": 0.0} if mistake == "other clipping" else {}
    engine = make_engine(stage, **changes)
    losses, tokens = train(engine, 3, shift=1 if mistake == "wrong samples" else 0)
    if mistake == "other clipping":
        engine.gradient_clipping = lambda: 1.0
    if mistake == "own loss":
        losses[0] += 1e-3 * (dist.get_rank() + 1)
    if mistake == "one weight":
        with torch.no_grad():
            next(engine.module.parameters())[0, 0] += 1e-6 * dist.get_rank()
    if mistake == "lost states":
        engine.optimizer.optimizer.state.clear()
    untrained = modules["qwen"].small_model()
    try:
        modules["proof"].check_engine(engine, untrained, tokens, BLOCK, losses)
    except RuntimeError as error:
        return str(error)
    return ""


def send_two_micro_batches() -> tuple[str, list[float], dict[int, str]]:
    """Count as sent.py --micro-batches=2; return what no_sync is answered, too."""
    modules, cpu = prepare(), torch.device("cpu")
    modules["start"].choose_parts({"optimizer": {"params": {}}}, cpu, False)
    sent, everything = modules["sent"], []
    args = SimpleNamespace(width=256, layers=1, micro_batches=2)
    for stage, more in sent.VARIANTS:
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, sent.measure_traffic(args, stage, more, cpu))
        everything.append(by_rank)
    times = [sent.multiples(results).by_calls for results in everything]
    answers = {}
    for stage in range(4):
        engine = make_engine(stage)
        try:
            with engine.no_sync():
                answers[stage] = ""
        except AssertionError as error:
            answers[stage] = str(error)
        engine.destroy()
    return sent.compare_counts(everything), times, answers


def settings_nobody_asked_for(folder: str) -> dict[str, Any]:
    """Leave out what is often taken for harmless to leave out."""
    prepare()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3}},
        "zero_optimisation": {"stage": 3},
    }
    modules = load_chapter(CHAPTER)
    modules["start"].choose_parts(config, torch.device("cpu"), False)
    import deepspeed

    model = modules["qwen"].small_model()
    path = Path(folder, "config.json")
    path.write_text(json.dumps(config | {"zero_optimization": {"stage": 2}}))
    engines = [
        deepspeed.initialize(model=m, model_parameters=m.parameters(), config=c)[0]
        for m, c in [(model, config), (modules["qwen"].small_model(), str(path))]
    ]
    return {
        "clipping": engines[0].gradient_clipping(),
        "stage": engines[0].zero_optimization_stage(),
        "stage from file": engines[1].zero_optimization_stage(),
        "adam": type(engines[0].optimizer).__name__,
        "problem": modules["config_keys"].unknown_key(config),
        "nested": modules["config_keys"].unknown_key(
            {"zero_optimization": {"stge": 1}}
        ),
        "own": [
            modules["config_keys"].unknown_key(modules[f"stage_{stage}"].CONFIG)
            for stage in range(4)
        ],
    }


def save_in_every_stage(folder: str) -> list[str]:
    """Save half-way, resume, and join the shards, in each stage."""
    modules, said = prepare(), []
    script, device = modules["checkpoints"], torch.device("cpu")
    tokens = modules["data"].to_tokens(modules["data"].read_text(None), None, BLOCK)
    for stage in (1, 2, 3):
        path = Path(folder, str(stage))
        path.mkdir(exist_ok=True)
        if dist.get_rank() == 0:
            # As if three ranks had saved here before, and others had died doing so.
            for name in ("half", "unfinished"):
                (path / name).mkdir()
                (path / name / "zero_pp_rank_2_mp_rank_00_optim_states.pt").touch()
        said.append(script.save_and_resume(path, stage, tokens, 4, device))
        if dist.get_rank() == 0:
            loss = json.loads((path / script.RECORD).read_text())["losses"][0]
            said.append(script.consolidate(path, tokens, loss, 2))
        dist.barrier()
    return said


def break_off_another_save(folder: str) -> str:
    """Save again to a folder that has a checkpoint, and fail before all is done."""
    modules = prepare()
    script = modules["checkpoints"]
    train_steps = mock.Mock(side_effect=[[], MemoryError("in mid-run")])
    with mock.patch.object(script, "train_steps", train_steps):
        try:
            script.save_and_resume(
                Path(folder), 1, torch.zeros(0), 4, torch.device("cpu")
            )
        except MemoryError as error:
            return str(error)
    return "it went on"


def go_on_in_every_stage(folder: str, tag: str) -> dict[str, str]:
    """Go on in each stage from what each stage has saved; say how it ended."""
    modules, said = prepare(), {}
    script, device = modules["checkpoints"], torch.device("cpu")
    tokens = modules["data"].to_tokens(modules["data"].read_text(None), None, BLOCK)
    for saved, stage in itertools.product((1, 2, 3), repeat=2):
        path = Path(folder, str(saved))
        if tag == "universal" and stage == 1:
            script.to_universal(path)
        record = json.loads((path / script.RECORD).read_text())
        engine = script.new_engine(stage, device, universal=tag == "universal")
        try:
            engine.load_checkpoint(str(path), tag=tag)
            losses = script.train_steps(engine, tokens, range(*record["steps"]), device)
            pairs = zip(losses, record["losses"], strict=True)
            apart = max(abs(one - other) for one, other in pairs)
            said[f"{saved} to {stage}"] = "" if apart < script.LIMIT else f"{apart}"
        except Exception as error:
            said[f"{saved} to {stage}"] = f"{type(error).__name__}: {error}"
        engine.destroy()
    return said


def write_checkpoints(folder: str) -> None:
    """Write a checkpoint with its tokenizer, and others that lack something."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Model

    qwen, base = load_chapter(CHAPTER)["qwen"], Path(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    qwen.small_model(seed=1).save_pretrained(base / "no tokenizer")
    shutil.copytree(base / "no tokenizer", base / "good")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(base / "good")
    Qwen2Model(qwen.small_config()).save_pretrained(base / "no output layer")
    shutil.copytree(base / "good", base / "cut")
    weights = base / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (base / "empty").mkdir()


def answers(folder: str) -> dict[str, str]:
    """Return what load_checkpoint says to each folder."""
    modules, said = prepare(), {}
    write_checkpoints(folder)
    for path in [*sorted(Path(folder).iterdir()), Path(folder, "nothing")]:
        try:
            modules["qwen"].load_checkpoint(str(path), 1, 2, 10**9)
            said[path.name] = ""
        except ValueError as error:
            said[path.name] = str(error).removeprefix(f"--model {path}: ")
    try:
        modules["qwen"].load_checkpoint(f"{folder}/good", 1, 2, 10**6)
    except ValueError as error:
        said["too large"] = str(error).removeprefix(f"--model {folder}/good ")
    return said


# --- The scripts, as a user starts them. ----------


@pytest.fixture(scope="module")
def zero_pools() -> Iterator[Callable[[int], WorkerPool]]:
    """Return warm workers for a number of ranks.

    DeepSpeed remembers how many ranks there were. A process that has been the only rank
    averages wrongly as one of two, so that each number has processes of its own.
    """
    with contextlib.ExitStack() as stack:
        pools: dict[int, WorkerPool] = {}

        def pool_of(ranks: int) -> WorkerPool:
            if ranks not in pools:
                pools[ranks] = stack.enter_context(WorkerPool(ranks))
            return pools[ranks]

        yield pool_of


def body(path: Path) -> str:
    """Return a script without its docstring."""
    return path.read_text().split('"""', 2)[2]


def test_the_stages_differ_only_in_docstring_and_config() -> None:
    first = body(FOLDER / "stage_0.py")
    assert first.count('{"stage": 0}') == 1
    for stage in (1, 2, 3):
        other = body(FOLDER / f"stage_{stage}.py")
        assert other == first.replace('{"stage": 0}', f'{{"stage": {stage}}}')


def assert_ended_well(result: Result, stage: int, ranks: int, count: int) -> None:
    assert result.returncode == 0, result.output
    lines = re.findall(
        r"^rank (\d) \| stage (\d) .* count ([\d,]+)$", result.output, re.M
    )
    assert lines == [(str(r), str(stage), f"{count:,}") for r in range(ranks)]
    assert (
        f"check: {count:,} Adam states on each of {ranks} rank(s), 0 weights differ"
        in (result.output)
    )


@pytest.mark.smoke
@pytest.mark.slow
def test_deepspeed_starts_two_ranks_while_29500_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    launcher = [str(Path(clean_environment()["PATH"].split(":")[0], "deepspeed"))]
    with socket.socket() as busy:
        try:
            busy.bind(("127.0.0.1", 29500))  # allowed port: it is taken on purpose
            busy.listen()
        except OSError:
            pass  # another job holds it already, which is as good
        # The launcher is not told a port, so it tells its ranks 29500.
        result = run([*launcher, "--num_gpus=2", FOLDER / "stage_1.py"], cwd=folder)
    assert_ended_well(result, 1, 2, PARAMETERS // 2)
    losses = re.findall(r"^step +(\d+) \| mean loss .* ([\d.]+)$", result.stdout, re.M)
    assert [int(step) for step, _ in losses] == [1, 10]
    assert 5.2 < float(losses[0][1]) < 5.6 and float(losses[1][1]) < 3.3
    # Nothing of DeepSpeed's own comes between the lines of the lesson.
    lesson = result.stdout[result.stdout.index("device: ") :]
    own = [line for line in lesson.splitlines() if "[INFO] [launch.py" not in line]
    assert len(own) == 10, own
    assert "Warning" not in result.stderr


@pytest.mark.slow
def test_torchrun_starts_three_ranks_and_a_checkpoint(
    tmp_path: Path, zero_pools: Pools
) -> None:
    zero_pools(1).run(write_checkpoints, str(tmp_path), world_size=1, timeout=60)
    model = f"--model={tmp_path / 'good'}"
    result = torchrun(FOLDER / "stage_3.py", "--steps=2", model, nproc=3)
    count = int(
        re.findall(r"parameter count ([\d,]+)$", result.output, re.M)[0].replace(
            ",", ""
        )
    )
    # 26 tensors, each padded to a multiple of three.
    assert PARAMETERS < 3 * count < PARAMETERS + 3 * 26
    assert_ended_well(result, 3, 3, count)
    assert "each of 26 tensors divided by 3 ranks" in result.output


ONE_RANK = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import stage_1
stage_1.leave_group = lambda: print("torch._inductor.compile_fx" in sys.modules)
stage_1.main()
"""


def test_one_rank_without_a_compiler_says_what_it_does_and_starts_fast() -> None:
    environment = clean_environment(CXX="/nowhere/c++")
    command = [FOLDER, "--steps=2", "--fused"]
    result = python("-c", ONE_RANK, *command, env=environment)
    assert_ended_well(result, 1, 1, PARAMETERS)
    assert (
        "compiled: nothing, because there is no C++ compiler (/nowhere/c++); "
        "PyTorch's Adam instead" in result.stdout
    )
    assert "one rank: nothing can be divided; this starts two:" in result.stdout
    # The import that would cost two seconds has not taken place.
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    "killed", ["deepspeed", pytest.param("its child", marks=pytest.mark.slow)]
)
def test_no_rank_outlives_a_launcher_that_is_killed(killed: str) -> None:
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2"]
    launcher = subprocess.Popen(
        [*command, FOLDER / "stage_1.py", "--steps=1000000"],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    below: list[psutil.Process] = []
    try:
        assert launcher.stdout is not None
        while not (line := launcher.stdout.readline()).startswith("step  1"):
            assert line, "ended before the first step"
        below = psutil.Process(launcher.pid).children(recursive=True)
        ranks = [one for one in below if str(FOLDER / "stage_1.py") in one.cmdline()]
        ranks = [one for one in ranks if "LOCAL_RANK" in one.environ()]
        assert len(ranks) == 2
        if killed == "deepspeed":
            launcher.kill()
        else:
            ranks[0].parent().kill()  # type: ignore[union-attr]
        _, alive = psutil.wait_procs(ranks, timeout=30)
        assert alive == []
    finally:
        launcher.kill()
        for one in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        launcher.wait()


@pytest.mark.parametrize(("setting", "cores"), [(None, "half"), ("1", "untouched")])
def test_ranks_share_the_cores(
    setting: str | None, cores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = load_chapter(CHAPTER)["start"]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "2")
        monkeypatch.delenv(name)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    if setting is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    start.find_place()
    assert chosen == ([32] if cores == "half" else [])


@pytest.mark.parametrize(("wanted", "taken"), [("cpu", "cpu"), (None, "cuda")])
def test_two_hosts_on_one_machine_need_not_share_its_gpu(
    wanted: str | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    # What --no_ssh gives each host's only rank, on a machine with one GPU.
    for name, value in {"LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    if wanted:
        monkeypatch.setenv("DS_ACCELERATOR", wanted)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    gpu, accelerator = torch.device("cuda"), torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda **_: gpu)
    monkeypatch.setattr(accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda _: "nccl")
    device, reason = load_chapter(CHAPTER)["start"].find_place()
    # DeepSpeed asks the environment, and so must come to the same.
    assert (device.type, os.environ["DS_ACCELERATOR"]) == (taken, taken)
    assert (
        reason
        == {
            "cpu": "as DS_ACCELERATOR says",
            "cuda": "1 cuda, one for each local rank",
        }[taken]
    )


@pytest.mark.slow
def test_bad_input_is_one_line() -> None:
    for arguments, expected in (
        (["--steps=0"], "argument --steps: '0' is not a whole number of 1 or more"),
        (["--text=/nowhere"], "--text /nowhere: No such file or directory"),
        (["--model=/no/such/model"], "--model /no/such/model: there is no such folder"),
    ):
        result = python(FOLDER / "stage_0.py", *arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == f"stage_0.py: {expected}\n"


@pytest.mark.slow
def test_more_ranks_than_a_machine_can_bear_are_refused() -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env = clean_environment(WORLD_SIZE="99", LOCAL_SIZE="99", **ranks)
    result = python(FOLDER / "stage_1.py", env=env)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "stage_1.py: 99 ranks are too many for one machine; start two, --num_gpus=2\n"
    )


# --- What the pages say. ----------


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_stages_equal_one_process(world_size: int, zero_pools: Pools) -> None:
    by_rank = zero_pools(world_size).run(
        all_stages, 4, world_size=world_size, timeout=150
    )
    assert len(by_rank) == world_size
    padded = -(-PARAMETERS // (2 * world_size)) * 2
    for results in by_rank:
        assert [stage for stage in results if len(stage[2]) != 4] == []
        for stage, (lines, counts, losses, result) in enumerate(results):
            expected = PARAMETERS if stage == 0 else padded
            if stage == 3:
                expected = PARAMETERS // world_size  # each tensor divides evenly
            assert counts == [expected, expected]
            assert len(lines) == world_size + (2 if world_size == 1 else 1)
            apart = max(abs(a - b) for a, b in zip(losses, results[0][2], strict=True))
            assert apart < 1e-5
            assert f"{expected:,} Adam states on each of {world_size} rank(s)" in result
        assert len(results) == 4


def test_stages_2_and_3_exchange_gradients_in_every_micro_batch(
    zero_pools: Pools,
) -> None:
    results = zero_pools(2).run(send_two_micro_batches, world_size=2, timeout=120)
    assert len(results) == 2
    for text, times, answers in results:
        assert re.search(r"counts by .* on 2 ranks, 0 wrong; .* in 6 of 6$", text)
        # Stages 0 and 1 exchange once, as with one micro-batch; then come the weights.
        assert times[:3] == pytest.approx([2, 2 + 1, 1 + 1], abs=0.01)
        # An all-reduce, or a reduce to the owner, for each of two.
        assert times[3:5] == pytest.approx([2 * 2 + 1, 2 * 1 + 1], abs=0.01)
        # And in stage 3 two times the weights for each, but for the small ones.
        assert 2 * 2 < times[5] <= 2 * 3
        assert [stage for stage, answer in answers.items() if not answer] == [0, 1]
        for stage in (2, 3):
            assert "no_sync context manager is incompatible" in answers[stage]


@pytest.mark.parametrize(
    ("stage", "mistake", "words"),
    [
        (1, "wrong samples", r"weights [1-9]e-0[12] \(limit"),
        (3, "wrong samples", r"weights [1-9]e-0[12] \(limit"),
        (2, "other clipping", r"losses [1-9]e-0[1-4] from one"),
        (0, "own loss", r"losses [12]e-03 from one"),
        (1, "one weight", r"[1-9]\d* weights differ between ranks"),
        (2, "lost states", r"213,568 Adam states"),
    ],
)
def test_the_check_finds(
    stage: int, mistake: str, words: str, zero_pools: Pools
) -> None:
    said = zero_pools(2).run(check_after, stage, mistake, world_size=2, timeout=60)
    assert len(said) == 2
    for text in said:
        assert text.startswith("not what one process computes: ")
        assert re.search(words, text), text


def test_deepspeed_clips_and_overlooks_unless_told(
    zero_pools: Pools, tmp_path: Path
) -> None:
    (found,) = zero_pools(1).run(
        settings_nobody_asked_for, str(tmp_path), world_size=1, timeout=60
    )
    assert found["clipping"] == 1.0
    # A misspelt key leaves the default in force, and nobody is told.
    assert found["stage"] == 0
    assert found["stage from file"] == 2
    assert found["adam"] == "AdamW"
    assert found["problem"] == (
        "unknown key 'zero_optimisation'; did you mean 'zero_optimization'?"
    )
    assert (
        found["nested"]
        == "zero_optimization: unknown key 'stge'; did you mean 'stage'?"
    )
    assert found["own"] == ["", "", "", ""]


def test_a_model_that_cannot_be_trained_is_named_in_one_line(
    zero_pools: Pools, tmp_path: Path
) -> None:
    (said,) = zero_pools(1).run(answers, str(tmp_path), world_size=1, timeout=60)
    assert said == {
        "good": "",
        "no tokenizer": "no tokenizer there; tokenizer.save_pretrained writes one",
        "no output layer": "Qwen2Model is not a causal language model",
        "cut": "the weights are missing or damaged",
        "empty": "no checkpoint in that folder, that transformers can read",
        "nothing": "there is no such folder",
        "too large": "has 427,136 parameters: stage 1 on 2 rank(s) takes 0.00598 GB on "
        "each before activations, and 0.001 GB are free for each; a model of 71,429 "
        "parameters would fit, or use a higher stage or more machines",
    }


@pytest.fixture(scope="module")
def shards(
    zero_pools: Pools, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[str]]]:
    """Return a folder with what two ranks have saved in each stage, and their words."""
    folder = tmp_path_factory.mktemp("shards")
    said = zero_pools(2).run(
        save_in_every_stage, str(folder), world_size=2, timeout=120
    )
    return folder, said


def test_shards_resume_to_the_last_bit_and_can_be_joined(
    shards: tuple[Path, list[list[str]]],
) -> None:
    said, said_by_one = shards[1]
    exact = "2 losses after the restart are the same to the last bit"
    assert said_by_one == [exact] * 3
    assert said[::2] == [exact] * 3
    for text in (said[1], said[3], said[5]):
        assert re.fullmatch(
            r"joined weights in transformers alone, loss \de[+-]\d\d apart", text
        )


OTHER_RANKS = (
    "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 2 but "
    "the current world size is 1. Automatic adjustment of ZeRO's optimizer state "
    "partitioning with a new world size is not currently supported."
)


@pytest.mark.parametrize(
    ("ranks", "tag", "says"),
    [
        (2, "half", ""),
        (1, "half", OTHER_RANKS),
        pytest.param(1, "universal", "", marks=pytest.mark.slow),
    ],
)
def test_which_stage_can_go_on_from_which(
    ranks: int,
    tag: str,
    says: str,
    shards: tuple[Path, list[list[str]]],
    zero_pools: Pools,
) -> None:
    said = zero_pools(ranks).run(
        go_on_in_every_stage, str(shards[0]), tag, world_size=ranks, timeout=120
    )
    # Between stages 1 and 2, and from 3 to 3. Else DeepSpeed looks for a file that the
    # other family of stages names otherwise, and says no word more.
    works = {"1 to 1", "1 to 2", "2 to 1", "2 to 2", "3 to 3"}
    fails = {"1 to 3", "2 to 3", "3 to 1", "3 to 2"}
    expected = dict.fromkeys(works, says) | dict.fromkeys(fails, "AssertionError: ")
    assert said == [expected] * ranks


def test_an_older_checkpoint_stays_until_the_new_one_is_whole(
    shards: tuple[Path, list[list[str]]], zero_pools: Pools, tmp_path: Path
) -> None:
    folder = tmp_path / "1"
    shutil.copytree(shards[0] / "1", folder)

    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (folder / "half").iterdir()}

    before = contents()
    assert len(before) == 4  # weights, two shards and the record
    ended = zero_pools(2).run(break_off_another_save, str(folder), world_size=2)
    assert ended == ["in mid-run"] * 2
    assert contents() == before
    assert load_chapter(CHAPTER)["checkpoints"].what_is_wrong(folder, 1) == ""


def test_a_damaged_shard_is_named_and_a_move_that_fails_is_refused(
    shards: tuple[Path, list[list[str]]], tmp_path: Path
) -> None:
    what_is_wrong = load_chapter(CHAPTER)["checkpoints"].what_is_wrong
    folder = tmp_path / "1"
    shutil.copytree(shards[0] / "1", folder)
    assert [what_is_wrong(folder, stage) for stage in (1, 2)] == ["", ""]
    assert what_is_wrong(folder, 3) == (
        f"the shards in {folder} are of stage 1, which stage 3 cannot read; the "
        f"weights alone are in {folder / 'whole'}"
    )
    shard = folder / "half" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    os.truncate(shard, 1000)
    cut = re.escape(f"{shard} has 1,000 bytes and was saved with ")
    rest = r"2,5\d\d,\d\d\d; nothing was loaded or changed"
    assert re.fullmatch(cut + rest, what_is_wrong(folder, 1))
    shard.unlink()
    assert what_is_wrong(folder, 1).startswith(f"{shard} has 0 bytes")
    nothing = f"no checkpoint in {tmp_path}; without --resume this script writes one"
    assert what_is_wrong(tmp_path, 1) == nothing
