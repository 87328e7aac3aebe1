"""Mixture-of-experts layers without permuted token buffers, for Megatron-Core and plain torch."""

from moeblaze_megatron.ops.activation import ACTIVATIONS, GATED, Activation
from moeblaze_megatron.ops.experts import (
    index_lists_from_routing_map,
    index_lists_from_topk,
    moeblaze_experts,
)
from moeblaze_megatron.ops.index_lists import IndexLists
from moeblaze_megatron.version import __version__

__all__ = [
    "ACTIVATIONS",
    "GATED",
    "Activation",
    "IndexLists",
    "__version__",
    "index_lists_from_routing_map",
    "index_lists_from_topk",
    "moeblaze_experts",
]
