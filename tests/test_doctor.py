"""`python -m moeblaze_megatron.doctor`: what it finds, and that it fails where all is not well."""

import subprocess
import sys

import pytest
from pretraining import needs_megatron_on_cpu, run

from moeblaze_megatron import doctor
from moeblaze_megatron.mcore.install import TESTED_VERSIONS

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
        "kernels, sm_90     ",
        "kernels compile\n",
        "eager twins in float32: output and gradients as a loop",
        "a first run: python -m moeblaze_megatron.quickstart",
    ):
        assert words in output, (words, output)
    assert "FAILED" not in output


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


@pytest.mark.gpu
def test_speed_is_measured_on_a_gpu(plain_env):
    code, output = run(sys.executable, "-m", "moeblaze_megatron.doctor", env=plain_env)
    assert code == 0, output
    assert "kernels in bfloat16: output and gradients as a loop" in output
    assert " TFLOP/s, forward and backward of 16384 tokens" in output
