"""The benchmark's own arithmetic and words; its measurements need a GPU."""

import subprocess
import sys

import pytest

from moeblaze_megatron.bench import paper
from moeblaze_megatron.bench.shapes import SHAPES, shape_from


def test_shapes_by_name_and_by_size():
    assert shape_from("qwen3-30b", "swiglu") == SHAPES["qwen3-30b"]
    shape = shape_from("1024,64,32,8,2", "silu")
    assert shape.forward_flops == 2 * 1024 * 2 * 64 * (32 + 32)
    assert shape_from("1024,64,32,8,2", "swiglu").forward_flops == 2 * 1024 * 2 * 64 * (64 + 32)


@pytest.mark.parametrize("text", ["qwen", "1,2,3", "8,8,8,2,4", "0,8,8,2,1"])
def test_bad_shapes_are_named(text):
    with pytest.raises(ValueError, match=text):
        shape_from(text, "swiglu")


def test_paper_table_and_plots(tmp_path):
    """speedup = baseline / ours: 12 ms against 8 ms -> 1.50x; 400 MiB against 100 -> 4.00x."""
    rows = {
        name: {
            "forward": {"p50": ms / 3},
            "forward+backward": {"p50": ms},
            "held": mib,
            "peak": mib,
        }
        for name, ms, mib in (("grouped_mm", 12.0, 400.0), ("moeblaze", 8.0, 100.0))
    }
    report = {activation: {"conf1": rows} for activation in ("silu", "swiglu")}
    text = paper.table(report)
    assert text.count("1.50x") == 2 and text.count("4.00x") == 4
    pytest.importorskip("matplotlib")
    paths = paper.plot(report, tmp_path)
    assert len(paths) == 4 and all(path.stat().st_size > 0 for path in paths)


def test_command_line_names_what_is_wrong(plain_env):
    for words, message in (
        (["nowhere"], "shape 'nowhere' is neither"),
        (["layer", "--steps", "3"], "--steps is at least 10"),
        (["layer", "--peers", "magic"], "invalid choice: 'magic'"),
    ):
        command = [sys.executable, "-m", "moeblaze_megatron.bench", *words]
        done = subprocess.run(command, env=plain_env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and message in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("words", [["layer"], ["kernels"], ["host"]])
def test_runs_at_a_small_shape(words, plain_env, tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "moeblaze_megatron.bench", *words, "512,256,128,8,2"]
    done = subprocess.run(
        [*command, "--steps", "10", "--json", str(report)],
        env=plain_env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert report.stat().st_size > 0
