"""Chapter 05: accelerate, Trainer and from_pretrained, and what they do on a CPU."""

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from lessons import in_the_pool
from scripts import load_chapter
from zero_ranks import Pools, forget_earlier_group, pools_by_size

ROOM = "05_deepspeed_zero/huggingface"


@pytest.fixture(scope="module")
def zero_pools() -> Iterator[Pools]:
    with pools_by_size() as pools:
        yield pools


# --- What runs on each rank. ----------


def run_room_script(script: str, mistake: str = "") -> tuple[int, str]:
    """Be one rank of a script, perhaps with a mistake; return exit code and words."""
    forget_earlier_group()
    module: Any = load_chapter(ROOM)[script]
    output = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_the_pool(module))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        # A check that fails leaves the group, which is the pool's.
        ranks: Any = load_chapter(ROOM)["ranks"]
        stack.enter_context(mock.patch.object(ranks, "leave"))
        if mistake == "every rank takes all samples":
            wrong = mock.patch.object(
                module, "InitProcessGroupKwargs", lambda **_: None
            )
            stack.enter_context(wrong)
            plain = module.Accelerator
            stack.enter_context(
                mock.patch.object(
                    module,
                    "Accelerator",
                    lambda kwargs_handlers=None, **settings: plain(**settings),
                )
            )
        elif mistake == "nobody tells Trainer of the CPU":
            train = module.train_with_trainer
            stack.enter_context(
                mock.patch.object(
                    module, "train_with_trainer", lambda use_cpu: train(False)
                )
            )
        elif mistake == "the object is gone before the model is loaded":
            import transformers.integrations

            stack.enter_context(
                mock.patch.object(
                    transformers.integrations, "HfDeepSpeedConfig", lambda _: None
                )
            )
        elif mistake:
            raise ValueError(mistake)
        try:
            module.main()
        except SystemExit as end:
            return int(end.code or 0), output.getvalue()
        except AttributeError as error:
            return 1, f"{output.getvalue()}{error}"
    return 0, output.getvalue()


# --- What they must say. ----------


def test_accelerate_gives_each_rank_its_samples_only_with_the_backend_named(
    zero_pools: Pools,
) -> None:
    (code, said), (other, _) = zero_pools(2).run(
        run_room_script, "with_accelerate", world_size=2, timeout=120
    )
    assert code == other == 0, said
    rows = re.findall(
        r"^(.*?) +\| (\w+) in (\d) \S+ \| (\d+) samples, (\d+)", said, re.M
    )
    assert rows == [
        ("as it comes", "DeepSpeedEngine", "1", "128", "64"),
        ("cpu=True", "DistributedDataParallel", "2", "64", "64"),
        ("backend named", "DeepSpeedEngine", "2", "64", "64"),
    ]


def test_trainer_needs_use_cpu_on_a_cpu(zero_pools: Pools) -> None:
    (code, said), (other, _) = zero_pools(2).run(
        run_room_script, "with_trainer", world_size=2, timeout=120
    )
    assert code == other == 0, said
    rows = re.findall(
        r"^(\S+) +\| (\w+) in (\d) \S+ \| (\d+) samples, (\d+)", said, re.M
    )
    assert rows == [
        ("use_cpu=False", "DeepSpeedEngine", "1", "128", "64"),
        ("use_cpu=True", "DeepSpeedEngine", "2", "64", "64"),
    ]


def test_from_pretrained_fills_shards(zero_pools: Pools) -> None:
    (code, said), (other, _) = zero_pools(2).run(
        run_room_script, "from_pretrained", world_size=2, timeout=120
    )
    assert code == other == 0, said
    whole = float(re.findall(r"take ([\d.]+) MB", said)[0])
    rows = re.findall(r"rank (\d) \| keeps +([\d.]+) MB \| peak +([\d.]+)", said)
    assert [row[0] for row in rows] == ["0", "1"] and whole > 60
    assert len(rows) == 2
    for _, kept, _ in rows:
        assert float(kept) == pytest.approx(whole / 2, rel=0.01)
    # Rank 0 reads the whole file; the other never has more than a tensor beside shards.
    assert float(rows[0][2]) > whole
    assert float(rows[1][2]) < 0.65 * whole


@pytest.mark.parametrize(
    ("script", "mistake"),
    [
        ("with_accelerate", "every rank takes all samples"),
        ("with_trainer", "nobody tells Trainer of the CPU"),
        ("from_pretrained", "the object is gone before the model is loaded"),
    ],
)
def test_a_mistake_ends_the_run(zero_pools: Pools, script: str, mistake: str) -> None:
    ends = zero_pools(2).run(
        run_room_script, script, mistake, world_size=2, timeout=120
    )
    assert [code for code, _ in ends] == [1, 1], ends
    claim = "check failed on ranks [0, 1]"
    assert claim in ends[0][1] or "ds_tensor" in ends[0][1], ends[0][1]
