"""A kernel that writes past a tensor, for tests/sanitize.sh: memcheck has to find it.

In the same page, so that the GPU itself lets it pass.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _out_of_bounds_kernel(x_ptr):
    tl.store(x_ptr + 1024, 1.0)


if __name__ == "__main__":
    _out_of_bounds_kernel[(1,)](torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
