"""Look at a machine before training on it: `python -m moeblaze_megatron.doctor`.

Prints the versions found beside those needed and tested, whether the kernels compile for the GPU
(without one, for the architectures asked for, ahead of time), whether a small layer computes what
a plain loop over experts does and, on a GPU, how fast one is. Ends with advice. The exit code is 1
where something would fail, else 0.
"""

import argparse
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from packaging.version import Version

from moeblaze_megatron import aot, command, moeblaze_experts, patch
from moeblaze_megatron.__main__ import missing_packages
from moeblaze_megatron.bench.shapes import DEVICE, SHAPES, Shape, inputs_for
from moeblaze_megatron.mcore.install import TESTED_VERSIONS
from moeblaze_megatron.ops import table
from moeblaze_megatron.ops.reference import moe_reference
from moeblaze_megatron.version import __version__

NEEDED = {"torch": "2.10", "triton": "3.6"}
TESTED = {"torch": "2.11", "triton": "3.8"}
OPTIONAL = {"transformer-engine": "transformer_engine", "apex": "apex"}
SMALL = Shape(256, 64, 32, 8, 2)
LARGE = replace(SHAPES["qwen3-30b"], T=16384)


class Finding(NamedTuple):
    """One line of the report; `advice` is what to do, `failed` whether training cannot work."""

    about: str
    found: str
    advice: str = ""
    failed: bool = False


def versions() -> list[Finding]:
    """Python, torch, Triton, Megatron and what Megatron can use."""
    found = [
        Finding("moeblaze-megatron", f"{__version__} in {Path(__file__).parent}"),
        Finding("python", sys.version.split()[0]),
    ]
    for name, module in (("torch", torch), ("triton", triton)):
        release = Version(module.__version__).release
        old = release < Version(NEEDED[name]).release
        new = release[:2] > Version(TESTED[name]).release
        found.append(
            Finding(
                name,
                f"{module.__version__}; {NEEDED[name]} or newer needed, {TESTED[name]} tested",
                f"install {name} {NEEDED[name]} or newer"
                if old
                else f"newer than the {TESTED[name]} that was tested" * new,
                failed=old,
            )
        )
    found.append(megatron())
    for name, module in OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            found.append(Finding(name, "not installed, not needed"))
            continue
        try:
            found.append(Finding(name, version(name)))
        except PackageNotFoundError:
            found.append(Finding(name, "installed, of unknown version"))
    return found


def megatron() -> Finding:
    """Megatron-Core, without importing it."""
    missing = missing_packages()
    if "megatron.core" in missing:
        return Finding(
            "megatron-core",
            "not installed",
            "for training with Megatron: pip install 'moeblaze-megatron[megatron]'; "
            "moeblaze_megatron.moeblaze_experts works without",
        )
    core = Path(*importlib.util.find_spec("megatron.core").submodule_search_locations)
    release = patch.version_of(core)
    known = release.startswith(tuple(f"{tested}." for tested in TESTED_VERSIONS))
    line = f"{release} in {core}; {', '.join(TESTED_VERSIONS)} tested"
    if missing:
        return Finding(
            "megatron-core", line, f"training also imports, not installed: {', '.join(missing)}"
        )
    return Finding("megatron-core", line, "" if known else "this version of it was not tested")


def gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding(
            "GPU",
            "none: Megatron runs in CPU mode, for development only",
            "" if torch.version.cuda else "this torch was built without CUDA",
        )
    properties = torch.cuda.get_device_properties()
    arch = 10 * properties.major + properties.minor
    old = arch < min(aot.MAX_SHARED)
    return Finding(
        "GPU",
        f"{torch.cuda.device_count()} x {properties.name}, sm_{arch}, "
        f"{properties.total_memory / 2**30:.0f} GiB; sm_80 or newer needed, tuned for sm_90",
        "use a GPU with sm_80 (A100) or newer" if old else "",
        failed=old,
    )


def kernel_table() -> Finding:
    """Whether the user's kernel configurations can be used here, if there are any."""
    path = os.environ.get(table.VARIABLE)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            table.use(None)
    except ValueError as error:
        advice = f"make it anew with python -m moeblaze_megatron.tune, or unset {table.VARIABLE}"
        return Finding("kernel table", str(error), advice, failed=True)
    if said:  # without a GPU it may be of no use
        path = "; ".join(str(warning.message) for warning in said)
    return Finding("kernel table", path or "the package's own")


def compiles(arch: int, most_shared: int) -> Finding:
    """Whether what a layer in bf16 launches compiles for `sm_<arch>` and fits its shared memory."""
    about = f"kernels, sm_{arch}"
    if os.environ.get("TRITON_INTERPRET"):
        return Finding(about, "interpreted", "unset TRITON_INTERPRET, nothing is compiled with it")
    try:
        rows = aot.compile_step(arch, torch.bfloat16, ("swiglu",))
    except (triton.CompilationError, RuntimeError) as error:  # RuntimeError is what LLVM raises
        cause = error
        while cause.__cause__:  # an error in a function is raised anew by each that calls it
            cause = cause.__cause__
        reason = str(cause).strip().splitlines()[-1]
        return Finding(about, f"do not compile: {reason}", "report this, with this output", True)
    tight = sorted({row.kernel for row in rows if row.shared > most_shared})
    return Finding(
        about,
        f"{len(rows)} variants of {len({row.kernel for row in rows})} kernels compile"
        + (f"; too much shared memory: {', '.join(tight)}" if tight else ""),
        "this GPU has too little shared memory for these tiles" if tight else "",
        failed=bool(tight),
    )


def computes() -> Finding:
    """Output and gradients of a small layer, no further from fp64 than twice what the loop is."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    about, inputs = "correctness", inputs_for(SMALL, dtype)

    def results(function: Callable, cast: torch.dtype | None = None) -> list[torch.Tensor]:
        leaves = [t.detach().to(cast or t.dtype).requires_grad_() for t in inputs.leaves]
        output = function(*leaves)
        grad_output = inputs.grad_output.to(output.dtype)
        return [output, *torch.autograd.grad(output, leaves, grad_output)]

    def ours(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_probs: torch.Tensor
    ) -> torch.Tensor:
        return moeblaze_experts(x, w1, w2, topk_indices=inputs.topk_indices, topk_probs=topk_probs)

    def plain(*leaves: torch.Tensor) -> torch.Tensor:
        return moe_reference(*leaves[:3], inputs.topk_indices, leaves[3])

    names = ("output", "grad_x", "grad_fc1_weight", "grad_fc2_weight", "grad_probs")
    exact = results(plain, torch.float64)
    wrong = []
    for name, value, stock, reference in zip(
        names, results(ours), results(plain), exact, strict=True
    ):
        off, lost = ((t.double() - reference).norm().item() for t in (value, stock))
        if not off <= 2 * lost + reference.norm().item() * torch.finfo(dtype).eps / 2:
            wrong.append(f"{name} off by {off:.2e}, the loop by {lost:.2e}")
    what = f"{'kernels' if DEVICE == 'cuda' else 'eager twins'} in {dtype}".replace("torch.", "")
    if wrong:
        return Finding(about, f"{what}: {'; '.join(wrong)}", "report this, with this output", True)
    return Finding(about, f"{what}: output and gradients as a loop over experts computes them")


def speed() -> Finding:
    """Forward and backward of a layer, beside cuBLAS on a dense GEMM."""
    # Not at the top, since it fails with a torch that is older than needed, which is to be named.
    from moeblaze_megatron.bench.measure import forward_backward, time_calls
    from moeblaze_megatron.bench.peers import PEERS

    square = 8192
    a = torch.randn(square, square, dtype=torch.bfloat16, device="cuda")
    layer, inputs = PEERS["moeblaze"].make(LARGE), inputs_for(LARGE, torch.bfloat16)
    calls = {"layer": partial(forward_backward, layer, inputs), "dense": lambda: a @ a}
    ms = {name: times["p50"] for name, times in time_calls(calls, steps=10).items()}
    ours, dense = 3 * LARGE.forward_flops / ms["layer"] / 1e9, 2 * square**3 / ms["dense"] / 1e9
    return Finding(
        "speed",
        f"{ours:.0f} TFLOP/s, forward and backward of {LARGE.T} tokens, hidden size {LARGE.H}, "
        f"{LARGE.E} experts of {LARGE.F}, {LARGE.K} per token; a dense {square}^3 matmul "
        f"{dense:.0f} TFLOP/s",
        "for figures beside other layers: python -m moeblaze_megatron.bench",
    )


def examine(archs: list[int] | None) -> list[Finding]:
    """All findings, those after a failure that rules them out left away."""
    found = [*versions(), gpu()]
    if not any(finding.failed for finding in found):
        found.append(kernel_table())
    if any(finding.failed for finding in found):
        return found
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties()
        own = 10 * properties.major + properties.minor
        found.append(compiles(own, properties.shared_memory_per_block_optin))
        archs = [arch for arch in archs or () if arch != own]
    for arch in [90] if archs is None else archs:
        found.append(compiles(arch, aot.MAX_SHARED[arch]))
    if not any(finding.failed for finding in found):
        found.append(computes())
    if torch.cuda.is_available() and not any(finding.failed for finding in found):
        found.append(speed())
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeblaze_megatron.doctor",
        description="Say whether this machine can train with moeblaze, and what to change.",
    )
    parser.add_argument(
        "--arch",
        type=int,
        nargs="+",
        choices=aot.MAX_SHARED,
        help="architectures to compile for ahead of time (90 for sm_90, the default with no GPU)",
    )
    found = examine(parser.parse_args(argv).arch)
    for finding in found:
        print(f"{'FAILED ' if finding.failed else '':<7}{finding.about:<19}{finding.found}")
    failed = any(finding.failed for finding in found)
    advice = [f"{finding.about}: {finding.advice}" for finding in found if finding.advice]
    if not failed:
        advice.append("a first run: python -m moeblaze_megatron.quickstart")
    print("\nadvice:", *advice, sep="\n  ")
    sys.exit(failed)


if __name__ == "__main__":
    command.run(main)
