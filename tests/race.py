"""A kernel whose threads write different sums to one place, for tests/sanitize.sh: racecheck has
to find it.

Each of 32 threads adds what the others sent to a product of its own, which is not rounded.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _race_kernel(x_ptr, out_ptr):
    r, c = tl.arange(0, 4), tl.arange(0, 32)
    x = tl.load(x_ptr + 32 * r[:, None] + c)
    tl.store(out_ptr + r, tl.sum(x * x, 1))


if __name__ == "__main__":
    x = torch.randn(4, 32, device="cuda")
    _race_kernel[(1,)](x, torch.empty_like(x))
    torch.cuda.synchronize()
