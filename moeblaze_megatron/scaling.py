"""Bytes that expert parallelism moves, by rank and by expert, on paper.

    python -m moeblaze_megatron.scaling

K experts per token, EP expert-parallel ranks, H hidden size.
"""

from math import comb


def ranks_per_token(ep: int, topk: int, num_experts: int | None = None) -> float:
    """D, the ranks that hold any of a token's K experts, on average over random routing.

    EP (1 - (1 - 1/EP)^K) for independent choices or, given the number of experts, exactly for K
    different ones; the two agree as experts per rank grow.
    """
    if num_experts is None:
        return ep * (1 - (1 - 1 / ep) ** topk)
    local = num_experts // ep
    return ep * (1 - comb(num_experts - local, topk) / comb(num_experts, topk))
