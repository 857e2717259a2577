"""Find a hang: which rank does not come, and in which line of nightly.py is it?

Run: torchrun --nproc-per-node=3 03_ddp_torchrun/debugging/exercise_hang.py
Expect: some steps, then silence; after a minute the watchdogs end the run. Say what you
    found: python 03_ddp_torchrun/debugging/exercise_hang.py --rank=R --line=N
"""

import os

from nightly import Files, train_overnight
from planted import OPTIONS, RANKS, check_answer, strike
from ranks import join, leave, read_options

HINT = "it takes part; the others, too, wait for somebody"


def main() -> None:
    """Start the run, or check an answer."""
    options = read_options(**OPTIONS)
    if options.rank is not None or options.line is not None:
        check_answer("hang", options, HINT)
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    join(at_least=RANKS, at_most=RANKS, only_cpu=True)
    files = Files()
    train_overnight(files, lambda: strike("hang", options.case, files))
    leave()


if __name__ == "__main__":
    main()
