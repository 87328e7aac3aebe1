"""The benchmark's own arithmetic, words and code paths; what it measures needs a GPU."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pretraining import needs_megatron_on_cpu

from moeblaze_megatron.bench import __main__ as bench
from moeblaze_megatron.bench import measure, paper, peers
from moeblaze_megatron.bench.kernels import KERNELS, kernel_calls
from moeblaze_megatron.bench.shapes import ROUTINGS, SHAPES, Shape, inputs_for, shape_from
from moeblaze_megatron.ops import experts, reference, table
from moeblaze_megatron.ops.memory import layer_bytes, slice_columns

TINY = Shape(T=64, H=32, F=16, E=8, K=2)


@pytest.fixture
def eager(monkeypatch):
    """What a user gets: off the GPU the eager twins. What peers compile is traced, not built."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(experts, "kernels_for", lambda tensor: reference)
        monkeypatch.setattr(peers, "kernels_for", lambda tensor: reference)
        traced = {"backend": "aot_eager"}
        compile = torch.compile
        monkeypatch.setattr(torch, "compile", lambda *args, **how: compile(*args, **how | traced))


def run(monkeypatch, *words) -> None:
    monkeypatch.setattr("sys.argv", ["bench", *map(str, words), "--steps", "10", "--sets", "1"])
    bench.main()


def test_shapes_by_name_and_by_size():
    assert shape_from("qwen3-30b", "swiglu") == SHAPES["qwen3-30b"]
    shape = shape_from("1024,64,32,8,2", "silu")
    assert shape.forward_flops == 2 * 1024 * 2 * 64 * (32 + 32)
    assert shape_from("1024,64,32,8,2", "swiglu").forward_flops == 2 * 1024 * 2 * 64 * (64 + 32)


@pytest.mark.parametrize(
    "text", ["qwen", "1,2,3", "8,8,8,2,4", "0,8,8,2,1", "8,8,8,2000,2", "8,8,8,64,40"]
)
def test_bad_shapes_are_named(text):
    with pytest.raises(ValueError, match=text):
        shape_from(text, "swiglu")


def test_a_kernel_table_that_cannot_be_used_is_named(monkeypatch, capsys):
    monkeypatch.setenv(table.VARIABLE, "/missing.json")
    monkeypatch.setattr("sys.argv", ["bench", "8,8,8,4,2"])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert "error: kernel table /missing.json: " in capsys.readouterr().err
    monkeypatch.delenv(table.VARIABLE)
    table.use(None)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings_are_what_they_are_called(routing):
    shape = Shape(T=8192, H=16, F=16, E=16, K=2)
    inputs = inputs_for(shape, torch.float32, routing)
    counts = inputs.tokens_per_expert(shape.E)
    mean = shape.T * shape.K / shape.E
    assert counts.sum() == shape.T * shape.K
    first = torch.bincount(inputs.topk_indices[:, 0], minlength=shape.E)
    if routing == "uniform":
        assert counts.min() > 0.8 * mean and counts.max() < 1.2 * mean
    elif routing == "uneven":
        assert 1.1 * mean < counts.max() < 3 * mean
    elif routing == "zipf":  # expert 0 is 4 times as popular as expert 3
        assert (first[0] / first[3]).item() == pytest.approx(4, rel=0.2)
    elif routing == "half-empty":
        assert (counts > 0).tolist() == [True] * 8 + [False] * 8
    else:
        assert first[0] == shape.T


@pytest.mark.parametrize(
    "name", ["moeblaze", "fp8_store", "recompute_fc1", "large_workspace", "grouped_mm"]
)
@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_systems_agree_with_the_reference(eager, name, activation):
    shape = shape_from("64,32,16,8,2", activation)
    inputs = inputs_for(shape, torch.bfloat16)
    want = measure.reference_results(shape, inputs)
    peer = peers.PEERS[name]
    error = measure.check(name, peer, peer.make(shape), inputs, want)
    # Neither bf16 nor e4m3, of which an activation multiplies two at most, can be exact.
    low, high = (
        (1e-2, 2 / 16) if name == "fp8_store" else (1e-4, measure.ERROR_LIMIT[torch.bfloat16])
    )
    assert low < error < high


def test_a_wrong_system_is_named_with_what_is_wrong(eager):
    inputs = inputs_for(TINY, torch.float32)
    want = measure.reference_results(TINY, inputs)
    want["grad_x"] *= 1.1
    peer = peers.PEERS["moeblaze"]
    with pytest.raises(ValueError, match="moeblaze: grad_x is off by"):
        measure.check("moeblaze", peer, peer.make(TINY), inputs, want)


@pytest.mark.parametrize("name", [name for name, peer in peers.PEERS.items() if peer.lay])
def test_gradients_come_back_from_a_peers_layout(name):
    """unlay(lay(weights)) = weights: gradients have the layout of the weights."""
    peer, inputs = peers.PEERS[name], inputs_for(TINY, torch.float32)
    laid = peer.inputs(inputs)
    assert laid.x is inputs.x and all(w.is_leaf and w.is_contiguous() for w in laid.weights)
    for got, want in zip(peer.unlay(*laid.weights), inputs.weights, strict=True):
        assert torch.equal(got, want)


def test_sonicmoe_takes_gate_and_up_rows_in_turn():
    fc1 = torch.arange(4.0).view(1, 4, 1)  # gate 0, 1; up 2, 3
    fc1, _ = peers.PEERS["sonicmoe"].lay(fc1, None)
    assert fc1.flatten().tolist() == [0, 2, 1, 3]


def test_closed_form_by_hand_and_as_the_operator_counts():
    """T 64, K 2 -> R 128: fc1_output 128*32; peak + 64*32 + both gradients + another 64*32."""
    form = bench.closed_form(TINY, 2)
    assert form["held"] * 2**20 == 2 * 128 * 32
    weights = 8 * 32 * (32 + 16)
    assert form["peak"] * 2**20 == 2 * (64 * 32 + 128 * 32 + weights + 64 * 32)
    inputs = inputs_for(TINY, torch.bfloat16)
    sizes = layer_bytes(inputs.x, *inputs.weights, rows=128)
    assert (form["held"], form["peak"]) == (sizes.fc1_output / 2**20, sizes.peak / 2**20)


@pytest.mark.parametrize("name", SHAPES)
def test_workspaces_stay_near_the_peak(name):
    """By the tensors alive beside each slice of fc2 and of fc1's dgrad."""
    shape = shape_from(name, "swiglu")
    T, H, F, E, rows = shape.T, shape.H, shape.F, shape.E, shape.T * shape.K
    x, fc1_weight, fc2_weight = (
        torch.empty(size, dtype=torch.bfloat16, device="meta")
        for size in ((T, H), (E, 2 * F, H), (E, H, F))
    )
    sizes = layer_bytes(x, fc1_weight, fc2_weight, rows)

    def slice_bytes(workspace):
        return 2 * rows * slice_columns(H, rows, 2, workspace)

    both = sizes.output + sizes.fc1_output
    in_forward = both + sizes.act + slice_bytes(sizes.forward_workspace)
    grads = sizes.output + sizes.fc2_weight  # of x and fc2_weight
    in_dgrad = both + grads + slice_bytes(sizes.dgrad_workspace)
    assert 24 * max(in_forward, in_dgrad) <= 25 * sizes.peak


def test_paper_table_and_plots(tmp_path):
    """ratio = baseline / ours: 12 ms against 8 ms -> 1.50x; 400 MiB against 100 -> 4.00x."""
    rows = {
        name: {"forward+backward": {"p50": ms}, "held": mib, "peak": mib}
        for name, ms, mib in (("grouped_mm", 12.0, 400.0), ("moeblaze", 8.0, 100.0))
    }
    rows["megablocks"] = {"failed": "RuntimeError: out of memory"}
    report = {activation: {"conf4": rows} for activation in ("silu", "swiglu")}
    text = paper.table(report)
    assert text.count("1.50x") == 2 and text.count("4.00x") == 4
    assert text.count("3.7x\n") == 0 and "    3.7x" in text  # the paper's, beside ours
    pytest.importorskip("matplotlib")
    paths = paper.plot(report, tmp_path)
    assert len(paths) == 4 and all(path.stat().st_size > 0 for path in paths)


def test_layer_table_and_files(eager, monkeypatch, tmp_path, capsys):
    """A peer that breaks, or lacks the activation, is a row that says so; ours ends the run."""
    pytest.importorskip("matplotlib")

    def broken(shape):
        raise RuntimeError("no kernel for\nthis GPU")

    foreign = {
        "broken": peers.Peer(broken, imports="torch"),
        "gated": peers.Peer(broken, imports="torch", activations=("swiglu",)),
    }
    for name, peer in foreign.items():
        monkeypatch.setitem(peers.PEERS, name, peer)
    report = tmp_path / "report.json"
    run(monkeypatch, "layer", "64,32,16,8,2", "--activation", "silu", "--routing", "half-empty",
        "--json", report, "--plot", tmp_path,
        "--peers", "dense", "moeblaze", "grouped_mm", *foreign)  # fmt: skip
    out = capsys.readouterr().out
    assert "half-empty routing" in out and "of dense" in out
    assert "broken        not timed: RuntimeError: no kernel for this GPU" in out
    assert "gated         not timed: has swiglu, not silu" in out
    rows = json.loads(report.read_text())["64,32,16,8,2"]
    share = rows["dense"]["forward"]["p50"] / rows["moeblaze"]["forward"]["p50"]
    assert rows["moeblaze"]["forward"]["of_dense"] == pytest.approx(share)
    assert (tmp_path / "layer_64_32_16_8_2.png").stat().st_size > 0

    monkeypatch.setitem(peers.PEERS, "moeblaze", peers.Peer(broken))
    with pytest.raises(RuntimeError, match="no kernel"):
        run(monkeypatch, "layer", "64,32,16,8,2", "--peers", "moeblaze")


def test_memory_table(eager, monkeypatch, capsys):
    systems = ("moeblaze", "fp8_store", "recompute_fc1", "large_workspace", "grouped_mm")
    run(monkeypatch, "memory", "64,32,16,8,2", "--peers", *systems)
    out = capsys.readouterr().out
    for name in ("closed form", *systems):
        assert f"\n{name} " in out


def test_scaling_table_and_plot(eager, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report = tmp_path / "report.json"
    run(monkeypatch, "scaling", "64,32,16,8,2", "--plot", tmp_path, "--json", report)
    out = capsys.readouterr().out
    for label in ("T=64", "T=256", "E=8", "E=32", "K=2", "K=8"):
        assert f"\n{label:7} moeblaze" in out and f"\n{label:7} grouped_mm" in out
    assert set(json.loads(report.read_text())) == {"header", "T", "E", "K"}
    assert (tmp_path / "scaling.png").stat().st_size > 0


def test_paper_runs_at_small_shapes(eager, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    small = ("64,32,16,4,1", "64,32,16,8,2")
    monkeypatch.setitem(bench.DEFAULT_SHAPES, "paper", small)
    run(monkeypatch, "paper", "--plot", tmp_path)
    out = capsys.readouterr().out
    for activation in ("silu", "swiglu"):
        assert f"\n{activation}, against grouped_mm. The paper" in out
    assert len(list(tmp_path.glob("paper_*.png"))) == 4


def test_a_run_that_is_ended_shows_what_it_has(eager, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(bench.DEFAULT_SHAPES, "paper", ("64,32,16,4,1", "64,32,16,8,2"))
    measured, report = bench.bench_layer, tmp_path / "report.json"

    def ended(title, shape, arguments):
        if title == "64,32,16,8,2":
            os.kill(os.getpid(), signal.SIGTERM)
        return measured(title, shape, arguments)

    monkeypatch.setattr(bench, "bench_layer", ended)
    with pytest.raises(SystemExit, match="bench: interrupted"):
        run(monkeypatch, "paper", "--json", report)
    table = capsys.readouterr().out.partition("silu, against grouped_mm.")[2]
    assert "\n64,32,16,4,1" in table and "8,2" not in table and "swiglu" not in table
    assert list(json.loads(report.read_text())["paper"]["silu"]) == ["64,32,16,4,1"]


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert peers.chosen(None) == [
        "dense", "moeblaze", "fp8_store", "recompute_fc1", "large_workspace", "grouped_mm"
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"sonicmoe is not installed: pip install.*'x' is none of"):
        peers.chosen(["sonicmoe", "x"])
    arguments = bench.parser().parse_args(["layer", "--plot", "somewhere"])
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        bench.settle(arguments)


def test_command_line_names_what_is_wrong(plain_env):
    for words, message in (
        (["layer", "nowhere"], "shape 'nowhere' is neither"),
        (["laier"], "'laier' is neither a command (layer, memory, "),
        (["laier"], "; did you mean layer"),
        (["layer", "--steps", "3"], "--steps is at least 10 and --sets at least 1"),
        (["host", "--layers", "0"], "--steps is at least 10 and --layers at least 1"),
        (["host", "--peers", "moeblaze", "dense"], "--peers: host does not run dense"),
        (["memory", "--peers", "dense"], "--peers: memory does not run dense"),
        (["layer", "--peers", "magic"], "--peers: 'magic' is none of dense, moeblaze"),
        (["scaling", "64,32,16,4,2"], "E is at least 4*K"),
        (["expert_parallel"], "expert_parallel runs on several ranks: torchrun"),
        (["weak_scaling", "--ranks", "2"], "--ranks takes two or more numbers"),
        (["weak_scaling", "--ranks", "0", "1"], "each 1 or more; got [0, 1]"),
        (
            ["layer", "8,8,8,4,2", "--json", "/missing/x.json"],
            "/missing/x.json cannot be written",
        ),
        (["layer", "8,8,8,4,2", "--json", "/"], "--json / cannot be written; name another file"),
        (["layer", "8,8,8,4,2", "--plot", __file__], "test_bench.py is no folder; name another"),
        (["layer", "0,8,8,2,1", "8", "--steps", "1"], "--steps is at least 10 and --sets at least"),
        (["layer", "0,8,8,2,1", "8", "--steps", "1"], "'0,8,8,2,1': sizes are positive and K is"),
        (["layer", "0,8,8,2,1", "8", "--steps", "1"], "shape '8' is neither T,H,F,E,K nor one of"),
        (["weak_scaling", "9,8,8,6,2", "--ranks", "1", "4"], "6 experts do not divide by 4 ranks"),
    ):
        command = [sys.executable, "-m", "moeblaze_megatron.bench", *words]
        done = subprocess.run(command, env=plain_env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and message in done.stderr


def expert_parallel(program, shape, *words, env, report):
    """What `bench expert_parallel` prints on 2 CPU ranks, and the shape's rows of its report."""
    command = [*(sys.executable, "-m", "torch.distributed.run", "--standalone"),
               *("--nproc-per-node", "2", *program, "expert_parallel", shape),
               *("--steps", "10", "--json", str(report), *words)]  # fmt: skip
    env = env | {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(report.read_text())[shape]


BENCH = ("-m", "moeblaze_megatron.bench")
WITH_FLEX = (str(Path(__file__).with_name("deepep_stand_in.py")),)


@needs_megatron_on_cpu
def test_expert_parallel_table_where_a_rank_gets_no_token(plain_env, tmp_path):
    """Top 1, which Megatron's router has only with its softmax before; all of expert 0."""
    _, rows = expert_parallel(
        BENCH, "64,32,16,8,1", "--routing", "one-expert",
        env=plain_env, report=tmp_path / "report.json",
    )  # fmt: skip
    assert rows["moeblaze"]["rows"] == rows["alltoall"]["rows"] == 64
    assert 0 < rows["moeblaze"]["error"] < 2e-2


@needs_megatron_on_cpu
@pytest.mark.parametrize("flex", [False, True], ids=["alltoall", "flex"])
def test_expert_parallel_table(plain_env, tmp_path, flex):
    """Top 4 of 8 experts on 2 ranks: half of 4*64 rows by expert leave, and at most 64 by rank."""
    printed, rows = expert_parallel(
        WITH_FLEX if flex else BENCH, "64,32,16,8,4",
        env=plain_env, report=tmp_path / "report.json",
    )  # fmt: skip
    assert printed.count("alltoall / moeblaze: forward") == 1
    assert printed.count("flex / moeblaze: forward") == flex
    ours, theirs = rows["moeblaze"], rows["alltoall"]
    assert 100 < theirs["rows"] < 160 and 56 < ours["rows"] <= 64
    assert 1e-4 < ours["error"] < 2e-2
    if flex:
        assert rows["flex"]["rows"] == ours["rows"] and rows["flex"]["bytes"] is None
        assert 1e-4 < rows["flex"]["error"] < 2e-2
    # Rows of bf16 there and back, forward and backward; what comes back differs a little.
    for row in (ours, theirs):
        assert 0.8 < row["bytes"] / (4 * 64 * row["rows"]) < 1.5


@needs_megatron_on_cpu
def test_weak_scaling_table(plain_env, tmp_path):
    """A rank alone sends nothing; two share the experts of the same shape."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "moeblaze_megatron.bench", "weak_scaling", "64,32,16,8,2"]
    env = plain_env | {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [*command, "--ranks", "2", "1", "--steps", "10", "--json", str(report)],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    alone, two = (
        json.loads(report.read_text())["weak_scaling"][f"{n} ranks"]["64,32,16,8,2"] for n in (1, 2)
    )
    lines = [line.split() for line in done.stdout.splitlines()[-4:]]
    assert [line[:2] for line in lines] == [
        [n, name] for n in "12" for name in ("moeblaze", "alltoall")
    ]
    assert lines[0][3] == lines[0][5] == "100.0%"
    for line in lines[2:]:
        ms = [rows[line[1]]["forward+backward"]["p50"] for rows in (alone, two)]
        assert line[5] == f"{ms[0] / ms[1]:.1%}"
        assert alone[line[1]]["rows"] == 0 < two[line[1]]["rows"]
    assert two["moeblaze"]["rows"] < two["alltoall"]["rows"]


def test_kernels_run_alone():
    shape = Shape(64, 32, 16, 4, 2)
    work, calls, restore = kernel_calls(shape, inputs_for(shape, torch.bfloat16))
    assert tuple(calls) == tuple(work) == KERNELS
    in_place = calls["fc2 dgrad, lookup"]
    first = in_place()[0].clone()
    for call in calls.values():
        call()
    assert not torch.equal(in_place()[0], first)
    restore()
    assert torch.equal(in_place()[0], first)
    assert work["fc1, dense"] == work["fc1"] == (4 * 128 * 32 * 16, "TFLOP/s")


@pytest.mark.gpu
@pytest.mark.parametrize("words", [["layer"], ["memory"], ["kernels"], ["host"], ["scaling"]])
def test_runs_at_a_small_shape(words, plain_env, tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "moeblaze_megatron.bench", *words, "512,256,128,8,2"]
    done = subprocess.run(
        [*command, "--steps", "10", "--json", str(report)],
        env=plain_env, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert report.stat().st_size > 0
