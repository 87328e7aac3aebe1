"""Megatron's token dispatcher, without permuting: the tokens stay, index lists are made.

S/TP sequence positions on this rank, B batch, T = S/TP*B tokens, E experts, K = moe_router_topk,
H hidden size (or latent size).
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from moeblaze_megatron import IndexLists, index_lists_from_routing_map


class MoEBlazeTokenDispatcher(MoETokenDispatcher):
    """Hands the tokens, their index lists and the router's probs to `MoEBlazeExperts`.

    Between `dispatch_preprocess` and `dispatch_postprocess` of one forward pass, `routing_map`
    waits on the dispatcher. Nothing here is read in a backward pass: with pipeline stages and
    recompute the layer runs forward again before this pass's backward.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self.topk = config.moe_router_topk
        self.hidden_shape: torch.Size | None = None
        self.routing_map: torch.Tensor | None = None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states [S/TP, B, H], routing_map [T, E] bool, probs [T, E] -> x [T, H], probs."""
        self.hidden_shape = hidden_states.shape
        self.routing_map = routing_map
        return hidden_states.reshape(-1, self.hidden_shape[-1]), probs

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing to send: every expert is on this rank."""
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, IndexLists, torch.Tensor]:
        """x [T, H], probs [T, E] -> the same, with the index lists between them.

        Raises:
            ValueError: a token has more than K experts; on a GPU only where the config has
                `moeblaze_check_routing`, since looking waits for the device.
        """
        check = getattr(self.config, "moeblaze_check_routing", False)
        index_lists = index_lists_from_routing_map(self.routing_map, self.topk, check=check)
        self.routing_map = None
        return hidden_states, index_lists, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The experts return [T, H], combined already."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Nothing to send back."""
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """output [T, H] -> [S/TP, B, H]."""
        return hidden_states.view(self.hidden_shape)
