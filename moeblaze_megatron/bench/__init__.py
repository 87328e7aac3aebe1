"""Benchmark of the MoE layer beside its peers: `python -m moeblaze_megatron.bench`."""
