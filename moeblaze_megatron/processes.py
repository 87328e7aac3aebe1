"""Training in processes of its own: the commands that start it, and what it prints."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# For processes that share a host, where their environment does not say otherwise: multicast over
# NVLink is not to be had on every machine, and what is compared should not depend on it.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# A line that Megatron logs of an iteration.
ITERATION = re.compile(
    r"iteration +(?P<iteration>\d+)/ *\d+ \|.* elapsed time per iteration \(ms\): (?P<ms>[\d.]+)"
    r".* lm loss: (?P<loss>\S+) .* grad norm: (?P<grad_norm>\S+)"
)


class Failed(RuntimeError):
    """A training process that did not end well.

    Attributes:
        output: all it printed.
    """

    def __init__(self, output: str, log: Path):
        self.output = output
        own = output.partition("failed (exitcode")[0]  # what torchrun says of it follows
        tail = "".join(own.splitlines(keepends=True)[-30:])
        super().__init__(f"{tail}\ntraining failed; whole log: {log}")


def torchrun_command(processes: int) -> list[str]:
    """torchrun with `processes` on this machine, up to where `-m` and a module follow."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    return [*torchrun, "--master-addr", "127.0.0.1", "--master-port", str(port)]


def launcher_command(processes: int = 1) -> list[str]:
    """The launcher under torchrun, up to where the script and its flags follow."""
    return [*torchrun_command(processes), "-m", "moeblaze_megatron"]


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise KeyboardInterrupt, unless ignored, as under nohup."""
    signals = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, signal.default_int_handler) for s in signals}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def train(
    command: list[str], log: Path, show: Callable[[str], None], env: dict[str, str] | None = None
) -> str:
    """Runs `command` and returns what it printed, which `log` gets too, and `show` by lines.

    It runs in a session of its own, so that a signal from a terminal or from elsewhere reaches this
    process alone, which then ends `command` and waits for it. For the main thread.

    Args:
        env: variables for it alone.
    Raises:
        Failed: the command ended with an error.
        KeyboardInterrupt: this process got SIGINT, SIGTERM or SIGHUP.
    """
    usual = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
    lines = []
    with (
        open(log, "a") as file,
        signals_interrupt(),
        subprocess.Popen(
            command,
            env=usual | NO_MULTICAST | os.environ | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        print(*command, file=file, flush=True)
        try:
            for line in process.stdout:
                file.write(line)
                lines.append(line)
                show(line)
        except (KeyboardInterrupt, OSError):  # the latter of `log`, or of what `show` prints to
            process.terminate()
            process.communicate()  # torchrun ends its workers first
            raise
    if process.returncode:
        raise Failed("".join(lines), log)
    return "".join(lines)
