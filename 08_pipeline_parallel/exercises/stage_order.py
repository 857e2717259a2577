"""Put the calls of each stage in line: 1F1B.

Run: python 08_pipeline_parallel/exercises/stage_order.py
Expect: the timeline of your order, what is still wrong with it, and status 1; once it
    is 1F1B's, a `check:`.
"""

from check_stage_order import check_stage_order


def order_of(stage: int, stages: int, micro_batches: int) -> list[str]:
    """Return the calls of a stage in their order; yours to rewrite.

    "F0" is the forward pass of micro-batch 0, "B0" its backward pass; stages are
    counted from 0. Now this is GPipe's order.
    """
    forward = [f"F{i}" for i in range(micro_batches)]
    backward = [f"B{i}" for i in range(micro_batches)]
    return forward + backward


if __name__ == "__main__":
    check_stage_order(order_of)
