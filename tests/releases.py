"""Try the package on several releases of Megatron-Core, and sum up.

    python tests/releases.py [--git CLONE] [RELEASE ...]

A RELEASE such as 0.18 is the newest wheel of it, downloaded from PyPI, or with --git the branch
core_r0.18.0 of a clone of Megatron-LM, from which "main" comes too; or it is the path of a
checkout. Each goes in front of the installed megatron-core. What is tried on it:

    the refusals, the layer beside Megatron's own dispatchers, checkpoints, the patch
    biases with expert parallelism and TP
    checkouts: an unmodified pretrain_gpt.py, which wheels lack, beside alltoall, with 1 and 2 ranks
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

RELEASES = ("0.16", "0.17", "0.18", "0.19")
ROOT = Path(__file__).parents[1]
# In this order: Megatron sizes a table by the number of layers of the first model in a process.
TESTS = (
    "tests/test_mcore_checkpoint.py",
    "tests/test_mcore_config.py",
    "tests/test_mcore_layer.py",
    "tests/test_mcore_patch.py",
    "tests/test_settings.py",
    "tests/test_expert_parallel.py::test_on_all_ranks[layer_agrees[gpt-oss-tp1-ep2-etp1-of2]]",
    "tests/test_expert_parallel.py::test_on_all_ranks[megatron_sums_biases_over_tp[tp2-ep2-etp1-of4]]",
    "tests/test_pretrain.py::test_unmodified_checkout_trains_as_alltoall_does",
)
# Imported by the training loop of 0.16 and 0.17.
EXTRA = ("regex", "pydantic")


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True)


def get(release: str, git: Path | None, scratch: Path) -> Path:
    """The directory that holds the release's megatron/."""
    if (Path(release) / "megatron" / "core").is_dir():
        return Path(release).resolve()
    tree = scratch / release
    tree.mkdir()
    if git is None:
        if release not in RELEASES:
            sys.exit(f"{release}: not one of {', '.join(RELEASES)}, nor a checkout; see --git")
        pip("install", "--no-deps", "--target", str(tree), f"megatron-core=={release}.*")
        return tree
    branch = f"core_r{release}.0" if release in RELEASES else release
    archive = subprocess.Popen(["git", "-C", str(git), "archive", branch], stdout=subprocess.PIPE)
    subprocess.run(["tar", "x", "-C", str(tree)], stdin=archive.stdout, check=True)
    if archive.wait():
        sys.exit(f"{git} has no branch {branch}")
    # The compiled helpers of the installed wheel, so that Megatron has nothing to compile.
    installed = Path(find_spec("megatron.core").origin).parent / "datasets"
    datasets = tree / "megatron" / "core" / "datasets"
    for helpers in installed.glob("helpers_cpp*.so"):
        (datasets / helpers.name).symlink_to(helpers)
    (datasets / "Makefile").unlink()
    return tree


def try_on(tree: Path, extra: Path) -> tuple[str, int]:
    """Run the tests on a tree; returns the last line of pytest and its exit code."""
    env = {name: value for name, value in os.environ.items() if name != "MEGATRON_LM"}
    env["PYTHONPATH"] = f"{tree}:{extra}:{ROOT}"
    if (tree / "pretrain_gpt.py").exists():
        env["MEGATRON_LM"] = str(tree)
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", *TESTS]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return last, process.returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--git", type=Path, metavar="CLONE", help="a clone of Megatron-LM")
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    arguments = parser.parse_args()
    everything = RELEASES if arguments.git is None else (*RELEASES, "main")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        extra = Path(scratch) / "extra"
        pip("install", "--target", str(extra), *EXTRA)
        for release in arguments.releases or everything:
            tree = get(release, arguments.git, Path(scratch))
            info = (tree / "megatron" / "core" / "package_info.py").read_text()
            version = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", info, re.M))
            print(f"=== {release}: megatron-core {version} in {tree}", flush=True)
            rows.append((release, version, *try_on(tree, extra)))
    print()
    for release, version, last, code in rows:
        print(f"{release:<8} {version:<8} {'passed' if code == 0 else 'FAILED'}  {last}")
    sys.exit(any(code for *_, code in rows))


if __name__ == "__main__":
    main()
