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
    "permuted_probs",
    "quantize",
    "rows_gemm",
    "topk_indices_from_routing_map",
    "wgrad",
]
