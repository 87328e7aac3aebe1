"""The GEMMs of `gemm` for Hopper GPUs in bf16 and fp16, written in Gluon.

One persistent program a multiprocessor. A ring of shared-memory stages is kept full by one warp
through TMA and, for rows gathered by index, by two warps through asynchronous copies. Two
warpgroups multiply with wgmma, each half the rows of a tile, and wait for each other only through
the ring: while one writes its half out, the other may have the tensor cores to itself, and the next
tile is already on its way. Same sums in the same order as the plain kernels, bit for bit; SiLU in
fewer instructions.

T tokens, E experts, H hidden size, F ffn hidden size, R routed rows. M, N are the rows and columns
of a weight gradient.
"""

from functools import lru_cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moeblaze_megatron.ops.activation import Activation
from moeblaze_megatron.ops.index_lists import IndexLists
from moeblaze_megatron.ops.launch import descriptor, direct
from moeblaze_megatron.ops.table import configuration
from moeblaze_megatron.ops.tiles import BLOCK_R, interpreting

BLOCK_K = 64  # depth of one step: 128 bytes, the widest swizzle
BLOCK_N = 256  # columns of a tile, the widest wgmma; gate and up columns share them in fc1
HALF_R = BLOCK_R // 2  # rows of a tile that one warpgroup multiplies
WRITE_N = 64  # columns that leave at once
NUM_WARPS = 4  # of a warpgroup that multiplies


@lru_cache
def _is_hopper(device: int) -> bool:
    return triton.runtime.driver.active.get_current_target().arch == 90


def fits(x: torch.Tensor) -> bool:
    """Whether these kernels serve `x` on the current GPU."""
    return (
        not interpreting()
        and x.dtype in (torch.bfloat16, torch.float16)
        and _is_hopper(triton.runtime.driver.active.get_current_device())
    )


def fits_fc1(x: torch.Tensor, F: int) -> bool:
    return fits(x) and x.shape[1] % BLOCK_K == 0 and F % (BLOCK_N // 2) == 0


def fits_rows(a: torch.Tensor) -> bool:
    return fits(a) and a.shape[1] % BLOCK_K == 0


@lru_cache
def _layout(rows: int, cols: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = gl.bfloat16 if dtype is torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, cols], kind)


def _descriptor(tensor: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    return descriptor(tensor, (rows, cols), _layout(rows, cols, tensor.dtype))


@lru_cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@gluon.jit
def _tile_of(index, num_tiles, num_cols, GROUP: gl.constexpr):
    """Row tile and column tile of the index-th piece of work, GROUP row tiles at a time."""
    first = index // (GROUP * num_cols) * GROUP
    height = gl.minimum(num_tiles - first, GROUP)  # the last group may be narrower
    inside = index % (GROUP * num_cols)
    return first + inside % height, inside // height


@gluon.jit
def _barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """Of the ring: `empty`, which both multipliers say; `copied`, by each of 64 threads that copy;
    `ready`, after ARRIVALS: of the bytes that TMA brings, and of the copies."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    copied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(copied.index(i), count=64)
        mbarrier.init(ready.index(i), count=ARRIVALS)
    return empty, copied, ready


@gluon.jit
def _await_empty(empty, step, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    return stage


@gluon.jit
def _await(barriers, step, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(barriers.index(stage), (step // STAGES) & 1)
    return stage


@gluon.jit
def _release_previous(empty, step, used, STAGES: gl.constexpr):
    """The stage before `step`'s may be filled again, if this tile has `used` it."""
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=used)


@gluon.jit
def _announce(steps, copied, ready, step, STAGES: gl.constexpr):
    """Passes `copied` on as `ready`: copies come by another proxy than wgmma reads by."""
    for _ in range(steps):
        stage = _await(copied, step, STAGES)
        fence_async_shared()
        mbarrier.arrive(ready.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def _announce_rows(
    copied,
    ready,
    tile_expert_ptr,  # [num_tiles]
    num_tiles,
    num_cols,
    K: gl.constexpr,
    GATHER: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp, beside `_copy_rows`."""
    if GATHER:
        step = 0
        for index in range(gl.program_id(0), num_tiles * num_cols, gl.num_programs(0)):
            tile, _ = _tile_of(index, num_tiles, num_cols, GROUP)
            if gl.load(tile_expert_ptr + tile) >= 0:
                step = _announce(K // BLOCK_K, copied, ready, step, STAGES)


@gluon.jit
def _copy_rows(
    a_ptr,  # [T, K] when GATHER, else unused
    a_stages,
    empty,
    copied,
    expert_token_indices_ptr,  # [R]
    expert_token_offsets_ptr,  # [E+1]
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    num_tiles,
    num_cols,
    K: gl.constexpr,
    GATHER: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Two warps: rows by token, 16 bytes a thread and copy."""
    if GATHER:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
        depth = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
        step = 0
        for index in range(gl.program_id(0), num_tiles * num_cols, gl.num_programs(0)):
            tile, _ = _tile_of(index, num_tiles, num_cols, GROUP)
            expert = gl.load(tile_expert_ptr + tile)
            if expert >= 0:
                row_start = gl.load(tile_row_start_ptr + tile)
                rows = row_start + gl.arange(0, BLOCK_R, gl.SliceLayout(1, layout))
                end = gl.load(expert_token_offsets_ptr + expert + 1)
                token = gl.load(expert_token_indices_ptr + rows, mask=rows < end, other=0)
                ptrs = a_ptr + token.to(gl.int64)[:, None] * K + depth[None, :]
                for k0 in range(0, K, BLOCK_K):
                    stage = _await_empty(empty, step, STAGES)
                    async_copy.async_copy_global_to_shared(a_stages.index(stage), ptrs + k0)
                    async_copy.mbarrier_arrive(copied.index(stage), increment_count=False)
                    step += 1


@gluon.jit
def _fetch_rows(
    a_desc,  # [R, K] unless GATHER, else unused
    weight_desc,  # [E * weight_rows, K] when N_FIRST, else [E * weight_rows, N]
    a_stages,
    weight_stages,
    empty,
    ready,
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    num_tiles,
    num_cols,
    n_start,
    weight_rows,  # rows of one expert in weight_desc
    K: gl.constexpr,
    GATHER: gl.constexpr,
    N_FIRST: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp: weights, and rows that need no lookup, by TMA."""
    PARTS: gl.constexpr = 2 if GATED else 1  # gate and up halves are two loads
    COLS: gl.constexpr = BLOCK_N // PARTS
    BYTES: gl.constexpr = PARTS * weight_desc.block_type.nbytes + (
        0 if GATHER else a_desc.block_type.nbytes
    )
    step = 0
    for index in range(gl.program_id(0), num_tiles * num_cols, gl.num_programs(0)):
        tile, col = _tile_of(index, num_tiles, num_cols, GROUP)
        expert = gl.load(tile_expert_ptr + tile)
        if expert >= 0:
            row_start = gl.load(tile_row_start_ptr + tile)
            n0 = n_start + col * COLS
            first = expert * weight_rows
            for k0 in range(0, K, BLOCK_K):
                stage = _await_empty(empty, step, STAGES)
                bar = ready.index(stage)
                mbarrier.expect(bar, BYTES)
                if N_FIRST:
                    for part in gl.static_range(PARTS):
                        tma.async_copy_global_to_shared(
                            weight_desc,
                            [first + part * (weight_rows // 2) + n0, k0],
                            bar,
                            weight_stages.index(stage).slice(part * COLS, COLS),
                        )
                else:
                    tma.async_copy_global_to_shared(
                        weight_desc, [first + k0, n0], bar, weight_stages.index(stage)
                    )
                if not GATHER:
                    tma.async_copy_global_to_shared(
                        a_desc, [row_start, k0], bar, a_stages.index(stage)
                    )
                step += 1


@gluon.jit
def _halves(value):
    """Left and right half of the columns; each thread keeps what it has."""
    ROWS: gl.constexpr = value.shape[0]
    HALF: gl.constexpr = value.shape[1] // 2
    return gl.split(value.reshape((ROWS, 2, HALF)).permute((0, 2, 1)))


@gluon.jit
def _write_part(
    value, buffer, out_desc, out_ptr, row, row_end, n0, cols, stride, TRANSPOSED: gl.constexpr
):  # fmt: skip
    """A square part of a tile, by TMA; one that ends inside is written row by row."""
    SIZE: gl.constexpr = value.shape[0]
    value = value.to(out_ptr.dtype.element_ty)
    target = buffer.permute((1, 0)) if TRANSPOSED else buffer
    if row + SIZE <= row_end:
        tma.store_wait(1)  # the part before the last one has left this buffer
        target.store(value)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row, n0], buffer)
    else:
        tma.store_wait(0)
        target.store(value)
        WIDE: gl.constexpr = SIZE // 8
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE, WIDE], [4, 1], [1, 0])
        r = gl.arange(0, SIZE, gl.SliceLayout(1, layout))
        n = n0 + gl.arange(0, SIZE, gl.SliceLayout(0, layout))
        ptrs = out_ptr + row.to(gl.int64) * stride + (r[:, None] * stride + n[None, :])
        inside = (row + r < row_end)[:, None] & (n < cols)[None, :]
        gl.store(ptrs, buffer.load(layout), mask=inside)


@gluon.jit
def _write_tile(
    value,  # a warpgroup's rows of a tile; its columns become rows of `out` when TRANSPOSED
    buffers,  # shared memory; parts go through the two from `slot` on
    slot: gl.constexpr,
    out_desc,  # [rows, cols]
    out_ptr,  # [rows, cols] by `stride`
    row,
    row_end,  # rows from here on belong to the next expert
    n0,
    cols,
    stride,
    WRITE_N: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """Parts of WRITE_N columns, so that one is filled while the other leaves."""
    HALF: gl.constexpr = value.shape[1] // 2
    left, right = _halves(value)
    next_row = row + HALF if TRANSPOSED else row
    next_n = n0 if TRANSPOSED else n0 + HALF
    if HALF > WRITE_N:
        _write_tile(
            left, buffers, slot, out_desc, out_ptr, row, row_end, n0, cols, stride, WRITE_N,
            TRANSPOSED,
        )  # fmt: skip
        _write_tile(
            right, buffers, slot, out_desc, out_ptr, next_row, row_end, next_n, cols, stride,
            WRITE_N, TRANSPOSED,
        )  # fmt: skip
    else:
        _write_part(
            left, buffers.index(slot), out_desc, out_ptr, row, row_end, n0, cols, stride, TRANSPOSED
        )
        _write_part(
            right, buffers.index(slot + 1), out_desc, out_ptr, next_row, row_end, next_n, cols,
            stride, TRANSPOSED,
        )  # fmt: skip


@gluon.jit
def _multiply(
    half: gl.constexpr,  # of a stage's rows, this warpgroup's
    used,  # whether any of them is in use
    a_stages,
    weight_stages,
    empty,
    ready,
    step,
    K: gl.constexpr,
    N_FIRST: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    HALF_R: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A warpgroup's rows of a tile times the weights, with one step always in flight."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros((HALF_R, BLOCK_N), gl.float32, layout)
    if used:
        for k0 in range(0, K, BLOCK_K):
            stage = _await(ready, step, STAGES)
            a = a_stages.index(stage).slice(half * HALF_R, HALF_R)
            w = weight_stages.index(stage)
            if N_FIRST:
                w = w.permute((1, 0))
            acc = warpgroup_mma(a, w, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            _release_previous(empty, step, k0 > 0, STAGES)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _release_previous(empty, step, True, STAGES)
    else:  # only ever the second half
        for _ in range(0, K, BLOCK_K):
            _await(ready, step, STAGES)
            step += 1
            _release_previous(empty, step, True, STAGES)
    return acc, step


@gluon.jit
def _approximate(op: gl.constexpr, x):
    """An fp32 instruction of the special function unit, within 2 ulp, subnormals as zero."""
    return gl.inline_asm_elementwise(
        op + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _clamped_gate(gate, ACTIVATION: gl.constexpr):
    """As `activation._clamped_gate`."""
    if ACTIVATION.clamp is not None:
        gate = gl.where(gate > ACTIVATION.clamp, ACTIVATION.clamp, gate)  # NaN stays NaN
    return gate


@gluon.jit
def _factor(up, ACTIVATION: gl.constexpr):
    """As `activation._factor`."""
    if ACTIVATION.clamp is not None:
        up = gl.where(up > ACTIVATION.clamp, ACTIVATION.clamp, up)
        up = gl.where(up < -ACTIVATION.clamp, -ACTIVATION.clamp, up)
    if ACTIVATION.offset != 0.0:
        up = up + ACTIVATION.offset
    return up


@gluon.jit
def _activate(gate, up, ACTIVATION: gl.constexpr):
    """f(gate) * up when gated, else f(gate), as `activation.activate`."""
    NAME: gl.constexpr = ACTIVATION.name
    gate = _clamped_gate(gate, ACTIVATION)
    if NAME == "swiglu" or NAME == "silu":
        y = gate * _approximate("rcp", 1.0 + _approximate("ex2", gate * -1.4426950408889634))
    elif NAME == "quick_geglu":
        y = gate * _approximate("rcp", 1.0 + _approximate("ex2", gate * -2.4554669595930155))
    elif NAME == "geglu" or NAME == "gelu":
        y = gate * (0.5 * (1.0 + gl.erf(gate * 0.7071067811865476)))
    else:
        gl.static_assert(NAME == "squared_relu")
        r = gl.where(gate <= 0, 0.0, gate)  # NaN stays NaN
        y = r * r
    if ACTIVATION.gated:
        y = y * _factor(up, ACTIVATION)
    return y


@gluon.jit
def _act(gate, up, permuted_probs_ptr, row, row_end, ACTIVATION: gl.constexpr):
    rows = row + gl.arange(0, gate.shape[0], gl.SliceLayout(1, gate.type.layout))
    prob = gl.load(permuted_probs_ptr + rows, mask=rows < row_end, other=0.0)
    return _activate(gate, up, ACTIVATION) * prob[:, None]


@gluon.jit
def _write_act(
    gate,
    up,  # unused unless gated
    permuted_probs_ptr,  # [R]
    buffers,
    slot: gl.constexpr,
    act_desc,  # [R, F]
    act_ptr,  # [R, F]
    row,
    row_end,
    f0,
    F: gl.constexpr,
    WRITE_N: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """As `_write_tile`; activation and probability by part, since registers hold no more."""
    HALF: gl.constexpr = gate.shape[1] // 2
    gate, right = _halves(gate)
    up, right_up = _halves(up)
    if HALF > WRITE_N:
        _write_act(
            gate, up, permuted_probs_ptr, buffers, slot, act_desc, act_ptr, row, row_end, f0, F,
            WRITE_N, ACTIVATION,
        )  # fmt: skip
        _write_act(
            right, right_up, permuted_probs_ptr, buffers, slot, act_desc, act_ptr, row, row_end,
            f0 + HALF, F, WRITE_N, ACTIVATION,
        )  # fmt: skip
    else:
        _write_part(
            _act(gate, up, permuted_probs_ptr, row, row_end, ACTIVATION), buffers.index(slot),
            act_desc, act_ptr, row, row_end, f0, F, F, False,
        )  # fmt: skip
        _write_part(
            _act(right, right_up, permuted_probs_ptr, row, row_end, ACTIVATION),
            buffers.index(slot + 1), act_desc, act_ptr, row, row_end, f0 + HALF, F, F, False,
        )  # fmt: skip


@gluon.jit
def _add_bias(acc, bias_ptr, f0, F: gl.constexpr, GATED: gl.constexpr):
    """A tile plus its expert's bias [2F] or [F]; gated, its left half is gate and its right up."""
    COLS: gl.constexpr = acc.shape[1]
    n = gl.arange(0, COLS, gl.SliceLayout(0, acc.type.layout))
    if GATED:
        bias = gl.load(bias_ptr + f0 + gl.where(n < COLS // 2, n, F - COLS // 2 + n))
    else:
        bias = gl.load(bias_ptr + f0 + n, mask=f0 + n < F, other=0.0)
    return acc + bias.to(gl.float32)[None, :]


@gluon.jit
def _multiply_fc1(
    half: gl.constexpr,
    fc1_bias_ptr,  # [E, 2F] or [E, F], or None
    permuted_probs_ptr,  # [R]
    fc1_output_ptr,  # [R, 2F] or [R, F]
    fc1_output_desc,
    act_ptr,  # [R, F]
    act_desc,
    a_stages,
    weight_stages,
    buffers,
    empty,
    ready,
    expert_token_offsets_ptr,  # [E+1]
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    num_tiles,
    num_cols,
    H: gl.constexpr,
    F: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    SAVE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_H: gl.constexpr,
    HALF_R: gl.constexpr,
    WRITE_N: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warpgroup: gate and up side by side in registers, then activation and probability."""
    COLS: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    WIDTH: gl.constexpr = 2 * F if GATED else F
    step = 0
    for index in range(gl.program_id(0), num_tiles * num_cols, gl.num_programs(0)):
        tile, col = _tile_of(index, num_tiles, num_cols, GROUP)
        expert = gl.load(tile_expert_ptr + tile)
        if expert >= 0:
            row_start = gl.load(tile_row_start_ptr + tile) + half * HALF_R
            end = gl.load(expert_token_offsets_ptr + expert + 1)
            used = row_start < end
            acc, step = _multiply(
                half, used, a_stages, weight_stages, empty, ready, step, H, True, BLOCK_N, BLOCK_H,
                HALF_R, STAGES,
            )  # fmt: skip
            if used:
                f0 = col * COLS
                if fc1_bias_ptr is not None:
                    acc = _add_bias(acc, fc1_bias_ptr + expert.to(gl.int64) * WIDTH, f0, F, GATED)
                gate, up = acc, acc
                if GATED:
                    gate, up = _halves(acc)
                if SAVE:
                    _write_tile(
                        gate, buffers, 2 * half, fc1_output_desc, fc1_output_ptr, row_start, end,
                        f0, WIDTH, WIDTH, WRITE_N, False,
                    )  # fmt: skip
                    if GATED:
                        _write_tile(
                            up, buffers, 2 * half, fc1_output_desc, fc1_output_ptr, row_start, end,
                            F + f0, WIDTH, WIDTH, WRITE_N, False,
                        )  # fmt: skip
                _write_act(
                    gate, up, permuted_probs_ptr, buffers, 2 * half, act_desc, act_ptr, row_start,
                    end, f0, F, WRITE_N, ACTIVATION,
                )  # fmt: skip
    tma.store_wait(0)


@direct
@gluon.jit(do_not_specialize=["num_tiles"])
def _fc1_hopper_kernel(
    x_ptr,  # [T, H] when GATHER, else unused
    x_desc,  # [R, H] unless GATHER
    fc1_weight_desc,  # [E * 2F, H] or [E * F, H]
    fc1_bias_ptr,  # [E, 2F] or [E, F], or None
    permuted_probs_ptr,  # [R]
    fc1_output_ptr,  # [R, 2F] or [R, F], saved for backward
    fc1_output_desc,
    act_ptr,  # [R, F]
    act_desc,
    expert_token_indices_ptr,  # [R]
    expert_token_offsets_ptr,  # [E+1]
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    num_tiles,
    H: gl.constexpr,
    F: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    SAVE: gl.constexpr,
    GATHER: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_H: gl.constexpr,
    HALF_R: gl.constexpr,
    WRITE_N: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """act = prob * f(x W^T + b). x = 3, W = 2, prob = 0.5, squared_relu -> fc1_output 6, act 18"""
    PARTS: gl.constexpr = 2 if GATED else 1
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_H], dtype)
    x_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_H], rows_layout)
    weight_stages = gl.allocate_shared_memory(
        dtype, [STAGES, BLOCK_N, BLOCK_H], fc1_weight_desc.layout
    )
    buffers = gl.allocate_shared_memory(dtype, [4, HALF_R, WRITE_N], act_desc.layout)
    empty, copied, ready = _barriers(STAGES, 2 if GATHER else 1)
    num_cols = gl.cdiv(F, BLOCK_N // PARTS)
    gl.warp_specialize(
        [
            (
                _multiply_fc1,
                (
                    0, fc1_bias_ptr, permuted_probs_ptr, fc1_output_ptr, fc1_output_desc, act_ptr,
                    act_desc, x_stages, weight_stages, buffers, empty, ready,
                    expert_token_offsets_ptr, tile_expert_ptr, tile_row_start_ptr, num_tiles,
                    num_cols, H, F, ACTIVATION, GATED, SAVE, BLOCK_N, BLOCK_H, HALF_R, WRITE_N,
                    GROUP, STAGES,
                ),
            ),
            (
                _multiply_fc1,
                (
                    1, fc1_bias_ptr, permuted_probs_ptr, fc1_output_ptr, fc1_output_desc, act_ptr,
                    act_desc, x_stages, weight_stages, buffers, empty, ready,
                    expert_token_offsets_ptr, tile_expert_ptr, tile_row_start_ptr, num_tiles,
                    num_cols, H, F, ACTIVATION, GATED, SAVE, BLOCK_N, BLOCK_H, HALF_R, WRITE_N,
                    GROUP, STAGES,
                ),
            ),
            (
                _copy_rows,
                (
                    x_ptr, x_stages, empty, copied, expert_token_indices_ptr,
                    expert_token_offsets_ptr, tile_expert_ptr, tile_row_start_ptr, num_tiles,
                    num_cols, H, GATHER, BLOCK_R, BLOCK_H, GROUP, STAGES,
                ),
            ),
            (
                _fetch_rows,
                (
                    x_desc, fc1_weight_desc, x_stages, weight_stages, empty, ready,
                    tile_expert_ptr, tile_row_start_ptr, num_tiles, num_cols, 0, PARTS * F, H,
                    GATHER, True, GATED, BLOCK_N, BLOCK_H, GROUP, STAGES,
                ),
            ),
            (
                _announce_rows,
                (
                    copied, ready, tile_expert_ptr, num_tiles, num_cols, H, GATHER, BLOCK_H, GROUP,
                    STAGES,
                ),
            ),
        ],
        [4, 2, 1, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def fc1(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    permuted_probs: torch.Tensor,
    lists: IndexLists,
    activation: Activation,
    fc1_output: torch.Tensor | None,
    act: torch.Tensor,
    gather: bool,
    bias: torch.Tensor | None,
) -> None:
    """`gemm.fc1` into given buffers; fc1_output None is not saved."""
    E, width, H = fc1_weight.shape
    F = act.shape[1]
    gated = activation.gated
    saved = act if fc1_output is None else fc1_output
    ring = configuration("fc1_hopper", x, F, H)
    _fc1_hopper_kernel[(_programs(x.device),)](
        x,
        None if gather else _descriptor(x, BLOCK_R, BLOCK_K),
        _descriptor(fc1_weight.view(E * width, H), BLOCK_N // 2 if gated else BLOCK_N, BLOCK_K),
        bias,
        permuted_probs,
        saved,
        _descriptor(saved, HALF_R, WRITE_N),
        act,
        _descriptor(act, HALF_R, WRITE_N),
        lists.expert_token_indices,
        lists.expert_token_offsets,
        lists.tile_expert,
        lists.tile_row_start,
        lists.num_tiles,
        H,
        F,
        activation,
        gated,
        fc1_output is not None,
        gather,
        BLOCK_R,
        BLOCK_N,
        BLOCK_K,
        HALF_R,
        WRITE_N,
        ring.group,
        ring.stages,
        ring.multiply_registers,
        ring.load_registers,
        num_warps=NUM_WARPS,
    )


@gluon.jit
def _multiply_rows(
    half: gl.constexpr,
    out_ptr,  # [R, cols]
    out_desc,
    a_stages,
    weight_stages,
    buffers,
    empty,
    ready,
    expert_token_offsets_ptr,  # [E+1]
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    num_tiles,
    num_cols,
    cols,
    K: gl.constexpr,
    N_FIRST: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    HALF_R: gl.constexpr,
    WRITE_N: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warpgroup of a row tile times a weight tile."""
    step = 0
    for index in range(gl.program_id(0), num_tiles * num_cols, gl.num_programs(0)):
        tile, col = _tile_of(index, num_tiles, num_cols, GROUP)
        expert = gl.load(tile_expert_ptr + tile)
        if expert >= 0:
            row_start = gl.load(tile_row_start_ptr + tile) + half * HALF_R
            end = gl.load(expert_token_offsets_ptr + expert + 1)
            used = row_start < end
            acc, step = _multiply(
                half, used, a_stages, weight_stages, empty, ready, step, K, N_FIRST, BLOCK_N,
                BLOCK_K, HALF_R, STAGES,
            )  # fmt: skip
            if used:
                _write_tile(
                    acc, buffers, 2 * half, out_desc, out_ptr, row_start, end, col * BLOCK_N, cols,
                    cols, WRITE_N, False,
                )  # fmt: skip
    tma.store_wait(0)


@direct
@gluon.jit(do_not_specialize=["num_tiles"])
def _rows_hopper_kernel(
    a_ptr,  # [T, K] when GATHER, else unused
    a_desc,  # [R, K] unless GATHER
    weight_desc,  # [E * N, K] when N_FIRST, else [E * K, N]
    out_ptr,  # [R, cols], columns n_start .. n_start + cols of the product
    out_desc,
    expert_token_indices_ptr,  # [R]
    expert_token_offsets_ptr,  # [E+1]
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    num_tiles,
    n_start,
    cols,
    weight_rows,
    K: gl.constexpr,
    GATHER: gl.constexpr,
    N_FIRST: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    HALF_R: gl.constexpr,
    WRITE_N: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """Row times its expert's weight. a = [2, 3], experts = [0, 1], W = [10, 100] -> [20, 300]"""
    dtype: gl.constexpr = a_ptr.dtype.element_ty
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_K], dtype)
    a_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_K], rows_layout)
    weight_stages = gl.allocate_shared_memory(
        dtype,
        [STAGES] + weight_desc.block_type.shape,  # noqa: RUF005 (Gluon has no starred lists)
        weight_desc.layout,
    )
    buffers = gl.allocate_shared_memory(dtype, [4, HALF_R, WRITE_N], out_desc.layout)
    empty, copied, ready = _barriers(STAGES, 2 if GATHER else 1)
    num_cols = gl.cdiv(cols, BLOCK_N)
    gl.warp_specialize(
        [
            (
                _multiply_rows,
                (
                    0, out_ptr, out_desc, a_stages, weight_stages, buffers, empty, ready,
                    expert_token_offsets_ptr, tile_expert_ptr, tile_row_start_ptr, num_tiles,
                    num_cols, cols, K, N_FIRST, BLOCK_N, BLOCK_K, HALF_R, WRITE_N, GROUP, STAGES,
                ),
            ),
            (
                _multiply_rows,
                (
                    1, out_ptr, out_desc, a_stages, weight_stages, buffers, empty, ready,
                    expert_token_offsets_ptr, tile_expert_ptr, tile_row_start_ptr, num_tiles,
                    num_cols, cols, K, N_FIRST, BLOCK_N, BLOCK_K, HALF_R, WRITE_N, GROUP, STAGES,
                ),
            ),
            (
                _copy_rows,
                (
                    a_ptr, a_stages, empty, copied, expert_token_indices_ptr,
                    expert_token_offsets_ptr, tile_expert_ptr, tile_row_start_ptr, num_tiles,
                    num_cols, K, GATHER, BLOCK_R, BLOCK_K, GROUP, STAGES,
                ),
            ),
            (
                _fetch_rows,
                (
                    a_desc, weight_desc, a_stages, weight_stages, empty, ready, tile_expert_ptr,
                    tile_row_start_ptr, num_tiles, num_cols, n_start, weight_rows, K, GATHER,
                    N_FIRST, False, BLOCK_N, BLOCK_K, GROUP, STAGES,
                ),
            ),
            (
                _announce_rows,
                (
                    copied, ready, tile_expert_ptr, num_tiles, num_cols, K, GATHER, BLOCK_K, GROUP,
                    STAGES,
                ),
            ),
        ],
        [4, 2, 1, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def rows_gemm(
    a: torch.Tensor,
    weight: torch.Tensor,
    lists: IndexLists,
    out: torch.Tensor,
    n_start: int,
    gather: bool,
    transposed: bool,
) -> None:
    """`gemm.rows_gemm`."""
    E, weight_rows, weight_cols = weight.shape
    block = (BLOCK_N, BLOCK_K) if transposed else (BLOCK_K, BLOCK_N)
    ring = configuration("rows_hopper", a, out.shape[1], a.shape[1])
    _rows_hopper_kernel[(_programs(a.device),)](
        a,
        None if gather else _descriptor(a, BLOCK_R, BLOCK_K),
        _descriptor(weight.view(E * weight_rows, weight_cols), *block),
        out,
        _descriptor(out, HALF_R, WRITE_N),
        lists.expert_token_indices,
        lists.expert_token_offsets,
        lists.tile_expert,
        lists.tile_row_start,
        lists.num_tiles,
        n_start,
        out.shape[1],
        weight_rows,
        a.shape[1],
        gather,
        transposed,
        BLOCK_R,
        BLOCK_N,
        BLOCK_K,
        HALF_R,
        WRITE_N,
        ring.group,
        ring.stages,
        ring.multiply_registers,
        ring.load_registers,
        num_warps=NUM_WARPS,
    )


@gluon.jit
def _copy(stage, ptr, row, in_expert, c0, WIDTH: gl.constexpr, layout: gl.constexpr):
    """One stage of a weight gradient by asynchronous copies; what is outside becomes zero."""
    c = c0 + gl.arange(0, stage.shape[1], gl.SliceLayout(0, layout))
    ptrs = ptr + row.to(gl.int64)[:, None] * WIDTH + c[None, :]
    async_copy.async_copy_global_to_shared(
        stage, ptrs, mask=in_expert[:, None] & (c < WIDTH)[None, :]
    )


@gluon.jit
def _piece(
    index, expert_token_offsets_ptr, M: gl.constexpr, N: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Expert, first row and column, and the expert's routed rows of the index-th tile."""
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    expert = index // (num_m * num_n)
    tile_m, tile_n = _tile_of(index % (num_m * num_n), num_m, num_n, GROUP)
    start = gl.load(expert_token_offsets_ptr + expert)
    end = gl.load(expert_token_offsets_ptr + expert + 1)
    return expert, tile_m * BLOCK_M, tile_n * BLOCK_N, start, end


@gluon.jit
def _announce_wgrad(
    copied,
    ready,
    expert_token_offsets_ptr,  # [E+1]
    pieces,
    M: gl.constexpr,
    N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp, beside `_copy_wgrad`."""
    step = 0
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        _, _, _, start, end = _piece(index, expert_token_offsets_ptr, M, N, BLOCK_M, BLOCK_N, GROUP)
        step = _announce(gl.cdiv(end - start, BLOCK_R), copied, ready, step, STAGES)


@gluon.jit
def _copy_wgrad(
    a_ptr,  # [T, M] when GATHER, else [R, M]
    b_ptr,  # [R, N]
    a_stages,
    b_stages,
    empty,
    copied,
    expert_token_indices_ptr,  # [R]
    expert_token_offsets_ptr,  # [E+1]
    pieces,
    M: gl.constexpr,
    N: gl.constexpr,
    GATHER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Two warps: the gathered operand, and both in the last step of an expert.

    That step may end in rows of the next expert, or in rows never written, which may be NaN.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    r = gl.arange(0, BLOCK_R, gl.SliceLayout(1, layout))
    step = 0
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        _, m0, n0, start, end = _piece(
            index, expert_token_offsets_ptr, M, N, BLOCK_M, BLOCK_N, GROUP
        )
        if GATHER:
            token = gl.load(expert_token_indices_ptr + start + r, mask=start + r < end, other=0)
        for r0 in range(start, end, BLOCK_R):
            stage = _await_empty(empty, step, STAGES)
            a, b = a_stages.index(stage), b_stages.index(stage)
            if r0 + BLOCK_R <= end:
                if GATHER:
                    _copy(a, a_ptr, token, r >= 0, m0, M, layout)
            else:
                inside = r0 + r < end
                _copy(a, a_ptr, token if GATHER else r0 + r, inside, m0, M, layout)
                for c in gl.static_range(0, BLOCK_N, BLOCK_M):
                    _copy(b.slice(c, BLOCK_M, dim=1), b_ptr, r0 + r, inside, n0 + c, N, layout)
            async_copy.mbarrier_arrive(copied.index(stage), increment_count=False)
            if GATHER:  # read ahead for the next step
                rows = r0 + BLOCK_R + r
                token = gl.load(expert_token_indices_ptr + rows, mask=rows < end, other=0)
            step += 1


@gluon.jit
def _fetch_wgrad(
    a_desc,  # [R, M] unless GATHER
    b_desc,  # [R, N]
    a_stages,
    b_stages,
    empty,
    ready,
    expert_token_offsets_ptr,  # [E+1]
    pieces,
    M: gl.constexpr,
    N: gl.constexpr,
    GATHER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp: by TMA what `_copy_wgrad` does not copy."""
    BYTES: gl.constexpr = b_desc.block_type.nbytes + (0 if GATHER else a_desc.block_type.nbytes)
    step = 0
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        _, m0, n0, start, end = _piece(
            index, expert_token_offsets_ptr, M, N, BLOCK_M, BLOCK_N, GROUP
        )
        for r0 in range(start, end, BLOCK_R):
            stage = _await_empty(empty, step, STAGES)
            bar = ready.index(stage)
            if r0 + BLOCK_R <= end:
                mbarrier.expect(bar, BYTES)
                tma.async_copy_global_to_shared(b_desc, [r0, n0], bar, b_stages.index(stage))
                if not GATHER:
                    tma.async_copy_global_to_shared(a_desc, [r0, m0], bar, a_stages.index(stage))
            else:
                mbarrier.arrive(bar, count=1)
            step += 1


@gluon.jit
def _add_tile(
    out_ptr, value, m0, n0, M, N, stride, WRITE_N: gl.constexpr, TRANSPOSED: gl.constexpr
):  # fmt: skip
    """out += value, summed in fp32, a few columns at a time: addresses take registers too."""
    COLS: gl.constexpr = value.shape[1]
    if COLS > WRITE_N:
        left, right = _halves(value)
        _add_tile(out_ptr, left, m0, n0, M, N, stride, WRITE_N, TRANSPOSED)
        _add_tile(out_ptr, right, m0, n0 + COLS // 2, M, N, stride, WRITE_N, TRANSPOSED)
    else:
        layout: gl.constexpr = value.type.layout
        m = m0 + gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
        n = n0 + gl.arange(0, COLS, gl.SliceLayout(0, layout))
        if TRANSPOSED:
            ptrs = out_ptr + (n[None, :] * stride + m[:, None])
        else:
            ptrs = out_ptr + (m[:, None] * stride + n[None, :])
        inside = (m < M)[:, None] & (n < N)[None, :]
        value += gl.load(ptrs, mask=inside, other=0.0).to(gl.float32)
        gl.store(ptrs, value.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _multiply_wgrad(
    half: gl.constexpr,
    out_ptr,  # [E, M, N], or [E, N, M] when TRANSPOSED
    out_desc,  # the same as rows, unless ACCUMULATE
    a_stages,
    b_stages,
    buffers,
    empty,
    ready,
    expert_token_offsets_ptr,  # [E+1]
    pieces,
    rows,
    cols,
    M: gl.constexpr,
    N: gl.constexpr,
    out_stride_e: gl.constexpr,
    out_stride: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    WRITE_N: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warpgroup: the sum over an expert's rows, written as it is or added to what is there."""
    HALF_M: gl.constexpr = BLOCK_M // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    step = 0
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        expert, m0, n0, start, end = _piece(
            index, expert_token_offsets_ptr, M, N, BLOCK_M, BLOCK_N, GROUP
        )
        m0 += half * HALF_M
        acc = gl.zeros((HALF_M, BLOCK_N), gl.float32, layout)
        for r0 in range(start, end, BLOCK_R):
            stage = _await(ready, step, STAGES)
            a = a_stages.index(stage).slice(half * HALF_M, HALF_M, dim=1).permute((1, 0))
            acc = warpgroup_mma(a, b_stages.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            _release_previous(empty, step, r0 > start, STAGES)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _release_previous(empty, step, start < end, STAGES)
        if ACCUMULATE:
            if start < end:
                # Offsets inside one expert's weight fit int32; `fits_wgrad` sees to it.
                expert_ptr = out_ptr + expert.to(gl.int64) * out_stride_e
                _add_tile(expert_ptr, acc, m0, n0, M, N, out_stride, WRITE_N // 2, TRANSPOSED)
        else:
            first = expert * (out_stride_e // out_stride)
            row, col = (n0, m0) if TRANSPOSED else (m0, n0)
            _write_tile(
                acc, buffers, 2 * half, out_desc, out_ptr, first + row, first + rows, col, cols,
                out_stride, WRITE_N, TRANSPOSED,
            )  # fmt: skip
    tma.store_wait(0)


@direct
@gluon.jit
def _wgrad_hopper_kernel(
    a_ptr,  # [T, M] when GATHER, else [R, M]
    a_desc,  # [R, M] unless GATHER
    b_ptr,  # [R, N]
    b_desc,  # [R, N]
    out_ptr,  # [E, M, N], or [E, N, M] when TRANSPOSED, by the strides below
    out_desc,  # the same as rows, unless ACCUMULATE
    expert_token_indices_ptr,  # [R]
    expert_token_offsets_ptr,  # [E+1]
    E,
    rows,  # of `out`; not compile-time constants, or branches would be left dead and not compile
    cols,
    M: gl.constexpr,
    N: gl.constexpr,
    out_stride_e: gl.constexpr,
    out_stride: gl.constexpr,
    GATHER: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    WRITE_N: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """out[e] = a^T b by expert. a = [1, 2, 3], b = [4, 5, 6], offsets = [0, 2, 3] -> [14, 18]"""
    dtype: gl.constexpr = a_ptr.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_M], dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_N], dtype)
    part_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WRITE_N, WRITE_N], dtype)
    a_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_M], a_layout)
    b_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_N], b_layout)
    buffers = gl.allocate_shared_memory(dtype, [4, WRITE_N, WRITE_N], part_layout)
    empty, copied, ready = _barriers(STAGES, 2)
    pieces = E * gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    gl.warp_specialize(
        [
            (
                _multiply_wgrad,
                (
                    0, out_ptr, out_desc, a_stages, b_stages, buffers, empty, ready,
                    expert_token_offsets_ptr, pieces, rows, cols, M, N, out_stride_e, out_stride,
                    TRANSPOSED, ACCUMULATE, BLOCK_M, BLOCK_N, BLOCK_R, WRITE_N, GROUP, STAGES,
                ),
            ),
            (
                _multiply_wgrad,
                (
                    1, out_ptr, out_desc, a_stages, b_stages, buffers, empty, ready,
                    expert_token_offsets_ptr, pieces, rows, cols, M, N, out_stride_e, out_stride,
                    TRANSPOSED, ACCUMULATE, BLOCK_M, BLOCK_N, BLOCK_R, WRITE_N, GROUP, STAGES,
                ),
            ),
            (
                _copy_wgrad,
                (
                    a_ptr, b_ptr, a_stages, b_stages, empty, copied, expert_token_indices_ptr,
                    expert_token_offsets_ptr, pieces, M, N, GATHER, BLOCK_M, BLOCK_N, BLOCK_R,
                    GROUP, STAGES,
                ),
            ),
            (
                _fetch_wgrad,
                (
                    a_desc, b_desc, a_stages, b_stages, empty, ready, expert_token_offsets_ptr,
                    pieces, M, N, GATHER, BLOCK_M, BLOCK_N, BLOCK_R, GROUP, STAGES,
                ),
            ),
            (
                _announce_wgrad,
                (
                    copied, ready, expert_token_offsets_ptr, pieces, M, N, BLOCK_M, BLOCK_N,
                    BLOCK_R, GROUP, STAGES,
                ),
            ),
        ],
        [4, 2, 1, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def fits_wgrad(a: torch.Tensor, out: torch.Tensor) -> bool:
    return fits(a) and out.shape[1] * out.stride(1) < 2**31


def wgrad(
    a: torch.Tensor,
    b: torch.Tensor,
    lists: IndexLists,
    out: torch.Tensor,
    accumulate: bool,
    gather: str | None,
) -> None:
    """`gemm.wgrad`. A gathered operand takes the narrow side of the tile: fewer bytes to copy."""
    E, rows, cols = out.shape
    transposed = gather == "b"
    if transposed:
        a, b = b, a
    all_rows = (E - 1) * out.stride(0) // out.stride(1) + rows
    out_rows = out.as_strided((all_rows, cols), (out.stride(1), 1))
    ring = configuration("wgrad_hopper", a, rows, cols)
    _wgrad_hopper_kernel[(_programs(a.device),)](
        a,
        None if gather else _descriptor(a, BLOCK_K, BLOCK_R),
        b,
        _descriptor(b, BLOCK_K, BLOCK_N),
        out,
        None if accumulate else _descriptor(out_rows, WRITE_N, WRITE_N),
        lists.expert_token_indices,
        lists.expert_token_offsets,
        E,
        rows,
        cols,
        a.shape[1],
        b.shape[1],
        out.stride(0),
        out.stride(1),
        gather is not None,
        transposed,
        accumulate,
        BLOCK_R,
        BLOCK_N,
        BLOCK_K,
        WRITE_N,
        ring.group,
        ring.stages,
        ring.multiply_registers,
        ring.load_registers,
        num_warps=NUM_WARPS,
    )
