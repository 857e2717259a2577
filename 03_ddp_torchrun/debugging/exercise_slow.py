"""Find a straggler: which rank is slow, and which line of nightly.py makes it so?

Run: torchrun --nproc-per-node=3 03_ddp_torchrun/debugging/exercise_slow.py
Expect: the parts of a step on each rank, for a minute; after 20 steps it becomes slow.
    Say what you found: python .../exercise_slow.py --rank=R --line=N
"""

from nightly import Files, train_overnight
from planted import OPTIONS, RANKS, check_answer, strike
from ranks import join, leave, read_options

HINT = "it waits, too; who waits least?"


def main() -> None:
    """Start the run, or check an answer."""
    options = read_options(**OPTIONS)
    if options.rank is not None or options.line is not None:
        check_answer("slow", options, HINT)
        return
    join(at_least=RANKS, at_most=RANKS, only_cpu=True)
    files = Files()
    train_overnight(files, lambda: strike("slow", options.case, files))
    leave()


if __name__ == "__main__":
    main()
