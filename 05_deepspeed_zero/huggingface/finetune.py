"""Fine-tune a causal language model: Trainer with ZeRO stage 3, saved and resumed.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/huggingface/finetune.py --out=FOLDER
Expect: the loss on held-out text falls. Run again, it resumes from the newest whole
    checkpoint. FOLDER/model is what `from_pretrained` reads.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar

from deepspeed_setup import SETUP_OPTIONS, join, leave, prepare
from qwen import small_model
from ranks import fail, number, read_options
from text import read_tokens

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",  # what TrainingArguments say
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,  # save_model needs it
    },
}


def arguments_for(options: argparse.Namespace) -> TrainingArguments:
    """Describe the run. While this object lives, `from_pretrained` builds in shards."""
    return TrainingArguments(
        output_dir=str(options.out),
        deepspeed=CONFIG,
        use_cpu=not torch.accelerator.is_available(),
        bf16=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=options.epochs,
        learning_rate=1e-3,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        eval_strategy="epoch",
        save_steps=10,
        save_total_limit=2,  # the older one stays until the newer is written
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
    )


def blocks_of(tokens: list[int], length: int) -> list[dict[str, torch.Tensor]]:
    """Cut tokens into samples of equal length; the model shifts the labels itself."""
    blocks = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)
    return [{"input_ids": block, "labels": block} for block in blocks]


def last_complete(folder: Path) -> str | None:
    """Return the newest checkpoint that is complete, if there is one."""
    whole = []
    # Rank 0 writes this file after all shards, but waits for no other's random state.
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        shards = list(state.parent.glob("*/*_optim_states.pt"))
        if len(list(state.parent.glob("rng_state*.pth"))) == len(shards):
            whole.append(state.parent)
    newest = max(whole, key=lambda one: int(one.name.split("-")[1]), default=None)
    return str(newest) if newest else None


def main(options: argparse.Namespace) -> None:
    """Train or resume, evaluate, and save the whole model."""
    disable_progress_bar()
    tokens, tokenizer, positions = read_tokens()[:20_000].tolist(), None, 1 << 20
    if bool(options.model) != bool(options.text):
        fail("--model and --text belong together")
    if options.model:
        try:
            tokenizer = AutoTokenizer.from_pretrained(options.model)
            tokens = tokenizer(options.text.read_text("utf-8"))["input_ids"]
            config = AutoConfig.from_pretrained(options.model)
            positions = getattr(config, "max_position_embeddings", positions)
        except Exception as error:  # whatever the tokenizer's class trips over
            fail(f"--model {options.model} --text {options.text}: {str(error)[:99]}")
    if options.length > positions:
        fail(f"--model {options.model} has {positions} positions: a smaller --length")
    if (options.out / "model").exists():
        fail(f"{options.out} holds a run that has ended: choose another --out")
    # Another model or text would go on from the checkpoint of this one.
    run = f"--model={options.model} --text={options.text} --length={options.length}"
    note = options.out / "options.txt"
    if note.exists() and (begun := note.read_text()) != run:
        fail(f"{options.out} holds a run of {begun}: choose another --out")
    if len(blocks := blocks_of(tokens, options.length)) < 10:
        fail(f"{len(tokens)} tokens are too few: more text, or a smaller --length")
    prepare(CONFIG)
    join()
    options.out.mkdir(parents=True, exist_ok=True)
    draft = note.with_suffix(f".{os.environ['RANK']}")
    draft.write_text(run)
    draft.replace(note)  # whole; all have read the old one, for they have joined
    arguments = arguments_for(options)  # before the model
    load = AutoModelForCausalLM.from_pretrained
    model = load(options.model, dtype="bfloat16") if options.model else small_model()
    held_out, train_set = blocks[: len(blocks) // 10], blocks[len(blocks) // 10 :]
    trainer = Trainer(
        model, arguments, None, train_set, held_out, processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=last_complete(options.out))
    trainer.save_model(str(options.out / "model"))
    leave()


if __name__ == "__main__":
    main(
        read_options(
            out={"type": Path, "required": True, "metavar": "FOLDER"},
            model={"metavar": "PATH_OR_NAME", "help": "with a tokenizer"},
            text={"type": Path, "help": "what to train that model on"},
            epochs={"type": number(1, 1000), "default": 2},
            length={"type": number(2, 1 << 20), "default": 64},
            **SETUP_OPTIONS,
        )
    )
