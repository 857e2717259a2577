"""Train one model whose parts live in three kinds of process.

Run: python 04_rpc_parameter_server/train.py
Needs: this folder and requirements.txt. A GPU for each trainer is used if there is.
Expect: a master, a parameter server and two trainers start; after three epochs the
    model tells six packages of Python's library apart in files it has never seen; then
    a `check:` that all trainers pass.
Before: 04_rpc_parameter_server/rpc_in_four_calls.py
Next: 04_rpc_parameter_server/asynchronous.py
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule

import table
from meeting import (
    NAMED,
    PortTaken,
    before_the_end,
    host_store,
    joined,
    own_address,
    reach_store,
    say,
)
from model import WIDTH
from options import parse_args, refuse
from trainer import (
    SERVER,
    Settings,
    first_line,
    in_group,
    local_rank_of,
    run_trainer,
    used_devices,
)
from world import launch


def choose_device(local_rank: int, local_world_size: int) -> tuple[torch.device, str]:
    """Give each rank an accelerator of its own, or every rank the CPU; say why."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu"), "no accelerator found"
    kind, found = accelerator.type, torch.accelerator.device_count()
    if dist.get_default_backend_for_device(kind) == "gloo":
        return torch.device("cpu"), f"no backend connects {kind} devices"
    if found < local_world_size:
        return torch.device("cpu"), f"{found} {kind} for {local_world_size} local ranks"
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank), f"{found} {kind}, one for each local rank"


def be_master(settings: Settings) -> bool:
    """Make the table on the server, start the trainers, wait for them.

    Returns:
        Whether that could be done: the server may have a table of another size.
    """
    found = rpc.rpc_sync(SERVER, table.shape_in_file)
    shape = (settings.rows, WIDTH)
    if found not in (None, shape):
        text = f"the server's file holds a table of {found}, not {shape}; give --rows"
        say("master", f"{text} as then, or the server another --table")
        rpc.rpc_sync(SERVER, table.release)
        return False
    say("master", f"asking for a table of {settings.rows} rows of {WIDTH} numbers")
    remote_table = RemoteModule(
        SERVER, table.ServedTable, args=(settings.rows, WIDTH, settings.seed)
    )
    # Each call returns at once, with a future, and may then take any time.
    futures = [
        rpc.rpc_async(
            f"trainer{rank}", run_trainer, args=(remote_table, settings), timeout=0
        )
        for rank in range(settings.trainers)
    ]
    # All trainers return the same lines, or an error, which is raised here.
    results = torch.futures.wait_all(futures)
    rpc.rpc_sync(SERVER, table.release)
    for line in results[0]:
        say("master", f"check: {line}")
    return True


def save_and_say() -> None:
    """Save the server's table, if there is a file for it and nobody has done so yet."""
    if file := table.save_once():
        say(SERVER, f"table saved to {file}")


def be_parameter_server(file: Path | None) -> None:
    """Hold the table until the master says that it is over, or a signal does."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: signals.append(received))
    if file:
        table.file.append(file)
        before_the_end.append(save_and_say)
    table.ready.set()
    # Calls are answered by RPC's threads. This one must stay in Python: a signal
    # that arrives inside rpc.shutdown() would be noticed only when that returns.
    while not signals and not table.nobody_needs_it.wait(0.1):
        pass
    save_and_say()
    if signals:
        say(SERVER, f"stopped by {signal.Signals(signals[0]).name}")
        os._exit(128 + signals[0])


def join_trainers(
    rank: int, trainers: int, store: dist.TCPStore, device: torch.device
) -> None:
    """Form the process group in which DDP averages the dense part's gradients.

    RPC's own meeting point is held by the master; this one by trainer 0, which is
    another process. Two processes cannot listen at one port, so there are two.

    Args:
        rank: of this trainer.
        trainers: how many there are.
        store: RPC's meeting point.
        device: where the dense part will be; it decides what carries its gradients.
    """
    if rank == 0:
        group_store = host_store(own_address(store))
        store.set("group", f"{group_store.host} {group_store.port}")
    else:
        address, port = store.get("group").decode().split()
        group_store = reach_store(address, int(port), 30)
    used_devices.append(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=group_store,
        rank=rank,
        world_size=trainers,
        timeout=timedelta(minutes=5),
    )
    in_group.set()


def be_one(
    name: str, store: dist.TCPStore, settings: Settings, file: Path | None
) -> bool:
    """Do what the process of this name does; tell whether the run could take place."""
    if name == "master":
        return be_master(settings)
    if name == SERVER:
        be_parameter_server(file)
        return True
    rank = int(name.removeprefix("trainer"))
    device, reason = choose_device(*local_rank_of(rank, settings.trainers, store))
    backend = dist.get_default_backend_for_device(device)
    first_line.append(f"device: {device.type} with {backend} ({reason})")
    join_trainers(rank, settings.trainers, store, device)
    # The rest of a trainer's work is a call that comes from the master.
    return True


def main() -> None:
    """Start all processes here, or be one of them."""
    args = parse_args()
    settings = Settings(
        trainers=args.trainers,
        rows=args.rows,
        batch_size=args.batch_size,
        epochs=args.epochs,
        max_steps=args.max_steps,
        lr=args.lr,
        seed=args.seed,
    )
    # The master comes first: RPC's rank 0 is the one that the others ask for.
    names = ["master", SERVER, *(f"trainer{rank}" for rank in range(args.trainers))]
    if args.role is None:
        launch(names, be_one, settings, args.table)
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    name = f"trainer{args.rank}" if args.role == "trainer" else args.role
    address, port = args.master_addr, args.master_port
    try:
        is_master = name == "master"
        store = (
            host_store(address, port)
            if is_master
            else reach_store(address, port, args.patience)
        )
    except PortTaken as error:
        refuse(f"{error}; check --master-addr, or choose another --master-port")
    except TimeoutError:
        refuse(f"no master at {address}:{port} after {args.patience:g} s")
    could_be = True
    try:
        with joined(name, names, store, address, "master", args.patience):
            could_be = be_one(name, store, settings, args.table)
    except TimeoutError as missing:
        say(name, f"{missing} did not come within {args.patience:g} s; ending")
        os._exit(NAMED)
    except dist.DistError:
        say(name, "master has died or cannot be reached; ending")
        os._exit(NAMED)
    if not could_be:
        sys.exit(2)


if __name__ == "__main__":
    main()
