"""The patch of megatron-core: applies, trains without install(), reverts to the same bytes."""

import filecmp
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PATCH = Path(__file__).parent.parent / "patches" / "megatron-core-0.19.patch"

# Run on the patched tree, which PYTHONPATH puts in front of the installed one.
SCRIPT = """
import sys
import mcore_worker as m
from moeblaze_megatron.mcore import cpu_mode, install
import megatron.core
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
import torch

assert megatron.core.__file__.startswith(sys.argv[1]), megatron.core.__file__
cpu_mode.install_cpu_mode()
store = f"file://{sys.argv[1]}/store"
torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel()

def run():
    layers = [m.layer(dispatcher) for dispatcher in ("alltoall", "moeblaze")]
    x = torch.randn(5, 2, m.H)
    stock, ours = (m.forward_backward(layer, x, torch.ones_like(x)) for layer in layers)
    for name, value in stock.items():
        torch.testing.assert_close(ours[name], value)
    return type(layers[1].experts).__name__, type(layers[1].token_dispatcher).__name__

assert run() == ("MoEBlazeExperts", "MoEBlazeTokenDispatcher")
try:
    m.config(add_bias_linear=True)
except ValueError as error:
    assert "--disable-bias-linear" in str(error)
else:
    raise AssertionError("the config was not checked")

native = TransformerConfig.__post_init__, MoELayer.__init__
install()
assert (TransformerConfig.__post_init__, MoELayer.__init__) == native, "install() touched it"
run()
print("trained")
"""


def differing(left, right):
    """Paths below two directories that are in one of them only, or not byte for byte equal."""
    comparison = filecmp.dircmp(left, right, ignore=["__pycache__"])
    found = [*comparison.left_only, *comparison.right_only, *comparison.funny_files]
    _, mismatch, errors = filecmp.cmpfiles(left, right, comparison.common_files, shallow=False)
    found += [*mismatch, *errors]
    for name in comparison.common_dirs:
        found += [f"{name}/{path}" for path in differing(Path(left, name), Path(right, name))]
    return sorted(found)


@pytest.fixture(scope="module")
def installed():
    return Path(importlib.util.find_spec("megatron.core").submodule_search_locations[0])


@pytest.fixture
def tree(installed, tmp_path):
    """A directory that holds a copy of the installed megatron/core."""
    pyc = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installed, tmp_path / "megatron" / "core", ignore=pyc)
    return tmp_path


def run(command, **keywords):
    result = subprocess.run(command, capture_output=True, text=True, **keywords)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def apply_with(tool, tree, revert=False):
    undo = ["-R"] if revert else []
    if tool == "patch":
        run(["patch", *undo, "-p1", "-i", str(PATCH)], cwd=tree)
    else:  # inside a repository, git would take the paths from its root
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
        run(["git", "apply", *undo, str(PATCH)], cwd=tree, env=env)


@pytest.mark.parametrize("tool", ["patch", "git"])
def test_applies_and_reverts_to_the_same_bytes(tool, tree, installed):
    if not shutil.which(tool):
        pytest.skip(f"needs {tool}")
    assert differing(tree / "megatron" / "core", installed) == []
    apply_with(tool, tree)
    assert differing(tree / "megatron" / "core", installed) == [
        "transformer/moe/moe_layer.py",
        "transformer/transformer_config.py",
    ]
    apply_with(tool, tree, revert=True)
    assert differing(tree / "megatron" / "core", installed) == []


def test_patched_megatron_needs_no_install(tree, plain_env):
    apply_with("patch" if shutil.which("patch") else "git", tree)
    path = [str(tree), *(entry for entry in sys.path if entry)]
    env = {**plain_env, "PYTHONPATH": ":".join(path), "CUDA_VISIBLE_DEVICES": ""}
    assert "trained" in run([sys.executable, "-c", SCRIPT, str(tree)], env=env, cwd=tree)
