"""Kernel launches without what Triton does anew for each.

Triton binds, specialises and checks a kernel's arguments in Python at every launch, which takes
longer than the launch. Here the compiled kernel is looked up by what Triton specialises it for, and
Triton is asked only for the first of its kind.
"""

from typing import Any

import torch
import triton
from packaging.version import Version
from torch import Tensor
from torch.nn import Parameter
from triton.compiler.compiler import CompiledKernel
from triton.experimental.gluon.nvidia import hopper as gluon
from triton.tools.tensor_descriptor import TensorDescriptor

from moeblaze_megatron.ops.tiles import bind_device, interpreting

# Triton's whose CompiledKernel.run is called as `Kernel` calls it; `aot` turns this off.
enabled = Version("3.6") <= Version(triton.__version__) < Version("3.9")
_runtime, _driver = triton.knobs.runtime, triton.runtime.driver


class Kernel:
    """A jitted kernel, launched by `kernel[grid](*arguments, **options)` as ever.

    Arguments are positional, constants (`tl.constexpr`) the last of them.
    """

    def __init__(self, jitted: Any):
        self.jitted = jitted
        constant = [param.is_constexpr for param in jitted.params]
        self.constants = constant.index(True)
        assert all(constant[self.constants :]), jitted
        self.compiled: dict[tuple, CompiledKernel] = {}

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*arguments: Any, **options: int) -> None:
            key, values = self._bind(arguments, options)
            found = self.compiled.get(key)
            if found is None:
                found = self.jitted[grid](*arguments, **options)
                if key is not None and isinstance(found, CompiledKernel):
                    self.compiled[key] = found
                return
            driver, (x, y) = _driver.active, grid if len(grid) == 2 else (grid[0], 1)
            stream = driver.get_current_stream(driver.get_current_device())
            handles = found.function, found.packed_metadata
            found.run(x, y, 1, stream, *handles, None, None, None, *values)  # no launch hooks

        return launch

    def _bind(self, arguments: tuple, options: dict[str, int]) -> tuple[tuple | None, list]:
        """All that Triton compiles for, or finer, and the arguments with addresses for tensors.

        The first is None where Triton is to launch as it does.
        """
        hooks = _runtime.launch_enter_hook, _runtime.launch_exit_hook  # of a profiler
        if not enabled or any(getattr(hook, "calls", True) for hook in hooks):
            return None, []
        values, addresses = list(arguments), 0
        key = [_driver.active.get_current_device(), *options.values()]
        for i, argument in enumerate(arguments[: self.constants]):
            kind = type(argument)
            if kind is Tensor or kind is Parameter:
                values[i] = address = argument.data_ptr()
                addresses |= address
                key.append(argument.dtype)
            elif kind is int:  # Triton knows those that are 1, multiples of 16, and long ones
                key.append(1 if argument == 1 else (argument % 16 == 0, argument >> 31))
            elif kind is TensorDescriptor or kind is gluon.TensorDescriptor:
                key.append(argument.kind)
            elif argument is None or kind is float:
                key.append(kind)
            else:
                return None, []
        if addresses % 16:
            return None, []
        key.append(arguments[self.constants :])
        return tuple(key), values


def direct(jitted: Any) -> Any:
    """Decorates what `triton.jit` or `gluon.jit` returns."""
    return jitted if interpreting() else Kernel(jitted)


_checked: dict[tuple, dict[str, Any]] = {}  # fields of descriptors that Triton has checked


def descriptor(
    tensor: torch.Tensor, block: tuple[int, ...], layout: Any = None
) -> TensorDescriptor | gluon.TensorDescriptor:
    """A tensor descriptor; Gluon's where a layout is given, which block and dtype determine.

    Triton checks the first of its strides. Sizes are 1 or more, the address is a multiple of 16.
    """
    bind_device(tensor.device)
    strides = tensor.stride()
    kind = (tensor.dtype, block, layout is None)
    known = _checked.get((strides, kind))
    if known is None:
        extra = () if layout is None else (layout,)
        cls = TensorDescriptor if layout is None else gluon.TensorDescriptor
        made = cls.from_tensor(tensor, list(block), *extra)
        made.kind = kind
        _checked[strides, kind] = vars(made) | {"base": None, "shape": None}
        return made
    made = object.__new__(TensorDescriptor if layout is None else gluon.TensorDescriptor)
    vars(made).update(known, base=tensor, shape=tensor.shape)
    return made
