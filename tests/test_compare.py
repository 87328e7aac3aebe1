"""`python -m moeblaze_megatron.compare`: runs and their report, resumed; the largest batch."""

import json
import os
import subprocess
import sys
import time
import types
from importlib.metadata import version

import pytest
import torch
from pretraining import TINY, needs_megatron_on_cpu, run

from moeblaze_megatron import compare, estimate, quickstart, record


def test_flags_are_read_and_taken_out():
    training = ["--seed", "1", "--micro-batch-size=4", "--seed", "7", "--lr", "1"]
    assert compare.value_of(training, "--seed", 1234) == 7
    assert compare.value_of(training, "--micro-batch-size", 1) == 4
    assert compare.value_of(training, "--train-iters", 9) == 9
    assert compare.without(training, "--seed") == ["--micro-batch-size=4", "--lr", "1"]
    assert compare.without(training, "--micro-batch-size") == [*training[:2], *training[3:]]
    assert compare.value_of([], "--seed", 5) == 5
    ramp = ["--rampup-batch-size", "2", "2", "64", "--bf16"]
    assert compare.without(ramp, "--rampup-batch-size") == ["--bf16"]


def test_options_end_where_the_training_command_begins():
    arguments = compare.parse_arguments(["--out", "x", __file__, "--out", "y", "--lr", "1"])
    assert str(arguments.out) == "x" and arguments.training[:2] == [__file__, "--out"]
    arguments = compare.parse_arguments(["--processes", "2", "--", "--lr", "1"])
    assert arguments.processes == 2 and arguments.training == ["--lr", "1"]


def test_flags_that_compare_sets_are_refused_together(capsys):
    with pytest.raises(SystemExit):
        compare.parse_arguments(["--", "--save=x", "--moe-token-dispatcher-type", "flex"])
    said = capsys.readouterr().err
    assert "--moe-token-dispatcher-type: the dispatchers are" in said and "--save: " in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--"], "nothing follows --"),
        (["--train-iters", "20", "--"], "unrecognized arguments: --train-iters; flags of Megatron"),
        (["--dispatchers", "moeblaze", "moeblaze"], "--dispatchers names moeblaze twice"),
        (["--batch-step", "0"], "--batch-step must be 1 or more, got 0"),
        (["--only", "moeblaze"], "invalid choice: 'moeblaze'"),
        (["--only", "noise", "--find-max-batch"], "--only names runs to compare"),
        (["--processes", "0"], "--processes must be 1 or more, got 0"),
        (["--processes", "0", "--iters", "2"], "1 or more, got 0; --iters must be 12 or more, got"),
        (["--batch-step", "4"], "--batch-step 4 needs --find-max-batch"),
        (["--iters", "20", "--", "--train-iters", "3"], "leave out --iters 20: with flags of"),
        (["--iters", "20", "--find-max-batch"], "leave out --iters 20: --find-max-batch trains"),
        (["/nope.py", "--num-layers", "2"], "no pretraining script at '/nope.py'; give the path"),
        (["--", "--save-interval", "5", "--no-save-rng"], "leave out --no-save-rng: with --save-"),
    ],
)
def test_wrong_options_are_named(capsys, words, message):
    with pytest.raises(SystemExit):
        compare.parse_arguments(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed"], "--seed needs a number, got nothing"),
        (["--save-interval", "--bf16"], "--save-interval needs a number, got --bf16"),
        (["--train-iters=1e3"], "--train-iters needs a number, got 1e3"),
    ],
)
def test_numbers_that_are_none_are_named(tmp_path, words, message):
    with pytest.raises(SystemExit, match=message):
        compare.main(["--out", str(tmp_path), "--", *words])


def test_folders_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"compare: --out .*/out: .*Not a directory.*; name a"):
        compare.main(["--out", str(tmp_path / "file" / "out"), "--", "--lr", "1"])


def test_marks_of_runs_are_checked(tmp_path):
    flags, mark = ["--lr", "1"], tmp_path / "finished.json"
    assert not compare.finished(tmp_path, flags, 2)
    compare.write_mark(mark, flags, 2)
    assert compare.finished(tmp_path, flags, 2) and list(tmp_path.iterdir()) == [mark]
    for other in ((["--lr", "2"], 2), (flags, 1)):
        with pytest.raises(SystemExit, match="with other flags or --processes; name another"):
            compare.finished(tmp_path, *other)
    mark.write_text('{"processes"')
    with pytest.raises(SystemExit, match=r"cannot tell which run .* delete it"):
        compare.finished(tmp_path, flags, 2)
    with pytest.raises(SystemExit, match=r"cannot tell which run .* delete it"):
        compare.same_run(tmp_path / "started.json", flags, 2)


def fake_training(monkeypatch, iterations):
    """Runs that train nothing and record `iterations` steps; the dispatchers that ran, in order."""
    ran = []
    rank = dict.fromkeys(("held_bytes_per_token", "layer", "rows_per_dispatch", "peak_bytes"))
    rank |= {"versions": {"device": "CPU"}, "world_size": 1, "phase_ms": {}}
    rank |= {"tokens_per_iteration": 1, "flops_per_iteration": 1}

    def run(training, processes, folder, show):
        ran.append(training[training.index("--moe-token-dispatcher-type") + 1])
        folder.mkdir(parents=True)
        steps = [{"iteration": i, "loss": len(ran), "grad_norm": 1.0, "ms": i} for i in iterations]
        (folder / "steps.jsonl").write_text("\n".join(map(json.dumps, steps)))
        (folder / "rank0.json").write_text(json.dumps(rank))

    monkeypatch.setattr(compare, "run", run)
    return ran


def test_moeblaze_trains_first_and_is_reported_second(monkeypatch, tmp_path):
    ran = fake_training(monkeypatch, range(1, 9))
    compare.main(["--out", str(tmp_path), "--", "--lr", "1"])
    assert ran == ["moeblaze", "alltoall", "alltoall"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["names"] == ["alltoall", "moeblaze", "alltoall, seed 1235"]
    assert report["runs"]["moeblaze"]["ms_per_iteration"] == 7.5  # of 7 and 8


def test_what_the_estimate_refuses_is_refused_before_a_run(monkeypatch, tmp_path):
    ran = fake_training(monkeypatch, range(1, 9))
    with pytest.raises(SystemExit, match="--moe-router-topk is at most 32"):
        sizes = ["--num-experts", "64", "--moe-router-topk", "33"]
        compare.main(["--out", str(tmp_path), "--", *TINY, *sizes])
    assert not ran and not list(tmp_path.iterdir())


def test_few_iterations_have_no_speed(monkeypatch, tmp_path, capsys):
    fake_training(monkeypatch, range(1, 7))
    compare.main(["--out", str(tmp_path), "--", "--lr", "1"])
    said = capsys.readouterr().out
    assert "lm loss, last" in said and "ms per iteration" not in said
    assert "Speed is taken after iteration 6: train longer" in said


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("steps.jsonl", '{"iteration": 1, "lo\n{"iteration": 2}'),
        ("steps.jsonl", '{"iteration": 1, "loss": "x", "grad_norm": 1, "ms": 1}'),
        ("steps.jsonl", "[]"),
        ("rank0.json", '{"versions"'),
        ("rank0.json", "[]"),
        ("rank0.json", None),
        ("rank0.json", '{"world_size": 2}'),
    ],
)
def test_damaged_results_are_named_before_a_run(monkeypatch, tmp_path, file, content):
    ran = fake_training(monkeypatch, range(1, 9))
    command = ["--out", str(tmp_path), "--", "--lr", "1"]
    compare.main(["--only", "noise", *command])
    path = tmp_path / "alltoall-seed1235" / file
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(SystemExit, match=r"cannot read .*rank.* in .*-seed1235 \(.*\); delete it"):
        compare.main(command)
    assert ran == ["alltoall"]


@pytest.mark.parametrize("mark", ["finished.json", "started.json"])
def test_other_runs_are_refused_before_data_is_written(tmp_path, mark):
    folder = tmp_path / "alltoall-seed1234"
    (folder / compare.CHECKPOINT).parent.mkdir(parents=True)
    (folder / compare.CHECKPOINT).touch()
    compare.write_mark(folder / mark, ["--lr", "1"], 1)
    with pytest.raises(SystemExit, match="holds a run with other flags"):
        compare.main(["--out", str(tmp_path), "--only", "baseline"])
    assert list(tmp_path.iterdir()) == [folder]


def test_checkpoints_outlast_what_fails_before_the_end(monkeypatch, tmp_path):
    def run(training, processes, folder, show):
        (folder / "checkpoint").mkdir(parents=True)

    def no_space(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "write_mark", no_space)
    with pytest.raises(SystemExit, match="No space left"):
        compare.main(["--out", str(tmp_path), "--", "--save-interval", "5"])
    assert (tmp_path / "moeblaze-seed1234" / "checkpoint").exists()


def test_the_recorder_says_what_it_is():
    code, output = run(sys.executable, "-m", "moeblaze_megatron.record", "--help", env=os.environ)
    assert code == 0 and "MOEBLAZE_RECORD=FOLDER torchrun" in output and "rank<r>.json" in output


def test_what_lives_only_during_the_forward_pass_is_not_held():
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(16, 8, requires_grad=True)
    with record.kept_storages(layer) as kept:
        for _ in range(3):  # of each, autograd keeps the result until it is dropped
            x.exp()
        output = layer(x).exp()
    assert kept == {t.data_ptr(): t.nbytes for t in (x, output)}


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("most", [0, 1, 3, 4, 5, 31, 32])
@pytest.mark.parametrize("start", [1, 4, 33])
def test_bisection_finds_the_largest(most, start, step):
    tried = []

    def fits(batch):
        tried.append(batch)
        return batch <= most

    assert compare.largest(fits, start, step) == most - most % step
    assert len(tried) == len(set(tried)) and min(tried) >= 1
    assert all(batch % step == 0 for batch in tried)


def fake_gpu(monkeypatch, capacity, message):
    """Runs that print `message` and fail when the micro-batch is above `capacity`."""
    ran = []

    def run(training, processes, folder, show):
        dispatcher = training[training.index("--moe-token-dispatcher-type") + 1]
        batch = compare.value_of(training, "--micro-batch-size", 0)
        assert "--global-batch-size" not in training
        folder.mkdir(parents=True)
        ran.append((dispatcher, batch))
        if batch > capacity[dispatcher]:
            raise compare.Failed(message, folder / "train.log")
        (folder / "rank0.json").write_text('{"versions": {"torch": "1", "device": "GPU"}}')

    monkeypatch.setattr(compare.torch.cuda, "is_available", lambda: True)
    memory = types.SimpleNamespace(total_memory=10 * 2**30)
    monkeypatch.setattr(compare.torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(compare, "run", run)
    return ran


def test_find_max_batch_tries_and_resumes(monkeypatch, tmp_path, capsys):
    ran = fake_gpu(monkeypatch, {"alltoall": 3, "moeblaze": 6}, "torch.OutOfMemoryError: CUDA")
    command = ["--find-max-batch", "--out", str(tmp_path), "--"]
    command += ["--micro-batch-size", "2", "--global-batch-size", "16"]
    compare.main(command)
    found = json.loads((tmp_path / "max_batch.json").read_text())
    assert found["largest_micro_batch"] == {"alltoall": 3, "moeblaze": 6}
    assert ("alltoall", 4) in ran and "alltoall   micro-batch     4: out" in capsys.readouterr().out
    assert found["versions"] == {"torch": "1", "device": "GPU"}
    ran.clear()
    compare.main(command)
    assert ran == []


def test_the_search_begins_where_the_estimate_fills_the_gpu(monkeypatch, tmp_path):
    flags = quickstart.training_flags(quickstart.GPU_SIZES, tmp_path, 10)
    memory = 10 * 2**30

    def estimated(batch):
        return estimate.totals([*flags, "--micro-batch-size", str(batch)], 1)["moeblaze"]

    fake_gpu(monkeypatch, {}, "")
    start = compare.likely(flags, "moeblaze", 1)
    assert start > 8 and estimated(start) == pytest.approx(memory, rel=0.03)
    assert compare.likely(["--micro-batch-size", "4"], "moeblaze", 1) == 4  # too few flags
    assert compare.likely([*flags, "--micro-batch-size=3"], "flex", 1) == 3  # has no estimate
    # A try has one micro-batch in flight, whatever the global batch size, however many stages.
    stages = [*flags, "--pipeline-model-parallel-size", "4", "--global-batch-size"]
    least, most = (compare.likely([*stages, size], "moeblaze", 4) for size in ("3", "64"))
    assert start < least == most


def test_the_search_learns_from_the_dispatcher_before(monkeypatch, tmp_path):
    """Where the baseline fits 3/4 of what was estimated, the other begins at 3/4 of its own."""
    monkeypatch.setattr(compare, "likely", lambda training, dispatcher, processes: 32)
    ran = fake_gpu(monkeypatch, {"alltoall": 24, "moeblaze": 25}, "torch.OutOfMemoryError: CUDA")
    compare.main(["--find-max-batch", "--out", str(tmp_path), "--", "--lr", "1"])
    assert [batch for dispatcher, batch in ran if dispatcher == "moeblaze"] == [24, 25, 27, 26]


def test_the_search_learns_nothing_from_a_dispatcher_without_estimate(monkeypatch, tmp_path):
    """Flex begins at the flags' own micro-batch, of which it fits any multiple."""
    starts = {"flex": 2, "moeblaze": 32}
    monkeypatch.setattr(
        compare, "likely", lambda training, dispatcher, processes: starts[dispatcher]
    )
    ran = fake_gpu(monkeypatch, {"flex": 24, "moeblaze": 33}, "torch.OutOfMemoryError: CUDA")
    command = ["--find-max-batch", "--dispatchers", "flex", "moeblaze", "--out", str(tmp_path)]
    compare.main([*command, "--", "--lr", "1"])
    assert [batch for dispatcher, batch in ran if dispatcher == "moeblaze"] == [32, 33, 35, 34]


def test_the_search_begins_at_one_or_more(monkeypatch, tmp_path):
    fake_gpu(monkeypatch, {"alltoall": 3, "moeblaze": 6}, "torch.OutOfMemoryError: CUDA")
    command = ["--find-max-batch", "--out", str(tmp_path), "--", "--micro-batch-size", "0"]
    compare.main(command)
    found = json.loads((tmp_path / "max_batch.json").read_text())
    assert found["largest_micro_batch"] == {"alltoall": 3, "moeblaze": 6}


def test_sizes_that_no_run_has_are_named_before_a_try(monkeypatch, tmp_path):
    ran = fake_gpu(monkeypatch, {}, "")
    flags = quickstart.training_flags(quickstart.GPU_SIZES, tmp_path, 10)
    with pytest.raises(SystemExit, match="--expert-model-parallel-size 0 is not positive"):
        compare.main(["--find-max-batch", "--", *flags, "--expert-model-parallel-size", "0"])
    assert ran == []


def test_find_max_batch_stops_at_other_failures(monkeypatch, tmp_path):
    fake_gpu(monkeypatch, {"alltoall": 3, "moeblaze": 6}, "ValueError: something else")
    with pytest.raises(SystemExit, match="something else"):
        compare.main(["--find-max-batch", "--out", str(tmp_path), "--", "--lr", "1"])


def test_find_max_batch_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(compare.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        compare.main(["--find-max-batch"])


@needs_megatron_on_cpu
def test_runs_are_compared_and_resumed(plain_env, tmp_path):
    """With two expert-parallel ranks, so that rows are sent."""
    command = [sys.executable, "-m", "moeblaze_megatron.compare", "--out", tmp_path]
    command += ["--processes", 2, "--", *TINY, "--expert-model-parallel-size", 2]
    env = plain_env | {"CUDA_VISIBLE_DEVICES": ""}
    only = [*command[:3], "--only", "other", *command[3:]]
    code, output = run(*only, "--train-iters", 10, env=env)
    assert code == 0 and "no report yet" in output, output[-6000:]
    assert [path.name for path in tmp_path.iterdir()] == ["moeblaze-seed1234"]
    code, output = run(*command, "--train-iters", 10, env=env)
    assert code == 0, output[-6000:]
    assert (
        "moeblaze: finished before" in output
        and "within the noise" in output
        and "moeblaze / alltoall" in output
    )
    assert "rows sent per dispatch" in output and "peak memory" not in output  # a CPU has none
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["names"] == ["alltoall", "moeblaze", "alltoall, seed 1235"]
    stock, ours, noise = (report["runs"][name] for name in report["names"])
    assert ours["iterations"] == list(range(1, 11)) and ours["losses"][-1] < ours["losses"][0]
    gaps = report["differences"]
    assert gaps["dispatchers"]["mean"] < 1e-3 < gaps["seeds"]["mean"]
    assert noise["held_bytes_per_token"] == pytest.approx(stock["held_bytes_per_token"], rel=0.1)
    assert ours["held_bytes_per_token"] < stock["held_bytes_per_token"]
    assert report["versions"]["megatron-core"] == version("megatron-core") and report["cpu"]
    assert ours["layer"]["experts"] == "MoEBlazeExperts"
    assert "alltoall: MoEAlltoAllTokenDispatcher and SequentialMLP\nmoeblaze: MoEBlaze" in output
    T, K = 128, 2
    assert T < ours["rows_per_dispatch"] < stock["rows_per_dispatch"] == T * K
    assert ours["tokens_per_s"] == pytest.approx(8 * 64 / ours["ms_per_iteration"] * 1e3)
    estimated = estimate.totals([*TINY, "--expert-model-parallel-size", "2"], 2)
    assert estimated["moeblaze"] < estimated["alltoall"]
    assert [run["estimated_bytes"] for run in (stock, ours)] == [
        estimated[name] for name in ("alltoall", "moeblaze")
    ]
    assert set(stock["phase_ms"]) == set(compare.PHASES) and min(stock["phase_ms"].values()) > 0
    assert (tmp_path / "report.png").read_bytes()[1:4] == b"PNG"

    # As if the second run had been interrupted.
    (tmp_path / "moeblaze-seed1234" / "finished.json").unlink()
    (tmp_path / "moeblaze-seed1234" / "rank1.json").unlink()
    code, output = run(*command, "--train-iters", 10, env=env)
    assert code == 0, output[-6000:]
    assert output.count("finished before") == 2 and "moeblaze: training" in output
    again = json.loads((tmp_path / "report.json").read_text())
    assert again["runs"]["moeblaze"]["losses"] == ours["losses"]

    code, output = run(*command, "--train-iters", 11, env=env)
    assert code == 1 and "holds a run with other flags or --processes; name another" in output


@needs_megatron_on_cpu
def test_an_interrupted_run_goes_on_from_its_checkpoint(plain_env, tmp_path):
    env = plain_env | {"CUDA_VISIBLE_DEVICES": ""}

    def command(out, *flags):
        words = ["-m", "moeblaze_megatron.compare", "--only", "other", "--out", tmp_path / out]
        words += ["--", *TINY, "--train-iters", 999, "--exit-interval", 120, "--save-interval", 40]
        words += ["--ckpt-step", 7, *flags]  # of a user's --load, not for its own checkpoint
        return [sys.executable, *map(str, words)]

    def steps(out):
        return compare.read(tmp_path / out / "moeblaze-seed1234")

    folder = tmp_path / "cut" / "moeblaze-seed1234"
    with subprocess.Popen(command("cut"), env=env) as process:
        while not (folder / "checkpoint" / "latest_checkpointed_iteration.txt").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()  # the training, of which nothing may go on, gets no signal from here
    ended = (folder / "steps.jsonl").read_text()
    assert process.returncode == 1 and not (folder / "finished.json").exists()
    code, output = run(*command("cut", "--lr", "1e-2"), env=env)
    assert code == 1 and "holds a run with other flags" in output
    assert (folder / "steps.jsonl").read_text() == ended
    code, output = run(*command("cut"), env=env)
    assert code == 0, output[-6000:]
    iterations = [json.loads(line)["iteration"] for line in open(folder / "steps.jsonl")]
    assert iterations.count(1) == 1 and iterations.count(120) == 1
    assert (folder / "finished.json").exists() and not (folder / "checkpoint").exists()

    (tmp_path / "elsewhere").mkdir()
    code, output = run(*command("elsewhere/../cut"), env=env)
    assert code == 0 and "moeblaze: finished before" in output

    code, output = run(*command("whole"), env=env)
    assert code == 0, output[-6000:]
    assert steps("cut")["iterations"] == list(range(1, 121))
    assert steps("cut")["losses"] == steps("whole")["losses"]


@needs_megatron_on_cpu
def test_failed_training_is_shown(plain_env, tmp_path):
    command = [sys.executable, "-m", "moeblaze_megatron.compare", "--out", tmp_path, "--", "--zzz"]
    code, output = run(*command, env=plain_env | {"CUDA_VISIBLE_DEVICES": ""})
    assert code == 1
    assert "unrecognized arguments: --zzz" in output and "whole log: " in output
