"""What ranks tell one another about tokens, each in one launch: no sort, no atomic, no host read.

T tokens, K experts per token, EP ranks with E experts each, N = EP*E, M = min(K, EP) ranks of a
token, k = min(K, E) experts of a row, that is of a token at one rank: SLOTS in kernels. A prob has
so many WORDS of 16 bits.
"""

import torch
import triton
import triton.language as tl

from moeblaze_megatron.ops.index_lists import SCAN, IndexLists
from moeblaze_megatron.ops.launch import direct
from moeblaze_megatron.ops.tiles import cdiv


@direct
@triton.jit(do_not_specialize=["T", "num_chunks"])
def _ranks_kernel(
    routing_map_ptr,  # [T, EP*E] uint8
    ranks_ptr,  # [T, M] int32
    chunk_pairs_ptr,  # [EP, num_chunks] int32
    T,
    EP,
    E,
    num_chunks,
    M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The ranks of each token, and the pairs of each rank in a chunk of tokens.

    [[0, 0, 1, 1], [0, 1, 1, 0]], two experts a rank -> [[1, -1], [0, 1]], pairs [[1], [3]]
    """
    chunk = tl.program_id(0)
    t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
    d, e, m = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_M)
    column = d[None, :, None] * E + e[None, None, :]
    inside = (t < T)[:, None, None] & (d < EP)[None, :, None] & (e < E)[None, None, :]
    place = t.to(tl.int64)[:, None, None] * EP * E + column
    hit = (tl.load(routing_map_ptr + place, mask=inside, other=0) != 0).to(tl.int32)
    pairs = tl.sum(hit, 2)
    there = (pairs > 0).to(tl.int32)
    slot = tl.cumsum(there, 1) - there
    token = ranks_ptr + t.to(tl.int64)[:, None] * M
    tl.store(token + slot, d[None, :], mask=(there != 0) & (slot < M))
    none = (tl.sum(there, 1)[:, None] <= m[None, :]) & (t < T)[:, None] & (m < M)[None, :]
    tl.store(token + m[None, :], -1, mask=none)
    tl.store(chunk_pairs_ptr + d * num_chunks + chunk, tl.sum(pairs, 0), mask=d < EP)


def ranks_from_routing_map(
    routing_map: torch.Tensor, num_ranks: int, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which ranks hold experts of a token; rank d holds columns d*E to d*E + E - 1.

    Args:
        routing_map: [T, EP*E] bool.
        num_ranks: EP.
        topk: K.
    Returns:
        ranks [T, min(K, EP)] int32 in ascending order, -1 = none; those past it are left out.
        chunk_pairs [EP, chunks] int32: (token, expert) pairs by rank and chunk of tokens.
    """
    T, num_experts = routing_map.shape
    E, M = num_experts // num_ranks, min(topk, num_ranks)
    BLOCK_D, BLOCK_E = triton.next_power_of_2(num_ranks), triton.next_power_of_2(E)
    BLOCK_T = max(1, min(64, 4096 // (BLOCK_D * BLOCK_E)))
    num_chunks = cdiv(T, BLOCK_T)
    ranks = routing_map.new_empty(T, M, dtype=torch.int32)
    chunk_pairs = routing_map.new_empty(num_ranks, num_chunks, dtype=torch.int32)
    if T:
        _ranks_kernel[(num_chunks,)](
            routing_map.contiguous().view(torch.uint8),
            ranks,
            chunk_pairs,
            T,
            num_ranks,
            E,
            num_chunks,
            M,
            BLOCK_T,
            BLOCK_D,
            BLOCK_E,
            triton.next_power_of_2(M),
        )
    return ranks, chunk_pairs


@direct
@triton.jit(do_not_specialize=["row_bytes", "num_chunks"])
def _split_sizes_kernel(
    rows_ptr,  # [EP] int32
    chunk_pairs_ptr,  # [EP, num_chunks] int32
    sizes_ptr,  # [EP, 3] int64
    row_bytes,
    num_chunks,
    SCAN: tl.constexpr,
):
    """What a rank is told. rows = [2], chunk_pairs = [[1, 3]], 10 bytes -> [[2, 4, 10]]"""
    d = tl.program_id(0).to(tl.int64)
    pairs = 0
    for c0 in range(0, num_chunks, SCAN):
        c = c0 + tl.arange(0, SCAN)
        ptr = chunk_pairs_ptr + d * num_chunks + c
        pairs += tl.sum(tl.load(ptr, mask=c < num_chunks, other=0))
    tl.store(sizes_ptr + d * 3, tl.load(rows_ptr + d))
    tl.store(sizes_ptr + d * 3 + 1, pairs)
    tl.store(sizes_ptr + d * 3 + 2, row_bytes)


def split_sizes(
    rows: torch.Tensor, chunk_pairs: torch.Tensor, row_bytes: int, out: torch.Tensor
) -> torch.Tensor:
    """out[d] = rows[d], the sum of chunk_pairs[d], row_bytes.

    Args:
        rows: [EP] int32.
        chunk_pairs: [EP, chunks] int32.
        out: [EP, 3] int64.
    """
    num_ranks, num_chunks = chunk_pairs.shape
    _split_sizes_kernel[(num_ranks,)](rows, chunk_pairs, out, row_bytes, num_chunks, SCAN)
    return out


def _token_tile(E: int) -> tuple[int, int]:
    """BLOCK_T, BLOCK_E: a tile of tokens by the experts of one rank."""
    BLOCK_E = min(128, triton.next_power_of_2(E))
    return min(64, 1024 // BLOCK_E), BLOCK_E


@direct
@triton.jit(do_not_specialize=["T"])
def _pack_routing_kernel(
    routing_map_ptr,  # [T, N] uint8
    probs_ptr,  # [T, N, WORDS] int16
    ranks_ptr,  # [T, M] int32, or None: rank 0
    token_index_map_ptr,  # [T, M] int32, or None: row t for token t
    wire_ptr,  # [rows, SLOTS*WORDS + SLOTS] int16
    T,
    N,
    E,
    M,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    """Each row's probs, then its local experts.

    routing_map = [[0, 1, 1, 1]], probs = [[0, 7, 8, 9]], ranks = token_index_map = [[0, 1]], two
    slots -> [[7, 0, 1, -1], [8, 9, 0, 1]]
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = t.to(tl.int64)
    place, row = token * N, tl.where(t < T, token, -1)
    if token_index_map_ptr is not None:
        pair = token * M + tl.program_id(1)
        row = tl.load(token_index_map_ptr + pair, mask=t < T, other=-1).to(tl.int64)
        place += tl.load(ranks_ptr + pair, mask=row >= 0, other=0) * E
    sent = (row >= 0)[:, None]
    probs = wire_ptr + row[:, None] * (SLOTS * WORDS + SLOTS)
    ids = probs + SLOTS * WORDS
    found = tl.zeros((BLOCK_T,), tl.int32)
    for e0 in range(0, E, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)[None, :]
        column = place[:, None] + e
        hit = tl.load(routing_map_ptr + column, mask=sent & (e < E), other=0) != 0
        count = hit.to(tl.int32)
        slot = found[:, None] + tl.cumsum(count, 1) - count
        hit &= slot < SLOTS
        tl.store(ids + slot, e.to(tl.int16), mask=hit)
        for word in tl.static_range(WORDS):
            value = tl.load(probs_ptr + column * WORDS + word, mask=hit, other=0)
            tl.store(probs + slot * WORDS + word, value, mask=hit)
        found += tl.sum(count, 1)
    s = tl.arange(0, BLOCK_SLOTS)[None, :]
    none = sent & (found[:, None] <= s) & (s < SLOTS)
    tl.store(ids + s, -1, mask=none)
    for word in tl.static_range(WORDS):
        tl.store(probs + s * WORDS + word, 0, mask=none)


def pack_routing(
    routing_map: torch.Tensor, probs: torch.Tensor, lists: IndexLists | None, topk: int
) -> torch.Tensor:
    """The routing of each row between ranks, as it is sent: k = min(K, E) probs, then k int16 ids.

    The ids are those of the rank's own experts, in ascending order, -1 = none; its prob is 0.
    Written in words of 16 bits, since a prob need not stand at a multiple of its size.

    Args:
        routing_map: [T, EP*E] bool.
        probs: [T, EP*E] of 2, 4 or 8 bytes each.
        lists: lists with EP ranks in the place of experts; None: one rank, row t for token t.
        topk: K; experts past k of a row are left out.
    Returns:
        [rows, k * (bytes of a prob + 2)] uint8; undefined past the rows in use.
    """
    T, N = routing_map.shape
    ranks, M, rows = (1, 1, T) if lists is None else (lists.num_experts, lists.topk, lists.max_rows)
    E, words = N // ranks, probs.element_size() // 2
    k = min(topk, E)
    wire = probs.new_empty(rows, k * (words + 1), dtype=torch.int16)
    BLOCK_T, BLOCK_E = _token_tile(E)
    if T:
        _pack_routing_kernel[(cdiv(T, BLOCK_T), M)](
            routing_map.contiguous().view(torch.uint8),
            probs.contiguous().view(torch.int16),
            lists and lists.token_expert_indices,
            lists and lists.token_index_map,
            wire,
            T,
            N,
            E,
            M,
            k,
            words,
            BLOCK_T,
            BLOCK_E,
            triton.next_power_of_2(k),
        )
    return wire.view(torch.uint8)


@direct
@triton.jit(do_not_specialize=["T"])
def _unpack_grad_probs_kernel(
    grad_ptr,  # [rows, SLOTS]
    ids_ptr,  # [rows, SLOTS] int16
    ranks_ptr,  # [T, M] int32, or None: rank 0
    token_index_map_ptr,  # [T, M] int32, or None: row t for token t
    grad_probs_ptr,  # [T, N]
    T,
    N,
    E,
    M: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Back in the router's shape.

    grad = [[5, 6], [7, 8]], ids = [[1, -1], [0, 1]], ranks = token_index_map = [[0, 1]]
    -> [[0, 5, 7, 8]]
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    rank = tl.program_id(2)
    token = t.to(tl.int64)
    row = tl.where(t < T, token, -1)
    if token_index_map_ptr is not None:
        row = tl.full((BLOCK_T,), -1, tl.int64)
        for m in tl.static_range(M):
            there = tl.load(ranks_ptr + token * M + m, mask=t < T, other=-1) == rank
            found = tl.load(token_index_map_ptr + token * M + m, mask=there, other=-1)
            row = tl.maximum(row, found.to(tl.int64))
    grad = tl.zeros((BLOCK_T, BLOCK_E), grad_ptr.dtype.element_ty)
    for s in tl.static_range(SLOTS):
        expert = tl.load(ids_ptr + row * SLOTS + s, mask=row >= 0, other=-1)
        value = tl.load(grad_ptr + row * SLOTS + s, mask=row >= 0, other=0.0)
        grad = tl.where(e[None, :] == expert[:, None], value[:, None], grad)
    inside = (t < T)[:, None] & (e < E)[None, :]
    tl.store(grad_probs_ptr + token[:, None] * N + rank * E + e[None, :], grad, mask=inside)


def unpack_grad_probs(
    grad: torch.Tensor, ids: torch.Tensor, lists: IndexLists | None, out: torch.Tensor
) -> torch.Tensor:
    """Gradients of the probs that `pack_routing` sent, in the router's shape; 0 for all others.

    Args:
        grad: [rows, k], of the rows in use.
        ids: [rows, k] int16, -1 = none.
        lists: as in `pack_routing`.
        out: [T, EP*E], in the dtype of `grad`.
    """
    T, N = out.shape
    ranks, M = (1, 1) if lists is None else (lists.num_experts, lists.topk)
    E = N // ranks
    BLOCK_T, BLOCK_E = _token_tile(E)
    if T:
        _unpack_grad_probs_kernel[(cdiv(T, BLOCK_T), cdiv(E, BLOCK_E), ranks)](
            grad,
            ids,
            lists and lists.token_expert_indices,
            lists and lists.token_index_map,
            out,
            T,
            N,
            E,
            M,
            grad.shape[1],
            BLOCK_T,
            BLOCK_E,
        )
    return out
