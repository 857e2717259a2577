"""Chapter 06: a Hugging Face causal language model in shards, and back in one piece."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from launch import ROOT, clean_environment, torchrun
from lessons import CPU, in_the_pool
from scripts import load_chapter
from tiny_gpt import write_text, write_tokenizer
from worker_pool import WorkerPool

ROOM = "06_fsdp/huggingface"
EXACT = MixedPrecisionPolicy()


# --- What runs on each rank. ----------


def run_causal_lm(fault: str, *words: str) -> tuple[Any, str]:
    """Be a rank of causal_lm.py, perhaps with a fault; return how it ends."""
    lesson: Any = load_chapter(ROOM)["causal_lm"]
    load, save, output = lesson.load_in_shards, lesson.save_whole, io.StringIO()
    real = lesson.write_checkpoint

    def written(folder: str) -> None:
        # The lesson is not in a group yet, in which rank 0 alone would write.
        with mock.patch.object(dist, "is_initialized", return_value=False):
            real(folder)

    def loaded(*arguments: Any) -> Any:
        model = load(*arguments)
        if fault == "buffers of zeros":
            model.model.rotary_emb.inv_freq.zero_()
        elif fault == "other weights loaded":
            move(model)
        return model

    def saved(model: Any, folder: str) -> None:
        save(model, folder)
        if fault == "other weights saved":
            move(model)

    def move(model: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).to_local().mul_(1.01)

    with (
        in_the_pool(lesson, *words),
        mock.patch.object(lesson, "write_checkpoint", written),
        mock.patch.object(lesson, "load_in_shards", loaded),
        mock.patch.object(lesson, "save_whole", saved),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            lesson.main(lesson.read_options(**lesson.OPTIONS))
        except SystemExit as end:
            return end.code, output.getvalue()
    return 0, output.getvalue()


def write(folder: Path, tied: bool = True, dtype: torch.dtype = torch.float32) -> None:
    """Write the tiny checkpoint from rank 0, in several files, with an old buffer."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, GenerationConfig

    if dist.get_rank() == 0:
        load_chapter(ROOM)["tiny_qwen"].write_checkpoint(str(folder), tied)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        (folder / "model.safetensors").unlink()
        model.generation_config = GenerationConfig(eos_token_id=[5, 9])
        model.save_pretrained(folder, max_shard_size="300KB")
        # As in Llama 2's files; `from_pretrained` ignores it.
        first, *_ = sorted(folder.glob("model-*.safetensors"))
        old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        save_file(load_file(first) | old, first, {"format": "pt"})
    dist.barrier()


def loaded_and_saved(folder: Path, tied: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Load a checkpoint in shards, count what that takes, and save it again."""
    from safetensors.torch import load_file
    from torch.distributed.fsdp import FSDPModule
    from transformers import AutoModelForCausalLM

    write(folder, tied, dtype)
    sharded: Any = load_chapter(ROOM)["shard_causal_lm"]
    read = mock.Mock(side_effect=sharded.read_weights)
    counter = load_chapter("06_fsdp")["counters"].PeakMemory()
    with mock.patch.object(sharded, "read_weights", read), counter:
        model = sharded.load_in_shards(str(folder), CPU, EXACT)
    sharded.save_whole(model, str(folder / "saved"))
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    again: Any = AutoModelForCausalLM.from_pretrained(folder / "saved")
    parameters: list[Any] = list(model.parameters())
    pairs = zip(parameters, plain.parameters(), again.parameters(), strict=True)
    equal = [torch.equal(p.full_tensor(), q) and torch.equal(q, r) for p, q, r in pairs]
    wrapper = sharded.activations.CheckpointWrapper
    return {
        "read": read.call_count,
        "files": len(list(folder.glob("model-*.safetensors"))),
        "equal": (all(equal), len(equal)),
        "dtypes": {p.dtype for p in parameters},
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "recomputed": [isinstance(layer, wrapper) for layer in model.model.layers],
        "units": [isinstance(layer, FSDPModule) for layer in model.model.layers],
        "whole": sum(p.nbytes for p in parameters),
        "kept": sum(p.to_local().nbytes for p in parameters),
        "largest": max(p.nbytes for p in parameters),
        "peak": counter.peak,
        "saved": sorted(load_file(folder / "saved" / "model.safetensors")),
        "kind": json.loads((folder / "saved/config.json").read_text())["architectures"],
        "ends": again.generation_config.eos_token_id,
    }


def buffers_where_memory_is_undefined(folder: Path) -> dict[str, Any]:
    """Load while PyTorch fills undefined memory with NaN; return the buffers."""
    from transformers import AutoModelForCausalLM

    write(folder)
    sharded: Any = load_chapter(ROOM)["shard_causal_lm"]
    torch.use_deterministic_algorithms(True)  # this does it
    try:
        bare = sharded.build_on_meta(str(folder)).to_empty(device="cpu")
        model = sharded.load_in_shards(str(folder), CPU, EXACT)
    finally:
        torch.use_deterministic_algorithms(False)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    whose = {"to_empty": bare, "sharded": model, "plain": plain}
    return {name: dict(one.named_buffers()) for name, one in whose.items()}


def without_the_second_name(folder: Path) -> str:
    """Load a tied checkpoint, whose files have its matrix once, as if it were not."""
    write(folder)
    sharded: Any = load_chapter(ROOM)["shard_causal_lm"]
    build = sharded.build_on_meta

    def forgetful(name: str) -> Any:
        model = build(name)
        model.all_tied_weights_keys = {}
        return model

    with mock.patch.object(sharded, "build_on_meta", forgetful):
        try:
            sharded.load_in_shards(str(folder), CPU, EXACT)
        except RuntimeError as error:
            return str(error)
    return ""


def tied_after_to_empty(shards: bool, swaps: bool = False) -> bool:
    """Allocate a tied model; tell whether it is tied still.

    If it swaps, tensors get new contents, instead of modules new tensors.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model: Any = torch.nn.Sequential(
            torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
        )
    model[1].weight = model[0].weight
    if shards:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        model.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return model[1].weight is model[0].weight


def by_transformers_itself(folder: Path) -> tuple[bool, float, float]:
    """Load with transformers' own FSDP2; compare loss and gradients with one process.

    Every rank has the same tokens.
    """
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    write(folder)
    n, losses = dist.get_world_size(), []
    config = DistributedConfig(fsdp_size=n)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    for one in (model, plain):
        loss = one(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    far = max((p.grad.full_tensor() - q.grad).abs().max().item() for p, q in pairs)
    is_sharded = all(isinstance(p, DTensor) for p, _ in pairs)
    return is_sharded, abs(losses[0] - losses[1]), far


def norms_of_steps(folder: Path) -> list[float]:
    """Train in shards; return the norms of the gradients that AdamW gets."""
    lesson: Any = load_chapter(ROOM)["causal_lm"]
    write(folder)
    model = lesson.load_in_shards(str(folder), CPU, EXACT)
    norms = []

    def step(optimizer: Any) -> None:
        (group,) = optimizer.param_groups
        squares = [p.grad.full_tensor().square().sum() for p in group["params"]]
        norms.append(torch.stack(squares).sum().sqrt().item())

    with mock.patch.object(torch.optim.AdamW, "step", step):
        lesson.finetune(model, lesson.read_batches(None, None, 2, 2, 64))
    return norms


def run_in_bf16() -> tuple[Any, str, set[torch.dtype]]:
    """Run the script in bf16; return its end, and the dtypes of its reductions."""
    lesson: Any = load_chapter(ROOM)["causal_lm"]
    log, real = load_chapter("06_fsdp")["counters"].CollectiveLog(), lesson.finetune

    def finetuned(*arguments: Any) -> Any:
        with log:
            return real(*arguments)

    with mock.patch.object(lesson, "finetune", finetuned):
        code, output = run_causal_lm("", "--bf16")
    reduced = {call.dtype for call in log.calls if call.name == "reduce-scatter"}
    return code, output, reduced


def on_its_own_text(folder: Path, text: Path) -> dict[str, Any]:
    """Train a checkpoint without and with a tokenizer; return what it is trained on."""
    from transformers import AutoTokenizer

    lesson: Any = load_chapter(ROOM)["causal_lm"]
    write(folder)
    words = [f"--model={folder}", f"--save={folder / 'saved'}", f"--text={text}"]
    without = run_causal_lm("", *words)
    dist.barrier()
    if dist.get_rank() == 0:
        write_tokenizer(folder)
    dist.barrier()
    trained, real = [], lesson.finetune

    def noted(model: Any, batches: list[Tensor]) -> list[float]:
        trained.append(torch.stack(batches))
        return real(model, batches)

    with mock.patch.object(lesson, "finetune", noted):
        code, output = run_causal_lm("", *words)
    dist.barrier()
    again = AutoTokenizer.from_pretrained(folder / "saved")
    return {
        "without": without,
        "end": (code, output),
        "batches": trained,
        "saved": again(text.read_text())["input_ids"],
    }


def refused(config: dict[str, Any], folder: Path) -> str:
    """Build a model of another kind; return why it is refused."""
    from transformers import AutoConfig

    AutoConfig.for_model(**config).save_pretrained(folder)
    try:
        load_chapter(ROOM)["shard_causal_lm"].build_on_meta(str(folder))
    except ValueError as error:
        return str(error)
    return ""


# --- What they must say. ----------

QWEN_MOE = {"model_type": "qwen2_moe", "num_hidden_layers": 1, "num_experts": 2}
CLAIM = "the losses of one process, and of the saved model on one process"


def check_output(output: str) -> None:
    """Assert that rank 0 told of four losses that fall, and of the claim."""
    assert output.splitlines()[-1] == f"check: {CLAIM}"
    losses = [float(n) for n in re.findall(r"step \d \| loss (\S+)", output)]
    assert len(losses) == 4 and 5.3 < losses[0] < 5.7 and losses[3] < losses[0] - 0.3


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_losses_are_one_process_s_before_and_after_saving(
    worker_pool: WorkerPool, world_size: int
) -> None:
    ends = worker_pool.run(run_causal_lm, "", world_size=world_size)
    assert [code for code, _ in ends] == [0] * world_size, ends
    check_output(ends[0][1])


def test_bf16_adds_up_gradients_in_float32(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(run_in_bf16)
    assert [(code, dtypes) for code, _, dtypes in ends] == [(0, {torch.float32})] * 2
    check_output(ends[0][1])


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("buffers of zeros", marks=pytest.mark.slow),
        pytest.param("other weights loaded", marks=pytest.mark.slow),
        "other weights saved",
    ],
)
def test_check_notices(worker_pool: WorkerPool, fault: str) -> None:
    ends = worker_pool.run(run_causal_lm, fault)
    assert [code for code, _ in ends] == [1, 1], ends
    assert f"check failed on ranks [0, 1], not so: {CLAIM}" in ends[0][1]


def test_gradients_are_clipped_by_the_norm_of_all_shards(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    assert worker_pool.run(norms_of_steps, tmp_path) == [pytest.approx([1, 1])] * 2


@pytest.mark.parametrize(
    ("tied", "dtype"), [(True, torch.float32), (False, torch.bfloat16)]
)
def test_only_rank_0_ever_has_the_whole_and_it_comes_back_as_it_was(
    worker_pool: WorkerPool, tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    first, second = worker_pool.run(loaded_and_saved, tmp_path, tied, dtype)
    assert (first["read"], second["read"]) == (1, 0)
    for found in (first, second):
        assert found["files"] > 1
        assert found["equal"] == (True, 26 if tied else 27)
        assert found["dtypes"] == {torch.float32}
        assert found["tied"] == tied and found["recomputed"] == [True, True]
        assert found["units"] == [True, True]
        assert found["kept"] == pytest.approx(found["whole"] / 2, rel=0.01)
        assert len(found["saved"]) == (26 if tied else 27)
        assert ("lm_head.weight" in found["saved"]) == (not tied)
        assert found["kind"] == ["Qwen2ForCausalLM"]
        assert found["ends"] == [5, 9]
    # The other rank has one whole tensor at a time beside its shards. Of one that a
    # broadcast filled, gloo's thread may let go only when the next are there.
    most = second["kept"] + 2.5 * second["largest"]
    assert second["peak"] < most < second["whole"]
    assert first["peak"] > first["kept"] + (
        first["whole"] if dtype == torch.float32 else first["whole"] / 2
    )


def test_buffers_in_no_file_are_undefined(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    by_rank = worker_pool.run(buffers_where_memory_is_undefined, tmp_path)
    assert len(by_rank) == 2
    for found in by_rank:
        names = {f"model.rotary_emb.{n}inv_freq" for n in ("", "original_")}
        assert {name: set(one) for name, one in found.items()} == dict.fromkeys(
            ("to_empty", "sharded", "plain"), names
        )
        for name in sorted(names):
            assert found["to_empty"][name].isnan().all()
            assert torch.equal(found["sharded"][name], found["plain"][name])
        assert len(names) == 2


def test_tied_matrix_is_in_the_files_once_and_needs_both_names(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    said = worker_pool.run(without_the_second_name, tmp_path)
    assert len(said) == 2
    for text in said:
        assert 'Missing key(s) in state_dict: "lm_head.weight"' in text


def test_to_empty_keeps_only_sharded_weights_tied(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(tied_after_to_empty, True) == [True] * 2
    assert worker_pool.run(tied_after_to_empty, False) == [False] * 2
    page = " ".join((ROOT / "WHEN_IT_GOES_WRONG.md").read_text("utf-8").split())
    assert "then load all weights, tie again what was tied (as GPT-2's" in page
    # Where tensors are swapped, which is not the default, it keeps plain ones too.
    for shards in (True, False):
        assert worker_pool.run(tied_after_to_empty, shards, True) == [True] * 2


def test_transformers_itself_loads_in_shards(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    ends = worker_pool.run(by_transformers_itself, tmp_path)
    assert len(ends) == 2
    for is_sharded, loss, gradient in ends:
        assert is_sharded and loss < 1e-6 and gradient < 1e-6


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2"}, "GPT2LMHeadModel has buffers in"),
        ({"model_type": "gemma"}, "GemmaForCausalLM has buffers in"),
        (QWEN_MOE, "Qwen2MoeForCausalLM has other names in its files"),
        ({"model_type": "mistral"}, ""),
        ({"model_type": "llama"}, ""),
        ({"model_type": "qwen3"}, ""),
    ],
)
def test_model_that_is_not_built_like_llama_is_refused(
    worker_pool: WorkerPool, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    (found,) = worker_pool.run(refused, config, tmp_path, world_size=1)
    assert found.startswith(said) and bool(found) == bool(said)


def test_a_checkpoint_of_your_own_reads_your_text_by_its_tokenizer(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    text = write_text(tmp_path / "text")
    ends = worker_pool.run(on_its_own_text, tmp_path / "own", text)
    assert len(ends) == 2
    code, said = ends[0]["without"]
    assert code == 2
    assert "own: no tokenizer there; tokenizer.save_pretrained writes one" in said
    tokens = ends[0]["saved"]
    assert sorted(tokens) != sorted(text.read_bytes())
    assert len(tokens) == len(text.read_bytes())
    for rank, end in enumerate(ends):
        (code, said), (batches,) = end["end"], end["batches"]
        assert code == 0, said
        assert batches.shape == (4, 6, 64)
        whole = torch.tensor(tokens[: 4 * 12 * 64]).view(4, 12, 64)
        assert torch.equal(batches, whole.chunk(2, dim=1)[rank])
    assert ends[0]["end"][1].count("| loss") == 4
    assert "check:" not in ends[0]["end"][1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model=x"], "--model needs --save=FOLDER, too"),
        (["--model={folder}", "--save=x"], "Unrecognized model in .*"),
        (["--model=/no/such", "--save=x"], "--model=/no/such: there is no such folder"),
        (["--model=a/b/c", "--save=x"], "--model=a/b/c: there is no such folder"),
    ],
)
def test_wrong_words_are_refused_in_one_line(
    worker_pool: WorkerPool, tmp_path: Path, words: list[str], said: str
) -> None:
    words = [word.format(folder=tmp_path) for word in words]
    ((code, output),) = worker_pool.run(run_causal_lm, "", *words, world_size=1)
    assert code == 2
    # What transformers imports on first use may say a line of its own before.
    line = output.strip().splitlines()[-1]
    assert re.fullmatch(rf"causal_lm\.py: {said}", line)


@pytest.mark.slow
def test_name_on_the_hub_is_trained_and_saved(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    # The hub's cache, as a download leaves it; offline, nothing else is asked.
    revision = "0" * 40
    entry = tmp_path / "hub" / "models--someone--tiny-qwen"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(revision)
    folder = entry / "snapshots" / revision
    worker_pool.run(write, folder, world_size=1)
    write_tokenizer(folder)
    environment = clean_environment(
        HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1"
    )
    words = ["--model=someone/tiny-qwen", f"--save={tmp_path / 'saved'}"]
    script = ROOT / ROOM / "causal_lm.py"
    trained = torchrun(script, *words, env=environment)
    assert trained.returncode == 0, trained.output
    assert "step 4 | loss 4." in trained.stdout
    shutil.rmtree(folder)
    again = torchrun(
        *(script, f"--model={tmp_path / 'saved'}", f"--save={tmp_path / 'twice'}"),
        env=environment,
    )
    assert again.returncode == 0, again.output
    (loss,) = re.findall(r"step 1 \| loss (\S+)", again.stdout)
    assert float(loss) < 4.7


def outputs_of_a_head(folder: str) -> list[str]:
    """Put a head in float32 on a model that was saved in bf16; then mend it twice."""
    from transformers import AutoModel, Qwen2Config, Qwen2Model

    sizes: Any = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=4, **sizes, **heads)
    Qwen2Model(config).bfloat16().save_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder)
    in_float32: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)
    head, said = torch.nn.Linear(8, 2), []
    in_bf16 = torch.nn.Linear(8, 2).to(model.dtype)
    for body, top in ((model, head), (model, in_bf16), (in_float32, head)):
        try:
            hidden = body(torch.tensor([[1, 2]])).last_hidden_state
            said.append(str(top(hidden).dtype))
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_checkpoint_in_bf16_is_loaded_in_bf16(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    (said,) = worker_pool.run(outputs_of_a_head, str(tmp_path), world_size=1)
    refused = "mat1 and mat2 must have the same dtype, but got BFloat16 and Float"
    assert said == [refused, "torch.bfloat16", "torch.float32"]
