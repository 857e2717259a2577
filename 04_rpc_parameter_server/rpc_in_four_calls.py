"""Call a function in another process, in four ways, and send a gradient back.

Run: python 04_rpc_parameter_server/rpc_in_four_calls.py
Expect: where each thing happens, what is copied, and a gradient that goes both ways.
"""

import contextlib
import os
import socket
import threading
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from ranks import fail, read_options, start_ranks

# Each process has its own. Alice's calls change Bob's, not hers.
counter, both = torch.zeros(2), threading.Barrier(2)


def add_to_counter(amount: torch.Tensor) -> torch.Tensor:
    """Add to the counter of whichever process runs this; return it."""
    return counter.add_(amount)


def who_when_both_are_here() -> str:
    """Wait until this runs twice at the same time, then name the process."""
    both.wait(timeout=30)
    return rpc.get_worker_info().name


def doubled(x: torch.Tensor, weight: rpc.RRef) -> torch.Tensor:
    """Return 2 * weight * x, in the process that owns the weight."""
    return 2 * weight.local_value() * x


def gradient_of(weight: rpc.RRef, context_id: int) -> torch.Tensor:
    """Return a weight's gradient, in the process that owns the weight."""
    return dist_autograd.get_gradients(context_id)[weight.local_value()]


def sync() -> bool:
    """Show `rpc_sync`: call, and wait for the answer, which is a copy."""
    answer = rpc.rpc_sync("bob", add_to_counter, args=(torch.ones(2),))
    print(f"1. rpc_sync: bob's counter is {answer.tolist()}, mine {counter.tolist()}")
    answer.fill_(99)  # changes this copy, and nothing at Bob's
    again = rpc.rpc_sync("bob", add_to_counter, args=(torch.ones(2),))
    print(f"   the answer was a copy: bob's counter is {again.tolist()} after one more")
    return counter.tolist() == [0.0, 0.0] and again.tolist() == [2.0, 2.0]


def futures() -> bool:
    """Show `rpc_async`: call, and get a future at once."""
    first = rpc.rpc_async("bob", who_when_both_are_here)
    is_open = not first.done()
    second = rpc.rpc_async("bob", who_when_both_are_here)
    answers = torch.futures.wait_all([first, second])
    print(f"2. rpc_async: future open: {is_open}; two calls in flight: {answers}")
    return answers == ["bob", "bob"] and is_open


def references() -> bool:
    """Show `remote`: the value stays where it was made, a reference comes back."""
    reference = rpc.remote("bob", torch.arange, args=(2.0,))
    copy = reference.to_here().fill_(99)
    there = reference.rpc_sync().tolist()  # a method of the value, called at its owner
    print(f"3. remote: my copy is {copy.tolist()}, the value at bob's {there}")
    with contextlib.suppress(RuntimeError):  # local_value() is for the owner alone
        return reference.local_value() is None
    return reference.owner().name == "bob" and there == [0.0, 1.0]


def backward() -> bool:
    """Let the gradient of a loss here reach a weight there."""
    values, x = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 1.0, 2.0])
    weight = rpc.remote("bob", torch.nn.Parameter, args=(values,))
    x.requires_grad_()
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("bob", doubled, args=(x, weight)).square().sum()
        dist_autograd.backward(context_id, [loss])
        there = rpc.rpc_sync("bob", gradient_of, args=(weight, context_id))
        here = dist_autograd.get_gradients(context_id)[x]
    print(f"4. backward: bob's weight got {there.tolist()}, my input {here.tolist()}")
    print(f"   the context holds the gradients; my input's .grad is {x.grad}")
    loss = (2 * values.requires_grad_() * x).square().sum()
    expected = torch.stack(torch.autograd.grad(loss, (values, x)))
    return torch.equal(torch.stack([there, here]), expected) and x.grad is None


def main() -> None:
    """Be Alice, who calls, or Bob, who only has to be there."""
    # RPC would listen where this host's name points to. Interface 1 is loopback.
    os.environ["TP_SOCKET_IFNAME"] = dict(socket.if_nameindex())[1]
    # init_rpc itself calls torch.distributed in a way that torch.distributed warns of.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    # The store at MASTER_ADDR and MASTER_PORT is where the two find each other.
    rank = int(os.environ["RANK"])
    rpc.init_rpc(["alice", "bob"][rank], rank=rank, world_size=2)
    if rank == 0:
        if not all(found := [sync(), futures(), references(), backward()]):
            fail(f"not all calls do what they should: {found}")
        print("check: 4 kinds of calls; the gradients are those of local autograd")
    rpc.shutdown()  # waits until nobody has anything more to ask


if __name__ == "__main__":
    read_options()
    start_ranks(main, 2)
