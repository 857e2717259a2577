"""Chapter 03: what synchronisation costs, and the model held against unseen ranks."""

import copy
import itertools
import json
import math
import os
import random
import re
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch import ROOT, python
from lessons import in_the_pool, run_lesson
from pages import words_of
from scripts import load_chapter
from worker_pool import RankError, WorkerPool

PLACE = "03_ddp_torchrun/scaling"
ROOM, ASSETS = load_chapter(PLACE), load_chapter("assets")
COST, PREDICT, SCALING, SLOW_LINK, SPEED, TEAM = (
    ROOM[name]
    for name in ("cost_model", "predict", "scaling", "slow_link", "speed", "team")
)
RATE: Any = ROOM["learning_rate"]
LAB = ROOT / "03_ddp_torchrun/cluster/lab.py"
CPU = torch.device("cpu")
LINK = COST.Link(latency=0.0003, bandwidth=11.6e6)
NUMBERS = 443_648  # of the GPT, all of them trained


# --- The cost model. ----------


def test_ring_takes_two_rounds_of_a_part_each() -> None:
    time, link = COST.all_reduce_time, COST.Link(0.5, 1_000)
    # Written out by hand: 4 ranks, 6 messages of a quarter each.
    assert time(4, 8_000, link) == pytest.approx(6 * (0.5 + 2.0))
    assert time(2, 8_000, link) == pytest.approx(2 * (0.5 + 4.0))
    assert time(1, 8_000, link) == 0
    # The bytes of a rank never come to more than two messages; the latencies do.
    assert time(10_000, 8_000, COST.Link(0.0, 1_000)) == pytest.approx(16, rel=1e-3)
    assert time(10_000, 0, link) == 19_998 * 0.5


def test_step_is_computation_and_what_it_does_not_hide() -> None:
    link = COST.Link(0.5, 1_000)

    def step(ranks: int, buckets: list[tuple[float, int]], overlap: bool) -> float:
        return COST.step_time(ranks, 100.0, buckets, link, overlap)

    # Two ranks: a bucket of 20,000 bytes takes 2 x 0.5 + 20.
    assert step(2, [(90.0, 40_000)], True) == pytest.approx(100 + 41)
    early = [(60.0, 20_000), (90.0, 20_000)]
    # The first is through at 81, before the second is ready; the second adds 21.
    assert step(2, early, True) == pytest.approx(100 + 21)
    assert step(2, early, False) == pytest.approx(100 + 42)
    # The second has to wait for the first: 80 + 21 + 21, which is 32 after the 90.
    assert step(2, [(80.0, 20_000), (90.0, 20_000)], True) == pytest.approx(132)
    assert step(1, early, True) == step(1, early, False) == 100


def all_reduces(link: Any, free: float = 0.0) -> dict[int, float]:
    """Return what all-reduces of two ranks take if `free` bytes pass at once."""
    return {
        n: 2 * link.latency + max(0.0, n - free) / link.bandwidth
        for n in SCALING.MESSAGES
    }


def test_latency_comes_from_small_messages_and_bandwidth_from_large_ones() -> None:
    fitted = COST.fit_link(all_reduces(LINK))
    assert fitted.latency == pytest.approx(LINK.latency, rel=0.02)
    assert fitted.bandwidth == pytest.approx(LINK.bandwidth)
    # With a token bucket's free burst the line begins below zero, the fit does not.
    burst = all_reduces(LINK, free=64_000)
    assert COST.latency_of_line(burst) < -0.002
    assert COST.latency_of_line(all_reduces(LINK)) == pytest.approx(LINK.latency)
    fitted = COST.fit_link(burst)
    assert fitted == pytest.approx(LINK)
    with pytest.raises(ValueError, match="took no longer"):
        COST.fit_link({1: 1.0, 100: 3.0, 200: 3.0})


# --- The prediction, held against what it has not seen. ----------


def cases_of(link: Any, noise: float = 0.0, rounds: int = 9) -> list[dict[str, Any]]:
    """Return what scaling.py would write of 4 ranks that do as the model says."""
    draw = random.Random(1)

    def noted(seconds: float) -> list[float]:
        return [seconds * draw.uniform(1 - noise, 1 + noise) for _ in range(rounds)]

    cases: list[dict[str, Any]] = [
        {"way": f"{nbytes:,} bytes", "ranks": ranks, "nbytes": nbytes}
        | {"measured": noted(COST.all_reduce_time(ranks, nbytes, link))}
        for ranks in (2, 3, 4)
        for nbytes in SCALING.MESSAGES
    ]
    for way, (cap, _) in SCALING.WAYS.items():
        count = 1 if cap > 1 else 4
        sizes, ready = [1_774_592 // count] * count, [0.05, 0.06, 0.07, 0.08][-count:]
        for ranks in (1, 2, 3, 4):
            buckets = list(zip(ready, sizes, strict=True))
            step = COST.step_time(ranks, 0.09, buckets, link, way == "overlap")
            case = {"way": way, "ranks": ranks, "nbytes_of_buckets": sizes}
            case |= {"compute": noted(0.09), "ready": [ready] * rounds}
            cases.append(case | {"measured": noted(step)})
    return cases


def test_only_two_ranks_are_fitted() -> None:
    cases, rounds = cases_of(LINK), range(9)
    predicted = PREDICT.predict(cases, rounds)
    others = copy.deepcopy(cases)
    changed = 0
    for case in others:
        if case["ranks"] != 2:
            case["measured"] = [7 * seconds for seconds in case["measured"]]
            changed += 1
    assert changed == 6 + 4 * 3
    assert PREDICT.predict(others, rounds) == predicted
    for case in cases[:3]:
        case["measured"] = [7 * seconds for seconds in case["measured"]]
    assert PREDICT.predict(cases, rounds)["one bucket", 4] > predicted["one bucket", 4]


def test_intervals_hold_what_is_true() -> None:
    truth = PREDICT.predict(cases_of(LINK), range(9))
    ends = PREDICT.intervals(cases_of(LINK, noise=0.05))
    assert ends.keys() == truth.keys() and len(ends) == 3 + 9 + 16 + 6
    held = [low <= truth[key] <= high for key, (low, high) in ends.items()]
    assert sum(held) > 0.7 * len(held)
    wide = [(high - low) / abs(truth[key]) for key, (low, high) in ends.items()]
    assert sum(width > 0 for width in wide) == len(wide)
    assert max(wide[:2]) < 0.1
    # Rounds that agree leave no doubt.
    exact = PREDICT.intervals(cases_of(LINK)).values()
    assert [low == high for low, high in exact] == [True] * len(ends)


def run_predict(path: Path, links: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """Run predict.py on what two links did; return what it printed."""
    path.write_text(json.dumps(links))
    with mock.patch("sys.argv", ["predict.py", f"--json={path}"]):
        PREDICT.main()
    return capsys.readouterr().out


def test_predictions_are_held_against_three_and_four_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, cases = tmp_path / "times.json", cases_of(LINK, noise=0.02)
    lines = run_predict(path, {"a": cases, "b": cases}, capsys).splitlines()
    assert len(lines) == 2 * (3 + 6 + 8 + 2) + 1
    assert lines[0].startswith("a: latency 0.3")
    assert re.fullmatch(
        r"check: 12 steps of more than 2 ranks, off by up to: a [+-]\d%, b [+-]\d% "
        r"\(limit 15%\)",
        lines[-1],
    )
    rows = [line.split() for line in lines[3:17]]
    assert [row[-1][-1] for row in rows] == ["%"] * 14
    assert [abs(int(row[-1][:-1])) <= 5 for row in rows] == [True] * 14
    efficiency = re.findall(r"(\d+) \((\d+) to (\d+)\)", lines[17])
    assert lines[17].endswith(" % of 8, 64, 1024 ranks") and len(efficiency) == 3
    middles = [int(row[0]) for row in efficiency]
    assert middles == sorted(middles, reverse=True) and middles[0] > 2 * middles[2]
    inside = [int(low) <= int(mid) <= int(high) for mid, low, high in efficiency]
    assert inside == [True] * 3


def test_predictions_are_shown_in_their_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_predict(tmp_path / "times.json", {"a": cases_of(LINK)}, capsys)
    lines = said.splitlines()
    # 0.0003 seconds and 11.6 million bytes a second, of 8 bits each.
    both = "latency 0.30 (0.30 to 0.30) ms, bandwidth 92.8 (92.8 to 92.8) Mbit/s"
    assert lines[0] == f"a: {both}"
    assert lines[1].endswith(" says latency 0.30 (0.30 to 0.30) ms")
    # Thakur et al.: on 3 ranks 4 messages, each a third of a million bytes.
    # The latency is that of the smallest messages, which have 50 bytes.
    latency = 0.0003 + 50 / 11.6e6
    ms = [1e3 * 4 * (a + 1_000_000 / 3 / 11.6e6) for a in (0.0003, latency)]
    shown = f"1,000,000 bytes       3{ms[0]:14.1f}  {ms[1]:.1f} ("
    assert lines[4].startswith(shown)
    # Efficiency: 0.09 seconds of computation, of that and of 2 (n - 1) messages.
    shares = []
    for n in (8, 64, 1024):
        message = latency + 1_774_592 / n / 11.6e6
        shares.append(f"{100 * 0.09 / (0.09 + 2 * (n - 1) * message):.0f}")
    assert lines[17].startswith("one bucket: efficiency ")
    assert re.findall(r"(\d+) \(", lines[17]) == shares


def test_nine_draws_of_ten_are_in_an_interval() -> None:
    drawn = list(range(PREDICT.DRAWS))
    random.Random(2).shuffle(drawn)
    each = [{("x", 1): float(value)} for value in drawn]
    with mock.patch.object(PREDICT, "predict", side_effect=each):
        ((low, high),) = PREDICT.intervals([{"measured": [1.0] * 3}]).values()
    inside = sum(low <= value <= high for value in drawn)
    assert inside / PREDICT.DRAWS == pytest.approx(0.9, abs=0.01)
    assert low == pytest.approx(PREDICT.DRAWS - high, abs=1)


@pytest.mark.parametrize(
    ("way", "ranks", "factor", "is_right"),
    [
        ("one bucket", 3, 1.10, True),
        ("one bucket", 3, 1.25, False),
        ("strong scaling", 4, 0.80, False),
        ("small buckets", 4, 1.25, False),
        # It is what was fitted, or is not claimed: computation and communication
        # are not independent.
        ("one bucket", 2, 2.00, True),
        ("overlap", 4, 2.00, True),
    ],
)
def test_a_prediction_that_is_off_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    way: str,
    ranks: int,
    factor: float,
    is_right: bool,
) -> None:
    cases, path = cases_of(LINK), tmp_path / "times.json"
    (case,) = [c for c in cases if (c["way"], c["ranks"]) == (way, ranks)]
    case["measured"] = [factor * seconds for seconds in case["measured"]]
    if is_right:
        assert "check: " in run_predict(path, {"a": cases}, capsys)
        return
    with pytest.raises(SystemExit, match=r"^check failed, not so: .*%"):
        run_predict(path, {"a": cases}, capsys)


def test_a_file_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, refused = tmp_path / "times.json", 0
    # The last is a run of two ranks: nothing to hold a prediction against.
    two = [case for case in cases_of(LINK) if case["ranks"] <= 2]
    for content in ([1], {"a": []}, {"a": [{"way": 1}]}, {}, {"a": two}):
        with pytest.raises(SystemExit) as ended:
            run_predict(path, content, capsys)
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "is no file of 3 ranks by scaling.py" in said
        refused += 1
    assert refused == 5


# --- What is measured. ----------


def be_a_team(cap: float) -> tuple[bool, list[int], list[torch.Tensor]]:
    """Take steps in a team of two; return buckets' bytes, and gradients."""
    team = TEAM.Team(2, cap, CPU)
    if not team.is_in:
        return False, [], []
    team.gradient("never")  # the first lets DDP rebuild its buckets
    mine = team.gradient("never")
    ready = [seconds for seconds, _ in team.sync.buckets]
    assert ready == sorted(ready) and ready[0] > 0
    sizes = [bucket.nbytes for _, bucket in team.sync.buckets]
    found = [team.gradient(when) for when in ("during backward", "after backward")]
    return True, sizes, [mine, *found]


@pytest.mark.parametrize(("cap", "buckets"), [(25, 1), (0.4, 4)])
def test_a_team_is_the_first_ranks_and_all_reduces_only_when_told(
    worker_pool: WorkerPool, cap: float, buckets: int
) -> None:
    found = worker_pool.run(be_a_team, cap, world_size=3)
    assert [is_in for is_in, _, _ in found] == [True, True, False]
    locally = [gradients[0] for _, _, gradients in found[:2]]
    assert not torch.allclose(*locally)
    for _, sizes, (_, *synchronised) in found[:2]:
        assert len(sizes) == buckets and sum(sizes) == 4 * NUMBERS
        for gradient in synchronised:
            torch.testing.assert_close(gradient, sum(locally) / 2)


def test_scaling_notes_all_cases(worker_pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    words = ["--rounds=1", "--samples=2", f"--json={path}", "--link=here"]
    run = worker_pool.run(run_lesson, PLACE, "scaling", *words, world_size=3)
    lines = run[0].splitlines()
    assert len(lines) == 1 + 2 * 3 + 4 * 3 + 1
    assert lines[-1].startswith("check: 4 ways leave the mean of the ranks' gradients")
    cases = json.loads(path.read_text())["here"]
    assert [(case["way"], case["ranks"]) for case in cases] == [
        *((f"{nbytes:,} bytes", n) for n in (2, 3) for nbytes in SCALING.MESSAGES),
        *((way, n) for way in SCALING.WAYS for n in (1, 2, 3)),
    ]
    strong = [case for case in cases if case["way"] == "strong scaling"]
    assert [case["samples"] for case in strong] == [6, 3, 2]
    measured = [len(c["measured"]) == 1 and c["measured"][0] > 0 for c in cases]
    assert measured == [True] * len(cases)
    buckets = {case["way"]: len(case["nbytes_of_buckets"]) for case in cases[6:]}
    assert list(buckets.values()) == [1, 1, 4, 4]
    # What was written is what is read; the times of a busy machine may be anything.
    for case, seconds in zip(cases[:3], (0.001, 0.002, 0.005), strict=True):
        case["measured"] = [seconds]
    assert PREDICT.predict(cases, [0])["one bucket", 3] > 0


def test_one_way_alone_overlaps() -> None:
    when = {}
    for way in SCALING.WAYS:
        team = mock.Mock(sync=mock.Mock(buckets=[]))
        case = {"way": way, "samples": 2, "compute": [], "ready": [], "measured": []}
        SCALING.measure_case(team, case)
        when[way] = [call.args[2] for call in team.seconds.mock_calls]
    assert when.pop("overlap") == ["never", "during backward"]
    assert list(when.values()) == [["never", "after backward"]] * 3


def scaling_with_known_times() -> str:
    """Be a rank of scaling.py that has measured a quarter and half of a second."""
    case = {"way": "one bucket", "ranks": 2, "samples": 4}
    case |= {"compute": [0.25], "measured": [0.5]}
    with mock.patch.object(SCALING, "measure_all", lambda *_: ([case], [0.0])):
        return run_lesson(PLACE, "scaling")


def test_scaling_shows_milliseconds(worker_pool: WorkerPool) -> None:
    (said, _) = worker_pool.run(scaling_with_known_times)
    (row,) = re.findall(r"^one bucket (.*)$", said, re.M)
    assert row.split() == ["2", "4", "250.0", "500.0"]


def sum_in_place_of_mean(*arguments: str) -> None:
    """Be a rank of scaling.py in which a step's gradients are summed."""
    right = dist.all_reduce

    def wrong(tensor: torch.Tensor, **options: Any) -> Any:
        if "group" in options and tensor.numel() > 10_000:
            options["op"] = dist.ReduceOp.SUM
        return right(tensor, **options)

    with mock.patch.object(dist, "all_reduce", wrong):
        run_lesson(PLACE, "scaling", *arguments)


@pytest.mark.slow
def test_scaling_notices_gradients_that_are_no_mean(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError, match="SystemExit: 1"):
        worker_pool.run(sum_in_place_of_mean, "--rounds=1", "--samples=2")


def half_the_bytes() -> tuple[float, float, int, float]:
    """Return errors of float32 and bfloat16, and what accumulation all-reduces."""
    exact = TEAM.Team(2, 25, CPU)
    half = TEAM.Team(2, 25, CPU, SLOW_LINK.bfloat16_hook)
    errors = [
        TEAM.distance_from(team, "during backward", exact) for team in (exact, half)
    ]
    one = exact.gradient("after backward")
    exact.step(2, "after backward", 4)
    grads = [p.grad.flatten() for p in exact.model.parameters() if p.grad is not None]
    ratio = (torch.cat(grads) / one)[one.abs() > 1e-4]
    return *errors, len(exact.sync.buckets), (ratio - 4).abs().max().item()


def groups_of_a_hook() -> tuple[list[float], bool]:
    """Return a gradient of bfloat16_hook in a group of one; is a team's hook told its?

    Group `r` holds rank `r`, which has a gradient of `r` + 1.
    """
    rank = dist.get_rank()
    own = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    model = torch.nn.Linear(1, 1, bias=False)
    ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=own)
    ddp.register_comm_hook(own, SLOW_LINK.bfloat16_hook)
    ddp(torch.tensor([[rank + 1.0]])).sum().backward()
    told = []

    def note(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        told.append(group)
        return SLOW_LINK.bfloat16_hook(own, bucket)

    team = TEAM.Team(1, 25, CPU, note)
    if team.is_in:
        team.gradient("during backward")
    assert model.weight.grad is not None
    is_told = bool(told) and all(group is team.group for group in told)
    return model.weight.grad.flatten().tolist(), is_told == team.is_in


def test_a_hook_averages_over_its_group(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(groups_of_a_hook) == [([1.0], True), ([2.0], True)]


def test_bfloat16_rounds_and_accumulation_sends_once(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(half_the_bytes)
    assert len(found) == 2
    for exact, rounded, buckets, off in found:
        assert exact < 1e-6 and 1e-4 < rounded < 2e-2
        assert buckets == 1 and off < 1e-3


def test_a_link_takes_its_bytes_over_its_rate() -> None:
    seconds = SLOW_LINK.link_seconds
    assert seconds(1448, "100mbit") == pytest.approx(1514 * 8 / 100e6)
    assert seconds(1448, "1gbit") == pytest.approx(1514 * 8 / 1e9)
    assert seconds(1448, "500kbit") == pytest.approx(1514 * 8 / 500e3)
    assert seconds(1448, "") == 0


def hold_against_a_link(
    factor: float, errors: tuple[float, float] = (0.9e-5, 0.9 * 2e-2)
) -> tuple[Any, str]:
    """Let slow_link.py hold what a link of 1 Mbit/s did against its own formulas.

    `errors` are those of the gradients that were sent in float32 and in bfloat16.
    """
    # A ring of two sends the gradient once. Four micro-batches share one message.
    count = {"float32": (1, 4), "bfloat16": (1, 2), "accumulation": (4, 4)}
    found = {}
    for way, (micro_batches, nbytes) in count.items():
        sent = 2 * (2 - 1) / 2 * NUMBERS * nbytes
        seconds = sent * 1514 / 1448 * 8 / 1e6 / micro_batches
        found[way] = [0.04, 0.04 + seconds * factor, sent * factor]
    link = {"LAB_HOST": "0", "LAB_LINK_RATE": "1mbit", "GROUP_WORLD_SIZE": "2"}
    with (
        mock.patch.dict(os.environ, link),
        mock.patch.object(SLOW_LINK, "measure_ways", return_value=found),
        mock.patch.object(SLOW_LINK, "distance_from", side_effect=errors),
    ):
        try:
            return 0, run_lesson(PLACE, "slow_link", "--samples=2")
        except SystemExit as end:
            return end.code, ""


def test_bytes_of_a_slow_link_are_a_rings(worker_pool: WorkerPool) -> None:
    (code, said), (other, _) = worker_pool.run(hold_against_a_link, 1.0)
    assert (code, other) == (0, 0)
    rows = re.findall(r"^(\w+) +([\d.]+) +(\d+) +(\d+) +(\d+)$", said, re.M)
    assert [row[:2] for row in rows] == [
        ("float32", "1.775"),
        ("bfloat16", "0.887"),
        ("accumulation", "1.775"),
    ]
    assert [row[3] == row[4] and row[2] == "40" for row in rows] == [True] * 3
    for wrong in ((0.5,), (2.0,), (1.0, (1.1e-5, 0.0)), (1.0, (0.0, 1.1 * 2e-2))):
        ends = worker_pool.run(hold_against_a_link, *wrong)
        assert [code for code, _ in ends] == [1, 1]


def test_a_slower_link_is_not_predicted_to_scale_further() -> None:
    # A line through the large messages has a latency below zero, whose clamped zero
    # once made 1024 ranks on the slowest link the fastest.
    by_link = json.loads((ROOT / "assets/03_scaling.json").read_text())
    assert list(by_link) == ["100 Mbit/s", "300 Mbit/s", "one machine"]
    predicted = [
        PREDICT.predict(cases, range(len(cases[0]["measured"])))
        for cases in by_link.values()
    ]
    assert PREDICT.FAR == (8, 64, 1024)
    for ranks in PREDICT.FAR:
        found = [one["efficiency, one bucket", ranks] for one in predicted]
        assert 0 < found[0] < found[1] < found[2] < 1
    assert [one["latency of the line", 2] < 0 for one in predicted[:2]] == [True, True]
    assert min(one["latency", 2] for one in predicted) > 0.5e-3


def test_smallest_messages_are_as_far_off_as_the_page_says() -> None:
    by_link, errors = json.loads((ROOT / "assets/03_scaling.json").read_text()), []
    for cases in by_link.values():
        predicted = PREDICT.predict(cases, range(len(cases[0]["measured"])))
        for case in cases:
            key = case["way"], case["ranks"]
            if case.get("nbytes") == 100 and case["ranks"] > 2:
                errors.append(predicted[key] / median(case["measured"]) - 1)
    assert len(errors) == 3 * 2
    page = words_of(PLACE)
    far = f"{100 * max(map(abs, errors)):.0f} % off"
    assert f"In rows not shown, the smallest messages are up to {far}." in page


def test_small_buckets_are_as_large_as_the_page_says() -> None:
    by_link, sizes = json.loads((ROOT / "assets/03_scaling.json").read_text()), []
    for cases in by_link.values():
        for case in cases:
            if case["way"] in ("small buckets", "overlap"):
                assert sum(case["nbytes_of_buckets"]) == 4 * NUMBERS
                sizes.append(case["nbytes_of_buckets"])
    assert len(sizes) == 3 * 2 * 4 and {len(one) for one in sizes} == {4}
    low, high = (f(f(one) for one in sizes) / 1e6 for f in (min, max))
    caps = {SCALING.WAYS[way][0] for way in ("small buckets", "overlap")}
    page = words_of(PLACE)
    words = f"(`bucket_cap_mb={caps.pop()}`: {low:.2f} to {high:.2f} MB)"
    assert f"`small buckets` {words}" in page and not caps


def test_a_burst_hides_the_latency_of_a_slow_link() -> None:
    # `man 8 tc-tbf`: so many bytes may pass at once; tc's kb are 1024 bytes.
    network = load_chapter("03_ddp_torchrun/cluster")["network"]
    words = network.limit_words("eth0", "100mbit")
    assert words[words.index("burst") + 1] == "64kb"
    page = words_of(PLACE)
    assert "lets 64 kB pass at once" in page


def test_speed_compares_four_ways(worker_pool: WorkerPool) -> None:
    words = ["--steps=1", "--batch-size=2"]
    (said, silent) = worker_pool.run(run_lesson, PLACE, "speed", *words)
    lines = said.splitlines()
    assert silent == "" and len(lines) == 6
    rows = [re.split(r"  +", line) for line in lines[1:5]]
    assert [row[0] for row in rows] == list(SPEED.WAYS)
    assert rows[0][2:] == ["1.00", "1.00"]
    assert sum(float(one) > 0 for row in rows for one in row[2:]) == 8
    assert lines[5].startswith("check: 2 ways of DDP give the mean")


def speed_with_known_times() -> str:
    """Be a rank of speed.py: the slower, the higher its rank and the later the way.

    It is not so in the four steps that warm up, and in the last of three.
    """
    calls = itertools.count()

    def timed(_: object) -> tuple[float, float]:
        step, way = divmod(next(calls), len(SPEED.WAYS))
        seconds = 2.0**way if step in (4, 5) else 100 / 8.0**way
        return seconds * (1 + dist.get_rank()), 3 * seconds

    with mock.patch.object(SPEED, "timed", timed):
        return run_lesson(PLACE, "speed", "--steps=3", "--batch-size=2")


def test_speed_is_of_all_ranks_and_waits_for_the_slowest(
    worker_pool: WorkerPool,
) -> None:
    (said, _) = worker_pool.run(speed_with_known_times)
    rows = [re.split(r"  +", line)[1:] for line in said.splitlines()[1:5]]
    tokens = 2 * 2 * 128  # of two ranks with two samples each
    # Without synchronisation the mean of 1 and 2 seconds; else the slower one's time.
    seconds = [1.5, 2 * 2, 2 * 4, 2 * 8]
    assert [row[0] for row in rows] == [f"{tokens / each:,.0f}" for each in seconds]
    assert [row[1] for row in rows] == [f"{1.5 / each:.2f}" for each in seconds]
    assert [row[2] for row in rows] == ["1.00", "0.50", "0.25", "0.12"]


def barriers_in_a_step() -> list[int]:
    """Count the barriers in a step of each way."""
    tokens, counts = torch.zeros(2, 8, dtype=torch.int64), []
    batch, defaults = [[0, 1], tokens, tokens], SPEED.train.GPTConfig
    small = mock.patch.object(SPEED.train, "GPTConfig", lambda: defaults(8, 16, 1))
    for way in SPEED.WAYS:
        with small:
            _, step = SPEED.build(way, batch)
        with mock.patch.object(dist, "barrier") as barrier:
            step()
        counts.append(barrier.call_count)
    return counts


def test_ranks_wait_for_each_other_where_the_way_says_so(
    worker_pool: WorkerPool,
) -> None:
    assert worker_pool.run(barriers_in_a_step) == [[0, 1, 0, 0]] * 2


def speed_without_ddp() -> None:
    """Be a rank of speed.py in which DDP does nothing."""
    with (
        mock.patch.object(SPEED, "DDP", lambda model, **_: model),
        in_the_pool(SPEED, "--steps=1", "--batch-size=2"),
    ):
        SPEED.main()


def test_speed_notices_that_nothing_is_averaged(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError):
        worker_pool.run(speed_without_ddp)


# --- The learning rate. ----------


def test_a_rate_rises_and_falls_by_the_share_of_the_steps_that_is_done() -> None:
    for steps in (64, 256):
        rates = [RATE.rate_of(step, steps, 0.5) for step in range(steps)]
        top = rates.index(max(rates))
        assert len(rates) == steps and top in (steps // 10, steps // 10 - 1)
        assert max(rates) == pytest.approx(0.5, rel=0.03)
        assert rates[0] < 0.5 / 6 and rates[-1] < 0.001
        assert rates[steps // 2] == pytest.approx(0.25, abs=0.005)


def trained_a_little(name: str) -> torch.Tensor:
    """Train on 64 samples in batches of 16, twice; return the weights."""
    with mock.patch.object(RATE, "SAMPLES", 64):
        samples = torch.arange(64 * 32).view(64, 32) % 251, torch.ones(64, 32).long()
        model = RATE.train_at(0.01, name, samples, 16, 2)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_ranks_take_parts_of_the_batches_of_one_process(
    worker_pool: WorkerPool, name: str
) -> None:
    samples = torch.arange(64 * 32).view(64, 32) % 251, torch.ones(64, 32).long()
    torch.manual_seed(0)
    model = RATE.GPT(RATE.GPTConfig(block_size=32, width=32, layers=1, heads=2))
    optimizer: Any = (
        torch.optim.AdamW(model.parameters())
        if name == "AdamW"
        else torch.optim.SGD(model.parameters(), momentum=0.9)
    )
    order = torch.cat([torch.randperm(64), torch.randperm(64)]).view(8, 16)
    for step in range(8):
        # The whole rate from the first step: a tenth of eight steps is over at once.
        optimizer.param_groups[0]["lr"] = 0.005 * (1 + math.cos(math.pi * step / 8))
        optimizer.zero_grad()
        model(*(part[order[step]] for part in samples)).backward()
        optimizer.step()
    due = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    for ranks in (1, 2):
        found = worker_pool.run(trained_a_little, name, world_size=ranks)
        assert len(found) == ranks
        assert all(torch.allclose(one, due, atol=2e-5) for one in found)


def rates_with_known_losses(losses: list[float]) -> str | None:
    """Be a rank of learning_rate.py whose five ways end with these losses."""
    calls = itertools.count()

    def train_at(rate: float, name: str, _: Any, batch: int, epochs: int) -> Any:
        case = next(calls) % 5
        tuned = {"AdamW": 0.008, "SGD": 0.06}[name]
        assert (batch, epochs) == ((32, 8)[case == 0], (1, 4)[case == 4])
        assert rate == pytest.approx((1, 1, 2, 4, 2)[case] * tuned)
        return lambda *_: torch.tensor(losses[case])

    with mock.patch.object(RATE, "train_at", train_at):
        try:
            return run_lesson(PLACE, "learning_rate")
        except SystemExit:
            return None


@pytest.mark.parametrize(
    ("losses", "is_right"),
    [
        ([2.6, 2.9, 2.8, 2.9, 2.5], True),
        ([2.6, 2.9, 2.8, 2.65, 2.5], False),  # four times the rate makes up for it
        ([2.6, 2.9, 2.9, 2.9, 2.5], False),  # twice the rate does not help
        ([2.6, 2.9, 2.8, 2.9, 2.6], False),  # as many steps are not enough
    ],
)
def test_rates_are_compared(
    worker_pool: WorkerPool, losses: list[float], is_right: bool
) -> None:
    said, silent = worker_pool.run(rates_with_known_losses, losses)
    assert (said is not None) is (silent is not None) is is_right
    if is_right:
        rows = [line.split() for line in said.splitlines()[1:11]]
        assert [row[-1] for row in rows] == [f"{loss:.3f}" for loss in losses] * 2
        assert [row[1:4] for row in rows[3:6]] == [
            ["32", "64", "1"],
            ["32", "256", "4"],
            ["8", "256", "1"],
        ]


@pytest.mark.slow
def test_fit_finds_the_rate_of_the_link(laboratory: None, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    words = ["--rounds=1", "--samples=4", f"--json={path}"]
    run = python(
        *(LAB, "--hosts=3", "--link-rate=60mbit", "--"),
        *(ROOT / PLACE / "scaling.py", *words),
    )
    assert run.returncode == 0, run.output
    (cases,) = json.loads(path.read_text()).values()
    assert len(cases) == 2 * 3 + 4 * 3
    times = {case["nbytes"]: case["measured"][0] for case in cases[:3]}
    # The link was set to 60 Mbit/s, and gloo can use no more of it; on cores that
    # others use as well it gets less.
    link = COST.fit_link(times)
    assert 0.5 * 60e6 < 8 * link.bandwidth < 1.1 * 60e6
    assert 0 < link.latency < 0.1


@pytest.mark.slow
def test_half_the_bytes_cross_the_link(laboratory: None, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    words = ["--rounds=3", "--samples=2", f"--json={path}"]
    script = ROOT / PLACE / "slow_link.py"
    run = python(LAB, "--link-rate=20mbit", "--", script, *words)
    assert run.returncode == 0, run.output
    assert "check: bytes and times as the rate says, gradients" in run.output
    (found,) = json.loads(path.read_text()).values()
    sent = {way: of_way[2] for way, of_way in found.items()}
    assert sent["float32"] == pytest.approx(4 * NUMBERS, rel=0.1)
    assert sent["accumulation"] == pytest.approx(4 * NUMBERS, rel=0.1)
    assert sent["bfloat16"] == pytest.approx(2 * NUMBERS, rel=0.1)


# --- What cannot work, and the pictures. ----------


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("scaling", [], "start it with torchrun --nproc-per-node=2"),
        ("scaling", ["--samples=1"], "--samples: '1' is no number from 2 to 9999"),
        ("scaling", ["--json=missing/a.json"], "there is no folder missing"),
        ("slow_link", [], "start it in the laboratory: python 03_ddp_torchrun/cluster"),
        ("slow_link", ["--json=missing/a.json"], "there is no folder missing"),
        ("speed", ["--steps=0"], "--steps: '0' is no number from 1 to 9999"),
        ("predict", ["--json=missing"], "is no file of 3 ranks by scaling.py"),
    ],
)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    words: list[str],
    said: str,
) -> None:
    monkeypatch.setattr("sys.argv", [f"{script}.py", *words])
    for name in ("RANK", "LAB_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        ROOM[script].main()
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1


def test_pictures_refuse_what_is_off(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    words = [f"--numbers={path}", f"--out={tmp_path}"]

    def draw(name: str, numbers: Any) -> bool:
        path.write_text(json.dumps(numbers))
        with mock.patch("sys.argv", [name, *words]):
            ASSETS[name].main()
        picture = tmp_path / name.replace("draw", "03")
        return os.path.getsize(picture.with_suffix(".png")) > 10_000

    cases = cases_of(LINK, noise=0.02)
    assert draw("draw_scaling", {"a": cases, "b": cases})
    (four,) = [c for c in cases if (c["way"], c["ranks"]) == ("one bucket", 4)]
    four["measured"] = [0.5 * seconds for seconds in four["measured"]]
    with pytest.raises(RuntimeError, match="a drawn prediction is"):
        draw("draw_scaling", {"a": cases, "b": cases})

    def links(factor: float) -> dict[str, Any]:
        return {
            rate: {
                way: [0.04, factor * (0.04 + on_link / count), expected, expected]
                for way, (count, nbytes) in SLOW_LINK.WAYS.items()
                for expected in [NUMBERS * nbytes]
                for on_link in [SLOW_LINK.link_seconds(expected, rate)]
            }
            for rate in ("1gbit", "100mbit")
        }

    assert draw("draw_slow_link", links(1.1))
    with pytest.raises(RuntimeError, match="a drawn time is 40% away"):
        draw("draw_slow_link", links(1.4))
