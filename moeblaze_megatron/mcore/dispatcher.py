"""Megatron's token dispatcher, without permuting: index lists are made where the tokens are.

Where all experts are whole on this rank the tokens stay. Otherwise each goes once to every rank
that holds any of its experts (`moeblaze_megatron.expert_parallel`).

S/TP sequence positions on this rank, B batch, T = S/TP*B tokens, T' tokens received, E experts on
this rank, EP expert-parallel ranks, K = moe_router_topk, H hidden size (or latent size).
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from moeblaze_megatron import IndexLists, index_lists_from_routing_map
from moeblaze_megatron.expert_parallel import (
    ExpertGroups,
    PendingDispatch,
    Route,
    RowCounter,
    combine,
    dispatch,
    start_dispatch,
)


class MoEBlazeTokenDispatcher(MoETokenDispatcher):
    """Hands the tokens, their index lists and the router's probs to `MoEBlazeExperts`.

    Between the steps of one forward pass, its routing waits on the dispatcher. Nothing here is
    read in a backward pass: with pipeline stages and recompute the layer runs forward again before
    this pass's backward.

    Padding to capacity is honoured by leaving it out: Megatron's router pads an expert with tokens
    that did not choose it, whose probability is 0. Shared experts that Megatron sets
    (--moe-shared-expert-overlap) run on their own stream beside the exchanges; the order of their
    calls is SharedExpertMLP's.

    Attributes:
        counter: rows that this layer sent, if experts are spread over ranks.
        total: rows that all layers of this process sent.
    """

    total = RowCounter()

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
        self.groups = None
        if self.ep_size * self.tp_size > 1:
            self.groups = ExpertGroups(ep=self.ep_group, tp=self.tp_group)
        self.counter = RowCounter()
        self.hidden_shape: torch.Size | None = None
        self.routing_map: torch.Tensor | None = None
        self.pending: PendingDispatch | None = None
        self.index_lists: IndexLists | None = None
        self.route: Route | None = None

    @property
    def check_routing(self) -> bool:
        return bool(getattr(self.config, "moeblaze_check_routing", False))

    def shared_experts_wait(self) -> None:
        """Lets the stream of the shared experts wait for the current one.

        Their own method for it came with 0.18.
        """
        self.shared_experts.stream.wait_stream(torch.cuda.current_stream())

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states [S/TP, B, H], routing_map and probs [T, EP*E] -> x [T, H], probs.

        The exchange of split sizes starts here.

        Raises:
            ValueError: a token has more than K experts; on a GPU only where the config has
                `moeblaze_check_routing`, since looking waits for the device.
        """
        self.hidden_shape = hidden_states.shape
        x = hidden_states.reshape(-1, self.hidden_shape[-1])
        if self.config.moe_pad_expert_input_to_capacity:
            routing_map = routing_map & (probs != 0)
        if self.groups is None:
            self.routing_map = routing_map
        else:
            self.pending = start_dispatch(
                x,
                probs,
                routing_map,
                self.topk,
                self.groups,
                counters=(self.counter, self.total),
                check=self.check_routing,
            )
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        return x, probs

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H], probs [T, EP*E] -> the rows received [T', H], probs [T', min(K, E)].

        With every expert whole on this rank there is nothing to send.
        """
        if self.shared_experts is not None:
            self.shared_experts_wait()
        x = hidden_states
        if self.groups is not None:
            x, probs, self.index_lists, self.route = dispatch(x, probs, self.pending)
            self.pending = None
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(x)
        return x, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, IndexLists, torch.Tensor]:
        """What `token_dispatch` returned, with the index lists between them.

        Raises:
            ValueError: as `dispatch_preprocess`.
        """
        index_lists, self.index_lists = self.index_lists, None
        if self.groups is None:
            index_lists = index_lists_from_routing_map(
                self.routing_map, self.topk, check=self.check_routing
            )
            self.routing_map = None
        return hidden_states, index_lists, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The experts return one row for each they were given, summed over experts already."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Partial sums [T', H] -> output [T, H]; with nothing sent, nothing comes back."""
        if self.shared_experts is not None:
            self.shared_experts_wait()
        output = hidden_states
        if self.groups is not None:
            route, self.route = self.route, None
            output = combine(hidden_states, route)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(output)
            self.shared_experts.post_forward_comm()
        return output

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """output [T, H] -> [S/TP, B, H], with the output of overlapped shared experts added."""
        output = hidden_states.view(self.hidden_shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output
