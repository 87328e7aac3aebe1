"""How the command-line tools end: with the tool's status, and quietly where nobody reads on."""

import subprocess
import sys

import pytest

from moeblaze_megatron import command

MODEL = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 8
    --moe-ffn-hidden-size 32 --seq-length 64 --micro-batch-size 1 --global-batch-size 8""".split()


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("estimate", MODEL),
        ("scaling", ()),
        *((tool, ("--help",)) for tool in ("aot", "bench", "compare", "doctor", "patch", "tune")),
    ],
)
def test_ends_quietly_where_nobody_reads(tool, words, plain_env):
    # Without a buffer argparse itself passes over the error.
    plain_env = {name: value for name, value in plain_env.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-m", f"moeblaze_megatron.{tool}", *words],
        env=plain_env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()  # as `| head` does
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("status", [None, 0, 1, "why"])
def test_the_status_of_the_tool_stays(status):
    with pytest.raises(SystemExit) as end:
        command.run(lambda: sys.exit(status))
    assert end.value.code == status


def test_an_interrupt_ends_without_a_traceback():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="interrupted"):
        command.run(interrupted)


def test_other_errors_stay():
    with pytest.raises(ZeroDivisionError):
        command.run(lambda: 1 / 0)
