"""Start a DataLoader's workers where no lock of a rank can follow them."""

import multiprocessing
from typing import Any

from torch.utils.data import DataLoader

WORKERS = 2  # of each rank


def new_loader(dataset: Any, **settings: Any) -> DataLoader:
    """Let a server without threads fork the workers; a fork of a rank may hang."""
    # The server imports this once. Else each worker would, which takes two seconds.
    multiprocessing.set_forkserver_preload(["torch.distributed.nn"])
    settings |= {"num_workers": WORKERS, "multiprocessing_context": "forkserver"}
    return DataLoader(dataset, **settings)
