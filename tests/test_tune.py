"""The search for configurations, with the interpreter's kernels and a clock of our own."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moeblaze_megatron import index_lists_from_topk, tune
from moeblaze_megatron.bench import measure
from moeblaze_megatron.bench.shapes import Shape
from moeblaze_megatron.ops import hopper, kernels, reference, table
from moeblaze_megatron.ops.table import Copy, Ring, Tile

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = Shape(T=24, H=32, F=32, E=4, K=2)


@pytest.fixture
def few(monkeypatch):
    """One setting a kernel, so that the interpreter is done soon."""
    knobs = {
        Copy: ([{"width": 0}],),
        Tile: ([{"group": 4}, {"group": 16}],),
        Ring: ([{"group": 4}, {"group": 16}],),
    }
    monkeypatch.setattr(tune, "KNOBS", knobs)


def tuner(time_calls, seconds=600):
    """Without processes that compile: the interpreter does not, and on a GPU two kernels will."""
    deadline = time.monotonic() + seconds
    return tune.Tuner(torch.float32, "uneven", 2, deadline, None, time_calls)


def favouring(**settings):
    """A clock by which what has one of the settings takes 1 ms, and all else 2 ms."""

    def time_calls(calls, steps):
        assert steps == 2
        for call in calls.values():
            call()
        return {
            choice: {"p50": 1.0 if settings.items() & vars(choice).items() else 2.0}
            for choice in calls
        }

    return time_calls


def test_finds_the_fastest_of_every_kernel(few):
    found = tuner(favouring(group=16, width=0))
    found.tune("tiny", TINY)
    assert {key.kernel for key in found.found} >= {"copy", "rows", "fc1"}
    for key, value in found.found.items():
        base = table.lookup(key)
        changed = {"width": 0} if key.kernel == "copy" else {"group": 16}
        assert value == replace(base, **changed), key
        assert found.gains[key] == 2.0
        assert key.bits == 32 and key.gpu == table.gpus_of(torch.empty(0, device=DEVICE))[0]


def test_a_gain_within_the_noise_changes_nothing(few):
    def time_calls(calls, steps):
        return {choice: {"p50": 1 - 0.009 * (i > 0)} for i, choice in enumerate(calls)}

    found = tuner(time_calls)
    found.tune("tiny", TINY)
    assert found.found
    for key, value in found.found.items():
        assert value == table.lookup(key)


def test_a_candidate_that_computes_something_else_is_skipped(few, monkeypatch, capsys):
    right = kernels.rows_gemm

    def wrong(a, *arguments, **options):
        out = right(a, *arguments, **options)
        if table.configuration("rows", a, out.shape[1], a.shape[1]).group == 16:
            out *= 1.01
        return out

    monkeypatch.setattr(hopper, "fits", lambda tensor: False)
    monkeypatch.setattr(kernels, "rows_gemm", wrong)
    found = tuner(favouring(group=16))
    found.tune("tiny", TINY)
    groups = {key.kernel: value.group for key, value in found.found.items() if key.kernel != "copy"}
    assert groups.pop("rows") == 8
    assert set(groups.values()) == {16}
    assert "skipped group=16: ValueError: rows_gemm is off by 1.0e-02" in capsys.readouterr().err


def test_a_few_wrong_rows_among_many_are_seen(monkeypatch):
    """By the norm of all rows, one in 40,000 is within what bf16 explains."""
    a, weight = torch.randn(40_000, 16).bfloat16(), torch.randn(1, 16, 16).bfloat16()
    lists = index_lists_from_topk(torch.zeros(40_000, 1, dtype=torch.int32), 1)
    right = reference.rows_gemm

    def wrong(*arguments, **options):
        out = right(*arguments, **options)
        out[5000] = 0
        return out

    arguments = (a, weight, lists, torch.empty_like(a), 0, False, True)
    call = tune.Call("rows_gemm", arguments, {})
    monkeypatch.setattr(kernels, "rows_gemm", right)
    tune.verify_calls([call])
    monkeypatch.setattr(kernels, "rows_gemm", wrong)
    whole = (wrong(*arguments).float() - right(*arguments).float()).norm() / right(
        *arguments
    ).norm()
    assert whole < measure.ERROR_LIMIT[torch.bfloat16]
    with pytest.raises(ValueError, match="rows_gemm is off by"):
        tune.verify_calls([call])


def test_of_two_shapes_in_one_class_the_first_decides(few):
    tried = []

    def time_calls(calls, steps):
        tried.append(calls)
        return favouring(group=16)(calls, steps)

    found = tuner(time_calls)
    found.tune("tiny", TINY)
    count = len(tried)
    found.tune("as tiny", replace(TINY, T=30, E=5))
    assert len(tried) == count


def main(monkeypatch, *words) -> None:
    monkeypatch.setattr("sys.argv", ["tune", *map(str, words)])
    tune.main()


WORDS = ("24,32,32,4,2", "--dtype", "float32", "--steps", 2)


def test_writes_a_table_and_keeps_what_others_found(few, monkeypatch, tmp_path, capsys):
    path = tmp_path / "found.json"
    other = {table.Key("copy", "another GPU", 16, (2, 2)): Copy(0, 0, 4)}
    table.save(other, path, "before")
    monkeypatch.setattr(tune, "Compilers", lambda dtype, arch: None)
    main(monkeypatch, *WORDS, "--output", path)
    written = table.load(path)
    assert other.items() <= written.items() and len(written) > 4
    assert "float32" in json.loads(path.read_text())["made_by"]
    out, err = capsys.readouterr()
    assert f"export {table.VARIABLE}={path}" in out
    assert err.splitlines()[-1].startswith("[####################]")


def test_an_interrupt_keeps_what_was_found(few, monkeypatch, tmp_path, capsys):
    timed = []

    def time_calls(calls, steps):
        timed.append(calls)
        if len(timed) == 3:
            raise KeyboardInterrupt
        return favouring(group=16)(calls, steps)

    monkeypatch.setattr(tune, "time_calls", time_calls)
    monkeypatch.setattr(tune, "Compilers", lambda dtype, arch: None)
    with pytest.raises(SystemExit, match="tune: interrupted, the rest stays as it is"):
        main(monkeypatch, *WORDS, "--output", tmp_path / "found.json")
    assert len(table.load(tmp_path / "found.json")) == 2
    assert f"wrote {tmp_path / 'found.json'}" in capsys.readouterr().out


def test_a_budget_ends_the_search(few, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tune, "Compilers", lambda dtype, arch: None)
    main(monkeypatch, *WORDS, "--output", tmp_path / "found.json", "--budget", 1e-9)
    assert not (tmp_path / "found.json").exists()
    assert "--budget 1e-09 is spent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("8,8,8,2,4",), "K is at most E"),
        (("qwen",), "shape 'qwen' is neither"),
        (("8,8,8,2000,2",), "E is at most 1024 and K at most 32"),
        (("8,8,8,64,40",), "E is at most 1024 and K at most 32"),
        ((*WORDS[:-1], "1"), "--steps is at least 2"),
        ((*WORDS, "--budget", "0"), "--budget is above 0 seconds, got 0"),
        ((*WORDS, "--budget", "nan"), "--budget is above 0 seconds, got nan"),
        ((*WORDS, "--output", "/missing/found.json"), "--output /missing/found.json cannot be"),
        ((*WORDS, "--output", "/"), "--output / cannot be written; name another file"),
        ((*WORDS, "--output", "/", "--dry-run"), "--output / cannot be written; name another file"),
        ((*WORDS, "--output", __file__), "test_tune.py is there and no kernel table ("),
    ],
)
def test_wrong_words_are_named(words, reason, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(monkeypatch, *words)
    assert reason in capsys.readouterr().err


def on_cpu(plain_env, *words):
    command = [sys.executable, "-m", "moeblaze_megatron.tune", *words]
    env = plain_env | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_without_a_gpu_there_is_nothing_to_time(plain_env):
    result = on_cpu(plain_env, "qwen3-30b")
    assert result.returncode == 2
    assert "no CUDA GPU was found; --dry-run lists what would be tried" in result.stderr


def test_a_dry_run_lists_what_hopper_runs(plain_env):
    result = on_cpu(plain_env, "qwen3-30b", "--dry-run")
    assert result.returncode == 0, result.stderr
    for kernel in ("copy", "fc1_hopper", "fc2_dgrad_hopper", "rows_hopper", "wgrad_hopper"):
        assert f"  {kernel} " in result.stdout
    assert "in use: stages=3 group=8" in result.stdout
    assert "try: group=2; group=4; group=16; group=32" in result.stdout
    sixteen = "try: multiply_registers=160 load_registers=96 finish_registers=96"
    assert result.stdout.count(sixteen) == 4, result.stdout  # fc1, fc2 and the dgrads


COMPILE = """
import torch
from moeblaze_megatron import aot, tune
from moeblaze_megatron.bench.shapes import Shape
from moeblaze_megatron.ops import table

if __name__ == "__main__":
    shape = Shape(T=256, H=128, F=128, E=4, K=2)
    compilers = tune.Compilers(torch.bfloat16, 90)
    base = table.load(table.SHIPPED)[table.Key("fc1_hopper", "sm_90", 16)]
    copy = table.load(table.SHIPPED)[table.Key("copy", "any", 16)]
    for job in compilers.start(shape, copy, "fc1_hopper", [base]):
        job.result()
    compilers.stop()
    before = {path.name for path in CACHE.iterdir()}
    with aot.compiling(90) as compiled, aot.on_meta():
        tune.forward_backward(tune.layer_of(shape), tune.meta_inputs(shape, torch.bfloat16))
    assert compiled and before == {path.name for path in CACHE.iterdir()}
"""


def test_other_processes_compile_what_this_one_launches(plain_env, tmp_path):
    script, cache = tmp_path / "compile.py", tmp_path / "cache"
    script.write_text(f"from pathlib import Path\nCACHE = Path({str(cache)!r})\n{COMPILE}")
    env = plain_env | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, script], env=env, check=True)
