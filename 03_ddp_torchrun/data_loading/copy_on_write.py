"""Keep samples in one tensor: of a list of Python objects, each worker makes a copy.

Run: python 03_ddp_torchrun/data_loading/copy_on_write.py
Expect: a worker that has read each string of a list once holds nearly all of them as
    memory of its own. Of a tensor, or of a mapped file, it holds next to nothing.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ranks import fail, read_options

SAMPLES, LENGTH = 200_000, 80
ROLLUP = Path("/proc/self/smaps_rollup")


def written_megabytes() -> float:
    """Return how much memory this process has written to, and shares with no other."""
    lines = [line.split() for line in ROLLUP.read_text().splitlines()]
    return sum(int(words[1]) for words in lines if words[0] == "Private_Dirty:") / 1e3


class Samples(Dataset):
    """Whatever holds the samples: a worker that is forked starts with its pages."""

    def __init__(self, samples: Any) -> None:
        """Keep what has one sample for each index."""
        self.samples = samples

    def __getitem__(self, index: int) -> int:
        """Read a sample. For that, Python counts a reference to it up, and down."""
        return len(self.samples[index])


def grown_in_a_worker(samples: Any) -> float:
    """Read all samples in a worker; return by how many megabytes it has grown."""
    starts = range(0, SAMPLES, 10_000)
    batches: Any = [range(start, start + 10_000) for start in starts]
    loader = DataLoader(
        Samples(samples),
        batch_sampler=[[], *batches],  # at first it has read none
        num_workers=1,
        multiprocessing_context="fork",
        collate_fn=lambda batch: written_megabytes(),
    )
    sizes = list(loader)
    return sizes[-1] - sizes[0]


def hold(text: bytes, path: Path, way: str) -> Any:
    """Return the same samples in one of three ways."""
    if way == "list of strings":
        strings = text.decode()
        return [strings[i : i + LENGTH] for i in range(0, len(text), LENGTH)]
    if way == "tensor":
        numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    else:  # all ranks of a machine share the file's pages; True would write to it, too
        numbers = torch.from_file(str(path), False, len(text), dtype=torch.uint8)
    return numbers.view(SAMPLES, LENGTH)


def main() -> None:
    """Hold the samples in each way, and let a worker read them."""
    read_options()
    if not ROLLUP.exists():
        fail("needs Linux, which counts the pages written to")
    text = "".join(f"{index:{LENGTH}}" for index in range(SAMPLES)).encode()
    print(f"{len(text) / 1e6:.0f} MB of text   a worker adds  64 workers add")
    added = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "samples")
        path.write_bytes(text)
        for way in ("list of strings", "tensor", "mapped file"):
            added[way] = max(0.0, grown_in_a_worker(hold(text, path, way)))
            print(f"{way:15}{added[way]:13.0f} MB{added[way] * 64:13.0f} MB")
    is_copied = added.pop("list of strings") > len(text) / 1e6
    if not is_copied or max(added.values()) > len(text) / 5e6:
        fail(f"copied: {is_copied}, and of the others {added} MB")
    print(f"check: the list was copied, and of {len(added)} others less than a fifth")


if __name__ == "__main__":
    main()
