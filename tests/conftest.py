"""How the tests run: Triton kernels on the GPU where there is one, else in Triton's interpreter.

The choice is made here, before triton is imported, because `@triton.jit` looks at TRITON_INTERPRET
when a kernel is defined. The package sends CPU tensors to the kernels only when it is set, and to
the eager implementation otherwise, which is what users on a CPU get.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # `nan_filled` is deterministic mode

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    from interpreter_bf16 import repair

    repair()


def pytest_report_header() -> str:
    import triton

    where = torch.cuda.get_device_name() if HAS_GPU else "no GPU, kernels interpreted on the CPU"
    return f"torch {torch.__version__}, triton {triton.__version__}, {where}"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture
def nan_filled():
    """Fills what `torch.empty` and its kin return: NaN in floats, the largest value in integers.

    A kernel that reads what it never wrote, or leaves a row of its output unwritten, then shows.
    Holds for buffers made inside autograd's backward too, on CPU and GPU.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only_before = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before, warn_only=warn_only_before)


@pytest.fixture(scope="session")
def plain_env() -> dict[str, str]:
    """The environment for subprocesses as a user has it: no interpreter, one thread a process."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return env | {"OMP_NUM_THREADS": "1"}
