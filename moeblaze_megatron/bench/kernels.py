"""Every kernel of the layer as a call of its own, and the work it does."""

from collections.abc import Callable

import torch

from moeblaze_megatron import Activation, index_lists_from_topk
from moeblaze_megatron.bench.shapes import Inputs, Shape
from moeblaze_megatron.ops.experts import kernels_for

GEMMS = ("fc1", "fc2", "fc2 dgrad", "fc1 dgrad", "fc2 wgrad", "fc1 wgrad")
KERNELS = (
    *("index lists", "gather", "fc1", "fc2", "combine", "fc2 dgrad"),
    *("fc2 dgrad, lookup", "fc1 dgrad", "fc2 wgrad", "fc2 wgrad, lookup", "fc1 wgrad"),
    *("fc1 wgrad, lookup", *(f"{gemm}, dense" for gemm in GEMMS)),
)


def kernel_calls(
    shape: Shape, inputs: Inputs
) -> tuple[dict[str, tuple[float, str]], dict[str, Callable[[], object]], Callable[[], object]]:
    """Work (FLOPs or bytes, with the unit of its rate) and call, by kernel; what precedes a call.

    GEMMs run over all columns at once, beside one dense cuBLAS GEMM of the same FLOPs each. Before
    each, what fc2's dgrad replaces is restored: a GPU takes another time for numbers that shrink
    or grow from call to call.
    """
    x, fc1_weight, fc2_weight, probs = (leaf.detach() for leaf in inputs.leaves)
    kernels = kernels_for(x)
    grad_output, H, F, T = inputs.grad_output, shape.H, shape.F, shape.T
    lists = index_lists_from_topk(inputs.topk_indices, shape.E)
    R, size = lists.max_rows, x.element_size()
    permuted_probs = kernels.permuted_probs(probs, lists, dense=False)
    activation = Activation(shape.activation)
    fc1_output, act = kernels.fc1(x, fc1_weight, permuted_probs, lists, activation, True)
    saved, grad_act = fc1_output.clone(), torch.empty_like(act)
    rows = kernels.gather(x, lists, x.new_empty(R, H), 0)
    output = torch.empty_like(x)
    grad_fc1, grad_fc2 = torch.empty_like(fc1_weight), torch.empty_like(fc2_weight)

    fc1_flops, fc2_flops = 2 * R * H * shape.fc1_width, 2 * R * H * F
    calls = {
        "index lists": lambda: index_lists_from_topk(inputs.topk_indices, shape.E),
        "gather": lambda: kernels.gather(x, lists, rows, 0),
        "fc1": lambda: kernels.fc1(x, fc1_weight, permuted_probs, lists, activation, True),
        "fc2": lambda: kernels.rows_gemm(act, fc2_weight, lists, rows, 0, False, True),
        "combine": lambda: kernels.combine(rows, lists, output, 0),
        "fc2 dgrad": lambda: kernels.fc2_dgrad(
            rows, fc2_weight, fc1_output, permuted_probs, lists, activation, False
        ),
        "fc2 dgrad, lookup": lambda: kernels.fc2_dgrad(
            grad_output, fc2_weight, fc1_output, permuted_probs, lists, activation, True
        ),
        "fc1 dgrad": lambda: kernels.rows_gemm(
            fc1_output, fc1_weight, lists, rows, 0, False, False
        ),
        "fc2 wgrad": lambda: kernels.wgrad(rows, act, lists, grad_fc2, False),
        "fc2 wgrad, lookup": lambda: kernels.wgrad(grad_output, act, lists, grad_fc2, False, "a"),
        "fc1 wgrad": lambda: kernels.wgrad(fc1_output, rows, lists, grad_fc1, False),
        "fc1 wgrad, lookup": lambda: kernels.wgrad(fc1_output, x, lists, grad_fc1, False, "b"),
    }
    fc1, fc2 = fc1_weight[0], fc2_weight[0]
    calls |= {
        "fc1, dense": lambda: torch.mm(rows, fc1.t(), out=fc1_output),
        "fc2, dense": lambda: torch.mm(act, fc2.t(), out=rows),
        "fc2 dgrad, dense": lambda: torch.mm(rows, fc2, out=grad_act),
        "fc1 dgrad, dense": lambda: torch.mm(fc1_output, fc1, out=rows),
        "fc2 wgrad, dense": lambda: torch.mm(rows.t(), act, out=grad_fc2[0]),
        "fc1 wgrad, dense": lambda: torch.mm(fc1_output.t(), rows, out=grad_fc1[0]),
    }
    traffic = {
        "index lists": 4 * (2 * T * shape.K + R),
        "gather": 2 * R * H * size,
        "combine": (R + T) * H * size,
    }
    work = {
        name: (traffic[name], "TB/s")
        if name in traffic
        else (fc1_flops if name.startswith("fc1") else fc2_flops, "TFLOP/s")
        for name in calls
    }
    return work, calls, lambda: fc1_output.copy_(saved)
