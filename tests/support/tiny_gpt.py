"""A GPT and batches that take milliseconds, for the tests of chapters from 03 on."""

import random
from pathlib import Path
from typing import Any

import torch

from scripts import load_chapter

CHAPTER = "03_ddp_torchrun"
T = 16  # tokens in a sample


def module(name: str) -> Any:
    """Import a module of chapter 03."""
    return load_chapter(CHAPTER)[name]


def write_text(path: Path) -> Path:
    """Write a text of 20,000 bytes; return its path."""
    words = random.Random(0).choices(["rank", "ring", "send", "receive", "\n"], k=4000)
    path.write_text(" ".join(words))
    return path


def write_tokenizer(folder: Path) -> Any:
    """Save a tokenizer beside a checkpoint: a token is a byte, under another number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(folder)
    return fast


def tiny_model(dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """Build the chapter's model, always with the same weights."""
    model = module("model")
    torch.manual_seed(7)
    defaults = {"block_size": T, "width": 16, "layers": 1, "heads": 2}
    return model.GPT(model.GPTConfig(**defaults | sizes)).to(dtype)


def make_batches(count: int, samples: int) -> list[list[torch.Tensor]]:
    """Draw `count` batches of (indices, inputs, labels), the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    windows = torch.randint(256, (count, samples, T + 1), generator=generator)
    return [[torch.arange(samples), w[:, :-1], w[:, 1:]] for w in windows]
