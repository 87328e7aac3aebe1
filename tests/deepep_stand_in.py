"""The benchmark with Megatron's flex dispatcher over a stand-in for DeepEP, on any backend.

    torchrun --nproc-per-node 2 tests/deepep_stand_in.py expert_parallel SHAPE

In place of Megatron's `fused_dispatch` and `fused_combine`, which are DeepEP's: every rank gets the
rows of all, keeps those with experts of its own, and results are summed over all ranks.
"""

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher
from torch.distributed.nn.functional import all_reduce

from moeblaze_megatron.bench.__main__ import main


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[T, ...] of each rank -> [ranks * T, ...], differentiable."""
    parts = [torch.zeros_like(tensor) for _ in range(group.size())]
    parts[group.rank()] = tensor
    return all_reduce(torch.cat(parts), group=group)


def fused_dispatch(
    x, token_indices, token_probs, num_experts, group, async_finish, allocate_on_comm_stream
):
    """x [T, H], ids and probs [T, K] -> the same of the rows here, rows of each expert, handle."""
    number = num_experts // group.size()
    local = gathered(token_indices, group) - group.rank() * number
    here = (local >= 0) & (local < number)
    kept = here.any(1).nonzero().squeeze(1)
    ids = torch.where(here, local, -1)[kept]
    probs = (gathered(token_probs, group) * here)[kept]
    counts = torch.bincount(ids[ids >= 0], minlength=number)
    return gathered(x, group)[kept], ids, probs, counts, (kept, x.shape[0])


def fused_combine(x, group, handle, async_finish, allocate_on_comm_stream):
    kept, T = handle
    rows = x.new_zeros(group.size() * T, x.shape[1]).index_add(0, kept, x)
    mine = slice(group.rank() * T, (group.rank() + 1) * T)
    return all_reduce(rows, group=group)[mine], None


if __name__ == "__main__":
    token_dispatcher.fused_dispatch = fused_dispatch
    token_dispatcher.fused_combine = fused_combine
    token_dispatcher.set_deepep_num_sms = lambda number: None
    main()
