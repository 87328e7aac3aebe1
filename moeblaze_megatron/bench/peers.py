"""What is measured beside ours: the ceiling of dense GEMMs, and the permuting layer.

Every system is a callable (inputs) -> output; autograd gives its backward.
"""

from collections.abc import Callable

import torch
import triton

from moeblaze_megatron import index_lists_from_topk, moeblaze_experts
from moeblaze_megatron.bench.shapes import Inputs, Shape
from moeblaze_megatron.ops import kernels
from moeblaze_megatron.ops.reference import activate


def moeblaze(shape: Shape) -> Callable[[Inputs], torch.Tensor]:
    def layer(inputs: Inputs) -> torch.Tensor:
        return moeblaze_experts(
            inputs.x,
            inputs.fc1_weight,
            inputs.fc2_weight,
            topk_indices=inputs.topk_indices,
            topk_probs=inputs.topk_probs,
            activation=shape.activation,
        )

    return layer


class _Permute(torch.autograd.Function):
    """x [T, H] -> its rows [R, H]; backward sums a token's rows. One pass each way."""

    @staticmethod
    def forward(ctx, x, lists):
        ctx.lists = lists
        return kernels.gather(x, lists, x.new_empty(lists.max_rows, x.shape[1]), 0)

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(ctx.lists.num_tokens, grad.shape[1])
        return kernels.combine(grad.contiguous(), ctx.lists, out, 0), None


class _Unpermute(torch.autograd.Function):
    """Rows [R, H] -> their sum by token [T, H]; backward copies a token's gradient to its rows."""

    @staticmethod
    def forward(ctx, rows, lists):
        ctx.lists = lists
        return kernels.combine(rows, lists, rows.new_empty(lists.num_tokens, rows.shape[1]), 0)

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(ctx.lists.max_rows, grad.shape[1])
        return kernels.gather(grad.contiguous(), ctx.lists, out, 0), None


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm`, which was private before torch 2.10."""
    if hasattr(torch.nn.functional, "grouped_mm"):
        return torch.nn.functional.grouped_mm(a, b, offs=offs)
    return torch._grouped_mm(a, b, offs=offs)


def grouped_mm(shape: Shape) -> Callable[[Inputs], torch.Tensor]:
    """Permute, torch's grouped GEMM, fused activation times probability, unpermute.

    The Megablocks-style layer in its best form on plain torch: the index lists, the permute and
    the unpermute are ours, the activation is one kernel by torch.compile.
    """

    @torch.compile(dynamic=False)
    def weighted(fc1_output, probs):
        return (activate(fc1_output.float(), shape.activation) * probs[:, None]).to(
            fc1_output.dtype
        )

    def layer(inputs: Inputs) -> torch.Tensor:
        lists = index_lists_from_topk(inputs.topk_indices, shape.E)
        offs = lists.expert_token_offsets[1:]
        probs = inputs.topk_probs.new_empty(lists.max_rows).index_put(
            (lists.token_index_map.flatten(),), inputs.topk_probs.flatten()
        )
        permuted = _Permute.apply(inputs.x, lists)
        fc1_output = _grouped_mm(permuted, inputs.fc1_weight.mT, offs)
        act = weighted(fc1_output, probs)
        return _Unpermute.apply(_grouped_mm(act, inputs.fc2_weight.mT, offs), lists)

    return layer


class _Chain(torch.autograd.Function):
    """Two dense GEMMs forward and four backward, on buffers made beforehand; nothing else."""

    @staticmethod
    def forward(ctx, x, rows, wide, act, w1, w2):
        ctx.operands = rows, wide, act, w1, w2
        torch.mm(rows, w1.T, out=wide)
        torch.mm(act, w2.T, out=rows)
        return x

    @staticmethod
    def backward(ctx, grad):
        rows, wide, act, w1, w2 = ctx.operands
        torch.mm(rows, w2, out=act)
        torch.mm(rows.T, act)
        torch.mm(wide.T, rows)
        torch.mm(wide, w1, out=rows)
        return grad, None, None, None, None, None


def dense(shape: Shape) -> Callable[[Inputs], torch.Tensor]:
    """The ceiling: dense GEMMs of the layer's FLOPs, one weight for all rows. Computes no MoE."""
    R, made = shape.T * shape.K, {}

    def layer(inputs: Inputs) -> torch.Tensor:
        if not made:
            for name, width in (("rows", shape.H), ("wide", shape.fc1_width), ("act", shape.F)):
                made[name] = torch.randn(R, width, device="cuda", dtype=inputs.x.dtype)
        return _Chain.apply(
            inputs.x, *made.values(), inputs.fc1_weight[0].detach(), inputs.fc2_weight[0].detach()
        )

    return layer


PEERS: dict[str, Callable[[Shape], Callable[[Inputs], torch.Tensor]]] = {
    "dense": dense,
    "moeblaze": moeblaze,
    "grouped_mm": grouped_mm,
}


def versions() -> str:
    return f"torch {torch.__version__}, triton {triton.__version__}"
