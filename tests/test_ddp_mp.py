"""Chapter 02: training with mp.spawn and DDP, held against one process."""

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, RandomSampler

from launch import ROOT, clean_environment, python
from scripts import load_chapter
from worker_pool import RankError, WorkerPool

CHAPTER = "02_ddp_mp"
TRAIN = ROOT / CHAPTER / "train.py"
EXERCISE = ROOT / CHAPTER / "exercise_broken_loop.py"
# 192 points are 3 steps of 2 ranks x 32, or 2 of 3 x 32; a seed of its own.
SMALL = ["--points=192", "--max_epochs=3", "--seed=5"]


# --- What runs on each rank. ----------


def run_rank(words: list[str]) -> str:
    """Be a rank of train.py in the pool's group; return what it printed."""
    chapter = load_chapter(CHAPTER)
    train, options = chapter["train"], chapter["options"]
    parser = options.make_parser("")
    parser.add_argument("--save", type=Path, default=None)
    args = parser.parse_args(options.with_hyphens(words))
    output = io.StringIO()
    with (
        mock.patch.object(train.dist, "TCPStore"),
        mock.patch.object(train.dist, "init_process_group"),
        mock.patch.object(train.dist, "destroy_process_group"),
        mock.patch.object(train.signal, "signal"),
        contextlib.redirect_stdout(output),
    ):
        train.train_rank(dist.get_rank(), dist.get_world_size(), 0, args)
    return output.getvalue()


def run_alone(words: list[str]) -> str:
    """Run one_process.py's training in this process; return what it printed."""
    chapter = load_chapter(CHAPTER)
    args = (
        chapter["options"]
        .make_parser("")
        .parse_args(chapter["options"].with_hyphens(words))
    )
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        chapter["one_process"].train_one_process(args)
    return output.getvalue()


# --- The run as a whole. ----------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_print_what_one_process_prints(
    worker_pool: WorkerPool, world_size: int
) -> None:
    batch_size = 12
    steps = 192 // (batch_size * world_size)
    outputs = worker_pool.run(
        run_rank,
        [*SMALL, f"--batch-size={batch_size}"],
        world_size=world_size,
        timeout=120,
    )
    alone = run_alone([*SMALL, f"--batch_size={batch_size * world_size}"])
    assert outputs[1:] == [""] * (world_size - 1)
    lines = re.findall(
        r"epoch (\d) \| rank (\d) \| batch size 12 \| steps (\d+) \| own loss (.+)",
        outputs[0],
    )
    assert [line[:3] for line in lines] == [
        (str(epoch), str(rank), str(steps))
        for epoch in range(3)
        for rank in range(world_size)
    ]
    products = re.findall(r"x ranks = (\d+) x (\d+) x (\d+) = (\d+) diff", outputs[0])
    total = batch_size * steps * world_size
    assert products == [(f"{batch_size}", f"{steps}", f"{world_size}", f"{total}")] * 3
    means = [float(loss) for loss in re.findall(r"mean loss over .* (.+)", outputs[0])]
    alones = [float(loss) for loss in re.findall(r"mean loss (.+)", alone)]
    assert len(means) == 3 and len(alones) == 3
    for epoch in range(3):
        own = [float(line[3]) for line in lines if line[0] == str(epoch)]
        # All are rounded to three digits after the point.
        assert means[epoch] == pytest.approx(sum(own) / len(own), abs=1.1e-3)
        assert means[epoch] == pytest.approx(alones[epoch], abs=1.1e-3)
        assert world_size == 1 or len(set(own)) > 1
    errors = [re.findall(r"unseen places: (.+?) m", out) for out in (outputs[0], alone)]
    assert float(errors[0][0]) == pytest.approx(float(errors[1][0]), abs=0.11)
    assert f"check: 0 weights differ on {world_size} rank(s)" in outputs[0]


def test_sampler_deals_the_deck_of_one_process_in_turn() -> None:
    points, seed, epoch = range(100), 5, 2
    generator = torch.Generator().manual_seed(seed + epoch)
    deck = list(RandomSampler(points, generator=generator))
    samplers = [
        DistributedSampler(points, 3, rank, seed=seed, drop_last=True)  # type: ignore[arg-type]
        for rank in range(3)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    assert len(samplers) == 3
    dealt = [list(sampler) for sampler in samplers]
    assert dealt == [deck[rank:99:3] for rank in range(3)]


def test_saved_weights_are_those_of_all_ranks(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    chapter = load_chapter(CHAPTER)
    path = tmp_path / "a folder"
    path.mkdir()
    path /= "weights.pt"
    outputs = worker_pool.run(run_rank, [*SMALL, f"--save={path}"], timeout=120)
    assert list(path.parent.iterdir()) == [path]
    saved = torch.load(path, weights_only=True)
    names = set(chapter["terrain"].TerrainModel().state_dict())
    assert set(saved["model"]) == names  # no "module." in front
    terrain = chapter["terrain"].load_terrain()
    _, held_out = chapter["terrain"].sample_points(terrain, 192)
    result = chapter["saving"].check_saved(path, held_out, terrain)
    (printed,) = re.findall(r"unseen places: (.+? m)", outputs[0])
    assert result.startswith(f"error {printed} in one process, {printed} on the ranks")
    chapter["saving"].check_place(path)  # its own file may be overwritten
    # And the comparison can fail.
    saved["model"]["layers.4.bias"] += 1
    torch.save(saved, path)
    with pytest.raises(RuntimeError, match="not the weights that were trained"):
        chapter["saving"].check_saved(path, held_out, terrain)


def test_crash_while_saving_leaves_the_older_file(tmp_path: Path) -> None:
    chapter = load_chapter(CHAPTER)
    path, model = tmp_path / "weights.pt", chapter["terrain"].TerrainModel()
    chapter["saving"].save_weights(path, model, 12.5)
    with (
        mock.patch.object(torch, "save", side_effect=OSError("disk full")),
        pytest.raises(OSError, match="disk full"),
    ):
        chapter["saving"].save_weights(path, model, 99.0)
    assert chapter["saving"].load_weights(path)[1] == 12.5


# --- Proofs that can fail. ----------


def check_ranks_of_a_broken_model(fault: str) -> str:
    """Break one thing on one rank and let the closing check find it."""
    chapter = load_chapter(CHAPTER)
    terrain = chapter["terrain"].load_terrain()
    _, held_out = chapter["terrain"].sample_points(terrain, 1)
    model = chapter["terrain"].TerrainModel()
    ddp_model = DistributedDataParallel(model)
    if fault == "weight" and dist.get_rank() == 1:
        with torch.no_grad():
            model.layers[0].weight[3, 3] += 1e-7
    if fault == "gradient":
        with ddp_model.no_sync():
            return chapter["proof"].check_ranks(ddp_model, model, held_out)
    return chapter["proof"].check_ranks(ddp_model, model, held_out)


def test_closing_check_accepts_a_sound_model(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(check_ranks_of_a_broken_model, "none", world_size=3)
    assert len(results) == 3 and results[0] == results[1] == results[2]
    assert results[0].startswith("0 weights differ on 3 rank(s)")


@pytest.mark.parametrize(
    ("fault", "found"),
    [("weight", "1 weights differ"), ("gradient", r"gradient \de[-+]0[01] from")],
)
def test_closing_check_finds_what_is_broken(
    worker_pool: WorkerPool, fault: str, found: str
) -> None:
    with pytest.raises(RankError, match=f"the ranks do not agree: .*{found}"):
        worker_pool.run(check_ranks_of_a_broken_model, fault)


def compare_ways_of_which_one_is_broken() -> dict[str, tuple[float, bool]]:
    """Run compare.py's comparison, with one way that exchanges nothing."""
    chapter = load_chapter(CHAPTER)
    with mock.patch.object(chapter["by_hand"].FlatDDP, "average_gradients"):
        return chapter["compare"].compare_ways(torch.float64, steps=20)


def test_comparison_finds_the_way_that_is_broken(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(compare_ways_of_which_one_is_broken, timeout=120)
    assert len(results) == 2 and results[0] == results[1]
    close = {way for way, (error, _) in results[0].items() if error < 1e-11}
    equal = {way for way, (_, is_equal) in results[0].items() if is_equal}
    assert close == equal == {"naive", "bucketed", "DDP"}


def test_halves_of_a_batch_must_give_the_gradient_of_the_whole() -> None:
    chapter = load_chapter(CHAPTER)
    terrain = chapter["terrain"].load_terrain()
    _, held_out = chapter["terrain"].sample_points(terrain, 1)
    model = chapter["terrain"].TerrainModel()
    assert "(limit 1e-05)" in chapter["proof"].check_shares(model, held_out)
    # A sum over the batch in place of a mean: twice the gradient for twice the points.
    wrong = mock.patch.object(
        chapter["proof"], "mse_loss", lambda a, b: (a - b).square().sum()
    )
    with wrong, pytest.raises(RuntimeError, match="mean gradient of two half batches"):
        chapter["proof"].check_shares(model, held_out)


# --- What people get wrong. ----------


def test_cross_entropy_on_one_logit_has_no_gradient() -> None:
    # As in PyTorch's tutorial series on DDP: Linear(20, 1), targets that are numbers.
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    loss = cross_entropy(model(torch.rand(32, 20)), torch.rand(32, 1))
    loss.backward()
    assert loss.item() == 0
    for parameter in (model.weight, model.bias):
        assert parameter.grad is not None and not parameter.grad.any()
    # A second logit, and there is something to learn.
    model = torch.nn.Linear(20, 2)
    cross_entropy(model(torch.rand(32, 20)), torch.rand(32, 2)).backward()
    assert model.weight.grad is not None and model.weight.grad.abs().max() > 0.01


def test_adam_hardly_notices_a_sum_in_place_of_the_mean() -> None:
    # It divides by the gradient's own size, so that a missing "/ world_size" can hide.
    def train(optimizer_class: Any, factor: float) -> torch.Tensor:
        torch.manual_seed(0)
        model, batch = torch.nn.Linear(8, 1), torch.randn(64, 8)
        optimizer = optimizer_class(model.parameters(), lr=0.01)
        for _ in range(30):
            optimizer.zero_grad()
            (model(batch).square().mean() * factor).backward()
            optimizer.step()
        return model.weight.detach()

    differences = {
        optimizer_class: (train(optimizer_class, 1) - train(optimizer_class, 4)).abs()
        for optimizer_class in (torch.optim.Adam, torch.optim.SGD)
    }
    assert differences[torch.optim.Adam].max() < 1e-5
    assert differences[torch.optim.SGD].max() > 0.05


def test_data_parallel_without_a_gpu_is_the_plain_model() -> None:
    model = torch.nn.Linear(3, 1)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    batch = torch.ones(8, 3)
    with mock.patch.object(torch.cuda, "device_count", return_value=0):
        parallel = torch.nn.DataParallel(model, device_ids=[])
        assert torch.equal(parallel(batch), model(batch))
    assert len(calls) == 2  # the whole batch at once, and no threads


@pytest.mark.parametrize(
    ("of_a_lambda", "of_a_file"),
    [  # 3.10 and 3.11; 3.12; 3.13
        ("Can't pickle local object 'f'", "cannot pickle '_io.TextIOWrapper' object"),
        ("Can't pickle local object 'f'", "cannot pickle 'TextIOWrapper' instances"),
        ("Can't get local object 'f'", "cannot pickle 'TextIOWrapper' instances"),
    ],
)
def test_traps_are_known_by_the_words_of_each_python(
    of_a_lambda: str, of_a_file: str
) -> None:
    traps = load_chapter(CHAPTER)["spawn_traps"]
    found = [AttributeError(f"{of_a_lambda}.<locals>.<lambda>"), TypeError(of_a_file)]
    with mock.patch.object(traps.mp, "spawn", side_effect=found):
        assert traps.arguments_are_pickled() == [True, True, True]
    found[1] = TypeError("needs an integer")
    with mock.patch.object(traps.mp, "spawn", side_effect=found):
        assert traps.arguments_are_pickled() == [True, False, True]


def test_fresh_processes_draw_different_random_numbers() -> None:
    # Without a seed, each rank that builds its own data builds other data.
    script = "import torch; print(torch.rand(8).tolist())"
    first, second = (python("-c", script, timeout=120).stdout for _ in range(2))
    assert len(first.split(",")) == 8 and first != second


def report_points_drawn_by_each_rank(seed_by_rank: bool) -> list[str]:
    """Deal points as train.py does, from a dataset that each rank has drawn itself."""
    chapter = load_chapter(CHAPTER)
    terrain, rank = chapter["terrain"].load_terrain(), dist.get_rank()
    seed = rank if seed_by_rank else 0
    points, _ = chapter["terrain"].sample_points(terrain, 8192, seed=seed)
    sampler = DistributedSampler(points, drop_last=True)
    places = points.tensors[0][list(sampler)]
    return chapter["proof"].count_epoch(4096, [places], torch.ones(1))


def test_points_that_each_rank_draws_for_itself_overlap(
    worker_pool: WorkerPool,
) -> None:
    with pytest.raises(RankError, match=r"saw 8192 points, (\d+) of them") as caught:
        worker_pool.run(report_points_drawn_by_each_rank, True)
    different = re.search(r"points, (\d+) of them", str(caught.value))
    # Two draws of 4096 out of 138,632 cells share 121 on average.
    assert different and 8192 - 180 < int(different[1]) < 8192 - 60
    # The cure: one seed, so that all hold one dataset, and the sampler to deal it.
    reports = worker_pool.run(report_points_drawn_by_each_rank, False)
    assert len(reports) == 2 and reports[0] == reports[1]
    assert "4096 x 1 x 2 = 8192 different points" in reports[0][-2]


# --- The command line. ----------


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Hold a port while a test runs."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def refusal(script: str, words: list[str], environment: dict[str, str]) -> str:
    """Run a script's main() on bad input; return the line that it printed."""
    module: Any = load_chapter(CHAPTER)[script]
    errors, output = io.StringIO(), io.StringIO()
    spawn = mock.Mock(side_effect=AssertionError("it should not have come to this"))
    with (
        mock.patch.object(sys, "argv", [f"{script}.py", *words]),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(module.signal, "signal"),
        mock.patch.object(torch.multiprocessing, "spawn", spawn),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(output),
        pytest.raises(SystemExit) as end,
    ):
        module.main()
    assert end.value.code == 2 and not output.getvalue()
    (line,) = errors.getvalue().splitlines()
    assert line.startswith(f"{script}.py: ")
    return line


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("script", "words", "environment", "expected"),
    [
        (
            "train",
            ["--nprocs", "0"],
            {},
            "argument --nprocs: '0' is not a whole number",
        ),
        (
            "train",
            ["--max_epochs=-1"],
            {},
            "argument --max-epochs: '-1' is not a whole",
        ),
        (
            "train",
            ["--batch_size=1.5"],
            {},
            "--batch-size: '1.5' is not a whole number",
        ),
        ("train", ["--lr=nan"], {}, "argument --lr: 'nan' is not a number above 0"),
        (
            "train",
            ["--nprocs=200"],
            {},
            "200 rank(s) x batch size 32 is more than the 4096",
        ),
        (
            "train",
            ["--points=3", "--nprocs=4", "--batch-size=1"],
            {},
            "is more than the 3 points",
        ),
        (
            "train",
            ["--points=134537"],
            {},
            "4096 are held out: 134536 at most",
        ),
        ("train", ["--seed=-1"], {}, "--seed must be 0 to"),
        ("train", ["--master-port=70000"], {}, "must be 0 to 65535, not 70000"),
        ("train", ["--epochs=3"], {}, "unrecognized arguments: --epochs=3"),
        ("train", ["--save=/nowhere/x.pt"], {}, "there is no folder /nowhere"),
        ("train", [f"--save={__file__}"], {}, "--save will not overwrite it"),
        ("train", [], TORCHRUN, "start it with python, not torchrun"),
        ("one_process", ["--batch-size=5000"], {}, "is more than the 4096 points"),
        ("one_process", ["--nprocs=2"], {}, "unrecognized arguments: --nprocs=2"),
        ("compare", ["--nprocs=1"], {}, "--nprocs must be 2 to 8, not 1"),
        ("compare", ["--steps=500"], {}, "--steps must be 20 to 100, not 500"),
        ("compare", [], TORCHRUN, "start it with python, not torchrun"),
        ("exercise_broken_loop", [], TORCHRUN, "start it with python, not torchrun"),
        ("exercise_broken_loop", ["--x"], {}, "unrecognized arguments: --x"),
        ("spawn_traps", [], TORCHRUN, "start it with python, not torchrun"),
        ("spawn_traps", ["--x"], {}, "unrecognized arguments: --x"),
    ],
)
def test_bad_input_is_one_line(
    script: str, words: list[str], environment: dict[str, str], expected: str
) -> None:
    assert expected in refusal(script, words, environment)


def test_port_that_is_taken_is_one_line(taken_port: int) -> None:
    line = refusal("train", [f"--master-port={taken_port}"], {})
    assert f"--master-port {taken_port} is taken" in line


def test_folder_without_permission_is_one_line(tmp_path: Path) -> None:
    # Root may write anywhere, so that the answer of the system is put in its mouth.
    with mock.patch.object(os, "access", return_value=False):
        line = refusal("train", [f"--save={tmp_path}/x.pt"], {})
    assert "no permission to write in" in line


def test_both_spellings_and_the_documented_defaults() -> None:
    options = load_chapter(CHAPTER)["options"]
    parser = options.make_parser("")
    spelled = [["--max_epochs=2", "--batch_size", "8"], ["--max-epochs=2"]]
    args = [parser.parse_args(options.with_hyphens(words)) for words in spelled]
    assert [arg.max_epochs for arg in args] == [2, 2]
    assert [arg.batch_size for arg in args] == [8, 32]
    assert args[0].points == 4096


# --- Whole launches. ----------


@pytest.mark.smoke
def test_four_ranks_from_another_folder_while_29500_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(socket.socket())
        # If another job holds it already, all the better.
        with contextlib.suppress(OSError):
            holder.bind(("127.0.0.1", 29500))  # allowed port: it is held on purpose
            holder.listen()
        words = ["--nprocs=4", "--max_epochs=1", "--batch_size=32", "--save=w.pt"]
        done = python(TRAIN, *words, cwd=folder, timeout=300)
    assert done.returncode == 0, done.output
    assert re.findall(r"rank (\d) \| batch size 32 \| steps 32 ", done.stdout) == [
        *("0", "1", "2", "3")
    ]
    assert "32 x 32 x 4 = 4096 different points" in done.stdout
    assert "check: 0 weights differ on 4 rank(s)" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"check: w.pt: error (.+?) m in .*, \1 m on the ranks .*", last)
    assert done.stderr == ""


def start_long_run() -> "subprocess.Popen[str]":
    """Start train.py with more to do than any test waits for."""
    return subprocess.Popen(
        [sys.executable, TRAIN, "--max-epochs=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        # What a test starts in the background may have inherited an ignored Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    ("number", "waits_for"),
    [
        (signal.SIGINT, "epoch 0"),
        pytest.param(signal.SIGKILL, "epoch 0", marks=pytest.mark.slow),
        (signal.SIGKILL, "children"),
    ],
)
def test_no_rank_outlives_the_parent(number: signal.Signals, waits_for: str) -> None:
    process = start_long_run()
    parent = psutil.Process(process.pid)
    children: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        if waits_for == "epoch 0":
            for line in process.stdout:
                if "epoch 0 | mean loss" in line:
                    break
        deadline = time.monotonic() + 120
        # The two ranks; multiprocessing's resource tracker is a third, and ends alone.
        while len(children) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            children = parent.children(recursive=True)
        assert len(children) >= 2
        # Only the parent gets it, as from `kill`; a terminal would signal all of them.
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == -number
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
        assert number == signal.SIGKILL or errors == ""
    finally:
        for one in [process, *children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def test_broken_loop_is_repaired_by_using_the_mean(tmp_path: Path) -> None:
    # The answer to an exercise; the README shows how it fails without it.
    text = EXERCISE.read_text()
    wrong = (
        "        mean = parameter.grad / WORLD_SIZE\n        dist.all_reduce(mean)\n"
    )
    right = wrong + "        parameter.grad.copy_(mean)\n"
    assert text.count(wrong) == 1
    for file in EXERCISE.parent.glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / EXERCISE.name).write_text(text.replace(wrong, right))
    done = python(tmp_path / EXERCISE.name, timeout=300)
    assert done.returncode == 0, done.output
    assert "check: 0 weights differ between 2 ranks after 64 steps" in done.stdout
