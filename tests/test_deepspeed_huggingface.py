"""Chapter 05: accelerate, Trainer and from_pretrained, and what they do on a CPU."""

import contextlib
import functools
import io
import itertools
import json
import re
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch import ROOT
from lessons import in_the_pool
from pages import words_of
from scripts import load_chapter
from tiny_gpt import write_text, write_tokenizer
from worker_pool import WorkerPool
from zero_ranks import Pools, forget_earlier_group

ROOM, CLASSIFIER = "05_deepspeed_zero/huggingface", "SequenceClassification"
OWN_CLASSIFIER = f"{CLASSIFIER} whose forward takes no **kwargs"
STAGE_2 = {"stage": 2}
SILENT: Any = {"report_to": [], "dataloader_pin_memory": False, "disable_tqdm": True}
PARAMS = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
IN_CONFIG = {"type": "AdamW", "params": PARAMS}


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
        elif mistake == "nothing is loaded":
            plain = module.Accelerator
            stack.enter_context(mock.patch.object(plain, "load_state", lambda *_: None))
        elif mistake == "nobody tells Trainer of the CPU":
            train = module.train_with_trainer
            stack.enter_context(
                mock.patch.object(
                    module, "train_with_trainer", lambda use_cpu: train(False)
                )
            )
        elif mistake == "each rank keeps its own gradients":
            from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

            keep = mock.Mock()
            stack.enter_context(
                mock.patch.object(DeepSpeedZeroOptimizer, "average_tensor", keep)
            )
        elif mistake == "norms decay too":
            stack.enter_context(mock.patch.dict(module.CONFIG, optimizer=IN_CONFIG))
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


def train_and_accumulate(accumulates: bool) -> dict[str, Any]:
    """Train in fp32 with two accumulation steps, and with batches twice as large."""
    forget_earlier_group()
    module: Any = load_chapter(ROOM)["with_accelerate"]
    module.prepare(module.CONFIG)
    config = module.CONFIG | {"bf16": {"enabled": False}}
    samples = torch.arange(module.SAMPLES)[:, None] + torch.zeros(16, dtype=torch.long)
    found: dict[str, Any] = {}
    for steps, batch_size in ((2, 4), (1, 8)):
        named = [module.InitProcessGroupKwargs(backend="gloo")]
        settings = {"gradient_accumulation_steps": steps, "kwargs_handlers": named}
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(module, "CONFIG", config))
            stack.enter_context(mock.patch.object(module, "BATCH_SIZE", batch_size))
            if not accumulates:
                skip = mock.patch.object(
                    module.Accelerator, "accumulate", contextlib.nullcontext
                )
                stack.enter_context(skip)
            _, engine, seen = module.train_with_accelerate(samples, **settings)
        module.AcceleratorState._reset_state(reset_partial_state=True)
        found[f"{steps} reported"] = engine.gradient_accumulation_steps()
        found[f"{steps} batches"] = len(seen) // batch_size
        found[f"{steps} steps"] = engine.global_steps
        found[f"{steps} weights"] = torch.cat(
            [p.detach().flatten() for p in engine.parameters()]
        )
    return found


def rates_of_a_schedule(
    prepared: str, split_batches: bool = False, **settings: Any
) -> list[float]:
    """Take three steps under accelerate; return the rates of a schedule of six."""
    forget_earlier_group()
    module: Any = load_chapter(ROOM)["with_accelerate"]
    module.prepare(module.CONFIG)
    plugin = module.DeepSpeedPlugin(hf_ds_config=module.CONFIG)
    named = [module.InitProcessGroupKwargs(backend="gloo")]
    from accelerate import DataLoaderConfiguration

    settings["dataloader_config"] = DataLoaderConfiguration(split_batches=split_batches)
    accelerator = module.Accelerator(
        deepspeed_plugin=plugin, kwargs_handlers=named, **settings
    )
    model: Any = module.small_model()
    samples: Any = torch.ones(24, 4, dtype=torch.long)
    adamw = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(adamw, lambda n: 1 - n / 6)
    if "DeepSpeed's" in prepared:
        from deepspeed.runtime.lr_schedules import LRRangeTest

        schedule = LRRangeTest(adamw, 1.0, 1, -1 / 6)  # the same rates
    loader = torch.utils.data.DataLoader(samples, batch_size=4)
    with_model = [schedule] if "with the model" in prepared else []
    parts = accelerator.prepare(model, adamw, loader, *with_model)
    schedule = parts[-1] if with_model else schedule
    schedule = accelerator.prepare(schedule) if prepared == "alone" else schedule
    rates = []
    for batch in itertools.islice(parts[2], 3):
        accelerator.backward(parts[0](input_ids=batch, labels=batch).loss)
        schedule.step()
        rates += schedule.get_last_lr()
    module.AcceleratorState._reset_state(reset_partial_state=True)
    return rates


class FirstStep(NamedTuple):
    """Trainer's first step by one process's: loss and gradient norm, `eval_loss`.

    And which files it saves.
    """

    times: list[float]
    evaluated: float
    saved: set[str]


OTHER_LANGUAGE = BART, MIXTURE, GPT_2, FIRST_MASKED = (
    "BartForCausalLM",
    "a mixture with a balance loss",
    "GPT-2",
    "GPT-2 with first labels of -100",
)
OWN_MEANS = "compute_loss", "compute_loss_func"


def language_model(kind: str, **settings: Any) -> Any:
    """Make BART's decoder, GPT-2, or a mixture whose loss is nearly all balance."""
    import transformers

    if kind == BART:
        sizes: Any = {"d_model": 8, "decoder_ffn_dim": 8, "vocab_size": 256}
        layers: Any = {"decoder_layers": 1, "decoder_attention_heads": 2}
        config = transformers.BartConfig(
            **sizes, **layers, is_decoder=True, is_encoder_decoder=False, dropout=0.0
        )
        return transformers.BartForCausalLM(config)
    if kind in (GPT_2, FIRST_MASKED):
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 256}
        drops: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 256}
    layers = {"num_hidden_layers": 1, "num_local_experts": 4}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 1}
    balance: Any = {"output_router_logits": True, "router_aux_loss_coef": 1000.0}
    config = transformers.MixtralConfig(
        **sizes, **layers, **heads, **(balance | settings)
    )
    return transformers.MixtralForCausalLM(config)


def first_step_of_trainer(
    kind: str, mends: bool = True, steps: int = 1, averages: bool = True, **zero: Any
) -> FirstStep:
    """Take Trainer's first step under ZeRO, or DDP, evaluate and save the model."""
    from transformers import PrinterCallback, Trainer, TrainingArguments
    from transformers.models.qwen2 import modeling_qwen2

    forget_earlier_group()
    modules: Any = load_chapter(ROOM)
    module = modules["with_trainer"]
    deepspeed = module.CONFIG | {"zero_optimization": zero} if zero else None
    module.prepare(module.CONFIG)
    config = modules["qwen"].small_config()
    config.num_labels, config.pad_token_id = 3, 0
    own_mean, kind = kind, "CausalLM" if kind in OWN_MEANS else kind

    class OwnForSequenceClassification(modeling_qwen2.Qwen2ForSequenceClassification):
        def forward(self, input_ids: Any, labels: Any = None) -> Any:  # type: ignore
            return super().forward(input_ids=input_ids, labels=labels)

    def mean_of(outputs: Any, labels: Any, **_: Any) -> torch.Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())

    class OwnMean(Trainer):
        def compute_loss(  # type: ignore
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            loss = mean_of(outputs, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    torch.manual_seed(0)
    own = {OWN_CLASSIFIER: OwnForSequenceClassification}
    model: Any = own.get(kind) or getattr(modeling_qwen2, f"Qwen2For{kind}", None)
    name, rows = "input_ids", torch.randint(1, 256, (16, 8))
    labels = rows if kind in ("CausalLM", *OTHER_LANGUAGE) else rows[:, 0] % 3
    if kind == FIRST_MASKED:
        labels = torch.cat([torch.full((16, 1), -100), rows[:, 1:]], 1)
    if model:
        model = model(config)
    elif kind in OTHER_LANGUAGE:
        model = language_model(kind)
    else:
        from transformers import ViTConfig, ViTForImageClassification

        sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "image_size": 8}
        layers: Any = {
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "num_labels": 3,
        }
        config = ViTConfig(**sizes, **layers, patch_size=4)
        model, name = ViTForImageClassification(config), "pixel_values"
        rows = torch.randn(16, 3, 8, 8)
    loss = model(**{name: rows}, labels=labels).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    due = [loss.item(), torch.nn.utils.get_total_norm(gradients).item()]
    model.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            deepspeed=deepspeed,
            use_cpu=True,
            per_device_train_batch_size=16 // dist.get_world_size() // steps,
            per_device_eval_batch_size=16 // dist.get_world_size(),
            gradient_accumulation_steps=steps,
            average_tokens_across_devices=averages,
            max_steps=1,
            learning_rate=0.0,
            logging_steps=1,
            save_strategy="no",
            **SILENT,
        )
        pairs = zip(rows, labels, strict=True)
        dataset: Any = [{name: row, "labels": label} for row, label in pairs]
        if mends and kind == GPT_2:
            model.loss_type = "ForCausalLM"
        make: Any = {"compute_loss": OwnMean}.get(own_mean, Trainer)
        func: Any = {"compute_loss_func": mean_of}.get(own_mean)
        trainer = make(model, arguments, None, dataset, dataset, compute_loss_func=func)
        trainer.remove_callback(PrinterCallback)
        if mends and kind != GPT_2:
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
        log = trainer.state.log_history[0]
        evaluated = trainer.evaluate()["eval_loss"] / due[0]
        trainer.save_model(f"{folder}/saved")
        saved = {path.name for path in Path(folder, "saved").glob("*")}
    module.AcceleratorState._reset_state(reset_partial_state=True)
    times = [log["loss"] / due[0], log["grad_norm"] / due[1]]
    return FirstStep(times, evaluated, saved)


def trained_after(evaluation: str, **zero: Any) -> tuple[str, float]:
    """Evaluate and train with Trainer; return the wrapper's class and the weights' sum.

    In place of the class stands the error, if it ends with one.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments

    forget_earlier_group()
    module: Any = load_chapter(ROOM)["with_trainer"]
    module.prepare(module.CONFIG)
    torch.manual_seed(0)
    model = language_model(GPT_2)
    rows: Any = [{"input_ids": row, "labels": row} for row in torch.arange(96).split(6)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            deepspeed=module.CONFIG | {"zero_optimization": zero} if zero else None,
            use_cpu=True,
            per_device_train_batch_size=4,
            max_steps=2,
            learning_rate=0.01,
            eval_on_start=evaluation == "eval_on_start",
            eval_strategy="steps" if evaluation == "eval_on_start" else "no",
            save_strategy="no",
            **SILENT,
        )
        trainer = Trainer(model, arguments, None, rows, rows)
        trainer.remove_callback(PrinterCallback)
        try:
            if evaluation == "evaluate()":
                trainer.evaluate()
            trainer.train()
            said = type(trainer.model_wrapped).__name__
        except ValueError as error:
            said = str(error)
    module.AcceleratorState._reset_state(reset_partial_state=True)
    weights = [p.double().sum() for p in model.parameters()]
    return said, torch.stack(weights).sum().item()


def decay_under_trainer(samples: int = 48, drops: bool = False, **more: Any) -> Any:
    """Train with much weight decay; return norms, rates, samples and the optimizer.

    A norm is 1 at first, and Adam alone moves it by 4 % at most. Of the optimizer it
    returns its groups' weight decay and its class.
    """
    forget_earlier_group()
    module: Any = load_chapter(ROOM)["with_trainer"]
    module.prepare(module.CONFIG)
    told = functools.partial(module.TrainingArguments, dataloader_drop_last=drops)
    config = module.CONFIG | more
    values = {"CONFIG": config, "TrainingArguments": told, "SAMPLES": samples}
    with mock.patch.multiple(module, **values, RATE=1e-2, DECAY=10.0):
        trainer, _, seen = module.train_with_trainer(True)
    *log, _ = trainer.state.log_history
    names = trainer.model.named_parameters()
    norms = [p.mean().item() for name, p in names if "norm" in name]
    optimizer = trainer.model_wrapped.optimizer.optimizer
    rates = [step["learning_rate"] for step in log]
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    return norms, rates, seen, decays, type(optimizer).__name__


def adam_of_trainer(**more: Any) -> str:
    """Return the class of the optimizer that accelerate gives to DeepSpeed."""
    from accelerate.state import AcceleratorState
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # It would be compiled now.
    compiles = mock.Mock(side_effect=NotImplementedError)
    with mock.patch.object(DeepSpeedCPUAdam, "__init__", compiles):
        try:
            return decay_under_trainer(**more)[-1]
        except NotImplementedError:
            return "DeepSpeedCPUAdam"
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def evaluate_with_trainer(
    use_cpu: bool, samples: int = 12
) -> tuple[float, list[float]]:
    """Return Trainer's `eval_loss` of padded samples, 2 at a time on a rank.

    And the mean over batches of 2, 4 and all, each the mean over its tokens: weighted
    by samples, and last for batches of 2 that count as much.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments

    forget_earlier_group()
    modules: Any = load_chapter(ROOM)
    modules["with_trainer"].prepare({})
    model, numbers = modules["qwen"].small_model().eval(), torch.arange(samples)
    seeded = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 256, (samples, 16), generator=seeded)
    # The later a sample comes, the shorter it is.
    labels = rows.masked_fill(torch.arange(16) > 15 - numbers[:, None], -100)
    due, alike = [], []
    for count in (2, 4, samples):
        batches = zip(rows.split(count), labels.split(count), strict=True)
        with torch.no_grad():
            losses = [
                (model(input_ids=x, labels=y).loss.item(), len(x)) for x, y in batches
            ]
        due.append(sum(loss * of_batch for loss, of_batch in losses) / samples)
        alike.append(sum(loss for loss, _ in losses) / len(losses))
    pairs = zip(rows, labels, strict=True)
    dataset: Any = [{"input_ids": row, "labels": label} for row, label in pairs]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=use_cpu,
            per_device_eval_batch_size=2,
            **SILENT,
        )
        trainer = Trainer(model, arguments, eval_dataset=dataset)
        trainer.remove_callback(PrinterCallback)
        found = trainer.evaluate()["eval_loss"]
    modules["with_trainer"].AcceleratorState._reset_state(reset_partial_state=True)
    return found, [*due, alike[0]]


def save_with_accelerate(folder: str, stage: int, gathers: bool) -> str:
    """Train, save and load; return an error's text, and leave the weights in a file."""
    forget_earlier_group()
    module: Any = load_chapter(ROOM)["with_accelerate"]
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": gathers}
    config = module.CONFIG | {"zero_optimization": zero}
    module.prepare(config)
    samples = torch.arange(module.SAMPLES)[:, None] + torch.zeros(16, dtype=torch.long)
    named = [module.InitProcessGroupKwargs(backend="gloo")]
    with mock.patch.object(module, "CONFIG", config):
        accelerator, engine, _ = module.train_with_accelerate(
            samples, kwargs_handlers=named
        )
    try:
        if stage == 3:  # a rank has no whole weights to compare
            accelerator.save_state(folder)
            accelerator.save_model(engine, f"{folder}/weights")
            accelerator.load_state(folder)
        else:
            assert module.save_and_load(accelerator, engine, folder)
            weights = {n: p.detach() for n, p in engine.module.named_parameters()}
            torch.save(weights, f"{folder}/expected{accelerator.process_index}")
    except ValueError as error:
        return str(error)
    finally:
        module.AcceleratorState._reset_state(reset_partial_state=True)
    return ""


def from_pretrained_as_it_comes(folder: str) -> tuple[list[bool], list[int]]:
    """Load a checkpoint, enable activation checkpointing, and give it to DeepSpeed.

    Returns whether engine and module are in training, and the bytes that forward keeps
    as the model comes, with checkpointing, and after `train()`.
    """
    forget_earlier_group()
    modules = load_chapter("05_deepspeed_zero")
    memory = load_chapter("05_deepspeed_zero/memory")["activation_checkpointing"]
    import deepspeed
    from transformers import AutoModelForCausalLM

    modules["qwen"].small_model().save_pretrained(folder)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    }
    modules["deepspeed_setup"].prepare(config)
    load = functools.partial(AutoModelForCausalLM.from_pretrained, folder)
    model, tokens = load(), torch.arange(64).view(1, 64)
    kept = [memory.count_bytes(model, tokens)[0]]
    for change in (model.activation_checkpointing_enable, model.train):
        change()
        kept.append(memory.count_bytes(model, tokens)[0])
    engine: Any = deepspeed.initialize(model=load(), config=config)[0]
    modes = [engine.training, engine.module.training]
    engine.destroy()
    return modes, kept


def finetune(folder: str, resumes: bool = True, **options: Any) -> str:
    """Be one rank of finetune.py, which keeps all checkpoints; return an error."""
    forget_earlier_group()
    module: Any = load_chapter(ROOM)["finetune"]
    words = {"model": None, "text": None, "epochs": 1, "length": 96}
    plain = module.arguments_for

    def keep_all(options: Any) -> Any:
        arguments = plain(options)
        arguments.save_total_limit = None
        return arguments

    from accelerate.state import AcceleratorState
    from deepspeed.runtime.zero.partition_parameters import shutdown_init_context
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    try:
        with in_the_pool(module), contextlib.ExitStack() as stack:
            for name, other in [
                ("arguments_for", keep_all),
                *([] if resumes else [("last_complete", lambda _: True)]),
            ]:
                stack.enter_context(mock.patch.object(module, name, other))
            module.main(Namespace(out=Path(folder), **words | options))
    except OSError as error:
        return str(error)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        # Or these workers would build the next model in shards.
        shutdown_init_context()
        unset_hf_deepspeed_config()
    return ""


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


def test_without_accumulate_every_batch_takes_a_step_and_nobody_says_so(
    zero_pools: Pools,
) -> None:
    wrong = zero_pools(2).run(train_and_accumulate, False, world_size=2)
    right = zero_pools(2).run(train_and_accumulate, True, world_size=2)
    assert len(wrong) == len(right) == 2
    for found, steps in ((wrong, 6), (right, 3)):
        assert len(found) == 2
        for of_rank in found:
            assert of_rank["2 reported"] == 2
            assert (of_rank["2 batches"], of_rank["2 steps"]) == (6, steps)
            # With one accumulation step it makes no difference.
            assert (of_rank["1 batches"], of_rank["1 steps"]) == (3, 3)
            apart = (of_rank["2 weights"] - of_rank["1 weights"]).abs().max().item()
            assert apart < 2e-5 if steps == 3 else apart > 1e-3
    page = words_of(ROOM)
    assert "reports 2 and still steps after every batch." in page


@pytest.mark.parametrize(
    ("prepared", "each", "settings"),
    [
        ("with the model", 2, {}),
        ("with the model", 1, {"step_scheduler_with_optimizer": False}),
        ("with the model", 1, {"split_batches": True}),
        ("DeepSpeed's, with the model", 1, {}),
        pytest.param("alone", 1, {}, marks=pytest.mark.slow),
        pytest.param("not at all", 1, {}, marks=pytest.mark.slow),
    ],
)
def test_a_schedule_given_to_prepare_takes_a_step_for_each_rank(
    zero_pools: Pools, prepared: str, each: int, settings: dict[str, Any]
) -> None:
    job = functools.partial(rates_of_a_schedule, prepared, **settings)
    found = zero_pools(2).run(job, world_size=2)
    due = [1 - each * step / 6 for step in (1, 2, 3)]
    assert [pytest.approx(rates) for rates in found] == [due] * 2
    assert "PyTorch's schedules advance by default by the number" in words_of(ROOM)


@pytest.mark.parametrize(
    ("kind", "mends", "steps", "more", "factor", "evaluated"),
    [
        (CLASSIFIER, False, 2, STAGE_2, 4, 2),
        (CLASSIFIER, True, 2, STAGE_2, 1, 1),
        (OWN_CLASSIFIER, False, 2, STAGE_2, 1, 1),
        ("ViT", False, 2, STAGE_2, 1, 1),
        (BART, False, 2, STAGE_2, 4, 2),
        (CLASSIFIER, False, 2, STAGE_2 | {"averages": False}, 2, 1),
        pytest.param(CLASSIFIER, False, 1, STAGE_2, 2, 2, marks=pytest.mark.slow),
        pytest.param(CLASSIFIER, False, 2, {}, 4, 2, marks=pytest.mark.slow),
        pytest.param(CLASSIFIER, True, 2, {}, 1, 1, marks=pytest.mark.slow),
        pytest.param("CausalLM", False, 2, STAGE_2, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_classifier_s_gradients_are_too_large_under_trainer(
    zero_pools: Pools,
    kind: str,
    mends: bool,
    steps: int,
    more: dict[str, Any],
    factor: float,
    evaluated: float,
) -> None:
    """By ranks and by accumulation steps, unless one line mends it.

    Or unless `forward` takes no `**kwargs`, as Trainer then tells it nothing, or passes
    them on to the loss, which divides by the number it is told.
    """
    step = functools.partial(first_step_of_trainer, **more)
    found = zero_pools(2).run(step, kind, mends, steps, world_size=2)
    assert [pytest.approx(of.times, rel=1e-4) for of in found] == [[factor] * 2] * 2
    assert [of.evaluated for of in found] == [pytest.approx(evaluated, rel=1e-4)] * 2
    page = words_of(ROOM)
    assert "that its loss does not get (BERT's classifiers, BART), loss and" in page


@pytest.mark.parametrize(("mends", "factor"), [(False, 4), (True, 1)])
def test_a_balance_loss_is_too_large_under_trainer(
    zero_pools: Pools, mends: bool, factor: float
) -> None:
    step = functools.partial(first_step_of_trainer, **STAGE_2)
    found = zero_pools(2).run(step, MIXTURE, mends, 2, world_size=2)
    # By ranks and steps, nearly: a batch's balance is not the mean of its parts'.
    assert [of.times[0] for of in found] == [pytest.approx(factor, rel=0.1)] * 2


@pytest.mark.parametrize(
    ("kind", "mends", "factor"),
    [(GPT_2, False, 7 / 8), (GPT_2, True, 1), (FIRST_MASKED, False, 1)],
)
def test_trainer_counts_gpt_2_s_first_labels(
    zero_pools: Pools, kind: str, mends: bool, factor: float
) -> None:
    from transformers.models.auto import modeling_auto

    step = functools.partial(first_step_of_trainer, **STAGE_2)
    found = zero_pools(2).run(step, kind, mends, 2, world_size=2)
    numbers = [[*of.times, of.evaluated] for of in found]
    assert numbers == [pytest.approx([factor] * 3, rel=1e-4)] * 2
    # What it looks for in the class's name, most have.
    names = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    others = {name for name in names if "ForCausalLM" not in name}
    assert "GPT2LMHeadModel" in others and len(names) > 10 * len(others)
    assert 'set `model.loss_type = "ForCausalLM"` before `Trainer`' in words_of(ROOM)


@pytest.mark.parametrize(
    ("means", "mends", "factor", "evaluated"),
    [
        ("compute_loss", False, 2, 1),
        ("compute_loss", True, 1, 1),
        ("compute_loss_func", True, 4, 2),
    ],
)
def test_a_mean_of_your_own_is_too_large_under_trainer(
    zero_pools: Pools, means: str, mends: bool, factor: float, evaluated: float
) -> None:
    """By accumulation steps, and as a function by ranks as well."""
    step = functools.partial(first_step_of_trainer, **STAGE_2)
    found = zero_pools(2).run(step, means, mends, 2, world_size=2)
    assert [pytest.approx(of.times, rel=1e-4) for of in found] == [[factor] * 2] * 2
    assert [of.evaluated for of in found] == [pytest.approx(evaluated, rel=1e-4)] * 2


@pytest.mark.parametrize(
    ("evaluation", "more", "wrapper", "is_one_model"),
    [
        ("evaluate()", {}, "GPT2LMHeadModel", False),
        ("eval_on_start", {}, "DistributedDataParallel", True),
        ("evaluate()", STAGE_2, "ZeRO inference only makes sense with ZeRO S", True),
        pytest.param("", {}, "DistributedDataParallel", True, marks=pytest.mark.slow),
        pytest.param(
            *("evaluate()", {"stage": 1}, "ZeRO inference only makes sense", True),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_trainer_sends_no_gradient_if_it_has_evaluated_first(
    zero_pools: Pools,
    evaluation: str,
    more: dict[str, Any],
    wrapper: str,
    is_one_model: bool,
) -> None:
    job = functools.partial(trained_after, evaluation, **more)
    (said, one), (_, other) = zero_pools(2).run(job, world_size=2)
    assert said.startswith(wrapper)
    assert (one == other) is is_one_model


@pytest.mark.parametrize("is_in_config", [False, True])
def test_an_optimizer_in_the_config_lets_norms_decay_under_trainer(
    zero_pools: Pools, is_in_config: bool
) -> None:
    config = {"optimizer": IN_CONFIG} if is_in_config else {}
    job = functools.partial(decay_under_trainer, **config)
    (norms, rates, _, decays, _), (other, *_) = zero_pools(2).run(job, world_size=2)
    assert decays == ([10] if is_in_config else [10, 0])
    assert norms == other and len(norms) == 5
    assert max(norms) < 0.8 if is_in_config else min(norms) > 0.95
    # What is logged is the rate of the step before, or of the one to come.
    first = 1 if is_in_config else 0
    assert rates == pytest.approx([1e-2 * (1 - (i + first) / 6) for i in range(6)])


@pytest.mark.slow
@pytest.mark.parametrize("forces", [True, False])
def test_accelerate_replaces_trainer_s_adam_if_it_is_offloaded(
    zero_pools: Pools, forces: bool
) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    more: Any = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": forces}
    job = functools.partial(adam_of_trainer, **more)
    name = "DeepSpeedCPUAdam" if forces else "AdamW"
    assert zero_pools(2).run(job, world_size=2) == [name] * 2


@pytest.mark.parametrize("drops", [False, True])
def test_trainer_fills_the_last_batch_with_samples_from_the_start(
    zero_pools: Pools, drops: bool
) -> None:
    job = functools.partial(decay_under_trainer, samples=52, drops=drops)
    ends = zero_pools(2).run(job, world_size=2)
    seen = [number for _, _, of_rank, *_ in ends for number in of_rank]
    twice = {number for number in seen if seen.count(number) == 2}
    assert (len(seen), len(set(seen))) == ((48, 48) if drops else (56, 52))
    assert len(twice) == len(seen) - len(set(seen))


def test_trainer_s_eval_loss_depends_on_the_number_of_ranks(zero_pools: Pools) -> None:
    run = functools.partial(zero_pools(2).run, evaluate_with_trainer, world_size=2)
    (one, due), (other, _) = run(False)  # each rank believes that it is alone
    (two, _), (again, _) = run(True)
    assert one == other and two == again
    assert [one, two] == pytest.approx(due[:2], rel=1e-5)
    apart = [abs(a - b) for a, b in itertools.combinations(due[:3], 2)]
    assert len(apart) == 3 and min(apart) > 1e-3
    # A full batch counts as much as any other, an incomplete one by its samples.
    assert due[3] == pytest.approx(due[0])
    (one, due), _ = run(False, 11)
    assert one == pytest.approx(due[0], rel=1e-5)
    assert abs(one - due[3]) > 1e-3


def test_from_pretrained_leaves_a_model_that_keeps_all_activations(
    zero_pools: Pools, tmp_path: Path
) -> None:
    ((modes, kept),) = zero_pools(1).run(
        from_pretrained_as_it_comes, str(tmp_path), world_size=1
    )
    assert modes == [True, False]
    plain, enabled, training = kept
    assert enabled == plain > 1.5 * training
    page = words_of("05_deepspeed_zero/memory")
    assert "call `model.train()`, which `from_pretrained` does not, and" in page


@pytest.mark.slow
@pytest.mark.parametrize("gathers", [False, True])
def test_trainer_saves_no_weights_in_stage_3_unless_told(gathers: bool) -> None:
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": gathers}
    step = functools.partial(first_step_of_trainer, **zero)
    # Workers of its own: the next model in them would be built in shards.
    with WorkerPool(2) as workers:
        (of_rank_0, _) = workers.run(step, CLASSIFIER, world_size=2)
    assert of_rank_0.times == pytest.approx([1, 1], rel=1e-4)
    assert ("model.safetensors" in of_rank_0.saved) == gathers
    assert "config.json" in of_rank_0.saved


def test_accelerate_saves_shards_to_resume_and_one_file_of_weights(
    zero_pools: Pools, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    folder = tmp_path / "stage_2"
    said = zero_pools(2).run(save_with_accelerate, str(folder), 2, False, world_size=2)
    assert said == ["", ""]
    assert len(list(folder.rglob("*optim_states.pt"))) == 2
    saved = load_file(folder / "weights" / "model.safetensors")
    expected = torch.load(folder / "expected0")
    assert len(expected) == 26 and set(expected) <= set(saved)
    for name, tensor in expected.items():
        assert torch.equal(saved[name], tensor), name
    # Stage 3 refuses to gather them unless it is told to.
    for gathers in (False, True):
        folder = tmp_path / f"stage_3_{gathers}"
        said = zero_pools(2).run(
            save_with_accelerate, str(folder), 3, gathers, world_size=2
        )
        refused = "`stage3_gather_16bit_weights_on_model_save` in DeepSpeed config"
        assert [refused in text for text in said] == [not gathers] * 2
    gathered = load_file(folder / "weights" / "model.safetensors")
    # Without the second name of the tied matrix.
    assert {n: t.shape for n, t in gathered.items()} == {
        n: t.shape for n, t in expected.items()
    }


@pytest.mark.parametrize(
    ("option", "ranks"),
    [("--multi_gpu", 2), ("--use_deepspeed", 2), ("--cpu", 1), ("", 1)],
)
def test_without_gpus_accelerate_launch_needs_an_option_for_two_processes(
    option: str, ranks: int
) -> None:
    import torch.distributed.run
    from accelerate.commands import launch

    words = [option] * (option != "") + ["--num_processes=2", "script.py"]
    arguments = launch.launch_command_parser().parse_args(words)
    simple = mock.Mock()
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: False),
        mock.patch.object(torch.cuda, "device_count", lambda: 0),
        mock.patch.object(launch, "default_config_file", "/nowhere"),
        mock.patch.object(launch, "simple_launcher", simple),
        mock.patch.object(torch.distributed.run, "run") as several,
    ):
        launch.launch_command(arguments)
    started = [int(call.args[0].nproc_per_node) for call in several.call_args_list]
    assert (started, simple.call_count) == (([2], 0) if ranks == 2 else ([], 1))
    page = (ROOT / ROOM / "README.md").read_text("utf-8")
    needs = re.search(r"`accelerate launch` needs (.*) for two", page)
    assert needs and (f"`{option}`" in needs[1]) == (ranks == 2)


def test_accelerate_launch_adds_multi_gpu_where_there_are_several() -> None:
    from accelerate.commands import launch

    words = ["--num_processes=2", "script.py"]
    for count in (2, 0):
        arguments = launch.launch_command_parser().parse_args(words)
        with (
            mock.patch.object(torch.cuda, "is_available", lambda n=count: n > 0),
            mock.patch.object(torch.cuda, "device_count", lambda n=count: n),
            mock.patch.object(launch, "default_config_file", "/nowhere"),
        ):
            launch._validate_launch_command(arguments)
        assert arguments.multi_gpu == (count > 1)


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


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def test_finetuning_resumes_from_the_last_complete_checkpoint(
    zero_pools: Pools, tmp_path: Path
) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    modules: Any = load_chapter(ROOM)
    run = functools.partial(zero_pools(2).run, world_size=2)
    assert run(finetune, str(whole)) == ["", ""]
    names = {path.name for path in whole.iterdir()}
    assert names == {"model", "options.txt", "checkpoint-10", "checkpoint-12"}
    words = (whole / "options.txt").read_text()
    assert words == "--model=None --text=None --length=96"
    for step in (10, 12):
        folder = f"checkpoint-{step}"
        shutil.copytree(whole / folder, torn / folder)
    # Rank 0 does not wait until the other one has written its random state.
    late = torn / "checkpoint-12/rng_state_1.pth"
    state = late.read_bytes()
    late.unlink()
    found = modules["finetune"].last_complete(torn)
    assert found == str(torn / "checkpoint-10")
    late.write_bytes(state)
    found = modules["finetune"].last_complete(torn)
    assert found == str(torn / "checkpoint-12")
    # As if all ranks had died in the second checkpoint.
    (torn / "checkpoint-12/trainer_state.json").unlink()
    # Trainer itself would take it.
    ends = run(functools.partial(finetune, resumes=False), str(torn))
    missing = ["checkpoint-12/trainer_state.json" in said for said in ends]
    assert missing == [True, True]
    first = torn / "checkpoint-10"
    assert modules["finetune"].last_complete(torn) == str(first)
    written = (first / "trainer_state.json").stat().st_mtime_ns
    assert run(finetune, str(torn)) == ["", ""]
    # A run from the start would come to the same bits, and write this one again.
    assert (first / "trainer_state.json").stat().st_mtime_ns == written
    saved, resumed = weights_in(whole), weights_in(torn)
    assert len(saved) == len(resumed) == 26
    for name, tensor in saved.items():
        assert torch.equal(tensor, resumed[name]), name
    # Each rank writes its own shard of weights and optimizer state.
    shards = {path.name for path in (torn / "checkpoint-12").rglob("*_pp_rank_*")}
    assert len(shards) == 4
    states = [f / "checkpoint-12/trainer_state.json" for f in (whole, torn)]
    logs = [json.loads(state.read_text())["log_history"] for state in states]
    losses = [[e.get("loss", e.get("eval_loss")) for e in log] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 1  # after 10 steps
    # A checkpoint of one's own, with its tokenizer and a text.
    start, text = tmp_path / "start", write_text(tmp_path / "text")
    config = modules["qwen"].small_config()
    config.vocab_size += 8  # the tokenizer adds some of its own
    modules["qwen"].Qwen2ForCausalLM(config).save_pretrained(start)
    write_tokenizer(start)
    own = {"model": str(start), "text": text, "length": 64}
    assert run(functools.partial(finetune, **own), str(tmp_path / "own")) == ["", ""]
    assert_it_learnt(start, tmp_path / "own/model", text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"text": ROOT / "README.md"}, "--model and --text belong together"),
        ({"model": "/nowhere/at/all"}, "--model and --text belong together"),
        (
            {"model": "/nowhere/at/all", "text": ROOT / "README.md"},
            "--model /nowhere/at/all --text",
        ),
        ({"length": 4000}, "20000 tokens are too few: more text, or a smaller"),
        ({"out": "model"}, " holds a run that has ended: choose another --out"),
        ({"out": "options.txt"}, " holds a run of None None 96: choose another --out"),
        ({"model": "9 positions"}, "9 positions has 9 positions: a smaller --length"),
    ],
)
def test_what_cannot_be_finetuned_is_refused_in_a_line(
    options: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module: Any = load_chapter(ROOM)["finetune"]
    words = {"model": None, "text": None, "epochs": 1, "length": 64, "out": Path("/x")}
    if "out" in options:
        (tmp_path / options["out"]).write_text("None None 96")
        options = {"out": tmp_path}
    elif options.get("model") == "9 positions":
        config = load_chapter(ROOM)["qwen"].small_config()
        config.max_position_embeddings = 9
        config.save_pretrained(folder := tmp_path / "9 positions")
        write_tokenizer(folder)
        options = {"model": str(folder), "text": ROOT / "README.md"}
    with pytest.raises(SystemExit) as error:
        module.main(Namespace(**words | options))
    line = f"{error.value}{capsys.readouterr().err}"
    assert said in line and "\n" not in line.strip()


def test_a_note_of_the_run_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = load_chapter(ROOM)["finetune"]
    write_text = Path.write_text

    def killed_in_mid_write(path: Path, text: str) -> None:
        write_text(path, text[:9])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed_in_mid_write)
    monkeypatch.setenv("RANK", "0")
    words = {"model": None, "text": None, "epochs": 1, "length": 64, "out": tmp_path}
    with (
        in_the_pool(module),
        mock.patch.object(module, "prepare"),
        pytest.raises(KeyboardInterrupt),
    ):
        module.main(Namespace(**words))
    assert [len(path.read_text()) for path in tmp_path.iterdir()] == [9]
    # Half a note would be another run's, and refuse this one.
    assert not (tmp_path / "options.txt").exists()


def assert_it_learnt(start: Path, folder: Path, text: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = []
    for place in (start, folder):
        tokens = AutoTokenizer.from_pretrained(folder)(text.read_text())["input_ids"]
        rows = torch.tensor([tokens[:512]])
        model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        model.config.use_cache = False
        # As many positions as the model has.
        rows = rows[:, : model.config.max_position_embeddings]
        found.append(model(input_ids=rows, labels=rows).loss.item())
    assert found[1] < found[0] - 1, found


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
        ("with_trainer", "each rank keeps its own gradients"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("with_accelerate", "nothing is loaded"),
                ("with_trainer", "nobody tells Trainer of the CPU"),
                ("with_trainer", "norms decay too"),
            )
        ),
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
    # A mixture's balance loss counts the padding on the right, too, without a mask.
    named: Any = {"input_ids": tokens, "labels": labels}
    for has_balance in (False, True):
        torch.manual_seed(0)
        settings = {"output_router_logits": has_balance}
        mixture = language_model(MIXTURE, **settings).eval()
        without, masked = mixture(**named), mixture(**named, attention_mask=padded)
        close = without.loss.item() == pytest.approx(masked.loss.item(), rel=1e-6)
        assert close is not has_balance
