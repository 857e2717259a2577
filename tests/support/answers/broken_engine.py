"""The answer to 05_deepspeed_zero/exercises/broken_engine.py."""

from typing import Any

from torch.nn.functional import mse_loss

# 4 samples x 2 batches x 2 ranks.
CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def train_with_engine(model: Any, batches: list[Any], config: dict[str, Any]) -> Any:
    """Tell the engine of every batch; it divides, and steps when a step is due."""
    import deepspeed

    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for inputs, labels in batches:
        engine.backward(mse_loss(engine(inputs), labels))
        engine.step()
    return engine
