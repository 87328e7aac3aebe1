"""Tile sizes of the kernels, by kernel and dtype. Nothing is tuned while a model trains.

Row tiles hold BLOCK_R routed rows of one expert; they are listed in `IndexLists`, so every kernel
that walks them uses the same height.
"""

import threading
from dataclasses import dataclass, replace

import torch
import triton


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1) instead of compiling."""
    return bool(triton.knobs.runtime.interpret)


BLOCK_R = 16 if interpreting() else 128
GROUP = 8  # row tiles that walk the columns together, so that a weight tile is reused from L2


@dataclass(frozen=True)
class Tile:
    """Tile of a GEMM: output rows x columns, depth of one step, and how it is scheduled."""

    rows: int
    cols: int
    depth: int
    num_warps: int
    num_stages: int

    def fit(self, **limits: int) -> "Tile":
        """The same tile with `rows`, `cols` or `depth` no larger than the problem needs.

        Sizes stay powers of two, 16 at least.
        """
        sizes = {
            name: min(getattr(self, name), max(16, triton.next_power_of_2(limit)))
            for name, limit in limits.items()
        }
        return replace(self, **sizes)


# fc1: two accumulators when gated. rows: a row tile times a weight. wgrad: rows are the depth.
# Hopper GPUs run `hopper` instead; these keep to the registers and shared memory of any GPU.
HALF_TILES = {
    "fc1": Tile(BLOCK_R, 64, 32, num_warps=8, num_stages=3),
    "rows": Tile(BLOCK_R, 128, 32, num_warps=8, num_stages=3),
    "wgrad": Tile(128, 128, 32, num_warps=8, num_stages=3),
    "wgrad_gather": Tile(128, 128, 32, num_warps=8, num_stages=3),
}
# fp32 runs on the plain cores unless torch allows tf32: small tiles that keep to the registers.
FLOAT_TILES = {
    "fc1": Tile(BLOCK_R, 32, 16, num_warps=8, num_stages=2),
    "rows": Tile(BLOCK_R, 64, 16, num_warps=8, num_stages=2),
    "wgrad": Tile(64, 64, 32, num_warps=8, num_stages=2),
    "wgrad_gather": Tile(64, 64, 32, num_warps=8, num_stages=2),
}
INTERPRETER_TILES = {
    "fc1": Tile(BLOCK_R, 32, 32, num_warps=4, num_stages=1),
    "rows": Tile(BLOCK_R, 32, 32, num_warps=4, num_stages=1),
    "wgrad": Tile(32, 32, 16, num_warps=4, num_stages=1),
    "wgrad_gather": Tile(32, 32, 16, num_warps=4, num_stages=1),
}


def tile_for(kernel: str, dtype: torch.dtype) -> Tile:
    """The tile of `kernel` ("fc1", "rows", "wgrad" or "wgrad_gather") for operands of `dtype`."""
    if interpreting():
        return INTERPRETER_TILES[kernel]
    return (FLOAT_TILES if dtype is torch.float32 else HALF_TILES)[kernel]


def input_precision() -> str:
    """`tl.dot` precision of fp32 operands: tf32 only where torch itself may use it."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


_bound = threading.local()


def bind_device(device: torch.device) -> None:
    """Makes the device's CUDA context current in this thread.

    Autograd runs backward in threads of its own, which have none before their first CUDA call, and
    Triton (3.6 to 3.8) encodes tensor descriptors before it looks for one. Any launch by torch
    binds it, for the life of the thread.
    """
    if device.type == "cuda" and getattr(_bound, "device", None) != device:
        torch.zeros((), device=device)
        _bound.device = device
