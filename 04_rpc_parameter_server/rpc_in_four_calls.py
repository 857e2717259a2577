"""Call a function in another process, in four ways, and send a gradient back.

Run: torchrun --nproc-per-node=2 04_rpc_parameter_server/rpc_in_four_calls.py
Expect: where each thing happens, what is copied, and a gradient that goes both ways.
"""

import os
import socket
import sys
import time
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

counter = torch.zeros(2)  # each process has its own; Alice's calls change Bob's


def stay_here() -> None:
    """Refuse any other start; have RPC listen on this machine only."""
    if os.environ.get("WORLD_SIZE") != "2" or len(sys.argv) > 1:
        sys.exit(f"start it with torchrun --nproc-per-node=2 {sys.argv[0]}")
    # RPC would listen where this host's name points to. Interface 1 is loopback.
    os.environ["TP_SOCKET_IFNAME"] = dict(socket.if_nameindex())[1]
    # init_rpc itself calls torch.distributed in a way that torch.distributed warns of.
    warnings.filterwarnings("ignore", message="You are using a Backend")


def check_calls(found: tuple, gradients: tuple, inputs: tuple) -> None:
    """Compare what came of the calls with what should, and with local autograd."""
    values, x = inputs
    local = (2 * values.requires_grad_() * x).square().sum()
    expected = torch.autograd.grad(local, (values, x))
    is_right = all(map(torch.equal, gradients, expected))
    if not is_right or found != ([2, 2], [0, 0], False, [1, -2, 3], None):
        sys.exit("not all calls do what they should")
    print("check: 4 kinds of calls; the gradients are those of local autograd")


def add_to_counter(amount: torch.Tensor) -> torch.Tensor:
    """Add to the counter of whichever process runs this; return it."""
    return counter.add_(amount)


def doubled(x: torch.Tensor, weight: rpc.RRef) -> torch.Tensor:
    """Return 2 * weight * x, in the process that owns the weight."""
    return 2 * weight.local_value() * x


def gradient_of(weight: rpc.RRef, context_id: int) -> torch.Tensor:
    """Return a weight's gradient, in the process that owns the weight."""
    return dist_autograd.get_gradients(context_id)[weight.local_value()]


def be_alice() -> None:
    """Make the four calls to Bob, and check what comes of them."""
    answer = rpc.rpc_sync("bob", add_to_counter, args=(torch.ones(2),))
    answer.fill_(99)  # changes this copy, and nothing at Bob's
    again = rpc.rpc_sync("bob", add_to_counter, args=(torch.ones(2),))
    print(f"1. rpc_sync: bob's counter is {again.tolist()}, mine {counter.tolist()}")

    future = rpc.rpc_async("bob", time.sleep, args=(1.0,))  # returns at once
    was_done = future.done()
    future.wait()
    print(f"2. rpc_async: done at once: {was_done}; after wait(): {future.done()}")

    values = torch.tensor([1.0, -2.0, 3.0])
    weight = rpc.remote("bob", torch.nn.Parameter, args=(values,))
    copy = weight.to_here().detach().fill_(99)
    there = weight.rpc_sync().tolist()  # a method of the value, called at its owner
    print(f"3. remote: my copy is {copy.tolist()}, the value at bob's {there}")

    x = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("bob", doubled, args=(x, weight)).square().sum()
        dist_autograd.backward(context_id, [loss])
        of_weight = rpc.rpc_sync("bob", gradient_of, args=(weight, context_id))
        of_x = dist_autograd.get_gradients(context_id)[x]
    print(f"4. backward: bob's weight got {of_weight.tolist()}, my x {of_x.tolist()}")
    print(f"   the context holds the gradients; my x.grad is {x.grad}")

    found = again.tolist(), counter.tolist(), was_done, there, x.grad
    check_calls(found, (of_weight, of_x), (values, x))


def main() -> None:
    """Be Alice, who calls, or Bob, who only has to be there."""
    stay_here()
    # torchrun sets RANK, and the address at which both find each other.
    rank = int(os.environ["RANK"])
    rpc.init_rpc(["alice", "bob"][rank], rank=rank, world_size=2)
    if rank == 0:
        be_alice()
    rpc.shutdown()  # waits until nobody has anything more to ask


if __name__ == "__main__":
    main()
