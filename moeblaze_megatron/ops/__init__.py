"""Index lists and fused MoE kernels on torch and Triton alone."""
