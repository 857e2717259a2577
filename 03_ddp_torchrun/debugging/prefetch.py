"""Two prefetchers: one falls silent when something goes wrong, the other says so.

Both parse lines of numbers in a thread of their own, two samples ahead of the loop.
"""

import queue
import threading
from collections.abc import Iterable

import torch


class Prefetcher:
    """Parse lines ahead; a damaged line ends the thread, and nobody is told."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Start the thread."""
        self.samples: queue.Queue[torch.Tensor | Exception] = queue.Queue(maxsize=2)
        start = threading.Thread(target=self.parse, args=(lines,), name="prefetch")
        start.daemon = True
        start.start()

    def parse(self, lines: Iterable[str]) -> None:
        """Put a tensor for each line into the queue."""
        for line in lines:
            try:
                numbers = [float(word) for word in line.split()]
            except ValueError:
                return  # WRONG: nobody will put anything into the queue again.
            self.samples.put(torch.tensor(numbers))

    def next_sample(self) -> torch.Tensor:
        """Return a sample; wait until there is one, for ever if need be."""
        sample = self.samples.get()
        assert isinstance(sample, torch.Tensor)
        return sample


class LoudPrefetcher(Prefetcher):
    """Parse lines ahead; what goes wrong in the thread is raised in the loop."""

    def parse(self, lines: Iterable[str]) -> None:
        """Put a tensor for each line into the queue, or the error that ends it."""
        try:
            for line in lines:
                numbers = [float(word) for word in line.split()]
                self.samples.put(torch.tensor(numbers))
        except Exception as error:
            self.samples.put(error)

    def next_sample(self) -> torch.Tensor:
        """Return a sample; raise what went wrong, or that a minute has passed."""
        sample = self.samples.get(timeout=60)
        if isinstance(sample, Exception):
            raise sample
        return sample
