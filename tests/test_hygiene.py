"""What holds for the repository as a whole."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moeblaze_megatron"
# The launcher, what it starts, and the benchmark of expert parallelism; all else that imports
# megatron lives in mcore/.
ENTRY_POINTS = {
    "__main__.py",
    "compare.py",
    "doctor.py",
    "expert_parallel.py",
    "pretrain_gpt.py",
    "quickstart.py",
    "record.py",
}


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


def test_only_mcore_and_entry_points_import_megatron():
    for path in PACKAGE.rglob("*.py"):
        if "mcore" in path.parts or path.name in ENTRY_POINTS:
            continue
        upwards = {
            name
            for name in imported_modules(path)
            if name.split(".")[0] == "megatron" or name.startswith("moeblaze_megatron.mcore")
        }
        assert not upwards, f"{path.relative_to(ROOT)} imports {sorted(upwards)}"


# What each layer may import of the package, beside itself.
BELOW = {"ops": set(), "expert_parallel": {"ops"}, "mcore": {"ops", "expert_parallel"}}


@pytest.mark.parametrize("layer", BELOW)
def test_layers_point_one_way(layer):
    exported = {"moeblaze_megatron", "moeblaze_megatron.version"}  # the operator, for mcore
    allowed = {f"moeblaze_megatron.{name}" for name in (layer, *BELOW[layer])}
    for path in (PACKAGE / layer).rglob("*.py"):
        used = {name for name in imported_modules(path) if name.startswith("moeblaze_megatron")}
        wrong = {name for name in used if ".".join(name.split(".")[:2]) not in allowed}
        wrong -= exported if layer == "mcore" else set()
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_imports_without_megatron(plain_env):
    """`None` in sys.modules is how Python says that a module cannot be imported."""
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "from moeblaze_megatron import IndexLists, moeblaze_experts"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=plain_env, cwd=ROOT)


def test_what_the_operator_imports_is_installed_with_it():
    (line,) = re.findall(r"install_requires=(\[.*\])", (ROOT / "setup.py").read_text())
    declared = {re.match(r"[\w-]+", requirement)[0] for requirement in ast.literal_eval(line)}
    for path in (PACKAGE / "ops").rglob("*.py"):
        found = {name.split(".")[0] for name in imported_modules(path)}
        missing = found - sys.stdlib_module_names - declared - {"moeblaze_megatron"}
        assert not missing, f"{path.relative_to(ROOT)} imports {sorted(missing)}"


def test_operator_example_learns(plain_env):
    command = [sys.executable, "examples/moe_operator.py"]
    result = subprocess.run(
        command, check=True, env=plain_env, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", result.stdout)]
    assert len(losses) == 6 and losses[-1] < losses[0] / 2


def test_readme_and_ci_run_the_same_command():
    (command,) = re.findall(r"^python3\.12 .*pytest$", (ROOT / "README.md").read_text(), re.M)
    assert command == (ROOT / ".ci" / "run").read_text().splitlines()[-1]


def test_links_of_the_documentation_lead_somewhere():
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("patches/*.md")):
        for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
            path, _, heading = target.partition("#")
            path = page.parent / path if path else page
            assert path.exists(), f"{page.relative_to(ROOT)} links to {target}"
            headings = re.findall(r"^#+ (.*)", path.read_text(), re.M) if heading else []
            slugs = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
            assert not heading or heading in slugs, f"{page.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("check", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff(check):
    ruff = subprocess.run(
        [sys.executable, "-m", "ruff", *check, "."], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert ruff.returncode == 0, ruff.stdout


def test_nan_filled(device, nan_filled):
    made = torch.empty(3, device=device)
    for buffer in (made, torch.empty_like(made), made.new_empty(3, dtype=torch.bfloat16)):
        assert buffer.isnan().all()
    assert (made.new_empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
