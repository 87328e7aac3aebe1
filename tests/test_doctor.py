"""`python -m moeblaze_megatron.doctor`: what it finds, and that it fails where all is not well."""

import subprocess
import sys

import pytest
from pretraining import needs_megatron_on_cpu, run

from moeblaze_megatron import doctor
from moeblaze_megatron.mcore.install import TESTED_VERSIONS
from moeblaze_megatron.ops import table

BROKEN = """
from moeblaze_megatron import doctor
right = doctor.moeblaze_experts
doctor.moeblaze_experts = lambda *a, **k: right(*a, **k) * 1.001
doctor.main(["--arch", "80"])
"""


@needs_megatron_on_cpu
def test_healthy_machine(plain_env):
    env = plain_env | {"CUDA_VISIBLE_DEVICES": ""}
    code, output = run(sys.executable, "-m", "moeblaze_megatron.doctor", env=env)
    assert code == 0, output
    for words in (
        f"{', '.join(TESTED_VERSIONS)} tested",
        "none: Megatron runs in CPU mode",
        "kernel table       the package's own",
        "kernels, sm_90     ",
        "kernels compile\n",
        "eager twins in float32: output and gradients as a loop",
        "a first run: python -m moeblaze_megatron.quickstart",
    ):
        assert words in output, (words, output)
    assert "FAILED" not in output


@pytest.mark.parametrize(
    ("needed", "tested", "advice"),
    [
        ("2.0", "99.0", ""),
        ("99.0", "99.0", "install torch 99.0 or newer"),
        ("2.0", "2.1", "newer than the 2.1 that was tested"),
    ],
)
def test_versions_that_were_not_tested_are_named(monkeypatch, needed, tested, advice):
    monkeypatch.setitem(doctor.NEEDED, "torch", needed)
    monkeypatch.setitem(doctor.TESTED, "torch", tested)
    found = {finding.about: finding for finding in doctor.versions()}["torch"]
    assert found.advice == advice and found.failed == (needed == "99.0")


def test_wrong_results_fail(plain_env):
    env = plain_env | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", BROKEN], env=env, stdout=subprocess.PIPE, text=True
    )
    assert result.returncode == 1
    assert "FAILED correctness" in result.stdout and "output off by" in result.stdout
    assert "correctness: report this" in result.stdout and "a first run" not in result.stdout


def test_old_versions_fail(monkeypatch):
    monkeypatch.setattr(doctor, "NEEDED", {"torch": "99.1", "triton": "3.6"})
    failed = [finding for finding in doctor.examine(None) if finding.failed]
    assert [finding.about for finding in failed] == ["torch"]
    assert failed[0].advice == "install torch 99.1 or newer"


def test_kernels_that_ask_for_too_much_shared_memory_fail(plain_env):
    code = "from moeblaze_megatron import doctor; print(doctor.compiles(90, 1000).failed)"
    result = subprocess.run(
        [sys.executable, "-c", code], env=plain_env, check=True, stdout=subprocess.PIPE, text=True
    )
    assert result.stdout == "True\n"


def test_a_kernel_table_that_cannot_be_used_fails(monkeypatch, tmp_path):
    monkeypatch.setenv(table.VARIABLE, str(tmp_path / "missing.json"))
    failed = [finding for finding in doctor.examine(None) if finding.failed]
    assert [finding.about for finding in failed] == ["kernel table"]
    assert "missing.json" in failed[0].found and "unset MOEBLAZE_KERNEL_TABLE" in failed[0].advice
    monkeypatch.delenv(table.VARIABLE)
    table.use(None)


def test_the_cause_of_a_compiler_error_is_named(monkeypatch):
    def fail(*arguments):
        try:
            raise AttributeError("'tuple' object has no attribute gated")
        except AttributeError as error:
            raise RuntimeError("at 74:4:\n    gl.warp_specialize(\n    ^") from error

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(doctor.aot, "compile_step", fail)
    found = doctor.compiles(90, 1000)
    assert found.failed
    assert found.found == "do not compile: 'tuple' object has no attribute gated"


@pytest.mark.gpu
def test_speed_is_measured_on_a_gpu(plain_env):
    code, output = run(sys.executable, "-m", "moeblaze_megatron.doctor", env=plain_env)
    assert code == 0, output
    assert "kernels in bfloat16: output and gradients as a loop" in output
    assert " TFLOP/s, forward and backward of 16384 tokens" in output
