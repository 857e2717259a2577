"""Chapter 05: what a rank holds and sends, and what the calculator makes of it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.cpp_extension import get_default_build_root

from launch import ROOT, Result, deepspeed, torchrun
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "05_deepspeed_zero"
WIDTH, LAYERS, RANKS = 256, 2, 3
SIZES = ["--width", WIDTH, "--layers", LAYERS]


def module(name: str) -> ModuleType:
    return load_chapter(CHAPTER)[name]


@pytest.fixture(scope="session")
def held(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Return for each of RANKS ranks what held.py counted, four stages twice."""
    path = tmp_path_factory.mktemp("held") / "held.json"
    script = ROOT / CHAPTER / "held.py"
    result = torchrun(script, *SIZES, "--json", path, nproc=RANKS, timeout=240)
    assert result.returncode == 0, result.output
    check = rf"^check: {8 * RANKS} counts .* 0\.0% apart"
    assert re.search(check, result.stdout, re.M)
    return json.loads(path.read_text())[str(RANKS)]


def bytes_of(results: list[dict[str, Any]], precision: str, kind: str) -> list[int]:
    """Return the bytes of one kind, or of "most", in stages 0 to 3."""
    chosen = [one for one in results if one["precision"] == precision]
    assert [one["stage"] for one in chosen] == [0, 1, 2, 3]
    return [{**one["held"], "most": one["most"]}[kind] for one in chosen]


def test_every_rank_holds_what_the_paper_says(held: Any) -> None:
    # Written out here from the paper, so as not to ask the chapter's own formula.
    share = pytest.approx(1 / RANKS, rel=0.01)
    assert len(held) == RANKS
    for results in held:
        n = results[0]["parameters"]
        states = [b / n for b in bytes_of(results, "bf16", "optimizer")]
        assert states[0] == pytest.approx(12, rel=0.01)
        assert [one / 12 for one in states[1:]] == [share] * 3
        weights = [b / n for b in bytes_of(results, "bf16", "parameters")]
        assert weights[:3] == [pytest.approx(2, rel=0.01)] * 3
        assert weights[3] / 2 == share
        gradients = [b / n for b in bytes_of(results, "bf16", "gradients")]
        assert gradients[:2] == [pytest.approx(2, rel=0.01)] * 2
        assert gradients[3] / 2 == share


def test_deepspeed_keeps_a_copy_of_its_share_in_float32_too(held: Any) -> None:
    for results in (held[0], held[RANKS - 1]):
        n = results[0]["parameters"]
        states = [b / n for b in bytes_of(results, "fp32", "optimizer")]
        # Adam's two averages alone are 8 bytes; with the copy it is 12.
        assert states[0] == pytest.approx(8, rel=0.01)
        assert states[1:] == [pytest.approx(12 / RANKS, rel=0.01)] * 3


def test_a_tensor_cut_in_two_leaves_its_gradient_on_both_ranks(held: Any) -> None:
    whole = [b for one in held for b in bytes_of(one, "bf16", "gradients")[2:3]]
    n = held[0][0]["parameters"]
    # A cut between each two ranks: as many of the largest tensor may be held twice.
    cuts = RANKS - 1
    assert 2 * n < sum(whole) <= 2 * n + cuts * 2 * (3 * WIDTH * WIDTH)


def test_small_tensors_stay_on_every_rank_in_stage_3(held: Any) -> None:
    for results in (held[0], held[1], held[2]):
        gathered = bytes_of(results, "bf16", "gathered")
        assert gathered[:3] == [0, 0, 0]
        # At width 256 these are all of attention, the norms and the embedding.
        small = sum(n for n in model_sizes() if n < 100_000)
        assert gathered[3] == pytest.approx(2 * small, rel=0.02)


@pytest.mark.parametrize(
    ("precision", "stage", "expected"),
    [
        # Everything, and all gradients once more in the row that is sent.
        ("fp32", 0, 16 + 4),
        # Nothing has been let go yet, and the share's gradients are copied.
        ("fp32", 1, 4 + 4 + (12 + 4) / RANKS),
        # The weights; and of the share the states, its gradients, and twice as much
        # for PyTorch's Adam, whose gradients are in float32.
        ("fp32", 2, 4 + (12 + 4 + 8) / RANKS),
        ("bf16", 1, 2 + (12 + 4 + 8) / RANKS),
        ("bf16", 2, 2 + (12 + 4 + 8) / RANKS),
        # Stage 3 keeps the gradients that it has copied for Adam.
        ("fp32", 3, (4 + 4 + 12 + 4 + 8) / RANKS),
        ("bf16", 3, (2 + 2 + 12 + 4 + 8) / RANKS),
    ],
)
def test_a_step_takes_more_than_it_keeps(
    held: Any, precision: str, stage: int, expected: float
) -> None:
    (result,) = [
        one for one in held[0] if (one["precision"], one["stage"]) == (precision, stage)
    ]
    most = result["most"] / result["parameters"]
    assert most == pytest.approx(expected, rel=0.03)
    whole = sum(result["held"][k] for k in module("live_tensors").LIVE_KINDS)
    assert result["most"] > 1.05 * whole


def test_page_shows_the_most_that_was_counted() -> None:
    page = (ROOT / CHAPTER / "README.md").read_text("utf-8")
    counted = json.loads((ROOT / "assets/05_held.json").read_text())
    row = r"^\| stage (\d)" + 2 * r" \| [^|]+ \| ([\d.]+) \| ([\d.]+)" + r" \|$"
    rows = re.findall(row, page, re.M)
    assert len(rows) == 4 and [stage for stage, *_ in rows] == list("0123")
    for stage, *shown in rows:
        most = [
            one["most"] / one["parameters"]
            for precision in ("fp32", "bf16")
            for ranks in "24"
            for one in counted[ranks][0]
            if (one["precision"], one["stage"]) == (precision, int(stage))
        ]
        assert shown == [f"{number:.1f}" for number in most]


def test_stage_0_in_bfloat16_makes_all_gradients_float32_for_adam(held: Any) -> None:
    most = bytes_of(held[0], "bf16", "most")[0]
    n, largest = sum(model_sizes()), max(model_sizes())
    # Adam goes from tensor to tensor, and has the room of three of them.
    assert most == pytest.approx((16 + 4) * n + 3 * 4 * largest, rel=0.01)


@pytest.mark.parametrize(("foreach", "each"), [(False, 8), (True, 4)])
def test_adam_needs_room_for_a_moment(foreach: bool, each: int) -> None:
    live = module("live_tensors")
    weight = torch.zeros(2_000_000, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    adam = torch.optim.AdamW([weight], foreach=foreach)
    adam.step()
    counter = live.PeakCounter()
    counter.start(live.live_storages([weight.grad]).values())
    held = counter.now
    assert held >= 4 * 8_000_000  # the weight, its gradient, two averages
    taken = touched_since_then(weight.grad)
    with counter:
        adam.step()
    assert counter.now == held
    assert counter.most - held == pytest.approx(each * 2_000_000, rel=0.001)
    # The kernel knows nothing of tensors.
    assert taken() == pytest.approx(each * 2_000_000, abs=3_000_000)
    names = {False: "single", True: "foreach"}
    assert module("peak").ADAMS[names[foreach]] * 4 == each


def touched_since_then(anything: torch.Tensor) -> Callable[[], int]:
    """Return what tells by how much this process has been larger than it is now."""
    live = module("live_tensors")
    if not live.return_freed_memory() or not os.access(
        "/proc/self/clear_refs", os.W_OK
    ):
        pytest.skip("only Linux tells how large a process has been")
    before = live.process_bytes(anything.device)
    Path("/proc/self/clear_refs").write_text("5")

    def taken() -> int:
        (line,) = re.findall(
            r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()
        )
        return 1024 * int(line) - before

    return taken


def test_what_is_sent_or_stepped_at_a_time_has_a_limit() -> None:
    peak = module("peak")
    millions = [10**6 * n for n in (400, 200, 300, 100)]
    assert peak.values_sent_together(millions) == 600 * 10**6
    assert peak.values_sent_together(millions[2:]) == 400 * 10**6
    # 72 billion values on 4 ranks: of 18 billion each steps a billion at a time.
    held = {"parameters": 36e9, "gradients": 36e9, "optimizer": 216e9, "buckets": 1e9}
    for adam, each in {"deepspeed": 2 + 4, "foreach": 4 + 4, "single": 4 + 8}.items():
        most = peak.most_in_step(held, [72 * 10**9], 3, 0, 4, "bf16", adam)
        assert most == 289e9 + each * 1e9


def test_whether_it_fits_is_decided_by_the_larger_moment() -> None:
    fit = module("will_it_fit")
    config = fit.named_shape("7B")
    job = fit.Job(fit.tensor_sizes_of(config), config)
    counted = fit.bytes_on_a_rank(job, 2, 2)
    in_all = sum(counted[kind] for kind in fit.ALL_KINDS)
    assert in_all < counted["step"] == pytest.approx(12 * 7_615_616_512, rel=0.001)
    between = (in_all + counted["step"]) / 2
    assert fit.fewest_ranks(job, 2, between) == 4
    assert fit.fewest_ranks(job, 2, counted["step"]) == 2
    assert fit.fewest_ranks(job._replace(adam="single"), 2, counted["step"]) == 4


def model_sizes() -> list[int]:
    """Return the number of values in each tensor of the model that is measured."""
    config = module("sized_qwen").sized_config(WIDTH, LAYERS)
    return module("will_it_fit").tensor_sizes_of(config)


def test_process_grows_by_what_is_counted(held: Any) -> None:
    for results in (held[0], held[1], held[2]):
        for result in (results[0], results[1], results[4], results[5]):
            counted = sum(result["held"][k] for k in module("live_tensors").LIVE_KINDS)
            assert abs(result["held"]["process"] - counted) < 0.05 * counted + 5e6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_calculator_agrees_with_what_is_measured(held: Any, precision: str) -> None:
    fit, sized = module("will_it_fit"), module("sized_qwen")
    sizes = model_sizes()
    few = sized.buckets_for(sum(sizes), WIDTH)
    job = fit.Job(
        sizes,
        sized.sized_config(WIDTH, LAYERS),
        precision,
        bucket=few["reduce_bucket_size"],
        live=0,
        adam="single",
    )
    most = bytes_of(held[0], precision, "most")
    for stage in range(4):
        worked_out = fit.bytes_on_a_rank(job, stage, RANKS)
        kinds = [kind for kind in fit.ALL_KINDS if kind != "activations"]
        measured = sum(bytes_of(held[0], precision, kind)[stage] for kind in kinds)
        assert sum(worked_out[k] for k in kinds) == pytest.approx(measured, rel=0.03)
        assert worked_out["step"] == pytest.approx(most[stage], rel=0.02)


@pytest.mark.slow
def test_default_buckets_make_every_higher_stage_larger() -> None:
    script = ROOT / CHAPTER / "held.py"
    words = ["--width", 128, "--layers", 1, "--default-buckets", "--precision", "bf16"]
    result = deepspeed(script, *words, timeout=240)
    assert result.returncode == 0, result.output
    rows = re.findall(r"^ +([0-3])((?: +[\d.]+){10})$", result.stdout, re.M)
    in_all = [float(numbers.split()[5]) for _, numbers in rows]
    assert len(in_all) == 4
    assert min(in_all[1:]) > 1000 > 10 > in_all[0]
    # On the CPU, memory that nobody has touched is not taken.
    assert max(float(numbers.split()[9]) for _, numbers in rows) < 20
    assert "6 of 8 counts hold a bucket of 500,000,000 values; 6 are" in result.stdout


@pytest.mark.slow
def test_deepspeed_sends_3_where_the_paper_sends_2() -> None:
    script = ROOT / CHAPTER / "sent.py"
    result = torchrun(script, *SIZES, nproc=3, timeout=240)
    assert result.returncode == 0, result.output
    found = re.findall(
        r"these need ([\d.]+) times .*, gloo sent ([\d.]+)", result.stdout
    )
    needed = [float(one) for one, _ in found]
    assert needed[:5] == [2, 3, 2, 3, 2]
    assert needed[5] == pytest.approx(2.72, abs=0.01)
    sent = [float(one) for _, one in found]
    # A reduce costs 1 + 1 / 3 on three ranks of gloo, a reduce-scatter 2.
    assert sent == pytest.approx([2, 3, 2 + 1 / 3, 3, 2 + 1 / 3, 3.72], rel=0.05)
    assert re.search(
        r"^check: 42 counts .* 0 wrong; .* in 6 of 6$", result.stdout, re.M
    )


def count_collectives() -> dict[str, tuple[list[int], int]]:
    """Return the messages and TCP bytes of some collectives of 3,000,000 bytes."""
    traffic, world_size = module("traffic"), dist.get_world_size()
    message = torch.ones(750_000)
    share = torch.ones(750_000 // world_size)
    calls = {
        "all_reduce": lambda: dist.all_reduce(message),
        "all_gather": lambda: dist.all_gather_single(message, share),
        "reduce_scatter": lambda: dist.reduce_scatter_single(share, message),
        "reduce": lambda: dist.reduce(message, dst=0),
    }
    found = {}
    for name, call in calls.items():
        dist.barrier()
        before = traffic.tcp_bytes_sent()
        with traffic.CollectiveCounter() as counter:
            call()
        dist.barrier()  # now all that was to be received has been sent
        sent = torch.tensor(float(traffic.tcp_bytes_sent() - before))
        dist.all_reduce(sent)
        found[name] = (counter.calls[name], int(sent))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_gloo_reduce_scatter_sends_as_much_as_an_all_reduce(
    worker_pool: WorkerPool, world_size: int
) -> None:
    times: dict[str, float] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 2}
    times["reduce"] = 1 + 1 / world_size
    results = worker_pool.run(count_collectives, world_size=world_size, timeout=120)
    assert len(results) == world_size
    for found in results:
        for name in ("all_reduce", "all_gather", "reduce_scatter", "reduce"):
            messages, sent = found[name]
            assert messages == [3_000_000]
            once = (world_size - 1) * 3_000_000
            assert sent / once == pytest.approx(times[name], rel=0.02), name


def test_views_are_counted_once_and_gradients_are_found() -> None:
    live = module("live_tensors")
    before = live.live_storages([])
    whole = torch.zeros(1000, requires_grad=True)
    parts = [whole.detach()[:500], whole.detach().view(10, 100)]
    whole.sum().backward()
    gradient = whole.grad
    assert gradient is not None
    after = live.live_storages([gradient])
    new = {place: one.nbytes() for place, one in after.items() if place not in before}
    assert new[whole.untyped_storage().data_ptr()] == 4000
    assert new[gradient.untyped_storage().data_ptr()] == 4000
    assert sum(new.values()) == 8000
    assert len(parts) == 2


def test_memory_that_another_tensor_had_before_is_counted() -> None:
    live = module("live_tensors")
    left_over = torch.ones(2000)
    before = live.live_storages([])
    del left_over
    # The allocator would give the address that was just freed to one of these.
    model = torch.nn.ParameterList(torch.ones(2000) for _ in range(50))
    optimizer = SimpleNamespace(param_groups=[], state={})
    engine = SimpleNamespace(module=model, optimizer=optimizer)
    counted = live.bytes_by_kind(engine, before)
    assert counted.pop("parameters") == 50 * 8000
    assert set(counted.values()) == {0}


def test_calculator_gives_the_known_counts_of_qwen2() -> None:
    fit, proof = module("will_it_fit"), module("proof")
    sizes = fit.tensor_sizes_of(fit.named_shape("1.5B"))
    assert sum(sizes) == 1_543_714_304
    assert [proof.expected_count(sizes, stage, 2) for stage in range(3)] == [
        1_543_714_304,
        771_857_152,
        771_857_152,
    ]
    assert sum(fit.tensor_sizes_of(fit.named_shape("7B"))) == 7_615_616_512
    job = fit.Job(sizes, fit.named_shape("1.5B"), bucket=1, live=0)
    # 2 + 2 + 12 bytes, and 2 + 2 + 12 / 2.
    states = [fit.bytes_on_a_rank(job, stage, 2)["optimizer"] for stage in (0, 1)]
    assert states == [12 * 1_543_714_304, 6 * 1_543_714_304]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_estimate_of_activations_is_near_what_autograd_keeps(precision: str) -> None:
    fit, sized = module("will_it_fit"), module("sized_qwen")
    model = sized.new_model(WIDTH, LAYERS)
    model = model.bfloat16() if precision == "bf16" else model
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    inputs = torch.randint(256, (2, 64))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=inputs, labels=inputs)
    keep(output.logits)
    storages = {place: one for place, one in kept.items() if place not in weights}
    measured = sum(one.untyped_storage().nbytes() for one in storages.values())
    config = sized.sized_config(WIDTH, LAYERS)
    job = fit.Job([1], config, precision, seq_length=64, micro_batch_size=2)
    assert fit.activation_bytes(job) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("script", "words", "line"),
    [
        (
            "held",
            ["--width=100"],
            "held.py: --width must be a multiple of 128, not 100",
        ),
        ("held", ["--json=no/x.json"], "held.py: --json no/x.json: there is no folder"),
        (
            "offload",
            ["--steps=1"],
            "offload.py: --width must be a multiple of 128, --st",
        ),
        (
            "offload",
            ["--disk=no/x"],
            "offload.py: --disk no/x: there is no such folder",
        ),
        (
            "offload",
            ["--precision=bf16"],
            "offload.py: --precision=bf16 needs --disk=FOLDER, for the weights",
        ),
        ("sent", [], "sent.py: one rank sends nothing; deepspeed --num_gpus=2 starts"),
        (
            "sent",
            ["--layers=0"],
            "sent.py: argument --layers: '0' is not a whole number",
        ),
        ("will_it_fit", ["--ranks=x"], "will_it_fit.py: argument --ranks: 'x' is not"),
        ("will_it_fit", ["--model=no/x"], "will_it_fit.py: --model no/x: there is no"),
    ],
)
def test_bad_input_is_one_line(
    script: str,
    words: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chapter = module(script)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", [f"{script}.py", *words])
    with pytest.raises(SystemExit) as ended:
        chapter.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(line)
    assert error.count("\n") == 1


def test_calculator_reads_a_config_that_save_pretrained_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module("sized_qwen").sized_config(WIDTH, LAYERS).save_pretrained(tmp_path)
    words = ["will_it_fit.py", "--model", str(tmp_path), "--offload=all"]
    monkeypatch.setattr("sys.argv", words)
    module("will_it_fit").main()
    printed = capsys.readouterr().out
    assert f"{sum(model_sizes()):,} parameters on the meta device" in printed
    assert printed.count("--offload all exists from stage 3 on") == 3


OFFLOADED = {  # as from a rank with a share of 1000 values, on a CPU
    name: {
        "losses": [2.0, 1.0],
        "states": 12_000 if place == "memory" else 4,
        "weights": 4000,
        "shares": [600, 400],
        "places": {"cpu": 20_000, "disk": 12_000 if place == "disk" else 0},
    }
    for name, place in {"nothing": "memory", "states to disk": "disk"}.items()
}


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("losses", [2.0, 1.1], "states to disk: losses 1e-01 apart"),
        ("losses", [2.0, float("nan")], "states to disk: losses nan apart"),
        ("states", 12_000, "states to disk: 12,000 bytes of states in memory, of"),
        ("places", {"cpu": 1, "disk": 0}, "states to disk: 0 bytes of states on disk"),
    ],
)
def test_offload_notices(key: str, value: Any, fault: str) -> None:
    find_misplaced, cpu = module("offload").find_misplaced, torch.device("cpu")
    assert find_misplaced(OFFLOADED, cpu) == []
    broken = {**OFFLOADED["states to disk"], key: value}
    [found] = find_misplaced({**OFFLOADED, "states to disk": broken}, cpu)
    assert found.startswith(fault)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("weights", 2_000_000, "weights to disk: 1,200,000 bytes there and 0 fewer in"),
        (
            "places",
            {"cpu": 1, "disk": 0},
            "weights to disk: 0 bytes there and 1,199,998",
        ),
        (
            "shares",
            [1000],
            "weights to disk: 1,200,000 bytes there and 1,199,998 fewer",
        ),
        ("states", 4, "weights to disk: 4 bytes of states in memory, of 12,000,000"),
    ],
)
def test_offload_notices_weights_that_stay(key: str, value: Any, fault: str) -> None:
    find_misplaced, cpu = module("offload").find_misplaced, torch.device("cpu")
    # 600,000 values of two bytes are written, and 400,000 are too few.
    plain = {"losses": [2.0, 1.0], "states": 12_000_000, "weights": 2_000_000}
    plain |= {"shares": [600_000, 400_000], "places": {"cpu": 1, "disk": 0}}
    moved = {**plain, "weights": 800_002, "places": {"cpu": 1, "disk": 1_200_000}}
    assert find_misplaced({"nothing": plain, "weights to disk": moved}, cpu) == []
    broken = {**moved, key: value}
    faults = find_misplaced({"nothing": plain, "weights to disk": broken}, cpu)
    assert faults and faults[0].startswith(fault)


def test_offload_notices_what_has_stayed_on_the_device() -> None:
    found = {
        name: {**OFFLOADED["nothing"], "places": {"cuda": 20_000, "cpu": 0, "disk": 0}}
        for name in ("nothing", "states")
    }
    faults = module("offload").find_misplaced(found, torch.device("cuda"))
    assert faults == ["states: only 0 bytes have left the device"]


@pytest.mark.slow
def test_a_model_too_large_to_be_counted_is_named_before_it_is_made() -> None:
    fit_into, parameters_of = (
        module("sized_qwen").fit_into,
        module("sized_qwen").parameters_of,
    )
    count = parameters_of(256, 2)
    assert count == sum(
        p.numel() for p in module("sized_qwen").new_model(256, 2).parameters()
    )
    fit_into(32 * count, 256, 2)
    with pytest.raises(
        ValueError, match=f"has {count:,} parameters: .* try --width=128,"
    ):
        fit_into(32 * count - 1, 256, 2)
    # Nobody has so much memory; nothing of it may be taken to find that out.
    result = torchrun(
        ROOT / CHAPTER / "held.py", "--width=65536", "--layers=99", nproc=1
    )
    assert result.returncode != 0
    (said,) = [line for line in result.stderr.splitlines() if "held.py: " in line][:1]
    assert "--width=65536 --layers=99 has 5,102,463,942,656 parameters" in said
    assert "device:" not in result.stdout


def is_async_io_compiled() -> bool:
    """Tell whether DeepSpeed's disk access has been compiled for this very PyTorch."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    headers = str(Path(torch.__file__).parent / "include")
    folders = [path.parent for path in root.glob("**/async_io/async_io.so")]
    return any(headers in (path / "build.ninja").read_text() for path in folders)


def rows_of(result: Result) -> tuple[dict[str, float], dict[str, float]]:
    """Return what offload.py has in memory and on disk, in MB, by way."""
    assert result.returncode == 0, result.output
    assert re.search(r"^check: \d ways, 5 losses each", result.stdout, re.M)
    rows = re.findall(r"^(\w.*?) +(\S+) MB +(\S+) MB +\d+$", result.stdout, re.M)
    return {n: float(m) for n, m, _ in rows}, {n: float(d) for n, _, d in rows}


@pytest.mark.slow
def test_what_is_on_disk_leaves_memory_or_libaio_is_asked_for(tmp_path: Path) -> None:
    script = ROOT / CHAPTER / "offload.py"
    missing = module("start").missing_libaio(torch.device("cpu"))
    if not missing and not is_async_io_compiled():
        pytest.skip(
            "async_io is not compiled: run 05_deepspeed_zero/offload.py --disk=."
        )
    result = torchrun(script, "--disk", tmp_path, timeout=240)
    if missing:
        line = f"offload.py: --disk needs DeepSpeed's async_io, and there is {missing}"
        assert result.returncode != 0
        assert result.stderr.splitlines()[0] == line
        return
    memory, disk = rows_of(result)
    assert list(disk.values()) == [0, 0, 0, pytest.approx(38.6, abs=0.1)]
    assert memory["states to disk"] < memory["nothing"] - 20
    # 18 matrices of the MLP, each cut in two: 640 x 1920 / 2 values of two bytes.
    words = ["--precision=bf16", "--width=640", "--layers=6", "--disk", tmp_path]
    memory, disk = rows_of(torchrun(script, *words, timeout=240))
    assert list(disk.values()) == [0, pytest.approx(18 * 1.2288, abs=0.1)]
    assert memory["weights to disk"] < memory["nothing"]
    assert list(tmp_path.iterdir()) == []
