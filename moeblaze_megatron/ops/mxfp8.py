"""fc1_output in half its bytes, between forward and backward: the MXFP8 format.

R routed rows, W columns of fc1_output (2F when gated, else F). A row is cut into blocks of 32
columns. A block has one scale, a power of two held as its exponent (E8M0), and its values divided
by it in e4m3 (OCP Microscaling Formats 1.0). The scale is the least that brings the largest value
of the block to 448, the end of e4m3, or below.
"""

import torch
import triton
import triton.language as tl

from moeblaze_megatron.ops.index_lists import IndexLists
from moeblaze_megatron.ops.launch import direct
from moeblaze_megatron.ops.tiles import cdiv

SIZE = 32  # columns that share a scale
BLOCKS = 64  # blocks of a program

_SIZE = tl.constexpr(SIZE)
# The bits of an fp32 number times 2^-120, shifted by 20, are those of e4m3, subnormals included.
_TO_E4M3 = tl.constexpr(2.0**-120)
_FROM_E4M3 = tl.constexpr(2.0**120)


@triton.jit
def _blocks_of_program(R, W: tl.constexpr, BLOCKS: tl.constexpr):
    """Numbers of its blocks, which of them are in use, offsets of their values, which exist."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = block // tl.cdiv(W, _SIZE)
    column = (block % tl.cdiv(W, _SIZE) * _SIZE)[:, None] + tl.arange(0, _SIZE)[None, :]
    in_use = row < R
    return block, in_use, row.to(tl.int64)[:, None] * W + column, in_use[:, None] & (column < W)


@direct
@triton.jit
def _quantize_kernel(
    x_ptr,  # [R, W]
    values_ptr,  # [R, W] e4m3, as its bits
    scales_ptr,  # [R, cdiv(W, 32)] E8M0, as its bits
    expert_token_offsets_ptr,  # [E+1]
    E,
    W: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """By bits, since sm_80 has no e4m3. x = [900, 3, -0.1] -> scale 4, [224, 0.75, -0.0254]"""
    R = tl.load(expert_token_offsets_ptr + E)
    block, in_use, offset, inside = _blocks_of_program(R, W, BLOCKS)
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32).to(tl.uint32, bitcast=True)
    magnitude = x & 0x7FFFFFFF
    # The bits of a positive number order as it does. NaN and Inf do not count.
    largest = tl.max(tl.where(magnitude < 0x7F800000, magnitude, 0), 1)
    # 448 = 1.75 * 2^8: above 1.75, the mantissa 0x600000, the sum carries into the exponent.
    exponent = tl.maximum((largest + 0x1FFFFF) >> 23, 9) - 8
    tl.store(scales_ptr + block, exponent.to(tl.uint8), mask=in_use)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    value = magnitude.to(tl.float32, bitcast=True) * inverse[:, None] * _TO_E4M3
    bits = value.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20  # to nearest even
    bits = tl.minimum(bits, 0x7F) | ((x >> 24) & 0x80)  # NaN and Inf become NaN, 0x7F
    tl.store(values_ptr + offset, bits.to(tl.uint8), mask=inside)


def quantize(x: torch.Tensor, lists: IndexLists) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows in use in MXFP8: each value is within 1/16 of itself, or, if it is less than 2^-6
    times the scale of its block, within 2^-10 times that scale. NaN and Inf become NaN.

    Args:
        x: [R, W] bf16, fp16 or fp32.
    Returns:
        values [R, W] float8_e4m3fn and scales [R, cdiv(W, 32)] float8_e8m0fnu.
    """
    rows, W = x.shape
    blocks = cdiv(W, SIZE)
    values = x.new_empty(rows, W, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(rows, blocks, dtype=torch.float8_e8m0fnu)
    _quantize_kernel[(cdiv(rows * blocks, BLOCKS),)](
        x,
        values.view(torch.uint8),
        scales.view(torch.uint8),
        lists.expert_token_offsets,
        lists.num_experts,
        W,
        BLOCKS,
    )
    return values, scales


@direct
@triton.jit
def _dequantize_kernel(
    values_ptr,  # [R, W] e4m3, as its bits
    scales_ptr,  # [R, cdiv(W, 32)] E8M0, as its bits
    out_ptr,  # [R, W]
    expert_token_offsets_ptr,  # [E+1]
    E,
    W: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """values = [224, 0.75, -0.0254], scale 4 -> [896, 3, -0.1016]"""
    R = tl.load(expert_token_offsets_ptr + E)
    block, in_use, offset, inside = _blocks_of_program(R, W, BLOCKS)
    exponent = tl.load(scales_ptr + block, mask=in_use, other=127).to(tl.uint32)
    bits = tl.load(values_ptr + offset, mask=inside, other=0).to(tl.uint32)
    magnitude = bits & 0x7F
    value = (((bits & 0x80) << 24) | (magnitude << 20)).to(tl.float32, bitcast=True) * _FROM_E4M3
    value *= (exponent << 23).to(tl.float32, bitcast=True)[:, None]
    value = tl.where(magnitude == 0x7F, float("nan"), tl.clamp(value, -LIMIT, LIMIT))
    tl.store(out_ptr + offset, value.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, lists: IndexLists, dtype: torch.dtype
) -> torch.Tensor:
    """What `quantize` has kept, [R, W] in `dtype`: exact, but for values rounded up to beyond the
    largest of `dtype`, which become the largest.
    """
    rows, W = values.shape
    out = values.new_empty(rows, W, dtype=dtype)
    _dequantize_kernel[(cdiv(scales.numel(), BLOCKS),)](
        values.view(torch.uint8),
        scales.view(torch.uint8),
        out,
        lists.expert_token_offsets,
        lists.num_experts,
        W,
        torch.finfo(dtype).max,
        BLOCKS,
    )
    return out
