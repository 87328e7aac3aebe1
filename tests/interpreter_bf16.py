"""bfloat16 made right in Triton's interpreter.

The interpreter (`TRITON_INTERPRET=1`, Triton 3.6 to 3.9) holds a bfloat16 value as its 16 bits in
a numpy uint16 and computes on those bits: `+`, `*` and `tl.dot` give garbage without an error, and
the cast from float32 truncates where a GPU rounds to nearest even. `repair()` sends bfloat16
operands through float32 instead, as the hardware does. bfloat16 atomics still raise.
"""

from functools import wraps

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceScanOpInterface, TensorHandle

COMPUTING = ("binary_op", "unary_op", "ternary_op", "create_fma", "create_rsqrt", "create_dot")


def from_bits(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits -> float32, exact. 0x3F80 -> 1.0"""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits, to nearest even. 1.00390625 (a tie) -> 0x3F80, NaN -> 0x7FC0"""
    values = np.asarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


def is_bf16(operand) -> bool:
    return isinstance(operand, TensorHandle) and operand.dtype.scalar == tl.bfloat16


def widened(operand):
    return TensorHandle(from_bits(operand.data), tl.float32) if is_bf16(operand) else operand


def narrowed(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(to_bits(handle.data), tl.bfloat16)


def through_float32(compute):
    """A builder method in float32; its result has the type of the last operand."""

    @wraps(compute)
    def repaired(self, *args):
        operands = [arg for arg in args if isinstance(arg, TensorHandle)]
        if not any(map(is_bf16, operands)):
            return compute(self, *args)
        result = compute(self, *map(widened, args))
        is_comparison = result.data.dtype == np.bool_
        return narrowed(result) if is_bf16(operands[-1]) and not is_comparison else result

    return repaired


def rounding_cast(cast):
    @wraps(cast)
    def repaired(self, src, dst_type):
        if dst_type.scalar == tl.bfloat16:
            return narrowed(cast(self, widened(src), tl.float32))
        return cast(self, widened(src), dst_type)

    return repaired


def rounding_fp_to_fp(convert):
    """A conversion that names its rounding mode: only nearest even was wrong."""

    @wraps(convert)
    def repaired(self, src, dst_type, rounding_mode):
        to_bf16 = dst_type.scalar == tl.bfloat16 and src.dtype.scalar == tl.float32
        if to_bf16 and rounding_mode == interpreter._ir.ROUNDING_MODE.RTNE:
            return narrowed(src)
        return convert(self, src, dst_type, rounding_mode)

    return repaired


def float32_reduction(apply):
    """`tl.sum`, `tl.max`, `tl.cumsum`...: the tensors rather than the handles are bfloat16."""

    @wraps(apply)
    def repaired(self, operand):
        if isinstance(operand, tuple) or operand.dtype != tl.bfloat16:
            return apply(self, operand)
        return apply(self, operand.to(tl.float32)).to(tl.bfloat16)

    return repaired


def repair() -> None:
    """Patches the interpreter's builder once; compiled kernels are not touched."""
    if hasattr(InterpreterBuilder.binary_op, "__wrapped__"):
        return
    patches = [(InterpreterBuilder, name, through_float32) for name in COMPUTING]
    patches += [
        (InterpreterBuilder, "cast_impl", rounding_cast),
        (InterpreterBuilder, "create_fp_to_fp", rounding_fp_to_fp),
        (ReduceScanOpInterface, "apply", float32_reduction),
    ]
    for owner, name, patch in patches:
        setattr(owner, name, patch(getattr(owner, name)))
    if not hasattr(InterpreterBuilder, "get_bf16"):  # Triton 3.6 to 3.8 lack it
        InterpreterBuilder.get_bf16 = lambda self, value: TensorHandle(
            to_bits(np.array([value])), tl.bfloat16
        )
