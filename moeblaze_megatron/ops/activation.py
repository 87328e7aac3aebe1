"""Activations of the experts, forward and backward, times the router's probability.

R routed rows, F ffn hidden size; fc1_output is [R, 2F] (gate half first) when gated, else [R, F].
"""

import torch
import triton
import triton.language as tl

from moeblaze_megatron.ops.index_lists import IndexLists
from moeblaze_megatron.ops.launch import direct
from moeblaze_megatron.ops.tiles import cdiv

GATED = ("swiglu", "geglu", "quick_geglu")
ACTIVATIONS = (*GATED, "silu", "gelu", "squared_relu")


class Activation(str):
    """What an expert computes between its linears, for the operator and, whole, for the kernels.

    f(min(gate, clamp)) * (min(max(up, -clamp), clamp) + offset) when gated, else f(fc1_output).
    gpt-oss is `Activation("quick_geglu", clamp=7.0, offset=1.0)`. A string that says all of it, as
    a constant of kernels has to be: Triton 3.8 makes a plain tuple of a NamedTuple on its way into
    `warp_specialize`, and Triton's hooks on compilation write constants as JSON.

    Attributes:
        name: one of `ACTIVATIONS`.
        clamp: None for none; for the `GATED` only.
        offset: what is added to the half without f; for the `GATED` only.
    """

    def __new__(cls, name: str, clamp: float | None = None, offset: float = 0.0) -> "Activation":
        clamped = "" if clamp is None else f", clamp {clamp}"
        self = super().__new__(cls, f"{name}{clamped}" + (f", offset {offset}" if offset else ""))
        self.name, self.clamp, self.offset = name, clamp, offset
        return self

    @classmethod
    def of(cls, activation: "str | Activation") -> "Activation":
        """The activation of a name alone, or the one given."""
        return activation if isinstance(activation, cls) else cls(activation)

    @property
    def gated(self) -> bool:
        return self.name in GATED


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """f(gate) * up when gated, else f(gate). swiglu: gate = 0, up = 3 -> 0"""
    y, _ = value_and_slope(clamped_gate(gate, ACTIVATION), ACTIVATION)
    if ACTIVATION.gated:
        y = y * up_factor(up, ACTIVATION)
    return y


@triton.jit
def clamped_gate(gate, ACTIVATION: tl.constexpr):
    """The gate, at most the clamp; NaN stays NaN. clamp 7: 9 -> 7, -9 -> -9"""
    if ACTIVATION.clamp is not None:
        gate = tl.where(gate > ACTIVATION.clamp, ACTIVATION.clamp, gate)
    return gate


@triton.jit
def up_factor(up, ACTIVATION: tl.constexpr):
    """What multiplies f(gate). clamp 7, offset 1: 9 -> 8, -9 -> -6"""
    if ACTIVATION.clamp is not None:
        up = tl.where(up > ACTIVATION.clamp, ACTIVATION.clamp, up)
        up = tl.where(up < -ACTIVATION.clamp, -ACTIVATION.clamp, up)
    if ACTIVATION.offset != 0.0:
        up = up + ACTIVATION.offset
    return up


@triton.jit
def value_and_slope(v, ACTIVATION: tl.constexpr):
    """f(v) and f'(v). squared_relu: v = 3 -> 9, 6"""
    NAME: tl.constexpr = ACTIVATION.name
    if NAME == "swiglu" or NAME == "silu":
        s = tl.sigmoid(v)
        return v * s, s * (1.0 + v * (1.0 - s))
    elif NAME == "quick_geglu":
        s = tl.sigmoid(1.702 * v)
        return v * s, s * (1.0 + 1.702 * v * (1.0 - s))
    elif NAME == "geglu" or NAME == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(v * 0.7071067811865476))
        return v * cdf, cdf + v * 0.3989422804014327 * tl.exp(-0.5 * v * v)
    else:
        tl.static_assert(NAME == "squared_relu")
        r = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return r * r, 2.0 * r


@direct
@triton.jit
def _activation_backward_kernel(
    grad_act_ptr,  # [R, F] in; act out
    fc1_output_ptr,  # [R, 2F] or [R, F] in; grad_fc1_output out
    permuted_probs_ptr,  # [R]
    grad_permuted_probs_ptr,  # [R]
    expert_token_offsets_ptr,  # [E+1]
    E,
    F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """act again, and the gradients.

    squared_relu, fc1_output = 3, prob = 0.5, grad_act = 2 -> act 4.5, grad 6, grad_prob 18
    """
    GATED: tl.constexpr = ACTIVATION.gated
    WIDTH: tl.constexpr = 2 * F if GATED else F
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    R = tl.load(expert_token_offsets_ptr + E)
    row = r.to(tl.int64)[:, None]
    prob = tl.load(permuted_probs_ptr + r, mask=r < R, other=0.0)[:, None]
    acc = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    for f0 in range(0, F, BLOCK_F):
        f = f0 + tl.arange(0, BLOCK_F)[None, :]
        inside = (r < R)[:, None] & (f < F)
        act_ptr = grad_act_ptr + row * F + f
        gate_ptr = fc1_output_ptr + row * WIDTH + f
        grad_act = tl.load(act_ptr, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
        value, slope = value_and_slope(clamped_gate(gate, ACTIVATION), ACTIVATION)
        grad = grad_act * prob
        if GATED:
            up = tl.load(gate_ptr + F, mask=inside, other=0.0).to(tl.float32)
            grad_up = grad * value
            if ACTIVATION.clamp is not None:
                grad_up = tl.where(tl.abs(up) > ACTIVATION.clamp, 0.0, grad_up)
                slope = tl.where(gate > ACTIVATION.clamp, 0.0, slope)
            tl.store(gate_ptr + F, grad_up.to(fc1_output_ptr.dtype.element_ty), mask=inside)
            factor = up_factor(up, ACTIVATION)
            value *= factor
            grad *= factor
        tl.store(gate_ptr, (grad * slope).to(fc1_output_ptr.dtype.element_ty), mask=inside)
        tl.store(act_ptr, (value * prob).to(grad_act_ptr.dtype.element_ty), mask=inside)
        acc += grad_act * value  # tl.sum of a product would round it in some threads only
    tl.store(grad_permuted_probs_ptr + r, tl.sum(acc, 1), mask=r < R)


def activation_backward(
    grad_act: torch.Tensor,
    fc1_output: torch.Tensor,
    permuted_probs: torch.Tensor,
    lists: IndexLists,
    activation: Activation,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward of act = prob * f(fc1_output), in place.

    Args:
        grad_act: [R, F]; becomes act, which the weight gradient of fc2 needs.
        fc1_output: [R, 2F] or [R, F]; becomes its own gradient.
        permuted_probs: [R] fp32.
    Returns:
        grad_fc1_output, act, grad_permuted_probs [R] fp32.
    """
    rows, F = grad_act.shape
    grad_permuted_probs = torch.empty_like(permuted_probs)
    BLOCK_R, BLOCK_F = 4, min(512, triton.next_power_of_2(F))
    _activation_backward_kernel[(cdiv(rows, BLOCK_R),)](
        grad_act,
        fc1_output,
        permuted_probs,
        grad_permuted_probs,
        lists.expert_token_offsets,
        lists.num_experts,
        F,
        activation,
        BLOCK_R,
        BLOCK_F,
    )
    return fc1_output, grad_act, grad_permuted_probs
