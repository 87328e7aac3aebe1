"""Experts spread over ranks: each token goes once to every rank that holds any of its experts.

Needs torch.distributed and `moeblaze_megatron.ops`, and knows no Megatron.
"""

from moeblaze_megatron.expert_parallel.dispatch import (
    PendingDispatch,
    Route,
    RowCounter,
    combine,
    dispatch,
    start_dispatch,
)
from moeblaze_megatron.expert_parallel.exchange import ExpertGroups

__all__ = [
    "ExpertGroups",
    "PendingDispatch",
    "Route",
    "RowCounter",
    "combine",
    "dispatch",
    "start_dispatch",
]
