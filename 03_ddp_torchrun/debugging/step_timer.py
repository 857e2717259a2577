"""Two clocks for a training step: seconds added up by part, and a profiler's trace."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function


class StepTimer:
    """Add up how long each part of the steps takes on this rank.

    On a GPU, call `torch.cuda.synchronize()` before each look at the clock.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what stands inside, and give it its name in a trace."""
        start = time.perf_counter()
        with record_function(name):
            yield
        self.seconds[name] += time.perf_counter() - start


def trace(step: Callable[[], None], path: Path) -> dict[str, float]:
    """Profile a step and write its trace to `path`; every rank calls this.

    Returns the milliseconds of each name, those of parts included.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # not a word on every start
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.barrier()  # all ranks begin together
        step()
        time.sleep(0.05)  # gloo's threads write down their ends a little later
    profiler.export_chrome_trace(str(path))
    return {one.key: one.cpu_time_total / 1000 for one in profiler.key_averages()}
