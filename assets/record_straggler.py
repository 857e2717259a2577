"""Pick out of slow.py's traces when each rank did what, for draw_straggler.py.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/debugging/slow.py
     python assets/record_straggler.py traces
Expect: 03_straggler.json, with the spans of one step on both ranks in ms.
"""

import argparse
import json
from pathlib import Path

NAMES = ["load", "compute", "gloo:all_reduce"]


def read_spans(trace: Path) -> dict[str, list[list[float]]]:
    """Return [start, end] of each part of the step, in ms of the system's clock."""
    written = json.loads(trace.read_text())
    zero = written["baseTimeNanoseconds"] / 1e6
    events = [one for one in written["traceEvents"] if one["ph"] == "X"]
    (begin,) = (one["ts"] for one in events if one["name"] == "step")
    spans: dict[str, list[list[float]]] = {name: [] for name in NAMES}
    for one in sorted(events, key=lambda one: one["ts"]):
        # The barrier before the step is none of its parts.
        if one["name"] in NAMES and one["ts"] >= begin:
            start = zero + one["ts"] / 1e3
            spans[one["name"]].append([start, start + one["dur"] / 1e3])
    return spans


def main() -> None:
    """Read four traces; write their spans from the first rank's beginning on."""
    parser = argparse.ArgumentParser(description="Record what slow.py has traced.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    recorded = {}
    for way in ("blocks", "turns"):
        both = [read_spans(folder / f"{way}_{rank}.json") for rank in range(2)]
        first = min(spans["load"][0][0] for spans in both)
        recorded[way] = [
            {
                name: [[round(edge - first, 3) for edge in span] for span in of_name]
                for name, of_name in spans.items()
            }
            for spans in both
        ]
    path = Path(__file__).with_name("03_straggler.json")
    path.write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main()
