"""What PyTorch's Adam allocates while it steps, by the allocator, in each form.

Run: python tests/gpu/cases/adam_temporaries.py
Expect: `figures:` in bytes for each parameter; the calculator of chapter 05 counts on 4
    for foreach, which is the default on a GPU.
"""

import json
import sys
from typing import Any

import torch

TENSORS, VALUES = 40, 1 << 20


def temporaries(device: torch.device, **form: Any) -> float:
    """Return the bytes for each parameter that a step takes at its peak, and frees."""
    weights = [
        torch.randn(VALUES, device=device, requires_grad=True) for _ in range(TENSORS)
    ]
    optimizer = torch.optim.AdamW(weights, **form)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()  # allocates the moments
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    return (torch.cuda.max_memory_allocated() - kept) / (TENSORS * VALUES)


def main() -> None:
    """Measure the three forms, each with fresh tensors."""
    device = torch.device("cuda")
    found = {
        "foreach": temporaries(device, foreach=True),
        "fused": temporaries(device, fused=True),
        "single": temporaries(device, foreach=False),
    }
    print(f"figures: {json.dumps({name: round(v, 3) for name, v in found.items()})}")
    if not 3.9 < found["foreach"] < 4.3:
        sys.exit(f"check failed: foreach takes {found['foreach']:.2f}, not 4 bytes")
    print("check: foreach takes 4 bytes for each parameter, as the calculator counts")


if __name__ == "__main__":
    main()
