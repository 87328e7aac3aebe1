"""Pretraining in CPU mode with `moeblaze`, against Megatron's own dispatchers, and resumed."""

import os
import re
from argparse import Namespace

import pytest
from mcore_worker import in_megatron
from pretraining import (
    GPT_OSS,
    TINY,
    example,
    largest_difference,
    launch,
    needs_megatron_on_cpu,
    train,
)

pytestmark = needs_megatron_on_cpu

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("processes", "flags", "why"),
    [
        (1, "", "one process, all as simple as can be"),
        (2, "--pipeline-model-parallel-size 2", "forward of the next batch before this backward"),
        (
            2,
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
            "--hidden-dropout 0.1 " + RECOMPUTE,
            "parameters re-homed, gradients reduced by hooks, forward again inside backward",
        ),
    ],
    ids=["plain", "pipeline", "distributed-optimizer-recompute-dropout"],
)
def test_trains_as_alltoall_does(plain_env, tmp_path, processes, flags, why):
    runs = {}
    for dispatcher in ("moeblaze", "alltoall"):
        output, runs[dispatcher] = train(
            tmp_path, dispatcher, *flags.split(), iters=20, env=plain_env, processes=processes
        )
        layers = re.findall(r"> MoE layers on rank 0: .*", output)
        assert layers == [
            f"> MoE layers on rank 0: {2 if '--pipeline' not in flags else 1}, built with "
            + {
                "moeblaze": "MoEBlazeTokenDispatcher and MoEBlazeExperts",
                "alltoall": "MoEAlltoAllTokenDispatcher and SequentialMLP",
            }[dispatcher]
        ]
    ours, theirs = runs["moeblaze"], runs["alltoall"]
    assert len(ours) == 20 and ours[-1]["loss"] < ours[0]["loss"] - 1
    assert largest_difference(ours, theirs, "loss") < 1e-4
    assert largest_difference(ours, theirs, "grad_norm") < 1e-3


@pytest.mark.slow
def test_gpt_oss_flags_train_as_alltoall_does(plain_env, tmp_path):
    """With expert parallelism, without which SequentialMLP's biases do not train."""
    runs = [
        train(tmp_path, dispatcher, iters=8, env=plain_env, processes=2, model=GPT_OSS)[1]
        for dispatcher in ("moeblaze", "alltoall")
    ]
    assert len(runs[0]) == 8 and runs[0][-1]["loss"] < runs[0][0]["loss"] - 0.5
    assert largest_difference(*runs, "loss") < 1e-4
    assert largest_difference(*runs, "grad_norm") < 1e-3


@pytest.mark.slow
def test_50_iterations_agree_with_alltoall(plain_env, tmp_path):
    _, ours = train(tmp_path, "moeblaze", iters=50, env=plain_env)
    _, theirs = train(tmp_path, "alltoall", iters=50, env=plain_env)
    assert largest_difference(ours, theirs, "loss") < 1e-4
    assert largest_difference(ours, theirs, "grad_norm") < 1e-3


@pytest.mark.slow
def test_200_iterations_give_the_very_losses_of_alltoall(plain_env, tmp_path):
    """Bit for bit, as Megatron's allgather does, once two roundings of Megatron's are out.

    Its fused SwiGLU rounds unlike torch's, and clipping scales by a norm that adds one parameter of
    all experts in another order than one of each. A last bit grows to a flipped top-k in the end.
    """
    flags = ("--no-bias-swiglu-fusion", "--clip-grad", 0)
    _, ours = train(tmp_path, "moeblaze", *flags, iters=200, env=plain_env)
    _, theirs = train(tmp_path, "alltoall", *flags, iters=200, env=plain_env)
    assert [row["loss"] for row in ours] == [row["loss"] for row in theirs]
    assert largest_difference(ours, theirs, "grad_norm") < 1e-4


def test_bf16_trains(plain_env, tmp_path):
    _, rows = train(tmp_path, "moeblaze", "--bf16", iters=20, env=plain_env)
    assert rows[-1]["loss"] < rows[0]["loss"] - 1


def test_expert_parallel_baseline_trains(plain_env, tmp_path):
    """The baseline of an expert-parallel comparison has to run in CPU mode too."""
    flags = ("--expert-model-parallel-size", 2)
    _, rows = train(tmp_path, "alltoall", *flags, iters=5, env=plain_env, processes=2)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_resumed_run_repeats_the_uninterrupted_one(plain_env, tmp_path):
    save = ("--save", tmp_path / "checkpoint", "--save-interval", 5)
    load = ("--load", tmp_path / "checkpoint", "--ckpt-step", 5)
    _, rows = train(tmp_path, "moeblaze", *save, iters=10, env=plain_env)
    _, resumed = train(tmp_path, "moeblaze", *load, iters=10, env=plain_env)
    assert resumed == rows[5:]


@pytest.mark.parametrize(("saver", "loader"), [("moeblaze", "alltoall"), ("alltoall", "moeblaze")])
def test_plain_checkpoint_goes_on_with_other_experts(plain_env, tmp_path, saver, loader):
    """`--ckpt-format torch`: the loss of the next iteration is that of the run that saved it."""
    save = ("--ckpt-format", "torch", "--save", tmp_path / "checkpoint", "--save-interval", 5)
    load = ("--ckpt-format", "torch", "--load", tmp_path / "checkpoint", "--ckpt-step", 5)
    _, rows = train(tmp_path, saver, *save, iters=6, env=plain_env)
    _, resumed = train(tmp_path, loader, *load, "--no-load-optim", iters=6, env=plain_env)
    assert largest_difference(resumed, rows[5:], "loss") < 1e-4
    assert rows[5]["loss"] < rows[0]["loss"] - 0.5


@pytest.mark.parametrize(("saver", "loader"), [("moeblaze", "alltoall"), ("alltoall", "moeblaze")])
def test_flat_optimizer_state_of_other_experts_is_refused(plain_env, tmp_path, saver, loader):
    """Before Megatron loads any of it, which it would without an error, in the wrong places."""
    flags = ("--use-distributed-optimizer", "--ckpt-format", "torch")
    save = ("--save", tmp_path / "checkpoint", "--save-interval", 1)
    train(tmp_path, saver, *flags, *save, iters=1, env=plain_env)
    load = ("--load", tmp_path / "checkpoint", "--train-iters", 2)
    flags = ("--moe-token-dispatcher-type", loader, *flags, *load)
    code, output = launch(*TINY, *flags, env=plain_env, processes=1)
    assert code == 1, output[-6000:]
    assert f"moe_token_dispatcher_type='{loader}', and '{saver}' in the checkpoint" in output


def test_script_refuses_by_name_what_it_cannot_do(plain_env):
    flags = ("--train-iters", 1, "--check-for-spiky-loss", "--per-dataset-sequences-path", "x.json")
    code, output = launch(*TINY, *flags, env=plain_env)
    assert code == 1
    assert (
        "ValueError: this pretraining script does not support: "
        "--per-dataset-sequences-path, --check-for-spiky-loss" in output
    )


@pytest.mark.parametrize("dispatcher", ["moeblaze", "alltoall"])
@in_megatron
def test_the_script_sends_nobody_to_what_the_dispatcher_refuses(dispatcher):
    from moeblaze_megatron.pretrain_gpt import check_supported

    asked = {"sft": True, "overlap_moe_expert_parallel_comm": True, "num_experts": 4}
    with pytest.raises(ValueError, match="support: --sft") as error:
        check_supported(Namespace(moe_token_dispatcher_type=dispatcher, **asked))
    assert ("--overlap-moe" in str(error.value)) == (dispatcher == "alltoall")


def test_cpu_example_trains(plain_env):
    assert example("pretrain_cpu.sh", "--train-iters", 5, env=plain_env).count(" lm loss: ") == 5


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="needs MEGATRON_LM, a checkout")
@pytest.mark.parametrize(
    ("ranks", "model"),
    [(1, TINY), (2, [*TINY, "--expert-model-parallel-size", "2"]), (2, GPT_OSS)],
    ids=["EP 1", "EP 2", "EP 2, gpt-oss"],
)
def test_unmodified_checkout_trains_as_alltoall_does(plain_env, ranks, model):
    checkout = os.environ["MEGATRON_LM"]
    losses = {}
    for dispatcher in ("moeblaze", "alltoall"):
        code, output = launch(
            f"{checkout}/pretrain_gpt.py",
            *model,
            *("--moe-token-dispatcher-type", dispatcher, "--train-iters", 10),
            env=plain_env,
            processes=ranks,
        )
        assert code == 0, output[-6000:]
        for package in ("core", "training"):
            assert f"in {checkout}/megatron/{package}" in output
        found = re.findall(r"iteration .* lm loss: (\S+)", output)
        losses[dispatcher] = list(map(float, found))
    ours, theirs = losses["moeblaze"], losses["alltoall"]
    assert len(ours) == 10 and ours[-1] < ours[0] - 0.5
    assert max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)) < 1e-4
