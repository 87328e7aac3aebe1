"""The quickstart: text in, a trained model and one screen of figures out."""

import json
import re
import sys
from importlib.util import find_spec

import pytest
from pretraining import example, needs_megatron_on_cpu, run

from moeblaze_megatron import quickstart


def train(*arguments, env):
    """Run the quickstart as a user does; returns its output."""
    command = (sys.executable, "-m", "moeblaze_megatron.quickstart")
    code, output = run(*command, *arguments, env=env, timeout=600)
    assert code == 0, output[-6000:]
    return output


def losses(output):
    found = re.search(r"lm loss +(\S+) at the start, (\S+) at the end, (\S+) on text", output)
    return tuple(float(loss) for loss in found.groups())


@needs_megatron_on_cpu
def test_trains_on_own_text_and_resumes(plain_env, tmp_path):
    env = plain_env | {"CUDA_VISIBLE_DEVICES": ""}
    text, out = tmp_path / "text", tmp_path / "out"
    text.mkdir()
    (text / "b.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 3000)
    (text / "a.bin").write_bytes(bytes(100_000))
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    training = env | {"MOEBLAZE_RECORD": str(recorded)}
    output = train("--text", text, "--out", out, "--iters", 30, env=training)
    assert f"132,000 bytes from {text}: {text}/b.txt" in output
    start, end, valid = losses(output)
    assert start > 5 and end < 2.5 and valid < 2.5
    assert "2, built with MoEBlazeTokenDispatcher and MoEBlazeExperts" in output
    assert f"{out}/checkpoint/iter_0000030" in output
    assert (out / "checkpoint" / "iter_0000030" / "metadata.json").is_file()
    saved = {
        name: int(size.replace(",", ""))
        for name, size in re.findall(r"^  (moeblaze|alltoall) +(\S+) ", output, re.MULTILINE)
    }
    assert saved["moeblaze"] < 0.6 * saved["alltoall"]
    held = json.loads((recorded / "rank0.json").read_text())["held_bytes_per_token"]
    assert saved["moeblaze"] == round(held)

    output = train("--out", out, "--iters", 5, "--resume", "--dispatcher", "alltoall", env=env)
    assert "iterations 31 to 35" in output
    assert "2, built with MoEAlltoAllTokenDispatcher and SequentialMLP" in output
    assert losses(output)[0] < 2.5

    # The GPU example reads that dataset; here with all its flags, but small.
    small = """--num-layers 1 --hidden-size 64 --moe-ffn-hidden-size 32 --seq-length 64
        --train-iters 5 --lr-warmup-iters 1 --global-batch-size 8 --log-interval 1"""
    output = example(
        "pretrain_one_gpu.sh",
        *(out / "data" / "train", *small.split(), "--save", tmp_path / "example"),
        env=env,
    )
    assert output.count(" lm loss: ") == 5


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
def test_trains_on_the_gpu(plain_env, tmp_path):
    output = train("--out", tmp_path / "out", "--iters", 60, env=plain_env)
    start, end, valid = losses(output)
    assert "in bf16" in output and start > 5 and end < 2.8 and valid < 2.8
    assert "8, built with MoEBlazeTokenDispatcher and MoEBlazeExperts" in output


def test_default_text_is_the_same_every_time():
    texts, described = quickstart.collect_text(None)
    again, _ = quickstart.collect_text(None)
    assert texts == again and sum(map(len, texts)) > 1 << 20
    assert "Python's documentation and standard library" in described


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no text in .*every file is empty or binary"),
        (bytes(100_000), "no text in .*every file is empty or binary"),
        (b"short", r"too little text in .*: 5 bytes, at least 65,536 needed"),
    ],
    ids=["empty", "binary", "short"],
)
def test_unusable_text_is_refused(tmp_path, content, message):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        quickstart.collect_text([path])


def test_missing_text_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"nowhere\.txt does not exist"):
        quickstart.collect_text([tmp_path / "nowhere.txt"])


def test_earlier_output_is_kept_unless_told(tmp_path):
    (tmp_path / "train.log").write_text("earlier")
    (tmp_path / "mine.txt").write_text("not the quickstart's")
    with pytest.raises(SystemExit, match=r"is not empty; --force .* --out"):
        quickstart.prepare_output(tmp_path, resume=False, force=False)
    with pytest.raises(SystemExit, match="--resume found no checkpoint"):
        quickstart.prepare_output(tmp_path, resume=True, force=False)
    with pytest.raises(SystemExit, match=r"--force would delete train\.log"):
        quickstart.prepare_output(tmp_path, resume=False, force=True)
    assert (tmp_path / "train.log").read_text() == "earlier"
    (tmp_path / quickstart.MARK).touch()
    quickstart.prepare_output(tmp_path, resume=False, force=True)
    assert (tmp_path / "train.log").read_text() == ""
    assert (tmp_path / "mine.txt").read_text() == "not the quickstart's"


def test_output_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SystemExit, match=f"{out}"):
            quickstart.prepare_output(out, resume=False, force=False)


@needs_megatron_on_cpu
def test_data_alone(plain_env, tmp_path):
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 3000)
    output = train("--text", text, "--out", out, "--data-only", env=plain_env)
    assert f"--data-path {out}/data/train --tokenizer-type NullTokenizer" in output
    # Two bytes a token, and one more token, the end of the text.
    both = sum((out / "data" / f"{part}.bin").stat().st_size for part in ("train", "valid"))
    assert both == 2 * (132_000 + 1) and not (out / "checkpoint").exists()


def test_wrong_arguments_are_named(capsys):
    for arguments, message in (
        (["--iters", "0"], "--iters must be 1 or more, got 0"),
        (["--resume", "--text", "x"], "leave --text out"),
        (["--resume", "--data-only"], "--data-only trains nothing"),
        (["--itres", "5"], "unrecognized arguments: --itres"),
    ):
        with pytest.raises(SystemExit):
            quickstart.parse_arguments(arguments)
        assert message in capsys.readouterr().err
