"""Hold the planner against what was published, and print every error.

Run: python 09_one_mesh/plan/prediction_errors.py
Expect: the ZeRO paper's figure and ten parameter counts; 13 peaks within 15 %; 23
    throughputs, of which those that were not fitted are within 20 %.
"""

import sys
from statistics import median

from memory import state
from published_runs import (
    Run,
    best_utilisation,
    llama3,
    megatron,
    predicted_gib,
    predicted_rate,
    predicted_with_inputs,
    rows,
    torchtitan,
)

# Arxiv 1910.02054, figure 1: 7.5 billion parameters on 64 ranks, in GB.
ZERO = {"none": 120, "zero-1": 31.4, "zero-2": 16.6, "fsdp": 1.9}


def show_state() -> bool:
    """Show the ZeRO paper's figure 1; tell if it is met to the digits printed."""
    found = {name: sum(state(7.5e9, name, 64).values()) / 1e9 for name in ZERO}
    texts = [f"{name} {found[name]:.1f} ({paper})" for name, paper in ZERO.items()]
    print(f"GB of state, and the ZeRO paper's:\n  {', '.join(texts)}")
    return all(round(found[name], 1) == paper for name, paper in ZERO.items())


def show_parameters() -> bool:
    """Show ten parameter counts; tell if they round to what the table has."""
    texts, is_right = [], True
    for row, run in zip(rows("09_megatron.csv"), megatron(), strict=True):
        printed, found = row["parameters_billion"], run.job.model.parameters() / 1e9
        is_right &= f"{found:.1f}" == f"{float(printed):.1f}"
        error = found / float(printed) - 1
        texts.append(f"{row['model']} {found:.2f} ({printed}, {error:+.2%})")
    print("billions of parameters, and Megatron-LM's:")
    for i in range(0, len(texts), 3):
        print(f"  {', '.join(texts[i : i + 3])}")
    return is_right


def show_memory(runs: list[Run]) -> float:
    """Show each peak; return the largest error."""
    print("devices, tokens, mesh; peak in GiB   |  run plan error")
    errors = []
    for run in runs:
        assert run.gib
        errors.append(predicted_gib(run) / run.gib - 1)
        print(
            f"{run.name:37}| {run.gib:5.1f}{predicted_gib(run):5.1f}{errors[-1]:+6.0%}"
        )
    return max(map(abs, errors))


def show_llama3() -> None:
    """Show what the planner says of two runs of which it is known that they fitted."""
    print("Llama 3, no recomputation; in GB     |   has  plan; less gathered inputs")
    for name, job, layout in llama3():
        need, less = predicted_with_inputs(job, layout)
        print(f"{name:37}| {job.cluster.memory / 1e9:5.1f}{need:6.1f}{less:6.1f}")


def show_throughput(runs: list[Run], fitted: list[Run]) -> list[list[float]]:
    """Show a table's throughputs; return the errors of rows that were not fitted.

    Ours, and those of a constant MFU: the one that suits the table's fitted rows best.
    """
    mfu, held = best_utilisation(fitted), []
    print(f"tokens/s of a device                 |   run    plan err {mfu:7.0%} MFU")
    for run in runs:
        constant = mfu * run.peak / run.counted
        rates = predicted_rate(run), constant
        errors = [rate / run.tokens_per_second - 1 for rate in rates]
        if run not in fitted:
            held.append(errors)
        pairs = zip(rates, errors, strict=True)
        texts = "".join(f"{rate:8.0f} {error:+5.0%}" for rate, error in pairs)
        mark = "fitted" if run in fitted else ""
        print(f"{run.name:37}|{run.tokens_per_second:6.0f}{texts} {mark}".rstrip())
    return held


def main() -> None:
    """Show everything; fail if something is farther off than it should be."""
    is_right = show_state() and show_parameters()
    tables = torchtitan(), megatron()
    memory = show_memory(tables[0])
    show_llama3()
    held = [row for runs in tables for row in show_throughput(runs, runs[::2])]
    ours, constants = ([abs(row[i]) for row in held] for i in (0, 1))
    worst = f"worst: plan {max(ours):.0%}, one MFU {max(constants):.0%}"
    middle = f"median: plan {median(ours):.0%}, one MFU {median(constants):.0%}"
    print(f"not fitted, {worst}; {middle}")
    if not is_right or memory > 0.15 or max(ours) > 0.2:
        sys.exit("prediction_errors.py: an error is larger than this page says")
    rate = f"throughput within {max(ours):.0%} (20 %)"
    print(f"check: memory within {memory:.0%} (15 %), {rate}")


if __name__ == "__main__":
    main()
