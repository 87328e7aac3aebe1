"""Every kernel compiles for the GPUs we name, with the tiles of its launcher, on any machine.

In processes of their own, since this one may interpret its kernels (see conftest.py).
"""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moeblaze_megatron.aot import MAX_SHARED, Resources, as_table

ROOT = Path(__file__).parents[1]
TRITON_OPS = ROOT / "moeblaze_megatron" / "ops"

SPILLS = """
import torch
from moeblaze_megatron import aot
from moeblaze_megatron.ops import table
with table.override("rows", table.Tile(128, 256, 32, num_warps=4, num_stages=3, group=8)):
    rows = aot.compile_step(80, torch.float16)
print(max(row.spilled for row in rows if row.kernel == "_rows_kernel"))
"""

WIDTHS = """
import torch
from moeblaze_megatron import aot
with aot.compiling(90) as compiled, aot.on_meta():
    for workspace_bytes in (1, 2**40):
        aot.step(torch.bfloat16, "swiglu", False, workspace_bytes)
        print(sum(kernel.name == "_rows_hopper_kernel" for kernel in compiled))
"""

FC2_DGRAD = """
import torch
from moeblaze_megatron import aot
with aot.compiling(90) as compiled, aot.on_meta():
    aot.step(torch.bfloat16, "swiglu", False, 2**40)
for kernel in compiled:
    if "fc2_dgrad" in kernel.src.constants.values():
        print(kernel.asm["ttgir"], "// end of a kernel")
"""

SUMS = """
import torch
from moeblaze_megatron import aot
for aot.H, aot.F in ((aot.H, aot.F), (32, 32)):  # many columns to a thread, and one
    with aot.compiling(90) as compiled, aot.on_meta():
        aot.step(torch.bfloat16, "swiglu", False, None, bias=True)
    for kernel in compiled:
        print(kernel.name, kernel.asm["ptx"], "// end of a kernel")
"""


def printed(*words: str, env: dict[str, str]) -> str:
    """What Python prints in a process of its own."""
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


@pytest.fixture(scope="module")
def compiled(plain_env):
    """(arch, dtype) -> Resources of every kernel, compiled once."""

    @functools.cache
    def compile_kernels(arch: int, dtype: str) -> list[Resources]:
        words = ("-m", "moeblaze_megatron.aot", str(arch), "--dtype", dtype, "--json")
        return [Resources(*row) for row in json.loads(printed(*words, env=plain_env))]

    return compile_kernels


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arch", MAX_SHARED)
def test_fits_the_gpu(compiled, arch, dtype):
    """A kernel that asks for more shared memory than there is fails at its launch."""
    for row in compiled(arch, dtype):
        assert row.shared <= MAX_SHARED[arch], row


def test_every_kernel_is_compiled(compiled):
    sources = "\n".join(path.read_text() for path in TRITON_OPS.glob("*.py"))
    defined = set(re.findall(r"^def (_\w+_kernel)\(", sources, re.MULTILINE))
    launched = {row.kernel for arch in MAX_SHARED for row in compiled(arch, "bfloat16")}
    assert launched == defined


def test_no_spills_in_bf16_on_sm_90(compiled):
    """But with a clamp for two registers of a thread beside a bias, up to six in fc2's dgrad."""

    def allowed(words: set[str]) -> int:
        if "clamp" in words:
            return 24 if "fc2_dgrad" in words else 8 if "bias" in words else 0
        return 0

    rows = compiled(90, "bfloat16")
    spilling = [row for row in rows if row.spilled > allowed(set(row.variant.split()))]
    assert not spilling, "\n" + as_table(spilling)


def test_a_spill_is_seen(plain_env):
    """128x256 fp32 accumulators are more than the registers of four warps hold."""
    assert int(printed("-c", SPILLS, env=plain_env)) > 0


def test_columns_of_a_slice_are_no_constant(plain_env):
    """They change with the rows received, from step to step, where nothing may be compiled."""
    narrow, both = map(int, printed("-c", WIDTHS, env=plain_env).split())
    assert narrow == both > 0


def test_reads_are_over_before_tma_overwrites(plain_env):
    """Loads by threads may be on their way when a barrier is said; TMA would overtake them."""
    *kernels, rest = printed("-c", FC2_DGRAD, env=plain_env).split("// end of a kernel")
    assert kernels and not rest.strip()
    reads = ["local_load"] * 4  # gate and up, twice
    for code in kernels:
        said = re.findall(r"local_load|fence_async_shared|arrive_barrier", code)
        assert " ".join([*reads, "fence_async_shared", "arrive_barrier"]) in " ".join(said)


def test_threads_that_sum_agree(plain_env):
    """A product is not fused into the sum with another thread's, as then only one is rounded.

    Threads that should hold the same sum would write different ones to the same place.
    """
    *kernels, rest = printed("-c", SUMS, env=plain_env).split("// end of a kernel")
    assert not rest.strip()
    exchanges = 0
    for code in kernels:
        name = code.split(maxsplit=1)[0]
        received = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%r\d+),", code))
        fused = set(re.findall(r"%r\d+", " ".join(re.findall(r"fma\.rn\.f32\s+\S+ (.*);", code))))
        assert not received & fused, name
        exchanges += len(received)
    assert exchanges


@pytest.mark.parametrize("arch", MAX_SHARED)
def test_print_resources(compiled, arch, capsys):
    with capsys.disabled():
        print(f"\n\nsm_{arch}, bf16\n{as_table(compiled(arch, 'bfloat16'))}")
