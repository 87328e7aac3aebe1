"""CPU mode: run megatron.core and megatron.training over gloo on a machine without a GPU.

For development, CI and newcomers. It says nothing about speed, memory, NCCL or overlap, and where
a GPU is present it does nothing. No installed file is edited; Megatron asks for five things that a
CPU can stand in for:

    device   every `cuda` device argument becomes `cpu`
    streams  one thread runs everything in order, so streams and events are no-ops
    rng      the tracker of "CUDA" generators saves and restores the CPU generator
    checks   "is there CUDA", `p.type() == "torch.cuda.FloatTensor"` and split sizes as numpy
    gloo     gathers and scatters sizes that differ by rank, as NCCL does

Seen to train with it (Megatron-Core 0.19, no Transformer Engine, no Apex): EP 1, 2 and 4, expert TP
2, PP 2 with and without virtual stages, data parallelism with overlapped reduction, the distributed
optimizer, fp32 and bf16, full and selective recompute, dropout, multi-token prediction, saving and
resuming. Not possible, since Megatron wants Transformer Engine or Apex for it: MoE with TP > 1,
context parallelism, resuming a run of the distributed optimizer. Nor does Transformer Engine run.
"""

import inspect
import logging
import os
import sys
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

# What Megatron's command line must say on a CPU without Transformer Engine and Apex: (flag, value).
CPU_ARGUMENTS = (
    ("--distributed-backend", "gloo"),
    ("--transformer-impl", "local"),
    ("--no-gradient-accumulation-fusion", None),
    ("--no-masked-softmax-fusion", None),
    ("--no-rope-fusion", None),
    ("--no-persist-layer-norm", None),
)

_patched = []


def install_cpu_mode(training: bool = False) -> list[str]:
    """Teach torch and megatron.core, and with `training` megatron.training too, to run on a CPU.

    Returns the names that are patched, in order; an empty list where a GPU is present. Further
    calls patch nothing twice, but may add the part for `training`.
    """
    if torch.cuda.is_available():
        return []
    if not _patched:
        # Megatron compiles its small fusions; on a CPU that costs minutes and gains nothing.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        _patch_torch()
        _patch_gloo()
        _patch_megatron_core()
    if training:
        _patch_megatron_training()
    return list(_patched)


def cpu_arguments(arguments: list[str]) -> list[str]:
    """What Megatron's command line `arguments` lacks for a run in CPU mode, as a list to append.

    Exits where a flag is given with a value that a CPU cannot serve.
    """
    given = dict(zip(arguments, [*arguments[1:], None], strict=False))
    given |= dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    wrong = [
        f"{flag} {given[flag]} (use {value})"
        for flag, value in CPU_ARGUMENTS
        if value is not None and given.get(flag, value) != value
    ]
    if wrong:
        sys.exit(f"moeblaze_megatron: not possible in CPU mode: {', '.join(wrong)}")
    return [
        word
        for flag, value in CPU_ARGUMENTS
        if flag not in given
        for word in (flag, value)
        if word is not None
    ]


def _patch(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)
    _patched.append(f"{owner.__name__}.{name}")


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CudaToCpu(TorchFunctionMode):
    """Turn cuda device arguments into cpu, and answer `Tensor.type()` as a CUDA tensor would."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str):
            out = out.replace("torch.", "torch.cuda.", 1)
        return out


class _Stream:
    """A stream, or an event on one: everything before it is already done."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def record_event(self):
        return self


def _patch_torch() -> None:
    cuda, stream = torch.cuda, _Stream()
    properties = types.SimpleNamespace(
        name="cpu", major=9, minor=0, total_memory=0, multi_processor_count=1
    )
    _patch(cuda, "current_device", lambda: CPU)
    _patch(cuda, "device_count", lambda: 1)
    _patch(cuda, "get_device_properties", lambda device=None: properties)
    _patch(cuda, "set_device", lambda device: None)
    _patch(cuda, "synchronize", lambda device=None: None)
    _patch(cuda, "Stream", _Stream)
    _patch(cuda, "current_stream", lambda device=None: stream)
    _patch(cuda, "get_rng_state", lambda device="cuda": torch.get_rng_state())
    _patch(cuda, "set_rng_state", lambda state, device="cuda": torch.set_rng_state(state))
    _patch(cuda, "manual_seed", torch.default_generator.manual_seed)
    _patch(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    _patch(torch.nn.Module, "cuda", lambda self, device=None: self)
    _CudaToCpu().__enter__()
    _patched.append("cuda device arguments")


def _patch_gloo() -> None:
    """Where sizes differ by rank, which gloo refuses: one broadcast, or one reduction, for each."""
    from torch import distributed

    all_gather, reduce_scatter = distributed.all_gather, distributed.reduce_scatter

    def differ(tensors):
        return len({tensor.shape for tensor in tensors}) > 1

    def uneven_all_gather(tensor_list, tensor, group=None, async_op=False):
        if async_op or not differ(tensor_list):
            return all_gather(tensor_list, tensor, group, async_op)
        tensor_list[distributed.get_rank(group)].copy_(tensor)
        for source, part in enumerate(tensor_list):
            distributed.broadcast(part, group=group, group_src=source)

    def uneven_reduce_scatter(
        output, input_list, op=distributed.ReduceOp.SUM, group=None, async_op=False
    ):
        if async_op or not differ(input_list):
            return reduce_scatter(output, input_list, op, group, async_op)
        for target, part in enumerate(input_list):
            total = part.clone()
            distributed.all_reduce(total, op, group)
            if target == distributed.get_rank(group):
                output.copy_(total)

    _patch(distributed, "all_gather", uneven_all_gather)
    _patch(distributed, "reduce_scatter", uneven_reduce_scatter)


def _patch_megatron_core() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def get_rng_state(device="cuda", clone=False, graph_safe=False):
        return torch.get_rng_state()

    def set_rng_state(state, device=-1, graph_safe=False):
        torch.set_rng_state(state)

    def to_split_sizes(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _patch(random, "_get_cuda_rng_state", get_rng_state)
    _patch(random, "_set_cuda_rng_state", set_rng_state)
    # Megatron warns that the two generators, here one, got mixed up.
    logging.getLogger(random.__name__).addFilter(lambda r: "CPU RNG state" not in r.getMessage())
    # The stock function leaves CPU tensors as they are, and all_to_all_single refuses those.
    _patch(token_dispatcher, "maybe_move_tensor_to_cpu", to_split_sizes)
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 reads it without Transformer Engine too
        _patch(moe_utils, "te_general_gemm", None)


def _patch_megatron_training() -> None:
    from megatron.training import initialize

    name = f"{initialize.__name__}.initialize_megatron(allow_no_cuda=True)"
    if name not in _patched:
        function = initialize.initialize_megatron
        # Its callers bound the function at import, so change the default rather than the name. Up
        # to 0.17 it is not the first one.
        with_default = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.default is not parameter.empty
        ]
        defaults = dict(zip(with_default, function.__defaults__, strict=True))
        function.__defaults__ = tuple((defaults | {"allow_no_cuda": True}).values())
        _patched.append(name)
