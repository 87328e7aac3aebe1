"""Index lists: which token feeds which row, instead of permuted copies of the tokens.

T tokens, K experts per token, E experts on this rank, R routed rows (known on the device only).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeblaze_megatron.ops.launch import direct
from moeblaze_megatron.ops.tiles import BLOCK_R, cdiv

CHUNK = 128  # (token, k) pairs ranked together by one program
SCAN = 1024  # histogram entries scanned at once
MAX_EXPERTS = 1024
MAX_TOPK = 32


@dataclass(frozen=True)
class IndexLists:
    """Routing of T tokens to E experts as index lists (MoEBlaze paper, section 4; all int32).

    Rows are ordered by expert, then by token, which is the order of Megatron's `permute`.
    Buffers are sized by the bound R_max, T*K unless the builder is given a lower one; the rows in
    use, R = expert_token_offsets[E], are known on the device only and entries past them are
    undefined.

    Attributes:
        tokens_per_expert: [E] rows of each expert.
        expert_token_offsets: [E+1] first row of each expert.
        expert_token_indices: [R_max] row -> token.
        token_expert_indices: [T, K] token -> its experts, -1 = none.
        token_index_map: [T, K] (token, k) -> row, -1 = none.
        tile_expert: [num_tiles] row tile -> expert, -1 = past the end.
        tile_row_start: [num_tiles] row tile -> its first row, -1 = past the end.
        tile_row_end: [num_tiles] row tile -> the row behind its last, -1 = past the end.
        ranked_experts: [E, 3] expert, its first row and the row behind its last, by falling number
            of rows, then by expert.
    """

    tokens_per_expert: torch.Tensor
    expert_token_offsets: torch.Tensor
    expert_token_indices: torch.Tensor
    token_expert_indices: torch.Tensor
    token_index_map: torch.Tensor
    tile_expert: torch.Tensor
    tile_row_start: torch.Tensor
    tile_row_end: torch.Tensor
    ranked_experts: torch.Tensor

    @property
    def num_experts(self) -> int:
        return self.tokens_per_expert.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.token_index_map.shape[0]

    @property
    def topk(self) -> int:
        return self.token_index_map.shape[1]

    @property
    def max_rows(self) -> int:
        """Rows to allocate: the bound, and one for an empty batch (no kernel reads it)."""
        return self.expert_token_indices.shape[0]

    @property
    def num_tiles(self) -> int:
        return self.tile_expert.shape[0]


def max_tiles(rows: int, num_experts: int) -> int:
    """The most row tiles that `rows` rows of `num_experts` experts can need.

    Worst case: all experts but one hold a single row each, the last one all the others.
    """
    if rows <= num_experts:
        return rows
    return cdiv(rows - num_experts + 1, BLOCK_R) + num_experts - 1


@direct
@triton.jit(do_not_specialize=["T"])
def _topk_indices_kernel(
    routing_map_ptr,  # [T, E] uint8
    topk_indices_ptr,  # [T, K] int32
    T,
    E,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The experts of each token in ascending order. [[0, 1, 1], [0, 0, 1]] -> [[1, 2], [2, -1]]"""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = t.to(tl.int64)[:, None]
    found = tl.zeros((BLOCK_T,), tl.int32)
    for e0 in range(0, E, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)[None, :]
        inside = (t < T)[:, None] & (e < E)
        hit = (tl.load(routing_map_ptr + row * E + e, mask=inside, other=0) != 0).to(tl.int32)
        slot = found[:, None] + tl.cumsum(hit, 1) - hit
        tl.store(topk_indices_ptr + row * K + slot, e, mask=(hit != 0) & (slot < K))
        found += tl.sum(hit, 1)
    for k in tl.static_range(K):
        tl.store(topk_indices_ptr + t.to(tl.int64) * K + k, -1, mask=(t < T) & (found <= k))


def topk_indices_from_routing_map(routing_map: torch.Tensor, topk: int) -> torch.Tensor:
    """[T, E] bool -> [T, topk] int32, -1 = none; experts past `topk` of a token are left out."""
    T, E = routing_map.shape
    topk_indices = routing_map.new_empty(T, topk, dtype=torch.int32)
    BLOCK_T, BLOCK_E = 16, min(128, triton.next_power_of_2(E))
    if T:
        _topk_indices_kernel[(cdiv(T, BLOCK_T),)](
            routing_map.contiguous().view(torch.uint8), topk_indices, T, E, topk, BLOCK_T, BLOCK_E
        )
    return topk_indices


@triton.jit
def _load_chunk(topk_indices_ptr, chunk, pairs, E, CHUNK: tl.constexpr):
    """One chunk of (token, k) pairs: their expert ids; an id outside 0..E-1 counts as -1."""
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(topk_indices_ptr + pair, mask=pair < pairs, other=-1)
    return pair, tl.where((expert >= 0) & (expert < E), expert, -1)


@direct
@triton.jit(do_not_specialize=["pairs", "num_chunks"])
def _histogram_kernel(
    topk_indices_ptr,  # [T*K] int32
    chunk_base_ptr,  # [E, num_chunks] int32
    pairs,
    num_chunks,
    E,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Rows of each expert in one chunk. ids = [2, 0, 2], E = 3 -> [1, 0, 2]"""
    chunk = tl.program_id(0)
    _, expert = _load_chunk(topk_indices_ptr, chunk, pairs, E, CHUNK)
    count = tl.histogram(tl.maximum(expert, 0), BLOCK_E, mask=expert >= 0)
    e = tl.arange(0, BLOCK_E)
    tl.store(chunk_base_ptr + e.to(tl.int64) * num_chunks + chunk, count, mask=e < E)


@direct
@triton.jit(do_not_specialize=["num_chunks"])
def _scan_kernel(
    chunk_base_ptr,  # [E, num_chunks] int32, counts in, their exclusive prefix sums out
    tokens_per_expert_ptr,  # [E] int32
    num_chunks,
    SCAN: tl.constexpr,
):
    """Rows of one expert in the chunks before each. [3, 0, 2] -> [0, 3, 3], total 5"""
    e = tl.program_id(0).to(tl.int64)
    total = 0
    for c0 in range(0, num_chunks, SCAN):
        c = c0 + tl.arange(0, SCAN)
        ptr = chunk_base_ptr + e * num_chunks + c
        count = tl.load(ptr, mask=c < num_chunks, other=0)
        tl.store(ptr, total + tl.cumsum(count, 0) - count, mask=c < num_chunks)
        total += tl.sum(count)
    tl.store(tokens_per_expert_ptr + e, total)


@direct
@triton.jit(do_not_specialize=["num_tiles"])
def _tiles_kernel(
    tokens_per_expert_ptr,  # [E] int32
    expert_token_offsets_ptr,  # [E+1] int32
    tile_expert_ptr,  # [num_tiles] int32
    tile_row_start_ptr,  # [num_tiles] int32
    tile_row_end_ptr,  # [num_tiles] int32
    ranked_experts_ptr,  # [E, 3] int32
    num_tiles,
    E,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Offsets, row tiles and ranks.

    counts = [3, 0, 5], BLOCK_R = 4 -> offsets [0, 3, 3, 8], tiles 0 2 2, ranks 2 0 1
    """
    e = tl.program_id(0)
    i = tl.arange(0, BLOCK_E)
    count = tl.load(tokens_per_expert_ptr + i, mask=i < E, other=0)
    tiles = (count + BLOCK_R - 1) // BLOCK_R
    start = tl.sum(tl.where(i < e, count, 0))
    end = tl.sum(tl.where(i <= e, count, 0))
    first = tl.sum(tl.where(i < e, tiles, 0))
    last = tl.sum(tl.where(i <= e, tiles, 0))
    tl.store(expert_token_offsets_ptr + e, start)
    ahead = (count > end - start) | ((count == end - start) & (i < e))
    rank = tl.sum(ahead.to(tl.int32))
    tl.store(ranked_experts_ptr + 3 * rank, e)
    tl.store(ranked_experts_ptr + 3 * rank + 1, start)
    tl.store(ranked_experts_ptr + 3 * rank + 2, end)
    for j0 in range(0, last - first, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        tl.store(tile_expert_ptr + first + j, e, mask=j < last - first)
        row = start + j * BLOCK_R
        tl.store(tile_row_start_ptr + first + j, row, mask=j < last - first)
        row_end = tl.minimum(row + BLOCK_R, end)
        tl.store(tile_row_end_ptr + first + j, row_end, mask=j < last - first)
    if e == E - 1:
        tl.store(expert_token_offsets_ptr + E, tl.sum(count))
        for j0 in range(last, num_tiles, BLOCK):
            j = j0 + tl.arange(0, BLOCK)
            tl.store(tile_expert_ptr + j, -1, mask=j < num_tiles)
            tl.store(tile_row_start_ptr + j, -1, mask=j < num_tiles)
            tl.store(tile_row_end_ptr + j, -1, mask=j < num_tiles)


@direct
@triton.jit(do_not_specialize=["pairs", "num_chunks"])
def _place_kernel(
    topk_indices_ptr,  # [T*K] int32
    chunk_base_ptr,  # [E, num_chunks] int32
    expert_token_offsets_ptr,  # [E+1] int32
    expert_token_indices_ptr,  # [R_max] int32
    token_index_map_ptr,  # [T*K] int32
    pairs,
    num_chunks,
    E,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Row of each pair: offset + earlier pairs of its expert. ids = [2, 0, 2] -> [1, 0, 2]"""
    chunk = tl.program_id(0)
    pair, expert = _load_chunk(topk_indices_ptr, chunk, pairs, E, CHUNK)
    i = tl.arange(0, CHUNK)
    earlier = (expert[:, None] == expert[None, :]) & (i[:, None] > i[None, :])
    rank = tl.sum(earlier.to(tl.int32), 1)
    placed = expert >= 0
    safe = tl.where(placed, expert, 0)
    base = tl.load(chunk_base_ptr + safe.to(tl.int64) * num_chunks + chunk)
    row = tl.load(expert_token_offsets_ptr + safe) + base + rank
    tl.store(token_index_map_ptr + pair, tl.where(placed, row, -1), mask=pair < pairs)
    tl.store(expert_token_indices_ptr + row, pair // K, mask=placed)


def index_lists(
    topk_indices: torch.Tensor, num_experts: int, max_rows: int | None = None
) -> IndexLists:
    """Builds the lists in three steps without a sort, a global atomic or a host read.

    Counts per chunk of pairs, a prefix sum over chunks, then each pair's place: its expert's
    first row + the expert's rows in earlier chunks + its rank inside the chunk (MoEBlaze paper,
    section 4.2, tiled over tokens as well as experts). An id outside 0..E-1 counts as none.

    Args:
        topk_indices: [T, K] int32, -1 = none. A token that names an expert twice gets two rows.
        num_experts: E.
        max_rows: a bound on R known to be below T*K.
    """
    T, K = topk_indices.shape
    E, pairs = num_experts, topk_indices.numel()
    bound = pairs if max_rows is None else max_rows
    num_chunks = cdiv(pairs, CHUNK)
    num_tiles = max_tiles(bound, E)

    def empty(*shape):
        return topk_indices.new_empty(shape, dtype=torch.int32)

    lists = IndexLists(
        tokens_per_expert=empty(E),
        expert_token_offsets=empty(E + 1),
        expert_token_indices=empty(max(1, bound)),
        token_expert_indices=topk_indices,
        token_index_map=empty(T, K),
        tile_expert=empty(num_tiles),
        tile_row_start=empty(num_tiles),
        tile_row_end=empty(num_tiles),
        ranked_experts=empty(E, 3),
    )
    chunk_base = empty(E, num_chunks)
    BLOCK_E = triton.next_power_of_2(E)
    if pairs:
        _histogram_kernel[(num_chunks,)](
            topk_indices, chunk_base, pairs, num_chunks, E, CHUNK, BLOCK_E, num_warps=2
        )
    _scan_kernel[(E,)](
        chunk_base,
        lists.tokens_per_expert,
        num_chunks,
        SCAN,
    )
    _tiles_kernel[(E,)](
        lists.tokens_per_expert,
        lists.expert_token_offsets,
        lists.tile_expert,
        lists.tile_row_start,
        lists.tile_row_end,
        lists.ranked_experts,
        num_tiles,
        E,
        BLOCK_R,
        BLOCK_E,
        128,
    )
    if pairs:
        _place_kernel[(num_chunks,)](
            topk_indices,
            chunk_base,
            lists.expert_token_offsets,
            lists.expert_token_indices,
            lists.token_index_map,
            pairs,
            num_chunks,
            E,
            K,
            CHUNK,
            num_warps=1,  # sums over earlier pairs stay inside a warp
        )
    return lists


@direct
@triton.jit(do_not_specialize=["pairs"])
def _permuted_probs_kernel(
    probs_ptr,  # [T, K], or [T, E] when DENSE
    token_expert_indices_ptr,  # [T*K] int32
    token_index_map_ptr,  # [T*K] int32
    permuted_probs_ptr,  # [R_max] fp32
    pairs,
    E,
    K: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Probs by row. probs = [[.2, .8], [.6, .4]], map = [[1, 2], [0, -1]] -> [.6, .2, .8]"""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_index_map_ptr + pair, mask=pair < pairs, other=-1)
    address = pair.to(tl.int64)
    if DENSE:
        expert = tl.load(token_expert_indices_ptr + pair, mask=row >= 0, other=0)
        address = (address // K) * E + expert
    prob = tl.load(probs_ptr + address, mask=row >= 0, other=0.0)
    tl.store(permuted_probs_ptr + row, prob.to(tl.float32), mask=row >= 0)


def permuted_probs(probs: torch.Tensor, lists: IndexLists, dense: bool) -> torch.Tensor:
    """Probabilities in row order.

    Args:
        probs: [T, K] beside `token_expert_indices`, or the router's [T, E] when `dense`.
    Returns:
        [R_max] fp32; undefined past R.
    """
    out = probs.new_empty(lists.max_rows, dtype=torch.float32)
    pairs = lists.token_index_map.numel()
    if pairs:
        _permuted_probs_kernel[(cdiv(pairs, 256),)](
            probs.contiguous(),
            lists.token_expert_indices,
            lists.token_index_map,
            out,
            pairs,
            probs.shape[1],
            lists.topk,
            dense,
            256,
        )
    return out


@direct
@triton.jit(do_not_specialize=["T"])
def _grad_probs_kernel(
    grad_permuted_probs_ptr,  # [R_max] fp32
    token_expert_indices_ptr,  # [T*K] int32
    token_index_map_ptr,  # [T*K] int32
    grad_probs_ptr,  # [T, K], or [T, N] with N = E when DENSE
    T,
    N,
    K: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Back in the router's shape. g = [5, 6, 7], map = [[1, 2], [0, -1]] -> [[6, 7], [5, 0]]"""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    grad = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for k in tl.static_range(K):
        pair = t.to(tl.int64) * K + k
        row = tl.load(token_index_map_ptr + pair, mask=t < T, other=-1)
        value = tl.load(grad_permuted_probs_ptr + row, mask=row >= 0, other=0.0)
        column = k
        if DENSE:
            column = tl.load(token_expert_indices_ptr + pair, mask=row >= 0, other=-1)[:, None]
        grad += tl.where(n[None, :] == column, value[:, None], 0.0)
    address = t.to(tl.int64)[:, None] * N + n[None, :]
    inside = (t < T)[:, None] & (n < N)[None, :]
    tl.store(grad_probs_ptr + address, grad.to(grad_probs_ptr.dtype.element_ty), mask=inside)


def grad_probs(
    grad_permuted_probs: torch.Tensor, lists: IndexLists, probs: torch.Tensor, dense: bool
) -> torch.Tensor:
    """[R_max] fp32 -> gradient of `probs` in its shape and dtype, 0 where no row was routed."""
    T, N = probs.shape
    out = torch.empty_like(probs, memory_format=torch.contiguous_format)
    BLOCK_T, BLOCK_N = 32, min(128, triton.next_power_of_2(N))
    if T:
        _grad_probs_kernel[(cdiv(T, BLOCK_T), cdiv(N, BLOCK_N))](
            grad_permuted_probs,
            lists.token_expert_indices,
            lists.token_index_map,
            out,
            T,
            N,
            lists.topk,
            dense,
            BLOCK_T,
            BLOCK_N,
        )
    return out
