"""Chapter 05: the stages of ZeRO come to what one process would have come to."""

import contextlib
import importlib
import io
import itertools
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from launch import ROOT, Result, clean_environment, python, run, torchrun
from lessons import in_the_pool
from pages import words_of
from scripts import load_chapter
from tiny_gpt import write_tokenizer
from worker_pool import RankError, WorkerPool
from zero_ranks import Pools, run_zero_lesson

CHAPTER = "05_deepspeed_zero"
FOLDER = ROOT / CHAPTER
# The GPT of the stages: embeddings of V bytes and T places, and in each of L layers
# query, key, value and output of D x D, an MLP of D x 4D and back, and two norms.
V, T, D, L = 256, 32, 65, 2
NORM = [D, D]  # weight and bias
SIZES = [V * D, T * D, *L * [*NORM, *4 * [D * D], *NORM, *2 * [4 * D * D]], *NORM]
PARAMETERS = sum(SIZES)
SMALL = 1000  # tensors of up to so many values stay whole in the lesson of stage 3
IN_NORMS = (2 * L + 1) * sum(NORM)  # and these are the norms'
DEFAULT_PORT = "29500"  # allowed port: the launcher's
LR, DECAY = 2e-3, 0.01  # of the stages
RECIPE_LR = 3e-3
ON = {"enabled": True}
COMPARED = (
    r"losses \de[+-]\d\d from one process's \(limit (\S+)\), "
    r"gradient norm \de[+-]\d\d, weights \de[+-]\d\d \(limit (\S+)\)"
)


# --- What runs on each rank. ----------


def prepare() -> dict[str, Any]:
    """Import the chapter, and let DeepSpeed forget an earlier job's process group."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    importlib.reload(groups)
    return load_chapter(CHAPTER)


def make_engine(stage: int, precision: str = "fp32", **changes: Any) -> Any:
    """Return an engine as stage_N.py makes it; `changes` go to the config."""
    modules = load_chapter(CHAPTER)
    config = json.loads(json.dumps(modules[f"stage_{stage}"].CONFIG)) | changes
    if "bf16" not in changes:
        config["bf16"]["enabled"] = precision == "bf16"
    modules["deepspeed_setup"].prepare(config)
    import deepspeed

    model: Any = new_gpt()
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )[0]


def new_gpt() -> torch.nn.Module:
    """Build the model of the stage scripts, with the same weights each time."""
    modules = load_chapter(CHAPTER)
    torch.manual_seed(0)
    return modules["model"].GPT(modules["stage_0"].SIZES)


def batches_for_all_ranks() -> Callable[[int], torch.Tensor]:
    """Return what the stage scripts take their batches from."""
    text = load_chapter(CHAPTER)["text"]
    tokens, samples = text.read_tokens(), 4 * dist.get_world_size()
    return lambda step: text.global_batch(tokens, step, samples, T + 1)


def train(engine: Any, steps: int, shift: int = 0) -> list[float]:
    """Train as the stage scripts do; return the mean losses.

    With `shift`, the ranks after the first take samples of another step.
    """
    modules, batch_of = load_chapter(CHAPTER), batches_for_all_ranks()
    checks, next_token_loss = modules["engine_checks"], modules["text"].next_token_loss
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(steps):
        tokens = batch_of(step + shift * rank).chunk(world_size)[rank]
        loss = next_token_loss(engine, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(checks.mean_over_ranks(loss))
    return losses


def all_stages(steps: int, precision: str) -> list[tuple[Any, ...]]:
    """Train with every stage; return its lines, counts, losses and its checks."""
    modules, results = prepare(), []
    checks = modules["engine_checks"]
    for stage in range(4):
        engine = make_engine(stage, precision)
        modules["deepspeed_setup"].undo_step_of_zeros(engine)
        lines = checks.describe_ranks(engine)
        losses = train(engine, steps)
        # Stage 3 fills its groups during a step only; their settings stay.
        groups = engine.optimizer.param_groups
        assert [group["lr"] > 0 for group in groups] == [True]
        assert [bool(group["params"]) for group in groups] == [stage < 3]
        counts = [checks.optimizer_count(engine), checks.moment_count(engine)]
        held = checks.partitioned_evenly(engine)
        batch_of = batches_for_all_ranks()
        found = checks.same_as_one_process(engine, new_gpt(), batch_of, losses)
        results.append((lines, counts, losses, held, found))
        engine.destroy()
    return results


def run_the_scripts(steps: int) -> list[str]:
    """Be one rank of the four stage scripts; return what each printed."""
    modules, printed = prepare(), []
    options = {"steps": steps, "precision": "bf16"}
    for stage in range(4):
        script, output = modules[f"stage_{stage}"], io.StringIO()
        with in_the_pool(script), contextlib.redirect_stdout(output):
            script.main(SimpleNamespace(**options))
        printed.append(output.getvalue())
    return printed


def check_after(stage: int, precision: str, mistake: str) -> tuple[bool, str]:
    """Make a mistake, and return what the checks of the stage scripts say to it."""
    modules = prepare()
    checks, untrained = modules["engine_checks"], new_gpt()
    changes = {"gradient_clipping": 0.0} if mistake == "other clipping" else {}
    engine = make_engine(stage, precision, **changes)
    if mistake != "step of zeros":
        modules["deepspeed_setup"].undo_step_of_zeros(engine)
    losses = train(engine, 3, shift=1 if mistake == "wrong samples" else 0)
    if mistake == "other clipping":
        engine.gradient_clipping = lambda: 1.0
    if mistake == "sum":
        mean = engine.get_global_grad_norm()
        engine.get_global_grad_norm = lambda: dist.get_world_size() * mean
    if mistake == "local loss":
        losses[0] += 0.02 * (dist.get_rank() + 1)
    if mistake == "one weight":
        with torch.no_grad():
            next(engine.module.parameters())[0, 0] *= 1 + 0.01 * dist.get_rank()
    if mistake == "lost states":
        engine.optimizer.optimizer.state.clear()
        return checks.partitioned_evenly(engine)
    if mistake == "a whole weight":
        next(iter(engine.module.parameters())).all_gather()
        return checks.partitioned_evenly(engine)
    return checks.same_as_one_process(
        engine, untrained, batches_for_all_ranks(), losses
    )


def first_step(stage: int, fix: bool) -> dict[str, Any]:
    """Return Adam's counter, and what becomes of the master weights, in bf16.

    The first is read before and after a step; the others are the master weights as a
    part of the bf16 weights, and the median update as a part of the learning rate. With
    `fix`, stage 0 is made to start at step 0.
    """
    modules = prepare()
    engine = make_engine(stage, "bf16")
    if fix:
        modules["deepspeed_setup"].undo_step_of_zeros(engine)
    wrapper, found = engine.optimizer, {}

    def master_weights() -> torch.Tensor:
        parts = (
            wrapper.fp32_groups[0]
            if stage == 0
            else wrapper.single_partition_of_fp32_groups
        )
        return torch.cat([part.detach().flatten() for part in parts])

    def counters() -> list[float]:
        states = wrapper.optimizer.state.values()
        return sorted({state["step"].item() for state in states})

    groups = wrapper.fp16_groups[0] if stage == 0 else wrapper.bit16_groups_flat
    weights = torch.cat([part.detach().flatten() for part in groups]).float()
    before, found["before"] = master_weights(), counters()
    found["part"] = (before / weights)[weights != 0].mean().item()
    train(engine, 1)
    # Weight decay is apart from the update.
    update = (master_weights() - before * (1 - LR * DECAY)).abs() / LR
    found["update"], found["after"] = update[update > 0].median().item(), counters()
    engine.destroy()
    return found


def counters_of_stage_0(**changes: Any) -> list[float] | str:
    """Return Adam's counters before the first step, or the error that came instead."""
    prepare()
    try:
        engine = make_engine(0, **changes)
    except NotImplementedError as error:
        return str(error)
    adam = getattr(engine.optimizer, "optimizer", engine.optimizer)
    counters = [state["step"].item() for state in adam.state.values()]
    engine.destroy()
    return counters


def moved_by_clipping() -> dict[tuple[int, Any], float]:
    """Step in each stage by a gradient of norm 8; return how far the weights move."""
    import deepspeed

    moved = {}
    for stage, clipping in itertools.product(range(4), (None, 0)):
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        }
        if clipping is not None:
            config["gradient_clipping"] = clipping
        model = torch.nn.Linear(4, 4, bias=False)
        engine = deepspeed.initialize(model=model, config=config)[0]
        before = engine(torch.eye(4)).detach()
        engine.backward(2 * engine(torch.eye(4)).sum())
        engine.step()
        moved[stage, clipping] = torch.dist(before, engine(torch.eye(4))).item()
        engine.destroy()
    return moved


def weights_after(
    stage: int, precision: str, micro_batches: int, backward: str
) -> list[torch.Tensor]:
    """Take two steps with one way to call backward; return this rank's weights."""
    modules = prepare()
    changes = {"gradient_accumulation_steps": micro_batches}
    engine = make_engine(stage, precision, **changes)
    batch_of = batches_for_all_ranks()
    for batch in range(2 * micro_batches):
        tokens = batch_of(batch).chunk(dist.get_world_size())[dist.get_rank()]
        loss = modules["text"].next_token_loss(engine, tokens)
        loss.backward() if backward == "plain" else engine.backward(loss)
        engine.step()
    assert engine.global_steps == 2
    weights = modules["engine_checks"].whole_weights(engine)
    engine.destroy()
    return weights


def plain_backward_moves(stage: int, precision: str, micro_batches: int) -> bool | str:
    """Tell whether loss.backward() gives the bits of engine.backward(loss)."""
    call = (stage, precision, micro_batches)
    try:
        plain = weights_after(*call, "plain")
    except RuntimeError as error:
        return str(error)
    own, before = weights_after(*call, "engine's"), list(new_gpt().parameters())
    moved = [not torch.equal(a.float(), b) for a, b in zip(own, before, strict=True)]
    return all(moved) and all(map(torch.equal, plain, own))


def moved_by_old_habits(
    stage: int, micro_batches: int = 1, zero: Any = (), **changes: Any
) -> dict[str, tuple[list[bool], list[float], Any]]:
    """Take two steps as a loop without DeepSpeed might, in several ways.

    `changes` go to the config, `zero` to its part on ZeRO. Return for each way which of
    two layers moved, what clip_grad_norm_ said in the last step's micro-batches, and
    the weights.
    """
    prepare()["deepspeed_setup"].prepare({})
    import deepspeed
    from deepspeed.runtime.zero import GatheredParameters

    found = {}
    for habit in ("none", "own optimizer", "both", "clipping", "unfrozen", "frozen"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
        whole = partial(GatheredParameters, list(model.parameters()))
        model[1].requires_grad_(habit != "unfrozen")
        adam = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 0.0,
            "zero_force_ds_cpu_optimizer": False,
            **changes,
        }
        config["zero_optimization"] = {"stage": stage, **dict(zero)}
        engine: Any
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
        model[1].requires_grad_(habit != "frozen")
        with whole():
            before = [p.detach().clone() for p in model.parameters()]
        norms = []
        for _ in range(2 * micro_batches):
            inputs = torch.full((2, 4), 1.0 + dist.get_rank())
            inputs = inputs.to(next(model.parameters()).dtype)
            engine.backward(engine(inputs).square().mean())
            if habit == "clipping":
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-9)
                norms.append(norm.item())
            if habit in ("own optimizer", "both"):
                adam.step()
            if habit != "own optimizer":
                engine.step()
        with whole():
            weights = [p.detach().clone() for p in model.parameters()]
        moved = [not torch.equal(a, b) for a, b in zip(weights, before, strict=True)]
        assert moved[0] == moved[1] and moved[2] == moved[3]
        weights = [w.tolist() for w in weights]
        found[habit] = moved[::2], norms[-micro_batches:], weights
        if stage and habit != "own optimizer":
            assert engine.get_global_grad_norm() > 0
        engine.destroy()
    return found


class TwoLayers(torch.nn.Module):
    """Uses two layers by a factor each; returns what a model of transformers does."""

    own_first = False  # or each of two ranks begins with another layer

    def __init__(self) -> None:
        """Begin with weights of 1 and of 2."""
        super().__init__()
        self.layers: Any = torch.nn.ModuleList(
            torch.nn.Linear(4, 4, bias=False) for _ in range(2)
        )
        for weight, layer in enumerate(self.layers, start=1):
            torch.nn.init.constant_(layer.weight, weight)

    def forward(self, factors: tuple[float | None, ...]) -> dict[str, torch.Tensor]:
        """Return a loss, whose gradients are the factors; None leaves a layer out."""
        pairs = list(zip(self.layers, factors, strict=True))
        if self.own_first and dist.get_rank() == 1:
            pairs.reverse()
        outputs = [
            layer(torch.ones(1, 4, dtype=layer.weight.dtype)).sum() * factor
            for layer, factor in pairs
            if factor is not None
        ]
        return {"loss": torch.stack(outputs).sum(), "logits": outputs[0]}


def engine_for(
    model: Any,
    stage: int,
    adam: bool = False,
    kind: Any = torch.optim.SGD,
    offloaded: bool = False,
    **changes: Any,
) -> Any:
    """Wrap a small model in DeepSpeed, without clipping; SGD has a step size of 1."""
    prepare()["deepspeed_setup"].prepare({})
    import deepspeed

    settings = {"lr": 1.0}
    if adam:
        kind, settings = torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    } | changes
    if offloaded:
        config |= {"zero_force_ds_cpu_optimizer": False}
        config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}}
    optimizer = kind(model.parameters(), **settings)
    if "fp16" in changes:
        # Any CPU computes in it. DeepSpeed asks for a CPU with instructions for it.
        accelerator: Any = deepspeed.get_accelerator()
        accelerator.is_fp16_supported = lambda: True
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


# What a pass of each of two ranks uses of TwoLayers.
OF_BOTH = [(1, 10), (1, 10)]
OF_ITS_OWN, BY_0 = [(1, None), (None, 10)], [(1, 0), (0, 10)]
OF_ONE, OTHER_BY_0 = [(1, None), (1, None)], [(1, 0), (1, 0)]


def moved_in_all_stages(
    *steps: list[Any],
    plain: bool = False,
    adam: bool = False,
    micro_batches: int = 1,
    grows: bool | None = None,
    only_first: bool = False,
    own_first: bool = False,
    stages: Iterable[int] = range(4),  # in this order: 3 patches `linear` for good
    **changes: Any,
) -> list[Any]:
    """Take steps in each stage; return how far the last one moves both layers.

    A step is a list of backward passes, each of the sum of some forward passes. In
    place of a stage's two numbers stands its error, if it ends with one. `grows` says
    that the second layer is frozen at first, or is frozen from the second step on.
    With `only_first`, micro-batches after a step's first call backward only for its
    last sum. `changes` go to the config.
    """
    from deepspeed.runtime.zero import GatheredParameters

    found: list[Any] = []
    for stage in stages:
        model = TwoLayers()
        model.own_first = own_first
        weights = [layer.weight for layer in model.layers]
        model.layers[1].requires_grad_(grows is not True)
        accumulated = {"gradient_accumulation_steps": micro_batches}
        engine = engine_for(model, stage, adam, **accumulated, **changes)

        def read(params: list[Any] = weights) -> list[float]:
            with GatheredParameters(params):
                return [p.mean().item() for p in params]

        before = after = read()
        try:
            for step in steps:
                for batch in range(micro_batches):
                    for passes in step[-1:] if only_first and batch else step:
                        losses = [
                            engine(one[dist.get_rank()])["loss"] for one in passes
                        ]
                        loss = torch.stack(losses).sum()
                        loss.backward() if plain else engine.backward(loss)
                    engine.step()
                model.layers[1].requires_grad_(grows is not False)
                before, after = after, read()
            found.append([round(a - b, 4) for a, b in zip(before, after, strict=True)])
        except (KeyError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
        engine.destroy()
    return found


def losses_of_its_own_layer() -> list[float]:
    """Return this rank's loss in each stage; each rank uses a layer of its own."""
    found = []
    for stage in range(4):
        engine = engine_for(TwoLayers(), stage)
        found.append(engine(OF_ITS_OWN[dist.get_rank()])["loss"].item())
        engine.destroy()
    return found


def norm_of_transformers(plain: bool) -> list[float]:
    """Return the norm of the gradient of four equal micro-batches, in stages 1 to 3."""
    tokens, found = torch.arange(8)[None], []
    for stage in (1, 2, 3):
        model = prepare()["qwen"].small_model()
        engine = engine_for(model, stage, gradient_accumulation_steps=4)
        for _ in range(4):
            loss = engine(input_ids=tokens, labels=tokens).loss
            loss.backward() if plain else engine.backward(loss)
            engine.step()
        found.append(engine.get_global_grad_norm())
        engine.destroy()
    return [float(norm) for norm in found]


class Penalised(torch.nn.Linear):
    """Adds a penalty on its weights in its own forward pass, if it is told to."""

    def forward(self, input: torch.Tensor, penalty: float = 0.0) -> torch.Tensor:
        """Return a loss."""
        return super().forward(input).sum() + penalty * self.weight.square().sum()


def gradient_with_penalty(stage: int, where: str) -> float | str:
    """Add the square of the weights to a loss; return the gradient, or the error."""
    from deepspeed.runtime.zero import GatheredParameters

    weight = (model := Penalised(4, 4, bias=False)).weight
    torch.nn.init.constant_(weight, 3.0)
    engine, whole = engine_for(model, stage), partial(GatheredParameters, [weight])
    forward = partial(engine, torch.ones(1, 4), 1.0 if where == "in forward" else 0.0)
    try:
        with contextlib.ExitStack() as stack:
            if where == "gathered, and forward":
                stack.enter_context(whole())
            loss = forward()
            if where == "gathered":
                stack.enter_context(whole())
            if where == "gathered, not for backward":
                with whole():
                    loss = loss + weight.square().sum()
            elif where != "in forward":
                loss = loss + weight.square().sum()
            engine.backward(loss)
        engine.step()
    except RuntimeError as error:
        return str(error)
    with whole():
        return 3.0 - weight.mean().item()


def losses_by_stage(name: str) -> list[list[float]]:
    """Train a layer in fp32 in every stage; return this rank's losses."""
    kind, found = getattr(torch.optim, name), []
    inputs = torch.eye(8).chunk(dist.get_world_size())[dist.get_rank()]
    for stage in range(4):
        torch.manual_seed(0)
        engine, losses = engine_for(torch.nn.Linear(8, 8), stage, kind=kind), []
        for _ in range(4):
            loss = (engine(inputs) - 1).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append(losses)
    return found


class Scaled(torch.nn.Linear):
    """Multiplies its result by a parameter, as a model that learns a temperature."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Begin with a factor of 1; the shape is that of its parameter."""
        super().__init__(4, 4)
        self.scale = torch.nn.Parameter(torch.ones(shape))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return (super().forward(input) * self.scale).sum()


def number_as_a_parameter(shape: tuple[int, ...]) -> list[str]:
    """Train a factor of this shape in each stage; return the errors."""
    found = []
    for stage in range(4):
        try:
            engine = engine_for(Scaled(shape), stage)
            engine.backward(engine(torch.ones(1, 4)))
            engine.step()
            engine.destroy()
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
    return found


def norm_in_bf16(mend: str) -> list[str]:
    """Train a BatchNorm in bf16 in each stage; return the error, or its buffers'."""
    found = []
    for stage in range(4):
        norm: Any = torch.nn.BatchNorm1d(4)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), norm)
        settings: dict[str, Any] = {"bf16": ON}
        if mend == "autocast":
            settings = {"torch_autocast": {**ON, "dtype": "bfloat16"}}
        if mend == "cast":
            norm.bfloat16()
        engine = engine_for(model, stage, **settings)
        inputs = torch.randn(8, 4).to(next(model.parameters()).dtype)
        try:
            engine.backward(engine(inputs).float().square().mean())
            engine.step()
            found.append(str(norm.running_mean.dtype))
        except RuntimeError as error:
            found.append(str(error))
        engine.destroy()
    return found


def consolidate_stage_0(folder: str) -> str:
    """Consolidate a checkpoint of stage 0; return the error. Its weights are whole."""
    model = torch.nn.Linear(4, 4)
    engine_for(model, 0).save_checkpoint(folder, "saved")
    from deepspeed.utils import zero_to_fp32

    assert not Path(folder, "zero_to_fp32.py").exists()
    saved = torch.load(f"{folder}/saved/mp_rank_00_model_states.pt")
    assert torch.equal(saved["module"]["weight"], model.weight)
    try:
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    except TypeError as error:
        return f"TypeError: {error}"
    return ""


def load_checkpoints(folder: str) -> tuple[Any, ...]:
    """Load where nothing is, and what was saved with a state of one's own."""
    modules = prepare()
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
    }
    modules["deepspeed_setup"].prepare(config)
    model = modules["qwen"].small_model()
    engine: Any = deepspeed.initialize(model=model, config=config)[0]
    nothing = engine.load_checkpoint(f"{folder}/nothing")
    engine.save_checkpoint(folder, "a", client_state={"epoch": 3})
    with pytest.raises(AssertionError) as error:
        engine.load_checkpoint(folder, "b")
    return *nothing, str(error.value), engine.load_checkpoint(folder)[1]["epoch"]


def test_load_checkpoint_returns_nothing_or_a_state_of_one_s_own(
    zero_pools: Pools, tmp_path: Path
) -> None:
    found = zero_pools(1).run(load_checkpoints, str(tmp_path), world_size=1)
    assert found == [(None, None, "", 3)]


def settings_nobody_asked_for(folder: str) -> dict[str, Any]:
    """Leave out what is often taken for harmless to leave out."""
    modules = prepare()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimisation": {"stage": 3},
    }
    unknown_key = load_chapter(f"{CHAPTER}/huggingface")["check_config"].unknown_key
    modules["deepspeed_setup"].prepare({"optimizer": {"type": "Adam"}})
    import deepspeed

    path = Path(folder, "config.json")
    path.write_text(json.dumps(config | {"zero_optimization": {"stage": 2}}))
    no_stage = config | {"zero_optimization": {"overlap_comm": False}}
    engines = [
        deepspeed.initialize(model=modules["qwen"].small_model(), config=one)[0]
        for one in (config, str(path), no_stage)
    ]
    config["optimizer"]["params"]["adam_w_mode"] = False
    config["data_types"] = {"grad_acum_dtype": "fp32"}  # misspelt, and accepted
    config["checkpoint"] = {"load_univrsal": True}  # so are these
    config["scheduler"] = {"typ": "WarmupLR", "params": {"warmup_num_steps": 9}}
    config["torch_autocast"] = {"enabld": True}
    config["optimizer"]["lr"] = 1.0  # beside "params"
    told = deepspeed.initialize(model=modules["qwen"].small_model(), config=config)[0]
    config["train_micro_batch_per_gpu"] = config.pop("train_micro_batch_size_per_gpu")
    with pytest.raises(AssertionError) as needed:
        deepspeed.initialize(model=modules["qwen"].small_model(), config=config)
    refused = []
    for section in ("bf16", "fp16", "zero_optimization"):
        config[section] = {"stge": 1}
        with pytest.raises(ValueError) as nested:
            deepspeed.initialize(model=modules["qwen"].small_model(), config=config)
        refused.append(str(nested.value))
        del config[section]
    return {
        "nested, refused": refused,
        "needed": str(needed.value),
        "clipping": engines[0].gradient_clipping(),
        "stages": [engine.zero_optimization_stage() for engine in engines],
        "adam": type(engines[0].optimizer).__name__,
        "adam, told": type(told.optimizer).__name__,
        "overlooked": (
            *(told.lr_scheduler, told.torch_autocast_enabled()),
            *told.get_lr(),
        ),
        "moved": moved_by_clipping(),
        "problem": unknown_key(config),
        "nested": unknown_key({"zero_optimization": {"stge": 1}}),
        "no object": [
            unknown_key(one)
            for one in ([], 5, None, "auto")
            for one in (one, {"zero_optimization": one})
        ],
        "own": [
            unknown_key(modules[name].CONFIG)
            for name in ("stage_0", "stage_1", "stage_2", "stage_3", "recipe")
        ],
    }


def frozen_and_generated(stage: int) -> dict[str, Any]:
    """Train a model of which most is frozen; return what is kept, and its tokens."""
    modules = prepare()
    config = json.loads(json.dumps(modules["recipe"].CONFIG))
    config["zero_optimization"] = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
    }
    modules["deepspeed_setup"].prepare(config)
    import deepspeed

    model: Any = modules["qwen"].small_model()
    for name, p in model.named_parameters():
        p.requires_grad = "q_proj" in name
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    engine: Any = deepspeed.initialize(model=model, config=config)[0]
    start = torch.arange(8)[None]
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(input_ids=start, labels=start).loss)
        engine.step()
    found = {
        "trainable": trainable,
        "stepped": modules["engine_checks"].optimizer_count(engine),
        "moments": modules["engine_checks"].moment_count(engine),
        "kept": sum(
            getattr(p, "ds_tensor", p).numel() for p in engine.module.parameters()
        ),
        "all": sum(modules["engine_checks"].tensor_sizes(engine)),
        "tokens": engine.module.generate(start, max_new_tokens=4, do_sample=False),
    }
    unequal = {"max_new_tokens": 2 + 4 * dist.get_rank(), "do_sample": False}
    longer = engine.module.generate(start, synced_gpus=True, **unequal)
    found["longer"] = longer.shape[1] - 8
    first = next(iter(engine.module.parameters()))
    with deepspeed.zero.GatheredParameters([first]):
        found["whole"] = first.numel() == first.shape.numel() == 256 * 128
    engine.destroy()
    return found


def means_under_deepspeed_and_ddp(stage: int) -> list[list[float]]:
    """Train with BatchNorm on a rank's own samples; return its running means."""
    modules = prepare()
    config = json.loads(json.dumps(modules[f"stage_{stage}"].CONFIG))
    config["bf16"]["enabled"] = False
    modules["deepspeed_setup"].prepare(config)
    import deepspeed

    found = []
    for uses_ddp in (False, True):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        )
        if uses_ddp:
            wrapped: Any = torch.nn.parallel.DistributedDataParallel(model)
        else:
            wrapped, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            samples = torch.randn(8, 4, generator=generator) + dist.get_rank()
            loss = wrapped(samples).square().mean()
            if uses_ddp:
                loss.backward()
            else:
                wrapped.backward(loss)
                wrapped.step()
        wrapped(torch.zeros(8, 4))  # the wrapper's forward pass, once more
        found.append(model[1].running_mean.tolist())
    return found


def evaluate_unequally(stage: int) -> int:
    """Evaluate one batch on rank 0 and two on rank 1; return how many."""
    modules = prepare()
    config: Any = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {}}
    config["zero_optimization"]["stage"] = stage
    config |= {"zero_allow_untested_optimizer": True}
    modules["deepspeed_setup"].prepare(config)
    import deepspeed

    model = modules["qwen"].small_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine: Any = deepspeed.initialize(model=model, optimizer=sgd, config=config)[0]
    engine.eval()
    with torch.no_grad():
        for _ in range(1 + dist.get_rank()):
            engine(input_ids=torch.arange(8)[None])
    return 1 + dist.get_rank()


def learning_rates() -> list[float]:
    """Return the learning rate that each step of the recipe takes."""
    modules = prepare()
    recipe, rates = modules["recipe"], []
    modules["deepspeed_setup"].prepare(recipe.CONFIG)
    import deepspeed

    model = modules["qwen"].small_model()
    engine: Any = deepspeed.initialize(model=model, config=recipe.CONFIG)[0]
    adam = engine.optimizer.optimizer
    step = adam.step
    adam.step = lambda *args: (rates.append(adam.param_groups[0]["lr"]), step(*args))
    tokens = modules["text"].read_tokens()
    with mock.patch.object(recipe, "BLOCK_SIZE", 4):
        recipe.train_and_save(engine, tokens, None)
    return rates


class Followed(NamedTuple):
    """What a rank saw of the recipe."""

    output: str
    is_right: bool
    latest: list[str]  # what it named when rank 1 had not saved its shard yet
    rows: list[Any]  # those of its first two steps
    is_whole: bool  # the text held out, and the one to train on, are all of it
    seeds: list[int]  # of dropout, in each micro-batch of its six steps


def follow_the_recipe(folder: str, forgets: str) -> Followed:
    """Run the recipe, then save as DeepSpeed does by itself, where rank 1 is slow.

    `forgets` is what is not loaded.
    """
    modules, output, seen = prepare(), io.StringIO(), []
    rows, texts, seeds = [], {}, []
    recipe = modules["recipe"]
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine

    save, load = DeepSpeedEngine._save_zero_checkpoint, DeepSpeedEngine.load_checkpoint
    forward, global_batch = DeepSpeedEngine.forward, recipe.global_batch
    model_and_tokens = recipe.model_and_tokens

    def save_late(engine: Any, path: Any, tag: str) -> None:
        if dist.get_rank() == 1:
            time.sleep(0.5)
            latest = Path(path, "latest")
            seen.append(latest.read_text() if latest.exists() else "")
        save(engine, path, tag)

    def noted(engine: Any, **batch: Any) -> Any:
        if engine.module.training:
            rows.append(batch["input_ids"].tolist())
            seeds.append(torch.initial_seed())
        return forward(engine, **batch)

    def draw(tokens: Any, *rest: Any) -> Any:
        texts[len(tokens)] = tokens
        return global_batch(tokens, *rest)

    def with_dropout(*args: Any, **kwargs: Any) -> Any:
        model, tokens = model_and_tokens(*args, **kwargs)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        return model, tokens

    def load_in_part(engine: Any, *args: Any, **kwargs: Any) -> Any:
        return load(engine, *args, **kwargs, **({forgets: False} if forgets else {}))

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(DeepSpeedEngine, "_save_zero_checkpoint", save_late))
        enter(mock.patch.object(DeepSpeedEngine, "load_checkpoint", load_in_part))
        enter(mock.patch.object(DeepSpeedEngine, "forward", noted))
        enter(mock.patch.object(recipe, "global_batch", draw))
        enter(mock.patch.object(recipe, "model_and_tokens", with_dropout))
        enter(mock.patch.multiple(recipe, STEPS=6, SAVE_EVERY=3))
        check = enter(mock.patch.object(recipe, "check"))
        enter(in_the_pool(recipe))
        enter(contextlib.redirect_stdout(output))
        options = {"checkpoints": Path(folder), "model": None, "text": None}
        recipe.main(SimpleNamespace(**options))
        model = modules["qwen"].small_model()
        engine = deepspeed.initialize(model=model, config=recipe.CONFIG)[0]
        engine.save_checkpoint(f"{folder}/by itself", "early")
    held_out, rest = (texts[length] for length in sorted(texts))
    is_whole = torch.equal(torch.cat([held_out, rest]), modules["text"].read_tokens())
    is_right = check.call_args.args[0]
    return Followed(output.getvalue(), is_right, seen, rows[:4], is_whole, seeds[:12])


def write_checkpoints(folder: str) -> None:
    """Write a checkpoint with its tokenizer, and others that lack something."""
    from transformers import Qwen2Model

    qwen, base = load_chapter(CHAPTER)["qwen"], Path(folder)
    qwen.small_model(seed=1).save_pretrained(base / "no tokenizer")
    shutil.copytree(base / "no tokenizer", base / "good")
    write_tokenizer(base / "good")
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
            load = modules["pretrained"].load_checkpoint
            model, _ = load(str(path), 2, 1, 2, 10**9)
            said[path.name] = "" if model.training else "in eval()"
        except ValueError as error:
            said[path.name] = str(error).removeprefix(f"--model {path}: ")
    try:
        modules["pretrained"].load_checkpoint(f"{folder}/good", 2, 1, 2, 10**6)
    except ValueError as error:
        said["too large"] = str(error).removeprefix(f"--model {folder}/good ")
    return said


# --- The scripts, as a user starts them. ----------


def body(path: Path) -> str:
    """Return a script without its docstring."""
    return path.read_text().split('"""', 2)[2]


def test_the_stages_differ_only_in_docstring_and_config() -> None:
    first = body(FOLDER / "stage_0.py")
    assert first.count('{"stage": 0}') == 1
    for stage in (1, 2, 3):
        other = body(FOLDER / f"stage_{stage}.py")
        settings = {"stage": stage}
        if stage == 3:  # by default all of this model's tensors would stay whole
            settings["stage3_param_persistence_threshold"] = SMALL
        line = json.dumps(settings).replace(f"{SMALL}}}", f"{SMALL:_}}}")
        assert other == first.replace('{"stage": 0}', line)


def run_all_stages(precision: str) -> list[str]:
    """Run each stage's script for two steps; return what this rank says."""
    options = {"steps": 2, "precision": precision}
    # In this order: stage 3 replaces `torch.nn.functional.linear` for good.
    scripts = [f"stage_{stage}" for stage in range(4)]
    return [run_zero_lesson(CHAPTER, script, **options) for script in scripts]


@pytest.mark.parametrize(
    ("precision", "limit"),
    [("bf16", "2e-03"), pytest.param("fp32", "1e-04", marks=pytest.mark.slow)],
)
def test_two_steps_of_each_stage_are_one_process_s(
    zero_pools: Pools, precision: str, limit: str
) -> None:
    said, silent = zero_pools(2).run(run_all_stages, precision)
    assert silent == [""] * 4
    losses = [re.findall(r"^step +\d+ .* ([\d.]+)$", text, re.M) for text in said]
    assert [text.count("\ncheck: ") for text in said] == [3] * 4
    assert [f"one process's (limit {limit})," in text for text in said] == [True] * 4
    assert losses == [losses[0]] * 4 and len(losses[0]) == 2


def count_on_a_rank(stage: int, ranks: int) -> int:
    """Return how many parameters a rank's optimizer holds, padding included.

    Stages 1 and 2 lay all tensors end to end and pad them to a multiple of twice the
    ranks; stage 3 pads every tensor to a multiple of the ranks.
    """
    if stage == 0:
        return PARAMETERS
    if stage == 3:
        return sum(values + -values % ranks for values in SIZES) // ranks
    return (PARAMETERS + -PARAMETERS % (2 * ranks)) // ranks


def claim_of_counts(stage: int, ranks: int) -> str:
    """Return what the first check of a stage script says."""
    whole = IN_NORMS if stage == 3 else PARAMETERS
    return (
        f"optimizer state of {count_on_a_rank(stage, ranks):,} parameters, "
        f"{whole:,} whole weights on each of {ranks} rank(s)"
    )


def assert_is_a_lesson(text: str, stage: int, ranks: int, count: str) -> None:
    lines = re.findall(r"^rank (\d) \| stage (\d) .* count ([\d,]+)$", text, re.M)
    assert lines == [(str(rank), str(stage), count) for rank in range(ranks)]
    checks = re.findall(r"^check: (.*)$", text, re.M)
    assert checks[:2] == [
        claim_of_counts(stage, ranks),
        "the same weights on each, to the last bit",
    ]
    assert len(checks) == 3 and re.fullmatch(COMPARED, checks[2])


def assert_ended_well(result: Result, stage: int, ranks: int, count: int) -> None:
    assert result.returncode == 0, result.output
    assert_is_a_lesson(result.stdout, stage, ranks, f"{count:,}")


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
    assert_ended_well(result, 1, 2, count_on_a_rank(1, 2))
    losses = re.findall(r"^step +(\d+) \| mean loss .* ([\d.]+)$", result.stdout, re.M)
    assert [int(step) for step, _ in losses] == [1, 10]
    # The text is Python's library, which differs from one version to the next.
    assert 5.0 < float(losses[0][1]) < 5.7 and float(losses[1][1]) < 4.2
    # Nothing of DeepSpeed's own comes between the lines of the lesson.
    lesson = result.stdout[result.stdout.index("device: ") :]
    own = [line for line in lesson.splitlines() if "[INFO] [launch.py" not in line]
    assert len(own) == 9, own
    assert "Warning" not in result.stderr


@pytest.mark.parametrize(
    ("hosts", "told", "taken"),
    [("1", DEFAULT_PORT, "own"), ("2", DEFAULT_PORT, "told"), ("1", "1234", "told")],
)
def test_jobs_on_one_host_have_ports_of_their_own(
    hosts: str, told: str, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, ports = load_chapter(CHAPTER)["deepspeed_setup"], set()
    monkeypatch.setenv("CROSS_SIZE", hosts)
    for launcher in (4711, 4712, 4_000_000):
        monkeypatch.setenv("MASTER_PORT", told)
        monkeypatch.setattr("os.getppid", lambda pid=launcher: pid)
        setup.use_own_port()
        ports.add(int(os.environ["MASTER_PORT"]))
    if taken == "told":
        assert ports == {int(told)}
    else:
        # Below those that Linux gives to whoever asks for port 0.
        assert len(ports) == 3 and all(10_000 <= port < 30_000 for port in ports)


@pytest.mark.slow
def test_torchrun_starts_three_ranks() -> None:
    result = torchrun(FOLDER / "stage_3.py", "--steps=2", "--precision=fp32", nproc=3)
    count = count_on_a_rank(3, 3)
    assert_ended_well(result, 3, 3, count)
    assert f"each of 24 tensors partitioned among 3: {count:,}, with " in result.output
    assert "(limit 1e-04), gradient norm " in result.output


@pytest.mark.slow
def test_recipe_trains_a_checkpoint_and_a_text(
    tmp_path: Path, zero_pools: Pools
) -> None:
    zero_pools(1).run(write_checkpoints, str(tmp_path), world_size=1)
    text = tmp_path / "text"
    text.write_text("the same words over and over again, " * 200)
    options = [f"--checkpoints={tmp_path / 'saved'}", f"--model={tmp_path / 'good'}"]
    result = torchrun(FOLDER / "recipe.py", *options, f"--text={text}", nproc=2)
    assert result.returncode == 0, result.output
    claim = "check: resumed at step 10: the same loss, to the last bit\n"
    assert result.stdout.endswith(claim)
    before, after = re.findall(r"held-out loss ([\d.]+)$", result.stdout, re.M)
    # It begins with the loss that the checkpoint has, in the checkpoint's own tokens.
    assert float(before) == pytest.approx(held_out_loss(tmp_path / "good", text), 1e-3)
    assert float(after) < 0.5 * float(before)


@torch.no_grad()
def held_out_loss(folder: Path, text: Path) -> float:
    """Return a checkpoint's loss on the twentieth of a text that is held out."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor(tokenizer(text.read_text())["input_ids"])
    draw = load_chapter(CHAPTER)["text"].global_batch
    batch = draw(tokens[: len(tokens) // 20], 0, 16 * 2, 64)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model(input_ids=batch, labels=batch).loss.item()


NUMA = """available: {} nodes (0-1)
node 0 cpus: 0 1
node 0 size: 64 MB
node 1 cpus:{}
node 1 size: 64 MB
"""


def ranks_by_numa(nodes: int, cpus: str) -> tuple[int, int]:
    """Return how many ranks `deepspeed` starts, with numactl and without it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    told = NUMA.format(nodes, cpus).encode()
    found = []
    for answer in ([told], FileNotFoundError):
        numactl = mock.Mock(side_effect=answer)
        asked = mock.patch.object(subprocess, "check_output", numactl)
        with asked, mock.patch.dict(os.environ):
            os.environ.pop("LOCAL_SIZE", None)
            found.append(accelerator.device_count())
            # A number in the environment comes first: nobody counts.
            os.environ["LOCAL_SIZE"] = "3"
            assert accelerator.device_count() == 3
    return found[0], found[1]


@pytest.mark.parametrize(
    ("nodes", "cpus", "ranks"), [(1, "", 1), (2, " 2 3", 2), (2, "", 1)]
)
def test_without_a_gpu_there_is_a_rank_for_each_numa_node_with_cores(
    zero_pools: Pools, nodes: int, cpus: str, ranks: int
) -> None:
    (found,) = zero_pools(1).run(ranks_by_numa, nodes, cpus, world_size=1)
    assert found == (ranks, 1)


ONE_RANK = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import ranks, stage_1
from deepspeed_setup import SETUP_OPTIONS
stage_1.leave = lambda: print("torch._inductor.compile_fx" in sys.modules)
def main(options):
    stage_1.main(options)
if __name__ == "__main__":
    options = ranks.read_options(
        steps={"type": int}, precision={"default": "bf16"}, **SETUP_OPTIONS
    )
    ranks.start_ranks(main, 1, options)
"""


@pytest.mark.slow
def test_one_rank_needs_no_compiler_and_starts_fast(tmp_path: Path) -> None:
    # A rank of its own is spawned, which needs a file to import `main` from.
    script = tmp_path / "one_rank.py"
    script.write_text(ONE_RANK)
    environment = clean_environment(CXX="/nowhere/c++")
    result = python(script, FOLDER, "--steps=2", env=environment)
    assert_ended_well(result, 1, 1, PARAMETERS)
    assert "one rank: nothing can be partitioned; this starts two:" in result.stdout
    # The import that would cost two seconds has not taken place.
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["deepspeed", "its child"])
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
        _, alive = psutil.wait_procs(ranks, timeout=45)
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
    setup = load_chapter(CHAPTER)["deepspeed_setup"]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "2")
        monkeypatch.delenv(name)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    if setting is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    setup.prepare({})
    assert chosen == ([32] if cores == "half" else [])


def test_only_adam_is_told_to_be_pytorch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    setup, told = load_chapter(CHAPTER)["deepspeed_setup"], {"torch_adam": True}
    params: dict[str, dict[str, Any]] = {name: {} for name in ("Adam", "adamw", "SGD")}
    for name, own in params.items():
        setup.prepare({"optimizer": {"type": name, "params": own}})
    assert params == {"Adam": told, "adamw": told, "SGD": {}}
    config: Any = {"optimizer": {"type": "AdamW"}}
    setup.prepare(config)
    assert config["optimizer"]["params"] == told
    config["optimizer"]["params"] = own = {"torch_adam": False}
    setup.prepare(config)
    assert own == {"torch_adam": False}


def test_deepspeed_asks_mpi_if_one_of_five_variables_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import deepspeed

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    asked = mock.Mock(side_effect=ModuleNotFoundError("No module named 'mpi4py'"))
    monkeypatch.setattr(deepspeed.comm.comm, "mpi_discovery", asked)
    for missing in names:
        for name in names:
            monkeypatch.setenv(name, "1")
        monkeypatch.delenv(missing)
        with pytest.raises(ModuleNotFoundError, match="mpi4py"):
            deepspeed.init_distributed("gloo")
    assert asked.call_count == len(names) == 5
    page = (ROOT / "WHEN_IT_GOES_WRONG.md").read_text("utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith("  `RANK=0 LOCAL"))
    assert all(f"{name}=" in line for name in names)


def test_to_other_hosts_deepspeed_takes_no_threads_but_from_its_file() -> None:
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.launcher import runner

    exported = [*runner.EXPORT_ENVS, *CUDA_Accelerator.export_envs(mock.Mock())]
    assert exported == ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"]
    assert runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
    assert os.path.expanduser("~") in runner.DEEPSPEED_ENVIRONMENT_PATHS
    page = words_of("05_deepspeed_zero")
    assert "`OMP_NUM_THREADS` (for `--hostfile` in `~/.deepspeed_env`)" in page


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
    gpu, accelerator = torch.device("cuda"), torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda **_: gpu)
    monkeypatch.setattr(accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda _: "nccl")
    setup = load_chapter(CHAPTER)["deepspeed_setup"]
    device = setup.prepare({})
    # DeepSpeed asks the environment, and so must come to the same.
    assert (device.type, os.environ["DS_ACCELERATOR"]) == (taken, taken)
    reasons = {
        "cpu": "as DS_ACCELERATOR says",
        "cuda": "1 cuda, one for each local rank",
    }
    assert setup.settled["reason"] == reasons[taken]


def saved_by_two(folder: Path, tag: str) -> Any:
    """Save two small shards as `save_shards` does; return the engine that did."""

    def write(path: Path, tag: str, **_: Any) -> None:
        (path / tag).mkdir()
        for rank in range(2):
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            (path / tag / name).write_text("a shard")

    engine = mock.Mock(save_checkpoint=mock.Mock(side_effect=write))
    setup = load_chapter(CHAPTER)["deepspeed_setup"]
    group = {"get_rank": lambda: 0, "get_world_size": lambda: 2, "barrier": mock.Mock()}
    with mock.patch.multiple(setup.dist, **group):
        setup.save_shards(engine, folder, tag, epoch=3)
    return engine


@pytest.mark.parametrize(
    ("world_size", "damage", "says"),
    [
        (2, "", ""),
        (1, "", "step_10 is of 2 ranks: start as many; or convert it as in 05_deep"),
        (3, "", "step_10 is of 2 ranks: start as many; or convert it as in 05_deep"),
        (1, "gone", "rank_1_mp_rank_00_optim_states.pt has 0 bytes and was saved with"),
        (2, "cut", "has 2 bytes and was saved with 7; name another checkpoint in "),
        (2, "no record", "no whole checkpoint in {}/step_10; name another in latest"),
        (2, "cut record", "no whole checkpoint in {}/step_10; name another in latest"),
        (2, "no folder", "no whole checkpoint in {}/step_10; name another in latest"),
        (2, "empty latest", "no whole checkpoint in {}; name another in latest"),
        (2, "no latest", "write a checkpoint's name to {}/latest, as step_10"),
        (1, "converted", ""),
    ],
)
def test_shards_that_cannot_be_loaded_are_refused_in_one_line(
    world_size: int,
    damage: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    setup, folder = load_chapter(CHAPTER)["deepspeed_setup"], tmp_path / "step_10"
    assert setup.latest_tag(tmp_path) == ""
    saved_by_two(tmp_path, "step_10")
    shard = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if damage == "gone":
        shard.unlink()
    elif damage == "cut":
        os.truncate(shard, 2)
    elif damage == "no record":
        (folder / "record.json").unlink()
    elif damage == "cut record":
        os.truncate(folder / "record.json", 9)
    elif damage == "no folder":
        shutil.rmtree(folder)
    elif damage == "converted":
        shutil.rmtree(folder)
        (folder / "zero").mkdir(parents=True)
    elif damage == "empty latest":
        (tmp_path / "latest").write_text("")
    elif damage == "no latest":
        (tmp_path / "latest").unlink()
    if not says:
        assert setup.latest_tag(tmp_path) == "step_10"
        return
    # What saves asks for the newest name first, and would save over a whole checkpoint.
    ask = setup.newest_tag if damage == "no latest" else setup.latest_tag
    with pytest.raises(SystemExit) as end:
        ask(tmp_path)
    said = capsys.readouterr().err
    assert (
        end.value.code == 2 and said.count("\n") == 1 and says.format(tmp_path) in said
    )


@pytest.mark.slow
def test_bad_input_is_one_line(tmp_path: Path) -> None:
    folder, short, few = tmp_path / "none", tmp_path / "short", "a few words"
    short.write_text(few)
    other = tmp_path / "other"
    (other / "step_10").mkdir(parents=True)
    (other / "latest").write_text("step_10")
    for rank in range(3):
        (other / "step_10" / f"zero_pp_rank_{rank}_optim_states.pt").touch()
    damaged = f"no whole checkpoint in {other / 'step_10'}; name another in latest"
    too_short = f"the text has {len(few)} tokens and 1280 are needed: give more text"
    for script, option, expected in (
        ("stage_0", "--steps=0", "argument --steps: '0' is no number from 1 to 10"),
        ("recipe", "--text=/nowhere", "--text /nowhere: No such file or directory"),
        ("recipe", f"--text={short}", too_short),
        ("recipe", "--model=/no/such", "--model /no/such: there is no such folder"),
        ("recipe", f"--checkpoints={other}", damaged),
    ):
        more = [f"--checkpoints={folder}"] if script == "recipe" else []
        result = python(FOLDER / f"{script}.py", *more, option)
        assert (result.returncode, result.stdout) == (2, "")
        zeros = "0" * 8 if script == "stage_0" else ""
        assert result.stderr == f"{script}.py: {expected}{zeros}\n"
    assert not folder.exists()


@pytest.mark.slow
def test_more_ranks_than_a_machine_can_bear_are_refused() -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env = clean_environment(WORLD_SIZE="99", LOCAL_SIZE="99", **ranks)
    result = python(FOLDER / "stage_1.py", env=env)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "stage_1.py: 99 local ranks are too many; try --num_gpus=2\n"
    )


# --- What the pages say. ----------


@pytest.mark.slow
def test_stage_scripts_train_and_compare(zero_pools: Pools) -> None:
    printed, by_others = zero_pools(2).run(run_the_scripts, 10, world_size=2)
    assert by_others == [""] * 4
    first, last = [], []
    for stage, text in enumerate(printed):
        count = f"{count_on_a_rank(stage, 2):,}"
        assert_is_a_lesson(text, stage, 2, count)
        losses = re.findall(r"^step +(\d+) \| mean loss .* ([\d.]+)$", text, re.M)
        assert [int(step) for step, _ in losses] == [1, 10]
        first.append(float(losses[0][1]))
        last.append(float(losses[1][1]))
    # In bf16 too the stages end where one process ends.
    assert len(first) == len(last) == 4
    assert max(first) - min(first) < 2e-3 and 5.0 < min(first) < 5.4
    assert max(last) - min(last) < 2e-3 and 3.2 < min(last) < 3.8


@pytest.mark.parametrize(
    "precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp32"]
)
@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))]
)
def test_all_stages_equal_one_process(
    world_size: int, precision: str, zero_pools: Pools
) -> None:
    by_rank = zero_pools(world_size).run(
        all_stages, 4, precision, world_size=world_size
    )
    assert len(by_rank) == world_size
    for results in by_rank:
        assert [stage for stage in results if len(stage[2]) != 4] == []
        for stage, (lines, counts, losses, held, found) in enumerate(results):
            expected = count_on_a_rank(stage, world_size)
            assert counts == [expected, expected]
            assert len(lines) == world_size + (2 if world_size == 1 else 1)
            apart = max(abs(a - b) for a, b in zip(losses, results[0][2], strict=True))
            assert apart < (1e-5 if precision == "fp32" else 1e-3)
            assert held == (True, claim_of_counts(stage, world_size))
            limits = ("1e-04", "1e-03") if precision == "fp32" else ("2e-03", "3e-02")
            assert found[0], found[1]
            match = re.fullmatch(COMPARED, found[1])
            assert match and match.groups() == limits
        assert len(results) == 4


def test_stages_agree_in_fp32_if_the_optimizer_is_elementwise(
    zero_pools: Pools,
) -> None:
    for name, agrees in (("SGD", True), ("Adafactor", False)):
        by_rank = zero_pools(2).run(losses_by_stage, name)
        assert len(by_rank) == 2
        for whole, *sharded in by_rank:
            assert whole[-1] < whole[0] and len(sharded) == 3
            for losses in sharded:
                far = max(abs(a - b) for a, b in zip(losses, whole, strict=True))
                assert far < 1e-5 if agrees else far > 1e-3
    page = " ".join((FOLDER / "README.md").read_text("utf-8").split())
    limits = (
        "is elementwise (Adam, SGD), every step uses every layer and no buffer changes"
    )
    assert f"In fp32 nothing, if the optimizer {limits} (BatchNorm's do)" in page


def test_stage_0_has_taken_a_step_of_zeros_in_bf16(zero_pools: Pools) -> None:
    (bug,) = zero_pools(1).run(first_step, 0, False, world_size=1)
    (fixed,) = zero_pools(1).run(first_step, 0, True, world_size=1)
    (stage_1,) = zero_pools(1).run(first_step, 1, False, world_size=1)
    # Before training, Adam has counted a step and the decay has shrunk the weights.
    assert (bug["before"], bug["after"]) == ([1.0], [2.0])
    assert bug["part"] == pytest.approx(1 - LR * DECAY, abs=1e-6)
    # Adam divides by 1 - beta ** step: what is 1 in the first step is this in a second.
    second = (0.1 / (1 - 0.9**2)) / (0.001 / (1 - 0.999**2)) ** 0.5
    assert (
        bug["update"]
        == pytest.approx(second, rel=1e-3)
        == pytest.approx(0.744, abs=1e-3)
    )
    for other in (fixed, stage_1):
        assert (other["before"], other["after"]) == ([], [1.0])
        assert other["part"] == 1
        assert other["update"] == pytest.approx(1, rel=1e-3)


def test_step_of_zeros_has_one_config_that_avoids_it(zero_pools: Pools) -> None:
    (in_fp32,) = zero_pools(1).run(counters_of_stage_0, world_size=1)
    (in_bf16,) = zero_pools(1).run(partial(counters_of_stage_0, bf16=ON), world_size=1)
    assert (in_fp32, set(in_bf16)) == ([], {1.0})
    settings = {"bf16": ON, "data_types": {"grad_accum_dtype": "fp32"}}
    (refused,) = zero_pools(1).run(
        partial(counters_of_stage_0, **settings), world_size=1
    )
    assert refused.startswith("unsupported mix of model_dtype=torch.bfloat16")
    settings = {"torch_autocast": {**ON, "dtype": "bfloat16"}}
    (cast,) = zero_pools(1).run(partial(counters_of_stage_0, **settings), world_size=1)
    assert cast == []


@pytest.mark.parametrize(
    ("stage", "precision", "mistake", "words"),
    [
        (1, "fp32", "wrong samples", r"weights [1-9]e-0[12] \(limit"),
        (3, "bf16", "wrong samples", r"weights [1-9]e-01 \(limit"),
        (2, "fp32", "other clipping", r"losses [1-9]e-0[1-4] from one"),
        (1, "fp32", "sum", r"gradient norm 1e\+00, weights .e-0[5-9] "),
        (0, "bf16", "local loss", r"losses [1-9]e-02 from one"),
        (0, "bf16", "step of zeros", r"losses [5-9]e-02 .*, weights [1-9]e-01 \("),
        (2, "bf16", "lost states", r"optimizer state of 60,386 parameters"),
        (3, "bf16", "a whole weight", r"60,394 parameters, 650 whole weights on"),
    ],
)
def test_the_check_finds(
    stage: int, precision: str, mistake: str, words: str, zero_pools: Pools
) -> None:
    said = zero_pools(2).run(check_after, stage, precision, mistake, world_size=2)
    assert len(said) == 2
    for is_right, claim in said:
        assert not is_right, claim
        assert re.search(words, claim), claim


def test_the_recipe_refuses_a_universal_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe: Any = load_chapter(CHAPTER)["recipe"]
    (tmp_path / "latest").write_text("made")
    (tmp_path / "made/zero").mkdir(parents=True)
    with pytest.raises(SystemExit) as end:
        recipe.main(SimpleNamespace(checkpoints=tmp_path))
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert f"{tmp_path / 'made'} is a universal checkpoint, which this" in said


def test_latest_is_replaced_and_never_half_written(tmp_path: Path) -> None:
    latest, left = tmp_path / "latest", tmp_path / "step_20"
    latest.write_text("step_10")
    left.mkdir()
    (left / "zero_pp_rank_2_mp_rank_00_optim_states.pt").touch()
    with latest.open() as opened_before:
        engine = saved_by_two(tmp_path, "step_20")
        # Who has opened it reads on: it is another file now.
        assert (opened_before.read(), latest.read_text()) == ("step_10", "step_20")
    saved = mock.call.save_checkpoint(
        tmp_path, "step_20", client_state={"epoch": 3}, save_latest=False
    )
    assert engine.mock_calls == [saved]
    with pytest.raises(ValueError, match="step_20 is the newest checkpoint"):
        saved_by_two(tmp_path, "step_20")
    # What more ranks had left there, before they died, is gone.
    names = [f"bf16_zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in (0, 1)]
    assert sorted(one.name for one in left.iterdir()) == [*names, "record.json"]


@pytest.mark.parametrize(
    ("forgets", "is_right"),
    [
        ("", True),
        pytest.param("load_optimizer_states", False, marks=pytest.mark.slow),
        pytest.param("load_lr_scheduler_states", False, marks=pytest.mark.slow),
    ],
)
def test_recipe_resumes_and_names_a_checkpoint_when_it_is_whole(
    forgets: str, is_right: bool, zero_pools: Pools, tmp_path: Path
) -> None:
    call = (follow_the_recipe, str(tmp_path), forgets)
    said = zero_pools(2).run(*call, world_size=2)
    assert [one.is_right for one in said] == [is_right] * 2
    # Two steps of two micro-batches of four: no rank trains on another's.
    assert [len(one.rows) for one in said] == [4, 4] and all(o.is_whole for o in said)
    # Nor drops as another does, or as in another step: two micro-batches share a seed.
    seeds = [seed for one in said for seed in one.seeds]
    assert len(seeds) == 2 * 12 and set(map(seeds.count, seeds)) == {2}
    samples = [tuple(row) for one in said for rows in one.rows for row in rows]
    assert len(samples) == len(set(samples)) == 32
    lines = said[0].output.splitlines()
    assert [line for line in lines if line.startswith("saved")] == [
        "saved step_3",
        "saved step_6",
    ]
    shown = r"step +(\d) \| held-out loss ([\d.]+)$"
    losses = re.findall(shown, said[0].output, re.M)
    if is_right:
        assert float(losses[0][1]) - float(losses[1][1]) > 0.5
        # Until all shards are there, `latest` names the one before; by itself DeepSpeed
        # names the new one.
        assert [one.latest for one in said] == [[], ["", "step_3", "early"]]
        again = zero_pools(2).run(*call, world_size=2)
        assert "from step 6 | held-out loss " + losses[1][1] in again[0].output
        assert [one.is_right for one in again] == [True] * 2


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_have_no_state_and_all_ranks_can_generate(
    stage: int, zero_pools: Pools
) -> None:
    by_rank = zero_pools(2).run(frozen_and_generated, stage, world_size=2)
    assert len(by_rank) == 2
    for found in by_rank:
        assert found["stepped"] == found["moments"] == found["trainable"] / 2
        assert found["kept"] == found["all"] / (2 if stage == 3 else 1)
        assert found["tokens"].shape == (1, 12) and found["whole"]
    assert torch.equal(by_rank[0]["tokens"], by_rank[1]["tokens"])
    assert [found["longer"] for found in by_rank] == [2, 6]


@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_leaves_each_rank_its_own_running_means(
    stage: int, zero_pools: Pools
) -> None:
    (of_engine, of_ddp), (other_engine, other_ddp) = zero_pools(2).run(
        means_under_deepspeed_and_ddp, stage, world_size=2
    )
    apart = [abs(a - b) for a, b in zip(of_engine, other_engine, strict=True)]
    assert len(apart) == 4 and max(apart) > 0.05
    # DDP broadcasts them in its forward pass, which here saw the same samples.
    assert of_ddp == pytest.approx(other_ddp, abs=1e-6)


@pytest.mark.slow
def test_only_stage_3_waits_for_a_rank_that_evaluates_no_more() -> None:
    with WorkerPool(2) as workers:
        assert workers.run(evaluate_unequally, 2) == [1, 2]
        with pytest.raises(RankError, match="imed out") as caught:
            workers.run(evaluate_unequally, 3, timeout=60)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    "precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"]
)
def test_plain_backward_does_what_the_engines_does(
    precision: str, zero_pools: Pools
) -> None:
    for stage in (1, 2, 3):
        for micro_batches in (1, 4):
            call = (plain_backward_moves, stage, precision, micro_batches)
            assert zero_pools(2).run(*call, world_size=2) == [True] * 2
    refused = zero_pools(2).run(plain_backward_moves, 0, precision, 1, world_size=2)
    words = "Direct calls to tensor.backward() are not supported in this configuration"
    assert [one.startswith(words) for one in refused] == [True] * 2


WRONG_GRADIENTS = """\
one process | layer 0 moves by 0.5, layer 1 by 5.0
stage 1     | layer 0 moves by 5.5, layer 1 by 5.5
stage 2     | layer 0 moves by 5.5, layer 1 by 5.5
stage 3     | layer 0 moves by 2.75, layer 1 by 2.75
"""


def test_gradients_of_different_layers_are_averaged_with_each_other(
    zero_pools: Pools,
) -> None:
    run, model = zero_pools(2).run, TwoLayers()
    torch.stack([model(factors)["loss"] for factors in OF_ITS_OWN]).mean().backward()
    one_process = [layer.weight.grad.mean().item() for layer in model.layers]
    moved, other = run(moved_in_all_stages, [[OF_ITS_OWN]])
    assert moved == other and moved[0] == one_process
    names = ["one process", "stage 1", "stage 2", "stage 3"]
    assert WRONG_GRADIENTS.splitlines() == [
        f"{name:11} | layer 0 moves by {first}, layer 1 by {second}"
        for name, (first, second) in zip(names, moved, strict=True)
    ]
    assert run(moved_in_all_stages, [[BY_0]]) == [[[0.5, 5.0]] * 4] * 2
    # Times 0 is not enough where each rank begins with another layer.
    by_order = run(
        partial(moved_in_all_stages, own_first=True, stages=(1, 2)), [[BY_0]]
    )
    assert by_order == [[[0.5, 5.0], [5.5, 5.5]]] * 2
    page = words_of(CHAPTER)
    assert "use every trainable layer, in one order on all ranks" in page
    # Stage 3 gathers the one half of each layer's weights, 1 and 2.
    first, second = run(losses_of_its_own_layer)
    assert first == [16, 16, 16, 24] and second == [320, 320, 320, 240]


def test_stage_3_takes_the_gradient_of_a_layer_that_rests_again(
    zero_pools: Pools,
) -> None:
    run, rests = zero_pools(2).run, [[1, 0]] * 3
    took = run(moved_in_all_stages, [[OF_BOTH]], [[OF_ONE]])
    assert took == [[*rests, [1, 10]]] * 2
    took = run(moved_in_all_stages, [[OF_BOTH]], [[OTHER_BY_0]])
    assert took == [[*rests, [1, 0]]] * 2
    # Adam goes on by its moments, as if the layer had been used times 0.
    by_adam = partial(moved_in_all_stages, adam=True, stages=(0, 1, 2))
    rested = run(by_adam, [[OF_BOTH]], [[OF_ONE]])
    assert rested == run(by_adam, [[OF_BOTH]], [[OTHER_BY_0]])
    assert [second > 0.15 for _, second in rested[0]] == [True] * 3
    # With the optimizer's state on the host, stages 1 and 2 do as stage 3.
    offloaded = partial(moved_in_all_stages, stages=(1, 2, 3), offloaded=True)
    assert run(offloaded, [[OF_BOTH]], [[OF_ONE]]) == [[[1, 10]] * 3] * 2
    assert run(offloaded, [[OF_BOTH]], [[OTHER_BY_0]]) == [[[1, 0]] * 3] * 2


def test_a_layer_that_is_never_used_decays_under_deepspeed(zero_pools: Pools) -> None:
    run = partial(zero_pools(2).run, partial(moved_in_all_stages, adam=True))
    # By the learning rate times the weight decay times the weight of 2.
    assert run([[OF_ONE]]) == [[[0.15, 0.1]] * 4] * 2
    model = TwoLayers()
    adam = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(OF_ONE[0])["loss"].backward()
    adam.step()
    weights = [layer.weight.mean().item() for layer in model.layers]
    assert weights == pytest.approx([1 - 0.15, 2])


def test_a_layer_used_times_0_goes_on_by_adams_moments(zero_pools: Pools) -> None:
    run = partial(zero_pools(2).run, partial(moved_in_all_stages, adam=True))
    took = run([[OF_BOTH]], [[OTHER_BY_0]])
    model = TwoLayers()
    adam = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for factors in (OF_BOTH[0], OTHER_BY_0[0]):
        before = [layer.weight.mean().item() for layer in model.layers]
        adam.zero_grad()
        model(factors)["loss"].backward()
        adam.step()
    after = [layer.weight.mean().item() for layer in model.layers]
    due = [a - b for a, b in zip(before, after, strict=True)]
    assert took == [[pytest.approx(due, abs=1e-4)] * 4] * 2 and due[1] > 0.15


def test_unfreezing_later_does_nothing_and_freezing_stops_gradients_alone(
    zero_pools: Pools,
) -> None:
    run, steps = zero_pools(2).run, [[[OF_BOTH]]] * 2
    unfrozen = run(partial(moved_in_all_stages, grows=True), *steps)
    assert unfrozen == [[[1, 10], *[[1, 0]] * 3]] * 2
    # Plain SGD has no moments and no decay: without a gradient the layer stands still.
    frozen = partial(moved_in_all_stages, grows=False)
    assert run(frozen, *steps) == [[[1, 0]] * 4] * 2
    # AdamW takes a gradient of zero.
    by_adam = run(partial(frozen, adam=True), *steps)
    by_zeros = run(partial(moved_in_all_stages, adam=True), steps[0], [[OTHER_BY_0]])
    assert [[second for _, second in stages] for stages in by_adam] == [
        [0, *(second for _, second in stages[1:])] for stages in by_zeros
    ]
    assert by_zeros[0][1][1] > 0.15
    # Offloaded, it keeps its last gradient, and steps by that again and again.
    steps += steps[:1]
    offloaded = partial(frozen, stages=(1, 2, 3), offloaded=True)
    assert run(offloaded, *steps) == [[[1, 10]] * 3] * 2
    assert run(frozen, *steps) == [[[1, 0]] * 4] * 2
    page = " ".join((FOLDER / "README.md").read_text("utf-8").split())
    assert "unfreezing after `initialize`. A layer frozen later may move on." in page


def test_two_backwards_before_a_step_lose_the_first_in_stages_1_and_2(
    zero_pools: Pools,
) -> None:
    run, tens = zero_pools(2).run, [(10, 100), (10, 100)]
    two = run(moved_in_all_stages, [[OF_BOTH], [tens]])
    assert two == [[[11, 110], [10, 100], [10, 100], [11, 110]]] * 2
    assert run(moved_in_all_stages, [[OF_BOTH, tens]]) == [[[11, 110]] * 4] * 2
    # In the last of two micro-batches the second call wipes out all that were before.
    of_two = partial(moved_in_all_stages, micro_batches=2)
    two = run(of_two, [[OF_BOTH], [tens]])
    assert two == [[[11, 110], [5, 50], [5, 50], [11, 110]]] * 2
    two = run(partial(of_two, only_first=True), [[OF_BOTH], [tens]])
    assert two == [[[10.5, 105]] * 4] * 2
    # Offloaded, stage 2 adds micro-batches up elsewhere, if there are several.
    offloaded = partial(moved_in_all_stages, stages=(1, 2, 3), offloaded=True)
    two = run(offloaded, [[OF_BOTH], [tens]])
    assert two == [[[10, 100], [10, 100], [11, 110]]] * 2
    two = run(partial(offloaded, micro_batches=2), [[OF_BOTH], [tens]])
    assert two == [[[5, 50], [11, 110], [11, 110]]] * 2
    # Sums in fp32, under bf16, lose none. (A weight of 1 less 11 is exact in bf16.)
    for micro_batches in (1, 2):
        bf16 = partial(moved_in_all_stages, stages=(1, 2), bf16=ON)
        bf16 = partial(bf16, micro_batches=micro_batches)
        fp32 = partial(bf16, data_types={"grad_accum_dtype": "fp32"})
        kept = [[10 / micro_batches, 100 / micro_batches]]
        assert run(bf16, [[OF_BOTH], [tens]]) == [kept * 2] * 2
        assert run(fp32, [[OF_BOTH], [tens]]) == [[[11, 110]] * 2] * 2


def test_gradients_are_sent_in_bf16_unless_two_settings_say_otherwise(
    zero_pools: Pools,
) -> None:
    run, per_rank = zero_pools(2).run, [(2, 4), (2**-8, 2**-8)]
    summed, sent = (
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {"communication_data_type": "fp32"},
    )
    moved = [
        run(
            partial(moved_in_all_stages, stages=(1, 2, 3), bf16=ON, **changes),
            [[per_rank]],
        )
        for changes in ({}, summed, sent, summed | sent)
    ]
    # The mean, 1 + 2**-9, has more digits than bf16. (The weight less it has few.)
    assert moved == [[[[1, 2]] * 3] * 2] * 3 + [[[[1.002, 2.002]] * 3] * 2]
    page = words_of(CHAPTER)
    assert '**and are sent in bf16** unless `"communication_data_type": "fp32"`' in page


def first_loss_of_two(stage: int) -> list[float]:
    """Take a step after two forward passes, then two backward ones; return the move."""
    from deepspeed.runtime.zero import GatheredParameters

    model = TwoLayers()
    engine = engine_for(model, stage)
    weights = [layer.weight for layer in model.layers]
    losses = [engine(factors)["loss"] for factors in ((1, 10), (10, 100))]
    for loss in losses:
        engine.backward(loss)
    engine.step()
    with GatheredParameters(weights):
        moved = [i - w.mean().item() for i, w in enumerate(weights, start=1)]
    engine.destroy()
    return moved


def test_after_two_forward_passes_stage_3_too_loses_the_first(
    zero_pools: Pools,
) -> None:
    run = zero_pools(2).run
    assert run(first_loss_of_two, 0) == [[11, 110]] * 2
    assert run(first_loss_of_two, 3) == [[10, 100]] * 2


def test_in_float16_stage_0_divides_by_a_scale_that_it_did_not_apply(
    zero_pools: Pools,
) -> None:
    run = zero_pools(2).run
    for scale, by_stage_0 in ((1, [1, 10]), (64, [1 / 64, 10 / 64])):
        fp16 = {"enabled": True, "loss_scale": scale}
        both = partial(moved_in_all_stages, stages=(0, 1), fp16=fp16)
        (stage_0, stage_1), same = run(both, [[OF_BOTH]])
        assert [stage_0, stage_1] == same and stage_1 == [1, 10]
        assert stage_0 == pytest.approx(by_stage_0, rel=0.02)


TWO_FORWARDS = "KeyError: 0"


def test_plain_backward_divides_once_for_each_output(zero_pools: Pools) -> None:
    run, plain = zero_pools(2).run, partial(moved_in_all_stages, plain=True)
    of_four = {"micro_batches": 4}
    assert (
        run(partial(moved_in_all_stages, **of_four), [[OF_BOTH]]) == [[[1, 10]] * 4] * 2
    )
    (refused, *moved), _ = run(partial(plain, **of_four), [[OF_BOTH]])
    assert refused.startswith("RuntimeError: Direct calls to tensor.backward() are")
    # The first layer's output is an output of the model, as the loss is.
    assert moved == [[0.25, 10], [0.25, 10], [1, 10]]
    assert run(plain, [[OF_BOTH]]) == [[refused, *[[1, 10]] * 3]] * 2
    failed = run(plain, [[OF_BOTH, OF_BOTH]])
    assert failed == [[refused, *[TWO_FORWARDS] * 3]] * 2
    right, wrong = (run(norm_of_transformers, plain)[0] for plain in (False, True))
    shorter = [b / a for a, b in zip(right, wrong, strict=True)]
    assert shorter == pytest.approx([1 / 4, 1 / 4, 1], rel=1e-3)


def errors_of_steps(*backwards: str) -> list[str]:
    """Take steps after such backward passes; return each stage's error."""
    found = []
    for stage in (1, 2, 3):
        model = TwoLayers()
        engine = engine_for(model, stage)
        try:
            for backward in backwards:
                if backward == "of the model":
                    model(OF_BOTH[dist.get_rank()])["loss"].backward()
                if backward == "of the engine":
                    engine.backward(engine(OF_BOTH[dist.get_rank()])["loss"])
                engine.step()
        except (KeyError, TypeError) as error:
            found.append(f"{type(error).__name__}: {error}")
        engine.destroy()
    return found


def test_a_step_without_a_backward_pass_has_two_texts(zero_pools: Pools) -> None:
    run = zero_pools(2).run
    for backward in ("of the model", "none"):
        assert run(errors_of_steps, backward) == [[TWO_FORWARDS] * 3] * 2
    later = run(errors_of_steps, "of the engine", "of the engine", "none")
    assert later == [["TypeError: 'NoneType' object is not iterable"] * 3] * 2


def scale_after(steps: int, every: int) -> tuple[int, float, str]:
    """Overflow in every so-manieth step; return good steps, the scale and the error."""
    prepare()["deepspeed_setup"].prepare({})
    import deepspeed
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    deepspeed.init_distributed("gloo")
    good, scaler = 0, DynamicLossScaler(2.0**16, 1000, 1.0, 2, False)  # by default
    for step in range(1, steps + 1):
        try:
            scaler.update_scale(step % every == 0)
        except Exception as error:
            return good, scaler.cur_scale, str(error)
        good += step % every != 0
    return good, scaler.cur_scale, ""


def test_one_overflow_in_twenty_steps_brings_the_scale_to_its_minimum(
    zero_pools: Pools,
) -> None:
    run = zero_pools(1).run
    ((good, scale, error),) = run(scale_after, 1000, 20, world_size=1)
    assert scale == 1 and 250 < good < 400
    assert error.startswith("Current loss scale already at minimum")
    # Rarer than the window: it recovers each time.
    ((good, scale, error),) = run(scale_after, 30_000, 1500, world_size=1)
    assert good == 30_000 - 20 and scale >= 2**15 and error == ""


PENALTY = """\
Function PowBackward0 returned an invalid gradient at index 0 - \
got [0] but expected shape compatible with [4, 4]
The size of tensor a (4) must match the size of tensor b (0) at non-singleton \
dimension 1
"""


@pytest.mark.parametrize(
    "where",
    [
        *("in forward", "gathered", "outside"),
        *("gathered, not for backward", "gathered, and forward"),
    ],
)
def test_a_penalty_on_weights_needs_them_whole_in_backward(
    zero_pools: Pools, where: str
) -> None:
    outside, in_part = PENALTY.splitlines()
    # The layer's own gradient is 1, and the penalty's is 2 times the weight of 3.
    last = {
        "outside": outside,
        "gathered, not for backward": in_part,
        "gathered, and forward": outside,
    }.get(where, 7.0)
    for stage, expected in enumerate([7.0, 7.0, 7.0, last]):
        found = zero_pools(2).run(gradient_with_penalty, stage, where)
        assert found == [expected] * 2


WITHOUT_A_DIMENSION = (
    "self.dim() cannot be 0 to view Float as Byte (different element sizes)"
)


def test_a_parameter_needs_a_dimension(zero_pools: Pools) -> None:
    run = zero_pools(2).run
    assert run(number_as_a_parameter, ()) == [[WITHOUT_A_DIMENSION] * 4] * 2
    assert run(number_as_a_parameter, (1,)) == [[""] * 4] * 2


@pytest.mark.parametrize(
    ("mend", "said"),
    [
        ("", "expected scalar type BFloat16 but found Float"),
        ("autocast", "torch.float32"),
        ("cast", "torch.bfloat16"),
    ],
)
def test_batch_norm_in_bf16_needs_autocast_or_buffers_in_bf16(
    zero_pools: Pools, mend: str, said: str
) -> None:
    assert zero_pools(2).run(norm_in_bf16, mend) == [[said] * 4] * 2


NOT_OF_ZERO = "TypeError: 'NoneType' object is not iterable"


def test_zero_to_fp32_reads_no_checkpoint_of_stage_0(
    zero_pools: Pools, tmp_path: Path
) -> None:
    said = zero_pools(1).run(consolidate_stage_0, str(tmp_path), world_size=1)
    assert said == [NOT_OF_ZERO]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_loop_without_deepspeed_leaves_does_nothing(
    stage: int, zero_pools: Pools
) -> None:
    summed = {"bf16": ON, "data_types": {"grad_accum_dtype": "fp32"}}
    offloaded = {"zero": {"offload_optimizer": {"device": "cpu"}}}
    fp16 = {"fp16": ON | {"loss_scale": 1}}
    cases = [(1, {}), (2, {}), (1, {"bf16": ON}), (1, fp16)]
    if stage:  # stage 0 refuses it
        cases += [(2, summed), (1, offloaded)]
    assert len(cases) == (6 if stage else 4)
    for micro_batches, changes in cases:
        habits = partial(moved_by_old_habits, stage, micro_batches, **changes)
        said, other = zero_pools(2).run(habits)
        moved = {habit: layers for habit, (layers, *_) in said.items()}
        is_as_usual = stage == 0 and not changes
        assert (
            moved
            == {habit: layers for habit, (layers, *_) in other.items()}
            == {
                "none": [True, True],
                "own optimizer": [is_as_usual] * 2,
                "both": [True, True],
                "clipping": [True, True],
                "unfrozen": [True, is_as_usual],
                "frozen": [True, not is_as_usual],
            }
        )
        _, norms, clipped = said["clipping"]
        _, _, unclipped = said["none"]
        twice = {0: [{}], 1: [summed, offloaded], 2: [offloaded], 3: []}[stage]
        assert (said["both"][2] != unclipped) == (changes in twice)
        # Stage 1 finds what was summed up before the last micro-batch.
        is_found = [stage == 0] * micro_batches
        if stage == 1 and micro_batches > 1:
            is_found = [True, bool(changes)]
        assert [norm > 0 for norm in norms] == is_found
        # With sums in fp32 those are not what it steps by.
        is_clipped = is_found[0] and not (stage and changes)
        assert (clipped != unclipped) == is_clipped


def weights_after_a_bad_batch(stage: int) -> tuple[list[float], bool]:
    """Take a step in bf16 by an infinite loss, then a good one; is the first told?"""
    layer: Any = torch.nn.Linear(2, 1, bias=False)
    layer.weight.data.fill_(1)
    engine, told = engine_for(layer, stage, bf16=ON), io.StringIO()
    handler, logger = logging.StreamHandler(told), logging.getLogger("DeepSpeed")
    logger.addHandler(handler)
    for factor in (float("inf"), 1.0):
        x = torch.full((1, 2), factor, dtype=torch.bfloat16)
        engine.backward(engine(x).float().sum())
        engine.step()
    logger.removeHandler(handler)
    return layer.weight.flatten().tolist(), "OVERFLOW! Skipping step" in told.getvalue()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bf16_skips_a_bad_batch(stage: int, zero_pools: Pools) -> None:
    job = partial(weights_after_a_bad_batch, stage)
    # The second step, by a gradient of 1, is taken.
    assert zero_pools(1).run(job, world_size=1) == [([0.0, 0.0], stage > 0)]


def test_a_batch_without_labels_gives_zeros_unless_a_mask_averages() -> None:
    labels, found = torch.full((4,), -100), []
    for by_mask in (False, True):
        logits = torch.ones(4, 3, requires_grad=True)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        if by_mask:
            each = torch.nn.functional.cross_entropy(
                logits, labels.clamp(0), reduction="none"
            )
            mask = (labels != -100).float()
            loss = (each * mask).sum() / mask.sum()
        loss.backward()
        assert logits.grad is not None and loss.isnan()
        found.append(logits.grad.abs().sum().item())
    zero, other = found
    assert zero == 0 and other != other


def stepped_after_overflows(asks: bool) -> tuple[bool, float]:
    """Step a schedule of one's own in fp16, from too large a scale on."""
    fp16 = ON | {"initial_scale_power": 32, "hysteresis": 1}
    engine = engine_for(torch.nn.Linear(2, 2), 1, fp16=fp16)
    sgd, applied = engine.basic_optimizer, []
    schedule = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.5)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        while sum(applied) < 2:
            loss = engine(torch.ones(1, 2, dtype=torch.float16)).float().sum()
            engine.backward(loss)
            engine.step()
            applied.append(engine.was_step_applied())
            if applied[-1] or not asks:
                schedule.step()
    said = any("Detected call of `lr_scheduler" in str(one.message) for one in warned)
    assert len(applied) > 5 and not any(applied[:4])
    return said, sgd.param_groups[0]["lr"] * 2**2


def test_a_schedule_in_fp16_asks_whether_the_step_was_applied(
    zero_pools: Pools,
) -> None:
    for asks in (True, False):
        results = zero_pools(1).run(stepped_after_overflows, asks, world_size=1)
        assert len(results) == 1
        ((warns, rate),) = results
        assert warns is not asks
        assert rate == 1 if asks else rate < 0.1


def test_warm_up_begins_with_two_steps_at_no_learning_rate(zero_pools: Pools) -> None:
    (rates,) = zero_pools(1).run(learning_rates, world_size=1)
    assert len(rates) == 20
    assert rates[:2] == [0, 0]
    # Then it is logarithmic, in place of linear: half way after the next step.
    assert rates[2] == pytest.approx(RECIPE_LR / 2)
    assert max(rates) == rates[4] == RECIPE_LR
    assert rates[5:] == sorted(rates[5:], reverse=True) and rates[-1] < RECIPE_LR / 100


def test_deepspeed_clips_and_overlooks_unless_told(
    zero_pools: Pools, tmp_path: Path
) -> None:
    (found,) = zero_pools(1).run(settings_nobody_asked_for, str(tmp_path), world_size=1)
    assert found["clipping"] == 1.0
    # A misspelt key leaves the default in force, and nobody is told.
    assert found["stages"] == [0, 2, 0]  # the key misspelt, right, without "stage"
    assert (found["adam"], found["adam, told"]) == ("AdamW", "Adam")
    assert found["overlooked"] == (None, False, 3e-3)
    # Only without a key that it needs it complains, of that one.
    words = "Either train_batch_size or train_micro_batch_size_per_gpu needs to be"
    assert found["needed"] == f"{words} provided"
    # One further inside is an error.
    assert len(found["nested, refused"]) == 3
    for said in found["nested, refused"]:
        assert re.search(r"\nstge\n +Extra inputs are not permitted", said)
    # Clipped to a norm of 1.0, and with 0 not clipped.
    assert len(found["moved"]) == 8
    for stage in range(4):
        assert found["moved"][stage, None] == pytest.approx(1, rel=1e-4)
        assert found["moved"][stage, 0] == pytest.approx(8, rel=1e-4)
    assert found["problem"] == (
        "unknown key 'zero_optimisation'; did you mean 'zero_optimization'?"
    )
    assert (
        found["nested"]
        == "zero_optimization: unknown key 'stge'; did you mean 'stage'?"
    )
    assert found["no object"] == [
        f"{section}{text} is no JSON object, {{...}}"
        for text in ("[]", "5", "null", '"auto"')
        for section in ("", "zero_optimization: ")
    ]
    assert found["own"] == [""] * 5


@pytest.mark.parametrize(
    ("value", "stage", "ranks", "each"),
    [
        (2, 0, 8, 16),
        (2, 1, 2, 2 + 2 + 12 / 2),
        (2, 2, 2, 2 + (2 + 12) / 2),
        (2, 3, 2, (2 + 2 + 12) / 2),
        (2, 3, 8, 4),  # less is kept, but each rank reads all weights in fp32
        (4, 0, 2, 4 + 4 + 8),
        (4, 1, 2, 4 + 4 + 12 / 2),
    ],
)
def test_bytes_per_rank(value: int, stage: int, ranks: int, each: float) -> None:
    count = load_chapter(CHAPTER)["pretrained"].bytes_per_rank
    assert count(1000, value, stage, ranks) == 1000 * each


def test_a_model_that_cannot_be_trained_is_named_in_one_line(
    zero_pools: Pools, tmp_path: Path
) -> None:
    (said,) = zero_pools(1).run(answers, str(tmp_path), world_size=1)
    assert said == {
        "good": "",
        "no tokenizer": "no tokenizer there; tokenizer.save_pretrained writes one",
        "no output layer": "Qwen2Model is not a causal language model",
        "cut": "the weights are missing or damaged",
        "empty": "no checkpoint in that folder, that transformers can read",
        "nothing": "there is no such folder",
        "too large": "has 427,136 parameters: stage 1 on 2 rank(s) takes 0.00427 GB on "
        "each for weights, gradients and optimizer state, and 0.001 GB are free for "
        "each; a model of 100,000 parameters would fit, or use a higher stage or more "
        "machines",
    }
