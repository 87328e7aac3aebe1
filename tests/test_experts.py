"""The operator: output and every gradient against plain torch, what it saves, what it refuses."""

import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch
from cases import (
    GPT_OSS,
    LARGE,
    SMALL,
    Case,
    assert_as_close_as_torch,
    captured,
    expected,
    layer_of,
    leaves_of,
    operands,
    routing,
    run,
)

from moeblaze_megatron import (
    Activation,
    index_lists_from_routing_map,
    index_lists_from_topk,
    moeblaze_experts,
)
from moeblaze_megatron.ops import experts, hopper, reference, table
from moeblaze_megatron.ops.experts import ID_DTYPES

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture
def copied_wgrads():
    """Weight gradients read a copy of the rows, however narrow their other operand is."""
    with table.override("copy", table.Copy(ffn=4096, width=0, slices=4)):
        yield


def check(case, device, dtype, **options):
    draws = []
    for seed in range(case.draws):
        ids, probs = routing(case, device, seed)
        tensors = operands(case, device, dtype, seed)
        got = run(layer_of(ids, case.activation, **options), tensors, probs)
        eager, exact = (expected(case, tensors, ids, probs, to) for to in (dtype, torch.float64))
        draws.append((got, eager, exact))
        counts = torch.bincount(ids[ids >= 0].long(), minlength=case.E)
        for name in got:
            if name.endswith(("weight", "bias")):
                assert (got[name][counts == 0] == 0).all(), f"{name} of an expert without tokens"
    together = [
        {name: torch.stack([result[name] for result in results]) for name in results[0]}
        for results in zip(*draws, strict=True)
    ]
    assert_as_close_as_torch(*together)
    return draws[0][0]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small(case, dtype, device, nan_filled):
    check(case, device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case, dtype, nan_filled):
    check(case, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_plain_kernels_on_any_gpu(case, dtype, nan_filled, monkeypatch):
    """The kernels that other GPUs run, on Hopper too."""
    monkeypatch.setattr(hopper, "fits", lambda tensor: False)
    check(case, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("workspace_bytes", [2**30, 1])
def test_column_slices_at_size(workspace_bytes, nan_filled, copied_wgrads):
    """In one piece, and in slices of 128 columns with dW gathered inside its kernel."""
    case = Case(3000, 1024, 384, 6, 3, "sliced")
    want = check(case, "cuda", torch.bfloat16)
    got = check(case, "cuda", torch.bfloat16, workspace_bytes=workspace_bytes)
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_eager_gradients_are_those_of_autograd(case, monkeypatch):
    """The eager twins, which CPU tensors use, in fp64: the algebra itself."""
    monkeypatch.setattr(experts, "kernels_for", lambda tensor: reference)
    ids, probs = routing(case, "cpu")
    tensors = operands(case, "cpu", torch.float64)
    got = run(layer_of(ids, case.activation), tensors, probs.double())
    for name, want in expected(case, tensors, ids, probs, torch.float64).items():
        torch.testing.assert_close(got[name], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("H", [320, 640])
def test_workspace_slices_change_nothing(H, device, nan_filled, copied_wgrads):
    """Slices of 128 columns, the last one narrower; from five on dW gathers inside its kernel."""
    case = Case(40, H, 48, 4, 2, "column slices")
    whole = check(case, device, torch.float32, workspace_bytes=2**30)
    sliced = check(case, device, torch.float32, workspace_bytes=1)
    for name in whole:
        assert torch.equal(sliced[name], whole[name]), name


def test_copied_rows_change_nothing(device, nan_filled):
    """From a large F on, rows are copied once for both gradients of fc2."""
    case = Case(40, 64, 48, 4, 2, "copies", dropped=0.2)
    if device == "cuda":
        case = Case(3000, 512, 384, 6, 3, "copies at size", dropped=0.2)
    want = check(case, device, torch.bfloat16)
    with table.override("copy", table.Copy(ffn=0, width=0, slices=4)):
        got = check(case, device, torch.bfloat16, workspace_bytes=2**30)
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_repeats_bitwise(device):
    case = SMALL[0] if device == "cpu" else LARGE[0]
    first, second = (check(case, device, torch.bfloat16) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_dense_probs_and_routing_map(device, probs_dtype, nan_filled):
    """Megatron's router form equals the top-k form; the gradient is dense, 0 off the map."""
    case = Case(40, 32, 32, 6, 3, "dense form", dropped=0.2)
    ids, topk_probs = routing(case, device)
    tensors = operands(case, device, torch.float32)
    valid = ids >= 0
    token = torch.arange(case.T, device=device)[:, None].expand_as(ids)[valid]
    column = ids[valid].long()
    routing_map = torch.zeros(case.T, case.E, dtype=torch.bool, device=device)
    routing_map[token, column] = True
    dense = torch.rand(case.T, case.E, device=device).to(probs_dtype)  # off the map: to be ignored
    dense[token, column] = topk_probs[valid].to(probs_dtype)
    args = (tensors["x"], tensors["fc1_weight"], tensors["fc2_weight"])

    dense.requires_grad_()
    out = moeblaze_experts(*args, probs=dense, routing_map=routing_map, topk=case.K)
    (grad,) = torch.autograd.grad(out, dense, tensors["grad_output"])
    topk_probs = topk_probs.to(probs_dtype).requires_grad_()
    want = moeblaze_experts(*args, topk_indices=ids, topk_probs=topk_probs)
    (topk_grad,) = torch.autograd.grad(want, topk_probs, tensors["grad_output"])
    want_grad = torch.zeros_like(dense).index_put_((token, column), topk_grad[valid])

    torch.testing.assert_close(out, want)  # experts of a token are added in another order
    assert torch.equal(grad, want_grad) and grad.dtype is probs_dtype
    lists = index_lists_from_routing_map(routing_map, case.K)
    again = moeblaze_experts(*args, probs=dense, index_lists=lists)
    assert torch.equal(again, out)


def test_a_selected_probability_of_zero_keeps_its_row(device):
    """The map decides, not the probabilities: a zero prob has a gradient."""
    x, w1, w2 = torch.ones(1, 16), torch.ones(2, 32, 16), torch.ones(2, 16, 16)
    x, w1, w2 = (t.to(device) for t in (x, w1, w2))
    probs = torch.tensor([[0.0, 1.0]], device=device, requires_grad=True)
    chosen = torch.tensor([[True, False]], device=device)
    out = moeblaze_experts(x, w1, w2, probs=probs, routing_map=chosen, topk=1)
    out.sum().backward()
    assert (out == 0).all() and probs.grad[0, 0] > 0 and probs.grad[0, 1] == 0


def test_saves_x_fc1_output_and_index_lists_only(device):
    case = Case(40, 64, 32, 4, 2, "saved bytes")
    ids, probs = routing(case, device)
    t = operands(case, device, torch.bfloat16)
    leaves = {name: t[name].requires_grad_() for name in ("x", "fc1_weight", "fc2_weight")}
    topk_probs = probs.requires_grad_()
    lists = index_lists_from_topk(ids, case.E)
    given = {t.data_ptr() for t in (*leaves.values(), topk_probs)}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda s: s):
        moeblaze_experts(*leaves.values(), topk_indices=ids, topk_probs=topk_probs)
    new = [s for s in saved if s.data_ptr() not in given]
    R = case.T * case.K
    assert sorted(tuple(s.shape) for s in new) == sorted([(R,), (R, 2 * case.F)])
    assert sum(s.nbytes for s in new) == R * (2 * case.F * 2 + 4)  # fc1_output bf16, probs fp32
    held = [v for v in vars(lists).values() if v is not ids]
    per_pair = sum(v.nbytes for v in held if v.shape[0] >= case.T)
    assert per_pair <= 12 * R, "index lists: 4 bytes a row, 4 a pair, and the given ids"


@pytest.mark.parametrize("bias", [False, True])
def test_recompute_fc1(device, bias, nan_filled):
    """Saves x, routing and probabilities only; the same results, bit for bit."""
    activation = GPT_OSS if bias else "swiglu"
    case = Case(40, 64, 48, 4, 2, "recompute fc1", activation, bias, dropped=0.2)
    want = check(case, device, torch.bfloat16)
    got = check(case, device, torch.bfloat16, recompute_fc1=True)
    for name in want:
        assert torch.equal(got[name], want[name]), name

    ids, probs = routing(case, device)
    t = operands(case, device, torch.bfloat16)
    args = leaves_of(t)
    biases = {name: t[name] for name in t if name.endswith("bias")}
    given, saved = {a.data_ptr() for a in (*args, *biases.values(), probs)}, []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda s: s):
        moeblaze_experts(
            *args, **biases, topk_indices=ids, topk_probs=probs, recompute_fc1=True,
            activation=activation,
        )  # fmt: skip
    assert [s.shape for s in saved if s.data_ptr() not in given] == [(case.T * case.K,)]


def test_recompute_fc1_has_one_act_at_a_time(device, monkeypatch):
    """What fc1 makes of it again is gone before fc2's dgrad does: one [R, F] less at the peak."""
    case = Case(30, 32, 32, 4, 2, "recompute fc1")
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    ops = experts.kernels_for(t["x"])
    acts, alive, fc1, fc2_dgrad = [], [], ops.fc1, ops.fc2_dgrad

    def noted_fc1(*args, **options):
        fc1_output, act = fc1(*args, **options)
        acts.append(weakref.ref(act))
        return fc1_output, act

    def noted_dgrad(*args, **options):
        alive.extend(act() is not None for act in acts)
        return fc2_dgrad(*args, **options)

    monkeypatch.setattr(ops, "fc1", noted_fc1)
    monkeypatch.setattr(ops, "fc2_dgrad", noted_dgrad)
    run(layer_of(ids, recompute_fc1=True), t, probs)
    assert alive == [False, False]


def test_inference_saves_nothing(device, monkeypatch):
    case = Case(30, 32, 32, 4, 2, "inference")
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    args = leaves_of(t)
    ops = experts.kernels_for(t["x"])
    saves, fc1 = [], ops.fc1
    monkeypatch.setattr(ops, "fc1", lambda *a, **k: (saves.append(a[5]), fc1(*a, **k))[1])
    with torch.no_grad():
        out = moeblaze_experts(*args, topk_indices=ids, topk_probs=probs)
    with torch.enable_grad():
        assert torch.equal(moeblaze_experts(*args, topk_indices=ids, topk_probs=probs), out)
    assert saves == [False, True] and out.grad_fn is None


def test_frozen_operands(device):
    """Only the gradients that are asked for, and no backward state without any."""
    case = Case(30, 32, 32, 4, 2, "frozen")
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    x = t["x"].requires_grad_()
    out = moeblaze_experts(x, t["fc1_weight"], t["fc2_weight"], topk_indices=ids, topk_probs=probs)
    out.backward(t["grad_output"])
    want = check(case, device, torch.float32)["grad_x"]
    assert torch.equal(x.grad, want)
    for grad_mode in (False, True):
        with torch.set_grad_enabled(grad_mode):
            again = moeblaze_experts(
                x.detach(), t["fc1_weight"], t["fc2_weight"], topk_indices=ids, topk_probs=probs
            )
        assert again.equal(out) and again.grad_fn is None


@pytest.mark.parametrize("name", ["fc1_bias", "fc2_bias"])
def test_one_bias_alone_and_the_rest_frozen(device, name, nan_filled):
    case = Case(30, 32, 32, 4, 2, "one bias", bias=True)
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    args = (t["x"], t["fc1_weight"], t["fc2_weight"])
    other = {"fc1_bias": "fc2_bias", "fc2_bias": "fc1_bias"}[name]
    t[other].zero_()
    both = run(layer_of(ids), t, probs)
    leaf = t[name].requires_grad_()
    out = moeblaze_experts(*args, topk_indices=ids, topk_probs=probs, **{name: leaf})
    out.backward(t["grad_output"])
    assert torch.equal(out, both["output"]) and torch.equal(leaf.grad, both[f"grad_{name}"])


def test_probabilities_see_the_bias_of_fc2(device):
    """Through fc2's bias alone: output = prob * bias, and grad_prob = grad_output . bias."""
    x, w1, w2 = torch.zeros(2, 16), torch.ones(2, 32, 16), torch.ones(2, 16, 16)
    bias = torch.arange(32.0).view(2, 16)
    x, w1, w2, bias = (t.to(device) for t in (x, w1, w2, bias))
    ids = torch.tensor([[0, 1], [1, -1]], device=device)
    probs = torch.tensor([[0.5, 2.0], [3.0, 9.0]], device=device, requires_grad=True)
    out = moeblaze_experts(x, w1, w2, fc2_bias=bias, topk_indices=ids, topk_probs=probs)
    assert torch.equal(out[0], 0.5 * bias[0] + 2 * bias[1]) and torch.equal(out[1], 3 * bias[1])
    out.sum().backward()
    sums = bias.sum(1).tolist()
    assert probs.grad.tolist() == [sums, [sums[1], 0]]


def main_grads(tensors, value):
    for name in ("fc1_weight", "fc2_weight"):
        weight = tensors[name].requires_grad_()
        weight.main_grad = torch.full(weight.shape, value, device=weight.device)


@pytest.mark.parametrize("workspace_bytes", [2**30, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_accumulation_fusion(device, dtype, workspace_bytes, nan_filled, copied_wgrads):
    """Added into main_grad in fp32, untouched for an empty expert; a placeholder is returned."""
    case = Case(40, 64, 32, 4, 2, "main_grad", bias=True)
    if device == "cuda":
        case = Case(3000, 1024, 384, 6, 3, "main_grad at size", bias=True)
    ids, probs = routing(case, device)
    tensors = operands(case, device, dtype)
    plain = check(case, device, dtype)
    main_grads(tensors, 0.5)
    args = [tensors[n] for n in ("x", "fc1_weight", "fc2_weight")]
    biases = {n: tensors[n].requires_grad_() for n in ("fc1_bias", "fc2_bias")}
    for _ in range(2):
        moeblaze_experts(
            *args,
            **biases,
            topk_indices=ids,
            topk_probs=probs,
            gradient_accumulation_fusion=True,
            workspace_bytes=workspace_bytes,
        ).backward(tensors["grad_output"])
    for name in ("fc1_weight", "fc2_weight"):
        weight = tensors[name]
        grad = (weight.main_grad - 0.5) / 2
        want = plain[f"grad_{name}"].float()
        rounding = torch.finfo(dtype).eps
        assert (grad - want).norm() <= rounding * want.norm()
        assert (weight.main_grad[-1] == 0.5).all(), "the last expert has no tokens"
        assert weight.grad_added_to_main_grad and weight.grad is not None
    for name, bias in biases.items():  # as Megatron's linears: `grad`, for DDP to add
        assert torch.equal(bias.grad, 2 * plain[f"grad_{name}"])


PRECISION = """
import torch

from moeblaze_megatron.ops.tiles import input_precision

matmul, found = torch.backends.cuda.matmul, [input_precision()]
for allowed in (True, False):
    matmul.allow_tf32 = allowed
    found.append(input_precision())
for precision in ("tf32", "ieee"):  # from now on torch refuses to say what allow_tf32 is
    matmul.fp32_precision = precision
    found.append(input_precision())
print(*found)
"""


def test_tf32_by_either_setting_of_torch(plain_env):
    command = [sys.executable, "-W", "ignore", "-c", PRECISION]
    result = subprocess.run(command, env=plain_env, check=True, stdout=subprocess.PIPE, text=True)
    assert result.stdout.split() == ["ieee", "tf32", "ieee", "tf32", "ieee"]


def test_nan_stays_visible(device):
    case = Case(30, 32, 32, 4, 2, "nan")
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    probs[3, 0] = float("nan")
    t["x"][5, 7] = float("nan")
    args = (t["x"], t["fc1_weight"], t["fc2_weight"])
    out = moeblaze_experts(*args, topk_indices=ids, topk_probs=probs)
    rows = out.isnan().any(1).nonzero().flatten().tolist()
    assert rows == [3, 5]
    clamped = moeblaze_experts(*args, topk_indices=ids, topk_probs=probs, activation=GPT_OSS)
    assert torch.equal(clamped.isnan(), out.isnan())
    relu = (t["x"], t["fc1_weight"][:, :32].contiguous(), t["fc2_weight"])
    out = moeblaze_experts(*relu, topk_indices=ids, topk_probs=probs, activation="squared_relu")
    assert out.isnan().any(1).nonzero().flatten().tolist() == [3, 5]


def test_second_backward_is_refused(device):
    case = Case(30, 32, 32, 4, 2, "twice")
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    x = t["x"].requires_grad_()
    out = moeblaze_experts(x, t["fc1_weight"], t["fc2_weight"], topk_indices=ids, topk_probs=probs)
    out.backward(t["grad_output"], retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward through one graph"):
        out.backward(t["grad_output"])


def test_create_graph_is_refused(device):
    """A gradient of the gradient would lack this layer's part, without a word."""
    case = Case(30, 32, 32, 4, 2, "twice differentiated")
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    x = t["x"].requires_grad_()
    out = moeblaze_experts(x, t["fc1_weight"], t["fc2_weight"], topk_indices=ids, topk_probs=probs)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_operands_off_16_bytes(device):
    """Views into a flat buffer, gradients accumulated into their main_grad too."""
    case = Case(30, 32, 32, 4, 2, "misaligned")
    ids, probs = routing(case, device)
    want = check(case, device, torch.float32)
    t = operands(case, device, torch.float32)
    for name, tensor in t.items():
        buffer = torch.empty(tensor.numel() + 1, device=device)
        t[name] = buffer[1:].view(tensor.shape).copy_(tensor)
    leaves = leaves_of(t)
    main_grads(t, 0.0)
    out = moeblaze_experts(
        *leaves, topk_indices=ids, topk_probs=probs, gradient_accumulation_fusion=True
    )
    out.backward(t["grad_output"])
    assert torch.equal(out, want["output"]) and torch.equal(leaves[0].grad, want["grad_x"])
    for name in ("fc1_weight", "fc2_weight"):
        torch.testing.assert_close(t[name].main_grad, want[f"grad_{name}"])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_and_non_contiguous_weights(device, use_reentrant):
    from torch.utils.checkpoint import checkpoint

    case = Case(30, 32, 32, 4, 2, "recompute")
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    t["fc1_weight"] = t["fc1_weight"].mT.contiguous().mT

    layer = partial(checkpoint, layer_of(ids), use_reentrant=use_reentrant)
    got, want = run(layer, t, probs), check(case, device, torch.float32)
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_autocast(device):
    case = Case(30, 32, 32, 4, 2, "autocast", bias=True)
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    half = {name: tensor.bfloat16() for name, tensor in t.items()}
    want = run(layer_of(ids), half, probs)

    def layer(*arguments, **biases):
        with torch.autocast(device, torch.bfloat16):
            return layer_of(ids)(*arguments, **biases)

    got = run(layer, t | {"grad_output": half["grad_output"]}, probs)
    assert got["output"].dtype is torch.bfloat16 and got.keys() == want.keys()
    for name, value in got.items():
        assert name == "output" or value.dtype is torch.float32
        assert torch.equal(value, want[name].to(value.dtype)), name


@pytest.mark.parametrize("size", [16, 20])
def test_autocast_into_main_grad(device, size, nan_filled):
    """Sizes are refused by the dtype that the experts run in: 20 are 80 bytes, 40 in bf16."""
    case = Case(30, size, size, 4, 2, "autocast, main_grad")
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    main_grads(t, 0.0)
    args = [t[name] for name in ("x", "fc1_weight", "fc2_weight")]

    def step():
        with torch.autocast(device, torch.bfloat16):
            return moeblaze_experts(
                *args, topk_indices=ids, topk_probs=probs, gradient_accumulation_fusion=True
            )

    if size % 8:
        with pytest.raises(ValueError, match=r"H=20, F=20 in torch.bfloat16 are not"):
            step()
        return
    step().backward(t["grad_output"].bfloat16())
    for weight in args[1:]:
        assert weight.grad_added_to_main_grad and weight.main_grad.isfinite().all()
        assert weight.main_grad.any()


def test_biases_in_any_layout(device):
    """Transposed, off 16 bytes and one row for all experts; the gradient has their shape."""
    case = Case(30, 32, 32, 4, 2, "layout of biases", activation=GPT_OSS, bias=True)
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    row = t["fc2_bias"][0].clone().requires_grad_()
    t["fc2_bias"] = t["fc2_bias"][:1].repeat(case.E, 1)
    options = dict(topk_indices=ids, topk_probs=probs, activation=case.activation)
    grad_output = t.pop("grad_output")

    packed = {name: tensor.clone().requires_grad_() for name, tensor in t.items()}
    want = moeblaze_experts(**packed, **options)
    want.backward(grad_output)

    buffer = torch.empty(t["fc1_bias"].numel() + 1, device=device)
    fc1_bias = buffer[1:].view(t["fc1_bias"].T.shape).copy_(t["fc1_bias"].T).T.requires_grad_()
    other = t | {"fc1_bias": fc1_bias, "fc2_bias": row.expand(case.E, -1)}
    got = moeblaze_experts(**other, **options)
    got.backward(grad_output)
    assert torch.equal(got, want)
    assert torch.equal(fc1_bias.grad, packed["fc1_bias"].grad)
    torch.testing.assert_close(row.grad, packed["fc2_bias"].grad.sum(0))


def test_two_forwards_before_one_backward(device):
    """A pipeline schedule runs forward of the next micro-batch first: state is in the graph."""
    cases = [Case(T, 32, 32, 4, 2, "pipeline") for T in (30, 41)]
    outs = []
    for seed, case in enumerate(cases):
        ids, probs = routing(case, device, seed)
        t = operands(case, device, torch.float32, seed)
        x = t["x"].requires_grad_()
        args = (x, t["fc1_weight"], t["fc2_weight"])
        outs.append((x, t, moeblaze_experts(*args, topk_indices=ids, topk_probs=probs)))
    for seed, (x, t, out) in enumerate(outs):
        out.backward(t["grad_output"])
        ids, probs = routing(cases[seed], device, seed)
        y = t["x"].detach().clone().requires_grad_()
        args = (y, t["fc1_weight"], t["fc2_weight"])
        moeblaze_experts(*args, topk_indices=ids, topk_probs=probs).backward(t["grad_output"])
        assert torch.equal(x.grad, y.grad)


class Wrapper(torch.Tensor):
    """What torch takes for a wrapper around other tensors, as DTensor is one."""

    __tensor_flatten__ = __tensor_unflatten__ = None


def with_main_grad(weight, dtype):
    weight.requires_grad_().main_grad = torch.zeros(weight.shape, dtype=dtype)
    return weight


BAD = {
    "fc1_weight has shape": dict(fc1_weight=torch.zeros(4, 32, 32)),
    "fc2_weight is torch.bfloat16": dict(fc2_weight=torch.zeros(4, 32, 32).bfloat16()),
    "activation='relu6'": dict(activation="relu6"),
    "activation=7 is neither": dict(activation=7),
    "fc1_bias has shape": dict(fc1_bias=torch.zeros(4, 32)),
    "fc2_bias has shape": dict(fc2_bias=torch.zeros(5, 32)),
    "fc2_bias is torch.bfloat16, but": dict(fc2_bias=torch.zeros(4, 32).bfloat16()),
    "clamp=0.0, .*clamp must be a finite": dict(activation=Activation("swiglu", clamp=0.0)),
    "clamp='7', .*clamp must be a finite": dict(activation=Activation("swiglu", clamp="7")),
    "clamp=True, .*clamp must be a finite": dict(activation=Activation("swiglu", clamp=True)),
    "clamp=tensor.*clamp must be a finite": dict(
        activation=Activation("swiglu", clamp=torch.tensor(7.0))
    ),
    "offset=nan.*offset must be a finite": dict(
        activation=Activation("swiglu", offset=float("nan"))
    ),
    "offset=None.*offset must be a finite": dict(activation=Activation("swiglu", offset=None)),
    "clamp and offset go with": dict(
        activation=Activation("silu", offset=1.0), fc1_weight=torch.zeros(4, 32, 32)
    ),
    "x is torch.int32": dict(x=torch.zeros(8, 32, dtype=torch.int32)),
    "topk_probs has shape": dict(topk_probs=torch.ones(8, 3)),
    "topk_probs is torch.int64": dict(topk_probs=torch.ones(8, 2).long()),
    "in one form": dict(probs=torch.ones(8, 4)),
    "fc2_weight has no main_grad": dict(
        fc2_weight=torch.zeros(4, 32, 32, requires_grad=True), gradient_accumulation_fusion=True
    ),
    "fc1_weight.main_grad is torch.int64; use fp32": dict(
        fc1_weight=with_main_grad(torch.zeros(4, 64, 32), torch.int64),
        gradient_accumulation_fusion=True,
    ),
    "x is a list, not a tensor": dict(x=[[0.0] * 32] * 8),
    "topk_probs is a float, not a tensor": dict(topk_probs=0.5),
    "x is a Wrapper; give the tensor inside": dict(x=torch.zeros(8, 32).as_subclass(Wrapper)),
    "x is torch.sparse_coo": dict(x=torch.zeros(8, 32).to_sparse()),
    "F=0": dict(fc1_weight=torch.zeros(4, 0, 32), fc2_weight=torch.zeros(4, 32, 0)),
    "topk=2 goes with routing_map": dict(topk=2),
    "got torch.bool": dict(topk_indices=torch.tensor([[True, False]] * 8)),
    "got torch.uint32": dict(topk_indices=torch.zeros(8, 2, dtype=torch.uint32)),
    "workspace_bytes=0": dict(workspace_bytes=0),
    "workspace_bytes=1.5": dict(workspace_bytes=1.5),
    "integer tensor": dict(topk_indices=torch.zeros(8, 2)),
    "wants x": dict(x=torch.zeros(2, 4, 32)),
    "names experts \\[4, 0\\]": dict(topk_indices=torch.tensor([[4, 0]] * 8)),
    "names an expert twice: \\[3, 3\\]": dict(topk_indices=torch.tensor([[3, 3]] * 8)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message, device):
    good = dict(
        x=torch.zeros(8, 32),
        fc1_weight=torch.zeros(4, 64, 32),
        fc2_weight=torch.zeros(4, 32, 32),
        topk_indices=torch.tensor([[0, 1]] * 8),
        topk_probs=torch.ones(8, 2),
        check=True,
    )
    arguments = {
        name: value.to(device) if torch.is_tensor(value) else value
        for name, value in {**good, **BAD[message]}.items()
    }
    with pytest.raises(ValueError, match=message):
        moeblaze_experts(**arguments)


def test_arguments_of_the_builders_are_named():
    with pytest.raises(ValueError, match=r"num_experts=4\.0 is not an int"):
        index_lists_from_topk(torch.zeros(3, 2).int(), 4.0)
    with pytest.raises(ValueError, match="topk=None is not an int"):
        index_lists_from_routing_map(torch.ones(3, 4).bool(), None)
    with pytest.raises(ValueError, match="got a list"):
        index_lists_from_topk([[0, 1]], 4)


def test_main_grad_must_be_contiguous(device):
    """Rows of main_grad are written as blocks."""
    case = Case(30, 32, 32, 4, 2, "main_grad by columns")
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    main_grads(t, 0.0)
    t["fc2_weight"].main_grad = t["fc2_weight"].main_grad.mT
    args = [t[n] for n in ("x", "fc1_weight", "fc2_weight")]
    options = dict(topk_indices=ids, topk_probs=probs, gradient_accumulation_fusion=True)
    with pytest.raises(ValueError, match=r"fc2_weight\.main_grad is"):
        moeblaze_experts(*args, **options)
    with torch.no_grad():  # no gradient to accumulate: Megatron's evaluation without its DDP
        moeblaze_experts(*args, **options)


def test_main_grad_must_be_where_the_weight_is(device):
    """Kernels take its address as it is."""
    case = Case(30, 32, 32, 4, 2, "main_grad elsewhere")
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    main_grads(t, 0.0)
    t["fc1_weight"].main_grad = t["fc1_weight"].main_grad.to("meta")
    args = [t[n] for n in ("x", "fc1_weight", "fc2_weight")]
    with pytest.raises(ValueError, match=r"fc1_weight\.main_grad is on meta, but x is on"):
        moeblaze_experts(
            *args, topk_indices=ids, topk_probs=probs, gradient_accumulation_fusion=True
        )


def test_all_reasons_at_once():
    with pytest.raises(ValueError) as error:
        moeblaze_experts(
            torch.zeros(8, 32),
            torch.zeros(4, 32, 32),
            torch.zeros(4, 32, 32).bfloat16(),
            topk_indices=torch.zeros(8, 2).int(),
            topk_probs=torch.ones(7, 2),
        )
    for part in ("fc1_weight has shape", "fc2_weight is torch.bfloat16", "topk_probs has shape"):
        assert part in str(error.value)


@pytest.mark.parametrize("check", [False, True])
def test_a_bound_on_the_rows_that_is_too_low_is_refused(check):
    """Rows past it would be written out of bounds on a GPU, where nobody looks without `check`."""
    ids = torch.tensor([[0, 1], [1, -1]])
    assert index_lists_from_topk(ids, 2, max_rows=3, check=check).max_rows == 3
    with pytest.raises(ValueError, match="3 ids name an expert, but max_rows=2"):
        index_lists_from_topk(ids, 2, max_rows=2, check=check)
    for bad in (-1, 2.0, True):
        with pytest.raises(ValueError, match=f"max_rows={bad} must be an int, 0 or more"):
            index_lists_from_topk(ids, 2, max_rows=bad)


@pytest.mark.parametrize("dtype", ID_DTYPES, ids=str)
@pytest.mark.parametrize("num_experts", [4, 300])
def test_ids_of_every_integer_dtype(dtype, num_experts, device):
    """Checked too: neither -1 nor 300 is a value of uint8."""
    ids = torch.tensor([[0, 3], [2, 1]], device=device)
    lists = index_lists_from_topk(ids.to(dtype), num_experts, check=True)
    assert lists.token_expert_indices.tolist() == ids.tolist()
    assert lists.tokens_per_expert.tolist() == [1] * 4 + [0] * (num_experts - 4)
    with pytest.raises(ValueError, match=r"token 0 names experts \[0, 3\], but ids are 0..1"):
        index_lists_from_topk(ids.to(dtype), 2, check=True)


def test_a_token_with_more_experts_than_topk_is_refused(device):
    everything = torch.ones(3, 4, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="token with 4 experts, but topk=2"):
        index_lists_from_routing_map(everything, 2, check=True)


@pytest.mark.gpu
def test_unchecked_ids_stay_in_bounds():
    """Ids out of range route nowhere; an expert named twice counts twice."""
    case = Case(300, 64, 64, 4, 2, "unchecked")
    ids, probs = routing(case, "cuda")
    t = operands(case, "cuda", torch.float32)
    args = (t["x"], t["fc1_weight"], t["fc2_weight"])
    wild = ids.clone()
    wild[::3, 1] = 2**31 - 1
    wild[1::3, 1] = -7
    none = torch.where((wild >= 0) & (wild < 4), wild, -1)
    got = moeblaze_experts(*args, topk_indices=wild, topk_probs=probs)
    assert torch.equal(got, moeblaze_experts(*args, topk_indices=none, topk_probs=probs))
    twice = ids.clone()
    twice[:, 1] = twice[:, 0]
    got = moeblaze_experts(*args, topk_indices=twice, topk_probs=probs)
    once = moeblaze_experts(
        *args, topk_indices=ids[:, :1].contiguous(), topk_probs=probs.sum(1, keepdim=True)
    )
    torch.testing.assert_close(got, once, rtol=1e-4, atol=1e-4)
    everything = torch.ones(300, 4, dtype=torch.bool, device="cuda")
    dense = torch.rand(300, 4, device="cuda")
    first = moeblaze_experts(*args, probs=dense, routing_map=everything, topk=2)
    everything[:, 2:] = False
    assert torch.equal(first, moeblaze_experts(*args, probs=dense, routing_map=everything, topk=2))


@pytest.mark.gpu
def test_row_addresses_past_int32():
    """300k rows x 7168: the last tokens are as right as in a small batch."""
    case = Case(150_000, 7168, 128, 4, 2, "rows x H past 2^31", only=(0, 1, 2, 3))
    ids, probs = routing(case, "cuda")
    t = operands(Case(1000, 7168, 128, 4, 2, "tail"), "cuda", torch.bfloat16)
    x = torch.randn(case.T, case.H, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    ids[:-1000:5] = -1  # slots without an expert, and fewer rows than the bound
    tail = slice(case.T - 1000, case.T)
    results = []
    for part in (slice(0, case.T), tail):
        a = x[part].detach().clone().requires_grad_()
        p = probs[part].detach().clone().requires_grad_()
        out = moeblaze_experts(
            a, t["fc1_weight"], t["fc2_weight"], topk_indices=ids[part], topk_probs=p,
            workspace_bytes=2**34,
        )  # fmt: skip
        out.backward(grad[part])
        results.append((out[-1000:].detach(), a.grad[-1000:], p.grad[-1000:]))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_on_a_side_stream():
    case = LARGE[0]
    want = check(case, "cuda", torch.bfloat16)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = check(case, "cuda", torch.bfloat16)
    torch.cuda.synchronize()
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    "H, F, activation",
    [(1024, 768, "swiglu"), (1024, 4096, "swiglu"), (1024, 4096, "silu"), (2048, 896, "swiglu")],
)
def test_repeats_bitwise_while_the_gpu_is_busy(H, F, activation):
    """A race shows rarely: 300 repeats, with other work between them to shift their timing.

    On Hopper with sixteen warps and with twelve, pieces of both sizes, columns that end in a tile.
    """
    case = Case(8192, H, F, 32, 4, "repeats", activation=activation)
    ids, probs = routing(case, "cuda")
    t = operands(case, "cuda", torch.bfloat16)
    leaves = leaves_of(t)
    leaves.append(probs.requires_grad_())
    other = torch.randn(1024, 1024, device="cuda")

    def step():
        out = moeblaze_experts(
            *leaves[:3], topk_indices=ids, topk_probs=probs, activation=activation
        )
        return (out.detach(), *torch.autograd.grad(out, leaves, t["grad_output"]))

    want = step()
    differing = torch.zeros(len(want), dtype=torch.int64, device="cuda")
    for i in range(300):
        if i % 3:
            other = torch.relu(other @ other.T * 1e-3) + i
        for j, (a, b) in enumerate(zip(step(), want, strict=True)):
            differing[j] += (a != b).any()
    assert differing.tolist() == [0] * len(want)


@pytest.mark.gpu
def test_backward_may_be_the_first_cuda_call_of_its_thread(plain_env):
    """Its thread has no CUDA context then, and with cached memory torch binds none."""
    script = """
import torch
from moeblaze_megatron import moeblaze_experts
x, w1, w2 = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True)
             for s in ((256, 128), (4, 256, 128), (4, 128, 128)))
ids = torch.randint(4, (256, 1), device="cuda", dtype=torch.int32)
probs, grad = torch.ones(256, 1, device="cuda"), torch.ones(256, 128, device="cuda").bfloat16()
cached = [torch.empty(2**20, dtype=torch.uint8, device="cuda") for _ in range(64)]
del cached
moeblaze_experts(x, w1, w2, topk_indices=ids, topk_probs=probs).backward(grad)
assert all(leaf.grad.isfinite().all() for leaf in (x, w1, w2))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=plain_env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
def test_no_host_synchronisation():
    case = LARGE[0]
    ids, probs = routing(case, "cuda")
    t = operands(case, "cuda", torch.bfloat16)
    x, probs = t["x"].requires_grad_(), probs.requires_grad_()

    def step():
        lists = index_lists_from_topk(ids, case.E)
        dense = torch.zeros(case.T, case.E, device="cuda")
        out = moeblaze_experts(x, t["fc1_weight"], t["fc2_weight"], probs=dense, index_lists=lists)
        out.backward(t["grad_output"])

    step()  # compile
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_memory_stays_flat_under_uneven_routing():
    case = Case(2000, 256, 128, 8, 2, "uneven")
    t = operands(case, "cuda", torch.bfloat16)
    x, grad_output = t["x"].requires_grad_(), t["grad_output"]
    levels = []
    for seed in range(200):
        if seed == 20:
            torch.cuda.reset_peak_memory_stats()
        T = case.T - 37 * (seed % 19)
        ids, probs = (each[:T] for each in routing(case, "cuda", seed))
        out = moeblaze_experts(
            x[:T], t["fc1_weight"], t["fc2_weight"], topk_indices=ids, topk_probs=probs
        )
        out.backward(grad_output[:T])
        x.grad = out = None
        stats = torch.cuda.memory_stats()
        levels.append([stats[f"requested_bytes.all.{of}"] for of in ("current", "peak")])
    assert levels[-1] == levels[20 + 18]


@pytest.mark.gpu
def test_cuda_graph_replays_with_other_routing():
    """Forward and backward captured once: nothing waits for the device or depends on R."""
    case = Case(2000, 256, 128, 8, 2, "captured", dropped=0.1)
    t = operands(case, "cuda", torch.bfloat16)
    leaves = leaves_of(t)
    ids, probs = routing(case, "cuda")

    def step():
        out = moeblaze_experts(*leaves, topk_indices=ids, topk_probs=probs)
        return (out, *torch.autograd.grad(out, leaves, t["grad_output"]))

    graph, results = captured(step)
    for seed in (1, 2):
        for old, new in zip((ids, probs), routing(case, "cuda", seed), strict=True):
            old.copy_(new)
        graph.replay()
        for got, want in zip(results, step(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_on_another_gpu_than_the_current_one():
    case = LARGE[0]
    want = check(case, "cuda:0", torch.bfloat16)
    assert torch.cuda.current_device() == 0
    got = check(case, "cuda:1", torch.bfloat16)
    routing_map = torch.ones(5, 4, dtype=torch.bool, device="cuda:1")
    lists = index_lists_from_routing_map(routing_map, 4)
    assert lists.token_index_map.tolist() == torch.arange(20).view(4, 5).T.tolist()
    assert torch.cuda.current_device() == 0
    for name in want:
        assert torch.equal(got[name].to("cuda:0"), want[name]), name


def test_torch_compile_leaves_the_host_code_alone(device):
    """One graph before and one after each call, none of its inside."""
    case = Case(30, 32, 32, 4, 2, "compiled")
    ids, probs = routing(case, device)
    t = operands(case, device, torch.float32)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def layer(x, ids, probs):
        lists = index_lists_from_topk(ids + 0, case.E)
        routing_map = probs > -1
        other = index_lists_from_routing_map(routing_map, case.K)
        weights = t["fc1_weight"], t["fc2_weight"]
        out = moeblaze_experts(x * 1, *weights, topk_probs=probs, index_lists=lists)
        return out + other.tokens_per_expert[0]

    got = torch.compile(layer, backend=backend)(t["x"], ids, probs)
    assert torch.equal(got, layer(t["x"], ids, probs)) and len(graphs) == 4


@pytest.mark.gpu
def test_torch_compile():
    case = Case(300, 64, 64, 4, 2, "compiled")
    ids, probs = routing(case, "cuda")
    t = operands(case, "cuda", torch.float32)
    args = (t["x"], t["fc1_weight"], t["fc2_weight"])

    def layer(x, w1, w2):
        return moeblaze_experts(x * 1.0, w1, w2, topk_indices=ids, topk_probs=probs) + 0.0

    assert torch.equal(torch.compile(layer)(*args), layer(*args))
