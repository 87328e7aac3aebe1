"""The GEMMs of `gemm` for Hopper GPUs in bf16 and fp16, written in Gluon.

One persistent program a multiprocessor, whose warps share the work. Rows times a weight (fc1, fc2
and the gradients of their inputs): one or two warps fill a ring of shared-memory stages, through
TMA and, for rows looked up by index, through asynchronous copies; two warpgroups multiply with
wgmma, each half the rows of a tile, and hand the product over in shared memory; two or four warps
finish it (activation and probability, or their backward) and write it out, while the next tile is
multiplied, and one brings what they need beside the product.
Weight gradients: much the same, but four warps load and the multipliers write their few sums
themselves.

Products are the plain kernels' bit for bit; the activation is computed from fc1_output as it is
saved, rounded, and SiLU in fewer instructions.

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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moeblaze_megatron.ops.activation import (
    Activation,
    clamped_gate,
    up_factor,
    value_and_slope,
)
from moeblaze_megatron.ops.index_lists import IndexLists
from moeblaze_megatron.ops.launch import descriptor, direct
from moeblaze_megatron.ops.table import configuration
from moeblaze_megatron.ops.tiles import BLOCK_R, cdiv, interpreting

BLOCK_K = 64  # depth of one step: 128 bytes, the widest swizzle
BLOCK_N = 256  # columns of a tile, the widest wgmma; gate and up columns share them in fc1
HALF_R = BLOCK_R // 2  # rows of a tile that one warpgroup multiplies
PART_N = 64  # columns that are handed over or leave together: 128 bytes
PIECE_R = 16  # rows of a part that are finished at once
SAVED = 8  # pieces of fc1_output on their way, for fc2's dgrad
NUM_WARPS = 4  # of a warpgroup


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
    """Whether H and F are whole steps and tiles of `fc1`."""
    return fits(x) and x.shape[1] % BLOCK_K == 0 and F % (BLOCK_N // 2) == 0


def fits_fc2_dgrad(grad_output: torch.Tensor, F: int) -> bool:
    """Whether H is whole steps of `fc2_dgrad`, and F whole parts."""
    return fits(grad_output) and grad_output.shape[1] % BLOCK_K == 0 and F % PART_N == 0


def fits_rows(a: torch.Tensor) -> bool:
    """Whether the depth is whole steps of `rows_gemm`."""
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
def _row_tile(
    index,
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    tile_row_end_ptr,  # [num_tiles]
    num_tiles,
    num_cols,
    GROUP: gl.constexpr,
):
    """Expert (-1 = none), first row, row behind the last, and column tile of the index-th piece.

    GROUP row tiles walk the columns together, missing ones of the last group too. Asked for one
    piece ahead, so that between two tiles nothing waits for a load or a division.
    """
    inside = index % (GROUP * num_cols)
    tile = index // (GROUP * num_cols) * GROUP + inside % GROUP
    expert = gl.load(tile_expert_ptr + tile, mask=tile < num_tiles, other=-1)
    row_start = gl.load(tile_row_start_ptr + tile, mask=tile < num_tiles, other=0)
    row_end = gl.load(tile_row_end_ptr + tile, mask=tile < num_tiles, other=0)
    return expert, row_start, row_end, inside // GROUP


@gluon.jit
def _barriers(STAGES: gl.constexpr, READERS: gl.constexpr, WRITERS: gl.constexpr):
    """Of a ring: `empty`, which so many readers say, and `ready`, after so many arrivals."""
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=READERS)
        mbarrier.init(ready.index(i), count=WRITERS)
    return empty, ready


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
def _tokens(expert_token_indices_ptr, row_start, row_end, r):
    """Of a tile's rows; 0 for those that are not in use."""
    rows = row_start + r
    return gl.load(expert_token_indices_ptr + rows, mask=rows < row_end, other=0)


@gluon.jit
def _load_rows(
    a_ptr,  # [T, K] when GATHER, else unused
    a_desc,  # [R, K] unless GATHER, else unused
    weight_desc,  # [E * weight_rows, K] when N_FIRST, else [E * weight_rows, N]
    a_stages,
    weight_stages,
    empty,
    ready,
    expert_token_indices_ptr,  # [R]
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    tile_row_end_ptr,  # [num_tiles]
    num_tiles,
    n_start,
    weight_rows,  # rows of one expert in weight_desc
    num_cols,
    K: gl.constexpr,
    GATHER: gl.constexpr,
    N_FIRST: gl.constexpr,
    PARTS: gl.constexpr,  # gate and up halves are two loads
    BLOCK_R: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """One or two warps: all by TMA, but rows to look up by asynchronous copies, 16 bytes each.

    A thread holds the addresses of its rows, which leaves few registers: of the next tile's tokens
    each is held by one thread, until that tile begins.
    """
    COLS: gl.constexpr = BLOCK_N // PARTS
    BYTES: gl.constexpr = PARTS * weight_desc.block_type.nbytes + (
        0 if GATHER else a_desc.block_type.nbytes
    )
    MIDDLE: gl.constexpr = K // 2 // BLOCK_K * BLOCK_K
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    depth = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    r = gl.arange(0, BLOCK_R, gl.BlockedLayout([1], [32], [WARPS], [0]))
    step = 0
    programs = gl.num_programs(0)
    expert, row_start, row_end, col = _row_tile(
        gl.program_id(0), tile_expert_ptr, tile_row_start_ptr, tile_row_end_ptr, num_tiles,
        num_cols, GROUP,
    )  # fmt: skip
    if GATHER:
        next_token = _tokens(expert_token_indices_ptr, row_start, row_end, r)
    for index in range(gl.program_id(0), gl.cdiv(num_tiles, GROUP) * GROUP * num_cols, programs):
        next_expert, next_row_start, next_row_end, next_col = _row_tile(
            index + programs, tile_expert_ptr, tile_row_start_ptr, tile_row_end_ptr, num_tiles,
            num_cols, GROUP,
        )  # fmt: skip
        if GATHER:
            token = gl.convert_layout(next_token, gl.SliceLayout(1, layout)).to(gl.int64)
        if expert >= 0:
            n0 = n_start + col * COLS
            first = expert * weight_rows
            if GATHER:
                ptrs = a_ptr + token[:, None] * K + depth[None, :]
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
                if GATHER:
                    async_copy.async_copy_global_to_shared(a_stages.index(stage), ptrs + k0)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                    # By a branch in the loop: else the compiler keeps and steps on two addresses
                    # of each row.
                    if k0 == MIDDLE:
                        next_token = _tokens(
                            expert_token_indices_ptr, next_row_start, next_row_end, r
                        )
                else:
                    tma.async_copy_global_to_shared(
                        a_desc, [row_start, k0], bar, a_stages.index(stage)
                    )
                step += 1
        elif GATHER:
            next_token = _tokens(expert_token_indices_ptr, next_row_start, next_row_end, r)
        expert, row_start, row_end, col = next_expert, next_row_start, next_row_end, next_col


@gluon.jit
def _halves(value):
    """Left and right half of the columns; each thread keeps what it has."""
    ROWS: gl.constexpr = value.shape[0]
    HALF: gl.constexpr = value.shape[1] // 2
    return gl.split(value.reshape((ROWS, 2, HALF)).permute((0, 2, 1)))


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
    GATHER: gl.constexpr,
    N_FIRST: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    HALF_R: gl.constexpr,
    STAGES: gl.constexpr,
    NARROW: gl.constexpr,  # two wgmmas side by side, each of which names half the registers
):
    """A warpgroup's rows of a tile times the weights, at least half a step always in flight.

    Left and right half of the columns.
    """
    HALF_N: gl.constexpr = BLOCK_N // 2
    HALF_K: gl.constexpr = BLOCK_K // 2
    WIDTH: gl.constexpr = HALF_N if NARROW else BLOCK_N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    acc = gl.zeros((HALF_R, WIDTH), gl.float32, layout)
    if NARROW:
        right = gl.zeros((HALF_R, HALF_N), gl.float32, layout)
    if used:
        sums = warpgroup_mma_init(acc)  # what a loop carries begins as the type that it ends as
        if NARROW:
            right_sums = warpgroup_mma_init(right)
        for k0 in range(0, K, BLOCK_K):
            stage = _await(ready, step, STAGES)
            if GATHER:  # copies come by another proxy than wgmma reads by
                fence_async_shared()
            a = a_stages.index(stage).slice(half * HALF_R, HALF_R)
            w = weight_stages.index(stage)
            if N_FIRST:
                w = w.permute((1, 0))
            for i in gl.static_range(2):
                a_half = a.slice(i * HALF_K, HALF_K, dim=1)
                w_half = w.slice(i * HALF_K, HALF_K)
                if NARROW:
                    w_left = w_half.slice(0, HALF_N, dim=1)
                    w_right = w_half.slice(HALF_N, HALF_N, dim=1)
                    sums = warpgroup_mma(a_half, w_left, sums, is_async=True)
                    right_sums = warpgroup_mma(a_half, w_right, right_sums, is_async=True)
                else:
                    sums = warpgroup_mma(a_half, w_half, sums, is_async=True)
                if i == 0:
                    # The step before has ended: its stage is filled while this one goes on.
                    if NARROW:
                        sums, right_sums = warpgroup_mma_wait(2, deps=(sums, right_sums))
                    else:
                        sums = warpgroup_mma_wait(1, deps=(sums,))
                    _release_previous(empty, step, k0 > 0, STAGES)
            step += 1
        if NARROW:
            acc, right = warpgroup_mma_wait(0, deps=(sums, right_sums))
        else:
            acc = warpgroup_mma_wait(0, deps=(sums,))
        _release_previous(empty, step, True, STAGES)
    else:  # only ever the second half
        for _ in range(0, K, BLOCK_K):
            _await(ready, step, STAGES)
            step += 1
            _release_previous(empty, step, True, STAGES)
    if not NARROW:
        acc, right = _halves(acc)
    return acc, right, step


@gluon.jit
def _widened(value):
    """As fp32; bf16, two elements to a register, by one instruction each."""
    if value.dtype != gl.bfloat16:
        return value.to(gl.float32)
    bits = gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [value], dtype=gl.int32,
        is_pure=True, pack=2,
    )  # fmt: skip
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _approximate(op: gl.constexpr, x):
    """An fp32 instruction of the special function unit, within 2 ulp, subnormals as zero."""
    return gl.inline_asm_elementwise(
        op + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _value_and_slope(v, ACTIVATION: gl.constexpr):
    """`activation.value_and_slope`, with a sigmoid in fewer instructions."""
    NAME: gl.constexpr = ACTIVATION.name
    if NAME == "swiglu" or NAME == "silu" or NAME == "quick_geglu":
        SCALE: gl.constexpr = 1.702 if NAME == "quick_geglu" else 1.0
        s = _approximate("rcp", 1.0 + _approximate("ex2", v * (-1.4426950408889634 * SCALE)))
        value = v * s
        return value, s + SCALE * value * (1.0 - s)
    return value_and_slope(v, ACTIVATION)


@gluon.jit
def _activate(gate, up, ACTIVATION: gl.constexpr):
    """f(gate) * up when gated, else f(gate), as `activation.activate`."""
    y, _ = _value_and_slope(clamped_gate(gate, ACTIVATION), ACTIVATION)
    if ACTIVATION.gated:
        y = y * up_factor(up, ACTIVATION)
    return y


@gluon.jit
def _hand_over(value, products, first: gl.constexpr, bias_ptr, n0, N, up_shift):
    """A warpgroup's rows of a tile into shared memory, PART_N columns to a part.

    With its columns' bias, if any: `n0` of N and on, and `up_shift` further for the right half.
    """
    PART_N: gl.constexpr = products.shape[2]
    PARTS: gl.constexpr = products.shape[0] // 2
    if value.shape[1] > PART_N:
        left, right = _halves(value)
        _hand_over(left, products, first, bias_ptr, n0, N, up_shift)
        _hand_over(right, products, first + left.shape[1] // PART_N, bias_ptr, n0, N, up_shift)
    else:
        if bias_ptr is not None:
            part: gl.constexpr = first % PARTS
            n = n0 + part * PART_N + gl.arange(0, PART_N, gl.SliceLayout(0, value.type.layout))
            if part >= PARTS // 2:
                n += up_shift
            bias = gl.load(bias_ptr + n, mask=n < N, other=0.0)
            value += bias.to(gl.float32)[None, :]
        products.index(first).store(value.to(products.dtype))


@gluon.jit
def _multiply_rows(
    half: gl.constexpr,
    bias_ptr,  # [E, N], or None
    a_stages,
    weight_stages,
    products,
    empty,
    ready,
    full,
    free,
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    tile_row_end_ptr,  # [num_tiles]
    num_tiles,
    N,
    num_cols,
    K: gl.constexpr,
    GATHER: gl.constexpr,
    N_FIRST: gl.constexpr,
    HALVES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    HALF_R: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    NARROW: gl.constexpr,
):
    """One warpgroup: its half of a row tile times a weight tile, handed over to `_finish_rows`."""
    PARTS: gl.constexpr = products.shape[0] // 2
    COLS: gl.constexpr = BLOCK_N // HALVES
    step, turn = 0, 0
    programs = gl.num_programs(0)
    expert, row_start, row_end, col = _row_tile(
        gl.program_id(0), tile_expert_ptr, tile_row_start_ptr, tile_row_end_ptr, num_tiles,
        num_cols, GROUP,
    )  # fmt: skip
    for index in range(gl.program_id(0), gl.cdiv(num_tiles, GROUP) * GROUP * num_cols, programs):
        next_expert, next_row_start, next_row_end, next_col = _row_tile(
            index + programs, tile_expert_ptr, tile_row_start_ptr, tile_row_end_ptr, num_tiles,
            num_cols, GROUP,
        )  # fmt: skip
        if expert >= 0:
            used = row_start + half * HALF_R < row_end
            left, right, step = _multiply(
                half, used, a_stages, weight_stages, empty, ready, step, K, GATHER, N_FIRST,
                BLOCK_N, BLOCK_K, HALF_R, STAGES, NARROW,
            )  # fmt: skip
            mbarrier.wait(free.index(half), (turn & 1) ^ 1)
            if used:
                expert_bias_ptr = bias_ptr
                if bias_ptr is not None:
                    expert_bias_ptr = bias_ptr + expert.to(gl.int64) * N
                up_shift = N // 2 - COLS if HALVES == 2 else 0
                first: gl.constexpr = half * PARTS
                n0 = col * COLS
                _hand_over(left, products, first, expert_bias_ptr, n0, N, up_shift)
                _hand_over(right, products, first + PARTS // 2, expert_bias_ptr, n0, N, up_shift)
                fence_async_shared()
            mbarrier.arrive(full.index(half), count=1)
            turn += 1
        expert, row_start, row_end, col = next_expert, next_row_start, next_row_end, next_col


@gluon.jit
def _piece(
    ptr, row, col, width: gl.constexpr, PIECE_R: gl.constexpr, PART_N: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Pointers to a piece: one address and small offsets."""
    r = gl.arange(0, PIECE_R, gl.SliceLayout(1, layout))
    c = gl.arange(0, PART_N, gl.SliceLayout(0, layout))
    return ptr + row.to(gl.int64) * width + col + (r[:, None] * width + c[None, :])


@gluon.jit
def _finish_product(
    products, pieces, half, out_ptr, out_desc, row, end, n0, cols, layout: gl.constexpr
):
    """Writes a half as it is: by TMA, or row by row where the expert's rows end inside."""
    PART_N: gl.constexpr = pieces.shape[2]
    PIECE_R: gl.constexpr = pieces.shape[1]
    PARTS: gl.constexpr = products.shape[0] // 2
    ROWS: gl.constexpr = products.shape[1]
    if row + ROWS <= end:
        for i in range(PARTS):
            tma.async_copy_shared_to_global(
                out_desc, [row, n0 + i * PART_N], products.index(half * PARTS + i)
            )
        tma.store_wait(0)
    else:
        r = gl.arange(0, PIECE_R, gl.SliceLayout(1, layout))
        c = gl.arange(0, PART_N, gl.SliceLayout(0, layout))
        for i in range(ROWS // PIECE_R * PARTS):
            first = row + i % (ROWS // PIECE_R) * PIECE_R
            n = n0 + i // (ROWS // PIECE_R) * PART_N
            ptrs = out_ptr + first.to(gl.int64) * cols + n + (r[:, None] * cols + c[None, :])
            inside = (first + r < end)[:, None] & (n + c < cols)[None, :]
            value = pieces.index(half * (ROWS // PIECE_R * PARTS) + i).load(layout)
            gl.store(ptrs, value, mask=inside)


@gluon.jit
def _finish_fc1(
    products,  # gate columns, then as many up columns when gated
    pieces,
    half,
    fc1_output_ptr,  # [R, 2F] or [R, F]
    fc1_output_desc,
    act_ptr,  # [R, F]
    permuted_probs_ptr,  # [R]
    row,
    end,
    f0,
    F: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SAVE: gl.constexpr,
    layout: gl.constexpr,
):
    """act = prob * f(fc1_output), and fc1_output itself if it is to be saved."""
    ROWS: gl.constexpr = products.shape[1]
    PIECE_R: gl.constexpr = pieces.shape[1]
    HEIGHT: gl.constexpr = ROWS // PIECE_R  # pieces of a part
    PART_N: gl.constexpr = products.shape[2]
    ALL: gl.constexpr = products.shape[0] // 2
    PARTS: gl.constexpr = ALL // 2 if ACTIVATION.gated else ALL
    WIDTH: gl.constexpr = 2 * F if ACTIVATION.gated else F
    if SAVE:
        if row + ROWS <= end:
            for i in range(ALL):
                n = f0 + i // PARTS * F + i % PARTS * PART_N
                tma.async_copy_shared_to_global(
                    fc1_output_desc, [row, n], products.index(half * ALL + i)
                )
    r = row + gl.arange(0, PIECE_R, gl.SliceLayout(1, layout))
    next_prob = gl.load(permuted_probs_ptr + r, mask=r < end, other=0.0)
    for height in range(HEIGHT):
        prob = next_prob[:, None]
        inside = (r < end)[:, None]
        r += PIECE_R
        next_prob = gl.load(permuted_probs_ptr + r, mask=r < end, other=0.0)
        first = row + height * PIECE_R
        for i in gl.static_range(PARTS):
            f = f0 + i * PART_N
            if F % (PARTS * PART_N) != 0:
                inside = inside & (f < F)
            piece = (half * ALL + i) * HEIGHT + height
            gate = pieces.index(piece).load(layout)
            up = gate
            if ACTIVATION.gated:
                up = pieces.index(piece + PARTS * HEIGHT).load(layout)
            if SAVE:
                if row + ROWS > end:
                    saved_ptrs = _piece(fc1_output_ptr, first, f, WIDTH, PIECE_R, PART_N, layout)
                    gl.store(saved_ptrs, gate, mask=inside)
                    if ACTIVATION.gated:
                        gl.store(saved_ptrs + F, up, mask=inside)
            act = _activate(_widened(gate), _widened(up), ACTIVATION) * prob
            act_ptrs = _piece(act_ptr, first, f, F, PIECE_R, PART_N, layout)
            gl.store(act_ptrs, act.to(act_ptr.dtype.element_ty), mask=inside)
    tma.store_wait(0)


@gluon.jit
def _fetch_half(
    fc1_output_desc, saved, loaded, taken, row, col, F: gl.constexpr, GATED: gl.constexpr,
    HALF_R: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    """Gate and up of a half's rows, two pieces of each at a time."""
    SIDES: gl.constexpr = 2 if GATED else 1
    PIECE_R: gl.constexpr = saved.shape[1]
    PART_N: gl.constexpr = saved.shape[2]
    PAIRS: gl.constexpr = COLS // PART_N // 2
    SLOTS: gl.constexpr = loaded.shape[0]
    for i in range(HALF_R // PIECE_R * PAIRS):
        slot = _await_empty(taken, i, SLOTS)
        bar = loaded.index(slot)
        mbarrier.expect(bar, 2 * SIDES * fc1_output_desc.block_type.nbytes)
        for part in gl.static_range(2):
            f = col * COLS + (i % PAIRS * 2 + part) * PART_N
            for side in gl.static_range(SIDES):
                tma.async_copy_global_to_shared(
                    fc1_output_desc,
                    [row + i // PAIRS * PIECE_R, side * F + f],
                    bar,
                    saved.index(2 * SIDES * slot + SIDES * part + side),
                )


@gluon.jit
def _fetch_rows(
    fc1_output_desc,
    saved,
    loaded,
    taken,
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    tile_row_end_ptr,  # [num_tiles]
    num_tiles,
    num_cols,
    F: gl.constexpr,
    STEP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HALF_R: gl.constexpr,
    COLS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """One warp: fc1_output for `_finish_fc2_dgrad`, by TMA, as far ahead as `saved` has room."""
    if STEP == "fc2_dgrad":
        programs = gl.num_programs(0)
        expert, row_start, row_end, col = _row_tile(
            gl.program_id(0), tile_expert_ptr, tile_row_start_ptr, tile_row_end_ptr, num_tiles,
            num_cols, GROUP,
        )  # fmt: skip
        count = gl.cdiv(num_tiles, GROUP) * GROUP * num_cols
        for index in range(gl.program_id(0), count, programs):
            next_expert, next_row_start, next_row_end, next_col = _row_tile(
                index + programs, tile_expert_ptr, tile_row_start_ptr, tile_row_end_ptr, num_tiles,
                num_cols, GROUP,
            )  # fmt: skip
            for half in range(2):
                row = row_start + half * HALF_R
                if (expert >= 0) & (row < row_end):
                    _fetch_half(
                        fc1_output_desc, saved, loaded, taken, row, col, F, ACTIVATION.gated,
                        HALF_R, COLS,
                    )  # fmt: skip
            expert, row_start, row_end, col = next_expert, next_row_start, next_row_end, next_col


@gluon.jit
def _finish_fc2_dgrad(
    products,  # grad_act
    pieces,
    half,
    saved,
    loaded,
    taken,
    fc1_output_ptr,  # [R, 2F] or [R, F] in; grad_fc1_output out
    act_ptr,  # [R, F]
    permuted_probs_ptr,  # [R]
    grad_permuted_probs_ptr,  # [R], of these columns
    row,
    end,
    f0,
    F: gl.constexpr,
    ACTIVATION: gl.constexpr,
    layout: gl.constexpr,
):
    """`activation.activation_backward` by pieces, of which `_fetch_rows` brings fc1_output."""
    GATED: gl.constexpr = ACTIVATION.gated
    SIDES: gl.constexpr = 2 if GATED else 1
    PIECE_R: gl.constexpr = pieces.shape[1]
    HEIGHT: gl.constexpr = products.shape[1] // PIECE_R
    PART_N: gl.constexpr = products.shape[2]
    PARTS: gl.constexpr = products.shape[0] // 2
    PAIRS: gl.constexpr = PARTS // 2
    SLOTS: gl.constexpr = loaded.shape[0]
    WIDTH: gl.constexpr = 2 * F if GATED else F
    dtype: gl.constexpr = act_ptr.dtype.element_ty
    gl.static_assert(HEIGHT * PAIRS % (2 * SLOTS) == 0)  # so that every half begins alike
    r = row + gl.arange(0, PIECE_R, gl.SliceLayout(1, layout))
    next_prob = gl.load(permuted_probs_ptr + r, mask=r < end, other=0.0)
    for height in range(HEIGHT):
        prob = next_prob[:, None]
        next_prob = gl.load(permuted_probs_ptr + r + PIECE_R, mask=r + PIECE_R < end, other=0.0)
        first = row + height * PIECE_R
        grad_probs = gl.zeros((PIECE_R, PART_N), gl.float32, layout)
        for pair in range(PAIRS):
            slot = _await(loaded, height * PAIRS + pair, SLOTS)
            place = 2 * SIDES * slot  # of the first part's gate; the second's is SIDES further
            gates = saved.index(place).load(layout), saved.index(place + SIDES).load(layout)
            ups = gates
            if GATED:
                ups = (
                    saved.index(place + 1).load(layout),
                    saved.index(place + SIDES + 1).load(layout),
                )
            fence_async_shared()  # or TMA, another proxy, would overtake loads on their way
            mbarrier.arrive(taken.index(slot), count=1)
            for part in gl.static_range(2):
                f = f0 + (2 * pair + part) * PART_N
                inside = (r < end)[:, None]
                if F % (PARTS * PART_N) != 0:
                    inside = inside & (f < F)
                piece = (half * PARTS + 2 * pair + part) * HEIGHT + height
                grad_act = _widened(pieces.index(piece).load(layout))
                gate, up = _widened(gates[part]), _widened(ups[part])
                value, slope = _value_and_slope(clamped_gate(gate, ACTIVATION), ACTIVATION)
                grad = grad_act * prob
                gate_ptrs = _piece(fc1_output_ptr, first, f, WIDTH, PIECE_R, PART_N, layout)
                if GATED:
                    grad_up = grad * value
                    if ACTIVATION.clamp is not None:
                        grad_up = gl.where(gl.abs(up) > ACTIVATION.clamp, 0.0, grad_up)
                        slope = gl.where(gate > ACTIVATION.clamp, 0.0, slope)
                    gl.store(gate_ptrs + F, grad_up.to(dtype), mask=inside)
                    factor = up_factor(up, ACTIVATION)
                    value *= factor
                    grad *= factor
                gl.store(gate_ptrs, (grad * slope).to(dtype), mask=inside)
                act_ptrs = _piece(act_ptr, first, f, F, PIECE_R, PART_N, layout)
                gl.store(act_ptrs, (value * prob).to(dtype), mask=inside)
                if F % (PARTS * PART_N) != 0:
                    value = gl.where(inside, value, 0.0)
                grad_probs += grad_act * value
        gl.store(grad_permuted_probs_ptr + r, gl.sum(grad_probs, 1), mask=r < end)
        r += PIECE_R


@gluon.jit
def _finish_rows(
    out_ptr,
    out_desc,
    act_ptr,
    permuted_probs_ptr,
    grad_permuted_probs_ptr,
    R,
    products,
    pieces,
    saved,
    loaded,
    taken,
    full,
    free,
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    tile_row_end_ptr,  # [num_tiles]
    num_tiles,
    cols,
    num_cols,
    F: gl.constexpr,
    STEP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SAVE: gl.constexpr,
    COLS: gl.constexpr,
    GROUP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Two or four warps: what follows on the product, while the next tile is multiplied.

    Its loops are real ones: unrolled code of this length would come from beyond the caches.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    turn = 0
    programs = gl.num_programs(0)
    expert, row_start, end, col = _row_tile(
        gl.program_id(0), tile_expert_ptr, tile_row_start_ptr, tile_row_end_ptr, num_tiles,
        num_cols, GROUP,
    )  # fmt: skip
    for index in range(gl.program_id(0), gl.cdiv(num_tiles, GROUP) * GROUP * num_cols, programs):
        next_expert, next_row_start, next_end, next_col = _row_tile(
            index + programs, tile_expert_ptr, tile_row_start_ptr, tile_row_end_ptr, num_tiles,
            num_cols, GROUP,
        )  # fmt: skip
        if expert >= 0:
            n0 = col * COLS
            for half in range(2):
                row = row_start + half * products.shape[1]
                mbarrier.wait(full.index(half), turn & 1)
                if row < end:
                    if STEP == "fc1":
                        _finish_fc1(
                            products, pieces, half, out_ptr, out_desc, act_ptr, permuted_probs_ptr,
                            row, end, n0, F, ACTIVATION, SAVE, layout,
                        )  # fmt: skip
                    elif STEP == "fc2_dgrad":
                        _finish_fc2_dgrad(
                            products, pieces, half, saved, loaded, taken, out_ptr, act_ptr,
                            permuted_probs_ptr, grad_permuted_probs_ptr + col.to(gl.int64) * R,
                            row, end, n0, F, ACTIVATION, layout,
                        )  # fmt: skip
                    else:
                        _finish_product(
                            products, pieces, half, out_ptr, out_desc, row, end, n0, cols, layout
                        )
                mbarrier.arrive(free.index(half), count=1)
            turn += 1
        expert, row_start, end, col = next_expert, next_row_start, next_end, next_col


@direct
@gluon.jit(do_not_specialize=["R", "num_tiles"])
def _rows_hopper_kernel(
    a_ptr,  # [T, K] when GATHER, else unused
    a_desc,  # [R, K] unless GATHER
    weight_desc,  # [E * N, K] when N_FIRST, else [E * K, N]
    bias_ptr,  # [E, N] or None
    out_ptr,  # [R, cols]; of STEP "fc1" fc1_output, of "fc2_dgrad" too, replaced by its gradient
    out_desc,
    act_ptr,  # [R, F] for the two
    permuted_probs_ptr,  # [R] for the two
    grad_permuted_probs_ptr,  # [num_cols, R], to be summed, for "fc2_dgrad"
    R,
    expert_token_indices_ptr,  # [R]
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    tile_row_end_ptr,  # [num_tiles]
    num_tiles,
    n_start,  # of the product's columns, `cols` from here on
    cols,
    weight_rows,
    K: gl.constexpr,
    F: gl.constexpr,
    STEP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SAVE: gl.constexpr,
    GATHER: gl.constexpr,
    N_FIRST: gl.constexpr,
    HALVES: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    HALF_R: gl.constexpr,
    PART_N: gl.constexpr,
    PIECE_R: gl.constexpr,
    SAVED: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    FINISH_REGISTERS: gl.constexpr,
):
    """Row times its expert's weight. a = [2, 3], experts = [0, 1], W = [10, 100] -> [20, 300]

    STEP "fc1": fc1_output, and act = prob * f(fc1_output); HALVES = 2 has gate and up columns side
    by side in a tile. "fc2_dgrad": grad_act, and at once the backward of the activation. Else the
    product as it is.
    """
    dtype: gl.constexpr = a_ptr.dtype.element_ty
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_K], dtype)
    part_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_R, PART_N], dtype)
    a_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_K], rows_layout)
    weight_shape: gl.constexpr = [BLOCK_N, BLOCK_K] if N_FIRST else [BLOCK_K, BLOCK_N]
    weight_stages = gl.allocate_shared_memory(
        dtype,
        [STAGES] + weight_shape,  # noqa: RUF005 (Gluon has no starred lists)
        weight_desc.layout,
    )
    PARTS: gl.constexpr = BLOCK_N // PART_N
    products = gl.allocate_shared_memory(dtype, [2 * PARTS, HALF_R, PART_N], part_layout)
    pieces = products._reinterpret(
        dtype, [2 * PARTS * HALF_R // PIECE_R, PIECE_R, PART_N], part_layout
    )
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    if STEP == "":  # of a workspace's slice, whose width changes with the rows
        num_cols = gl.cdiv(cols, BLOCK_N)
    else:
        num_cols: gl.constexpr = (F * HALVES + BLOCK_N - 1) // BLOCK_N
    NARROW: gl.constexpr = FINISH_REGISTERS is not None
    WARPS: gl.constexpr = 4 if NARROW else 2  # that finish
    LOAD_WARPS: gl.constexpr = WARPS // 2
    saved, loaded, taken = pieces, full, free  # which the other steps do not use
    if STEP == "fc2_dgrad":
        saved = gl.allocate_shared_memory(dtype, [SAVED, PIECE_R, PART_N], part_layout)
        SLOTS: gl.constexpr = SAVED // 4 if ACTIVATION.gated else SAVED // 2
        taken, loaded = _barriers(SLOTS, 1, 1)
    empty, ready = _barriers(STAGES, 2, 32 * LOAD_WARPS + 1 if GATHER else 1)
    gl.warp_specialize(
        [
            (
                _multiply_rows,
                (
                    0, bias_ptr, a_stages, weight_stages, products, empty, ready, full, free,
                    tile_expert_ptr, tile_row_start_ptr, tile_row_end_ptr, num_tiles,
                    HALVES * cols, num_cols, K, GATHER, N_FIRST, HALVES, BLOCK_N, BLOCK_K, HALF_R,
                    GROUP, STAGES, NARROW,
                ),
            ),
            (
                _multiply_rows,
                (
                    1, bias_ptr, a_stages, weight_stages, products, empty, ready, full, free,
                    tile_expert_ptr, tile_row_start_ptr, tile_row_end_ptr, num_tiles,
                    HALVES * cols, num_cols, K, GATHER, N_FIRST, HALVES, BLOCK_N, BLOCK_K, HALF_R,
                    GROUP, STAGES, NARROW,
                ),
            ),
            (
                _finish_rows,
                (
                    out_ptr, out_desc, act_ptr, permuted_probs_ptr, grad_permuted_probs_ptr, R,
                    products, pieces, saved, loaded, taken, full, free, tile_expert_ptr,
                    tile_row_start_ptr, tile_row_end_ptr, num_tiles, cols, num_cols, F, STEP,
                    ACTIVATION, SAVE, BLOCK_N // HALVES, GROUP, WARPS,
                ),
            ),
            (
                _load_rows,
                (
                    a_ptr, a_desc, weight_desc, a_stages, weight_stages, empty, ready,
                    expert_token_indices_ptr, tile_expert_ptr, tile_row_start_ptr,
                    tile_row_end_ptr, num_tiles, n_start, weight_rows, num_cols, K, GATHER,
                    N_FIRST, HALVES, BLOCK_R, BLOCK_N, BLOCK_K, GROUP, STAGES, LOAD_WARPS,
                ),
            ),
            (
                _fetch_rows,
                (
                    out_desc, saved, loaded, taken, tile_expert_ptr, tile_row_start_ptr,
                    tile_row_end_ptr, num_tiles, num_cols, F, STEP, ACTIVATION, HALF_R, BLOCK_N,
                    GROUP,
                ),
            ),
        ],
        [4, WARPS, LOAD_WARPS, 1],
        [
            MULTIPLY_REGISTERS, FINISH_REGISTERS if NARROW else LOAD_REGISTERS, LOAD_REGISTERS,
            LOAD_REGISTERS,
        ],
    )  # fmt: skip


def _rows(
    a: torch.Tensor,
    weight: torch.Tensor,
    lists: IndexLists,
    out: torch.Tensor,
    n_start: int,
    cols: int,
    gather: bool,
    transposed: bool,
    step: str = "",
    activation: Activation | None = None,
    save: bool = True,
    act: torch.Tensor | None = None,
    permuted_probs: torch.Tensor | None = None,
    grad_permuted_probs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Launches `_rows_hopper_kernel`; what a step does not use is left out.

    Args:
        a: [T, K] when `gather`, else [R, K].
        weight: [E, N, K] when `transposed`, else [E, K, N].
        out: [R, cols], or fc1_output of the steps "fc1" and "fc2_dgrad".
        n_start, cols: columns of the product.
    """
    E, weight_rows, weight_cols = weight.shape
    ring = configuration(f"{step or 'rows'}_hopper", a, cols, a.shape[1])
    halves = 2 if step == "fc1" and activation.gated else 1
    block = (BLOCK_N // halves, BLOCK_K) if transposed else (BLOCK_K, BLOCK_N)
    _rows_hopper_kernel[(_programs(a.device),)](
        a,
        None if gather else _descriptor(a, BLOCK_R, BLOCK_K),
        _descriptor(weight.view(E * weight_rows, weight_cols), *block),
        bias,
        out,
        _descriptor(out, PIECE_R if step == "fc2_dgrad" else HALF_R, PART_N),
        act,
        permuted_probs,
        grad_permuted_probs,
        lists.max_rows,
        lists.expert_token_indices,
        lists.tile_expert,
        lists.tile_row_start,
        lists.tile_row_end,
        lists.num_tiles,
        n_start,
        cols,
        weight_rows,
        a.shape[1],
        cols if step else 0,
        step,
        activation,
        save,
        gather,
        transposed,
        halves,
        BLOCK_R,
        BLOCK_N,
        BLOCK_K,
        HALF_R,
        PART_N,
        PIECE_R,
        SAVED,
        ring.group,
        ring.stages,
        ring.multiply_registers,
        ring.load_registers,
        ring.finish_registers,
        num_warps=NUM_WARPS,
    )


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
    _rows(a, weight, lists, out, n_start, out.shape[1], gather, transposed)


def fc1(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    permuted_probs: torch.Tensor,
    lists: IndexLists,
    activation: Activation,
    fc1_output: torch.Tensor | None,
    act: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """`gemm.fc1` into given buffers; fc1_output None is not saved."""
    save = fc1_output is not None
    _rows(
        x, fc1_weight, lists, fc1_output if save else act, 0, act.shape[1], True, True, "fc1",
        activation, save, act, permuted_probs, bias=bias,
    )  # fmt: skip


def fc2_dgrad(
    grad_output: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc1_output: torch.Tensor,
    permuted_probs: torch.Tensor,
    lists: IndexLists,
    activation: Activation,
    act: torch.Tensor,
    gather: bool,
) -> torch.Tensor:
    """`gemm.fc2_dgrad` into a given act; returns grad_permuted_probs."""
    F = act.shape[1]
    grad_permuted_probs = permuted_probs.new_empty(cdiv(F, BLOCK_N), lists.max_rows)
    _rows(
        grad_output, fc2_weight, lists, fc1_output, 0, F, gather, False, "fc2_dgrad", activation,
        True, act, permuted_probs, grad_permuted_probs,
    )  # fmt: skip
    return grad_permuted_probs[0] if F <= BLOCK_N else grad_permuted_probs.sum(0)


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
    PART_N: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """Parts of PART_N columns, so that one is filled while the other leaves."""
    HALF: gl.constexpr = value.shape[1] // 2
    left, right = _halves(value)
    next_row = row + HALF if TRANSPOSED else row
    next_n = n0 if TRANSPOSED else n0 + HALF
    if HALF > PART_N:
        _write_tile(
            left, buffers, slot, out_desc, out_ptr, row, row_end, n0, cols, stride, PART_N,
            TRANSPOSED,
        )  # fmt: skip
        _write_tile(
            right, buffers, slot, out_desc, out_ptr, next_row, row_end, next_n, cols, stride,
            PART_N, TRANSPOSED,
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
def _copy(stage, ptr, row, in_expert, c0, WIDTH: gl.constexpr, layout: gl.constexpr):
    """One stage of a weight gradient by asynchronous copies; what is outside becomes zero."""
    c = gl.arange(0, stage.shape[1], gl.SliceLayout(0, layout))
    ptrs = (ptr + c0) + row.to(gl.int64)[:, None] * WIDTH + c[None, :]
    async_copy.async_copy_global_to_shared(
        stage, ptrs, mask=in_expert[:, None] & (c < WIDTH - c0)[None, :]
    )


@gluon.jit
def _weight_index(turn):
    """Which tile a program makes: to and fro over them, so that none always takes the larger."""
    place = gl.program_id(0)
    place = gl.where(turn % 2 == 0, place, gl.num_programs(0) - 1 - place)
    return turn * gl.num_programs(0) + place


@gluon.jit
def _turns(pieces):
    """How many tiles a program makes."""
    last = pieces // gl.num_programs(0)
    return last + (_weight_index(last) < pieces).to(gl.int32)


@gluon.jit
def _weight_tile(
    turn, ranked_experts_ptr, M: gl.constexpr, N: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Expert, first row and column, and the expert's routed rows of a program's tile.

    Experts with more rows come first, so that programs have much the same work and end together.
    """
    index = _weight_index(turn)
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    rank, tile = index // (num_m * num_n), index % (num_m * num_n)
    first = tile // (GROUP * num_n) * GROUP
    height = gl.minimum(num_m - first, GROUP)  # the last group may be narrower
    inside = tile % (GROUP * num_n)
    tile_m, tile_n = first + inside % height, inside // height
    ptr = ranked_experts_ptr + 3 * rank
    expert, start, end = gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2)
    return expert, tile_m * BLOCK_M, tile_n * BLOCK_N, start, end


@gluon.jit
def _load_wgrad(
    quarter: gl.constexpr,  # of a step's rows, this warp's
    a_ptr,  # [T, M] when GATHER, else [R, M]
    a_desc,  # [R, M] unless GATHER
    b_ptr,  # [R, N]
    b_desc,  # [R, N]
    a_stages,
    b_stages,
    empty,
    ready,
    expert_token_indices_ptr,  # [R]
    ranked_experts_ptr,  # [E, 3]
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
    """One warp of four: its rows of the gathered operand; the first also asks for the rest by TMA.

    The last step of an expert may end in rows of the next one, or in rows never written, which may
    be NaN: both operands are copied under a mask there.
    """
    ROWS: gl.constexpr = BLOCK_R // 4
    FIRST: gl.constexpr = quarter * ROWS
    BYTES: gl.constexpr = b_desc.block_type.nbytes + (0 if GATHER else a_desc.block_type.nbytes)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    r = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    step = 0
    for turn in range(_turns(pieces)):
        _, m0, n0, start, end = _weight_tile(
            turn, ranked_experts_ptr, M, N, BLOCK_M, BLOCK_N, GROUP
        )
        if GATHER:
            token = _tokens(expert_token_indices_ptr, start, end, r)
        for r0 in range(start, end, BLOCK_R):
            stage = _await_empty(empty, step, STAGES)
            bar = ready.index(stage)
            a = a_stages.index(stage).slice(FIRST, ROWS)
            if r0 + BLOCK_R <= end:
                if quarter == 0:
                    mbarrier.expect(bar, BYTES)
                    tma.async_copy_global_to_shared(b_desc, [r0, n0], bar, b_stages.index(stage))
                    if not GATHER:
                        tma.async_copy_global_to_shared(
                            a_desc, [r0, m0], bar, a_stages.index(stage)
                        )
                if GATHER:
                    _copy(a, a_ptr, token, r >= 0, m0, M, layout)
            else:
                if quarter == 0:
                    mbarrier.arrive(bar, count=1)
                inside = r0 + r < end
                _copy(a, a_ptr, token if GATHER else r0 + r, inside, m0, M, layout)
                b = b_stages.index(stage).slice(FIRST, ROWS)
                for c in gl.static_range(0, BLOCK_N, BLOCK_M):
                    _copy(b.slice(c, BLOCK_M, dim=1), b_ptr, r0 + r, inside, n0 + c, N, layout)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            if GATHER:  # read ahead for the next step
                token = _tokens(expert_token_indices_ptr, r0 + BLOCK_R, end, r)
            step += 1


@gluon.jit
def _add_tile(
    out_ptr, value, m0, n0, M, N, stride, PART_N: gl.constexpr, TRANSPOSED: gl.constexpr
):  # fmt: skip
    """out += value, summed in fp32, a few columns at a time: addresses take registers too."""
    COLS: gl.constexpr = value.shape[1]
    if COLS > PART_N:
        left, right = _halves(value)
        _add_tile(out_ptr, left, m0, n0, M, N, stride, PART_N, TRANSPOSED)
        _add_tile(out_ptr, right, m0, n0 + COLS // 2, M, N, stride, PART_N, TRANSPOSED)
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
    ranked_experts_ptr,  # [E, 3]
    pieces,
    rows,
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
    PART_N: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warpgroup: the sum over an expert's rows, written as it is or added to what is there."""
    HALF_M: gl.constexpr = BLOCK_M // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    step = 0
    for turn in range(_turns(pieces)):
        expert, m0, n0, start, end = _weight_tile(
            turn, ranked_experts_ptr, M, N, BLOCK_M, BLOCK_N, GROUP
        )
        m0 += half * HALF_M
        acc = gl.zeros((HALF_M, BLOCK_N), gl.float32, layout)
        for r0 in range(start, end, BLOCK_R):
            stage = _await(ready, step, STAGES)
            if GATHER or r0 + BLOCK_R > end:  # copies come by another proxy than wgmma reads by
                fence_async_shared()
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
                _add_tile(expert_ptr, acc, m0, n0, M, N, out_stride, PART_N // 2, TRANSPOSED)
        else:
            first = expert * (out_stride_e // out_stride)
            row, col = (n0, m0) if TRANSPOSED else (m0, n0)
            _write_tile(
                acc, buffers, 2 * half, out_desc, out_ptr, first + row, first + rows, col, cols,
                out_stride, PART_N, TRANSPOSED,
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
    ranked_experts_ptr,  # [E, 3]
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
    PART_N: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """out[e] = a^T b by expert. a = [1, 2, 3], b = [4, 5, 6], rows [0, 2) and [2, 3) -> [14, 18]"""
    dtype: gl.constexpr = a_ptr.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_M], dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_N], dtype)
    part_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART_N, PART_N], dtype)
    a_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_M], a_layout)
    b_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_N], b_layout)
    buffers = gl.allocate_shared_memory(dtype, [4, PART_N, PART_N], part_layout)
    empty, ready = _barriers(STAGES, 2, 4 * 32 + 1)  # four warps' copies, and what TMA brings
    pieces = E * gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    gl.warp_specialize(
        [
            (
                _multiply_wgrad,
                (
                    0, out_ptr, out_desc, a_stages, b_stages, buffers, empty, ready,
                    ranked_experts_ptr, pieces, rows, cols, M, N, out_stride_e, out_stride, GATHER,
                    TRANSPOSED, ACCUMULATE, BLOCK_M, BLOCK_N, BLOCK_R, PART_N, GROUP, STAGES,
                ),
            ),
            (
                _multiply_wgrad,
                (
                    1, out_ptr, out_desc, a_stages, b_stages, buffers, empty, ready,
                    ranked_experts_ptr, pieces, rows, cols, M, N, out_stride_e, out_stride, GATHER,
                    TRANSPOSED, ACCUMULATE, BLOCK_M, BLOCK_N, BLOCK_R, PART_N, GROUP, STAGES,
                ),
            ),
            (
                _load_wgrad,
                (
                    0, a_ptr, a_desc, b_ptr, b_desc, a_stages, b_stages, empty, ready,
                    expert_token_indices_ptr, ranked_experts_ptr, pieces, M, N, GATHER, BLOCK_M,
                    BLOCK_N, BLOCK_R, GROUP, STAGES,
                ),
            ),
            (
                _load_wgrad,
                (
                    1, a_ptr, a_desc, b_ptr, b_desc, a_stages, b_stages, empty, ready,
                    expert_token_indices_ptr, ranked_experts_ptr, pieces, M, N, GATHER, BLOCK_M,
                    BLOCK_N, BLOCK_R, GROUP, STAGES,
                ),
            ),
            (
                _load_wgrad,
                (
                    2, a_ptr, a_desc, b_ptr, b_desc, a_stages, b_stages, empty, ready,
                    expert_token_indices_ptr, ranked_experts_ptr, pieces, M, N, GATHER, BLOCK_M,
                    BLOCK_N, BLOCK_R, GROUP, STAGES,
                ),
            ),
            (
                _load_wgrad,
                (
                    3, a_ptr, a_desc, b_ptr, b_desc, a_stages, b_stages, empty, ready,
                    expert_token_indices_ptr, ranked_experts_ptr, pieces, M, N, GATHER, BLOCK_M,
                    BLOCK_N, BLOCK_R, GROUP, STAGES,
                ),
            ),
        ],
        [4, 1, 1, 1, 1],
        [MULTIPLY_REGISTERS] + [LOAD_REGISTERS] * 4,
    )  # fmt: skip


def fits_wgrad(a: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether offsets inside one expert's weight fit int32."""
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
        None if accumulate else _descriptor(out_rows, PART_N, PART_N),
        lists.expert_token_indices,
        lists.ranked_experts,
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
        PART_N,
        ring.group,
        ring.stages,
        ring.multiply_registers,
        ring.load_registers,
        num_warps=NUM_WARPS,
    )
