"""What all kernels share. Their other sizes come from `table`.

Row tiles hold BLOCK_R routed rows of one expert; they are listed in `IndexLists`, so every kernel
that walks them uses the same height.
"""

import threading

import torch
import triton


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1) instead of compiling."""
    return bool(triton.knobs.runtime.interpret)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; triton.cdiv takes ten times as long on the host."""
    return -(-a // b)


BLOCK_R = 16 if interpreting() else 128


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
