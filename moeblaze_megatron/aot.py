"""Compiles the package's kernels for GPUs that need not be there.

    python -m moeblaze_megatron.aot 90

The operator runs on tensors of the meta device, which have shapes and dtypes but no data, and every
launch is compiled with exactly the arguments, tiles and options it was made with. So nothing is
listed here that a launcher says, and a host read of a device value (`.item()`) would fail. Printed
of every kernel: registers, spilled bytes and shared memory. Not under TRITON_INTERPRET, where there
is nothing to compile.
"""

import argparse
import dataclasses
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from moeblaze_megatron import command
from moeblaze_megatron.ops import experts, kernels, launch, table
from moeblaze_megatron.ops.activation import ACTIVATIONS, Activation

T, H, F, E, K = 32768, 2048, 768, 128, 8  # Qwen3-30B-A3B
BIASED = (  # gpt-oss, and halves clamped, and without a gate
    Activation("quick_geglu", clamp=7.0, offset=1.0),
    Activation("swiglu", clamp=7.0),
    "silu",
)
# Shared memory a program may use, in bytes (CUDA C++ programming guide, compute capabilities).
MAX_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs of the GPU; `spilled` and `shared` are bytes."""

    kernel: str
    variant: str
    tile: str
    num_warps: int
    num_stages: int
    registers: int
    spilled: int
    shared: int

    HEADER = ("kernel", "variant", "tile", "warps", "stages", "registers", "spilled", "shared")


class _Driver:
    """Answers the questions that a launch asks before it compiles."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # JITFunction keeps its compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


@contextmanager
def compiling(arch: int) -> Iterator[list]:
    """Inside, a launch compiles its kernel for `sm_<arch>`, lists it and runs nothing."""
    compiled = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel not in compiled:
            compiled.append(kernel)
        return kernel

    with (
        patch.object(triton.runtime.driver, "_active", _Driver(arch)),
        patch.object(launch, "enabled", False),
        patch.object(JITFunction, "run", compile_only),
    ):
        yield compiled


@contextmanager
def launching_nothing(arch: int) -> Iterator[None]:
    """Inside, a launch does nothing; launchers see a GPU of that compute capability."""
    with (
        patch.object(triton.runtime.driver, "_active", _Driver(arch)),
        patch.object(launch, "enabled", False),
        patch.object(JITFunction, "run", lambda self, *args, **kwargs: None),
        patch.object(InterpretedFunction, "run", lambda self, *args, **kwargs: None),
    ):
        yield


@contextmanager
def on_meta() -> Iterator[None]:
    """Inside, the operator takes tensors of the meta device, and launches kernels for them."""
    with (
        patch.object(experts, "kernels_for", return_value=kernels),
        patch.object(experts, "_check_arguments"),  # refuses them
        patch.object(experts, "_check_ids"),  # reads them
        patch.object(torch, "is_autocast_enabled", return_value=False),  # fails for them
    ):
        yield


def resources(kernel) -> Resources:
    """Reads a compiled kernel's resources from its cubin with the cuobjdump that Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage.stdout + usage.stderr)
    registers, stack, local = map(int, found.groups())
    names = kernel.src.fn.arg_names
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items()}
    tile = [str(value) for name, value in constants.items() if name.startswith("BLOCK_")]
    flags = [name.lower() for name, value in constants.items() if value is True]
    flags += ["bias" for name in names if name.endswith("bias_ptr") and name not in constants]
    choices = [value for value in constants.values() if isinstance(value, str)]
    return Resources(
        kernel=kernel.name,
        variant=" ".join(choices + flags),
        tile="x".join(tile),
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        registers=registers,
        spilled=stack + local,
        shared=kernel.metadata.shared,
    )


def step(
    dtype: torch.dtype,
    activation: str | Activation,
    fusion: bool,
    workspace_bytes: int | None,
    bias: bool = False,
) -> None:
    """Training and inference of the layer, from either form of the routing, on meta tensors."""

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

    width = 2 * F if Activation.of(activation).gated else F
    fc1_weight = tensor(E, width, H)
    fc2_weight = tensor(E, H, F)
    biases = {"fc1_bias": tensor(E, width), "fc2_bias": tensor(E, H)} if bias else {}
    for weight in (fc1_weight, fc2_weight):
        weight.main_grad = torch.empty_like(weight, dtype=torch.float32)
    topk_indices = kernels.topk_indices_from_routing_map(tensor(T, E, dtype=torch.bool), K)
    lists = kernels.index_lists(topk_indices, E)
    probs = tensor(T, E, dtype=torch.float32)

    def forward(fp8_store: bool) -> torch.Tensor:
        return experts.moeblaze_experts(
            tensor(T, H),
            fc1_weight,
            fc2_weight,
            probs=probs,
            index_lists=lists,
            activation=activation,
            **biases,
            gradient_accumulation_fusion=fusion,
            workspace_bytes=workspace_bytes,
            fp8_store=fp8_store,
        )

    for fp8_store in (False, True):
        output = forward(fp8_store)
        output.backward(torch.empty_like(output))
    with torch.no_grad():
        forward(False)
    topk_probs = tensor(T, K, dtype=torch.float32).detach()
    permuted_probs = kernels.permuted_probs(topk_probs, lists, dense=False)
    kernels.grad_probs(permuted_probs, lists, topk_probs, dense=False)
    for ranks in (1, 8):
        exchange(ranks, tensor(T, E, dtype=torch.bool), probs.detach())


def exchange(ranks: int, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
    """What expert parallelism launches beside `gather` and `combine`; with 1, expert TP alone."""
    lists = None
    if ranks > 1:
        indices, pairs = kernels.ranks_from_routing_map(routing_map, ranks, K)
        lists = kernels.index_lists(indices, ranks)
        sizes = pairs.new_empty(ranks, 3, dtype=torch.int64)
        kernels.split_sizes(lists.tokens_per_expert, pairs, 2 * H, sizes)
    wire = kernels.pack_routing(routing_map, probs, lists, K)
    ids = wire.new_empty(len(wire), K, dtype=torch.int16)
    kernels.unpack_grad_probs(probs.new_empty(ids.shape), ids, lists, torch.empty_like(probs))


def compile_step(
    arch: int, dtype: torch.dtype, activations: tuple[str | Activation, ...] | None = None
) -> list[Resources]:
    """Every kernel that the operator launches on `sm_<arch>`.

    With both ways to return a weight gradient, and a workspace in which gathered rows fit or not;
    where `activations` names none, all of them in bf16, while one will do in the other dtypes.
    Biases with the activations of `BIASED`, unless `activations` are named.
    """
    biased = []
    if activations is None:
        activations = ACTIVATIONS if dtype is torch.bfloat16 else ACTIVATIONS[:1]
        biased = [(activation, False, None, True) for activation in BIASED]
    variants = [*itertools.product(activations, (False, True), (None, 2**40)), *biased]
    with (
        compiling(arch) as compiled,
        on_meta(),
        table.override("copy", table.Copy(0, 0, 4)),  # fc2's and fc1's gradients of copied rows too
    ):
        for variant in variants:
            step(dtype, *variant)
    return [resources(kernel) for kernel in compiled]


def as_table(rows: list[Resources]) -> str:
    cells = [Resources.HEADER, *(tuple(map(str, dataclasses.astuple(row))) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeblaze_megatron.aot", description="Compile all kernels without a GPU."
    )
    parser.add_argument("arch", type=int, choices=MAX_SHARED, help="90 for sm_90")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--json", action="store_true", help="print JSON and not a table")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set: unset it, interpreted kernels are not compiled")
    rows = compile_step(arguments.arch, getattr(torch, arguments.dtype))
    print(
        json.dumps([dataclasses.astuple(row) for row in rows]) if arguments.json else as_table(rows)
    )


if __name__ == "__main__":
    command.run(main)
