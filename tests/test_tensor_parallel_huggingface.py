"""Chapter 07: a Hugging Face causal language model whose layers are split."""

import contextlib
import copy
import importlib
import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from launch import ROOT, clean_environment, torchrun
from lessons import in_the_pool
from scripts import load_chapter
from tiny_gpt import write_text, write_tokenizer
from worker_pool import RankError, RankFailure, WorkerPool

ROOM = "07_tensor_parallel/huggingface"
B, T, D, V, LAYERS = 4, 32, 128, 256, 2
SIZES = {
    **{"vocab_size": V, "hidden_size": D, "intermediate_size": 384},
    **{"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 256, "tie_word_embeddings": True},
    **{"bos_token_id": None, "eos_token_id": None},
}
BLOCK = "model.layers.*."

# --- What runs on each rank. ----------


def modules() -> tuple[Any, Any]:
    """Return the file to carry away, and the lesson."""
    room = load_chapter(ROOM)
    return room["parallel_causal_lm"], room["causal_lm"]


def run_causal_lm(fault: str, *words: str) -> tuple[Any, str]:
    """Be a rank of causal_lm.py, perhaps with a fault; return how it ends."""
    lesson, output = modules()[1], io.StringIO()
    load, save, write = lesson.load_split, lesson.save_gathered, lesson.write_checkpoint

    def written(folder: str) -> None:
        # The lesson is not in a group yet, in which rank 0 alone would write.
        with mock.patch.object(dist, "is_initialized", return_value=False):
            write(folder)

    def loaded(*arguments: Any) -> Any:
        model = load(*arguments)
        if fault == "buffers of zeros":
            model.model.rotary_emb.inv_freq.zero_()
        elif fault == "another rank's rows":
            flip(model.model.layers[1].self_attn.q_proj.weight)
        return model

    def saved(model: Any, folder: str) -> None:
        save(model, folder)
        if fault == "other weights saved":
            flip(model.model.layers[0].mlp.down_proj.weight)

    def flip(parameter: Any) -> None:
        with torch.no_grad():
            mine = parameter.to_local()
            both = [torch.empty_like(mine.contiguous()) for _ in range(2)]
            dist.all_gather(both, mine.contiguous())
            mine.copy_(both[1 - dist.get_rank()])

    world = {"WORLD_SIZE": "3"} if fault == "one of three ranks" else {}
    with (
        in_the_pool(lesson, *words),
        mock.patch.dict(os.environ, world),
        mock.patch.object(lesson, "write_checkpoint", written),
        mock.patch.object(lesson, "load_split", loaded),
        mock.patch.object(lesson, "save_gathered", saved),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            lesson.main(lesson.read_options(**lesson.OPTIONS))
        except SystemExit as end:
            return end.code, output.getvalue()
    return 0, output.getvalue()


def run_in_bf16() -> tuple[Any, str, dict[str, set[torch.dtype]]]:
    """Run the script in bf16; return its end, and which dtypes are where."""
    _, lesson = modules()
    load, used = lesson.load_split, lesson.compute_gradients
    log = load_chapter("06_fsdp")["counters"].CollectiveLog()
    seen: dict[str, set[torch.dtype]] = {"kept": set(), "computed": set()}

    def loaded(*arguments: Any) -> Any:
        model = load(*arguments)
        key = model.model.layers[0].self_attn.k_proj
        key.register_forward_hook(
            lambda module, given, out: seen["computed"].update(
                {module.weight.dtype, given[0].dtype, out.dtype}
            )
        )
        return model

    def noted(model: Any, tokens: Tensor) -> float:
        with log:
            loss = used(model, tokens)
        if isinstance(model.lm_head.weight, DTensor):
            for p in model.parameters():
                seen["kept"] |= {p.dtype, p.grad.dtype}
        return loss

    with (
        mock.patch.object(lesson, "load_split", loaded),
        mock.patch.object(lesson, "compute_gradients", noted),
    ):
        code, output = run_causal_lm("", "--bf16")
    for call in log.calls:
        seen.setdefault(call.name, set()).add(call.dtype)
    return code, output, seen


def losses_across_a_save(folder: Path) -> tuple[list[float], list[float]]:
    """Train, save as 09's minimal.py, go on; go on again from there on another mesh."""
    write(folder, tied=True)
    ours, lesson = modules()
    batches, saved, ends = (
        lesson.read_batches(None, None, 4, 4, 64),
        str(folder / "shards"),
        [],
    )
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        model = ours.load_split(str(folder), mesh, None)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def train(some: list[Tensor], model: Any, adam: Any, data: Any) -> list[float]:
            losses = []
            for tokens in some:
                mine = tokens.chunk(data.size())[data.get_local_rank()]
                losses.append(lesson.compute_gradients(model, mine))
                adam.step()
                adam.zero_grad()
            return losses

        rest = (model, adam, mesh["data"])
        if shape == (1, 2):
            train(batches[:2], *rest)
            both = states.get_state_dict(model, adam)
            dcp.save(dict(zip("ma", both, strict=True)), checkpoint_id=saved)
        else:
            both = states.get_state_dict(model, adam)
            run: dict[str, Any] = dict(zip("ma", both, strict=True))
            dcp.load(run, checkpoint_id=saved)
            states.set_model_state_dict(model, run["m"])
            states.set_optimizer_state_dict(model, adam, run["a"])
        ends.append(train(batches[2:], *rest))
    return ends[0], ends[1]


def build(kind: str, changes: dict[str, Any]) -> Any:
    """Build a small model; its biases and norms are drawn, not zeros and ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | changes)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p, "norm" in name, 0.3)
    return model


def inputs_of(case: str) -> dict[str, Any]:
    """Return what the model is called with."""
    tokens = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
    call = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    if case == "padded":
        mask = torch.ones_like(tokens)
        mask[1, 20:], mask[2, :9] = 0, 0
        labels = tokens.masked_fill(mask == 0, -100)
        call |= {"attention_mask": mask, "labels": labels}
    elif case == "packed":
        parts = torch.cat([torch.arange(20), torch.arange(T - 20)])
        call["position_ids"] = parts.expand(B, T)
    return call


def odd_tokens() -> None:
    """Split a model over two ranks, and give it 31 tokens."""
    ours, lesson = modules()
    model = build("llama", {})
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    ours.split_over_ranks(model, mesh, None)
    lesson.compute_gradients(model, inputs_of("")["input_ids"][:, :31])


def trained_when_split() -> list[str]:
    """Freeze all but the head, split the model, and name what trains."""
    ours, _ = modules()
    model = build("qwen3", {})
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    ours.split_over_ranks(model, mesh, None)
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_what_is_frozen_stays_frozen(worker_pool: WorkerPool) -> None:
    trained = worker_pool.run(trained_when_split)
    assert trained[0] == trained[1] and len(trained[0]) == 1, trained
    assert trained[0][0] in ("lm_head.weight", "model.embed_tokens.weight")  # if tied


def changed_plan(plan: dict[str, Any], change: str) -> dict[str, Any]:
    """Return the plan with one mistake in it."""
    whole = ColwiseParallel(output_layouts=Replicate())
    attention = f"{BLOCK}self_attn."
    changes: dict[str, dict[str, Any]] = {
        "": {},
        "gathered keys and values": {f"{attention}{x}_proj": whole for x in ("k", "v")},
        "no layer cuts the tokens": {"model.layers.0": None},
        "embedding cuts the tokens": {
            "model.layers.0": None,
            "model.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
        },
        "query by rows": {
            f"{attention}q_proj": RowwiseParallel(input_layouts=Replicate())
        },
        "down by columns": {f"{BLOCK}mlp.down_proj": ColwiseParallel()},
        "output whole": {f"{attention}o_proj": RowwiseParallel()},
        "plain norm": {f"{BLOCK}input_layernorm": None},
        "plain last norm": {"model.norm": None},
        "plain head norms": {},
        "not tied again": {},
    }
    return {name: s for name, s in (plan | changes[change]).items() if s is not None}


def wrong_gradients(
    kind: str, case: str, change: str, sizes: dict[str, Any]
) -> tuple[float, list[str]]:
    """Split a model and run one step; compare loss and gradients with the whole one."""
    ours, lesson = modules()
    alone = build(kind, sizes)
    model = copy.deepcopy(alone)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    plan = changed_plan(ours.PLAN, change)
    if change == "not tied again":
        model.config.tie_word_embeddings = False
    heads = {} if change == "plain head norms" else ours.HEAD_NORMS
    # A plain parameter is refused; here its gradient is looked at.
    kinds = Tensor if "plain" in change else DTensor
    with mock.patch.multiple(ours, PLAN=plan, HEAD_NORMS=heads, DTensor=kinds):
        ours.split_over_ranks(model, mesh, None)
    losses, call = [], inputs_of(case)
    for one in (alone, model):
        if case == "recomputed":
            one.activation_checkpointing_enable()
        amp = torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast")
        with lesson.loss_parallel():
            with amp:
                loss = one(**call).loss
            loss.backward()
        losses.append(loss.item())
    far, most = [], 0.1 if case == "autocast" else 1e-4
    ours_by_name = dict(model.named_parameters())
    for name, q in alone.named_parameters():
        p = ours_by_name[name]
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        if not torch.dist(grad, q.grad) < most * q.grad.norm():
            far.append(name.replace("model.layers.", ""))
    return abs(losses[0] - losses[1]), far


def sent_in_a_step() -> list[tuple[str, int]]:
    """Return the collectives of a forward and backward pass, with what is given."""
    ours, lesson = modules()
    model = build("llama", {})
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    ours.split_over_ranks(model, mesh, None)
    tokens = inputs_of("")["input_ids"]
    with load_chapter("07_tensor_parallel")["sent_and_kept"].Collectives() as calls:
        lesson.compute_gradients(model, tokens)
    return calls.noted


def write(folder: Path, tied: bool, dtype: torch.dtype = torch.float32) -> None:
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
    """Load a checkpoint in slices, count what is read, and save it again."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    write(folder, tied, dtype)
    ours, _ = modules()
    reader, read = ours.HuggingFaceStorageReader, []
    real = reader._process_read_request

    def noted(self: Any, file: Any, request: Any, planner: Any) -> None:
        read.append(math.prod(request.lengths))
        real(self, file, request, planner)

    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("data", "tensor"))
    with mock.patch.object(reader, "_process_read_request", noted):
        model = ours.load_split(str(folder), mesh, None)
    ours.save_gathered(model, str(folder / "saved"))
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    again: Any = AutoModelForCausalLM.from_pretrained(folder / "saved")
    parameters: list[Any] = list(model.parameters())
    pairs = zip(parameters, plain.parameters(), again.parameters(), strict=True)
    equal = [torch.equal(p.full_tensor(), q) and torch.equal(q, r) for p, q, r in pairs]
    buffers = zip(model.named_buffers(), plain.named_buffers(), strict=True)
    return {
        "files": len(list(folder.glob("model-*.safetensors"))),
        "equal": (all(equal), len(equal)),
        "buffers": [a == b and torch.equal(p, q) for (a, p), (b, q) in buffers],
        "dtypes": {p.dtype for p in parameters},
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "read": sum(read),
        "kept": sum(p.to_local().numel() for p in parameters),
        "whole": sum(p.numel() for p in parameters),
        "saved": len(load_file(folder / "saved" / "model.safetensors")),
        "kind": json.loads((folder / "saved/config.json").read_text())["architectures"],
        "ends": again.generation_config.eos_token_id,
    }


def with_distribute_module() -> None:
    """Make DTensors of the buffers, too, and run the model."""
    ours, _ = modules()
    model = build("llama", {})
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    ours.split_over_ranks(model, mesh, None)
    distribute_module(model, mesh["tensor"])
    model(**inputs_of(""))


def plain_plan(kind: str) -> tuple[list[str], int, list[str]]:
    """Split by plain.py's plan.

    Return whose gradients are not one process's, the width of the logits, and what
    clipping and two kinds of AdamW say.
    """
    plain = load_chapter(ROOM)["plain"]
    alone, call = build(kind, {}), inputs_of("")
    with mock.patch.object(plain, "small_model", lambda: copy.deepcopy(alone)):
        model = plain.build_split(init_device_mesh("cpu", (2,)))
    width = model(**call).logits.shape[-1]
    far, errors = [], []
    for one in (model, alone):
        one(**call).loss.backward()
    pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
    for (name, p), q in pairs:
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        if not torch.dist(grad, q.grad) < 1e-4 * q.grad.norm():
            far.append(name.replace("model.layers.", ""))
    for use in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        torch.optim.AdamW(model.parameters(), fused=True).step,
        torch.optim.AdamW(model.parameters(), foreach=True).step,
    ):
        with pytest.raises(RuntimeError) as caught:
            use()
        errors.append(str(caught.value))
    return far, width, errors


def run_plain(fault: str) -> tuple[Any, str]:
    """Be a rank of plain.py, perhaps with a fault; return its end."""
    plain, output = load_chapter(ROOM)["plain"], io.StringIO()
    build_split = plain.build_split

    def other_rows(mesh: Any) -> Any:
        model = build_split(mesh)
        if fault == "other rows":
            weight = model.model.layers[1].self_attn.q_proj.weight.to_local()
            with torch.no_grad():
                weight.copy_(weight.flip(0))
        return model

    with (
        in_the_pool(plain),
        mock.patch.object(plain, "build_split", other_rows),
        # On a GPU AdamW takes foreach by itself.
        mock.patch.object(
            importlib.import_module("torch.optim.adam"),
            "_default_to_fused_or_foreach",
            return_value=(False, True),
        ),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            plain.main()
        except SystemExit as end:
            return end.code, output.getvalue()
    return 0, output.getvalue()


def by_transformers_itself(folder: Path, kind: str) -> dict[str, Any]:
    """Load with transformers' own tensor parallelism; compare with one process."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        build(kind, {}).save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(tp_size=dist.get_world_size())
    model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    call, losses, tokens, shapes = inputs_of(""), [], [], []
    model.model.layers[1].register_forward_pre_hook(
        lambda layer, given: tokens.append(given[0].shape[1])
    )
    for module in (model.lm_head, model.model.layers[1].mlp.up_proj):
        module.register_forward_hook(lambda _, __, y: shapes.append(y.shape[-1]))
    for one in (model, plain):
        loss = one(**call).loss
        loss.backward()
        losses.append(loss.item())
    pairs = list(zip(model.named_parameters(), plain.parameters(), strict=True))
    whole = [
        getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for (_, p), _ in pairs
    ]
    errors = []
    for use in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        torch.optim.AdamW(model.parameters(), fused=True).step,
    ):
        with pytest.raises(RuntimeError) as caught:
            use()
        errors.append(str(caught.value))
    return {
        "loss": abs(losses[0] - losses[1]),
        "far": max(
            (g - q.grad).abs().max().item()
            for g, (_, q) in zip(whole, pairs, strict=True)
        ),
        "plain": {
            n.split(".")[-2] for (n, p), _ in pairs if not hasattr(p, "to_local")
        },
        "tokens": tokens,
        "shapes": shapes,
        "errors": errors,
    }


def on_its_own_text(folder: Path, text: Path) -> dict[str, Any]:
    """Train a checkpoint without and with a tokenizer; return what it is trained on."""
    from transformers import AutoTokenizer

    lesson: Any = load_chapter(ROOM)["causal_lm"]
    write(folder, tied=True)
    words = [f"--model={folder}", f"--save={folder / 'saved'}", f"--text={text}"]
    without = run_causal_lm("", *words)
    dist.barrier()
    if dist.get_rank() == 0:
        write_tokenizer(folder)
    dist.barrier()
    trained, real = [], lesson.train_on

    def noted(model: Any, batches: list[Tensor]) -> list[float]:
        trained.append(torch.stack(batches))
        return real(model, batches)

    with mock.patch.object(lesson, "train_on", noted):
        code, output = run_causal_lm("", *words)
    dist.barrier()
    again = AutoTokenizer.from_pretrained(folder / "saved")
    return {
        "without": without,
        "end": (code, output),
        "batches": trained,
        "saved": again(text.read_text())["input_ids"],
    }


def masked_on_data_ranks(folder: Path, count: str) -> float:
    """Give data ranks other numbers of labels; return the largest gradient's error.

    `count` is Python for the argument that the page gives.
    """
    write(folder, tied=True)
    ours, lesson = modules()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    model = ours.load_split(str(folder), mesh, None)
    alone = lesson.load_alone(str(folder), torch.device("cpu"))
    (tokens,) = lesson.read_batches(None, None, 1, 4, 64)
    labels = tokens.clone()
    labels[0, :50] = labels[3, :10] = -100
    alone(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
    mine = [x.chunk(2)[dist.get_rank()] for x in (tokens, labels)]
    names = {"labels": labels, "data_ranks": 2}
    given = {"num_items_in_batch": eval(count, names)} if count else {}
    with lesson.loss_parallel():
        call = {"input_ids": mine[0], "labels": mine[1], "use_cache": False}
        model(**call, **given).loss.backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    errors = [
        torch.dist(p.grad.full_tensor(), q.grad) / q.grad.norm() for p, q in pairs
    ]
    return torch.stack(errors).max().item()


def refused(config: dict[str, Any], tensor_ranks: int, folder: Path) -> str:
    """Build and split a model of another kind; return why it is refused."""
    from transformers import AutoConfig

    ours, _ = modules()
    AutoConfig.for_model(**config).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    try:
        model = ours.build_on_meta(str(folder), tensor_ranks)
        ours.split_over_ranks(model, mesh, None)
    except ValueError as error:
        return str(error)
    return ""


# --- The lesson. ----------

CLAIM = "losses of one process; gradients of the saved model on one process"


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_and_gradients_are_one_process_s(
    worker_pool: WorkerPool, world_size: int
) -> None:
    ends = worker_pool.run(run_causal_lm, "", world_size=world_size)
    assert [code for code, _ in ends] == [0] * world_size, ends
    output = ends[0][1]
    assert output.splitlines()[-1] == f"check: {CLAIM}"
    losses = [float(n) for n in re.findall(r"step \d \| loss (\S+)", output)]
    assert len(losses) == 4 and 5.3 < losses[0] < 5.7 and losses[3] < losses[0] - 0.3


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bf16_computes_in_bf16_and_keeps_float32(
    worker_pool: WorkerPool, world_size: int
) -> None:
    ends = worker_pool.run(run_in_bf16, world_size=world_size)
    assert [code for code, _, _ in ends] == [0] * world_size, ends
    assert ends[0][1].splitlines()[-1] == f"check: {CLAIM}"
    assert len(ends) == world_size
    for *_, seen in ends:
        assert seen["kept"] == {torch.float32}
        assert seen["computed"] == {torch.bfloat16}
        if world_size == 4:  # on one data rank nothing is sent
            assert seen["reduce-scatter"] == {torch.float32}


@pytest.mark.parametrize(
    "fault",
    [
        "another rank's rows",
        pytest.param("buffers of zeros", marks=pytest.mark.slow),
        pytest.param("other weights saved", marks=pytest.mark.slow),
    ],
)
def test_check_notices(worker_pool: WorkerPool, fault: str) -> None:
    ends = worker_pool.run(run_causal_lm, fault)
    assert [code for code, _ in ends] == [1, 1], ends
    assert f"check failed on ranks [0, 1], not so: {CLAIM}" in ends[0][1]


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
    for end in ends:
        (code, said), (batches,) = end["end"], end["batches"]
        assert code == 0, said
        assert batches.shape == (4, 4, 64)
        whole = torch.tensor(tokens[: 4 * 4 * 64]).view(4, 4, 64)
        assert torch.equal(batches, whole)
    assert ends[0]["end"][1].count("| loss") == 4
    assert "check:" not in ends[0]["end"][1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model=x"], "--model needs --save=FOLDER, too"),
        (["--tensor=2"], "--tensor=2 does not divide the number of ranks, or 64 to.*"),
        (["--tensor=3"], "--tensor=3 does not divide the number of ranks, or 64 to.*"),
        (["--save={folder}/file"], "--save=.*/file: this is a file"),
        (
            ["--model={folder}/config", "--save=x", "--tensor=1"],
            ".*/config: there is no model[*].safetensors",
        ),
        (
            ["--model={folder}", "--save=x", "--tensor=1"],
            "Unrecognized model in .*",
        ),
        (
            ["--model=/no/such", "--save=x", "--tensor=1"],
            "/no/such: there is no such folder",
        ),
    ],
)
def test_wrong_words_are_refused_in_one_line(
    worker_pool: WorkerPool, tmp_path: Path, words: list[str], said: str
) -> None:
    words = [word.format(folder=tmp_path) for word in words]
    (tmp_path / "file").touch()
    (tmp_path / "config").mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64}
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    three = "one of three ranks" if "--tensor=3" in words else ""
    ((code, output),) = worker_pool.run(run_causal_lm, three, *words, world_size=1)
    assert code == 2
    # What transformers imports on first use may say a line of its own before.
    line = output.strip().splitlines()[-1]
    assert re.fullmatch(rf"causal_lm\.py: {said}", line)


def test_minimal_s_calls_resume_it_on_another_mesh(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    ends = worker_pool.run(losses_across_a_save, tmp_path)
    assert len(ends) == 2
    for went_on, again in ends:
        assert len(again) == 2 and again == pytest.approx(went_on, abs=2e-5)
        assert again[1] < again[0] - 0.01


def test_data_ranks_divide_by_their_own_labels_unless_all_are_counted(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    page = (ROOT / ROOM / "README.md").read_text()
    (counted,) = re.findall(r"`num_items_in_batch=([^`]+)`", page)
    # A label is for the token before it, so none is for the first.
    too_many = counted.replace("[:, 1:]", "")
    own, right, wrong = (
        worker_pool.run(masked_on_data_ranks, tmp_path / name, count)
        for name, count in (("own", ""), ("right", counted), ("wrong", too_many))
    )
    assert len(own) == len(right) == len(wrong) == 2
    assert min(own) > 0.1 and max(right) < 1e-5 and 0.01 < min(wrong) < 0.02


# --- The plan. ----------


@pytest.mark.parametrize(
    ("kind", "case", "sizes"),
    [
        ("qwen2", "", {}),
        ("qwen2", "", {"tie_word_embeddings": False}),
        ("qwen2", "padded", {}),
        ("qwen2", "", {"vocab_size": V + 1}),
        ("qwen3", "", {"head_dim": 32}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen2", "packed", {}),
                ("qwen2", "recomputed", {}),
                ("qwen2", "autocast", {}),
                ("qwen2", "", {"attn_implementation": "eager"}),
                ("llama", "", {"attention_bias": True, "mlp_bias": True}),
                ("mistral", "", {}),
            )
        ),
    ],
)
def test_plan_gives_the_gradients_of_one_process(
    worker_pool: WorkerPool, kind: str, case: str, sizes: dict[str, Any]
) -> None:
    ends = worker_pool.run(wrong_gradients, kind, case, "", sizes)
    assert [far for _, far in ends] == [[], []]
    assert all(loss < (1e-3 if case == "autocast" else 1e-5) for loss, _ in ends)
    assert len(ends) == 2


NORMS = ["0.input_layernorm.weight", "1.input_layernorm.weight"]
HEAD_NORMS = [f"{i}.self_attn.{x}_norm.weight" for i in range(LAYERS) for x in "qk"]


@pytest.mark.parametrize(
    ("change", "kind", "wrong"),
    [
        ("plain norm", "llama", NORMS),
        ("plain last norm", "llama", ["model.norm.weight"]),
        ("plain head norms", "qwen3", HEAD_NORMS),
    ],
)
def test_plain_norms_get_a_wrong_gradient_without_an_error(
    worker_pool: WorkerPool, change: str, kind: str, wrong: list[str]
) -> None:
    ends = worker_pool.run(wrong_gradients, kind, "", change, {})
    assert [far for _, far in ends] == [wrong, wrong]
    assert max(loss for loss, _ in ends) < 1e-5


def test_two_halves_of_a_tied_matrix_get_a_part_of_its_gradient_each(
    worker_pool: WorkerPool,
) -> None:
    ends = worker_pool.run(wrong_gradients, "qwen2", "", "not tied again", {})
    assert [far for _, far in ends] == [["model.embed_tokens.weight"]] * 2


@pytest.mark.parametrize(
    ("sizes", "wrong", "least", "most"),
    # With one head of keys all queries meet the right ones, and each rank has a part
    # of the gradients.
    [({}, 26, 1e-3, 1.0), ({"num_key_value_heads": 1}, 18, 0.0, 1e-5)],
)
def test_gathered_keys_and_values_meet_the_wrong_queries(
    worker_pool: WorkerPool,
    sizes: dict[str, Any],
    wrong: int,
    least: float,
    most: float,
) -> None:
    call = (wrong_gradients, "qwen2", "", "gathered keys and values", sizes)
    ends = worker_pool.run(*call)
    assert [len(far) for _, far in ends] == [wrong] * 2
    assert all(least <= loss < most for loss, _ in ends)


ROTARY = r"size of tensor a \((64|32)\) must match the size of tensor b \((32|16)\)"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no layer cuts the tokens", "must match the size of tensor b"),
        ("embedding cuts the tokens", ROTARY),
        ("query by rows", "a and b must have same reduction dim"),
        ("down by columns", "a and b must have same reduction dim"),
        ("output whole", "must match the size of tensor b"),
    ],
)
def test_wrong_style_says_so(worker_pool: WorkerPool, change: str, said: str) -> None:
    with pytest.raises(RankError) as caught:
        worker_pool.run(wrong_gradients, "qwen2", "", change, {})
    assert re.search(said, caught.value.traceback)


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_tokens_abort(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankFailure, match="Received data size doesn't match"):
        worker_pool.run(odd_tokens)


def test_buffers_stay_plain(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError) as caught:
        worker_pool.run(with_distribute_module)
    text = caught.value.traceback
    assert "got mixed torch.Tensor and DTensor" in text and "rotary_emb" in text


def test_each_block_gathers_twice_and_no_rank_gathers_logits(
    worker_pool: WorkerPool,
) -> None:
    part, whole = B * T // 2 * D * 4, B * T * D * 4
    gather, scatter = ("all_gather_into_tensor", part), ("reduce_scatter_tensor", whole)
    by_rank = worker_pool.run(sent_in_a_step)
    assert len(by_rank) == 2
    for noted in by_rank:
        # Forward: five gathers (the head has one), four scatters; backward reverses
        # them, and gathers what the first layer has cut.
        assert (noted.count(gather), noted.count(scatter)) == (10, 9)
        others = [call for call in noted if call not in (gather, scatter)]
        of_loss = [("all_reduce", B * T * 4)] * 3
        assert others == [("all_reduce", whole), *of_loss, ("allreduce_", 4)]


# --- Files. ----------


@pytest.mark.parametrize(
    ("tied", "dtype", "world_size"),
    [
        (True, torch.float32, 2),
        (False, torch.bfloat16, 2),
        pytest.param(True, torch.float32, 4, marks=pytest.mark.slow),
    ],
)
def test_each_rank_reads_its_slices_and_the_whole_comes_back(
    worker_pool: WorkerPool,
    tmp_path: Path,
    tied: bool,
    dtype: torch.dtype,
    world_size: int,
) -> None:
    ends = worker_pool.run(
        loaded_and_saved, tmp_path, tied, dtype, world_size=world_size
    )
    assert len(ends) == world_size
    for found in ends:
        assert found["files"] > 1
        assert found["equal"] == (True, 26 if tied else 27)
        assert found["buffers"] == [True, True]
        assert found["dtypes"] == {torch.float32} and found["tied"] == tied
        assert found["read"] == found["kept"]
        assert found["kept"] == pytest.approx(found["whole"] / world_size, rel=0.01)
        assert found["saved"] == (26 if tied else 27)
        assert found["kind"] == ["Qwen2ForCausalLM"]
        assert found["ends"] == [5, 9]


ODD_MLP = {"model_type": "llama", "intermediate_size": 129}
# Its first layers attend linearly, and have no `self_attn`.
QWEN_3_5 = {"model_type": "qwen3_5_text", "num_hidden_layers": 4}
QWEN_MOE = {"model_type": "qwen2_moe", "num_hidden_layers": 1, "num_experts": 2}


@pytest.mark.parametrize(
    ("config", "n", "said"),
    [
        ({"model_type": "gpt2"}, 1, "GPT2Config: no num_key_value_heads"),
        ({"model_type": "gemma"}, 1, "GemmaForCausalLM has buffers in"),
        (QWEN_MOE, 1, "Qwen2MoeForCausalLM: no style in PLAN for model.layers.0.mlp."),
        (QWEN_3_5, 1, "Qwen3_5ForCausalLM: no style in PLAN for model.layers.0.linear"),
        ({"model_type": "llama", "num_key_value_heads": 8}, 3, "LlamaConfig: 3 ranks"),
        (ODD_MLP, 2, "LlamaConfig: 2 ranks cannot share intermediate_size = 129"),
        ({"model_type": "llama", "num_key_value_heads": 8}, 8, ""),
        ({"model_type": "qwen3"}, 4, ""),
    ],
)
def test_model_that_does_not_fit_the_plan_is_refused(
    worker_pool: WorkerPool, tmp_path: Path, config: dict[str, Any], n: int, said: str
) -> None:
    (found,) = worker_pool.run(refused, config, n, tmp_path, world_size=1)
    assert found.startswith(said) and bool(found) == bool(said)


def refused_scales(folder: Path) -> str:
    """Load a matrix in fp8, which has its scale beside it; return what is said."""
    from safetensors.torch import load_file, save_file

    ours, _ = modules()
    if dist.get_rank() == 0:
        load_chapter(ROOM)["tiny_qwen"].write_checkpoint(str(folder), tied=True)
        file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
        matrix = load_file(file)[name]
        scale = matrix.abs().max() / 448
        small = {name: (matrix / scale).to(torch.float8_e4m3fn)}
        scales = {f"{name}_scale_inv": scale.view(1, 1)}
        save_file(load_file(file) | small | scales, file, {"format": "pt"})
    dist.barrier()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    try:
        ours.load_split(str(folder), mesh, None)
    except ValueError as error:
        return str(error)
    return ""


def test_scales_of_weights_in_fp8_are_not_passed_over(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    said = f"{tmp_path}: no place for model.layers.1.mlp.up_proj.weight_scale_inv"
    assert worker_pool.run(refused_scales, tmp_path) == [said] * 2


@pytest.mark.parametrize(("kind", "wrong"), [("qwen2", []), ("qwen3", HEAD_NORMS)])
def test_plain_plan_leaves_norms_plain(
    worker_pool: WorkerPool, kind: str, wrong: list[str]
) -> None:
    ends = worker_pool.run(plain_plan, kind)
    assert len(ends) == 2
    for far, width, errors in ends:
        assert far == wrong and width == V
        assert len(errors) == 3
        for error in errors:
            assert "got mixed torch.Tensor and DTensor" in error


def test_plain_plan_s_check_notices(worker_pool: WorkerPool) -> None:
    right = worker_pool.run(run_plain, "")
    assert [code for code, _ in right] == [0, 0]
    assert "a rank has 230,272 of 427,136 weights" in right[0][1]
    assert "check: the losses of one process" in right[0][1]
    ends = worker_pool.run(run_plain, "other rows")
    assert [code for code, _ in ends] == [1, 1], ends
    assert "not so: the losses of one process" in ends[0][1]


@pytest.mark.parametrize(("kind", "of_heads"), [("qwen2", ""), ("qwen3", "qk")])
def test_transformers_itself_leaves_norms_activations_and_logits_whole(
    worker_pool: WorkerPool, tmp_path: Path, kind: str, of_heads: str
) -> None:
    ends = worker_pool.run(by_transformers_itself, tmp_path, kind)
    assert len(ends) == 2
    for found in ends:
        assert found["loss"] < 1e-6 and found["far"] < 1e-6
        norms = {"input_layernorm", "post_attention_layernorm", "norm"}
        norms |= {f"{x}_norm" for x in of_heads}
        assert found["plain"] == norms and found["tokens"] == [T]
        assert found["shapes"] == [SIZES["intermediate_size"] // 2, V]
        for error in found["errors"]:
            assert "got mixed torch.Tensor and DTensor" in error
        assert len(found["errors"]) == 2


AUTO_TP = """
import json, sys, deepspeed
from qwen import small_model
from tiny_qwen import read_batches

config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "tensor_parallel": {"autotp_size": 2},
}
model, losses = small_model(), []
if "untied" in sys.argv:
    model.config.tie_word_embeddings = False
    model = type(model)(model.config)
engine, *_ = deepspeed.initialize(model=model, config=config)
for tokens in read_batches(None, None, 4, 4, 64):
    loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
shapes = {name: tuple(p.shape) for name, p in engine.module.named_parameters()}
print(f"\\nfound {json.dumps([losses, shapes])}\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_deepspeed_splits_by_itself_and_to_the_same_losses(tmp_path: Path) -> None:
    script = tmp_path / "auto_tp.py"
    script.write_text(AUTO_TP)
    env = clean_environment(PYTHONPATH=str(ROOT / ROOM), DS_ACCELERATOR="cpu")
    result = torchrun(script, cwd=tmp_path, env=env)
    assert result.returncode == 0, result.output
    found = [
        json.loads(line) for line in re.findall(r"^found (.*)", result.output, re.M)
    ]
    assert len(found) == 2
    page = (ROOT / ROOM / "README.md").read_text()
    said = [
        float(loss) for loss in re.findall(r"^step \d \| loss (.*)", page, re.M)[:4]
    ]
    for losses, shapes in found:
        assert losses == pytest.approx(said, abs=6e-4)
        assert shapes["model.layers.0.mlp.down_proj.weight"] == [D, 384 // 2]
        assert shapes["model.embed_tokens.weight"] == [V // 2, D]
        assert shapes["model.norm.weight"] == [D]
    untied = torchrun(script, "untied", cwd=tmp_path, env=env).output
    shapes = [json.loads(line)[1] for line in re.findall(r"^found (.*)", untied, re.M)]
    assert [one["model.embed_tokens.weight"] for one in shapes] == [[V, D]] * 2
    assert [one["lm_head.weight"] for one in shapes] == [[V // 2, D]] * 2
