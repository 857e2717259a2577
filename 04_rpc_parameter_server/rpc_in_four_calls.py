"""Call a function in another process, in four ways, and send a gradient back.

Run: python 04_rpc_parameter_server/rpc_in_four_calls.py
Needs: nothing but requirements.txt. It runs on the CPU.
Expect: Alice lets Bob compute, and each line says in which process it happened and
    what was copied; then a gradient crosses the process boundary; then a `check:`.
Before: 04_rpc_parameter_server/README.md
Next: 04_rpc_parameter_server/train.py
"""

import argparse
import os
import sys
import threading

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from options import refuse
from world import launch

# What each process has of its own. Alice's calls change Bob's copy, not hers.
counter = torch.zeros(3)
both = threading.Barrier(2)


def add_to_counter(amount: torch.Tensor) -> torch.Tensor:
    """Add to the counter of whichever process runs this; return it."""
    counter.add_(amount)
    return counter


def who() -> str:
    """Name the process that runs this."""
    return rpc.get_worker_info().name


def who_when_both_are_here() -> str:
    """Wait until this function runs twice at the same time, then name the process."""
    both.wait(timeout=30)
    return who()


def first_entry(owned: rpc.RRef) -> float:
    """Read a value where it lives; only the owner may call `local_value`."""
    return owned.local_value()[0].item()


def doubled(x: torch.Tensor, weight: rpc.RRef) -> torch.Tensor:
    """Return 2 * weight * x, in the process that owns the weight."""
    return 2 * weight.local_value() * x


def make_weight(values: list[float]) -> torch.Tensor:
    """Make a parameter in the process that runs this."""
    return torch.tensor(values, requires_grad=True)


def gradient_of(weight: rpc.RRef, context_id: int) -> torch.Tensor:
    """Return a weight's gradient, in the process that owns the weight."""
    return dist_autograd.get_gradients(context_id)[weight.local_value()]


def sync() -> list[bool]:
    """Show `rpc_sync`: call, and wait for the answer, which is a copy."""
    answer = rpc.rpc_sync("bob", add_to_counter, args=(torch.ones(3),))
    print(f"1. rpc_sync: bob's counter is {answer.tolist()}, mine {counter.tolist()}")
    answer.fill_(99)  # changes this copy, and nothing at Bob's
    again = rpc.rpc_sync("bob", add_to_counter, args=(torch.ones(3),))
    print(f"   the answer was a copy: bob's counter is {again.tolist()} after one more")
    return [counter.tolist() == [0.0] * 3, again.tolist() == [2.0] * 3]


def futures() -> list[bool]:
    """Show `rpc_async`: call, and get a future at once."""
    first = rpc.rpc_async("bob", who_when_both_are_here)
    is_open = not first.done()
    second = rpc.rpc_async("bob", who_when_both_are_here)
    answers = torch.futures.wait_all([first, second])
    print(f"2. rpc_async: two calls at the same time, answers {answers}")
    print(f"   after the call the future was still open: {is_open}")
    return [answers == ["bob", "bob"], is_open]


def references() -> list[bool]:
    """Show `remote`: the value stays where it was made, a reference comes back."""
    reference = rpc.remote("bob", torch.arange, args=(4.0,))
    owner = reference.owner().name
    copy = reference.to_here()
    copy.fill_(99)
    untouched = rpc.rpc_sync("bob", first_entry, args=(reference,))
    print(f"3. remote: the value lives at {owner}; to_here() fetches a copy")
    print(f"   I filled the copy with 99; at bob's the first entry is {untouched}")
    try:
        reference.local_value()
        refused = False
    except RuntimeError:
        refused = True
    print(f"   local_value() is for the owner alone, and refused to me: {refused}")
    return [owner == "bob", untouched == 0.0, refused]


def backward() -> list[bool]:
    """Let the gradient of a loss here reach a weight there."""
    values, x = [1.0, -2.0, 3.0], torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    weight = rpc.remote("bob", make_weight, args=(values,))
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("bob", doubled, args=(x, weight)).square().sum()
        dist_autograd.backward(context_id, [loss])
        there = rpc.rpc_sync("bob", gradient_of, args=(weight, context_id))
        here = dist_autograd.get_gradients(context_id)[x]
    alone = torch.tensor(values, requires_grad=True)
    expected = torch.autograd.grad((2 * alone * x).square().sum(), (alone, x))
    print(f"4. backward: bob's weight got {there.tolist()}, my input {here.tolist()}")
    print(f"   .grad stays empty, the context holds the gradients: {x.grad is None}")
    same = torch.equal(there, expected[0]) and torch.equal(here, expected[1])
    return [same, x.grad is None]


def be_alice_or_bob(name: str, _: dist.Store) -> None:
    """Be Alice, who calls, or Bob, who only has to be there."""
    if name != "alice":
        return
    results = [*sync(), *futures(), *references(), *backward()]
    wrong = len(results) - sum(results)
    print(f"check: {len(results)} statements about two processes, {wrong} wrong; both")
    print("       gradients equal those of local autograd", flush=True)
    if wrong:
        sys.exit(1)


def main() -> None:
    """Start Alice and Bob."""
    parser = argparse.ArgumentParser(description="Show the four calls of RPC.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    launch(["alice", "bob"], be_alice_or_bob)


if __name__ == "__main__":
    main()
