"""Write the copies of the modules that several chapters share.

Run: python tests/support/copies.py

A chapter is a folder that one can take away whole, so what two chapters need stands in
both. Edit the source only, then write its copies; a house rule holds them equal, byte
by byte. (Inside a chapter there are no copies: a room has a symbolic link.)
"""

from collections.abc import Mapping
from pathlib import Path

from launch import ROOT

# Each source with its copies, as paths from the repository's root.
COPIES: dict[str, tuple[str, ...]] = {
    "01_communication/ranks.py": (
        "02_ddp_mp/ranks.py",
        "03_ddp_torchrun/ranks.py",
        "04_rpc_parameter_server/ranks.py",
        "05_deepspeed_zero/ranks.py",
        "06_fsdp/ranks.py",
        "07_tensor_parallel/ranks.py",
        "08_pipeline_parallel/ranks.py",
        "09_one_mesh/ranks.py",
    ),
    "01_communication/exercises/ask_ranks.py": (
        "02_ddp_mp/exercises/ask_ranks.py",
        "03_ddp_torchrun/exercises/ask_ranks.py",
        "04_rpc_parameter_server/exercises/ask_ranks.py",
        "05_deepspeed_zero/exercises/ask_ranks.py",
        "06_fsdp/exercises/ask_ranks.py",
        "07_tensor_parallel/exercises/ask_ranks.py",
        "08_pipeline_parallel/exercises/ask_ranks.py",
        "09_one_mesh/exercises/ask_ranks.py",
    ),
    "03_ddp_torchrun/model.py": (
        "05_deepspeed_zero/model.py",
        "06_fsdp/model.py",
        "07_tensor_parallel/model.py",
        "08_pipeline_parallel/model.py",
        "09_one_mesh/model.py",
    ),
    "05_deepspeed_zero/huggingface/qwen.py": (
        "06_fsdp/huggingface/qwen.py",
        "07_tensor_parallel/huggingface/qwen.py",
    ),
    "06_fsdp/huggingface/tiny_qwen.py": (
        "07_tensor_parallel/huggingface/tiny_qwen.py",
    ),
    "03_ddp_torchrun/data.py": (
        "05_deepspeed_zero/data.py",
        "06_fsdp/data.py",
        "07_tensor_parallel/data.py",
        "08_pipeline_parallel/data.py",
        "09_one_mesh/data.py",
    ),
    "03_ddp_torchrun/checkpoint.py": (
        "06_fsdp/checkpoint.py",
        "07_tensor_parallel/checkpoint.py",
        "08_pipeline_parallel/checkpoint.py",
    ),
    "03_ddp_torchrun/same_as_one_process.py": (
        "06_fsdp/same_as_one_process.py",
        "09_one_mesh/same_as_one_process.py",
    ),
    # The ways of all chapters in one table.
    **{
        source: (f"09_one_mesh/one_result/{source.rpartition('/')[2]}",)
        for source in (
            "05_deepspeed_zero/text.py",
            "05_deepspeed_zero/communication/traffic.py",
            "06_fsdp/counters.py",
            "06_fsdp/side_by_side/zero_by_hand.py",
            "07_tensor_parallel/parallel_layers.py",
            "07_tensor_parallel/parallel_gpt.py",
        )
    },
}


def write_copies(
    root: Path = ROOT, copies: Mapping[str, tuple[str, ...]] = COPIES
) -> list[str]:
    """Make every copy equal to its source; return the paths that were written.

    Raises FileNotFoundError, before anything is written, if a source is missing.
    """
    contents = {source: (root / source).read_bytes() for source in copies}
    written = []
    for source, names in copies.items():
        for name in names:
            copy = root / name
            # A link would pass for a copy here, and lead nowhere in a chapter that was
            # taken away; written to, it would change what it leads to.
            if copy.is_symlink():
                copy.unlink()
            if not copy.exists() or copy.read_bytes() != contents[source]:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(contents[source])
                written.append(name)
    return written


def main() -> None:
    """Write the copies, and say which of them were not equal."""
    written = write_copies()
    for name in written:
        print(f"wrote {name}")
    if not written:
        print("every copy is equal to its source")


if __name__ == "__main__":
    main()
