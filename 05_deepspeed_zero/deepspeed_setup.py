"""What DeepSpeed needs to start anywhere; each workaround says what breaks without it.

Call `prepare` before DeepSpeed is imported, `join` where the ranks are to meet, and
`leave` last. On a machine with a GPU for each rank and a compiler, a script of your own
can do without all of this.
"""

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable
from typing import Any, NoReturn
from unittest import mock

import psutil
import torch
import torch.distributed as dist

import ranks

MOST_RANKS = 16  # on one machine; more are a typing error
# The top-level keys that DeepSpeed 0.19.8 reads, documented or not, and those that it
# has removed: for these it raises an error of its own, which says what to use instead.
# https://www.deepspeed.ai/docs/config-json/
KNOWN_KEYS = {
    *("train_batch_size", "train_micro_batch_size_per_gpu"),
    *("gradient_accumulation_steps", "optimizer", "scheduler", "gradient_clipping"),
    *("communication_data_type", "prescale_gradients", "gradient_predivide_factor"),
    *("sparse_gradients", "fp16", "bf16", "amp", "torch_autocast", "data_types"),
    *("zero_optimization", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "steps_per_print", "wall_clock_breakdown"),
    *("memory_breakdown", "dump_state", "flops_profiler", "comms_logger", "aio"),
    *("activation_checkpointing", "sparse_attention", "data_efficiency"),
    *("checkpoint", "tensorboard", "wandb", "csv_monitor", "compression_training"),
    *("curriculum_learning", "elasticity", "autotuning", "compile", "log_level"),
    *("tensor_parallel", "sequence_parallel_size", "disable_allgather"),
    *("data_parallel_size", "expert_parallel", "use_data_before_expert_parallelism"),
    *("pipeline", "hybrid_engine", "gradient_allreduce_op", "bfloat16", "comet"),
    *("seq_parallel_communication_data_type", "managed_gradient_accumulation"),
    *("dataloader_drop_last", "datastates_ckpt", "disable_python_gc", "timers"),
    *("vocabulary_size", "weight_quantization", "nebula", "quantize_training"),
    *("eigenvalue", "graph_harvesting", "progressive_layer_drop"),
}
# What a script passes to `ranks.read_options`. The launcher adds the second by itself;
# the environment's LOCAL_RANK says the same under every launcher.
SETUP_OPTIONS: dict[str, dict[str, Any]] = {
    "fused": {"action": "store_true", "help": "compile DeepSpeed's C++ parts first"},
    "local_rank": {"type": int, "help": argparse.SUPPRESS},
}
settled: dict[str, Any] = {}  # what `prepare` has chosen, for `join` to say


def prepare(config: dict[str, Any], fused: bool = False) -> torch.device:
    """Choose this rank's device and what DeepSpeed compiles; refuse misspelt keys.

    Nothing is waited for here, so what is wrong can still be said before the ranks
    meet. With `fused`, DeepSpeed compiles its own Adam if there is a compiler; else the
    config's optimizer is set to PyTorch's.
    """
    env = os.environ
    if "LOCAL_SIZE" in env:  # the deepspeed launcher's name for it
        env.setdefault("LOCAL_WORLD_SIZE", env["LOCAL_SIZE"])
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", "1"))
    if local_world_size > MOST_RANKS:
        ranks.fail(f"{local_world_size} local ranks are too many; try --num_gpus=2")
    device, reason = torch.device("cpu"), "as DS_ACCELERATOR says"
    if env.get("DS_ACCELERATOR") != "cpu":
        local_rank = int(env.get("LOCAL_RANK", "0"))
        device, reason = ranks.choose_device(local_rank, local_world_size)
    # DeepSpeed chooses a device for itself when it is imported; it must be the same.
    env["DS_ACCELERATOR"] = device.type
    if "OMP_NUM_THREADS" not in env:
        # torchrun sets it to 1. Under deepspeed each rank would take all the cores,
        # and its threads would wait for those of the other ranks.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
    if problem := unknown_key(config):
        ranks.fail(f"config: {problem}")
    settled.update(device=device, reason=reason)
    settled["compiled"] = choose_compiled_parts(config, device, fused)
    return device


def join(at_least: int = 1) -> None:
    """Meet the other ranks; every rank calls this after `prepare`."""
    device = settled["device"]
    is_one_host = os.environ.get("CROSS_SIZE") == "1"  # only deepspeed sets this
    if "CROSS_SIZE" in os.environ:
        end_with_runner()
    path = share_a_port() if is_one_host else None
    ranks.join(at_least=at_least, only_cpu=device.type == "cpu")
    if path and dist.get_rank() == 0:
        os.unlink(path)
    if device.type == "cpu":
        ranks.say(f"device: cpu with gloo ({settled['reason']})")
    ranks.say(f"compiled: {settled['compiled']}")


def leave() -> NoReturn:
    """Leave the process group and end this process with status 0.

    An engine holds on to the group, so gloo's threads live on after
    destroy_process_group. If one of them frees a tensor while Python takes itself
    apart, the process aborts: "terminate called without an active exception". That was
    seen in 4 of 23 runs on three ranks before `ranks.py` kept the group until Python
    ends, in none of 18 since. The threads are still there, so this does not wait.
    """
    dist.barrier()  # rank 0 may hold the store through which they found each other
    ranks.leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def undo_step_of_zeros(engine: Any) -> None:
    """Let stage 0 in bf16 start where stages 1 to 3 start; call it before training.

    To allocate the optimizer state, DeepSpeed 0.19 takes an optimizer step there with
    gradients of zero (initialize_optimizer_states in runtime/fp16/*fused_optimizer.py).
    Adam's bias correction is then one step ahead, which makes its first update 0.744
    of the learning rate, and weight decay has once shrunk the fp32 master weights.
    """
    if engine.bfloat16_enabled() and not engine.zero_optimization():
        engine.optimizer.optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()  # from the bf16 weights


def share_a_port() -> str:
    """Let the ranks of one host rendezvous on a free port; return a file to remove.

    The deepspeed launcher tells all jobs on a machine the same port, 29500 (unless
    --master_port names another), and the second job to start dies of it.
    """
    env = os.environ
    launcher = psutil.Process(os.getppid())
    name = f"zero-{os.getuid()}-{launcher.pid}-{launcher.create_time():.2f}"
    path = os.path.join(tempfile.gettempdir(), name)
    file = dist.FileStore(path, int(env["WORLD_SIZE"]))
    if env["RANK"] == "0":
        # With port 0 the system chooses one that is free. The store holds it.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        file.set("port", str(store.port))
        settled["store"] = store
    settled["file"] = file  # freed early, it would remove what others still read
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": file.get("port").decode()}
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # every rank connects as a client
    return path


def end_with_runner() -> None:
    """End this rank when the deepspeed command is gone, even if killed by force.

    `ranks.join` watches this rank's parent. Under deepspeed the parent has a parent
    that belongs to the job as well; killed, it would leave the parent and us running.
    """
    runner = psutil.Process(os.getppid()).parent()
    if runner is None:
        return

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            # A zombie has ended, and nobody has asked how yet.
            while runner.is_running() and runner.status() != psutil.STATUS_ZOMBIE:
                time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def unknown_key(config: dict[str, Any]) -> str:
    """Name a key that DeepSpeed does not know, and what may have been meant, or ''.

    DeepSpeed overlooks an unknown key at the top level: `zero_optimisation` trains at
    stage 0. In the section `zero_optimization` it refuses one, in four lines.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = config.get("zero_optimization", {})
    fields = DeepSpeedZeroConfig.model_fields
    names = {*fields, *(f.alias for f in fields.values() if f.alias)}
    sections: list[tuple[str, Iterable[str], Iterable[str]]] = [
        ("", config, KNOWN_KEYS),
        ("zero_optimization: ", zero, names),
    ]
    for section, keys, known in sections:
        for key in keys:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                meant = f"; did you mean {close[0]!r}?" if close else ""
                return f"{section}unknown key {key!r}{meant}"
    return ""


def missing_compiler(device: torch.device) -> str:
    """Name what is missing to compile DeepSpeed's parts for a device, or return ''."""
    from torch.utils.cpp_extension import CUDA_HOME

    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler})"
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        return "no ninja"
    if device.type == "cuda" and CUDA_HOME is None:
        return "no nvcc"
    return ""


def choose_compiled_parts(
    config: dict[str, Any], device: torch.device, fused: bool
) -> str:
    """Decide whether DeepSpeed compiles C++ before the first step; say what was chosen.

    By itself DeepSpeed compiles two things when they are first used, which takes a
    compiler and more than a minute: its own Adam, and on the CPU an exchange through
    shared memory. Neither changes a result. So the default is PyTorch's Adam, by the
    public setting "torch_adam", and gloo alone.
    """
    import deepspeed
    import deepspeed.ops

    # DeepSpeed imports an optimizer named Muon to see whether it is ours, and three
    # functions in that file ask to be compiled: loading PyTorch's compiler takes two
    # seconds. We do not use Muon, so they may stay as they are.
    with mock.patch("torch.compile", lambda *_, **__: lambda function: function):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    # DeepSpeed 0.19 calls collectives by names that PyTorch 2.13 has renamed, and
    # every rank would say so. Other warnings still come through.
    warnings.filterwarnings(
        "ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning
    )
    missing = missing_compiler(device) if fused else ""
    compiles = fused and not missing
    if "optimizer" in config:
        config["optimizer"].setdefault("params", {})["torch_adam"] = not compiles
    if compiles:
        return "DeepSpeed's Adam, kept in the user's cache (--fused)"
    # There is no public setting for this one. Found in deepspeed/comm/torch.py, which
    # asks this table whether the part may be built.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # type: ignore
    if missing:
        return f"nothing, because there is {missing}; PyTorch's Adam instead"
    return "nothing, PyTorch's Adam (--fused compiles DeepSpeed's)"
