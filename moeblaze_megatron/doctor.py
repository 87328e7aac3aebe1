"""Look at a machine before training on it: `python -m moeblaze_megatron.doctor`.

Prints the versions found beside those needed and tested, whether the kernels compile for the GPU
(without one, for the architectures asked for, ahead of time), whether a small layer computes what
a plain loop over experts does and, on a GPU, how fast one is. Ends with advice. The exit code is 1
where something would fail, else 0.

T tokens, K experts per token, E experts, H hidden size, F ffn hidden size of one expert.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from packaging.version import Version

from moeblaze_megatron import IndexLists, aot, index_lists_from_topk, moeblaze_experts, patch
from moeblaze_megatron.__main__ import missing_packages
from moeblaze_megatron.mcore.install import TESTED_VERSIONS
from moeblaze_megatron.ops import table
from moeblaze_megatron.version import __version__

NEEDED = {"torch": "2.10", "triton": "3.6"}
TESTED = {"torch": "2.11", "triton": "3.6"}
OPTIONAL = {"transformer-engine": "transformer_engine", "apex": "apex"}
SMALL = (256, 64, 32, 8, 2)  # T, H, F, E, K
LARGE = (16384, 2048, 768, 128, 8)  # Qwen3-30B-A3B's layer


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
        old = Version(module.__version__).release < Version(NEEDED[name]).release
        found.append(
            Finding(
                name,
                f"{module.__version__}; {NEEDED[name]} or newer needed, {TESTED[name]} tested",
                f"install {name} {NEEDED[name]} or newer" if old else "",
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
        table.use(None)
    except ValueError as error:
        advice = f"make it anew with python -m moeblaze_megatron.tune, or unset {table.VARIABLE}"
        return Finding("kernel table", str(error), advice, failed=True)
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


def inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """[x, fc1_weight, fc2_weight, topk_probs] and topk_indices [T, K]."""
    T, H, ffn, E, K = sizes
    generator = torch.Generator(device).manual_seed(1234)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    scores = torch.rand(T, E, generator=generator, device=device)
    topk_probs, topk_indices = scores.softmax(-1).topk(K)
    tensors = [normal(T, H, scale=1), normal(E, 2 * ffn, H, scale=H**-0.5)]
    tensors += [normal(E, H, ffn, scale=ffn**-0.5), topk_probs]
    return tensors, topk_indices.int()


def loop(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    topk_probs: torch.Tensor,
    topk_indices: torch.Tensor,
) -> torch.Tensor:
    """What `moeblaze_experts` computes, expert by expert, in the dtype of its inputs."""
    output = torch.zeros_like(x)
    for e, (w1, w2) in enumerate(zip(fc1_weight, fc2_weight, strict=True)):
        tokens, k = (topk_indices == e).nonzero(as_tuple=True)
        gate, up = (x[tokens] @ w1.t()).chunk(2, -1)
        act = (F.silu(gate) * up * topk_probs[tokens, k, None]).to(x.dtype)
        output = output.index_add(0, tokens, act @ w2.t())
    return output


def computes() -> Finding:
    """Output and gradients of a small layer, no further from fp64 than twice what the loop is."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    about = "correctness"
    tensors, topk_indices = inputs(SMALL, dtype, device)
    lists = index_lists_from_topk(topk_indices, SMALL[3])
    grad_output = torch.randn_like(tensors[0])

    def results(function: Callable, cast: torch.dtype | None = None) -> list[torch.Tensor]:
        leaves = [t.detach().to(cast or t.dtype).requires_grad_() for t in tensors]
        output = function(*leaves)
        return [output, *torch.autograd.grad(output, leaves, grad_output.to(output.dtype))]

    def ours(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_probs: torch.Tensor
    ) -> torch.Tensor:
        return moeblaze_experts(x, w1, w2, topk_probs=topk_probs, index_lists=lists)

    def plain(*leaves: torch.Tensor) -> torch.Tensor:
        return loop(*leaves, topk_indices)

    names = ("output", "grad_x", "grad_fc1_weight", "grad_fc2_weight", "grad_probs")
    exact = results(plain, torch.float64)
    wrong = []
    for name, value, stock, reference in zip(
        names, results(ours), results(plain), exact, strict=True
    ):
        off, lost = ((t.double() - reference).norm().item() for t in (value, stock))
        if not off <= 2 * lost + reference.norm().item() * torch.finfo(dtype).eps / 2:
            wrong.append(f"{name} off by {off:.2e}, the loop by {lost:.2e}")
    what = f"{'kernels' if device == 'cuda' else 'eager twins'} in {dtype}".replace("torch.", "")
    if wrong:
        return Finding(about, f"{what}: {'; '.join(wrong)}", "report this, with this output", True)
    return Finding(about, f"{what}: output and gradients as a loop over experts computes them")


def milliseconds(step: Callable) -> float:
    """Median time of `step` on the GPU, after warming up."""
    for _ in range(3):
        step()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(10)]
    for start, end in events:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[len(events) // 2]


def speed() -> Finding:
    """Forward and backward of a layer, beside cuBLAS on a dense GEMM of as many FLOPs."""
    T, H, ffn, E, K = LARGE
    tensors, topk_indices = inputs(LARGE, torch.bfloat16, "cuda")
    lists: IndexLists = index_lists_from_topk(topk_indices, E)
    leaves = [t.requires_grad_() for t in tensors]
    grad_output = torch.randn_like(leaves[0])

    def layer() -> None:
        output = moeblaze_experts(*leaves[:3], topk_probs=leaves[3], index_lists=lists)
        torch.autograd.grad(output, leaves, grad_output)

    rows, square = T * K, 8192
    flops = 3 * 2 * rows * 3 * H * ffn  # forward, dgrad, wgrad of [2F, H] and [H, F]
    a = torch.randn(square, square, dtype=torch.bfloat16, device="cuda")
    ours = flops / milliseconds(layer) / 1e9
    dense = 2 * square**3 / milliseconds(lambda: a @ a) / 1e9
    return Finding(
        "speed",
        f"{ours:.0f} TFLOP/s, forward and backward of {T} tokens, hidden size {H}, {E} experts of "
        f"{ffn}, {K} per token; a dense {square}^3 matmul {dense:.0f} TFLOP/s",
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
    main()
