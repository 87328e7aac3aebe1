"""fc1_output kept in MXFP8: the format, what is saved and freed, and what it costs the gradients.

R routed rows, W columns of fc1_output.
"""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from cases import (
    GPT_OSS,
    LARGE,
    Case,
    captured,
    expected,
    layer_of,
    leaves_of,
    operands,
    routing,
    run,
)

from moeblaze_megatron import IndexLists, index_lists_from_topk, moeblaze_experts
from moeblaze_megatron.ops import experts, hopper, kernels, reference
from moeblaze_megatron.ops.activation import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("nan_filled")

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
NEAREST = 2.0**-4  # e4m3 has 3 bits of mantissa: half a step is at most 1/16 of the value
SUBNORMAL = 2.0**-10  # half a step below 2^-6


@pytest.fixture(params=[kernels, reference], ids=["triton", "eager"])
def ops(request):
    return request.param


def lists_of(used: int, unused: int, device: str) -> IndexLists:
    """Index lists of `used` rows in buffers of `used + unused`."""
    ids = torch.tensor([0] * used + [-1] * unused, dtype=torch.int32, device=device)
    return index_lists_from_topk(ids[:, None], 1)


def test_example(ops, device):
    x = torch.tensor([[900, 3, -0.1]], device=device)
    lists = lists_of(1, 0, device)
    values, scales = ops.quantize(x, lists)
    assert scales.dtype is E8M0 and scales.float().tolist() == [[4]]
    assert values.dtype is E4M3 and values.float().tolist() == [[224, 0.75, -0.025390625]]
    back = ops.dequantize(values, scales, lists, x.dtype)
    assert back.tolist() == [[896, 3, -0.1015625]]


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(448, 1), (-449, 2), (0, 2**-108), (float("nan"), 2**-108), (float("inf"), 2**-108)],
)
def test_scale(ops, device, largest, scale):
    """The least power of two that leaves nothing above 448, for what is neither NaN nor Inf."""
    x = torch.tensor([[largest, 448 * 2**-108]], dtype=torch.float32, device=device)
    values, scales = ops.quantize(x, lists_of(1, 0, device))
    assert scales.float().item() == scale
    assert values.isnan().tolist() == [[not abs(largest) < float("inf"), False]]


def test_zeros_and_the_smallest(ops, device):
    x = torch.tensor([[0.0, -0.0], [2.0**-126, 2.0**-149]], device=device)
    lists = lists_of(2, 0, device)
    values, scales = ops.quantize(x, lists)
    assert (scales.float() == 2.0**-126).all()
    assert ops.dequantize(values, scales, lists, x.dtype).tolist() == [[0, 0], [2.0**-126, 0]]


@pytest.mark.parametrize("W", [32, 40, 8, 1], ids="W {}".format)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_value(device, dtype, W):
    """All of the dtype, NaN and Inf too, in blocks of any company: twin and bound agree."""
    g = torch.Generator().manual_seed(W)
    bits = torch.arange(-(2**15), 2**15)[torch.randperm(2**16, generator=g)]
    if W < 32:  # a program for every few values takes the interpreter long
        bits = bits[: 2**11]
    x = bits[: len(bits) // W * W].to(torch.int16).view(dtype).view(-1, W).to(device)
    lists = lists_of(x.shape[0], 3, device)
    x = torch.cat([x, torch.full_like(x[:3], float("nan"))])
    values, scales = kernels.quantize(x, lists)
    want_values, want_scales = reference.quantize(x, lists)
    used = slice(0, x.shape[0] - 3)
    assert torch.equal(scales.view(torch.uint8), want_scales.view(torch.uint8))
    torch.testing.assert_close(values.float(), want_values.float(), rtol=0, atol=0, equal_nan=True)
    back = kernels.dequantize(values, scales, lists, dtype)
    want_back = reference.dequantize(want_values, want_scales, lists, dtype)
    torch.testing.assert_close(back, want_back, rtol=0, atol=0, equal_nan=True)

    assert back[used.stop :].isnan().all() and values[used.stop :].isnan().all(), "rows not in use"
    x, back = x[used].double(), back[used].double()
    assert torch.equal(back.isfinite(), x.isfinite()) and not back.isinf().any()
    scale = scales[used].double().repeat_interleave(32, 1)[:, :W]
    bound = torch.maximum(x.abs() * NEAREST, scale * SUBNORMAL)
    finite = x.isfinite()
    assert ((back - x).abs() <= bound)[finite].all()


def test_every_code_comes_back(ops, device):
    """Dequantisation is exact, so quantising again changes nothing."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(8, 32)
    codes[:, 0] = 0x7E  # 448: the scale is to stay
    lists = lists_of(8, 0, device)
    scales = torch.full((8, 1), 130, dtype=torch.uint8, device=device).view(E8M0)
    back = ops.dequantize(codes.view(E4M3), scales, lists, torch.bfloat16)
    want = codes.view(E4M3).float() * 8
    torch.testing.assert_close(back.float(), want, rtol=0, atol=0, equal_nan=True)
    again, same = ops.quantize(back, lists)
    assert torch.equal(same.view(torch.uint8), scales.view(torch.uint8))
    torch.testing.assert_close(
        again.float(), codes.view(E4M3).float(), rtol=0, atol=0, equal_nan=True
    )


def rounding_fc1(fc1, *args, **kwargs):
    """fc1 whose saved fc1_output, not its act, is rounded as the format rounds."""
    fc1_output, act = fc1(*args, **kwargs)
    lists = args[3]
    rounded = reference.quantize(fc1_output, lists)
    return reference.dequantize(*rounded, lists, fc1_output.dtype), act


def check(case: Case, device: str, dtype: torch.dtype, **options) -> dict[str, torch.Tensor]:
    """Bit for bit the default's output, and the default's gradients at the rounded fc1_output."""
    ids, probs = routing(case, device)
    tensors = operands(case, device, dtype)
    got = run(layer_of(ids, case.activation, fp8_store=True, **options), tensors, probs)
    ops = experts.kernels_for(tensors["x"])
    with patch.object(ops, "fc1", partial(rounding_fc1, ops.fc1)):
        want = run(layer_of(ids, case.activation, **options), tensors, probs)
    for name in want:
        assert torch.equal(got[name], want[name]), name
    return got


CASES = [
    Case(40, 64, 32, 4, 2, "whole and partial tiles"),
    Case(0, 32, 32, 4, 2, "no tokens"),
    Case(12, 32, 32, 4, 2, "every slot dropped", dropped=1.0),
    Case(20, 100, 36, 4, 2, "blocks across gate and up, and padding", dropped=0.2),
    Case(20, 32, 40, 4, 2, "silu", activation="silu"),
    Case(20, 32, 40, 4, 2, "squared relu", activation="squared_relu"),
    Case(20, 32, 40, 4, 2, "clamp, offset and biases", activation=GPT_OSS, bias=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_small(case, device):
    check(case, device, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype, device):
    check(Case(20, 64, 48, 4, 2, "dtypes", dropped=0.2), device, dtype, workspace_bytes=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case, dtype):
    """The same bits again, too."""
    first, second = (check(case, "cuda", dtype) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.gpu
def test_plain_kernels_on_any_gpu(monkeypatch):
    monkeypatch.setattr(hopper, "fits", lambda tensor: False)
    check(LARGE[1], "cuda", torch.bfloat16)


class Rounded(torch.autograd.Function):
    """The rounded value, in eager torch; the gradient passes as it is."""

    @staticmethod
    def forward(ctx, x):
        lists = lists_of(x.shape[0], 0, x.device)
        return reference.dequantize(*reference.quantize(x, lists), lists, x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


def errors(got: dict, want: dict) -> dict[str, float]:
    """Relative norm error of every gradient."""
    return {
        name: ((got[name].double() - grad.double()).norm() / grad.double().norm()).item()
        for name, grad in want.items()
        if name != "output"
    }


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient_error(activation, device, capsys, monkeypatch):
    """Against the default: not over twice what eager torch, in fp64, says that rounding does."""
    case = Case(4096, 1024, 768, 16, 4, "gradient error on a GPU", activation=activation)
    if device == "cpu":  # the eager twins, which do not take the interpreter's time
        case = Case(512, 256, 192, 8, 2, "gradient error", activation=activation)
        monkeypatch.setattr(experts, "kernels_for", lambda tensor: reference)
    ids, probs = routing(case, device)
    tensors = operands(case, device, torch.bfloat16)
    default = run(layer_of(ids, activation), tensors, probs)
    got = errors(run(layer_of(ids, activation, fp8_store=True), tensors, probs), default)

    exact = expected(case, tensors, ids, probs, torch.float64)
    activate = reference.activate
    with patch.object(reference, "activate", lambda v, name: activate(Rounded.apply(v), name)):
        eager = errors(expected(case, tensors, ids, probs, torch.float64), exact)
    with capsys.disabled():
        print(f"\n{activation:13}", "  ".join(f"{n} {error:.4f}" for n, error in got.items()))
    for name, error in got.items():
        assert error <= 2 * eager[name], f"{name}: off by {error:.3e}, eager by {eager[name]:.3e}"


def test_saves_half_and_frees_it(device):
    """A byte an element and one a block of 32, given back before backward reaches its peak."""
    case = Case(40, 64, 40, 4, 2, "saved bytes")
    ids, probs = routing(case, device)
    tensors = operands(case, device, torch.bfloat16)
    args = leaves_of(tensors)
    given, saved = {a.data_ptr() for a in (*args, probs)}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: (saved.append(s), s)[1], lambda s: s):
        output = layer_of(ids, case.activation, fp8_store=True)(*args, probs)
    R, W = case.T * case.K, 2 * case.F
    probs_of_rows, values, scales = (s for s in saved if s.data_ptr() not in given)
    assert (probs_of_rows.shape, probs_of_rows.nbytes) == ((R,), 4 * R)
    assert (values.shape, values.dtype, values.nbytes) == ((R, W), E4M3, R * W)
    assert (scales.shape, scales.dtype, scales.nbytes) == ((R, 3), E8M0, R * 3)

    ops, sizes = experts.kernels_for(output), []
    rows_gemm = ops.rows_gemm

    def spy(*gemm, **options):
        sizes.append([s.untyped_storage().nbytes() for s in (values, scales)])
        return rows_gemm(*gemm, **options)

    with patch.object(ops, "rows_gemm", spy):
        output.backward(tensors["grad_output"])
    assert sizes and not any(map(any, sizes))


def test_inference_stores_nothing(device):
    case = Case(20, 32, 32, 4, 2, "inference")
    ids, probs = routing(case, device)
    tensors = operands(case, device, torch.float32)
    args = leaves_of(tensors)
    with torch.no_grad(), patch.object(experts.kernels_for(args[0]), "quantize", None):
        output = layer_of(ids, case.activation, fp8_store=True)(*args, probs)
    assert torch.equal(output, layer_of(ids, case.activation)(*args, probs))


def test_nan_stays_visible(device):
    """NaN in the same gradients as by default."""
    case = Case(20, 32, 40, 4, 2, "nan")
    ids, probs = routing(case, device)
    tensors = operands(case, device, torch.float32)
    tensors["x"][5, 7] = float("nan")
    results = [
        run(layer_of(ids, case.activation, fp8_store=store), tensors, probs)
        for store in (False, True)
    ]
    for name, want in results[0].items():
        assert want.isnan().any() and torch.equal(results[1][name].isnan(), want.isnan()), name


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(device, use_reentrant):
    """Freeing what was saved leaves recomputation as it is."""
    from torch.utils.checkpoint import checkpoint

    case = Case(20, 32, 32, 4, 2, "recompute")
    ids, probs = routing(case, device)
    tensors = operands(case, device, torch.float32)
    layer = layer_of(ids, case.activation, fp8_store=True)
    got = run(lambda *args: checkpoint(layer, *args, use_reentrant=use_reentrant), tensors, probs)
    for name, want in run(layer, tensors, probs).items():
        assert torch.equal(got[name], want), name


def test_not_with_recompute_fc1(device):
    case = Case(8, 32, 32, 4, 2, "both")
    ids, probs = routing(case, device)
    layer = layer_of(ids, case.activation, fp8_store=True, recompute_fc1=True)
    with pytest.raises(ValueError, match="recompute_fc1=True saves no fc1_output that fp8_store="):
        run(layer, operands(case, device, torch.bfloat16), probs)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_holds_half_beneath_the_same_peak(activation):
    """Rows many beside the weights: the two copies of fc1_output would show in the peak."""
    case = Case(16384, 512, 1024, 4, 4, "memory", activation=activation)
    ids, probs = routing(case, "cuda")
    tensors = operands(case, "cuda", torch.bfloat16)
    args = leaves_of(tensors)
    lists = index_lists_from_topk(ids, case.E)
    torch.use_deterministic_algorithms(False)
    held, peak = [], []
    for store in (False, True) * 2:  # twice: the first run of each compiles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = moeblaze_experts(
            *args, index_lists=lists, topk_probs=probs, activation=activation, fp8_store=store
        )
        held.append(torch.cuda.memory_allocated() - before)
        output.backward(tensors["grad_output"])
        peak.append(torch.cuda.max_memory_allocated() - before)
        del output
        for leaf in args:
            leaf.grad = None
    R, W = case.T * case.K, args[1].shape[1]
    assert held[2] - held[3] == R * W * 2 - R * (W + W // 32)
    assert peak[3] <= peak[2]


@pytest.mark.gpu
def test_cuda_graph_replays_with_other_routing():
    """Freed and allocated inside the graph's own pool; the host waits for nothing."""
    case = Case(2000, 256, 128, 8, 2, "captured", dropped=0.1)
    tensors = operands(case, "cuda", torch.bfloat16)
    leaves = leaves_of(tensors)
    ids, probs = routing(case, "cuda")
    torch.use_deterministic_algorithms(False)

    def step():
        output = layer_of(ids, case.activation, fp8_store=True)(*leaves, probs)
        return (output, *torch.autograd.grad(output, leaves, tensors["grad_output"]))

    graph, results = captured(step)
    for old, new in zip((ids, probs), routing(case, "cuda", 1), strict=True):
        old.copy_(new)
    graph.replay()
    for got, want in zip(results, step(), strict=True):
        assert torch.equal(got, want)
