"""Chapter 05: accelerate, Trainer and from_pretrained, and what they do on a CPU."""

import contextlib
import io
import re
from typing import Any
from unittest import mock

import pytest
import torch

from lessons import in_the_pool
from scripts import load_chapter
from zero_ranks import Pools, forget_earlier_group

ROOM = "05_deepspeed_zero/huggingface"


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


@pytest.mark.slow
def test_accelerate_gives_each_rank_its_samples_only_with_the_backend_named(
    zero_pools: Pools,
) -> None:
    (code, said), (other, _) = zero_pools(2).run(
        run_room_script, "with_accelerate", world_size=2
    )
    assert code == other == 0, said
    rows = re.findall(
        r"^(.*?) +\| (\w+) in (\d) \S+ \| (\d+) samples, (\d+)", said, re.M
    )
    assert rows == [
        ("as it comes", "DeepSpeedEngine", "1", "96", "48"),
        ("cpu=True", "DistributedDataParallel", "2", "48", "48"),
        ("backend named", "DeepSpeedEngine", "2", "48", "48"),
    ]


@pytest.mark.slow
def test_trainer_needs_use_cpu_on_a_cpu(zero_pools: Pools) -> None:
    (code, said), (other, _) = zero_pools(2).run(
        run_room_script, "with_trainer", world_size=2
    )
    assert code == other == 0, said
    rows = re.findall(
        r"^(\S+) +\| (\w+) in (\d) \S+ \| (\d+) samples, (\d+)", said, re.M
    )
    assert rows == [
        ("use_cpu=False", "DeepSpeedEngine", "1", "96", "48"),
        ("use_cpu=True", "DeepSpeedEngine", "2", "48", "48"),
    ]


def test_from_pretrained_fills_shards(zero_pools: Pools) -> None:
    (code, said), (other, _) = zero_pools(2).run(
        run_room_script, "from_pretrained", world_size=2
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
    ends = zero_pools(2).run(run_room_script, script, mistake, world_size=2)
    assert [code for code, _ in ends] == [1, 1], ends
    claim = "check failed on ranks [0, 1]"
    assert claim in ends[0][1] or "ds_tensor" in ends[0][1], ends[0][1]


# --- A model without a loss, and a mask. ----------


def test_auto_model_has_no_head_and_no_loss() -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    config = load_chapter(ROOM)["qwen"].small_config()
    tokens = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))
    body, model = (
        AutoModel.from_config(config),
        AutoModelForCausalLM.from_config(config),
    )
    # The labels are taken, and nobody reads them.
    output = body(input_ids=tokens, labels=tokens)
    assert "loss" not in output and output.last_hidden_state.shape == (2, 8, 128)
    with pytest.raises(AttributeError, match="object has no attribute 'loss'"):
        output.loss  # noqa: B018
    assert model(input_ids=tokens, labels=tokens).loss.item() > 0
    # The head of this one is its embedding, so the two have equally many parameters.
    count = {sum(p.numel() for p in one.parameters()) for one in (body, model)}
    assert count == {427_136}


@torch.no_grad()
def test_mask_of_ones_changes_nothing_and_no_mask_hides_labels() -> None:
    modules = load_chapter(ROOM)
    model = modules["qwen"].small_model().eval()
    tokens = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))
    ones, padded, labels = (
        torch.ones_like(tokens),
        torch.ones_like(tokens),
        tokens.clone(),
    )
    padded[1, 5:] = 0
    labels[1, 5:] = -100
    plain = model(input_ids=tokens, labels=tokens)
    masked = model(input_ids=tokens, attention_mask=ones, labels=tokens)
    assert torch.equal(plain.logits, masked.logits) and plain.loss == masked.loss
    # Positions that begin anew tell of two samples in one row, if there is no mask.
    packed: dict[str, Any] = {"position_ids": torch.arange(4).repeat(2)[None]}
    packed |= {"input_ids": tokens[:1], "use_cache": False}
    apart = model(**packed).logits - model(**packed, attention_mask=ones[:1]).logits
    assert apart[0, :4].abs().max() < 1e-5 < 1e-3 < apart[0, 4:].abs().max()
    # What is padded on the right no earlier token sees, mask or not.
    right = model(input_ids=tokens, attention_mask=padded, labels=tokens)
    assert torch.equal(plain.logits[1, :5], right.logits[1, :5])
    # But the loss counts the padding, until its labels are -100.
    whole = model(input_ids=tokens[:1], labels=tokens[:1]).loss
    short = model(input_ids=tokens[1:, :5], labels=tokens[1:, :5]).loss
    due = (7 * whole + 4 * short) / 11  # a token predicts the next: 7 and 4 of them
    hidden = model(input_ids=tokens, attention_mask=padded, labels=labels).loss
    assert hidden.item() == pytest.approx(due.item(), rel=1e-6)
    assert abs(right.loss.item() / due.item() - 1) > 1e-3
    # What is padded on the left changes the tokens after it: there it needs the mask.
    left = model(input_ids=tokens, attention_mask=padded.flip(1)).logits
    assert (left[1, 3:] - plain.logits[1, 3:]).abs().max() > 0.1
