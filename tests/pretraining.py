"""Megatron pretraining in subprocesses, for tests: the launcher, a tiny model, and full precision.

Run as a script (by the launcher) this is the package's own pretraining script that also writes the
loss and gradient norm of every iteration, all digits of them, to the file named in $RECORD.
"""

import inspect
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from moeblaze_megatron.processes import launcher_command

TINY = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8
    --lr 3e-3 --lr-decay-style constant --clip-grad 1.0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 99,1,0 --num-workers 0
    --log-interval 1 --eval-interval 1000 --eval-iters 0
""".split()
# Biases in attention and experts, and a clamp, which SequentialMLP, fused, does before the bias.
GPT_OSS = [
    *(flag for flag in TINY if flag not in ("--swiglu", "--disable-bias-linear")),
    *("--quick-geglu", "--glu-linear-offset", "1.0", "--activation-func-clamp-value", "0.3"),
    *("--no-bias-gelu-fusion", "--expert-model-parallel-size", "2"),
]


needs_megatron_on_cpu = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("transformer_engine") is not None,
    reason="needs megatron-core, and an environment without Transformer Engine for the CPU mode",
)


def run(*command, env, timeout=300):
    """Run `command` as a user without warnings; returns (exit code, output)."""
    result = subprocess.run(
        list(map(str, command)),
        env=env | {"PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return result.returncode, result.stdout


def launch(*arguments, env, processes=0, cpu=True, timeout=300):
    """Run the launcher with `arguments`; returns (exit code, output).

    `processes` > 0 runs it under torchrun, 0 without; `cpu` hides the GPU from it.
    """
    alone = [sys.executable, "-m", "moeblaze_megatron"]
    command = launcher_command(processes) if processes else alone
    env = env | {"CUDA_VISIBLE_DEVICES": ""} if cpu else env
    return run(*command, *arguments, env=env, timeout=timeout)


def train(tmp_path, dispatcher, *flags, iters, env, processes=1, model=TINY):
    """Train the tiny model on the CPU; returns its output and [{iteration, loss, grad_norm}]."""
    record = tmp_path / "record.jsonl"
    record.unlink(missing_ok=True)
    code, output = launch(
        __file__,
        *model,
        *("--moe-token-dispatcher-type", dispatcher, "--train-iters", iters),
        *flags,
        env=env | {"RECORD": str(record)},
        processes=processes,
    )
    assert code == 0, output[-6000:]
    return output, [json.loads(line) for line in record.read_text().splitlines()]


def largest_difference(ours, theirs, key):
    """Largest relative difference of `key` over the iterations that both have."""
    assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
    return max(abs(a[key] / b[key] - 1) for a, b in zip(ours, theirs, strict=True))


def example(script, *arguments, env):
    """Run a shell script of examples/ on the CPU; returns its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env = env | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    code, output = run(Path(__file__).parents[1] / "examples" / script, *arguments, env=env)
    assert code == 0, output[-6000:]
    return output


def main():
    import torch
    from megatron.training import training

    from moeblaze_megatron import pretrain_gpt

    training_log = training.training_log
    signature = inspect.signature(training_log)

    def recording_log(*args, **kwargs):
        call = signature.bind(*args, **kwargs).arguments
        loss = call["loss_dict"].get("lm loss")
        if loss is not None and torch.distributed.get_rank() == int(os.environ["WORLD_SIZE"]) - 1:
            row = {"iteration": call["iteration"], "loss": float(loss)}
            with open(os.environ["RECORD"], "a") as record:
                print(json.dumps(row | {"grad_norm": float(call["grad_norm"])}), file=record)
        return training_log(*args, **kwargs)

    training.training_log = recording_log
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
