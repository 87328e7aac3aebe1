"""Launches that skip Triton's binder: the same kernel with the same arguments, or Triton's way.

In a process of its own with a driver that launches nothing, since this one may interpret kernels.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

PREPARE = """
import contextlib
import itertools
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.compiler.compiler import CompiledKernel

from moeblaze_megatron import aot
from moeblaze_megatron.ops import launch

@launch.direct
@triton.jit(do_not_specialize=["count"])
def kernel(a_ptr, b_desc, number, count, SIZE: tl.constexpr, FLAG: tl.constexpr):
    tl.store(a_ptr + number + count, SIZE)

launched, asked = [], []
jit = type(kernel.jitted).run

def run(self, *args, **kwargs):
    asked.append(args)
    return jit(self, *args, **kwargs)

def prepare(stack):
    for change in (
        patch.object(triton.runtime.driver, "_active", aot._Driver(90)),
        patch.object(type(kernel.jitted), "run", run),
        patch.object(CompiledKernel, "_init_handles", lambda self: None),
        patch.object(CompiledKernel, "run", lambda self, *args: launched.append((self, args))),
    ):
        stack.enter_context(change)

def tensor(dtype, offset=0):
    return torch.zeros(64, 64, dtype=dtype).flatten()[offset:]

def described(dtype, block):
    return launch.descriptor(torch.zeros(64, 64, dtype=dtype), block)

stack = contextlib.ExitStack()
prepare(stack)
"""

KEYS = """
half, wide = torch.float16, torch.float32
choices = (
    [tensor(half), tensor(wide), torch.nn.Parameter(tensor(half)), tensor(half, 1), None],
    [described(half, (16, 64)), described(half, (32, 64)), described(wide, (16, 64)), None],
    [1, 0, 2, 16, -16, 17, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**31), -(2**31) - 1, 1.0, 2.5],
    [1, 16, 3, 2**31, 2**40],
    [64, 128],
    [True, False],
)
binder = kernel.jitted.device_caches[0][-1]
found = {}
for arguments in itertools.product(*choices):
    for options in ({"num_warps": 4}, {"num_warps": 8}):
        key, _ = kernel._bind(arguments, options)
        _, specialization, passed = binder(*arguments, debug=False, **options)
        wanted = str((specialization, sorted(passed.items())))
        if key is not None:
            assert found.setdefault(key, wanted) == wanted, arguments
        else:
            assert arguments[0] is choices[0][3], arguments
print(len(found))
"""

LAUNCHES = """
a, b = tensor(torch.float16), described(torch.float16, (16, 64))
for count in (3, 5):
    for grid in ((7,), (7, 2)):
        kernel[grid](a, b, 16, count, 64, True, num_warps=4)
assert len(asked) == 1 and len(launched) == 4
compiled, first = launched[0]
for (other, args), (x, y), count in zip(launched, [(7, 1), (7, 2)] * 2, (3, 3, 5, 5)):
    assert other is compiled
    assert args[:3] == (x, y, 1) and args[3:6] == first[3:6]  # stream, function, metadata
    assert args[9] is a or args[9] == a.data_ptr()
    assert args[10:] == (b, 16, count, 64, True)
kernel[(7,)](a, b, 17, 3, 64, True, num_warps=4)
kernel[(7,)](a, b, 17, 3, 64, False, num_warps=4)
kernel[(7,)](a, b, 17, 3, 64, False, num_warps=8)
assert len(asked) == 4 and len({id(kernel) for kernel, _ in launched}) == 4

kernel[(7, 2, 3)](a, b, 16, 3, 64, True, num_warps=4)
assert len(asked) == 4 and launched[-1][1][:3] == (7, 2, 3)
"""

WATCHED = """
knobs, seen = triton.knobs, []
a, b = tensor(torch.float16), described(torch.float16, (16, 64))

def step():
    asked.clear()
    kernel[(7,)](a, b, 16, 3, 64, True, num_warps=4)
    return len(asked)

@contextlib.contextmanager
def added(calls):
    calls.append(lambda *args, **kwargs: seen.append(args))
    yield
    calls.pop()

class Unchanged:  # a hook of the compiler's stages, of Triton 3.6 and, with a key, of later ones
    def __call__(self, *args):
        return "key", "hash"

step()
assert step() == 0
for change in (
    added(knobs.runtime.launch_enter_hook.calls),
    added(knobs.runtime.launch_exit_hook.calls),
    added(kernel.jitted.pre_run_hooks),
    patch.object(knobs.runtime, "debug", True),
    patch.object(knobs.runtime, "add_stages_inspection_hook", Unchanged()),
    patch.object(knobs.compilation, "instrumentation_mode", "consan"),
    patch.object(launch, "enabled", False),
):
    with change:
        assert step() == 1, change
    assert step() == 0, change
assert len(seen) == 1  # the driver here calls no launch hooks
"""

ACTIVATIONS = """
import pickle

from moeblaze_megatron import Activation

@launch.direct
@triton.jit
def chosen(a_ptr, ACTIVATION: tl.constexpr):
    if ACTIVATION.gated:
        tl.store(a_ptr, ACTIVATION.offset)

compiled = []
triton.knobs.runtime.jit_post_compile_hook = lambda **call: compiled.append(call["compile"])
choices = [Activation("swiglu"), Activation("swiglu", 7.0), Activation("swiglu", 7.0, 1.0)]
for choice in (*choices, *choices):
    chosen[(1,)](tensor(torch.float16), choice)
assert [call["constants"][(1,)] for call in compiled] == choices  # each written as JSON before
assert len({id(kernel) for kernel, _ in launched}) == 3
for choice in choices:
    again = pickle.loads(pickle.dumps(choice))
    assert again == choice and vars(again) == vars(choice) and Activation.of(again) is again
"""

OTHER_DEVICE = """
current = 90
triton.runtime.driver.active.get_current_device = lambda: current
triton.runtime.driver.active.get_current_stream = lambda device: device
a, b = tensor(torch.float16), described(torch.float16, (16, 64))
for current in (90, 91, 90, 91):
    kernel[(7,)](a, b, 16, 3, 64, True, num_warps=4)
(first, _), (second, _), (third, args), (fourth, other) = launched
assert len(asked) == 2 and first is third and second is fourth and first is not second
assert args[3] == 90 and other[3] == 91  # the stream
"""

THREADS = """
from concurrent.futures import ThreadPoolExecutor

a, b = tensor(torch.float16), described(torch.float16, (16, 64))

def step(count):
    kernel[(7,)](a, b, 16, count, 64, count % 2 == 0, num_warps=4)
    return launch.descriptor(torch.zeros(64, 8 * (1 + count % 4), dtype=torch.float16), (16, 8))

step(3), step(4)
launched.clear()
with ThreadPoolExecutor(8) as pool:
    made = list(pool.map(step, range(400)))
assert len(launched) == 400 and len({id(compiled) for compiled, _ in launched}) == 2
for compiled, args in launched:
    assert compiled.src.constants[(5,)] == args[14] == (args[12] % 2 == 0)
for count, one in enumerate(made):
    assert one.base.shape == one.shape == (64, 8 * (1 + count % 4))
    assert one.strides[0] == one.shape[1]
"""

DESCRIPTORS = """
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

layout = gl.NVMMASharedLayout.get_default_for([32, 64], gl.float16)
for rows in (64, 32, 96):
    tensor = torch.zeros(rows, 64, dtype=torch.float16)
    for cls, extra in ((TensorDescriptor, ()), (GluonDescriptor, (layout,))):
        made = launch.descriptor(tensor, (32, 64), *extra)
        want = cls.from_tensor(tensor, [32, 64], *extra)
        assert type(made) is cls and made.base is tensor
        for name, value in vars(want).items():
            assert name == "base" or getattr(made, name) == value, name
for fields in launch._checked.values():
    assert not any(torch.is_tensor(value) for value in fields.values()), "memory stays allocated"
try:
    launch.descriptor(torch.zeros(32, 63, dtype=torch.float16), (32, 64))
except AssertionError as error:
    assert "16-byte aligned" in str(error)
else:
    raise SystemExit("rows of 126 bytes were taken")
"""


@pytest.fixture
def in_a_file(plain_env, tmp_path):
    """Runs a script from a file, in which `triton.jit` finds the source of its kernel."""

    def run(script: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(PREPARE + script)
        env = plain_env | {"PYTHONPATH": str(ROOT)}
        result = subprocess.run([sys.executable, path], env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def test_a_key_stands_for_one_compiled_kernel(in_a_file):
    """What has one key here is one specialisation of Triton's own binder, too."""
    assert int(in_a_file(KEYS)) > 200


def test_launches_what_triton_launches(in_a_file):
    in_a_file(LAUNCHES)


def test_triton_launches_what_is_watched(in_a_file):
    in_a_file(WATCHED)


def test_activations_are_constants_that_hooks_can_write(in_a_file):
    in_a_file(ACTIVATIONS)


def test_each_device_has_its_own_kernel(in_a_file):
    in_a_file(OTHER_DEVICE)


def test_threads_may_launch_at_once(in_a_file):
    in_a_file(THREADS)


def test_descriptors_are_those_of_triton(in_a_file):
    in_a_file(DESCRIPTORS)


@pytest.mark.gpu
def test_a_repeated_step_does_not_ask_triton(monkeypatch):
    from triton.runtime.jit import JITFunction

    from moeblaze_megatron import moeblaze_experts
    from moeblaze_megatron.ops import launch

    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    fc1_weight = torch.randn(4, 512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    fc2_weight = torch.randn(4, 256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    probs, ids = torch.randn(300, 4, device="cuda").softmax(-1).topk(2)
    asked = []
    jit = JITFunction.run

    def run(self, *args, **kwargs):
        asked.append(self)
        return jit(self, *args, **kwargs)

    def step():
        output = moeblaze_experts(x, fc1_weight, fc2_weight, topk_indices=ids, topk_probs=probs)
        grads = torch.autograd.grad(output, (x, fc1_weight, fc2_weight), torch.ones_like(output))
        return output.detach(), *grads

    monkeypatch.setattr(JITFunction, "run", run)
    step()
    asked.clear()
    direct = step()
    assert not asked
    monkeypatch.setattr(launch, "enabled", False)
    by_triton = step()
    assert len(asked) > 10
    for got, want in zip(direct, by_triton, strict=True):
        assert torch.equal(got, want)
