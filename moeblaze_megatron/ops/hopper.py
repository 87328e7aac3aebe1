"""The GEMMs of `gemm` for Hopper GPUs in bf16 and fp16, written in Gluon.

One persistent program a multiprocessor. Loader warps keep a ring of shared-memory stages full, by
TMA and, for rows gathered by index, by asynchronous copies; eight warps multiply with wgmma. While
these write a tile out through shared memory, the loaders already fetch the next one, which is what
the plain kernels cannot do. Same sums in the same order as the plain kernels, bit for bit.

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

from moeblaze_megatron.ops.activation import GATED
from moeblaze_megatron.ops.index_lists import IndexLists
from moeblaze_megatron.ops.tiles import BLOCK_R, GROUP, bind_device, interpreting

BLOCK_K = 64  # depth of one step: 128 bytes, the widest swizzle
BLOCK_F = 128  # of each accumulator of fc1
BLOCK_N = 256
LOADER_REGISTERS = 72
WGRAD_REGISTERS = 104
NUM_WARPS = 8  # of the warps that multiply: two warpgroups


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
    return fits(x) and x.shape[1] % BLOCK_K == 0 and F % BLOCK_F == 0


def fits_rows(a: torch.Tensor) -> bool:
    return fits(a) and a.shape[1] % BLOCK_K == 0


@lru_cache
def _layout(rows: int, cols: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = gl.bfloat16 if dtype is torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, cols], kind)


def _descriptor(tensor: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    bind_device(tensor.device)
    layout = _layout(rows, cols, tensor.dtype)
    return TensorDescriptor.from_tensor(tensor, [rows, cols], layout)


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
def _ring(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers of the stages: `empty`, and `ready` after ARRIVALS: 1 for the bytes that TMA brings
    and 128 for the threads that copy, where any do."""
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(ready.index(i), count=ARRIVALS)
    return empty, ready


@gluon.jit
def _await_empty(empty, step, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    return stage


@gluon.jit
def _await_ready(ready, step, copied, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
    if copied:  # asynchronous copies write through another proxy than the one wgmma reads by
        fence_async_shared()
    return stage


@gluon.jit
def _release_previous(empty, step, used, STAGES: gl.constexpr):
    """The stage before `step`'s may be filled again, if this tile has `used` it."""
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=used)


@gluon.jit
def _load(
    a_ptr,  # [T, K] when GATHER, else unused
    a_desc,  # [R, K] unless GATHER, else unused
    weight_desc,  # [E * weight_rows, K] when N_FIRST, else [E * weight_rows, N]
    a_stages,
    weight_stages,
    empty,
    ready,
    expert_token_indices_ptr,  # [R]
    expert_token_offsets_ptr,  # [E+1]
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
    BLOCK_R: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Loader, four warps: weights by TMA; rows by TMA, or by token, 16 bytes a thread and copy."""
    PARTS: gl.constexpr = 2 if GATED else 1  # gate and up halves are two loads
    BYTES: gl.constexpr = PARTS * weight_desc.block_type.nbytes + (
        0 if GATHER else a_desc.block_type.nbytes
    )
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    step = 0
    for index in range(gl.program_id(0), num_tiles * num_cols, gl.num_programs(0)):
        tile, col = _tile_of(index, num_tiles, num_cols, GROUP)
        expert = gl.load(tile_expert_ptr + tile)
        if expert >= 0:
            row_start = gl.load(tile_row_start_ptr + tile)
            n0 = n_start + col * BLOCK_N
            first = expert * weight_rows
            if GATHER:
                rows = row_start + gl.arange(0, BLOCK_R, gl.SliceLayout(1, layout))
                end = gl.load(expert_token_offsets_ptr + expert + 1)
                token = gl.load(expert_token_indices_ptr + rows, mask=rows < end, other=0)
                depth = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
                a_ptrs = a_ptr + token.to(gl.int64)[:, None] * K + depth[None, :]
            for k0 in range(0, K, BLOCK_K):
                stage = _await_empty(empty, step, STAGES)
                bar = ready.index(stage)
                mbarrier.expect(bar, BYTES)
                for part in gl.static_range(PARTS):
                    if N_FIRST:
                        row, column = first + part * (weight_rows // 2) + n0, k0
                    else:
                        row, column = first + k0, n0
                    tma.async_copy_global_to_shared(
                        weight_desc, [row, column], bar, weight_stages.index(PARTS * stage + part)
                    )
                if GATHER:
                    async_copy.async_copy_global_to_shared(a_stages.index(stage), a_ptrs + k0)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                else:
                    tma.async_copy_global_to_shared(
                        a_desc, [row_start, k0], bar, a_stages.index(stage)
                    )
                step += 1


@gluon.jit
def _write_half(
    value, buffer, out_desc, out_ptr, row_start, row_end, n0, cols, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Half of a tile, by TMA; one that ends inside is written row by row."""
    BLOCK_R: gl.constexpr = value.shape[0]
    BLOCK_N: gl.constexpr = value.shape[1]
    value = value.to(out_ptr.dtype.element_ty)
    if row_start + BLOCK_R <= row_end:
        tma.store_wait(1)  # the half before the last one has left this buffer
        buffer.store(value)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row_start, n0], buffer)
    else:
        tma.store_wait(0)
        buffer.store(value)
        WIDE: gl.constexpr = BLOCK_N // 8
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE, WIDE], [NUM_WARPS, 1], [1, 0])
        r = gl.arange(0, BLOCK_R, gl.SliceLayout(1, layout))
        n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        ptrs = out_ptr + row_start.to(gl.int64) * cols + (r[:, None] * cols + n[None, :])
        inside = (row_start + r < row_end)[:, None] & (n < cols)[None, :]
        gl.store(ptrs, buffer.load(layout), mask=inside)


@gluon.jit
def _write_tile(
    value,
    buffers,  # shared memory of two halves of the tile
    out_desc,  # [R, cols]
    out_ptr,  # [R, cols]
    row_start,
    row_end,  # rows from here on belong to the next expert
    n0,
    cols,
    NUM_WARPS: gl.constexpr,
):
    """A tile of rows in two halves, so that one is filled while the other leaves."""
    BLOCK_R: gl.constexpr = value.shape[0]
    HALF: gl.constexpr = value.shape[1] // 2
    left, right = gl.split(value.reshape((BLOCK_R, 2, HALF)).permute((0, 2, 1)))
    _write_half(left, buffers.index(0), out_desc, out_ptr, row_start, row_end, n0, cols, NUM_WARPS)
    _write_half(
        right, buffers.index(1), out_desc, out_ptr, row_start, row_end, n0 + HALF, cols, NUM_WARPS
    )


@gluon.jit
def _activate(gate, up, ACTIVATION: gl.constexpr):
    """f(gate) * up when gated, else f(gate), as `activation.activate`."""
    if ACTIVATION == "swiglu" or ACTIVATION == "silu":
        y = gate / (1.0 + gl.exp(-gate))
    elif ACTIVATION == "geglu" or ACTIVATION == "gelu":
        y = gate * (0.5 * (1.0 + gl.erf(gate * 0.7071067811865476)))
    else:
        gl.static_assert(ACTIVATION == "squared_relu")
        r = gl.where(gate <= 0, 0.0, gate)  # NaN stays NaN
        y = r * r
    if ACTIVATION == "swiglu" or ACTIVATION == "geglu":
        y = y * up
    return y


@gluon.jit
def _multiply_fc1(
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
    GATHER: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_F: gl.constexpr,
    BLOCK_H: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """Accumulators of gate and up in registers, then activation and probability."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_F, 16])
    WIDTH: gl.constexpr = 2 * F if GATED else F
    step = 0
    for index in range(gl.program_id(0), num_tiles * num_cols, gl.num_programs(0)):
        tile, col = _tile_of(index, num_tiles, num_cols, GROUP)
        expert = gl.load(tile_expert_ptr + tile)
        if expert >= 0:
            row_start = gl.load(tile_row_start_ptr + tile)
            end = gl.load(expert_token_offsets_ptr + expert + 1)
            gate = gl.zeros((BLOCK_R, BLOCK_F), gl.float32, layout)
            up = gate
            for h0 in range(0, H, BLOCK_H):
                stage = _await_ready(ready, step, GATHER, STAGES)
                x = a_stages.index(stage)
                if GATED:
                    w = weight_stages.index(2 * stage).permute((1, 0))
                    w_up = weight_stages.index(2 * stage + 1).permute((1, 0))
                    gate = warpgroup_mma(x, w, gate, is_async=True)
                    up = warpgroup_mma(x, w_up, up, is_async=True)
                    gate, up = warpgroup_mma_wait(2, deps=(gate, up))
                else:
                    w = weight_stages.index(stage).permute((1, 0))
                    gate = warpgroup_mma(x, w, gate, is_async=True)
                    gate = warpgroup_mma_wait(1, deps=(gate,))
                _release_previous(empty, step, h0 > 0, STAGES)
                step += 1
            gate, up = warpgroup_mma_wait(0, deps=(gate, up))
            _release_previous(empty, step, True, STAGES)

            f0 = col * BLOCK_F
            if SAVE:
                _write_tile(
                    gate, buffers, fc1_output_desc, fc1_output_ptr, row_start, end, f0, WIDTH,
                    NUM_WARPS,
                )  # fmt: skip
                if GATED:
                    _write_tile(
                        up, buffers, fc1_output_desc, fc1_output_ptr, row_start, end, F + f0, WIDTH,
                        NUM_WARPS,
                    )  # fmt: skip
            rows = row_start + gl.arange(0, BLOCK_R, gl.SliceLayout(1, layout))
            prob = gl.load(permuted_probs_ptr + rows, mask=rows < end, other=0.0)
            act = _activate(gate, up, ACTIVATION) * prob[:, None]
            _write_tile(act, buffers, act_desc, act_ptr, row_start, end, f0, F, NUM_WARPS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles"])
def _fc1_hopper_kernel(
    x_ptr,  # [T, H] when GATHER, else unused
    x_desc,  # [R, H] unless GATHER
    fc1_weight_desc,  # [E * 2F, H] or [E * F, H]
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
    BLOCK_F: gl.constexpr,
    BLOCK_H: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    """act = prob * f(x W^T). x = 3, W = 2, prob = 0.5, squared_relu -> fc1_output 6, act 18"""
    PARTS: gl.constexpr = 2 if GATED else 1
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_H], dtype)
    x_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_H], rows_layout)
    weight_stages = gl.allocate_shared_memory(
        dtype, [PARTS * STAGES, BLOCK_F, BLOCK_H], fc1_weight_desc.layout
    )
    buffers = gl.allocate_shared_memory(dtype, [2, BLOCK_R, BLOCK_F // 2], act_desc.layout)
    empty, ready = _ring(STAGES, 1 + 128 if GATHER else 1)
    num_cols = F // BLOCK_F
    gl.warp_specialize(
        [
            (
                _multiply_fc1,
                (
                    permuted_probs_ptr, fc1_output_ptr, fc1_output_desc, act_ptr, act_desc,
                    x_stages, weight_stages, buffers, empty, ready, expert_token_offsets_ptr,
                    tile_expert_ptr, tile_row_start_ptr, num_tiles, num_cols, H, F, ACTIVATION,
                    GATED, SAVE, GATHER, BLOCK_R, BLOCK_F, BLOCK_H, GROUP, STAGES, NUM_WARPS,
                ),
            ),
            (
                _load,
                (
                    x_ptr, x_desc, fc1_weight_desc, x_stages, weight_stages, empty, ready,
                    expert_token_indices_ptr, expert_token_offsets_ptr, tile_expert_ptr,
                    tile_row_start_ptr, num_tiles, num_cols, 0, PARTS * F, H, GATHER, True, GATED,
                    BLOCK_R, BLOCK_F, BLOCK_H, GROUP, STAGES,
                ),
            ),
        ],
        [4],
        [LOADER_REGISTERS],
    )  # fmt: skip


def fc1(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    permuted_probs: torch.Tensor,
    lists: IndexLists,
    activation: str,
    fc1_output: torch.Tensor | None,
    act: torch.Tensor,
    gather: bool,
) -> None:
    """`gemm.fc1` into given buffers; fc1_output None is not saved."""
    E, width, H = fc1_weight.shape
    F = act.shape[1]
    gated = activation in GATED
    saved = act if fc1_output is None else fc1_output
    _fc1_hopper_kernel[(_programs(x.device),)](
        x,
        None if gather else _descriptor(x, BLOCK_R, BLOCK_K),
        _descriptor(fc1_weight.view(E * width, H), BLOCK_F, BLOCK_K),
        permuted_probs,
        saved,
        _descriptor(saved, BLOCK_R, BLOCK_F // 2),
        act,
        _descriptor(act, BLOCK_R, BLOCK_F // 2),
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
        BLOCK_F,
        BLOCK_K,
        GROUP,
        4,
        NUM_WARPS,
        LOADER_REGISTERS,
        num_warps=NUM_WARPS,
    )


@gluon.jit
def _multiply_rows(
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
    GATHER: gl.constexpr,
    N_FIRST: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """Row tile times weight tile, step by step, with one step always in flight."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_N, 16])
    step = 0
    for index in range(gl.program_id(0), num_tiles * num_cols, gl.num_programs(0)):
        tile, col = _tile_of(index, num_tiles, num_cols, GROUP)
        expert = gl.load(tile_expert_ptr + tile)
        if expert >= 0:
            row_start = gl.load(tile_row_start_ptr + tile)
            end = gl.load(expert_token_offsets_ptr + expert + 1)
            acc = gl.zeros((BLOCK_R, BLOCK_N), gl.float32, layout)
            for k0 in range(0, K, BLOCK_K):
                stage = _await_ready(ready, step, GATHER, STAGES)
                w = weight_stages.index(stage)
                if N_FIRST:
                    w = w.permute((1, 0))
                acc = warpgroup_mma(a_stages.index(stage), w, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                _release_previous(empty, step, k0 > 0, STAGES)
                step += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _release_previous(empty, step, True, STAGES)
            _write_tile(
                acc, buffers, out_desc, out_ptr, row_start, end, col * BLOCK_N, cols, NUM_WARPS
            )
    tma.store_wait(0)


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
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
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
    buffers = gl.allocate_shared_memory(dtype, [2, BLOCK_R, BLOCK_N // 2], out_desc.layout)
    empty, ready = _ring(STAGES, 1 + 128 if GATHER else 1)
    num_cols = gl.cdiv(cols, BLOCK_N)
    gl.warp_specialize(
        [
            (
                _multiply_rows,
                (
                    out_ptr, out_desc, a_stages, weight_stages, buffers, empty, ready,
                    expert_token_offsets_ptr, tile_expert_ptr, tile_row_start_ptr, num_tiles,
                    num_cols, cols, K, GATHER, N_FIRST, BLOCK_R, BLOCK_N, BLOCK_K, GROUP, STAGES,
                    NUM_WARPS,
                ),
            ),
            (
                _load,
                (
                    a_ptr, a_desc, weight_desc, a_stages, weight_stages, empty, ready,
                    expert_token_indices_ptr, expert_token_offsets_ptr, tile_expert_ptr,
                    tile_row_start_ptr, num_tiles, num_cols, n_start, weight_rows, K, GATHER,
                    N_FIRST, False, BLOCK_R, BLOCK_N, BLOCK_K, GROUP, STAGES,
                ),
            ),
        ],
        [4],
        [LOADER_REGISTERS],
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
    _rows_hopper_kernel[(_programs(a.device),)](
        a,
        None if gather else _descriptor(a, BLOCK_R, BLOCK_K),
        _descriptor(weight.view(E * weight_rows, weight_cols), *block),
        out,
        _descriptor(out, BLOCK_R, BLOCK_N // 2),
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
        GROUP,
        3,
        NUM_WARPS,
        LOADER_REGISTERS,
        num_warps=NUM_WARPS,
    )


@gluon.jit
def _copy_rows(stage, ptr, row, in_expert, c0, WIDTH: gl.constexpr, layout: gl.constexpr):
    """One stage of a weight gradient by asynchronous copies; what is outside becomes zero."""
    c = c0 + gl.arange(0, stage.shape[1], gl.SliceLayout(0, layout))
    ptrs = ptr + row.to(gl.int64)[:, None] * WIDTH + c[None, :]
    async_copy.async_copy_global_to_shared(
        stage, ptrs, mask=in_expert[:, None] & (c < WIDTH)[None, :]
    )


@gluon.jit
def _load_wgrad(
    a_ptr,  # [T, M] when GATHER_A, else [R, M]
    a_desc,  # [R, M] unless GATHER_A
    b_ptr,  # [T, N] when GATHER_B, else [R, N]
    b_desc,  # [R, N] unless GATHER_B
    a_stages,
    b_stages,
    empty,
    ready,
    expert_token_indices_ptr,  # [R]
    expert_token_offsets_ptr,  # [E+1]
    E,
    M: gl.constexpr,
    N: gl.constexpr,
    GATHER_A: gl.constexpr,
    GATHER_B: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Loader: both operands of each step. Whole steps by TMA, but for the gathered operand.

    The last step of an expert may end in rows of the next one, or in rows never written, which may
    be NaN: both operands are copied under a mask there.
    """
    WIDE_A: gl.constexpr = BLOCK_M // 8 if BLOCK_M < 256 else 32
    WIDE_B: gl.constexpr = BLOCK_N // 8 if BLOCK_N < 256 else 32
    layout_a: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE_A, WIDE_A], [4, 1], [1, 0])
    layout_b: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE_B, WIDE_B], [4, 1], [1, 0])
    gathered: gl.constexpr = layout_a if GATHER_A else layout_b
    BYTES: gl.constexpr = (0 if GATHER_A else a_desc.block_type.nbytes) + (
        0 if GATHER_B else b_desc.block_type.nbytes
    )
    r = gl.arange(0, BLOCK_R, gl.SliceLayout(1, gathered))
    ra = gl.arange(0, BLOCK_R, gl.SliceLayout(1, layout_a))
    rb = gl.arange(0, BLOCK_R, gl.SliceLayout(1, layout_b))
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    step = 0
    for index in range(gl.program_id(0), num_m * num_n * E, gl.num_programs(0)):
        expert = index // (num_m * num_n)
        tile_m, tile_n = _tile_of(index % (num_m * num_n), num_m, num_n, GROUP)
        m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
        start = gl.load(expert_token_offsets_ptr + expert)
        end = gl.load(expert_token_offsets_ptr + expert + 1)
        whole = start + (end - start) // BLOCK_R * BLOCK_R
        token = gl.load(expert_token_indices_ptr + start + r, mask=start + r < end, other=0)
        for r0 in range(start, whole, BLOCK_R):
            stage = _await_empty(empty, step, STAGES)
            bar = ready.index(stage)
            mbarrier.expect(bar, BYTES)
            if GATHER_A:
                _copy_rows(a_stages.index(stage), a_ptr, token, r >= 0, m0, M, layout_a)
            else:
                tma.async_copy_global_to_shared(a_desc, [r0, m0], bar, a_stages.index(stage))
            if GATHER_B:
                _copy_rows(b_stages.index(stage), b_ptr, token, r >= 0, n0, N, layout_b)
            else:
                tma.async_copy_global_to_shared(b_desc, [r0, n0], bar, b_stages.index(stage))
            if GATHER_A or GATHER_B:
                async_copy.mbarrier_arrive(bar, increment_count=False)
                rows = r0 + BLOCK_R + r  # of the next step, read ahead
                token = gl.load(expert_token_indices_ptr + rows, mask=rows < end, other=0)
            else:
                mbarrier.arrive(bar, count=128)
            step += 1
        if whole < end:
            stage = _await_empty(empty, step, STAGES)
            bar = ready.index(stage)
            row_a, row_b = whole + ra, whole + rb
            in_a, in_b = row_a < end, row_b < end
            if GATHER_A:
                row_a = gl.load(expert_token_indices_ptr + row_a, mask=in_a, other=0)
            if GATHER_B:
                row_b = gl.load(expert_token_indices_ptr + row_b, mask=in_b, other=0)
            _copy_rows(a_stages.index(stage), a_ptr, row_a, in_a, m0, M, layout_a)
            _copy_rows(b_stages.index(stage), b_ptr, row_b, in_b, n0, N, layout_b)
            mbarrier.arrive(bar, count=1)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            step += 1


@gluon.jit
def _add_tile(out_ptr, value, m0, n0, M, N, stride_m):
    """out += value, summed in fp32, a few columns at a time: addresses take registers too."""
    BLOCK_M: gl.constexpr = value.shape[0]
    BLOCK_N: gl.constexpr = value.shape[1]
    if BLOCK_M * BLOCK_N > 8192:
        halves = value.reshape((BLOCK_M, 2, BLOCK_N // 2)).permute((0, 2, 1))
        left, right = gl.split(halves)
        _add_tile(out_ptr, left, m0, n0, M, N, stride_m)
        _add_tile(out_ptr, right, m0, n0 + BLOCK_N // 2, M, N, stride_m)
    else:
        layout: gl.constexpr = value.type.layout
        m = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
        n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        ptrs = out_ptr + (m[:, None] * stride_m + n[None, :])
        inside = (m < M)[:, None] & (n < N)[None, :]
        value += gl.load(ptrs, mask=inside, other=0.0).to(gl.float32)
        gl.store(ptrs, value.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _multiply_wgrad(
    out_ptr,  # [E, M, N] by the strides below
    a_stages,
    b_stages,
    buffer,
    empty,
    ready,
    expert_token_offsets_ptr,  # [E+1]
    E,
    M: gl.constexpr,
    N: gl.constexpr,
    out_stride_e: gl.constexpr,
    out_stride_m: gl.constexpr,
    GATHER: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """Sum over an expert's rows, written as it is or added to what is there."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_N, 16])
    WIDE: gl.constexpr = BLOCK_N // 8 if BLOCK_N < 256 else 32
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE, WIDE], [NUM_WARPS, 1], [1, 0])
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    step = 0
    for index in range(gl.program_id(0), num_m * num_n * E, gl.num_programs(0)):
        expert = index // (num_m * num_n)
        tile_m, tile_n = _tile_of(index % (num_m * num_n), num_m, num_n, GROUP)
        start = gl.load(expert_token_offsets_ptr + expert)
        end = gl.load(expert_token_offsets_ptr + expert + 1)
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        for r0 in range(start, end, BLOCK_R):
            stage = _await_ready(ready, step, GATHER or r0 + BLOCK_R > end, STAGES)
            a = a_stages.index(stage).permute((1, 0))
            acc = warpgroup_mma(a, b_stages.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            _release_previous(empty, step, r0 > start, STAGES)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _release_previous(empty, step, start < end, STAGES)
        # Offsets inside one expert's weight fit int32; `fits_wgrad` sees to it.
        expert_ptr = out_ptr + expert.to(gl.int64) * out_stride_e
        m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
        if ACCUMULATE:
            if start < end:
                _add_tile(expert_ptr, acc, m0, n0, M, N, out_stride_m)
        else:
            buffer.store(acc.to(out_ptr.dtype.element_ty))
            m = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(1, rows))
            n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, rows))
            inside = (m < M)[:, None] & (n < N)[None, :]
            ptrs = expert_ptr + (m[:, None] * out_stride_m + n[None, :])
            gl.store(ptrs, buffer.load(rows), mask=inside)


@gluon.jit
def _wgrad_hopper_kernel(
    a_ptr,  # [T, M] when GATHER_A, else [R, M]
    a_desc,  # [R, M] unless GATHER_A
    b_ptr,  # [T, N] when GATHER_B, else [R, N]
    b_desc,  # [R, N] unless GATHER_B
    out_ptr,  # [E, M, N] by the strides below
    expert_token_indices_ptr,  # [R]
    expert_token_offsets_ptr,  # [E+1]
    E,
    M: gl.constexpr,
    N: gl.constexpr,
    out_stride_e: gl.constexpr,
    out_stride_m: gl.constexpr,
    GATHER_A: gl.constexpr,
    GATHER_B: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    WGRAD_REGISTERS: gl.constexpr,
):
    """out[e] = a^T b by expert. a = [1, 2, 3], b = [4, 5, 6], offsets = [0, 2, 3] -> [14, 18]"""
    dtype: gl.constexpr = a_ptr.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_M], dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_N], dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], dtype)
    a_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_M], a_layout)
    b_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_N], b_layout)
    buffer = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], out_layout)
    empty, ready = _ring(STAGES, 1 + 128)
    gl.warp_specialize(
        [
            (
                _multiply_wgrad,
                (
                    out_ptr, a_stages, b_stages, buffer, empty, ready, expert_token_offsets_ptr, E,
                    M, N, out_stride_e, out_stride_m, GATHER_A or GATHER_B, ACCUMULATE, BLOCK_M,
                    BLOCK_N, BLOCK_R, GROUP, STAGES, NUM_WARPS,
                ),
            ),
            (
                _load_wgrad,
                (
                    a_ptr, a_desc, b_ptr, b_desc, a_stages, b_stages, empty, ready,
                    expert_token_indices_ptr, expert_token_offsets_ptr, E, M, N, GATHER_A, GATHER_B,
                    BLOCK_M, BLOCK_N, BLOCK_R, GROUP, STAGES,
                ),
            ),
        ],
        [4],
        [WGRAD_REGISTERS],
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
    """`gemm.wgrad`. A gathered operand is the narrower side of the tile: fewer bytes to look up."""
    E, M, N = out.shape
    tile_m, tile_n = (256, 128) if gather == "b" else (128, 256)
    _wgrad_hopper_kernel[(_programs(a.device),)](
        a,
        None if gather == "a" else _descriptor(a, BLOCK_K, tile_m),
        b,
        None if gather == "b" else _descriptor(b, BLOCK_K, tile_n),
        out,
        lists.expert_token_indices,
        lists.expert_token_offsets,
        E,
        M,
        N,
        out.stride(0),
        out.stride(1),
        gather == "a",
        gather == "b",
        accumulate,
        tile_m,
        tile_n,
        BLOCK_K,
        GROUP,
        3,
        NUM_WARPS,
        WGRAD_REGISTERS,
        num_warps=NUM_WARPS,
    )
