"""Run a Megatron pretraining script that knows `--moe-token-dispatcher-type moeblaze`.

torchrun [...] -m moeblaze_megatron [SCRIPT.py] [Megatron's flags]
"""

import argparse
import difflib
import functools
import importlib.util
import os
import pathlib
import re
import runpy
import sys
from typing import NoReturn

from moeblaze_megatron.version import __version__

HELP = """\
usage: torchrun [...] -m moeblaze_megatron [SCRIPT.py] [Megatron's flags]

Runs a Megatron pretraining script, unmodified, after teaching Megatron-Core one more value:

  --moe-token-dispatcher-type moeblaze
        Train mixture-of-experts layers from index lists: no permuted copy of the tokens, and only
        the layer's input and the output of the first linear are kept for the backward pass.

  --moeblaze-workspace-mb MB    bound the buffer through which expert outputs are summed per token
  --moeblaze-recompute-fc1      keep only the input and index lists; run the first GEMM twice
  --activation-func-fp8-input-store
                                keep the output of the first linear in 8 bits
  --moeblaze-report-rows        print at the end how many rows expert parallelism sent, and saved
  --moeblaze-check-routing      for debugging: check on the device what only the device can see
  --moeblaze-kernel-table FILE  kernel configurations that moeblaze_megatron.tune found on this GPU

SCRIPT.py is the path of a script such as pretrain_gpt.py of a Megatron-LM checkout. Without it the
package's own script runs, which needs no checkout: causal GPT pretraining on the installed
megatron-core. All further arguments are the script's. To see them:

  python -m moeblaze_megatron --megatron-help             flags of the package's own script
  python -m moeblaze_megatron path/pretrain_gpt.py --help flags of another script

On a machine without a GPU the launcher turns on its CPU mode (gloo, for development and CI) and
adds the flags that a CPU needs; it prints both.

examples:
  # two MoE layers on random tokens, GPU or CPU
  torchrun --nproc-per-node 1 -m moeblaze_megatron --moe-token-dispatcher-type moeblaze \\
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --swiglu --disable-bias-linear \\
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \\
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 20 \\
    --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 257 \\
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm \\
    --log-interval 1 --eval-interval 20 --eval-iters 1

  # a Megatron-LM checkout, its flags unchanged but for the dispatcher
  torchrun --nproc-per-node 8 -m moeblaze_megatron Megatron-LM/pretrain_gpt.py \\
    --moe-token-dispatcher-type moeblaze ...

  # text to a trained model in one command
  python -m moeblaze_megatron.quickstart --help
"""

# What a pretraining run imports beside torch and Triton; megatron-core declares none of it.
PACKAGES = ("megatron.core", "megatron.training", "yaml", "six", "psutil")


def main() -> None:
    """Prepare Megatron and run the script named in sys.argv, or the package's own."""
    arguments = sys.argv[1:]
    script = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    if script is None and {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return
    if script is None and not arguments:
        sys.exit(
            "moeblaze_megatron: nothing to train: Megatron's flags are missing, or the path of a "
            "pretraining script and its flags. `python -m moeblaze_megatron --help` has complete "
            "examples; `python -m moeblaze_megatron.quickstart` needs no flags"
        )
    if script is None:
        arguments = ["--help" if a == "--megatron-help" else a for a in arguments]
    elif os.path.isfile(script):
        check_script(script)
        # As `python SCRIPT.py` does: the script's own checkout comes before installed packages.
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    else:
        sys.exit(
            f"moeblaze_megatron: no pretraining script at {script!r} (looked from {os.getcwd()}); "
            "give the path of one, or leave it out to run the package's own"
        )
    check_packages()

    import torch

    from moeblaze_megatron.mcore import install
    from moeblaze_megatron.mcore.config import UnsupportedSettings
    from moeblaze_megatron.mcore.cpu_mode import cpu_arguments, install_cpu_mode

    patched = install_cpu_mode(training=True)
    install()
    repair_compile_helpers()
    repair_usage()
    report(versions())
    if patched:
        added = cpu_arguments(arguments)
        arguments += added
        report(
            f"CPU mode: no GPU found, {len(patched)} names of torch and Megatron patched to run "
            "over gloo. For development and CI; says nothing about speed, memory or NCCL.",
            f"CPU mode adds: {' '.join(added) or 'no flags'}",
        )
    recorder = None
    if folder := os.environ.get("MOEBLAZE_RECORD"):
        from moeblaze_megatron.record import record

        recorder = record(pathlib.Path(folder))
    sys.argv = [script or "pretrain_gpt.py", *arguments]
    try:
        if script:
            runpy.run_path(script, run_name="__main__")
        else:
            check_own_script()
            from moeblaze_megatron import pretrain_gpt

            pretrain_gpt.main()
    except SystemExit as end:
        if end.code:
            raise  # else training is over, as with Megatron's --exit-interval
    except UnsupportedSettings as error:  # says all without a traceback, once
        report(f"ValueError: {error}")
        sys.exit(1)
    if recorder:
        recorder.finish()
    if "--moeblaze-report-rows" in arguments:
        from moeblaze_megatron.mcore import MoEBlazeTokenDispatcher

        report(f"moeblaze, rank 0: {MoEBlazeTokenDispatcher.total}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def check_script(path: str) -> None:
    """Exit where the file at `path` is not Python."""
    with open(path, "rb") as file:
        source = file.read()
    try:
        compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # a ValueError where there are zero bytes
        sys.exit(
            f"moeblaze_megatron: {path!r} is not a Python script ({error}); give the path of one, "
            "such as pretrain_gpt.py of a Megatron-LM checkout"
        )


def report(*lines: str) -> None:
    """Print `lines` on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(*lines, sep="\n", flush=True)


def missing_packages() -> list[str]:
    """Those of PACKAGES that cannot be imported here."""

    def is_missing(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is None
        except ModuleNotFoundError:  # its parent package is missing
            return True

    return [name for name in PACKAGES if is_missing(name)]


def check_packages() -> None:
    """Exit naming every package that a pretraining run imports and that is not there."""
    if missing := missing_packages():
        sys.exit(
            f"moeblaze_megatron: not installed: {', '.join(missing)}. In a clone of this repo "
            "`pip install -e '.[megatron]'` installs all that is needed (megatron-core 0.19 asks "
            f"for Python 3.12 or newer; this is {sys.version.split()[0]})."
        )


def check_own_script() -> None:
    """Exit where this Megatron is too old for the package's own pretraining script."""
    import megatron.core
    from megatron.training import argument_utils

    if not hasattr(argument_utils, "gpt_config_from_args"):  # 0.19 and newer
        version = megatron.core.__version__.partition("+")[0]
        sys.exit(
            "moeblaze_megatron: the package's own script needs Megatron-Core 0.19 or newer, this "
            f"is {version}: give the path of pretrain_gpt.py in a checkout of it"
        )


def versions() -> str:
    """What runs, and from where: a checkout and a wheel of Megatron can mix silently."""
    import megatron.core
    import megatron.training
    import torch
    import triton

    core, training = (os.path.dirname(m.__file__) for m in (megatron.core, megatron.training))
    # Megatron adds the commit of whatever repository holds its folder, of a wheel in .venv ours.
    version = megatron.core.__version__.partition("+")[0]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    lines = [
        f"moeblaze-megatron {__version__} in {os.path.dirname(os.path.abspath(__file__))}",
        f"megatron.core     {version} in {core}",
        f"megatron.training in {training}",
        f"torch {torch.__version__}, triton {triton.__version__}, {device}",
    ]
    if os.path.dirname(core) != os.path.dirname(training):
        lines.append("WARNING: megatron.core and megatron.training come from different places")
    return "\n".join(lines)


def repair_compile_helpers() -> None:
    """Let the wheel of megatron-core start: it ships the compiled helpers but no Makefile for them.

    Seen at 0.17 to 0.19: every training run calls `make` in that folder and exits where it fails.
    """
    from megatron.core.datasets import utils

    folder = os.path.dirname(utils.__file__)
    compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if compiled and not os.path.exists(os.path.join(folder, "Makefile")):
        utils.compile_helpers = lambda: None


def repair_usage() -> None:
    """Make Megatron's parser print its help, and name a wrong flag and its nearest known ones.

    Help strings of 0.19 hold a bare %, on which argparse fails, and any error is answered with more
    than a thousand lines of usage.
    """
    from megatron.training import arguments

    add_megatron_arguments = arguments.add_megatron_arguments

    @functools.wraps(add_megatron_arguments)
    def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_megatron_arguments(parser)
        for action in parser._actions:
            if action.help:
                action.help = re.sub(r"(%%|%\(\w+\)\w)|%", lambda m: m[1] or "%%", action.help)

        def error(message: str) -> NoReturn:
            known = list(parser._option_string_actions)
            wrong = message.partition("unrecognized arguments:")[2].split()
            if "--" in wrong:
                message += "\n--: leave it out, what follows it is taken for no flag"
            for flag in (word.split("=")[0] for word in wrong if word.startswith("--")):
                near = difflib.get_close_matches(flag, known)
                if near and flag not in ("--", *known):
                    message += f"\n{flag}: did you mean {' or '.join(near)}?"
            parser.exit(2, f"{parser.prog}: error: {message}\n")

        parser.error = error
        return parser

    arguments.add_megatron_arguments = add_arguments


if __name__ == "__main__":
    main()
