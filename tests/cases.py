"""Shapes and routings that the operator's tests share; every case says why it is there."""

from dataclasses import dataclass

import torch

from moeblaze_megatron import Activation, moeblaze_experts
from moeblaze_megatron.ops.reference import moe_reference


@dataclass(frozen=True)
class Case:
    T: int
    H: int
    F: int
    E: int
    K: int
    why: str
    activation: str | Activation = "swiglu"
    bias: bool = False
    dropped: float = 0.0  # share of (token, k) slots without an expert
    only: tuple[int, ...] = ()  # the experts that get tokens; () = all but the last
    draws: int = 1  # seeds, taken together where one has too few values to compare roundings by

    def __str__(self) -> str:
        return self.why.replace(" ", "-")


GPT_OSS = Activation("quick_geglu", clamp=4.0, offset=1.0)

SMALL = [
    Case(40, 64, 32, 4, 2, "whole and partial tiles"),
    Case(7, 64, 32, 4, 2, "fewer tokens than one tile"),
    Case(0, 32, 32, 4, 2, "no tokens"),
    Case(1, 32, 32, 4, 2, "one token", draws=16),
    Case(33, 32, 32, 1, 1, "one expert", only=(0,)),
    Case(33, 32, 32, 5, 3, "experts not a power of two"),
    Case(24, 32, 32, 8, 1, "seven of eight experts empty", only=(2,)),
    Case(30, 32, 32, 6, 4, "dropped slots", dropped=0.4),
    Case(12, 32, 32, 4, 2, "every slot dropped", dropped=1.0),
    Case(17, 32, 16, 12, 8, "top-8"),
    Case(20, 96, 48, 4, 2, "H and F not powers of two"),
    Case(20, 100, 36, 4, 2, "rows that are not whole 16 bytes in bf16"),
    Case(20, 136, 40, 4, 2, "a column tile past the end"),
    Case(30, 32, 32, 4, 2, "geglu", activation="geglu"),
    Case(30, 32, 32, 4, 2, "silu", activation="silu"),
    Case(30, 32, 32, 4, 2, "gelu", activation="gelu"),
    Case(30, 32, 32, 4, 2, "squared relu", activation="squared_relu"),
    Case(30, 32, 32, 4, 2, "quick geglu", activation="quick_geglu"),
    Case(30, 32, 32, 4, 2, "clamp", activation=Activation("swiglu", clamp=5.0), bias=True),
    Case(30, 32, 32, 4, 2, "offset", activation=Activation("geglu", offset=0.5)),
    Case(40, 64, 48, 4, 2, "biases", bias=True, dropped=0.2),
    Case(20, 36, 20, 4, 2, "biases padded", activation=GPT_OSS, bias=True),
    Case(20, 32, 40, 4, 2, "biases without a gate", activation="squared_relu", bias=True),
    Case(0, 32, 32, 4, 2, "biases and no tokens", bias=True),
]

LARGE = [
    Case(4097, 256, 128, 16, 4, "one token more than whole tiles"),
    Case(129, 1000, 136, 3, 2, "H and F not multiples of the tile"),
    Case(513, 2880, 2880, 4, 2, "gpt-oss sizes"),
    Case(127, 64, 96, 60, 6, "60 experts"),
    Case(1000, 128, 64, 96, 8, "96 experts"),
    Case(1000, 128, 64, 160, 6, "160 experts"),
    Case(2048, 128, 64, 256, 8, "256 experts"),
    Case(2048, 128, 64, 1024, 8, "the most experts"),
    Case(300, 128, 64, 64, 32, "the largest top-k"),
    Case(3000, 512, 256, 8, 2, "all tokens to one expert", only=(5,), dropped=0.5),
    Case(2000, 256, 1536, 8, 2, "several column tiles", dropped=0.1),
    Case(1500, 512, 384, 8, 2, "geglu", activation="geglu"),
    Case(1500, 512, 384, 8, 2, "silu", activation="silu"),
    Case(9000, 512, 384, 8, 2, "silu, several tiles a program", activation="silu", dropped=0.1),
    Case(1500, 512, 384, 8, 2, "gelu", activation="gelu"),
    Case(1500, 512, 384, 8, 2, "squared relu", activation="squared_relu"),
    Case(1500, 512, 384, 8, 2, "quick geglu", activation="quick_geglu"),
    Case(1500, 512, 384, 8, 2, "clamp", activation=Activation("swiglu", clamp=5.0), bias=True),
    Case(3000, 768, 384, 8, 4, "gpt-oss biases", activation=GPT_OSS, bias=True, dropped=0.1),
    Case(1500, 512, 384, 8, 2, "biases", bias=True),
    Case(1500, 520, 392, 8, 2, "biases past a tile", activation="gelu", bias=True),
    Case(1500, 512, 384, 8, 2, "biases without a gate", activation="silu", bias=True),
]


def routing(case: Case, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_indices [T, K] int32 (-1 = none) and topk_probs [T, K] fp32, unevenly spread."""
    g = torch.Generator().manual_seed(seed)
    allowed = torch.full((case.E,), float("-inf"))
    allowed[list(case.only or range(max(1, case.E - 1)))] = 0.0
    skew = torch.randn(case.E, generator=g)
    logits = torch.randn(case.T, case.E, generator=g) + skew + allowed
    probs, ids = logits.softmax(-1).topk(case.K)
    ids[probs == 0] = -1  # a token cannot have more experts than are allowed
    ids[torch.rand(case.T, case.K, generator=g) < case.dropped] = -1
    return ids.int().to(device), probs.to(device)


def operands(case: Case, device: str, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """x, both weights, an upstream gradient and, if the case has them, biases, at unit scale."""
    g = torch.Generator().manual_seed(seed + 1)
    width = case.F * (2 if Activation.of(case.activation).gated else 1)

    def draw(*shape, scale=1.0):
        return (torch.randn(shape, generator=g) * scale).to(device, dtype)

    tensors = {
        "x": draw(case.T, case.H),
        "fc1_weight": draw(case.E, width, case.H, scale=case.H**-0.5),
        "fc2_weight": draw(case.E, case.H, case.F, scale=case.F**-0.5),
        "grad_output": draw(case.T, case.H),
    }
    if case.bias:
        tensors |= {"fc1_bias": draw(case.E, width), "fc2_bias": draw(case.E, case.H)}
        clamp = Activation.of(case.activation).clamp
        if clamp:  # both sides of it, and so far that no rounding crosses it
            tensors["fc1_bias"] = tensors["fc1_bias"].round().clamp(-1, 1) * 2 * clamp
    return tensors


def layer_of(topk_indices: torch.Tensor, activation: str | Activation = "swiglu", **options):
    """`moeblaze_experts` with this routing, for `run`."""

    def layer(x, fc1_weight, fc2_weight, topk_probs, **biases):
        return moeblaze_experts(
            x, fc1_weight, fc2_weight, topk_indices=topk_indices, topk_probs=topk_probs,
            activation=activation, **biases, **options,
        )  # fmt: skip

    return layer


def leaves_of(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """x and both weights, to take gradients."""
    return [tensors[name].requires_grad_() for name in ("x", "fc1_weight", "fc2_weight")]


def run(layer, tensors: dict, topk_probs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and every gradient of `layer(x, fc1_weight, fc2_weight, topk_probs, **biases)`."""
    tensors = tensors | {"probs": topk_probs}
    leaves = {
        name: tensor.detach().clone().requires_grad_()
        for name, tensor in tensors.items()
        if name != "grad_output"
    }
    operands = [leaves[name] for name in ("x", "fc1_weight", "fc2_weight", "probs")]
    biases = {name: leaf for name, leaf in leaves.items() if name.endswith("bias")}
    output = layer(*operands, **biases)
    output.backward(tensors["grad_output"])
    grads = {f"grad_{name}": leaf.grad for name, leaf in leaves.items()}
    return {"output": output.detach(), **grads}


def expected(case: Case, tensors: dict, topk_indices, topk_probs, dtype) -> dict[str, torch.Tensor]:
    """What plain torch computes in `dtype`, by autograd."""

    def layer(x, fc1_weight, fc2_weight, probs, **biases):
        return moe_reference(
            x, fc1_weight, fc2_weight, topk_indices, probs, case.activation, **biases
        )

    wide = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    probs = topk_probs.double() if dtype is torch.float64 else topk_probs
    return run(layer, wide, probs)


def assert_as_close_as_torch(got: dict, eager: dict, exact: dict) -> None:
    """Each result may miss the exact one by twice what eager torch in the same dtype misses it by.

    Relative norm error over the whole tensor; where torch is exact, so must the result be.
    """
    for name, want in exact.items():
        assert got[name].shape == want.shape, name
        norm = want.norm().clamp(min=1e-30)
        miss = ((got[name].double() - want).norm() / norm).item()
        torch_miss = ((eager[name].double() - want).norm() / norm).item()
        assert miss <= 2 * torch_miss, f"{name}: off by {miss:.3e}, torch by {torch_miss:.3e}"


def captured(step):
    """A CUDA graph of `step`, run once before so that kernels compile, and what it returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
