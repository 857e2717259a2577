"""Chapter 03: the model of a step, held against what it was not fitted on."""

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch import ROOT, python
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "03_ddp_torchrun"


def module(name: str) -> ModuleType:
    return load_chapter(CHAPTER)[name]


def test_fit_finds_the_latency_and_the_bandwidth_that_made_the_times() -> None:
    scaling, fit_link = module("scaling"), module("step_model").fit_link
    made = {count: 2 * 0.3 + count / 12_500 for count in scaling.MESSAGES}
    latency, bandwidth = fit_link(made)
    assert latency == pytest.approx(0.3)
    assert bandwidth == pytest.approx(12_500)
    # Noise may make the line start below zero; a latency below zero is none.
    below = {count: count / 12_500 - 1 for count in scaling.MESSAGES}
    assert fit_link(below)[0] == 0


def test_exchange_is_two_rounds_of_a_ring() -> None:
    exchange_ms = module("step_model").exchange_ms
    # Written out by hand: 4 ranks, 6 messages of a quarter each.
    assert exchange_ms(4, 8_000, 0.5, 1_000) == pytest.approx(6 * (0.5 + 2.0))
    assert exchange_ms(2, 8_000, 0.5, 1_000) == pytest.approx(2 * (0.5 + 4.0))
    assert exchange_ms(1, 8_000, 0.5, 1_000) == 0
    far = exchange_ms(10_000, 8_000, 0.0, 1_000)
    assert far == pytest.approx(16.0, rel=1e-3)


def test_exchange_hides_behind_backward_until_the_last_bucket() -> None:
    step_ms = module("step_model").step_ms
    # Two ranks, 1000 bytes a ms: a bucket of 20,000 bytes takes 2 x 0.5 + 20 ms.
    one_bucket, link = [(90.0, 40_000)], (2, 0.5, 1_000)
    assert step_ms(100.0, one_bucket, *link) == pytest.approx(100 + 41)
    # The first is through at 81, before the second is ready; the second adds 21.
    early = [(60.0, 20_000), (90.0, 20_000)]
    assert step_ms(100.0, early, *link) == pytest.approx(100 + 21)
    # On a slow link the second waits for the first: 60 + 2 x 42, ten after the 90.
    slow = (2, 1.0, 500)
    assert step_ms(100.0, early, *slow) == pytest.approx(60 + 2 * 42 + 10)
    assert step_ms(100.0, early, 1, 0.5, 1_000) == 100


def result(*steps: tuple[str, int, float, float]) -> dict[str, Any]:
    """Return what is measured, from kind, ranks, measured and predicted ms."""
    rows = [
        {"kind": k, "ranks": n, "samples": 16, "ms": ms, "alone_ms": 50.0}
        | {"predicted_ms": predicted, "buckets": [(40.0, 1_000_000)]}
        for k, n, ms, predicted in steps
    ]
    link = {"latency_ms": 0.5, "bytes_per_ms": 1e4}
    return {"where": "here", "messages": {}, "rows": rows, **link}


def test_prediction_that_is_off_is_refused() -> None:
    conclusion = module("scaling_rows").judge_predictions
    # Two ranks are what was fitted: how far those are off does not count.
    found = result(("weak", 1, 50, 50), ("weak", 2, 100, 30), ("weak", 4, 100, 80))
    assert conclusion(found, None).startswith("1 steps of 3 ranks or more")
    assert conclusion(found, 0.25).endswith("-20% off at worst (limit 25%)")
    with pytest.raises(RuntimeError, match="-20% off"):
        conclusion(found, 0.15)


def test_table_holds_rates_efficiency_and_what_nobody_has_run() -> None:
    found = result(("weak", 1, 50, 50), ("weak", 2, 100, 90), ("strong", 1, 40, 40))
    lines = module("scaling_rows").lines_of_teams(found)
    rows = [line.split() for line in lines[2:]]
    assert " ".join(rows[0]) == "weak 1 16 1 40,960 100% 0% 50.0 50.0"
    assert " ".join(rows[1]) == "weak 2 16 1 40,960 50% 50% 100.0 90.0"
    assert [row[:2] for row in rows[3:]] == [
        ["far", "8"],
        ["far", "64"],
        ["far", "1024"],
    ]
    # 8 ranks: 50 + 14 x 0.5 + 14 / 8 x 100 ms.
    assert rows[3][-1] == "232.0" and rows[3][-3:-1] == ["not", "run"]


def team_exchanges(cap: float) -> tuple[bool, list[int], float]:
    """Take steps in a team of two; compare the gradients, return the buckets' bytes."""
    scaling = module("scaling")
    team = scaling.Team(2, cap, torch.device("cpu"))
    if not team.is_in:
        return False, [], 0.0
    # Ranks with gradients of their own: the second's weights are doubled.
    with torch.no_grad():
        for parameter in team.model.parameters():
            parameter.mul_(1 + dist.get_rank())
    gradients = []
    team.ddp_model.zero_grad = lambda: (
        gradients.append(torch.cat([p.grad.flatten() for p in team.model.parameters()]))
        or torch.nn.Module.zero_grad(team.ddp_model)
    )
    for exchanges in (False, False, True):  # the first lets DDP settle its buckets
        team.step(2, exchanges)
    mine, exchanged = gradients[1:]
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine, group=team.group)
    assert not torch.equal(*both)
    torch.testing.assert_close(exchanged, sum(both))
    team.step(2, False)
    ready = [ms for ms, _ in team.exchange.buckets]
    assert ready == sorted(ready) and ready[0] > 0
    return True, [count for _, count in team.exchange.buckets], exchanged.numel() * 4.0


@pytest.mark.parametrize(("cap", "buckets"), [(25, 1), (0.4, 4)])
def test_a_team_is_the_first_ranks_and_exchanges_only_when_told(
    worker_pool: WorkerPool, cap: float, buckets: int
) -> None:
    found = worker_pool.run(team_exchanges, cap, world_size=3)
    assert [is_in for is_in, _, _ in found] == [True, True, False]
    for _, counts, whole in found[:2]:
        assert len(counts) == buckets
        assert sum(counts) == whole > 1e6


@pytest.mark.slow
def test_fit_finds_the_rate_of_the_link(laboratory: None, tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    words = ["--rounds=1", "--steps=1", "--samples=4", "--total=12", f"--json={path}"]
    run = python(
        ROOT / CHAPTER / "lab.py",
        *("--hosts=3", "--link-rate=60mbit", "--"),
        *(ROOT / CHAPTER / "scaling.py", *words),
        timeout=200,
    )
    assert run.returncode == 0, run.output
    # How good the predictions are is measured on an idle machine: draw_scaling.py.
    assert re.search(r"check: 3 steps of 3 ranks or more, .* off at worst", run.stdout)
    (found,) = json.loads(path.read_text()).values()
    # The link was set to 60 Mbit/s, and gloo can use no more of it; on cores that
    # others use as well it gets less.
    assert 0.5 * 60 < found["bytes_per_ms"] * 8 / 1e3 < 1.1 * 60
    assert [(row["kind"], row["ranks"], row["samples"]) for row in found["rows"]] == [
        *(("weak", n, 4) for n in (1, 2, 3)),
        *(("strong", n, 12 // n) for n in (1, 2, 3)),
        *(("overlap", n, 4) for n in (1, 2, 3)),
    ]
    assert {len(row["buckets"]) for row in found["rows"]} == {1, 4}


@pytest.mark.parametrize(
    ("ranks", "words", "said"),
    [
        (None, [], "start it with torchrun --nproc-per-node=2"),
        (1, [], "not with 1 rank(s); start it with torchrun --nproc-per-node=2"),
        (4, ["--total=3"], "--total=3 leaves a rank without a sample: 4 ranks"),
        (2, ["--samples=0"], "--samples: '0' is no number from 1 to 1000000"),
        (2, ["--json=missing/a.json"], "there is no folder missing"),
    ],
)
def test_bad_words_of_scaling_py(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ranks: int | None,
    words: list[str],
    said: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["scaling.py", *words])
    monkeypatch.delenv("RANK", raising=False)
    if ranks:
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, "0")
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, str(ranks))
    with pytest.raises(SystemExit) as stopped:
        module("scaling").main()
    assert stopped.value.code == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1


def test_picture_refuses_predictions_that_are_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    draw = module("draw_scaling")

    def write(predicted: float) -> None:
        found = result(
            *(("weak", n, 100.0, predicted) for n in (1, 2, 3, 4)),
            *(("strong", n, 100.0, predicted) for n in (1, 2, 3, 4)),
            *(("overlap", n, 100.0, predicted) for n in (1, 2, 3, 4)),
        )
        (tmp_path / "numbers.json").write_text(json.dumps({"here": found}))

    numbers = f"--numbers={tmp_path / 'numbers.json'}"
    monkeypatch.setattr("sys.argv", ["draw", numbers, f"--out={tmp_path}"])
    write(90.0)
    draw.main()
    assert (tmp_path / "03_scaling.png").stat().st_size > 10_000
    write(60.0)
    with pytest.raises(RuntimeError, match="-40% off"):
        draw.main()
