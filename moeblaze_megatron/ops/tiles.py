"""What all kernels share. Their other sizes come from `table`.

Row tiles hold BLOCK_R routed rows of one expert; they are listed in `IndexLists`, so every kernel
that walks them uses the same height.
"""

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
    """`tl.dot` precision of fp32 operands: tf32 only where torch itself may use it.

    By the newer of torch's two settings, which may be read after either was written.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
