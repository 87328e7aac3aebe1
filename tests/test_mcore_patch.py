"""Patches of megatron-core: apply, train without install(), revert to the same bytes.

They are tried on the installed version; `tests/releases.py` does it for each.
"""

import filecmp
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moeblaze_megatron import patch
from moeblaze_megatron.mcore.install import TESTED_VERSIONS

CHANGED = ["transformer/moe/moe_layer.py", "transformer/transformer_config.py"]

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
    m.config(batch_invariant_mode=True)
except ValueError as error:
    assert "batch_invariant_mode" in str(error)
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
    file = str(patch.patch_for(tree / "megatron" / "core").file)
    if tool == "ours":
        patch.main(["--revert" if revert else "--apply", str(tree)])
    elif tool == "patch":
        run(["patch", *undo, "-p1", "-i", file], cwd=tree)
    else:  # inside a repository, git would take the paths from its root
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
        run(["git", "apply", *undo, file], cwd=tree, env=env)


@pytest.mark.parametrize("tool", ["ours", "patch", "git"])
def test_applies_and_reverts_to_the_same_bytes(tool, tree, installed):
    if tool != "ours" and not shutil.which(tool):
        pytest.skip(f"needs {tool}")
    assert differing(tree / "megatron" / "core", installed) == []
    apply_with(tool, tree)
    assert differing(tree / "megatron" / "core", installed) == CHANGED
    apply_with(tool, tree, revert=True)
    assert differing(tree / "megatron" / "core", installed) == []


def test_again_changes_nothing_and_says_so(tree, installed, capsys):
    core = tree / "megatron" / "core"
    actions = ("check", "revert", "apply", "apply", "check", "revert")
    for action, path in zip(actions, (tree, core.parent, core, tree, tree, tree), strict=True):
        patch.main([f"--{action}", str(path)])
    said = [line.partition(f" in {core}: ")[2] for line in capsys.readouterr().out.splitlines()]
    name = patch.patch_for(core).file.name
    assert said == [
        f"not patched; {name} applies",
        "was not patched, nothing changed",
        f"patched with {name}",
        f"was patched with {name} already, nothing changed",
        f"patched with {name}",
        f"{name} taken out",
    ]
    assert differing(core, installed) == []


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_what_was_interrupted_is_finished(tree, installed, capsys, action):
    core = tree / "megatron" / "core"
    first = patch.patch_for(core).hunks[0]
    file = core / first.path
    file.write_bytes(file.read_bytes().replace(first.before, first.after))
    for word in ("check", action, "check"):
        patch.main([f"--{word}", str(tree)])
    said = capsys.readouterr().out.splitlines()
    assert "patched in part; --apply or --revert finishes" in said[0] and "in part" in said[1]
    assert (": patched with" if action == "apply" else ": not patched") in said[2]
    patch.main(["--revert", str(tree)])
    assert differing(core, installed) == []


def refused(*arguments):
    with pytest.raises(SystemExit) as error:
        patch.main(list(map(str, arguments)))
    return str(error.value)


def test_unknown_trees_are_refused_with_the_nearest_release(tree, installed):
    core = tree / "megatron" / "core"
    release = patch.patch_for(core).release
    assert "no megatron/core in" in refused("--check", tree / "no such folder")

    hunks = patch.patch_for(core).hunks
    layer, (first, second) = core / CHANGED[0], hunks[:2]
    stock = layer.read_text()
    place = second.before.decode()
    layer.write_text(stock.replace(place, place.replace("raise ValueError", "raise KeyError")))
    said = refused("--apply", tree)
    assert f"differs from Megatron-Core {release}" in said
    assert f"{layer} near line {second.line}" in said and f"line {first.line};" not in said
    assert f"nearest known release is {release}, " in said
    layer.write_text(stock)

    info = core / "package_info.py"
    info.write_text(info.read_text().replace("MAJOR = 0", "MAJOR = 7"))
    said = refused("--apply", tree)
    assert (
        "no patch for Megatron-Core 7." in said
        and f"known release is {release}, {len(hunks)} of" in said
    )
    assert differing(core, installed) == ["package_info.py"]


def test_every_tested_release_has_a_patch():
    releases = [found.release for found in patch.patches()]
    assert releases == [*TESTED_VERSIONS, "0.20"]
    for found in patch.patches():
        assert sorted({hunk.path for hunk in found.hunks}) == CHANGED and len(found.hunks) == 5
    table = (patch.patch_folder() / "README.md").read_text()
    for found in patch.patches():
        assert f"| `{found.file.name}` | {found.about} |" in table


@pytest.mark.slow
@pytest.mark.parametrize("release", TESTED_VERSIONS)
def test_fits_the_newest_wheel_of_each_release(release, tmp_path):
    """Downloads the wheels from PyPI."""
    pip = [sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--no-compile"]
    for name in ("stock", "patched"):
        run([*pip, "--target", tmp_path / name, f"megatron-core=={release}.*"])
    patch.main(["--apply", str(tmp_path / "patched")])
    core = [tmp_path / name / "megatron" / "core" for name in ("stock", "patched")]
    assert patch.patch_for(core[1]).release == release
    assert differing(*core) == CHANGED
    patch.main(["--revert", str(tmp_path / "patched")])
    assert differing(*core) == []


def test_patched_megatron_needs_no_install(tree, plain_env):
    apply_with("ours", tree)
    path = [str(tree), *(entry for entry in sys.path if entry)]
    env = {**plain_env, "PYTHONPATH": ":".join(path), "CUDA_VISIBLE_DEVICES": ""}
    assert "trained" in run([sys.executable, "-c", SCRIPT, str(tree)], env=env, cwd=tree)
