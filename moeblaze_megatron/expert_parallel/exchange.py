"""Rows between ranks: collectives whose sizes differ by rank, and the exchange of those sizes.

Every rank of a group takes part in each of these, with or without rows, in the same order.

H hidden size (or the bytes of a row's routing), EP ranks that share the experts, ETP ranks that
share each expert's weights.
"""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moeblaze_megatron.ops.experts import kernels_for


@dataclass(frozen=True)
class ExpertGroups:
    """The process groups of one rank's experts.

    Attributes:
        ep: the EP ranks that hold different experts; rank d holds experts d*E to d*E + E - 1.
        tp: the ETP ranks that hold slices of the same experts, and tokens of their own.
    """

    ep: dist.ProcessGroup
    tp: dist.ProcessGroup

    @functools.cached_property
    def ep_size(self) -> int:
        return self.ep.size()

    @functools.cached_property
    def tp_size(self) -> int:
        return self.tp.size()


def all_to_all(
    rows: torch.Tensor,
    send_splits: list[int],
    recv_splits: list[int],
    group: dist.ProcessGroup,
    fill: int | None = None,
) -> torch.Tensor:
    """[sum(send_splits), H], in the order of the ranks they go to -> [sum(recv_splits), H].

    With `fill`, what does not arrive holds it.
    """
    out = rows.new_empty(sum(recv_splits), *rows.shape[1:])
    if fill is not None:
        out.fill_(fill)
    dist.all_to_all_single(out, rows, recv_splits, send_splits, group=group)
    return out


def all_gather(rows: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The [sizes[p], H] of every rank p, one after the other: [sum(sizes), H].

    One broadcast for each rank, which is what NCCL's all-gather of uneven sizes is too.
    """
    out = rows.new_empty(sum(sizes), *rows.shape[1:])
    parts = out.split(sizes)
    parts[group.rank()].copy_(rows)
    waiting = [
        dist.broadcast(part, group=group, group_src=source, async_op=True)
        for source, part in enumerate(parts)
        if sizes[source]
    ]
    for work in waiting:
        work.wait()
    return out


def reduce_scatter(rows: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the ranks of their [sum(sizes), H], of which rank p keeps its own [sizes[p], H].

    Summed at the receiver in fp32 or wider and in the order of ranks, so that results repeat.
    """
    mine, ranks = sizes[group.rank()], group.size()
    partial = all_to_all(rows, sizes, [mine] * ranks, group).view(ranks, mine, *rows.shape[1:])
    wide = torch.promote_types(rows.dtype, torch.float32)
    return partial.sum(0, dtype=wide).to(rows.dtype)


@dataclass(frozen=True)
class Splits:
    """How many rows one dispatch moves, on the host.

    Attributes:
        send: [EP] rows from this rank to each, itself included.
        recv: [EP] rows from each to this rank.
        recv_pairs: [EP] (token, expert) pairs that the received rows stand for.
        gathered: [ETP] rows that each rank of the expert-TP group received.
        sent_pairs: (token, expert) pairs that the sent rows stand for.
        pairs: (token, local expert) pairs among all gathered rows, at most.
    """

    send: list[int]
    recv: list[int]
    recv_pairs: list[int]
    gathered: list[int]
    sent_pairs: int
    pairs: int


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class SplitExchange:
    """Tells every rank how much it will receive; started early, read late.

    On CUDA the exchange and the copy to the host run on a stream of their own, and `wait` is the
    one host synchronisation of a layer.
    """

    def __init__(
        self, rows: torch.Tensor, chunk_pairs: torch.Tensor, row_bytes: int, groups: ExpertGroups
    ):
        """Starts the exchange.

        Args:
            rows: [EP] int32, rows from this rank to each.
            chunk_pairs: [EP, chunks] int32, parts of the (token, expert) pairs they stand for.
            row_bytes: bytes of one row and its routing, in which all ranks have to agree.
        """
        self.groups, self.row_bytes = groups, row_bytes
        if not rows.is_cuda:
            self.host, self.event = self._exchange(rows, chunk_pairs), None
            return
        stream = _side_stream(rows.device)
        stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(stream):
            rows.record_stream(stream)
            chunk_pairs.record_stream(stream)
            numbers = self._exchange(rows, chunk_pairs)
            self.host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.host.copy_(numbers, non_blocking=True)
            self.event = stream.record_event()

    def _exchange(self, rows: torch.Tensor, chunk_pairs: torch.Tensor) -> torch.Tensor:
        """[2*EP*3 + ETP*2]: what was sent, what arrived, and the totals of the expert-TP ranks.

        Without expert TP there are no totals.
        """
        ep, tp = self.groups.ep_size, self.groups.tp_size
        parts = [ep * 3, ep * 3, tp * 2 if tp > 1 else 0]
        numbers = rows.new_empty(sum(parts), dtype=torch.int64)
        sent, received, totals = numbers.split(parts)
        kernels_for(rows).split_sizes(rows, chunk_pairs, self.row_bytes, sent.view(ep, 3))
        dist.all_to_all_single(received, sent, group=self.groups.ep)
        if tp > 1:
            mine = received.view(ep, 3)[:, :2].sum(0)
            dist.all_gather_into_tensor(totals, mine, group=self.groups.tp)
        return numbers

    def wait(self) -> Splits:
        """The sizes, once they are there.

        Raises:
            ValueError: what a rank announces cannot be: rows of another size than this rank's, or
                numbers of rows and pairs that do not go together.
        """
        if self.event is not None:
            self.event.synchronize()
        ep = self.groups.ep_size
        numbers = self.host.tolist()
        sent = [numbers[3 * d : 3 * d + 3] for d in range(ep)]
        received = [numbers[3 * d : 3 * d + 3] for d in range(ep, 2 * ep)]
        self._check(received)
        recv, recv_pairs = ([sizes[i] for sizes in received] for i in range(2))
        totals = numbers[6 * ep :] or [sum(recv), sum(recv_pairs)]
        return Splits(
            send=[rows for rows, _, _ in sent],
            recv=recv,
            recv_pairs=recv_pairs,
            gathered=totals[::2],
            sent_pairs=sum(pairs for _, pairs, _ in sent),
            pairs=sum(totals[1::2]),
        )

    def _check(self, received: list[list[int]]) -> None:
        reasons = []
        for rank, (rows, pairs, row_bytes) in enumerate(received):
            if row_bytes != self.row_bytes:
                reasons.append(
                    f"rank {rank} sends rows of {row_bytes} bytes (hidden states, probs and expert "
                    f"ids), but this rank, {self.groups.ep.rank()}, of {self.row_bytes}; give all "
                    "ranks the same hidden size, dtypes, number of experts and topk"
                )
            elif not 0 <= rows <= pairs:
                reasons.append(
                    f"rank {rank} announces {rows} rows for {pairs} (token, expert) pairs; each "
                    "row stands for one pair or more"
                )
        if reasons:
            raise ValueError("expert-parallel ranks disagree: " + "; ".join(reasons))


def check_equal_tokens(tokens: int, device: torch.device, group: dist.ProcessGroup) -> None:
    """Whether all ranks have as many tokens, which none then has to be told; waits for the device.

    Raises:
        ValueError: some rank has more or fewer than another.
    """
    mine = torch.tensor([tokens], device=device)
    every = mine.new_empty(group.size())
    dist.all_gather_into_tensor(every, mine, group=group)
    if every.min() != every.max():
        raise ValueError(
            f"the ranks that share each expert have {every.tolist()} tokens; give them equal "
            "numbers, or use expert parallelism or --expert-tensor-parallel-size 1"
        )


def check_arrival(ids: torch.Tensor, splits: Splits, num_experts: int) -> None:
    """Whether what arrived is what was announced; waits for the device.

    A collective whose sizes differ between sender and receiver may end without an error, with
    rows that nobody wrote.

    Args:
        ids: [sum(recv), k] local experts of the received rows, -1 = none.
    Raises:
        ValueError: a rank's rows do not hold the pairs it announced.
    """
    valid = (ids >= 0) & (ids < num_experts)
    found = [int(part.sum()) for part in valid.split(splits.recv)]
    reasons = [
        f"rank {rank} announced {rows} rows for {pairs} (token, expert) pairs, but {there} arrived"
        for rank, (rows, pairs, there) in enumerate(
            zip(splits.recv, splits.recv_pairs, found, strict=True)
        )
        if pairs != there
    ]
    if reasons:
        raise ValueError("expert-parallel ranks disagree: " + "; ".join(reasons))
