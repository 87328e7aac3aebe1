"""Combine: the sum of each token's rows, looked up by index. No atomics, so results repeat.

T tokens, K experts per token, R routed rows, H hidden size.
"""

import torch
import triton
import triton.language as tl

from moeblaze_megatron.ops.index_lists import IndexLists
from moeblaze_megatron.ops.launch import direct
from moeblaze_megatron.ops.tiles import cdiv


@direct
@triton.jit(do_not_specialize=["T"])
def _combine_kernel(
    rows_ptr,  # [R, cols]
    token_index_map_ptr,  # [T, K], -1 = none
    out_ptr,  # [T, H], columns h_start .. h_start + cols are written
    bias_ptr,  # [E, H], or None
    permuted_probs_ptr,  # [R], with a bias
    token_expert_indices_ptr,  # [T, K], with a bias
    T,
    h_start,
    cols,
    H,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum of each token's rows, and of its experts' biases times their probabilities.

    rows = [[10], [20], [30], [40]], token_index_map = [[1, 3], [0, -1]] -> [[60], [10]]
    and with experts = [[0, 1], [0, -1]], probs = 0.5, bias = [[2], [4]] -> [[63], [11]]
    """
    num_cols = tl.cdiv(cols, BLOCK_H)  # blocks of a token's columns follow one another
    t = tl.program_id(0) // num_cols * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.program_id(0) % num_cols * BLOCK_H + tl.arange(0, BLOCK_H)
    token = t.to(tl.int64)
    acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(token_index_map_ptr + token * K + k, mask=t < T, other=-1).to(tl.int64)
        inside = (row >= 0)[:, None] & (h < cols)[None, :]
        value = tl.load(rows_ptr + row[:, None] * cols + h[None, :], mask=inside, other=0.0)
        acc += value.to(tl.float32)
        if bias_ptr is not None:
            expert = tl.load(token_expert_indices_ptr + token * K + k, mask=row >= 0, other=0)
            prob = tl.load(permuted_probs_ptr + row, mask=row >= 0, other=0.0)
            bias_ptrs = bias_ptr + expert.to(tl.int64)[:, None] * H + h_start + h[None, :]
            acc += prob[:, None] * tl.load(bias_ptrs, mask=inside, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + token[:, None] * H + h_start + h[None, :]
    inside = (t < T)[:, None] & (h < cols)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


def combine(
    rows: torch.Tensor,
    lists: IndexLists,
    out: torch.Tensor,
    h_start: int,
    bias: torch.Tensor | None = None,
    permuted_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t, h_start : h_start + cols] = sum over k of row token_index_map[t, k], in fp32.

    Args:
        rows: [R, cols].
        out: [T, H].
        bias: [E, H]; of each expert of a token, times its probability, added to the sum.
        permuted_probs: [R] fp32, with a bias.
    """
    T, H = out.shape
    cols = rows.shape[1]
    BLOCK_T, BLOCK_H = 4, min(256, triton.next_power_of_2(cols))
    if T:
        _combine_kernel[(cdiv(T, BLOCK_T) * cdiv(cols, BLOCK_H),)](
            rows,
            lists.token_index_map,
            out,
            bias,
            permuted_probs,
            lists.token_expert_indices,
            T,
            h_start,
            cols,
            H,
            lists.topk,
            BLOCK_T,
            BLOCK_H,
        )
    return out
