"""What is measured beside ours: the ceiling of dense GEMMs, permuting layers, other packages.

T tokens, K experts per token, E experts, H hidden size, F ffn hidden size, R = T*K rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec

import torch
import triton

from moeblaze_megatron import (
    ACTIVATIONS,
    GATED,
    Activation,
    index_lists_from_topk,
    moeblaze_experts,
)
from moeblaze_megatron.bench.shapes import DEVICE, Inputs, Shape
from moeblaze_megatron.ops.experts import kernels_for
from moeblaze_megatron.ops.reference import FUNCTIONS, activate

# private before torch 2.10
grouped_gemm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
Layer = Callable[[Inputs], torch.Tensor]  # autograd gives its backward


@dataclass(frozen=True)
class Peer:
    """A system to measure. `lay` and `unlay` are never timed."""

    make: Callable[[Shape], Layer]
    lay: Callable | None = None  # fc1_weight, fc2_weight -> the weights it takes; None = those
    unlay: Callable = lambda *grads: grads  # gradients of the latter -> of the former
    activations: tuple[str, ...] = ACTIVATIONS
    rounding: float = 0.0  # error that it may have where the dtype explains less
    imports: str = ""  # the module of another project; empty = part of this benchmark
    package: str = ""
    install: str = ""

    def inputs(self, inputs: Inputs) -> Inputs:
        """The same inputs with the weights as this peer wants them, as parameters of their own."""
        if self.lay is None:
            return inputs
        laid = self.lay(*(w.detach() for w in inputs.weights))
        return replace(inputs, weights=tuple(map(torch.nn.Parameter, laid)))


def moeblaze(shape: Shape, **options) -> Layer:
    def layer(inputs: Inputs) -> torch.Tensor:
        return moeblaze_experts(
            inputs.x,
            *inputs.weights,
            topk_indices=inputs.topk_indices,
            topk_probs=inputs.topk_probs,
            activation=shape.activation,
            **options,
        )

    return layer


class _Permute(torch.autograd.Function):
    """x [T, H] -> its rows [R, H]; backward sums a token's rows. One pass each way."""

    @staticmethod
    def forward(ctx, x, lists):
        ctx.lists = lists
        return kernels_for(x).gather(x, lists, x.new_empty(lists.max_rows, x.shape[1]), 0)

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(ctx.lists.num_tokens, grad.shape[1])
        return kernels_for(grad).combine(grad.contiguous(), ctx.lists, out, 0), None


class _Unpermute(torch.autograd.Function):
    """Rows [R, H] -> their sum by token [T, H]; backward copies a token's gradient to its rows."""

    @staticmethod
    def forward(ctx, rows, lists):
        ctx.lists = lists
        return kernels_for(rows).combine(
            rows, lists, rows.new_empty(lists.num_tokens, rows.shape[1]), 0
        )

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(ctx.lists.max_rows, grad.shape[1])
        return kernels_for(grad).gather(grad.contiguous(), ctx.lists, out, 0), None


def _permuting(shape: Shape, linears: Callable) -> Layer:
    """Permute, first linear, fused activation times probability, second linear, unpermute.

    The MegaBlocks-style layer in its best form on plain torch: the index lists, the permute and
    the unpermute are ours, the activation is one kernel by torch.compile. `linears(inputs, lists)`
    are two functions of the rows.
    """

    activation = Activation(shape.activation)

    @torch.compile(dynamic=False, fullgraph=True)
    def weighted(fc1_output, probs):
        return (activate(fc1_output.float(), activation) * probs[:, None]).to(fc1_output.dtype)

    def layer(inputs: Inputs) -> torch.Tensor:
        lists = index_lists_from_topk(inputs.topk_indices, shape.E)
        fc1, fc2 = linears(inputs, lists)
        probs = inputs.topk_probs.new_empty(lists.max_rows).index_put(
            (lists.token_index_map.flatten(),), inputs.topk_probs.flatten()
        )
        act = weighted(fc1(_Permute.apply(inputs.x, lists)), probs)
        return _Unpermute.apply(fc2(act), lists)

    return layer


def grouped_mm(shape: Shape) -> Layer:
    def linears(inputs, lists):
        offs = lists.expert_token_offsets[1:]
        return [lambda rows, w=w: grouped_gemm(rows, w.mT, offs=offs) for w in inputs.weights]

    return _permuting(shape, linears)


def transformer_engine(shape: Shape) -> Layer:
    """What Megatron's experts run: GroupedLinear, here between our permute and unpermute."""
    from transformer_engine.pytorch import GroupedLinear

    made = {}  # two modules for each set of weights; weights = E of fc1 [2F, H], E of fc2 [H, F]

    def modules(weights):
        for w in (weights[: shape.E], weights[shape.E :]):
            out_features, in_features = w[0].shape
            linear = GroupedLinear(
                shape.E, in_features, out_features, bias=False, params_dtype=w[0].dtype
            )
            for e in range(shape.E):
                setattr(linear, f"weight{e}", w[e])
            yield linear

    def linears(inputs, lists):
        key = id(inputs.weights)
        if key not in made:
            made[key] = list(modules(inputs.weights))
        splits = lists.tokens_per_expert.tolist()
        return [lambda rows, linear=linear: linear(rows, splits) for linear in made[key]]

    return _permuting(shape, linears)


def _stacked(*grads):
    fc1, fc2 = grads[: len(grads) // 2], grads[len(grads) // 2 :]
    return torch.stack(fc1), torch.stack(fc2)


class _Chain(torch.autograd.Function):
    """Two dense GEMMs forward and four backward, on buffers made beforehand; nothing else."""

    @staticmethod
    def forward(ctx, x, rows, wide, act, w1, w2):
        ctx.operands = rows, wide, act, w1, w2
        torch.mm(rows, w1.T, out=wide)
        torch.mm(act, w2.T, out=rows)
        return x

    @staticmethod
    def backward(ctx, grad):
        rows, wide, act, w1, w2 = ctx.operands
        torch.mm(rows, w2, out=act)
        torch.mm(rows.T, act)
        torch.mm(wide.T, rows)
        torch.mm(wide, w1, out=rows)
        return grad, None, None, None, None, None


def dense(shape: Shape) -> Layer:
    """The ceiling: dense GEMMs of the layer's FLOPs, one weight for all rows. Computes no MoE."""
    R, made = shape.T * shape.K, {}

    def layer(inputs: Inputs) -> torch.Tensor:
        if not made:
            for name, width in (("rows", shape.H), ("wide", shape.fc1_width), ("act", shape.F)):
                made[name] = torch.randn(R, width, device=DEVICE, dtype=inputs.x.dtype)
        return _Chain.apply(inputs.x, *made.values(), *(w[0].detach() for w in inputs.weights))

    return layer


def sonicmoe(shape: Shape) -> Layer:
    """SonicMoE with the routing given: what its `moe_TC_softmax_topk_layer` runs after its router.

    Its public entry for a given routing allows another K for each token, which is slower.
    """
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import _DownProjection, _UpProjection
    from sonicmoe.functional.triton_kernels import TC_topk_router_metadata_triton

    T, E, K, R = shape.T, shape.E, shape.K, shape.T * shape.K
    activation = ActivationType(shape.activation)

    def layer(inputs: Inputs) -> torch.Tensor:
        sizes = (E, E + 1, R, R, R)
        frequency, offsets, *maps = (
            torch.empty(size, dtype=torch.int32, device=inputs.x.device) for size in sizes
        )
        TC_topk_router_metadata_triton(inputs.topk_indices, E, frequency, offsets, *maps)
        fc1_weight, fc2_weight = (w.permute(1, 2, 0) for w in inputs.weights)
        fixed_k = (None, False)
        act, fc1_output = _UpProjection.apply(
            inputs.x, fc1_weight, None, offsets, R, K, *maps, *fixed_k, activation, False
        )
        return _DownProjection.apply(
            act, fc1_output, fc2_weight, None, inputs.topk_probs, offsets, T, K, *maps, *fixed_k,
            activation,
        )  # fmt: skip

    return layer


def _interleave(fc1, fc2):
    """SonicMoE's fc1: row 2f is the gate's row f, row 2f + 1 the other half's."""
    return fc1.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous(), fc2


def _deinterleave(fc1, fc2):
    return fc1.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2), fc2


def megablocks(shape: Shape) -> Layer:
    """MegaBlocks' dropless layer over grouped GEMMs, with its manual reuse of memory."""
    from megablocks import ops
    from megablocks.layers.glu import memory_optimized_grouped_glu
    from megablocks.layers.mlp import memory_optimized_grouped_mlp

    gated = shape.activation in GATED
    experts = memory_optimized_grouped_glu if gated else memory_optimized_grouped_mlp
    bits = max((shape.E - 1).bit_length(), 1)

    def layer(inputs: Inputs) -> torch.Tensor:
        ids = inputs.topk_indices.flatten()
        bin_ids, indices = ops.sort(ids, bits)
        tokens_per_expert = ops.histogram(ids, shape.E)
        bins = ops.inclusive_cumsum(tokens_per_expert, 0).view(shape.E)
        rows = ops.gather(inputs.x, indices, bin_ids, bins, shape.K)
        rows = experts(
            rows, *inputs.weights, tokens_per_expert.cpu().long(), FUNCTIONS[shape.activation]
        )
        return ops.scatter(rows, indices, bin_ids, inputs.topk_probs.flatten(), bins, shape.K)

    return layer


def _split_and_turned(fc1, fc2):
    """MegaBlocks' weights: gate and other half apart, each [E, F, H]; fc2 as [E, F, H]."""
    F = fc2.shape[2]
    return *(half.contiguous() for half in fc1.split(F, dim=1)), fc2.mT.contiguous()


def _joined_and_turned(*grads):
    *fc1, fc2 = grads
    return torch.cat(fc1, dim=1), fc2.mT


def scattermoe(shape: Shape) -> Layer:
    """ScatterMoE's MLP or GLUMLP as its modules write them, with our half of the gate first."""
    from scattermoe import flatten_sort_count, parallel_linear

    def layer(inputs: Inputs) -> torch.Tensor:
        order = flatten_sort_count(inputs.topk_indices.long(), num_experts=shape.E)
        fc1_weight, fc2_weight = (w.mT for w in inputs.weights)
        fc1_output = parallel_linear(inputs.x, fc1_weight, shape.K, *order, grouped_out=True)
        act = activate(fc1_output, shape.activation)
        gates = inputs.topk_probs.to(inputs.x.dtype)
        return parallel_linear(act, fc2_weight, 1, *order, gates=gates, grouped_in=True)

    return layer


PEERS = {
    "dense": Peer(dense),
    "moeblaze": Peer(moeblaze),
    "fp8_store": Peer(partial(moeblaze, fp8_store=True), rounding=1 / 8),
    "recompute_fc1": Peer(partial(moeblaze, recompute_fc1=True)),
    "large_workspace": Peer(partial(moeblaze, workspace_bytes=2**40)),  # for all rows
    "grouped_mm": Peer(grouped_mm),
    "sonicmoe": Peer(
        sonicmoe,
        lay=_interleave,
        unlay=_deinterleave,
        activations=("swiglu",),
        imports="sonicmoe",
        package="sonic-moe",
        install="pip install 'sonic-moe[cu13]'",
    ),
    "megablocks": Peer(
        megablocks,
        lay=_split_and_turned,
        unlay=_joined_and_turned,
        imports="megablocks",
        package="megablocks",
        install="pip install 'megablocks[gg]'",
    ),
    "scattermoe": Peer(
        scattermoe,
        imports="scattermoe",
        package="scattermoe",
        install="pip install git+https://github.com/shawntan/scattermoe",
    ),
    "te": Peer(
        transformer_engine,
        lay=lambda fc1, fc2: (*fc1.unbind(), *fc2.unbind()),
        unlay=_stacked,
        imports="transformer_engine",
        package="transformer-engine",
        install="pip install 'transformer-engine[pytorch]'",
    ),
}
OURS = ("moeblaze", "fp8_store", "recompute_fc1", "large_workspace")  # what fails is a bug
CEILING = "dense"  # computes no MoE: no error, no memory


def installed() -> list[str]:
    return [name for name, peer in PEERS.items() if not peer.imports or find_spec(peer.imports)]


def chosen(names: list[str] | None) -> list[str]:
    """The names, or all that are installed.

    Raises:
        ValueError: naming every name that is unknown or not installed, and what to do.
    """
    here = installed()
    reasons = [
        f"{name} is not installed: {PEERS[name].install}"
        if name in PEERS
        else f"{name!r} is none of {', '.join(PEERS)}"
        for name in names or ()
        if name not in here
    ]
    if reasons:
        raise ValueError("--peers: " + "; ".join(reasons))
    return names or here


def versions(names: list[str]) -> str:
    known = {d.name.lower().replace("_", "-"): d.version for d in metadata.distributions()}
    found = [("torch", torch.__version__), ("triton", triton.__version__)]
    for name in names:
        if PEERS[name].package:
            found.append((name, known.get(PEERS[name].package, "of unknown version")))
    return ", ".join(f"{name} {version}" for name, version in found)
