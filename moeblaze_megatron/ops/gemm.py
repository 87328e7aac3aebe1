"""GEMMs over routed rows: rows gathered by index on the way in, no permuted copy of the tokens.

T tokens, E experts, H hidden size, F ffn hidden size, R routed rows; N columns and D depth of a row
times a weight; M rows and N columns of a weight gradient. Weights are read through tensor
descriptors of rank 3 or 4, so that a tile never reads another expert's weights; rows of x are read
through pointers.
"""

import torch
import triton
import triton.language as tl

from moeblaze_megatron.ops import hopper
from moeblaze_megatron.ops.activation import Activation, activate, activation_backward
from moeblaze_megatron.ops.index_lists import IndexLists
from moeblaze_megatron.ops.launch import descriptor, direct
from moeblaze_megatron.ops.table import configuration
from moeblaze_megatron.ops.tiles import cdiv, input_precision


@triton.jit
def _tile_of_program(num_tiles, num_cols, GROUP: tl.constexpr):
    """Row tile and column tile of a program, GROUP row tiles at a time."""
    pid = tl.program_id(0)
    first = pid // (GROUP * num_cols) * GROUP
    height = tl.minimum(num_tiles - first, GROUP)  # the last group may be narrower
    inside = pid % (GROUP * num_cols)
    return first + inside % height, inside // height


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b. fp32 sums a step on its own first, so that rounding errors do not pile up."""
    if a.dtype == tl.float32 and PRECISION == "ieee":
        DEPTH: tl.constexpr = a.shape[1]  # a bound above 0 keeps Triton from fusing the sum back
        acc += tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=DEPTH)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _load_gathered(ptrs, depth, d0, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_R, BLOCK_D] of the gathered rows from column d0 on, zeros past SIZE."""
    if SIZE % BLOCK_D == 0:
        tile = tl.load(ptrs + d0)
    else:
        tile = tl.load(ptrs + d0, mask=(d0 + depth)[None, :] < SIZE, other=0.0)
    return tile


@direct
@triton.jit(do_not_specialize=["num_tiles"])
def _fc1_kernel(
    x_ptr,  # [T, H]
    fc1_weight_desc,  # [E, 2, F, H] when GATED, else [E, 1, F, H]
    fc1_bias_ptr,  # [E, 2F] or [E, F], or None
    permuted_probs_ptr,  # [R]
    fc1_output_ptr,  # [R, 2F] or [R, F], saved for backward
    act_ptr,  # [R, F]
    expert_token_indices_ptr,  # [R]
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    tile_row_end_ptr,  # [num_tiles]
    num_tiles,
    H: tl.constexpr,
    F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SAVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
):
    """act = prob * f(x W^T + b). x = 3, W = 2, prob = 0.5, squared_relu -> fc1_output 6, act 18"""
    GATED: tl.constexpr = ACTIVATION.gated
    WIDTH: tl.constexpr = 2 * F if GATED else F
    tile, col = _tile_of_program(num_tiles, tl.cdiv(F, BLOCK_F), GROUP)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    row_start = tl.load(tile_row_start_ptr + tile)
    rows = row_start + tl.arange(0, BLOCK_R)
    in_expert = rows < tl.load(tile_row_end_ptr + tile)
    token = tl.load(expert_token_indices_ptr + rows, mask=in_expert, other=0).to(tl.int64)
    depth = tl.arange(0, BLOCK_H)
    x_ptrs = x_ptr + token[:, None] * H + depth[None, :]
    f0 = col * BLOCK_F
    gate = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    up = tl.zeros((BLOCK_R, BLOCK_F), tl.float32) if GATED else gate
    for h0 in range(0, H, BLOCK_H):
        x = _load_gathered(x_ptrs, depth, h0, H, BLOCK_H)
        w = fc1_weight_desc.load([expert, 0, f0, h0]).reshape(BLOCK_F, BLOCK_H)
        gate = _dot(x, w.T, gate, PRECISION)
        if GATED:
            w_up = fc1_weight_desc.load([expert, 1, f0, h0]).reshape(BLOCK_F, BLOCK_H)
            up = _dot(x, w_up.T, up, PRECISION)
    f = f0 + tl.arange(0, BLOCK_F)
    inside = in_expert[:, None] & (f < F)[None, :]
    row = rows.to(tl.int64)[:, None]
    dtype = act_ptr.dtype.element_ty
    if fc1_bias_ptr is not None:
        bias_ptrs = fc1_bias_ptr + expert.to(tl.int64) * WIDTH + f
        gate += tl.load(bias_ptrs, mask=f < F, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptrs + F, mask=f < F, other=0.0).to(tl.float32)[None, :]
    if SAVE:
        out = fc1_output_ptr + row * WIDTH + f[None, :]
        tl.store(out, gate.to(dtype), mask=inside)
        if GATED:
            tl.store(out + F, up.to(dtype), mask=inside)
    prob = tl.load(permuted_probs_ptr + rows, mask=in_expert, other=0.0)[:, None]
    act = activate(gate, up, ACTIVATION) * prob
    tl.store(act_ptr + row * F + f[None, :], act.to(dtype), mask=inside)


def fc1(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    permuted_probs: torch.Tensor,
    lists: IndexLists,
    activation: Activation,
    save: bool,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """First linear of every expert with gather, bias, activation and probability inside.

    Args:
        x: [T, H]; rows are looked up by token.
        fc1_weight: [E, 2F, H] (gate half first) for a gated activation, else [E, F, H].
        permuted_probs: [R] fp32.
        save: whether backward will need fc1_output.
        bias: [E, 2F] or [E, F], in x's dtype.
    Returns:
        fc1_output [R, 2F] or [R, F] (None unless `save`) and act [R, F], in x's dtype.
    """
    E, width, H = fc1_weight.shape
    F = width // 2 if activation.gated else width
    fc1_output = x.new_empty(lists.max_rows, width) if save else None
    act = x.new_empty(lists.max_rows, F)
    if not lists.num_tiles:
        return fc1_output, act
    if hopper.fits_fc1(x, F):
        hopper.fc1(x, fc1_weight, permuted_probs, lists, activation, fc1_output, act, bias)
        return fc1_output, act
    tile = configuration("fc1", x, F, H).fit(cols=F, depth=H)
    weight = fc1_weight.view(E, width // F, F, H)
    _fc1_kernel[(lists.num_tiles * cdiv(F, tile.cols),)](
        x,
        descriptor(weight, (1, 1, tile.cols, tile.depth)),
        bias,
        permuted_probs,
        fc1_output,
        act,
        lists.expert_token_indices,
        lists.tile_expert,
        lists.tile_row_start,
        lists.tile_row_end,
        lists.num_tiles,
        H,
        F,
        activation,
        save,
        input_precision(),
        tile.rows,
        tile.cols,
        tile.depth,
        tile.group,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return fc1_output, act


@direct
@triton.jit(do_not_specialize=["num_tiles"])
def _rows_kernel(
    a_ptr,  # [T, D] when GATHER, else unused
    a_desc,  # [R, D] unless GATHER
    weight_desc,  # [E, N, D] when N_FIRST, else [E, D, N]
    out_ptr,  # [R, cols], columns n_start .. n_start + cols of the product
    out_desc,  # [R, cols]
    expert_token_indices_ptr,  # [R]
    tile_expert_ptr,  # [num_tiles]
    tile_row_start_ptr,  # [num_tiles]
    tile_row_end_ptr,  # [num_tiles]
    num_tiles,
    n_start,
    cols,
    D: tl.constexpr,
    GATHER: tl.constexpr,
    N_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Row times its expert's weight. a = [2, 3], experts = [0, 1], W = [10, 100] -> [20, 300]"""
    tile, col = _tile_of_program(num_tiles, tl.cdiv(cols, BLOCK_N), GROUP)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    row_start = tl.load(tile_row_start_ptr + tile)
    rows = row_start + tl.arange(0, BLOCK_R)
    in_expert = rows < tl.load(tile_row_end_ptr + tile)
    depth = tl.arange(0, BLOCK_D)
    if GATHER:
        token = tl.load(expert_token_indices_ptr + rows, mask=in_expert, other=0).to(tl.int64)
        a_ptrs = a_ptr + token[:, None] * D + depth[None, :]
    n0 = col * BLOCK_N
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for d0 in range(0, D, BLOCK_D):
        if GATHER:
            a = _load_gathered(a_ptrs, depth, d0, D, BLOCK_D)
        else:
            a = a_desc.load([row_start, d0])
        if N_FIRST:
            w = weight_desc.load([expert, n_start + n0, d0]).reshape(BLOCK_N, BLOCK_D).T
        else:
            w = weight_desc.load([expert, d0, n_start + n0]).reshape(BLOCK_D, BLOCK_N)
        acc = _dot(a, w, acc, PRECISION)
    out = acc.to(out_ptr.dtype.element_ty)
    if tl.sum(in_expert.to(tl.int32)) == BLOCK_R:
        out_desc.store([row_start, n0], out)
    else:  # the rows below belong to the next expert
        n = n0 + tl.arange(0, BLOCK_N)
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * cols + n[None, :]
        tl.store(out_ptrs, out, mask=in_expert[:, None] & (n < cols)[None, :])


def rows_gemm(
    a: torch.Tensor,
    weight: torch.Tensor,
    lists: IndexLists,
    out: torch.Tensor,
    n_start: int,
    gather: bool,
    transposed: bool,
) -> torch.Tensor:
    """Columns n_start .. n_start + cols of every row times its expert's weight.

    Args:
        a: [T, D] when `gather` (rows are looked up by token), else [R, D].
        weight: [E, N, D] when `transposed` (a W^T, a forward linear), else [E, D, N] (a W).
        out: [R, cols], written for the rows in use.
    """
    D, cols = a.shape[1], out.shape[1]
    if not lists.num_tiles:
        return out
    if hopper.fits_rows(a):
        hopper.rows_gemm(a, weight, lists, out, n_start, gather, transposed)
        return out
    tile = configuration("rows", a, cols, D).fit(cols=cols, depth=D)
    block = [tile.cols, tile.depth] if transposed else [tile.depth, tile.cols]
    _rows_kernel[(lists.num_tiles * cdiv(cols, tile.cols),)](
        a,
        None if gather else descriptor(a, (tile.rows, tile.depth)),
        descriptor(weight, (1, *block)),
        out,
        descriptor(out, (tile.rows, tile.cols)),
        lists.expert_token_indices,
        lists.tile_expert,
        lists.tile_row_start,
        lists.tile_row_end,
        lists.num_tiles,
        n_start,
        cols,
        D,
        gather,
        transposed,
        input_precision(),
        tile.rows,
        tile.cols,
        tile.depth,
        tile.group,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def fc2_dgrad(
    grad_output: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc1_output: torch.Tensor,
    permuted_probs: torch.Tensor,
    lists: IndexLists,
    activation: Activation,
    gather: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad_act = grad_output W2 by row, and the backward of act = prob * f(fc1_output).

    Args:
        grad_output: [T, H] when `gather` (rows are looked up by token), else [R, H].
        fc2_weight: [E, H, F].
        fc1_output: [R, 2F] or [R, F]; becomes its own gradient.
        permuted_probs: [R] fp32.
    Returns:
        grad_fc1_output, act [R, F], grad_permuted_probs [R] fp32.
    """
    F = fc2_weight.shape[2]
    act = fc1_output.new_empty(lists.max_rows, F)
    if lists.num_tiles and hopper.fits_fc2_dgrad(grad_output, F):
        grad_permuted_probs = hopper.fc2_dgrad(
            grad_output, fc2_weight, fc1_output, permuted_probs, lists, activation, act, gather
        )
        return fc1_output, act, grad_permuted_probs
    grad_act = rows_gemm(grad_output, fc2_weight, lists, act, 0, gather, transposed=False)
    return activation_backward(grad_act, fc1_output, permuted_probs, lists, activation)


@direct
@triton.jit
def _gather_kernel(
    x_ptr,  # [T, H]
    out_ptr,  # [R, cols]
    expert_token_indices_ptr,  # [R]
    expert_token_offsets_ptr,  # [E+1]
    h_start,
    cols,
    E,
    H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Rows by token. x = [10, 20, 30], expert_token_indices = [2, 0, 2] -> [30, 10, 30]"""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_use = r < tl.load(expert_token_offsets_ptr + E)
    token = tl.load(expert_token_indices_ptr + r, mask=in_use, other=0).to(tl.int64)
    inside = in_use[:, None] & (h < cols)[None, :]
    x = tl.load(x_ptr + token[:, None] * H + h_start + h[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + r.to(tl.int64)[:, None] * cols + h[None, :], x, mask=inside)


def gather(x: torch.Tensor, lists: IndexLists, out: torch.Tensor, h_start: int) -> torch.Tensor:
    """out[r] = x[expert_token_indices[r], h_start : h_start + cols] for the rows in use."""
    rows, cols = out.shape
    BLOCK_R, BLOCK_H = 16, min(256, triton.next_power_of_2(cols))
    _gather_kernel[(cdiv(rows, BLOCK_R), cdiv(cols, BLOCK_H))](
        x,
        out,
        lists.expert_token_indices,
        lists.expert_token_offsets,
        h_start,
        cols,
        lists.num_experts,
        x.shape[1],
        BLOCK_R,
        BLOCK_H,
    )
    return out


@triton.jit
def _wgrad_operand(
    ptr, desc, token_ptr, r0, in_expert, c0, WIDTH: tl.constexpr, GATHER: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows from r0 on, BLOCK_C columns from c0 on; in the TAIL, zeros past the expert.

    The tail holds rows of the next expert, or rows never written, which may be NaN.
    """
    if GATHER:
        rows = r0 + tl.arange(0, BLOCK_R)
        c = c0 + tl.arange(0, BLOCK_C)
        if TAIL:
            token = tl.load(token_ptr + rows, mask=in_expert, other=0).to(tl.int64)
            inside = in_expert[:, None] & (c < WIDTH)[None, :]
            tile = tl.load(ptr + token[:, None] * WIDTH + c[None, :], mask=inside, other=0.0)
        else:
            token = tl.load(token_ptr + rows).to(tl.int64)
            ptrs = ptr + token[:, None] * WIDTH + c[None, :]
            if WIDTH % BLOCK_C == 0:
                tile = tl.load(ptrs)
            else:
                tile = tl.load(ptrs, mask=(c < WIDTH)[None, :], other=0.0)
    else:
        tile = desc.load([r0, c0])
        if TAIL:
            tile = tl.where(in_expert[:, None], tile, 0.0).to(tile.dtype)
    return tile


@triton.jit
def _add_tile(out_ptr, value, m, n, M, N, stride_m):
    """out += value, summed in fp32."""
    ptrs = out_ptr + m.to(tl.int64)[:, None] * stride_m + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    value += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(ptrs, value.to(out_ptr.dtype.element_ty), mask=inside)


@direct
@triton.jit
def _wgrad_kernel(
    a_ptr,  # [T, M] when GATHER_A, else unused
    a_desc,  # [R, M] unless GATHER_A
    b_ptr,  # [T, N] when GATHER_B, else unused
    b_desc,  # [R, N] unless GATHER_B
    out_ptr,  # [E, M, N] by the strides below
    expert_token_indices_ptr,  # [R]
    expert_token_offsets_ptr,  # [E+1]
    out_stride_e,
    out_stride_m,
    M: tl.constexpr,
    N: tl.constexpr,
    GATHER_A: tl.constexpr,
    GATHER_B: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[e] = a^T b by expert. a = [1, 2, 3], b = [4, 5, 6], offsets = [0, 2, 3] -> [14, 18]"""
    expert = tl.program_id(1)
    tile_m, tile_n = _tile_of_program(tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    start = tl.load(expert_token_offsets_ptr + expert)
    end = tl.load(expert_token_offsets_ptr + expert + 1)
    if ACCUMULATE:
        if start == end:
            return
    m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    index = expert_token_indices_ptr
    whole = start + (end - start) // BLOCK_R * BLOCK_R
    for r0 in range(start, whole, BLOCK_R):
        a = _wgrad_operand(a_ptr, a_desc, index, r0, None, m0, M, GATHER_A, False, BLOCK_R, BLOCK_M)
        b = _wgrad_operand(b_ptr, b_desc, index, r0, None, n0, N, GATHER_B, False, BLOCK_R, BLOCK_N)
        acc = _dot(a.T, b, acc, PRECISION)
    if whole < end:
        own = whole + tl.arange(0, BLOCK_R) < end
        a = _wgrad_operand(
            a_ptr, a_desc, index, whole, own, m0, M, GATHER_A, True, BLOCK_R, BLOCK_M
        )
        b = _wgrad_operand(
            b_ptr, b_desc, index, whole, own, n0, N, GATHER_B, True, BLOCK_R, BLOCK_N
        )
        acc = _dot(a.T, b, acc, PRECISION)
    m = m0 + tl.arange(0, BLOCK_M)
    expert_ptr = out_ptr + expert.to(tl.int64) * out_stride_e
    if ACCUMULATE:  # in halves: addresses and what is there take registers too
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        n = n0 + tl.arange(0, HALF)
        _add_tile(expert_ptr, left, m, n, M, N, out_stride_m)
        _add_tile(expert_ptr, right, m, n + HALF, M, N, out_stride_m)
    else:
        n = n0 + tl.arange(0, BLOCK_N)
        ptrs = expert_ptr + m.to(tl.int64)[:, None] * out_stride_m + n[None, :]
        inside = (m < M)[:, None] & (n < N)[None, :]
        tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


def wgrad(
    a: torch.Tensor,
    b: torch.Tensor,
    lists: IndexLists,
    out: torch.Tensor,
    accumulate: bool,
    gather: str | None = None,
) -> torch.Tensor:
    """Weight gradient of every expert, summed over its rows in fp32.

    Args:
        a: [R, M]; b: [R, N]. The one that `gather` names ("a" or "b") is [T, M] or [T, N] instead,
            and its rows are looked up by token inside the kernel.
        out: [E, M, N], contiguous in N. An expert without rows gets zeros; with `accumulate` the
            gradient is added and that expert's part is left as it is.
    """
    E, M, N = out.shape
    if hopper.fits_wgrad(a, out):
        hopper.wgrad(a, b, lists, out, accumulate, gather)
        return out
    kernel = "wgrad_gather" if gather else "wgrad"
    tile = configuration(kernel, a, M, N).fit(rows=M, cols=N)
    blocks = {"a": (tile.depth, tile.rows), "b": (tile.depth, tile.cols)}
    a_desc, b_desc = (
        None if gather == name else descriptor(operand, blocks[name])
        for name, operand in (("a", a), ("b", b))
    )
    _wgrad_kernel[(cdiv(M, tile.rows) * cdiv(N, tile.cols), E)](
        a,
        a_desc,
        b,
        b_desc,
        out,
        lists.expert_token_indices,
        lists.expert_token_offsets,
        out.stride(0),
        out.stride(1),
        M,
        N,
        gather == "a",
        gather == "b",
        accumulate,
        input_precision(),
        tile.rows,
        tile.cols,
        tile.depth,
        tile.group,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
