"""DeepSpeed passes over a misspelt key of its config in silence; this does not."""

import difflib
from collections.abc import Iterable
from typing import Any

from start import refuse

# The top-level keys of DeepSpeed's documented training config, of which this chapter
# uses a few: https://www.deepspeed.ai/docs/config-json/
KNOWN = {
    *("train_batch_size", "train_micro_batch_size_per_gpu"),
    *("gradient_accumulation_steps", "optimizer", "scheduler", "gradient_clipping"),
    *("communication_data_type", "prescale_gradients", "gradient_predivide_factor"),
    *("sparse_gradients", "fp16", "bf16", "amp", "torch_autocast", "data_types"),
    *("zero_optimization", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "steps_per_print", "wall_clock_breakdown"),
    *("memory_breakdown", "dump_state", "flops_profiler", "comms_logger", "aio"),
    *("activation_checkpointing", "sparse_attention", "data_efficiency"),
    *("checkpoint", "tensorboard", "wandb", "csv_monitor", "compression_training"),
    *("curriculum_learning", "elasticity", "autotuning", "compile", "log_level"),
    *("tensor_parallel", "sequence_parallel_size", "seed", "disable_allgather"),
}


def unknown_key(config: dict[str, Any]) -> str:
    """Name a key that DeepSpeed does not know, and what may have been meant, or ''."""
    # DeepSpeed itself refuses unknown keys in this section, with four lines of text.
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = config.get("zero_optimization", {})
    sections: list[tuple[str, Iterable[str], Iterable[str]]] = [
        ("", config, KNOWN),
        ("zero_optimization: ", zero, DeepSpeedZeroConfig.model_fields),
    ]
    for section, keys, known in sections:
        for key in keys:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                meant = f"; did you mean {close[0]!r}?" if close else ""
                return f"{section}unknown key {key!r}{meant}"
    return ""


def refuse_unknown_keys(config: dict[str, Any]) -> None:
    """End the program with one line if a key of the config is misspelt."""
    if problem := unknown_key(config):
        refuse(f"config: {problem}")
