"""The eager twin of every kernel, under the same name and signature, and the layer in plain torch.

The twins are what runs on CPU tensors; the tests and the benchmark compare kernels with them, and
`moe_reference`, which autograd differentiates, checks the algebra of both.

T tokens, K experts per token, E experts, H hidden size, F ffn hidden size, R routed rows.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F

from moeblaze_megatron.ops.activation import Activation
from moeblaze_megatron.ops.index_lists import IndexLists, max_tiles
from moeblaze_megatron.ops.mxfp8 import SIZE
from moeblaze_megatron.ops.tiles import BLOCK_R, cdiv

FUNCTIONS = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "quick_geglu": lambda v: v * torch.sigmoid(1.702 * v),
    "silu": F.silu,
    "gelu": F.gelu,
    "squared_relu": lambda v: F.relu(v).square(),
}


def activate(fc1_output: torch.Tensor, activation: str | Activation) -> torch.Tensor:
    """[..., 2F] (gate half first) or [..., F] -> [..., F]."""
    activation = Activation.of(activation)
    function, clamp = FUNCTIONS[activation.name], activation.clamp
    if not activation.gated:
        return function(fc1_output)
    gate, up = fc1_output.chunk(2, dim=-1)
    if clamp is not None:
        # Gradients pass at the clamp itself, which `torch.clamp` has done differently by version.
        gate = torch.where(gate > clamp, clamp, gate)
        up = torch.where(up.abs() > clamp, up.sign() * clamp, up)
    if activation.offset:
        up = up + activation.offset
    return function(gate) * up


def moe_reference(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_probs: torch.Tensor,
    activation: str | Activation = "swiglu",
    fc1_bias: torch.Tensor | None = None,
    fc2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The whole layer, differentiable by autograd, in x's dtype as eager torch computes it.

    output[t] = sum over k of W2[e] (prob[t, k] * f(W1[e] x[t] + b1[e])) + prob[t, k] b2[e] with
    e = topk_indices[t, k]; shapes as in `moeblaze_experts`.
    """
    output = torch.zeros_like(x)
    for e in range(fc1_weight.shape[0]):
        token, k = (topk_indices == e).nonzero(as_tuple=True)
        prob = topk_probs[token, k, None]
        fc1_output = x[token] @ fc1_weight[e].T
        if fc1_bias is not None:
            fc1_output = fc1_output + fc1_bias[e]
        act = (activate(fc1_output, activation) * prob).to(x.dtype)
        rows = act @ fc2_weight[e].T
        if fc2_bias is not None:
            rows = (rows + prob * fc2_bias[e]).to(x.dtype)
        output = output.index_add(0, token, rows)
    return output


def topk_indices_from_routing_map(routing_map: torch.Tensor, topk: int) -> torch.Tensor:
    """[T, E] bool -> [T, topk] int32, -1 = none; experts past `topk` of a token are left out."""
    out = routing_map.new_full((routing_map.shape[0], topk), -1, dtype=torch.int32)
    slot = routing_map.cumsum(1) - 1
    token, expert = (routing_map & (slot < topk)).nonzero(as_tuple=True)
    out[token, slot[token, expert]] = expert.int()
    return out


def index_lists(
    topk_indices: torch.Tensor, num_experts: int, max_rows: int | None = None
) -> IndexLists:
    """A stable sort by expert in place of counting; see the kernels for the shapes."""
    T, K = topk_indices.shape
    flat = topk_indices.flatten().long()
    valid = (flat >= 0) & (flat < num_experts)
    tokens_per_expert = torch.bincount(flat[valid], minlength=num_experts)
    offsets = F.pad(tokens_per_expert.cumsum(0), (1, 0))
    pairs = valid.nonzero().squeeze(1)
    pairs = pairs[flat[pairs].argsort(stable=True)]
    token_index_map = torch.full_like(flat, -1)
    token_index_map[pairs] = torch.arange(pairs.numel(), device=flat.device)
    bound = flat.numel() if max_rows is None else max_rows
    expert_token_indices = flat.new_zeros(max(1, bound))
    expert_token_indices[: pairs.numel()] = pairs // K

    tiles = (tokens_per_expert + BLOCK_R - 1) // BLOCK_R
    tile_expert = flat.new_full((max_tiles(bound, num_experts),), -1)
    tile_row_start, tile_row_end = tile_expert.clone(), tile_expert.clone()
    expert = torch.arange(num_experts, device=flat.device).repeat_interleave(tiles)
    nth = torch.arange(expert.numel(), device=flat.device) - (tiles.cumsum(0) - tiles)[expert]
    tile_expert[: expert.numel()] = expert
    start = offsets[expert] + nth * BLOCK_R
    tile_row_start[: expert.numel()] = start
    tile_row_end[: expert.numel()] = torch.minimum(start + BLOCK_R, offsets[expert + 1])
    ranked = tokens_per_expert.argsort(descending=True, stable=True)
    return IndexLists(
        tokens_per_expert=tokens_per_expert.int(),
        expert_token_offsets=offsets.int(),
        expert_token_indices=expert_token_indices.int(),
        token_expert_indices=topk_indices,
        token_index_map=token_index_map.view(T, K).int(),
        tile_expert=tile_expert.int(),
        tile_row_start=tile_row_start.int(),
        tile_row_end=tile_row_end.int(),
        ranked_experts=torch.stack((ranked, offsets[ranked], offsets[ranked + 1]), 1).int(),
    )


def _pairs(lists: IndexLists) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """token, k and row of every routed pair."""
    token, k = (lists.token_index_map >= 0).nonzero(as_tuple=True)
    return token, k, lists.token_index_map[token, k].long()


def _column(lists: IndexLists, token: torch.Tensor, k: torch.Tensor, dense: bool) -> torch.Tensor:
    return lists.token_expert_indices[token, k].long() if dense else k


def permuted_probs(probs: torch.Tensor, lists: IndexLists, dense: bool) -> torch.Tensor:
    """[T, K] or, when `dense`, [T, E] -> [R_max] in row order, fp32 or wider."""
    token, k, row = _pairs(lists)
    out = probs.new_zeros(lists.max_rows, dtype=torch.promote_types(probs.dtype, torch.float32))
    out[row] = probs[token, _column(lists, token, k, dense)].to(out.dtype)
    return out


def grad_probs(
    grad_permuted_probs: torch.Tensor, lists: IndexLists, probs: torch.Tensor, dense: bool
) -> torch.Tensor:
    """[R_max] -> gradient of `probs` in its shape and dtype."""
    token, k, row = _pairs(lists)
    out = torch.zeros_like(probs)
    values = grad_permuted_probs[row].to(out.dtype)
    return out.index_put_((token, _column(lists, token, k, dense)), values, accumulate=True)


def ranks_from_routing_map(
    routing_map: torch.Tensor, num_ranks: int, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """ranks [T, min(K, EP)], and pairs by rank, with all tokens in one chunk."""
    T, N = routing_map.shape
    by_rank = routing_map.view(T, num_ranks, N // num_ranks)
    ranks = topk_indices_from_routing_map(by_rank.any(2), min(topk, num_ranks))
    return ranks, by_rank.sum((0, 2), dtype=torch.int32)[:, None]


def split_sizes(
    rows: torch.Tensor, chunk_pairs: torch.Tensor, row_bytes: int, out: torch.Tensor
) -> torch.Tensor:
    """out [EP, 3]: rows, the sum of their pairs, row_bytes."""
    out[:, 0], out[:, 1], out[:, 2] = rows, chunk_pairs.sum(1), row_bytes
    return out


def _rows_between_ranks(
    lists: IndexLists | None, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """token, rank and row of every row in use; without lists the tokens of x, all to rank 0."""
    if lists is None:
        token = torch.arange(x.shape[0], device=x.device)
        return token, torch.zeros_like(token), token
    token, m, row = _pairs(lists)
    return token, lists.token_expert_indices[token, m].long(), row


def pack_routing(
    routing_map: torch.Tensor, probs: torch.Tensor, lists: IndexLists | None, topk: int
) -> torch.Tensor:
    """[rows, k * (bytes of a prob + 2)] uint8: probs, then int16 ids."""
    token, rank, row = _rows_between_ranks(lists, probs)
    T, N = routing_map.shape
    ranks, rows = (1, T) if lists is None else (lists.num_experts, lists.max_rows)
    E = N // ranks
    local_map = routing_map.view(T, ranks, E)[token, rank]
    ids = topk_indices_from_routing_map(local_map, min(topk, E))
    sent = probs[token[:, None], rank[:, None] * E + ids]  # -1 is some other prob
    sent[ids < 0] = 0
    packed = torch.cat([sent.view(torch.uint8), ids.short().view(torch.uint8)], 1)
    wire = packed.new_zeros(rows, packed.shape[1])
    wire[row] = packed
    return wire


def unpack_grad_probs(
    grad: torch.Tensor, ids: torch.Tensor, lists: IndexLists | None, out: torch.Tensor
) -> torch.Tensor:
    """[rows, k] -> out [T, EP*E], 0 where no row has the expert."""
    token, rank, row = _rows_between_ranks(lists, out)
    ids = ids[row].long()
    place, k = (ids >= 0).nonzero(as_tuple=True)
    E = out.shape[1] // (1 if lists is None else lists.num_experts)
    out.zero_()[token[place], rank[place] * E + ids[place, k]] = grad[row[place], k]
    return out


def _experts(lists: IndexLists) -> Iterator[tuple[int, slice]]:
    """Number and rows of every expert."""
    offsets = lists.expert_token_offsets.tolist()
    return enumerate(slice(a, b) for a, b in pairwise(offsets))


def fc1(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    permuted_probs: torch.Tensor,
    lists: IndexLists,
    activation: Activation,
    save: bool,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """fc1_output [R_max, 2F] or [R_max, F] and act [R_max, F]."""
    width = fc1_weight.shape[1]
    fc1_output = x.new_zeros(lists.max_rows, width)
    for e, rows in _experts(lists):
        fc1_output[rows] = x[lists.expert_token_indices[rows]] @ fc1_weight[e].T
        if bias is not None:
            fc1_output[rows] += bias[e]
    act = (activate(fc1_output, activation) * permuted_probs[:, None]).to(x.dtype)
    return (fc1_output if save else None), act


def rows_gemm(
    a: torch.Tensor,
    weight: torch.Tensor,
    lists: IndexLists,
    out: torch.Tensor,
    n_start: int,
    gather: bool,
    transposed: bool,
) -> torch.Tensor:
    """Columns n_start .. n_start + cols of every row times its expert's weight."""
    columns = slice(n_start, n_start + out.shape[1])
    for e, rows in _experts(lists):
        source = a[lists.expert_token_indices[rows]] if gather else a[rows]
        out[rows] = source @ (weight[e, columns].T if transposed else weight[e, :, columns])
    return out


def combine(
    rows: torch.Tensor,
    lists: IndexLists,
    out: torch.Tensor,
    h_start: int,
    bias: torch.Tensor | None = None,
    permuted_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t, h_start : h_start + cols] = sum over k of row token_index_map[t, k], prob bias."""
    acc = torch.zeros(
        out.shape[0],
        rows.shape[1],
        dtype=torch.promote_types(rows.dtype, torch.float32),
        device=rows.device,
    )
    columns = slice(h_start, h_start + rows.shape[1])
    for k in range(lists.topk):
        token = (lists.token_index_map[:, k] >= 0).nonzero().squeeze(1)
        row = lists.token_index_map[token, k].long()
        value = rows[row]
        if bias is not None:
            expert = lists.token_expert_indices[token, k].long()
            value = value + permuted_probs[row, None] * bias[expert, columns]
        acc[token] += value
    out[:, columns] = acc
    return out


def activation_backward(
    grad_act: torch.Tensor,
    fc1_output: torch.Tensor,
    permuted_probs: torch.Tensor,
    lists: IndexLists,
    activation: Activation,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad_fc1_output, act and grad_permuted_probs [R_max]; the first two in place."""
    wide = torch.promote_types(grad_act.dtype, torch.float32)
    R = int(lists.expert_token_offsets[-1])
    with torch.enable_grad():
        leaf = fc1_output[:R].to(wide).requires_grad_()
        value = activate(leaf, activation)
    grad = grad_act[:R].to(wide)
    (grad_leaf,) = torch.autograd.grad(value, leaf, (grad * permuted_probs[:R, None]).to(wide))
    grad_permuted_probs = torch.zeros_like(permuted_probs)
    grad_permuted_probs[:R] = (grad * value.detach()).sum(1)
    grad_act[:R] = value.detach() * permuted_probs[:R, None]
    fc1_output[:R] = grad_leaf
    return fc1_output, grad_act, grad_permuted_probs


def bias_grad(
    grad: torch.Tensor,
    lists: IndexLists,
    bias: torch.Tensor,
    permuted_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[e] = sum of its rows of `grad` or, given probabilities, of prob times its tokens'."""
    out = torch.zeros_like(bias)
    for e, rows in _experts(lists):
        value = grad[rows if permuted_probs is None else lists.expert_token_indices[rows]]
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        if permuted_probs is not None:
            value = value * permuted_probs[rows, None]
        out[e] = value.sum(0)
    return out


def bias_grad_probs(
    grad_output: torch.Tensor,
    lists: IndexLists,
    bias: torch.Tensor,
    grad_permuted_probs: torch.Tensor,
) -> torch.Tensor:
    """grad_permuted_probs[r] += grad_output[token of r] . bias[expert of r], in place."""
    token, k, row = _pairs(lists)
    wide = grad_permuted_probs.dtype
    grad, expert = grad_output[token].to(wide), lists.token_expert_indices[token, k].long()
    grad_permuted_probs[row] += (grad * bias[expert].to(wide)).sum(1)
    return grad_permuted_probs


def fc2_dgrad(
    grad_output: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc1_output: torch.Tensor,
    permuted_probs: torch.Tensor,
    lists: IndexLists,
    activation: Activation,
    gather: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad_fc1_output (in place), act and grad_permuted_probs [R_max]."""
    grad_act = fc1_output.new_empty(lists.max_rows, fc2_weight.shape[2])
    rows_gemm(grad_output, fc2_weight, lists, grad_act, 0, gather, transposed=False)
    return activation_backward(grad_act, fc1_output, permuted_probs, lists, activation)


def quantize(x: torch.Tensor, lists: IndexLists) -> tuple[torch.Tensor, torch.Tensor]:
    """values [R_max, W] float8_e4m3fn and scales [R_max, cdiv(W, 32)] float8_e8m0fnu."""
    R, W = int(lists.expert_token_offsets[-1]), x.shape[1]
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(x.shape[0], cdiv(W, SIZE), dtype=torch.float8_e8m0fnu)
    blocks = F.pad(x[:R].float(), (0, -W % SIZE)).unflatten(1, (-1, SIZE))
    largest = torch.where(blocks.isfinite(), blocks, 0).abs().amax(-1)
    mantissa, exponent = torch.frexp(largest.clamp(min=2.0**-126))  # 448 = 0.875 * 2^9
    exponent = (exponent - 9 + (mantissa > 0.875)).clamp(min=-126)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    scales[:R] = scale.to(scales.dtype)
    # Inf becomes NaN here, since casts of torch before 2.14 make it so and later ones 448.
    scaled = torch.where(blocks.isfinite(), blocks / scale[..., None], torch.nan)
    values[:R] = scaled.flatten(1)[:, :W].to(values.dtype)
    return values, scales


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, lists: IndexLists, dtype: torch.dtype
) -> torch.Tensor:
    """What `quantize` has kept, [R_max, W] in `dtype`."""
    R, W = int(lists.expert_token_offsets[-1]), values.shape[1]
    scale = scales[:R].float().repeat_interleave(SIZE, dim=1)[:, :W]
    limit = torch.finfo(dtype).max
    out = torch.empty_like(values, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    out[:R] = (values[:R].to(wide) * scale).clamp(-limit, limit)
    return out


def gather(x: torch.Tensor, lists: IndexLists, out: torch.Tensor, h_start: int) -> torch.Tensor:
    """out[r] = x[expert_token_indices[r], h_start : h_start + cols] for the rows in use."""
    R = int(lists.expert_token_offsets[-1])
    out[:R] = x[lists.expert_token_indices[:R], h_start : h_start + out.shape[1]]
    return out


def wgrad(
    a: torch.Tensor,
    b: torch.Tensor,
    lists: IndexLists,
    out: torch.Tensor,
    accumulate: bool,
    gather: str | None = None,
) -> torch.Tensor:
    """out[e] (+)= a[rows]^T b[rows]; zeros, or left as it is, for an expert without rows.

    What is added is rounded with the sum, as `out` is, and not before.
    """
    if accumulate:
        a, b = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in (a, b))
    for e, rows in _experts(lists):
        token = lists.expert_token_indices[rows]
        grad = a[token if gather == "a" else rows].T @ b[token if gather == "b" else rows]
        out[e] = out[e] + grad if accumulate else grad
    return out
