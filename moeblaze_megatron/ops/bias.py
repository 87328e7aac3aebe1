"""Backward of the biases: sums over an expert's rows, and the probabilities' part of fc2's bias.

Forward, fc1 adds its bias before the activation, and `combine` adds that of fc2, times the
probability of each row.

T tokens, K experts per token, E experts, H hidden size, R routed rows, W columns.
"""

import torch
import triton
import triton.language as tl

from moeblaze_megatron.ops.index_lists import IndexLists
from moeblaze_megatron.ops.launch import direct
from moeblaze_megatron.ops.tiles import cdiv


@direct
@triton.jit
def _bias_grad_kernel(
    grad_ptr,  # [R, W], or [T, W] with probabilities
    permuted_probs_ptr,  # [R], or None
    out_ptr,  # [E, W]
    expert_token_indices_ptr,  # [R]
    expert_token_offsets_ptr,  # [E+1]
    W,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Sum by expert. grad = [1, 2, 3], offsets = [0, 2, 3] -> [3, 3]; with probs 2 -> [6, 6]"""
    expert = tl.program_id(0)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    start = tl.load(expert_token_offsets_ptr + expert)
    end = tl.load(expert_token_offsets_ptr + expert + 1)
    acc = tl.zeros((BLOCK_R, BLOCK_W), tl.float32)
    for r0 in range(start, end, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        row = r
        if permuted_probs_ptr is not None:
            row = tl.load(expert_token_indices_ptr + r, mask=r < end, other=0)
        inside = (r < end)[:, None] & (w < W)[None, :]
        ptrs = grad_ptr + row.to(tl.int64)[:, None] * W + w[None, :]
        grad = tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
        if permuted_probs_ptr is not None:
            grad *= tl.load(permuted_probs_ptr + r, mask=r < end, other=0.0)[:, None]
        acc += grad
    out_ptrs = out_ptr + expert.to(tl.int64) * W + w
    tl.store(out_ptrs, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=w < W)


def bias_grad(
    grad: torch.Tensor,
    lists: IndexLists,
    bias: torch.Tensor,
    permuted_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of a bias, summed in fp32 in the order of the rows.

    Args:
        grad: [R, W] of the rows or, with probabilities, [T, W] of the tokens they belong to.
        bias: [E, W], for shape and dtype of the result.
        permuted_probs: [R] fp32, what weighs the rows.
    Returns:
        [E, W], zero for an expert without rows.
    """
    E, W = bias.shape
    out = torch.empty_like(bias)
    BLOCK_R, BLOCK_W = 32, min(128, triton.next_power_of_2(W))
    _bias_grad_kernel[(E, cdiv(W, BLOCK_W))](
        grad,
        permuted_probs,
        out,
        lists.expert_token_indices,
        lists.expert_token_offsets,
        W,
        BLOCK_R,
        BLOCK_W,
    )
    return out


@direct
@triton.jit(do_not_specialize=["pairs"])
def _bias_grad_probs_kernel(
    grad_output_ptr,  # [T, H]
    bias_ptr,  # [E, H]
    token_expert_indices_ptr,  # [T, K]
    token_index_map_ptr,  # [T, K], -1 = none
    grad_permuted_probs_ptr,  # [R], added to
    pairs,  # T*K
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Row dots. grad_output = [2], bias = [[5], [7]], experts = [[0, 1]], map = [[1, 0]]
    -> [14, 10]"""
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    row = tl.load(token_index_map_ptr + pair, mask=pair < pairs, other=-1)
    expert = tl.load(token_expert_indices_ptr + pair, mask=row >= 0, other=0).to(tl.int64)
    token = (pair // K).to(tl.int64)
    acc = tl.zeros((BLOCK_P, BLOCK_H), tl.float32)
    for h0 in range(0, H, BLOCK_H):
        h = h0 + tl.arange(0, BLOCK_H)
        inside = (row >= 0)[:, None] & (h < H)[None, :]
        grad_ptrs = grad_output_ptr + token[:, None] * H + h[None, :]
        bias_ptrs = bias_ptr + expert[:, None] * H + h[None, :]
        grad = tl.load(grad_ptrs, mask=inside, other=0.0).to(tl.float32)
        acc += grad * tl.load(bias_ptrs, mask=inside, other=0.0).to(tl.float32)
    ptrs = grad_permuted_probs_ptr + row
    grad_prob = tl.load(ptrs, mask=row >= 0, other=0.0) + tl.sum(acc, 1)
    tl.store(ptrs, grad_prob, mask=row >= 0)


def bias_grad_probs(
    grad_output: torch.Tensor,
    lists: IndexLists,
    bias: torch.Tensor,
    grad_permuted_probs: torch.Tensor,
) -> torch.Tensor:
    """grad_permuted_probs[r] += grad_output[token of r] . bias[expert of r], in place.

    Args:
        grad_output: [T, H].
        bias: [E, H].
        grad_permuted_probs: [R] fp32.
    """
    H, pairs = bias.shape[1], lists.token_index_map.numel()
    BLOCK_P, BLOCK_H = 8, min(256, triton.next_power_of_2(H))
    if pairs:
        _bias_grad_probs_kernel[(cdiv(pairs, BLOCK_P),)](
            grad_output,
            bias,
            lists.token_expert_indices,
            lists.token_index_map,
            grad_permuted_probs,
            pairs,
            H,
            lists.topk,
            BLOCK_P,
            BLOCK_H,
        )
    return grad_permuted_probs
