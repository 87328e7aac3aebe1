"""Dispatch by rank, and combine: autograd functions around one local layer of experts.

A token is sent once to each rank that holds any of its experts, with its local experts and probs;
the rank returns one row, the sum over those experts, and the rows of a token are summed at home.

T tokens, K experts per token, E experts on this rank, EP ranks that share the experts, ETP ranks
that share each expert's weights, H hidden size, k = min(K, E) local experts of a row.
"""

from dataclasses import dataclass, replace

import torch
from torch.autograd.function import once_differentiable

from moeblaze_megatron.expert_parallel.exchange import (
    ExpertGroups,
    SplitExchange,
    Splits,
    all_gather,
    all_to_all,
    check_arrival,
    check_equal_tokens,
    reduce_scatter,
)
from moeblaze_megatron.ops.experts import (
    check_experts_per_token,
    index_lists_from_topk,
    kernels_for,
)
from moeblaze_megatron.ops.index_lists import MAX_EXPERTS, IndexLists

ID = torch.int16  # an expert id on the wire; ops.index_lists.MAX_EXPERTS fits
NOTHING = 255  # in every byte of an id on the wire: -1


@dataclass
class RowCounter:
    """What dispatches sent; counted on the host from numbers that are there already.

    Attributes:
        dispatches: forward passes counted; a pass that is recomputed sends, and counts, twice.
        tokens: T, summed.
        rows: rows sent, the sender's own included, as in T*D with D = EP (1 - (1 - 1/EP)^K).
        rows_away: those of them that left for another rank.
        pairs: (token, expert) pairs: the rows that a dispatch by expert would have sent, T*K.
    """

    dispatches: int = 0
    tokens: int = 0
    rows: int = 0
    rows_away: int = 0
    pairs: int = 0

    def add(self, tokens: int, splits: Splits, rank: int) -> None:
        self.dispatches += 1
        self.tokens += tokens
        self.rows += sum(splits.send)
        self.rows_away += sum(splits.send) - splits.send[rank]
        self.pairs += splits.sent_pairs

    def __str__(self) -> str:
        saved = 1 - self.rows / self.pairs if self.pairs else 0.0
        return (
            f"{self.tokens} tokens sent as {self.rows} rows in {self.dispatches} dispatches, "
            f"{self.rows_away} of them to other ranks; by expert: {self.pairs} ({saved:.0%} saved)"
        )


@dataclass(frozen=True)
class Route:
    """Where the rows of one forward pass go; its backward passes and `combine` read it.

    Attributes:
        groups: the process groups.
        tokens: T.
        num_experts: E.
        rank_lists: index lists with ranks in the place of experts; None with one rank.
        splits: the sizes, once `dispatch` knows them.
    """

    groups: ExpertGroups
    tokens: int
    num_experts: int
    rank_lists: IndexLists | None
    splits: Splits | None = None


@dataclass(frozen=True)
class PendingDispatch:
    """A dispatch that is known on the device but not, yet, on the host.

    Attributes:
        route: where its rows go.
        routing_map: [T, EP*E] bool.
        topk: K.
        exchange: the exchange of split sizes under way; None with one expert-parallel rank.
        counters: where rows are counted.
        check: whether to look at what arrives, which waits for the device.
    """

    route: Route
    routing_map: torch.Tensor
    topk: int
    exchange: SplitExchange | None
    counters: tuple[RowCounter, ...]
    check: bool

    def wait(self) -> Splits:
        """The sizes. With one expert-parallel rank, T is equal on the expert-TP ranks.

        Raises:
            ValueError: ranks disagree, or, when checked, T is not equal.
        """
        if self.exchange is not None:
            return self.exchange.wait()
        tokens, ranks = self.route.tokens, self.route.groups.tp_size
        if self.check and ranks > 1:
            check_equal_tokens(tokens, self.routing_map.device, self.route.groups.tp)
        pairs = tokens * min(self.topk, self.route.num_experts)
        return Splits([tokens], [tokens], [pairs], [tokens] * ranks, pairs, pairs * ranks)


@torch.no_grad()
def start_dispatch(
    x: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    topk: int,
    groups: ExpertGroups,
    *,
    counters: tuple[RowCounter, ...] = (),
    check: bool = False,
) -> PendingDispatch:
    """Lists who gets what, and starts telling every rank how much.

    Args:
        x: [T, H]; only its shape and dtype are looked at.
        probs: [T, EP*E], likewise.
        routing_map: [T, EP*E] bool, at most `topk` experts in a row.
        topk: K.
        counters: count rows, once `dispatch` knows them.
        check: look for rows with more than K experts, and whether the routing that arrives is what
            was announced, or T is equal where nothing is announced; waits for the device, and is
            always done on the CPU.
    Raises:
        ValueError: experts that do not divide by EP, or more than 1,024; when checked, a row with
            more than K experts.
    """
    T, num_experts = routing_map.shape
    EP = groups.ep_size
    reasons = []
    if num_experts % EP:
        reasons.append(f"do not divide by {EP} expert-parallel ranks; change either")
    if num_experts > MAX_EXPERTS:
        reasons.append(f"are more than the {MAX_EXPERTS} that a layer may have")
    if reasons:
        raise ValueError(f"{num_experts} experts {', and '.join(reasons)}")
    check = check or not routing_map.is_cuda
    if check:
        check_experts_per_token(routing_map, topk)
    E, rank_lists, exchange = num_experts // EP, None, None
    if EP > 1:
        with torch.cuda.device_of(routing_map):  # Triton launches on the current GPU
            ranks, pairs = kernels_for(routing_map).ranks_from_routing_map(routing_map, EP, topk)
            rank_lists = index_lists_from_topk(ranks, EP)
            routing_bytes = min(topk, E) * (probs.element_size() + ID.itemsize)
            row_bytes = x.shape[1] * x.element_size() + routing_bytes
            exchange = SplitExchange(rank_lists.tokens_per_expert, pairs, row_bytes, groups)
    route = Route(groups, T, E, rank_lists)
    return PendingDispatch(route, routing_map, topk, exchange, counters, check)


def _ids(wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The ids [rows, k] in what `pack_routing` made of probs of that dtype, a view."""
    k = wire.shape[1] // (dtype.itemsize + ID.itemsize)
    return wire[:, k * dtype.itemsize :].view(ID)


def _from_wire(wire: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Its probs and int32 ids [rows, k], as copies."""
    ids = _ids(wire, dtype)
    # `contiguous` would leave no or one row with the stride of the buffer, which `view` refuses.
    probs = wire[:, : ids.shape[1] * dtype.itemsize].clone(memory_format=torch.contiguous_format)
    return probs.view(dtype), ids.int()


class _Dispatch(torch.autograd.Function):
    """recv_x = all_to_all(gather(x)), with probs and ids; all-gathered over expert TP."""

    @staticmethod
    def forward(ctx, x, probs, pending):
        route, groups, ops = pending.route, pending.route.groups, kernels_for(x)
        # Buffers of the bound's size need no split sizes, which arrive meanwhile.
        rows, wire = x, ops.pack_routing(pending.routing_map, probs, route.rank_lists, pending.topk)
        if route.rank_lists is not None:
            rows = ops.gather(x, route.rank_lists, x.new_empty(wire.shape[0], x.shape[1]), 0)
        splits = pending.wait()
        used = sum(splits.send)
        ids = _ids(wire[:used], probs.dtype).clone()
        if route.rank_lists is not None:
            fill = NOTHING if pending.check else None
            wire = all_to_all(wire[:used], splits.send, splits.recv, groups.ep, fill)
            rows = all_to_all(rows[:used], splits.send, splits.recv, groups.ep)
            if pending.check:
                check_arrival(_ids(wire, probs.dtype), splits, route.num_experts)
        if groups.tp_size > 1:
            wire = all_gather(wire, splits.gathered, groups.tp)
            rows = all_gather(rows, splits.gathered, groups.tp)
        recv_probs, recv_ids = _from_wire(wire, probs.dtype)
        ctx.mark_non_differentiable(recv_ids)
        ctx.save_for_backward(ids)
        ctx.route, ctx.probs_shape = replace(route, splits=splits), probs.shape
        return rows, recv_probs, recv_ids, ctx.route

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, grad_probs, _grad_ids, _grad_route):
        (ids,), route = ctx.saved_tensors, ctx.route
        groups, splits, ops = route.groups, route.splits, kernels_for(grad_rows)
        grad_rows, grad_probs = grad_rows.contiguous(), grad_probs.contiguous()
        if groups.tp_size > 1:
            grad_probs = reduce_scatter(grad_probs, splits.gathered, groups.tp)
            grad_rows = reduce_scatter(grad_rows, splits.gathered, groups.tp)
        grad_x = grad_rows
        if route.rank_lists is not None:
            grad_probs = all_to_all(grad_probs, splits.recv, splits.send, groups.ep)
            grad_rows = all_to_all(grad_rows, splits.recv, splits.send, groups.ep)
            # grad_x[t] = sum over ranks of grad_rows
            grad_x = grad_rows.new_empty(route.tokens, grad_rows.shape[1])
            ops.combine(grad_rows, route.rank_lists, grad_x, 0)
        out = grad_probs.new_empty(ctx.probs_shape)
        return grad_x, ops.unpack_grad_probs(grad_probs, ids, route.rank_lists, out), None


class _Combine(torch.autograd.Function):
    """output[t] = sum over ranks of all_to_all(expert_output); over expert TP summed before."""

    @staticmethod
    def forward(ctx, rows, route):
        groups, splits = route.groups, route.splits
        ctx.route = route
        rows = rows.contiguous()
        if groups.tp_size > 1:
            rows = reduce_scatter(rows, splits.gathered, groups.tp)
        if route.rank_lists is None:
            return rows
        rows = all_to_all(rows, splits.recv, splits.send, groups.ep)
        output = rows.new_empty(route.tokens, rows.shape[1])
        return kernels_for(rows).combine(rows, route.rank_lists, output, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        route = ctx.route
        groups, splits = route.groups, route.splits
        rows = grad_output.contiguous()
        if route.rank_lists is not None:
            send = rows.new_empty(sum(splits.send), rows.shape[1])
            send = kernels_for(rows).gather(rows, route.rank_lists, send, 0)
            rows = all_to_all(send, splits.send, splits.recv, groups.ep)
        if groups.tp_size > 1:
            rows = all_gather(rows, splits.gathered, groups.tp)
        return rows, None


def dispatch(
    x: torch.Tensor, probs: torch.Tensor, pending: PendingDispatch
) -> tuple[torch.Tensor, torch.Tensor, IndexLists, Route]:
    """Sends the tokens; waits for the split sizes if EP > 1.

    Args:
        x: [T, H].
        probs: [T, EP*E], in any floating dtype, which it keeps.
    Returns:
        recv_x [T', H] and topk_probs [T', k], differentiable, the index lists of the received rows
        over the local experts, and the route back for `combine`.
    Raises:
        ValueError: ranks disagree about what is sent.
    """
    with torch.cuda.device_of(x):  # Triton launches on the current GPU; backward runs on it too
        recv_x, recv_probs, recv_ids, route = _Dispatch.apply(x.contiguous(), probs, pending)
    for counter in pending.counters:
        counter.add(route.tokens, route.splits, route.groups.ep.rank())
    lists = index_lists_from_topk(recv_ids, route.num_experts, max_rows=route.splits.pairs)
    return recv_x, recv_probs, lists, route


def combine(expert_output: torch.Tensor, route: Route) -> torch.Tensor:
    """One row per received row, summed over its local experts, [T', H] -> output [T, H]."""
    with torch.cuda.device_of(expert_output):
        return _Combine.apply(expert_output, route)
