"""Named shapes: the MoEBlaze paper's configurations and layers of public models."""

from dataclasses import dataclass, replace

import torch

from moeblaze_megatron import GATED
from moeblaze_megatron.ops.index_lists import MAX_EXPERTS, MAX_TOPK

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    """T tokens, H hidden size, F ffn hidden size of an expert, E experts, K experts per token."""

    T: int
    H: int
    F: int
    E: int
    K: int
    activation: str = "swiglu"

    def __str__(self) -> str:
        return f"{self.T}, {self.H}, {self.F}, {self.E}, {self.K}"

    @property
    def fc1_width(self) -> int:
        return self.F * (2 if self.activation in GATED else 1)

    @property
    def forward_flops(self) -> int:
        return 2 * self.T * self.K * self.H * (self.fc1_width + self.F)


SHAPES = {
    "conf1": Shape(65536, 512, 2048, 4, 1),
    "conf2": Shape(65536, 1024, 4096, 8, 2),
    "conf3": Shape(65536, 1024, 4096, 16, 4),
    "conf4": Shape(32768, 2048, 8192, 16, 4),
    "conf5": Shape(32768, 512, 2048, 16, 4),
    "conf6": Shape(16384, 1024, 4096, 16, 4),
    "conf7": Shape(8192, 2048, 8192, 8, 4),
    "qwen3-30b": Shape(32768, 2048, 768, 128, 8),
    "olmoe": Shape(32768, 2048, 1024, 64, 8),
    "mixtral-8x7b": Shape(16384, 4096, 14336, 8, 2),
    "deepseek-v3-ep8": Shape(16384, 7168, 2048, 32, 4),
    "sonic-7b": Shape(24576, 1536, 256, 128, 8),
}


def shape_from(text: str, activation: str) -> Shape:
    """A name of `SHAPES`, or "T,H,F,E,K".

    Raises:
        ValueError: naming the shape and the names there are.
    """
    if text in SHAPES:
        return replace(SHAPES[text], activation=activation)
    sizes = text.split(",")
    if len(sizes) != 5 or not all(size.strip().removeprefix("-").isdigit() for size in sizes):
        raise ValueError(f"shape {text!r} is neither T,H,F,E,K nor one of {', '.join(SHAPES)}")
    shape = Shape(*map(int, sizes), activation)
    if shape.K > shape.E or min(map(int, sizes)) < 1:
        raise ValueError(f"shape {text!r}: sizes are positive and K is at most E")
    if shape.E > MAX_EXPERTS or shape.K > MAX_TOPK:
        raise ValueError(f"shape {text!r}: E is at most {MAX_EXPERTS} and K at most {MAX_TOPK}")
    return shape


def shapes_from(texts: list[str], activation: str) -> list[tuple[str, Shape]]:
    """[(text, its shape)].

    Raises:
        ValueError: naming all that are none.
    """
    shapes, reasons = [], []
    for text in texts:
        try:
            shapes.append((text, shape_from(text, activation)))
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        raise ValueError("; ".join(reasons))
    return shapes


ROUTINGS = ("uneven", "uniform", "zipf", "half-empty", "one-expert")


@dataclass(frozen=True)
class Inputs:
    """Operands of one layer, as leaves that take gradients, and an upstream gradient."""

    x: torch.Tensor  # [T, H]
    # fc1_weight [E, 2F or F, H] and fc2_weight [E, H, F], or the same in a peer's own layout
    weights: tuple[torch.Tensor, ...]
    topk_indices: torch.Tensor  # [T, K] int32
    topk_probs: torch.Tensor  # [T, K] fp32
    grad_output: torch.Tensor  # [T, H]

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.x, *self.weights, self.topk_probs

    def clear_grads(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def tokens_per_expert(self, num_experts: int) -> torch.Tensor:
        return torch.bincount(self.topk_indices.flatten(), minlength=num_experts)


def choices(shape: Shape, routing: str, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax top-k routing: probabilities [T, K] fp32 and experts [T, K] int64."""
    logits = torch.randn(shape.T, shape.E, generator=g, device=DEVICE)
    rank = torch.arange(1, shape.E + 1, device=DEVICE)
    if routing == "uneven":
        logits += 0.2 * torch.randn(shape.E, generator=g, device=DEVICE)
    elif routing == "zipf":  # the largest of log p + Gumbel noise is expert e with probability p_e
        logits = -logits.exponential_(generator=g).log() - rank.log()
    elif routing == "half-empty":
        logits[:, max(shape.K, shape.E // 2) :] = float("-inf")
    elif routing == "one-expert":
        logits[:, 0] += 100
    return logits.softmax(-1).topk(shape.K)


def inputs_for(shape: Shape, dtype: torch.dtype, routing: str = "uneven", seed: int = 0) -> Inputs:
    """Fresh random operands on the GPU, or the CPU where there is none; softmax top-k routing.

    Args:
        routing: "uneven" (a mild random imbalance), "uniform" (none but chance), "zipf" (expert
            popularity 1/rank), "half-empty" (half of the experts get no token) or "one-expert"
            (every token's first choice is expert 0).
    """
    g = torch.Generator(DEVICE).manual_seed(seed)

    def draw(*size, scale=1.0):
        made = torch.randn(size, generator=g, device=DEVICE, dtype=dtype) * scale
        return made.requires_grad_()

    probs, ids = choices(shape, routing, g)
    return Inputs(
        x=draw(shape.T, shape.H),
        weights=(
            draw(shape.E, shape.fc1_width, shape.H, scale=shape.H**-0.5),
            draw(shape.E, shape.H, shape.F, scale=shape.F**-0.5),
        ),
        topk_indices=ids.int(),
        topk_probs=probs.clone().requires_grad_(),
        grad_output=draw(shape.T, shape.H).detach(),
    )
