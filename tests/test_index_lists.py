"""Each kernel and its eager twin: the example of its docstring, and index lists by brute force.

T tokens, K experts per token, E experts, R routed rows, H hidden size, F ffn hidden size.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from moeblaze_megatron import Activation
from moeblaze_megatron.ops import kernels, reference
from moeblaze_megatron.ops.index_lists import IndexLists, _scan_kernel, _tiles_kernel, max_tiles
from moeblaze_megatron.ops.tiles import BLOCK_R

pytestmark = pytest.mark.usefixtures("nan_filled")


@pytest.fixture(params=[kernels, reference], ids=["triton", "eager"])
def ops(request):
    return request.param


def ints(values, device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def column(values, device, width: int = 16) -> torch.Tensor:
    """[n, width] with `values` in the first column, and zeros: rows of whole 16 bytes."""
    out = torch.zeros(len(values), width, device=device)
    out[:, 0] = torch.tensor(values, dtype=torch.float32)
    return out


def scalars(values, device, rows: int = 16) -> torch.Tensor:
    """[E, rows, 16]: a weight for each value, which it holds in its corner, among zeros."""
    return torch.stack([column([v] + [0.0] * (rows - 1), device) for v in values])


def test_topk_indices_example(ops, device):
    routing_map = ints([[0, 1, 1], [0, 0, 1]], device).bool()
    assert ops.topk_indices_from_routing_map(routing_map, 2).tolist() == [[1, 2], [2, -1]]


def test_histogram_and_place_example(ops, device):
    lists = ops.index_lists(ints([[2], [0], [2]], device), 3)
    assert lists.tokens_per_expert.tolist() == [1, 0, 2]
    assert lists.token_index_map.flatten().tolist() == [1, 0, 2]


@pytest.mark.parametrize("scan", [2, 4], ids=["two at a time", "all at once"])
def test_scan_example(device, scan):
    chunk_base, total = ints([3, 0, 2], device), ints([-1], device)
    _scan_kernel[(1,)](chunk_base, total, 3, scan)
    assert chunk_base.tolist() == [0, 3, 3] and total.tolist() == [5]


@pytest.mark.parametrize("block", [1, 128], ids=["one at a time", "all at once"])
def test_tiles_example(device, block):
    """And one tile more than there are, past the end."""
    offsets, *tiles = (ints([9] * 4, device) for _ in range(4))
    ranked = ints([[9] * 3] * 3, device)
    _tiles_kernel[(3,)](ints([3, 0, 5], device), offsets, *tiles, ranked, 4, 3, 4, 4, block)
    tile_expert, tile_row_start, tile_row_end = tiles
    assert offsets.tolist() == [0, 3, 3, 8]
    assert tile_expert.tolist() == [0, 2, 2, -1]
    assert tile_row_start.tolist() == [0, 3, 7, -1]
    assert tile_row_end.tolist() == [3, 7, 8, -1]
    assert ranked.tolist() == [[2, 3, 8], [0, 0, 3], [1, 3, 3]]


ROUTED = [[1, 2], [0, -1]]  # topk_indices that are their own token_index_map


@pytest.mark.parametrize("dense", [False, True], ids=["topk", "dense"])
def test_permuted_probs_example(ops, device, dense):
    lists = ops.index_lists(ints(ROUTED, device), 3)
    assert lists.token_index_map.tolist() == [[1, 2], [0, -1]]
    probs = [[0.9, 0.2, 0.8], [0.6, 0.4, 0.9]] if dense else [[0.2, 0.8], [0.6, 0.4]]
    probs = torch.tensor(probs, device=device)
    want = torch.tensor([0.6, 0.2, 0.8], device=device)
    assert torch.equal(ops.permuted_probs(probs, lists, dense)[:3], want)


@pytest.mark.parametrize("dense", [False, True], ids=["topk", "dense"])
def test_grad_probs_example(ops, device, dense):
    lists = ops.index_lists(ints(ROUTED, device), 3)
    grad = torch.tensor([5.0, 6.0, 7.0, float("nan")], device=device)
    probs = torch.rand(2, 3 if dense else 2, device=device)
    want = [[0, 6, 7], [5, 0, 0]] if dense else [[6, 7], [5, 0]]
    assert ops.grad_probs(grad, lists, probs, dense).tolist() == want


def test_ranks_example(ops, device):
    routing_map = ints([[0, 0, 1, 1], [0, 1, 1, 0]], device).bool()
    ranks, pairs = ops.ranks_from_routing_map(routing_map, 2, 2)
    assert ranks.tolist() == [[1, -1], [0, 1]] and pairs.sum(1).tolist() == [1, 3]
    assert ops.ranks_from_routing_map(routing_map, 2, 1)[0].tolist() == [[1], [0]]


@pytest.mark.parametrize("scan", [1, 4], ids=["one at a time", "all at once"])
def test_split_sizes_example(ops, device, scan, monkeypatch):
    monkeypatch.setattr("moeblaze_megatron.ops.ranks.SCAN", scan)
    sizes = torch.empty(1, 3, dtype=torch.int64, device=device)
    assert ops.split_sizes(ints([2], device), ints([[1, 3]], device), 10, sizes) is sizes
    assert sizes.tolist() == [[2, 4, 10]]


def test_pack_routing_and_back_example(ops, device):
    routing_map = ints([[0, 1, 1, 1]], device).bool()
    lists = ops.index_lists(ints([[0, 1]], device), 2)
    assert lists.token_index_map.tolist() == [[0, 1]]
    probs = torch.tensor([[0.0, 7.0, 8.0, 9.0]], device=device)
    wire = ops.pack_routing(routing_map, probs, lists, 2)
    assert wire.dtype is torch.uint8
    assert wire[:, :8].contiguous().view(torch.float32).tolist() == [[7, 0], [8, 9]]
    ids = wire[:, 8:].contiguous().view(torch.int16)
    assert ids.tolist() == [[1, -1], [0, 1]]
    grad, out = torch.tensor([[5.0, 6.0], [7.0, 8.0]], device=device), torch.empty_like(probs)
    assert ops.unpack_grad_probs(grad, ids, lists, out) is out
    assert out.tolist() == [[0, 5, 7, 8]]


def test_combine_example(ops, device):
    lists = ops.index_lists(ints(ROUTED, device), 3)
    lists = replace(lists, token_index_map=ints([[1, 3], [0, -1]], device))
    rows = torch.tensor([[10.0], [20.0], [30.0], [40.0]], device=device)
    assert ops.combine(rows, lists, rows.new_empty(2, 1), 0).tolist() == [[60], [10]]
    biased = replace(lists, token_expert_indices=ints([[0, 1], [0, -1]], device))
    bias, probs = torch.tensor([[2.0], [4.0]], device=device), torch.full((4,), 0.5, device=device)
    out = ops.combine(rows, biased, rows.new_empty(2, 1), 0, bias, probs)
    assert out.tolist() == [[63], [11]]
    wide = ops.combine(rows, lists, rows.new_full((2, 3), 7.0), 1)
    assert wide.tolist() == [[7, 60, 7], [7, 10, 7]], "only its own column"


def test_combine_without_rows(ops, device):
    """What a rank gets back whose tokens have all been dropped."""
    lists = ops.index_lists(ints([[-1, -1]] * 3, device), 3)
    rows = torch.empty(0, 16, device=device)
    assert not ops.combine(rows, lists, rows.new_empty(3, 16), 0).any()


def test_gather_example(ops, device):
    lists = ops.index_lists(ints([[1, -1], [-1, -1], [0, 2]], device), 3)
    assert lists.expert_token_indices[:3].tolist() == [2, 0, 2]
    x = torch.tensor([[10.0], [20.0], [30.0]], device=device)
    out = ops.gather(x, lists, x.new_full((4, 1), 7.0), 0)
    assert out.flatten().tolist() == [30, 10, 30, 7], "rows past R are left alone"
    x = torch.cat([x - 1, x], dim=1)
    assert ops.gather(x, lists, x.new_empty(3, 1), 1).flatten().tolist() == [30, 10, 30]


def one_row(ops, device) -> IndexLists:
    return ops.index_lists(ints([[0]], device), 1)


def test_activation_backward_example(ops, device):
    fc1_output, grad_act, prob = (torch.tensor([[v]], device=device) for v in (3.0, 2.0, 0.5))
    grad, act, grad_prob = ops.activation_backward(
        grad_act, fc1_output, prob[0], one_row(ops, device), Activation("squared_relu")
    )
    assert (act.item(), grad.item(), grad_prob.item()) == (4.5, 6, 18)
    assert grad is fc1_output and act is grad_act, "in place"


def test_swiglu_example(ops, device):
    """gate 0, up 3 -> 0; the slope of silu there is a half."""
    fc1_output, grad_act = torch.tensor([[0.0, 3.0]]), torch.tensor([[2.0]])
    grad, act, grad_prob = ops.activation_backward(
        grad_act.to(device),
        fc1_output.to(device),
        torch.tensor([1.0], device=device),
        one_row(ops, device),
        Activation("swiglu"),
    )
    assert (grad.tolist(), act.item(), grad_prob.item()) == ([[3, 0]], 0, 0)


@pytest.mark.parametrize(
    ("gate", "up", "factor"), [(9, 9, 8), (9, -9, -6), (7, 7, 8), (7, -7, -6), (-9, 0, 1)]
)
def test_clamp_and_offset_example(ops, device, gate, up, factor):
    """Clamp 7, offset 1: gradients pass up to 7 itself, and a gate has no lower bound."""
    fc1_output = torch.tensor([[gate, up]], dtype=torch.float32, device=device)
    value, slope = torch.autograd.functional.vjp(F.silu, torch.tensor(float(min(gate, 7))))
    grad, act, grad_prob = ops.activation_backward(
        torch.ones(1, 1, device=device),
        fc1_output,
        torch.ones(1, device=device),
        one_row(ops, device),
        Activation("swiglu", clamp=7.0, offset=1.0),
    )
    want = torch.tensor([[slope * factor * (gate <= 7), value * (abs(up) <= 7)]], device=device)
    torch.testing.assert_close(grad, want)
    torch.testing.assert_close(act, value.view(1, 1).to(device) * factor)
    assert grad_prob.item() == act.item()


def test_bias_examples(ops, device):
    """The gradient of a bias by rows and by tokens, and of the probabilities."""
    lists = ops.index_lists(ints([[0], [0], [1]], device), 2)
    grad, bias = torch.tensor([[1.0], [2.0], [3.0]], device=device), torch.zeros(2, 1).to(device)
    assert ops.bias_grad(grad, lists, bias).flatten().tolist() == [3, 3]
    probs = torch.full((3,), 2.0, device=device)
    assert ops.bias_grad(grad, lists, bias, probs).flatten().tolist() == [6, 6]
    empty = ops.index_lists(ints([[0], [-1], [-1]], device), 2)  # token 0 alone; row 1 not written
    probs[1:] = grad[1:] = float("nan")
    assert ops.bias_grad(grad, empty, bias, probs).flatten().tolist() == [2, 0]

    lists = replace(
        ops.index_lists(ints([[0, 1]], device), 2), token_index_map=ints([[1, 0]], device)
    )
    bias, grad_output = torch.tensor([[5.0], [7.0]]).to(device), torch.tensor([[2.0]]).to(device)
    grad = torch.zeros(2, device=device)
    assert ops.bias_grad_probs(grad_output, lists, bias, grad) is grad
    assert grad.tolist() == [14, 10]
    ops.bias_grad_probs(grad_output, lists, bias, grad)
    assert grad.tolist() == [28, 20], "added to what is there"


@pytest.mark.parametrize("save", [True, False])
def test_fc1_example(ops, device, save):
    x, weight = column([3.0], device), scalars([2.0], device)
    prob = torch.tensor([0.5], device=device)
    fc1_output, act = ops.fc1(
        x, weight, prob, one_row(ops, device), Activation("squared_relu"), save
    )
    assert torch.equal(act, column([18.0], device))
    assert torch.equal(fc1_output, column([6.0], device)) if save else fc1_output is None


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("gather", [True, False])
def test_rows_gemm_example(ops, device, gather, transposed):
    lists = ops.index_lists(ints([[-1], [0], [1]] if gather else [[0], [1]], device), 2)
    a = column([7.0, 2.0, 3.0] if gather else [2.0, 3.0], device)
    weight = scalars([10.0, 100.0], device)
    out = a.new_empty(lists.max_rows, 16)
    ops.rows_gemm(a, weight, lists, out, 0, gather=gather, transposed=transposed)
    assert torch.equal(out[:2], column([20.0, 300.0], device))


@pytest.mark.parametrize("gather", [True, False])
def test_fc2_dgrad_example(ops, device, gather):
    lists = ops.index_lists(ints([[-1], [0]] if gather else [[0]], device), 1)
    grad_output = column([7.0, 1.0] if gather else [1.0], device)
    fc1_output, prob = column([3.0] * lists.max_rows, device), torch.tensor([0.5], device=device)
    activation = Activation("squared_relu")
    grad, act, grad_prob = ops.fc2_dgrad(
        grad_output, scalars([2.0], device), fc1_output, prob, lists, activation, gather
    )
    assert torch.equal(grad[:1], column([6.0], device)) and grad is fc1_output
    assert torch.equal(act[:1], column([4.5], device)) and grad_prob[0] == 18


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("gather", [None, "a", "b"])
def test_wgrad_example(ops, device, gather, accumulate):
    """And an expert without rows."""
    topk_indices = ints([[1], [0], [0]], device)  # row -> token: 1, 2, 0
    lists = ops.index_lists(topk_indices, 3)
    assert lists.expert_token_offsets.tolist() == [0, 2, 3, 3]
    a, b = ([3.0, 1.0, 2.0] if gather == "a" else [1.0, 2.0, 3.0]), [4.0, 5.0, 6.0]
    b = [6.0, 4.0, 5.0] if gather == "b" else b
    out = torch.full((3, 16, 16), 0.5 if accumulate else float("nan"), device=device)
    want = scalars([14.0, 18.0, 0.0], device) + (0.5 if accumulate else 0)
    ops.wgrad(column(a, device), column(b, device), lists, out, accumulate, gather)
    assert torch.equal(out, want)


def test_design_example(ops, device):
    """The worked example of docs/design.md."""
    lists = ops.index_lists(ints([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]], device), 4)
    assert lists.tokens_per_expert.tolist() == [3, 2, 2, 3]
    assert lists.expert_token_offsets.tolist() == [0, 3, 5, 7, 10]
    assert lists.expert_token_indices.tolist() == [1, 2, 4, 1, 3, 0, 3, 0, 2, 4]
    assert lists.token_expert_indices.flatten().tolist() == [2, 3, 0, 1, 0, 3, 1, 2, 0, 3]
    assert lists.token_index_map.flatten().tolist() == [5, 7, 0, 3, 1, 8, 4, 6, 2, 9]
    assert lists.ranked_experts.flatten().tolist() == [0, 0, 3, 3, 7, 10, 1, 3, 5, 2, 5, 7]


class Routing(NamedTuple):
    E: int
    K: int
    why: str


ROUTINGS = [
    Routing(1, 1, "one expert"),
    Routing(2, 2, "no more experts than slots"),
    Routing(3, 2, "experts not a power of two"),
    Routing(5, 32, "most slots empty"),
    Routing(16, 4, "16 experts"),
    Routing(60, 6, "60 experts"),
    Routing(96, 8, "96 experts"),
    Routing(160, 6, "160 experts"),
    Routing(256, 8, "256 experts"),
    Routing(1024, 32, "the most of both"),
]


def draw(E: int, K: int, T: int) -> torch.Tensor:
    """topk_indices [T, K]: distinct experts in any order, -1 between them; the last gets none."""
    g = torch.Generator().manual_seed(1000 * E + T)
    ids = torch.full((T, K), -1, dtype=torch.int32)
    skew = torch.randn(E, generator=g)
    for t in range(T):
        experts = (torch.randn(E, generator=g) + skew).argsort()
        experts = experts[experts < max(1, E - 1)][:K]
        slots = torch.randperm(K, generator=g)[: len(experts)]
        ids[t, slots] = experts.int()
    return torch.where(torch.rand(T, K, generator=g) < 0.1, -1, ids)


def check_lists(lists: IndexLists, ids: list[list[int]], E: int) -> None:
    """Against a loop over experts, tokens and slots."""
    tokens, offsets = [], [0]
    token_index_map = [[-1] * len(row) for row in ids]
    places = [[] for _ in range(E)]
    for t, row in enumerate(ids):
        for k, e in enumerate(row):
            if 0 <= e < E:
                places[e].append((t, k))
    for place in places:
        for t, k in place:
            token_index_map[t][k] = len(tokens)
            tokens.append(t)
        offsets.append(len(tokens))
    tiles = [
        (e, row, min(row + BLOCK_R, offsets[e + 1]))
        for e in range(E)
        for row in range(offsets[e], offsets[e + 1], BLOCK_R)
    ]
    bound = max_tiles(sum(map(len, ids)), E)
    assert len(tiles) <= bound == lists.num_tiles
    tiles += [(-1, -1, -1)] * (bound - len(tiles))

    assert all(value.dtype is torch.int32 for value in vars(lists).values())
    assert lists.tokens_per_expert.tolist() == [len(place) for place in places]
    assert lists.expert_token_offsets.tolist() == offsets
    assert lists.expert_token_indices[: len(tokens)].tolist() == tokens
    assert lists.expert_token_indices.numel() == lists.max_rows
    assert lists.token_expert_indices.tolist() == ids
    assert lists.token_index_map.tolist() == token_index_map
    found = lists.tile_expert, lists.tile_row_start, lists.tile_row_end
    assert list(zip(*(values.tolist() for values in found), strict=True)) == tiles
    ranked = sorted(range(E), key=lambda e: -len(places[e]))
    assert lists.ranked_experts.tolist() == [[e, offsets[e], offsets[e + 1]] for e in ranked]


@pytest.mark.parametrize("T", [0, 1, 3, 127, 129])
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.why.replace(" ", "-"))
def test_lists_by_brute_force(ops, device, routing, T):
    E, K, _ = routing
    ids = draw(E, K, T).to(device)
    check_lists(ops.index_lists(ids, E), ids.tolist(), E)

    routing_map = torch.zeros(T, E, dtype=torch.bool, device=device)
    token, k = (ids >= 0).nonzero(as_tuple=True)
    routing_map[token, ids[token, k].long()] = True
    ascending = [sorted(e for e in row if e >= 0) for row in ids.tolist()]
    got = ops.topk_indices_from_routing_map(routing_map, K)
    assert got.dtype is torch.int32 and tuple(got.shape) == (T, K)
    assert got.tolist() == [row + [-1] * (K - len(row)) for row in ascending]


def test_experts_past_topk_are_left_out(ops, device):
    everything = torch.ones(3, 200, dtype=torch.bool, device=device)
    everything[1, :150] = False
    got = ops.topk_indices_from_routing_map(everything, 2)
    assert got.tolist() == [[0, 1], [150, 151], [0, 1]]


class Between(NamedTuple):
    EP: int
    E: int
    K: int
    why: str


BETWEEN = [
    Between(1, 5, 3, "one rank; no lists"),
    Between(2, 3, 4, "k is E; odd"),
    Between(3, 8, 2, "ranks not a power of two"),
    Between(4, 1, 2, "one expert a rank"),
    Between(2, 150, 5, "more experts of a rank than a tile"),
    Between(8, 4, 32, "most slots empty"),
    Between(32, 32, 32, "the most experts and top-k"),
    Between(4, 4, 1, "one expert a token"),
]


@pytest.mark.parametrize(
    ("T", "dtype"),
    [
        (0, torch.float32),
        (1, torch.float32),
        (67, torch.float32),
        (67, torch.float64),
        (67, torch.bfloat16),
        (67, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", BETWEEN, ids=lambda case: case.why.replace(" ", "-"))
def test_routing_between_ranks_by_brute_force(ops, device, case, T, dtype):
    """Nothing for rank 1; bits of probs, NaN among them, as they are."""
    EP, E, K, _ = case
    k, g = min(K, E), torch.Generator().manual_seed(T)
    routing_map = torch.zeros(T, EP * E + 1, dtype=torch.bool)
    routing_map = routing_map.scatter_(1, draw(EP * E, K, T).long() % (EP * E + 1), True)[:, :-1]
    routing_map[:, E : 2 * E] = False
    probs = torch.randn(T, EP * E, generator=g).to(dtype)
    probs[torch.rand(probs.shape, generator=g) < 0.1] = float("nan")
    nowhere, here = [[-1] * k, [0.0] * k], [(d, t) for d in range(EP) for t in range(T)]
    rows = [(t, d, routing_map[t, d * E : (d + 1) * E].nonzero().flatten()) for d, t in here]
    rows = [row for row in rows if len(row[2]) or EP == 1]
    ids, sent = (torch.tensor([value] * len(rows)).view(-1, k) for value in nowhere)
    sent, grad = sent.to(dtype), torch.full(sent.shape, float("nan"), dtype=dtype)
    expected = torch.zeros_like(probs)
    for r, (t, d, experts) in enumerate(rows):
        columns, n = d * E + experts, len(experts)
        ids[r, :n], sent[r, :n] = experts, probs[t, columns]
        grad[r, :n] = expected[t, columns] = torch.randn(n, generator=g).to(dtype)

    if K == 1:  # columns of something else, too
        routing_map, probs = (tensor.t().contiguous().t() for tensor in (routing_map, probs))
    ranks, pairs = ops.ranks_from_routing_map(routing_map.to(device), EP, K)
    per_rank = routing_map.view(T, EP, E)
    assert pairs.sum(1).tolist() == per_rank.sum((0, 2)).tolist()
    ascending = [row.nonzero().flatten().tolist() for row in per_rank.any(2)]
    M = min(K, EP)
    assert ranks.dtype is torch.int32 and tuple(ranks.shape) == (T, M)
    assert ranks.tolist() == [row + [-1] * (M - len(row)) for row in ascending]
    lists = None if EP == 1 else ops.index_lists(ranks, EP)
    wire = ops.pack_routing(routing_map.to(device), probs.to(device), lists, K)
    want = torch.cat([sent.view(torch.uint8), ids.short().view(torch.uint8)], 1)
    assert torch.equal(wire[: len(rows)].cpu(), want)
    out = torch.empty(probs.shape, dtype=dtype, device=device)
    ops.unpack_grad_probs(grad.to(device), ids.short().to(device), lists, out)
    assert torch.equal(out.cpu(), expected)


def test_experts_past_topk_are_not_sent(ops, device):
    everything = torch.ones(2, 12, dtype=torch.bool, device=device)
    ranks, _ = ops.ranks_from_routing_map(everything, 3, 2)
    assert ranks.tolist() == [[0, 1]] * 2
    probs = torch.arange(24.0, device=device).view(2, 12)
    wire = ops.pack_routing(everything, probs, ops.index_lists(ranks, 3), 2)
    assert wire[:, :8].contiguous().view(torch.float32).tolist() == [
        [0, 1],
        [12, 13],
        [4, 5],
        [16, 17],
    ]
    assert wire[:, 8:].contiguous().view(torch.int16).tolist() == [[0, 1]] * 4


def test_repeated_experts_count_twice(ops, device):
    ids = [[1, 1, 1], [0, 1, 0], [-1, 0, -1]]
    lists = ops.index_lists(ints(ids, device), 2)
    check_lists(lists, ids, 2)
    assert lists.tokens_per_expert.tolist() == [3, 4]
    assert lists.expert_token_indices[:7].tolist() == [1, 1, 2, 0, 0, 0, 1]
    grad = torch.tensor([1.0, 2, 4, 8, 16, 32, 64, 0, 0], device=device)
    probs = torch.rand(3, 2, device=device)
    assert ops.grad_probs(grad, lists, probs, True).tolist() == [[0, 56], [3, 64], [4, 0]]


def test_ids_out_of_range_route_nowhere(ops, device):
    ids = [[0, 3], [-7, 2], [2**31 - 1, -(2**31)]]
    check_lists(ops.index_lists(ints(ids, device), 3), ids, 3)


def test_max_tiles_is_the_maximum():
    """Over every way to spread rows over up to five experts."""
    rows = range(3 * BLOCK_R + 2)
    tiles = [-(-r // BLOCK_R) for r in rows]
    most = tiles
    for E in range(1, 6):
        assert [max_tiles(r, E) for r in rows] == most
        most = [max(tiles[r - rest] + most[rest] for rest in range(r + 1)) for r in rows]


@pytest.mark.parametrize("E", [1, 3, 60])
@pytest.mark.parametrize("extra", [-1, 0, 1, BLOCK_R, BLOCK_R + 1])
def test_tile_bound_is_reached(ops, device, E, extra):
    """One row for each expert, and all the others for the last."""
    rows = max(0, E + extra)
    ids = [[min(row, E - 1)] for row in range(rows)]
    lists = ops.index_lists(ints(ids, device).view(rows, 1), E)
    check_lists(lists, ids, E)
    assert (lists.tile_expert >= 0).all()
