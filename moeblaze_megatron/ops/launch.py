"""Kernel launches without what Triton does anew for each.

Triton binds, specialises and checks a kernel's arguments in Python at every launch, which takes
longer than the launch. Here the compiled kernel is looked up by what Triton specialises it for.
Triton itself launches the first of each kind, and whatever more than a launch is asked of.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
from packaging.version import Version
from torch import Tensor
from torch.nn import Parameter
from triton.compiler.compiler import CompiledKernel
from triton.experimental.gluon.nvidia import hopper as gluon
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from moeblaze_megatron.ops import table
from moeblaze_megatron.ops.tiles import interpreting

# In these versions CompiledKernel.run takes what `Kernel` gives it. `aot` turns this off.
enabled = Version("3.6") <= Version(triton.__version__) < Version("3.9")
_driver = triton.runtime.driver
_runtime, _compilation = triton.knobs.runtime, triton.knobs.compilation


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

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: int) -> None:
            key, values = self._bind(arguments, options)
            compiled = self.compiled.get(key)
            if compiled is None:
                try:
                    compiled = self.jitted[grid](*arguments, **options)
                except OutOfResources as error:
                    raise table.too_large(error) from None
                if key is not None and isinstance(compiled, CompiledKernel):
                    self.compiled[key] = compiled
                return
            x, y, z = (*grid, 1, 1)[:3]
            stream = _driver.active.get_current_stream(key[0])
            handles = compiled.function, compiled.packed_metadata
            compiled.run(x, y, z, stream, *handles, None, None, None, *values)  # no launch hooks

        return launch

    def _bind(self, arguments: tuple, options: dict[str, int]) -> tuple[tuple | None, list]:
        """The device and all that Triton compiles for, or finer; arguments, tensors as addresses.

        The first is None where Triton is to launch.
        """
        if not enabled or self._watched():
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

    def _watched(self) -> bool:
        """Whether a profiler or a debugger sees each launch, or changes what is compiled."""
        return bool(
            getattr(_runtime.launch_enter_hook, "calls", True)  # an empty chain, as a rule
            or getattr(_runtime.launch_exit_hook, "calls", True)
            or self.jitted.pre_run_hooks
            or _runtime.debug
            or _runtime.add_stages_inspection_hook
            or _compilation.instrumentation_mode
        )


def direct(jitted: Any) -> Any:
    """Decorates what `triton.jit` or `gluon.jit` returns."""
    return jitted if interpreting() else Kernel(jitted)


_bound = threading.local()


def _bind_context(device: torch.device) -> None:
    """Makes the device's CUDA context current in this thread.

    Autograd runs backward in threads of its own, which have none before their first CUDA call, and
    Triton (3.6 to 3.8) encodes tensor descriptors before it looks for one. Any launch by torch
    binds it, for the life of the thread.
    """
    if device.type == "cuda" and getattr(_bound, "device", None) != device:
        torch.zeros((), device=device)
        _bound.device = device


# Fields of descriptors that Triton has checked, without the tensors they were of.
_checked: dict[tuple, dict[str, Any]] = {}


def descriptor(
    tensor: Tensor, block: tuple[int, ...], layout: Any = None
) -> TensorDescriptor | gluon.TensorDescriptor:
    """A tensor descriptor; Gluon's where a layout is given, which block and dtype determine.

    Triton checks the first of its strides. Sizes are 1 or more, the address is a multiple of 16.
    """
    _bind_context(tensor.device)
    cls, extra = (TensorDescriptor, ()) if layout is None else (gluon.TensorDescriptor, (layout,))
    kind = (tensor.dtype, block, layout is None)
    key = (tensor.stride(), kind)
    known = _checked.get(key)
    if known is None:
        made = cls.from_tensor(tensor, list(block), *extra)
        made.kind = kind
        _checked[key] = vars(made) | {"base": None, "shape": None}
        return made
    made = object.__new__(cls)
    vars(made).update(known, base=tensor, shape=tensor.shape)
    return made
