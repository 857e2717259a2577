"""Find the mistakes: a DeepSpeed run with three, of which it reports one.

Run: python 05_deepspeed_zero/exercises/broken_engine.py
Expect: for each of two ranks the first thing that is wrong with the run, and status 1;
    once the config and the loop are right, a `check:`.
"""

from typing import Any

import torch
from torch.nn.functional import mse_loss

from check_broken_engine import check_engine

Batches = list[tuple[torch.Tensor, torch.Tensor]]  # inputs (4, 8) and labels (4, 1)

# A step is to be taken from 16 samples: two batches of 4 on each of two ranks.
CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def train_with_engine(model: Any, batches: Batches, config: dict[str, Any]) -> Any:
    """Train on this rank's batches, in steps of 16 samples; return the engine."""
    import deepspeed

    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    accumulated = config["gradient_accumulation_steps"]
    for number, (inputs, labels) in enumerate(batches, start=1):
        loss = mse_loss(engine(inputs), labels) / accumulated
        engine.backward(loss)
        if number % accumulated == 0:
            engine.step()
    return engine


if __name__ == "__main__":
    check_engine(CONFIG, train_with_engine)
