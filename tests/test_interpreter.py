"""The kernels of these tests compute in bfloat16 what torch computes; without the repair they fail.

On a GPU the same tests pass without it, so they also say that the repair imitates the GPU.
"""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(out_ptr + i, a + b)
    tl.store(out_ptr + N + i, a * b)
    tl.store(out_ptr + 2 * N + i, tl.where(a < b, -a, tl.maximum(a, b)))
    tl.store(out_ptr + 3 * N + i, a * tl.full((N,), 1.5, tl.bfloat16))


@triton.jit
def _cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(a_ptr + i * N + j), tl.load(b_ptr + i * N + j))
    tl.store(out_ptr + i * N + j, product)


@triton.jit
def _reduce_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr, tl.sum(x))
    tl.store(out_ptr + 1, tl.max(x, 0))


def test_arithmetic(device):
    a, b = torch.randn(2, 64, device=device).bfloat16()
    out = a.new_empty(4, 64)
    _arithmetic_kernel[(1,)](a, b, out, 64)
    expected = torch.stack([a + b, a * b, torch.where(a < b, -a, torch.maximum(a, b)), a * 1.5])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("from_dtype", [torch.float32, torch.float16, torch.int32])
def test_cast_rounds_to_nearest_even(device, from_dtype):
    x = (torch.randn(256, device=device) * 1000).to(from_dtype)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    _cast_kernel[(1,)](x, out, 256)
    assert torch.equal(out, x.bfloat16())


def test_cast_keeps_special_values_and_ties(device):
    inf, tie = float("inf"), 2**-8
    x = torch.tensor([inf, -inf, -0.0, 1 + tie, 1 + 3 * tie, 3.4e38, 1e-40, 1.0], device=device)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    _cast_kernel[(1,)](x, out, 8)
    assert torch.equal(out.view(torch.int16), x.bfloat16().view(torch.int16))
    x.fill_(float("nan"))
    _cast_kernel[(1,)](x, out, 8)
    assert out.isnan().all()


@pytest.mark.parametrize("to_dtype", [torch.float32, torch.float16, torch.int32])
def test_cast_from_bfloat16(device, to_dtype):
    x = (torch.randn(256, device=device) * 1000).bfloat16()
    out = torch.empty_like(x, dtype=to_dtype)
    _cast_kernel[(1,)](x, out, 256)
    assert torch.equal(out, x.to(to_dtype))


def test_dot_accumulates_in_float32(device):
    a, b = torch.randn(2, 32, 32, device=device).bfloat16()
    out = torch.empty(32, 32, device=device)
    _dot_kernel[(1,)](a, b, out, 32)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-6, atol=1e-5)


def test_reductions(device):
    x = torch.arange(16, device=device).bfloat16()
    out = torch.empty(2, device=device)
    _reduce_kernel[(1,)](x, out, 16)
    assert out.tolist() == [120.0, 15.0]
