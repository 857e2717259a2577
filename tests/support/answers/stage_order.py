"""The answer to 08_pipeline_parallel/exercises/stage_order.py."""


def order_of(stage: int, stages: int, micro_batches: int) -> list[str]:
    """Run one forward pass ahead for each stage that follows."""
    ahead = min(stages - 1 - stage, micro_batches)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(micro_batches - ahead):
        order += [f"F{ahead + i}", f"B{i}"]
    return order + [f"B{i}" for i in range(micro_batches - ahead, micro_batches)]
