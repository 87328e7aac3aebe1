"""The Triton launchers under one name; `reference` holds their eager twins under the same names."""

from moeblaze_megatron.ops.activation import activation_backward
from moeblaze_megatron.ops.bias import bias_grad, bias_grad_probs
from moeblaze_megatron.ops.combine import combine
from moeblaze_megatron.ops.gemm import fc1, fc2_dgrad, gather, rows_gemm, wgrad
from moeblaze_megatron.ops.index_lists import (
    grad_probs,
    index_lists,
    permuted_probs,
    topk_indices_from_routing_map,
)
from moeblaze_megatron.ops.mxfp8 import dequantize, quantize
from moeblaze_megatron.ops.ranks import (
    pack_routing,
    ranks_from_routing_map,
    split_sizes,
    unpack_grad_probs,
)

__all__ = [
    "activation_backward",
    "bias_grad",
    "bias_grad_probs",
    "combine",
    "dequantize",
    "fc1",
    "fc2_dgrad",
    "gather",
    "grad_probs",
    "index_lists",
    "pack_routing",
    "permuted_probs",
    "quantize",
    "ranks_from_routing_map",
    "rows_gemm",
    "split_sizes",
    "topk_indices_from_routing_map",
    "unpack_grad_probs",
    "wgrad",
]
