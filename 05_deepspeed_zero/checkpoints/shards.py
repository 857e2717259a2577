"""An engine to save and to resume, and the steps before and after."""

import statistics
from typing import Any

import torch
import torch.distributed as dist
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from ranks import gather

MODEL: dict[str, Any] = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2}
MODEL |= {"intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL |= {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}

CONFIG: dict[str, Any] = {
    "train_batch_size": 12,  # of all ranks together, for 1, 2, 3 or 4 of them
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3}},
    "gradient_clipping": 1.0,
}
BLOCK_SIZE = 64
STEPS, SAVED_AT = 10, 5


def new_engine(stage: int, universal: bool = False) -> Any:
    """Hand a new model to DeepSpeed; every rank must call this."""
    import deepspeed

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**MODEL))
    weights: Any = model.parameters()  # DeepSpeed's annotation is too narrow
    more = {"zero_optimization": {"stage": stage}}
    config = CONFIG | more | {"checkpoint": {"load_universal": universal}}
    return deepspeed.initialize(model=model, model_parameters=weights, config=config)[0]


def local_loss(model: Any, step: int) -> torch.Tensor:
    """Compute the loss of this rank's samples of a step: bytes that count up."""
    draw = torch.Generator().manual_seed(step)
    first = torch.randint(256, (CONFIG["train_batch_size"], 1), generator=draw)
    batch = (first + torch.arange(BLOCK_SIZE)) % 256
    inputs = batch.chunk(dist.get_world_size())[dist.get_rank()].to(model.device)
    return model(input_ids=inputs, labels=inputs).loss


def train_steps(engine: Any, steps: range) -> list[float]:
    """Take some steps; return the mean loss over all ranks of each."""
    losses = []
    for step in steps:
        loss = local_loss(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(statistics.fmean(gather(loss.item())))
    return losses


@torch.no_grad()
def mean_loss(model: Any, step: int) -> float:
    """Return the mean loss over all ranks of a step without taking it."""
    return statistics.fmean(gather(local_loss(model, step).item()))
