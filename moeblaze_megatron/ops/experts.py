"""The experts of an MoE layer over index lists: `moeblaze_experts` and its autograd function.

T tokens, K experts per token, E experts, H hidden size, F ffn hidden size, R routed rows.
"""

import math
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moeblaze_megatron.ops import kernels, reference
from moeblaze_megatron.ops.activation import ACTIVATIONS, GATED, Activation
from moeblaze_megatron.ops.index_lists import MAX_EXPERTS, MAX_TOPK, IndexLists
from moeblaze_megatron.ops.memory import layer_bytes, slice_columns
from moeblaze_megatron.ops.table import Copy, configuration
from moeblaze_megatron.ops.tiles import cdiv, interpreting

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROBS_DTYPES = (*DTYPES, torch.float64)
ID_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)

_eager = torch.compiler.disable(reason="host code and Triton launches, which break the graph")


def kernels_for(tensor: torch.Tensor) -> ModuleType:
    """The Triton kernels for CUDA tensors (and in Triton's interpreter), else their eager twins."""
    return kernels if tensor.is_cuda or interpreting() else reference


@_eager
def index_lists_from_topk(
    topk_indices: torch.Tensor,
    num_experts: int,
    *,
    max_rows: int | None = None,
    check: bool = False,
) -> IndexLists:
    """Index lists of a routing given by expert ids.

    Args:
        topk_indices: [T, K] integer, -1 = no expert. An id outside 0..E-1 routes nowhere, and an
            expert that a token names twice gets two rows, unless `check` refuses both. Contiguous
            int32 ids become part of the lists without a copy: do not write over them.
        num_experts: E, at most 1,024; K at most 32.
        max_rows: the number of ids that name an expert, or a bound on it, where the caller knows
            one below T*K; buffers are sized by it, and rows past it are written out of bounds
            unless `check` refuses them.
        check: look at the ids, which waits for the device; always done on the CPU.
    Raises:
        ValueError: sizes out of range or, when checked, ids out of range, named twice, or more
            than `max_rows`.
    """
    if (
        not torch.is_tensor(topk_indices)
        or topk_indices.dim() != 2
        or topk_indices.dtype not in ID_DTYPES
    ):
        raise ValueError(
            f"topk_indices must be a [T, K] integer tensor; got {_described(topk_indices)}"
        )
    _check_sizes(num_experts, topk_indices.shape[1])
    if max_rows is not None and not (_is_int(max_rows) and max_rows >= 0):
        raise ValueError(f"max_rows={max_rows!r} must be an int, 0 or more, or None")
    if check or not topk_indices.is_cuda:
        _check_ids(topk_indices, num_experts, max_rows)
    elif topk_indices.dtype is torch.int64:  # so that none wraps into 0..E-1 as int32
        topk_indices = topk_indices.clamp(-1, num_experts)
    topk_indices = topk_indices.to(torch.int32).contiguous()
    with torch.cuda.device_of(topk_indices):  # Triton launches on the current GPU
        return kernels_for(topk_indices).index_lists(topk_indices, num_experts, max_rows)


@_eager
def index_lists_from_routing_map(
    routing_map: torch.Tensor, topk: int, *, check: bool = False
) -> IndexLists:
    """Index lists of Megatron's dense routing map.

    Args:
        routing_map: [T, E] bool, at most `topk` experts in a row.
        topk: K, the bound that sizes the lists.
        check: look for rows with more than `topk` experts, which waits for the device; always
            done on the CPU. Unchecked, such a row keeps its first `topk` experts.
    Raises:
        ValueError: sizes out of range or, when checked, a row with more than `topk` experts.
    """
    if (
        not torch.is_tensor(routing_map)
        or routing_map.dim() != 2
        or routing_map.dtype is not torch.bool
    ):
        raise ValueError(f"routing_map must be a [T, E] bool tensor; got {_described(routing_map)}")
    _check_sizes(routing_map.shape[1], topk)
    if check or not routing_map.is_cuda:
        check_experts_per_token(routing_map, topk)
    ops = kernels_for(routing_map)
    with torch.cuda.device_of(routing_map):  # Triton launches on the current GPU
        topk_indices = ops.topk_indices_from_routing_map(routing_map, topk)
        return ops.index_lists(topk_indices, routing_map.shape[1])


def check_experts_per_token(routing_map: torch.Tensor, topk: int) -> None:
    """Raises ValueError if a row of [T, E] has more than `topk` experts; waits for the device."""
    most = int(routing_map.sum(1).max()) if routing_map.numel() else 0
    if most > topk:
        raise ValueError(
            f"routing_map has a token with {most} experts, but topk={topk}; pass topk={most}"
        )


def _described(value: object) -> str:
    if not torch.is_tensor(value):
        return f"a {type(value).__name__}"
    return f"{value.dtype} of shape {tuple(value.shape)}"


def _check_sizes(num_experts: int, topk: int) -> None:
    reasons = []
    for name, value, most in (("num_experts", num_experts, MAX_EXPERTS), ("topk", topk, MAX_TOPK)):
        if not _is_int(value):
            reasons.append(f"{name}={value!r} is not an int")
        elif not 1 <= value <= most:
            reasons.append(f"{name}={value} is outside 1..{most}")
    if reasons:
        raise ValueError("moeblaze does not support: " + "; ".join(reasons))


def _check_ids(topk_indices: torch.Tensor, num_experts: int, max_rows: int | None) -> None:
    reasons = []
    topk_indices = topk_indices.long()  # a narrow dtype does not hold -1, or num_experts
    outside = (topk_indices < -1) | (topk_indices >= num_experts)
    if outside.any():
        token = int(outside.any(1).nonzero()[0])
        reasons.append(
            f"token {token} names experts {topk_indices[token].tolist()}, but ids are "
            f"0..{num_experts - 1} or -1 for none"
        )
    ids = topk_indices.sort(dim=1).values
    twice = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    if twice.any():
        token = int(twice.any(1).nonzero()[0])
        reasons.append(
            f"token {token} names an expert twice: {topk_indices[token].tolist()}; merge the two "
            "probabilities or mark one slot -1"
        )
    if max_rows is not None:
        rows = int((~outside & (topk_indices >= 0)).sum())
        if rows > max_rows:
            reasons.append(f"{rows} ids name an expert, but max_rows={max_rows}; leave it out")
    if reasons:
        raise ValueError("topk_indices: " + "; ".join(reasons))


class _Experts(torch.autograd.Function):
    """output = combine(fc2(prob * f(fc1(gather(x)))), prob); saves x, fc1_output, index lists."""

    @staticmethod
    def forward(
        ctx, x, fc1_weight, fc2_weight, probs, fc1_bias, fc2_bias, lists, dense, activation, fused,
        workspace_bytes, recompute_fc1, fp8_store, differentiate,
    ):  # fmt: skip
        x, fc1_weight, fc2_weight, probs, fc1_bias, fc2_bias = map(
            _packed, (x, fc1_weight, fc2_weight, probs, fc1_bias, fc2_bias)
        )
        ops = kernels_for(x)
        sizes = layer_bytes(x, fc1_weight, fc2_weight, lists.max_rows)
        permuted_probs = ops.permuted_probs(probs, lists, dense)
        save = differentiate and not recompute_fc1
        # fc1_output = gather(x) W1^T + b1, act = prob * f(fc1_output)
        fc1_output, act = ops.fc1(x, fc1_weight, permuted_probs, lists, activation, save, fc1_bias)
        # output[t] = sum_k (act W2^T + prob b2)[token_index_map[t, k]]
        output = torch.empty_like(x)
        for h, rows in _slices(x, lists, workspace_bytes or sizes.forward_workspace):
            ops.rows_gemm(act, fc2_weight, lists, rows, h, gather=False, transposed=True)
            ops.combine(rows, lists, output, h, fc2_bias, permuted_probs)

        if differentiate:
            del act, rows  # the copy in fp8 takes their place, beneath the peak
            stored = ops.quantize(fc1_output, lists) if fp8_store else (fc1_output,)
            ctx.save_for_backward(
                x, fc1_weight, fc2_weight, probs, permuted_probs, fc1_bias, fc2_bias, *stored
            )
            ctx.lists, ctx.dense, ctx.activation = lists, dense, activation
            ctx.fused, ctx.workspace_bytes, ctx.spent = fused, workspace_bytes, False
        return output

    @staticmethod
    def backward(ctx, grad_output):
        if torch.is_grad_enabled():  # gradients of gradients would silently lack ours
            raise RuntimeError(
                "moeblaze_experts is differentiable once: leave create_graph=True out."
            )
        if ctx.spent:
            raise RuntimeError(
                "moeblaze_experts: second backward through one graph. Backward writes gradients "
                "over the activations it saved; run forward again, or sum the losses first."
            )
        ctx.spent = True
        (
            x, fc1_weight, fc2_weight, probs, permuted_probs, fc1_bias, fc2_bias, *stored
        ) = ctx.saved_tensors  # fmt: skip
        lists, ops, given = ctx.lists, kernels_for(x), ctx.workspace_bytes
        sizes = layer_bytes(x, fc1_weight, fc2_weight, lists.max_rows)
        fc1_output = stored[0]
        if len(stored) == 2:  # fp8_store
            fc1_output = ops.dequantize(*stored, lists, x.dtype)
            for tensor in stored:  # autograd holds what it saved until this returns
                tensor.untyped_storage().resize_(0)
        elif fc1_output is None:  # recompute_fc1
            fc1_output = ops.fc1(
                x, fc1_weight, permuted_probs, lists, ctx.activation, True, fc1_bias
            )[0]  # fc2_dgrad makes act again: this one goes
        needs_x, needs_fc1, needs_fc2, needs_probs, needs_b1, needs_b2 = ctx.needs_input_grad[:6]
        grad_output = _packed(grad_output)
        grad_x = grad_fc1 = grad_fc2 = grad_probs = grad_b1 = grad_b2 = None
        if needs_b2:  # grad_b2[e] = sum of prob * gather(grad_output)
            grad_b2 = ops.bias_grad(grad_output, lists, fc2_bias, permuted_probs)

        # grad_act = gather(grad_output) W2
        # grad_fc1_output = grad_act * prob * f'(fc1_output)
        # grad_prob = sum over F of grad_act * f(fc1_output)
        ffn = fc2_weight.shape[2]
        workspace = given or sizes.fc2_wgrad_workspace
        copy = configuration("copy", x, ffn, x.shape[1])
        rows, gather = _rows_of(ops, grad_output, lists, copy, ffn, workspace)
        grad_fc1_output, act, grad_permuted_probs = ops.fc2_dgrad(
            rows, fc2_weight, fc1_output, permuted_probs, lists, ctx.activation, gather
        )
        if needs_probs:
            if fc2_bias is not None:  # grad_prob += gather(grad_output) . b2
                ops.bias_grad_probs(grad_output, lists, fc2_bias, grad_permuted_probs)
            grad_probs = ops.grad_probs(grad_permuted_probs, lists, probs, ctx.dense)
        if needs_fc2:  # grad_W2[e] = gather(grad_output)^T act
            grad_fc2, into, accumulate = _grad_buffer(fc2_weight, ctx.fused[1])
            slices = [(0, rows)]
            if gather:
                slices = _gathered(ops, grad_output, lists, copy, ffn, workspace)
            for h, rows in slices:
                part = into[:, h : h + rows.shape[1]]
                side = "a" if rows is grad_output else None
                ops.wgrad(rows, act, lists, part, accumulate, side)
            del slices
        del rows, act
        if needs_b1:  # grad_b1[e] = sum of grad_fc1_output
            grad_b1 = ops.bias_grad(grad_fc1_output, lists, fc1_bias)
        if needs_x:  # grad_x[t] = sum_k (grad_fc1_output W1)[token_index_map[t, k]]
            grad_x = torch.empty_like(x)
            for h, rows in _slices(x, lists, given or sizes.dgrad_workspace):
                ops.rows_gemm(
                    grad_fc1_output, fc1_weight, lists, rows, h, gather=False, transposed=False
                )
                ops.combine(rows, lists, grad_x, h)
            del rows
        if needs_fc1:  # grad_W1[e] = grad_fc1_output^T gather(x)
            grad_fc1, into, accumulate = _grad_buffer(fc1_weight, ctx.fused[0])
            workspace = given or sizes.fc1_wgrad_workspace
            for h, rows in _gathered(ops, x, lists, copy, fc1_weight.shape[1], workspace):
                part = into[:, :, h : h + rows.shape[1]]
                side = "b" if rows is x else None
                ops.wgrad(grad_fc1_output, rows, lists, part, accumulate, side)
        return grad_x, grad_fc1, grad_fc2, grad_probs, grad_b1, grad_b2, *[None] * 8


def _slices(
    x: torch.Tensor, lists: IndexLists, workspace_bytes: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Column ranges of [R, H] that each fit the workspace, and one reused buffer for them."""
    R, H = lists.max_rows, x.shape[1]
    cols = slice_columns(H, R, x.element_size(), workspace_bytes)
    buffer = x.new_empty(R * cols)
    for start in range(0, H, cols):
        size = min(cols, H - start)
        yield start, buffer[: R * size].view(R, size)


def _rows_of(
    ops: ModuleType,
    x: torch.Tensor,
    lists: IndexLists,
    copy: Copy,
    ffn: int,
    workspace_bytes: int,
) -> tuple[torch.Tensor, bool]:
    """x and True (look rows up), or a copy by row and False, where that is faster and it fits."""
    copy_bytes = lists.max_rows * x.shape[1] * x.element_size()
    if copy.ffn is None or ffn < copy.ffn or copy_bytes > workspace_bytes:
        return x, True
    return ops.gather(x, lists, x.new_empty(lists.max_rows, x.shape[1]), 0), False


def _gathered(
    ops: ModuleType,
    x: torch.Tensor,
    lists: IndexLists,
    copy: Copy,
    width: int,
    workspace_bytes: int,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows of x by token in column slices, or x itself where the kernel had better look them up.

    In plain Triton a copy and plain loads are the faster way where the other operand of the weight
    gradient is `width` columns wide or more, until the copy is cut into many narrow slices, each of
    which reads that operand again.
    """
    cols = slice_columns(x.shape[1], lists.max_rows, x.element_size(), workspace_bytes)
    slices = cdiv(x.shape[1], cols)
    if copy.width is None or width < copy.width or slices > copy.slices:
        yield 0, x
        return
    for h, rows in _slices(x, lists, workspace_bytes):
        yield h, ops.gather(x, lists, rows, h)


def _grad_buffer(
    weight: torch.Tensor, fused: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """What backward returns for a weight, where its gradient is written, and whether it is added.

    Given `fused`, the caller's own tensor of which `weight` may be a copy, the gradient is added
    into `fused.main_grad` (Megatron's gradient_accumulation_fusion) and a placeholder is returned,
    for which DDP's hooks wait.
    """
    grad = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if fused is None:
        return grad, grad, False
    fused.grad_added_to_main_grad = True
    if getattr(fused, "zero_out_wgrad", False):
        grad.zero_()
    return grad, fused.main_grad.view(weight.shape), True


def _packed(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Contiguous and at a 16-byte address, as tensor descriptors need it; a copy if it is not."""
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _aligned(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_bias: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """The operands with H and F padded by zeros to whole 16 bytes, which tensor descriptors need.

    Sizes of real models pass through untouched; others cost a copy of the operands.
    """
    _, H, ffn = fc2_weight.shape
    unit = 16 // x.element_size()
    pad_h, pad_f = -H % unit, -ffn % unit
    if kernels_for(x) is reference or not (pad_h or pad_f):
        return x, fc1_weight, fc2_weight, fc1_bias, fc2_bias
    halves = fc1_weight.unflatten(1, (-1, ffn))
    if fc1_bias is not None:
        fc1_bias = F.pad(fc1_bias.unflatten(1, (-1, ffn)), (0, pad_f)).flatten(1)
    if fc2_bias is not None:
        fc2_bias = F.pad(fc2_bias, (0, pad_h))
    return (
        F.pad(x, (0, pad_h)),
        F.pad(halves, (0, pad_h, 0, pad_f)).flatten(1, 2),
        F.pad(fc2_weight, (0, pad_f, 0, pad_h)),
        fc1_bias,
        fc2_bias,
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Whether a kernel can have it as a constant."""
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _mismatches(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], x: torch.Tensor
) -> Iterator[str]:
    if tuple(tensor.shape) != shape:
        yield f"{name} has shape {tuple(tensor.shape)}, expected {shape}"
    if tensor.device != x.device:
        yield f"{name} is on {tensor.device}, but x is on {x.device}"


def _routing_reasons(
    x, E, probs, routing_map, topk, topk_indices, topk_probs, lists
) -> Iterator[str]:
    """What does not fit in the routing, in one of its three forms."""
    T = x.shape[0]
    given = tuple(
        value is not None for value in (probs, routing_map, topk_indices, topk_probs, lists)
    )
    if given == (True, True, False, False, False):
        yield from _mismatches("probs", probs, (T, E), x)
        yield from _mismatches("routing_map", routing_map, (T, E), x)
    elif given == (False, False, True, True, False):
        K = topk_indices.shape[1] if topk_indices.dim() == 2 else "K"
        yield from _mismatches("topk_indices", topk_indices, (T, K), x)
        yield from _mismatches("topk_probs", topk_probs, tuple(topk_indices.shape), x)
    elif given in ((True, False, False, False, True), (False, False, False, True, True)):
        if topk_probs is None:
            yield from _mismatches("probs", probs, (T, E), x)
        else:
            yield from _mismatches("topk_probs", topk_probs, (T, lists.topk), x)
        yield from _mismatches("index_lists", lists.token_index_map, (T, lists.topk), x)
        if lists.num_experts != E:
            yield f"index_lists has {lists.num_experts} experts, the weights {E}"
    else:
        yield (
            "give the routing in one form: probs and routing_map, topk_indices and topk_probs, "
            "or index_lists with probs or topk_probs"
        )
    if topk is not None and routing_map is None:
        yield f"topk={topk!r} goes with routing_map only"
    for name, value in (("probs", probs), ("topk_probs", topk_probs)):
        if value is not None and value.dtype not in PROBS_DTYPES:
            yield f"{name} is {value.dtype}; use fp32, fp64, bf16 or fp16"


def _check_arguments(
    x, fc1_weight, fc2_weight, fc1_bias, fc2_bias, probs, routing_map, topk, topk_indices,
    topk_probs, lists, activation, fusion, workspace_bytes, recompute_fc1, fp8_store,
) -> None:  # fmt: skip
    """Raises one ValueError with everything that does not fit."""
    required = {"x": x, "fc1_weight": fc1_weight, "fc2_weight": fc2_weight}
    optional = {"fc1_bias": fc1_bias, "fc2_bias": fc2_bias, "probs": probs,
                "routing_map": routing_map, "topk_indices": topk_indices,
                "topk_probs": topk_probs}  # fmt: skip
    tensors = required | {name: value for name, value in optional.items() if value is not None}
    reasons = []
    for name, value in tensors.items():
        if not torch.is_tensor(value):
            reasons.append(f"{name} is a {type(value).__name__}, not a tensor")
        elif value.layout is not torch.strided or value.is_meta:
            reasons.append(
                f"{name} is {value.layout} on {value.device}; give a dense tensor on a GPU or CPU"
            )
        elif is_traceable_wrapper_subclass(value):  # has no address for a kernel
            reasons.append(
                f"{name} is a {type(value).__name__}; give the tensor inside (DTensor.to_local())"
            )
    if lists is not None and not isinstance(lists, IndexLists):
        reasons.append(f"index_lists is {_described(lists)}, not an IndexLists")
    if reasons:
        raise ValueError("moeblaze_experts: " + "; ".join(reasons))
    if x.dim() != 2 or fc1_weight.dim() != 3 or fc2_weight.dim() != 3:
        raise ValueError(
            "moeblaze_experts wants x [T, H], fc1_weight [E, 2F or F, H] and fc2_weight [E, H, F]; "
            f"got {tuple(x.shape)}, {tuple(fc1_weight.shape)} and {tuple(fc2_weight.shape)}"
        )
    if not isinstance(activation, str):
        raise ValueError(f"activation={activation!r} is neither a name nor an Activation")
    activation = Activation.of(activation)
    if activation.name not in ACTIVATIONS:
        raise ValueError(f"activation={activation.name!r} is not one of {', '.join(ACTIVATIONS)}")
    H, (E, _, ffn) = x.shape[1], fc2_weight.shape
    width = 2 * ffn if activation.gated else ffn
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    dtypes = PROBS_DTYPES if kernels_for(x) is reference else DTYPES

    if not (H and ffn):
        reasons.append(f"H={H} and F={ffn} must be 1 or more")
    if x.dtype not in dtypes:
        reasons.append(f"x is {x.dtype}; use bf16, fp16 or fp32")
    if activation.clamp is not None and not (_is_number(activation.clamp) and activation.clamp > 0):
        reasons.append(
            f"activation {activation.name!r} with clamp={activation.clamp!r}, but clamp must be a "
            "finite number above 0, or None"
        )
    if not _is_number(activation.offset):
        reasons.append(
            f"activation {activation.name!r} with offset={activation.offset!r}, but offset must be "
            "a finite number"
        )
    if not activation.gated and (activation.clamp is not None or activation.offset):
        reasons.append(f"{activation}: clamp and offset go with {', '.join(GATED)}")
    reasons += _mismatches("fc1_weight", fc1_weight, (E, width, H), x)
    reasons += _mismatches("fc2_weight", fc2_weight, (E, H, ffn), x)
    weights = {"fc1_weight": fc1_weight, "fc2_weight": fc2_weight}
    biases = {name: tensors[name] for name in ("fc1_bias", "fc2_bias") if name in tensors}
    for name, bias in biases.items():
        reasons += _mismatches(name, bias, (E, width if name == "fc1_bias" else H), x)
    for name, weight in (weights | biases).items():
        if not autocast and weight.dtype != x.dtype:
            reasons.append(f"{name} is {weight.dtype}, but x is {x.dtype}")
        elif weight.dtype not in dtypes:
            reasons.append(f"{name} is {weight.dtype}; use bf16, fp16 or fp32")
    for name, weight in weights.items():
        if fusion and weight.requires_grad and torch.is_grad_enabled():
            grad = getattr(weight, "main_grad", None)
            if grad is None:
                reasons.append(f"gradient_accumulation_fusion=True, but {name} has no main_grad")
            elif grad.device != x.device:
                reasons.append(f"{name}.main_grad is on {grad.device}, but x is on {x.device}")
            elif not grad.is_floating_point():
                reasons.append(f"{name}.main_grad is {grad.dtype}; use fp32, or {weight.dtype}")
            elif grad.numel() != weight.numel() or not grad.is_contiguous():
                reasons.append(
                    f"{name}.main_grad is {tuple(grad.shape)} with strides {grad.stride()}; "
                    f"gradient_accumulation_fusion adds to a contiguous {tuple(weight.shape)}"
                )

    reasons += _routing_reasons(x, E, probs, routing_map, topk, topk_indices, topk_probs, lists)
    if (
        fusion
        and kernels_for(x) is kernels
        and (H * dtype.itemsize % 16 or ffn * dtype.itemsize % 16)
    ):
        reasons.append(
            f"gradient_accumulation_fusion=True needs rows of whole 16 bytes; H={H}, F={ffn} in "
            f"{dtype} are not"
        )
    if workspace_bytes is not None and not (_is_int(workspace_bytes) and workspace_bytes > 0):
        reasons.append(f"workspace_bytes={workspace_bytes!r} must be a positive int")
    if recompute_fc1 and fp8_store:
        reasons.append(
            "recompute_fc1=True saves no fc1_output that fp8_store=True could store; leave one out"
        )
    if reasons:
        raise ValueError("moeblaze_experts: " + "; ".join(reasons))


@_eager
def moeblaze_experts(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    *,
    fc1_bias: torch.Tensor | None = None,
    fc2_bias: torch.Tensor | None = None,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    topk: int | None = None,
    topk_indices: torch.Tensor | None = None,
    topk_probs: torch.Tensor | None = None,
    index_lists: IndexLists | None = None,
    activation: str | Activation = "swiglu",
    gradient_accumulation_fusion: bool = False,
    workspace_bytes: int | None = None,
    recompute_fc1: bool = False,
    fp8_store: bool = False,
    check: bool = False,
) -> torch.Tensor:
    """Routed experts of an MoE layer without permuted token buffers (arXiv 2601.05296).

    output[t] = sum over the experts e of t of prob[t, e] * (W2[e] f(W1[e] x[t] + b1[e]) + b2[e]).
    Saved for backward: x, W1 x + b1 (`fc1_output`, [R, 2F]) and index lists. Differentiable once in
    x, weights, biases and probabilities; a second backward through one graph is refused, since
    backward writes over what forward saved. The routing comes in one of three forms:

    * `probs` [T, E] and `routing_map` [T, E] bool, as Megatron's router returns them, with `topk`
      the most experts a token can have (default: counted, which waits for the device);
    * `topk_indices` [T, K] integer (-1 = no expert) and `topk_probs` [T, K];
    * `index_lists`, built once from either, and `probs` [T, E] or `topk_probs` [T, K].

    Args:
        x: [T, H] bf16, fp16 or fp32 (fp64 on the CPU too).
        fc1_weight: [E, 2F, H], gate half first, for the `GATED` activations, else [E, F, H]; x's
            dtype.
        fc2_weight: [E, H, F]; x's dtype.
        fc1_bias: [E, 2F] or [E, F]; x's dtype. Added before the activation.
        fc2_bias: [E, H]; x's dtype. Weighted by the probability.
        activation: one of `ACTIVATIONS`, or an `Activation`, which has a clamp and an offset too.
        gradient_accumulation_fusion: add the weight gradients into `weight.main_grad` and set
            `weight.grad_added_to_main_grad`, as Megatron's linears do. Biases get `grad`.
        workspace_bytes: bound on the [R, columns] buffer through which fc2, its gradients and the
            combine work in column slices; at least 128 columns are taken. None is what fits
            beneath the layer's own peak, and 1/24 of that on top (`ops.memory`).
        recompute_fc1: save nothing but x and index lists, and run fc1 again in backward.
        fp8_store: save `fc1_output` in MXFP8 (`ops.mxfp8`), 33/32 bytes an element. The output is
            the same; gradients see the activation's input rounded. Not with `recompute_fc1`.
        check: refuse expert ids out of range or named twice; waits for the device. Always done on
            the CPU. Unchecked, ids out of range route nowhere and a repeated expert counts twice.
    Returns:
        [T, H] in x's dtype; a token without experts gets zeros.
    Raises:
        ValueError: naming every argument that does not fit.
    """
    _check_arguments(
        x, fc1_weight, fc2_weight, fc1_bias, fc2_bias, probs, routing_map, topk, topk_indices,
        topk_probs, index_lists, activation, gradient_accumulation_fusion, workspace_bytes,
        recompute_fc1, fp8_store,
    )  # fmt: skip
    E, T = fc1_weight.shape[0], x.shape[0]
    if index_lists is not None:
        lists = index_lists
    elif routing_map is not None:
        if topk is None:
            topk = max(1, int(routing_map.sum(1).max())) if T else 1
        lists = index_lists_from_routing_map(routing_map, topk, check=check)
    else:
        lists = index_lists_from_topk(topk_indices, E, check=check)

    fused = (fc1_weight, fc2_weight) if gradient_accumulation_fusion else (None, None)
    operands = (x, fc1_weight, fc2_weight, fc1_bias, fc2_bias)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        operands = (operand if operand is None else operand.to(dtype) for operand in operands)
    H = x.shape[1]
    x, fc1_weight, fc2_weight, fc1_bias, fc2_bias = _aligned(*operands)
    dense = topk_probs is None
    differentiable = (
        x, fc1_weight, fc2_weight, probs if dense else topk_probs, fc1_bias, fc2_bias
    )  # fmt: skip
    differentiate = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in differentiable
    )
    with torch.cuda.device_of(x):  # Triton launches on the current GPU; backward runs on it too
        output = _Experts.apply(
            *differentiable, lists, dense, Activation.of(activation), fused, workspace_bytes,
            recompute_fc1, fp8_store, differentiate,
        )  # fmt: skip
    return output if output.shape[1] == H else output[:, :H]
