"""Expert parallelism and expert TP on the CPU, over gloo, beside Megatron's alltoall dispatcher.

The checks themselves are in ep_worker.py; jobs of each number of processes run those that were
selected, and each is a test here.
"""

import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from ep_worker import CHECKS
from pretraining import largest_difference, needs_megatron_on_cpu, run, train

from moeblaze_megatron.expert_parallel.dispatch import _from_wire
from moeblaze_megatron.ops.reference import pack_routing
from moeblaze_megatron.processes import torchrun_command

pytestmark = needs_megatron_on_cpu

TESTS = Path(__file__).parent
# Checks of one job. Models leave process groups behind (Megatron's DDP holds itself through its
# hooks), and gloo polls from threads of each: after hundred checkpoints there are thousands.
JOB = 25


def torchrun(processes, script, *arguments, env, timeout, cpu=True):
    """Run a script under torchrun; returns (exit code, output). `cpu` hides the GPU from it."""
    path = [str(TESTS.parent), str(TESTS), *(entry for entry in sys.path if entry)]
    env = env | {"PYTHONPATH": ":".join(path)} | ({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})
    env |= {"TORCHDYNAMO_DISABLE": "1"}
    return run(*torchrun_command(processes), script, *arguments, env=env, timeout=timeout)


def run_checks(names, processes, results, env, cpu):
    """{name: None, or why the check failed}.

    A check that ends its job is given the job's output; the next job goes on after it.
    """
    outcomes = {}
    while names:
        results.write_text("")
        code, output = torchrun(
            processes,
            TESTS / "ep_worker.py",
            *([] if cpu else ["--cuda"]),
            results,
            *names,
            env=env,
            timeout=60 + 30 * len(names),
            cpu=cpu,
        )
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        outcomes |= {line["passed"]: None for line in lines if "passed" in line}
        outcomes |= {line["failed"]: line["why"] for line in lines if "failed" in line}
        names = [name for name in names if name not in outcomes]
        if names:
            outcomes[names[0]] = f"exit code {code}\n{output[-6000:]}"
            names = names[1:]
    return outcomes


def in_jobs(test, session, tmp_path_factory, env, cpu=True):
    """{name: failure} as a function, which runs what `session` selected of `test` with as many
    processes from that check on, JOB of them, at the first."""
    selected = [
        item.callspec.params["name"]
        for item in session.items
        if getattr(item, "function", None) is test
    ]
    found = {}

    def outcome(name):
        world = CHECKS[name].world
        if name not in found:
            names = [other for other in selected if CHECKS[other].world == world]
            names = names[names.index(name) :][:JOB]
            results = tmp_path_factory.mktemp("checks") / "results.jsonl"
            found.update(run_checks(names, world, results, env, cpu))
        return found[name]

    return outcome


@pytest.fixture(scope="session")
def outcomes(request, plain_env, tmp_path_factory):
    return in_jobs(test_on_all_ranks, request.session, tmp_path_factory, plain_env)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if check.slow else [])
        for name, check in sorted(CHECKS.items(), key=lambda item: item[1].world)
    ],
)
def test_on_all_ranks(name, outcomes):
    failure = outcomes(name)
    assert failure is None, f"{name}, here because: {CHECKS[name].why}\n{failure}"


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_probs_and_ids_of_any_number_of_rows_pass_the_wire(rows, dtype, k):
    """A row of them need not be a multiple of a prob in bytes."""
    routing_map, probs = torch.ones(rows, k, dtype=torch.bool), torch.rand(rows, k, dtype=dtype)
    sent = probs, torch.arange(k, dtype=torch.int32).expand(rows, k)
    arrived = _from_wire(pack_routing(routing_map, probs, None, k), dtype)
    for got, expected in zip(arrived, sent, strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)


PRETRAINING = {
    "EP 2, PP 2": (
        4,
        "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "the next micro-batches' forward passes come before this one's backward",
        False,
    ),
    "EP 2, ETP 2": (
        4,
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
        "uneven rows over expert TP, step after step",
        True,
    ),
    "EP 2, recompute, overlap": (
        4,
        "--expert-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        "parameters gathered late, gradients reduced early, collectives inside backward",
        True,
    ),
    "EP 2, virtual PP": (
        4,
        "--num-layers 4 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
        "chunks of two models interleave",
        True,
    ),
    "EP 2, shared experts, capacity": (
        2,
        "--expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 64 "
        "--moe-shared-expert-overlap --moe-expert-capacity-factor 1.25 "
        "--moe-pad-expert-input-to-capacity",
        "shared experts beside the exchange; what alltoall pads is not sent here",
        True,
    ),
    "EP 2, ETP 2, PP 2": (
        8,
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2 "
        "--pipeline-model-parallel-size 2",
        "every group that experts have, beside stages",
        True,
    ),
    "EP 4, PP 2": (
        8,
        "--expert-model-parallel-size 4 --pipeline-model-parallel-size 2",
        "one expert a rank",
        True,
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if row[-1] else [])
        for case, row in PRETRAINING.items()
    ],
)
def test_trains_as_alltoall_does(case, plain_env, tmp_path):
    processes, flags, why, _ = PRETRAINING[case]
    runs = {}
    for dispatcher in ("moeblaze", "alltoall"):
        output, runs[dispatcher] = train(
            tmp_path,
            dispatcher,
            *flags.split(),
            "--moeblaze-report-rows",
            iters=20,
            env=plain_env,
            processes=processes,
        )
        assert ("built with MoEBlazeTokenDispatcher" in output) == (dispatcher == "moeblaze")
        sent = re.findall(r"moeblaze, rank 0: (\d+) tokens sent as (\d+) rows", output)
        assert len(sent) == 1 and (int(sent[0][1]) > 0) == (dispatcher == "moeblaze")
    ours, theirs = runs["moeblaze"], runs["alltoall"]
    assert len(ours) == 20 and ours[-1]["loss"] < ours[0]["loss"] - 1, why
    assert largest_difference(ours, theirs, "loss") < 1e-4, why
    assert largest_difference(ours, theirs, "grad_norm") < 1e-3, why


DYING = """
import os, signal, sys
from datetime import timedelta

import torch

from moeblaze_megatron.expert_parallel import ExpertGroups, combine, dispatch, start_dispatch

torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = torch.distributed.get_rank()
alone = [torch.distributed.new_group([r]) for r in range(2)][rank]
groups = ExpertGroups(torch.distributed.group.WORLD, alone)
x = torch.randn(9, 8, requires_grad=True)
routing_map = torch.ones(9, 4, dtype=torch.bool)
pending = start_dispatch(x, routing_map.float(), routing_map, 4, groups)
rows, _, _, route = dispatch(x, routing_map.float(), pending)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
torch.autograd.backward(combine(rows, route), x.detach())
"""


def test_rank_that_dies_ends_the_job(tmp_path, plain_env):
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    start = time.monotonic()
    code, output = torchrun(2, script, env=plain_env, timeout=60)
    assert code != 0 and time.monotonic() - start < 40
    assert "Signal 9 (SIGKILL)" in output, output[-3000:]


KERNELS = """
import torch

from moeblaze_megatron import moeblaze_experts
from moeblaze_megatron.expert_parallel import ExpertGroups, combine, dispatch, start_dispatch
from moeblaze_megatron.ops.experts import kernels, kernels_for
from moeblaze_megatron.ops.reference import moe_reference

T, K, E, H, F = 13, 3, 3, 16, 16  # E on each of 2 ranks
torch.distributed.init_process_group("gloo")
torch.use_deterministic_algorithms(True, warn_only=True)  # memory starts as NaN
rank = torch.distributed.get_rank()
alone = [torch.distributed.new_group([r]) for r in range(2)][rank]
groups = ExpertGroups(torch.distributed.group.WORLD, alone)
torch.manual_seed(rank)
weights = [torch.randn(2 * E, *shape) for shape in ((2 * F, H), (H, F))]
for weight in weights:
    torch.distributed.broadcast(weight, 0)
local = [w[rank * E : (rank + 1) * E].clone().requires_grad_() for w in weights]
weights = [weight.requires_grad_() for weight in weights]

x, grad_output = torch.randn(2, T, H).unbind()
chosen = torch.rand(T, 2 * E).argsort(1)[:, :K]
chosen[:4] = chosen[:4].where(chosen[:4] < E, -1)  # some tokens for rank 0 alone
routing_map = torch.zeros(T, 2 * E + 1, dtype=torch.bool).scatter_(1, chosen % (2 * E + 1), True)
routing_map = routing_map[:, : 2 * E].contiguous()
probs = torch.rand(T, 2 * E) * routing_map

def leaves():
    return x.clone().requires_grad_(), probs.clone().requires_grad_()

assert kernels_for(x) is kernels
x_in, probs_in = leaves()
pending = start_dispatch(x_in, probs_in, routing_map, K, groups)
rows, topk_probs, lists, route = dispatch(x_in, probs_in, pending)
assert lists.max_rows == int(lists.expert_token_offsets[-1]), "buffers are of the very size"
output = moeblaze_experts(rows, *local, topk_probs=topk_probs, index_lists=lists)
output = combine(output, route)
torch.autograd.backward(output, grad_output)

x_ref, probs_ref = leaves()
expected = moe_reference(x_ref, *weights, chosen, probs_ref.gather(1, chosen.clamp(min=0)))
torch.autograd.backward(expected, grad_output)
pairs = [(output, expected), (x_in.grad, x_ref.grad), (probs_in.grad, probs_ref.grad)]
for weight, whole in zip(local, weights):
    torch.distributed.all_reduce(whole.grad)
    pairs.append((weight.grad, whole.grad[rank * E : (rank + 1) * E]))
for value, wanted in pairs:
    assert value.shape == wanted.shape and (value - wanted).norm() < 1e-5 * wanted.norm()
"""


def test_kernels_dispatch_as_their_twins_do(tmp_path, plain_env):
    """Triton's kernels, interpreted, where all the rest of this file runs the eager twins."""
    script = tmp_path / "kernels.py"
    script.write_text(KERNELS)
    code, output = torchrun(2, script, env=plain_env | {"TRITON_INTERPRET": "1"}, timeout=120)
    assert code == 0, output[-6000:]
