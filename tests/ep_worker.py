"""One rank of the tests of expert parallelism: runs checks in turn, among 2, 4 or 8 processes.

    torchrun --nproc-per-node 4 tests/ep_worker.py [--cuda] RESULTS CHECK ...

Rank 0 prints a line before and after each check, and appends it to the file RESULTS. After a failed
assertion the job goes on if all ranks get to the end of the check; else it ends, for then they wait
in a collective for each other.

On the CPU the ranks talk over gloo; with --cuda over NCCL, each on a GPU of its own. Where there
are fewer GPUs they share them, over gloo, which does not do the collectives of TP and expert TP.
Without names it runs all for this number of ranks that it can, but for those in CPU_ONLY.

S sequence length, B batch, T = S*B tokens of one rank, E experts of one rank, EP expert-parallel
ranks, ETP ranks of expert TP, D ranks that a token goes to.
"""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import importlib
import io
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mcore_worker as m
import torch
import torch.distributed as dist

S, B = 7, 3
BOUND = 1e-5  # relative, of fp32 results and gradients


@dataclasses.dataclass(frozen=True)
class Layout:
    """Parallel sizes; what remains of the processes is data parallelism."""

    world: int
    ep: int
    etp: int = 1
    tp: int = 1
    cp: int = 1

    def __str__(self) -> str:
        parts = {"tp": self.tp, "ep": self.ep, "etp": self.etp}
        if self.cp > 1:
            parts["cp"] = self.cp
        return "-".join(f"{name}{size}" for name, size in parts.items()) + f"-of{self.world}"

    def initialize(self) -> None:
        """Makes Megatron's process groups, or takes those of one of the last layouts.

        Not of all: gloo polls from two threads for each group.
        """
        from megatron.core import parallel_state

        state = vars(parallel_state)
        if self not in GROUPS:
            if len(GROUPS) == 3 and dist.get_backend() == "gloo":
                gc.collect()  # layers of an earlier check hold groups
                groups = GROUPS.pop(next(iter(GROUPS)))[ALL]
                # Megatron has destroyed some, and None stands for the default group.
                for group in dist.distributed_c10d._world.pg_map.keys() & set(groups):
                    dist.destroy_process_group(group)
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=self.tp,
                expert_model_parallel_size=self.ep,
                expert_tensor_parallel_size=self.etp,
                context_parallel_size=self.cp,
                distributed_timeout_minutes=1,
            )
            GROUPS[self] = {name: state[name] for name in state if name.isupper() or name == ALL}
        state.update(GROUPS[self])

    def fields(self) -> dict[str, Any]:
        return {
            "tensor_model_parallel_size": self.tp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "context_parallel_size": self.cp,
            "sequence_parallel": self.tp > 1,
            # From the RNG tracker, whose seeds differ by rank: otherwise Megatron gives the
            # experts of all ranks equal weights.
            "use_cpu_initialization": False,
        }


AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}
ALL = "_global_process_group_list"  # of parallel_state
GROUPS: dict[Layout, dict[str, Any]] = {}


@dataclasses.dataclass(frozen=True)
class Check:
    """One test: what it does and why it is there."""

    name: str
    world: int
    why: str
    run: Callable[[], None]
    slow: bool = False


CHECKS: dict[str, Check] = {}


def check(layout: Layout, why: str, *, slow: bool = False, name: str = "", **arguments: Any):
    """Registers a function as a check in `layout`, which is its first argument."""

    def register(function: Callable) -> Callable:
        full = f"{function.__name__}[{name + '-' if name else ''}{layout}]"
        run = functools.partial(function, layout, **arguments)
        CHECKS[full] = Check(full, layout.world, why, run, slow)
        return function

    return register


def off(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Distance relative to `expected`, in norms; of a zero tensor, absolute."""
    scale = expected.double().norm().item() or 1.0
    return (value.double() - expected.double()).norm().item() / scale


def assert_equal(results: dict, expected: dict, bound: float = BOUND) -> None:
    assert results.keys() == expected.keys()
    wrong = {
        name: off(results[name], value)
        for name, value in expected.items()
        if results[name].shape != value.shape or not off(results[name], value) <= bound
    }
    assert not wrong, f"relative errors past {bound}: {wrong}"


def batch(seed: int = 0, tokens: int = S, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """hidden_states and grad_output [tokens, B, H], of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return list(torch.randn(2, tokens, B, m.H, generator=generator).to(dtype).cuda().unbind())


class Layer:
    """An MoE layer under Megatron's DDP and optimizer, which reduce and measure its gradients."""

    def __init__(self, dispatcher: str, layout: Layout, **fields: Any):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.moe = m.layer(dispatcher, **{**layout.fields(), **fields}).cuda()
        config = self.moe.config
        self.ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), self.moe)
        settings = OptimizerConfig(optimizer="adam", lr=1e-2, params_dtype=config.params_dtype)
        self.optimizer = get_megatron_optimizer(settings, [self.ddp])

    def zero(self) -> None:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def grads(self) -> dict[str, torch.Tensor]:
        """Reduced as Megatron's training loop does, one by one, and the norm of all of them."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.ddp])
        results = {"router": self.moe.router.weight.main_grad.clone()}
        for name, grad in m.expert_tensors(self.moe.experts, "main_grad").items():
            results.update({f"{name}[{e}]": g.clone() for e, g in enumerate(grad)})
        if self.moe.shared_experts is not None:
            for name, weight in self.moe.shared_experts.named_parameters():
                results[f"shared.{name}"] = weight.main_grad.clone()
        self.optimizer.prepare_grads()
        results["norm"] = torch.tensor(float(self.optimizer.get_grad_norm()))
        return results

    def run(self, hidden_states: torch.Tensor, grad_output: torch.Tensor) -> dict:
        self.zero()
        leaf = hidden_states.clone().requires_grad_()
        output, _ = self.ddp(leaf)
        torch.autograd.backward(output, grad_output)
        return {"output": output.detach(), "hidden_states": leaf.grad, **self.grads()}

    def step(self, hidden_states: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Trains towards `target` as Megatron's training loop does: the loss and the norm."""
        from megatron.core.distributed import finalize_model_grads

        self.zero()
        output, _ = self.ddp(hidden_states)
        loss = (output - target).square().mean()
        torch.autograd.backward(loss)
        finalize_model_grads([self.ddp])
        successful, norm, _ = self.optimizer.step()
        assert successful
        return torch.tensor([loss.item(), norm])


RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def pair_of_layers(
    layout: Layout, change: Callable | None = None, sums_biases: bool = False, **fields: Any
) -> list[Layer]:
    """alltoall's and ours, whose weights start equal, and whose biases are not zero.

    Megatron sums the gradients of fc2's biases over TP, which `sums_biases` leaves as it is.
    """
    layers = [Layer(dispatcher, layout, **fields) for dispatcher in ("alltoall", "moeblaze")]
    stock, ours = (layer.moe for layer in layers)
    for name, weight in m.expert_tensors(ours.experts).items():
        assert torch.equal(weight, m.expert_tensors(stock.experts)[name]), name
    for moe in (stock, ours):
        with torch.no_grad():
            if change is not None:
                change(moe)
        if moe.config.add_bias_linear:
            m.draw_biases(moe)
    if stock.config.add_bias_linear and not sums_biases:
        for expert in stock.experts.local_experts:
            expert.linear_fc2.bias.sequence_parallel = False
    return layers


PAD = {"moe_expert_capacity_factor": 0.75, "moe_pad_expert_input_to_capacity": True}
OVERLAP = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True}
TOP1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
VARIANTS = {
    "aux-loss": (AUX, "the loss rides on probs, whose gradient comes from other ranks"),
    "top-6": ({"moe_router_topk": 6}, "more experts per token than a rank has"),
    "top-1": (TOP1, "one row per token, as by expert"),
    "shared": ({"moe_shared_expert_intermediate_size": 32}, "experts that dispatch passes by"),
    "drop-probs": (
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "probs"},
        "tokens with fewer experts than K, or none",
    ),
    "drop-position": (
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
        "the last tokens go nowhere",
    ),
    "pad-probs": ({**PAD, "moe_token_drop_policy": "probs"}, "padded rows, which are not sent"),
    "pad-position": ({**PAD, "moe_token_drop_policy": "position"}, "the same of the first tokens"),
    "pad-all": (
        {**PAD, "moe_expert_capacity_factor": 4.0},
        "a capacity of all tokens, where each pads each expert (of more, alltoall fails)",
    ),
    "shared-overlap": (
        {**OVERLAP, "moe_shared_expert_gate": True},
        "the parts of shared experts run between those of the exchange",
    ),
    "shared-overlap-recompute": (
        {**OVERLAP, **RECOMPUTE, **AUX},
        "the same, again inside backward",
    ),
    "groups": (
        {
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_score_function": "sigmoid",
            "moe_router_topk": 2,
            "moe_router_topk_scaling_factor": 1.5,
        },
        "group-limited routing: one rank for each token",
    ),
    "bias": (
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        "aux-loss-free balancing",
    ),
    "fp64-router": ({"moe_router_dtype": "fp64"}, "probs of 8 bytes beside rows of 4"),
    "no-gate": ({"gated_linear_unit": False}, "fc1 is one half"),
    "recompute": ({**RECOMPUTE, **AUX}, "collectives run again inside backward"),
}
BIASES = {
    "bias-of-linears": ({"add_bias_linear": True}, "received rows have prob-weighted biases"),
    "gpt-oss": (m.GPT_OSS, "the same after quick-GeGLU with a clamp and an offset"),
    "gpt-oss-recompute": ({**m.GPT_OSS, **RECOMPUTE, **AUX}, "biases in a forward inside backward"),
    "gpt-oss-drop": (
        {**m.GPT_OSS, "moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "probs"},
        "a dropped row adds no bias",
    ),
    "gpt-oss-pad": ({**m.GPT_OSS, **PAD}, "nor does a padded one"),
    "probs-on-input": (
        {
            "add_bias_linear": True,
            "moe_apply_probs_on_input": True,
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
        },
        "the probability of a received row comes by slot, and its bias is not weighted",
    ),
    "gpt-oss-probs-on-input": (
        {
            **m.GPT_OSS,
            "moe_apply_probs_on_input": True,
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
        },
        "the clamp sees what the probability has scaled",
    ),
}


@check(Layout(2, ep=2), "the plain case")
@check(Layout(2, ep=1, etp=2), "expert TP alone: gathered and summed, no split sizes exchanged")
@check(Layout(2, ep=2, tp=2), "sequence-parallel tokens, whole experts", slow=True)
@check(Layout(2, ep=1, etp=2, tp=2), "TP alone, Megatron's default", slow=True)
@check(Layout(4, ep=4), "ranks without any of a token's experts")
@check(Layout(4, ep=2, etp=2), "uneven rows gathered over expert TP")
@check(Layout(4, ep=2, tp=2), "sequence-parallel tokens, whole experts: ETP differs from TP")
@check(Layout(4, ep=2, etp=2, tp=2), "expert TP as large as TP, Megatron's default")
@check(Layout(4, ep=2), "two copies of each expert, reduced over expert data parallelism")
@check(Layout(4, ep=2, cp=2), "the aux loss is of both halves of a sequence", **AUX)
@check(Layout(8, ep=4, cp=2), "expert parallelism across CP and data parallelism", slow=True, **AUX)
@check(Layout(8, ep=2, etp=2, tp=2, cp=2), "tokens split by TP and CP", slow=True, **AUX)
@check(Layout(8, ep=4, etp=2, tp=1, cp=4), "ETP larger than TP, experts across CP", slow=True)
@check(Layout(8, ep=8), "one expert a rank", slow=True)
@check(Layout(8, ep=4, etp=2), "more of both", slow=True)
@check(Layout(8, ep=2, etp=4), "ffn of 12 a rank", slow=True)
@check(Layout(8, ep=4, tp=2), "expert parallelism across TP and data parallelism", slow=True)
@check(Layout(8, ep=2, etp=2, tp=2), "all three and data parallelism", slow=True)
@check(Layout(8, ep=2, etp=2, tp=4), "ETP smaller than TP, neither 1", slow=True)
@check(Layout(8, ep=2, etp=4, tp=2), "ETP larger than TP", slow=True)
@check(Layout(8, ep=1, etp=2, tp=2), "expert TP and data parallelism", slow=True)
@check(Layout(8, ep=8, tp=4), "one expert a rank, tokens split by TP", slow=True)
def layer_agrees(layout: Layout, **fields: Any) -> None:
    """Output, gradients and their norm as alltoall's, and a norm of ones counts parameters."""
    stock, ours = pair_of_layers(layout, **fields)
    for name in ("linear_fc1", "linear_fc2"):
        weight = getattr(ours.moe.experts, name).weight
        expected = getattr(stock.moe.experts.local_experts[0], name).weight
        for attribute in ("allreduce", "tensor_model_parallel", "partition_stride"):
            assert getattr(weight, attribute) == getattr(expected, attribute), attribute
    for seed in (1, 2):
        assert_equal(ours.run(*batch(seed)), stock.run(*batch(seed)))
    assert_norm_counts_parameters(ours, layout)
    counter = ours.moe.token_dispatcher.counter
    assert counter.rows <= counter.pairs and counter.tokens >= 2 * S * B


for _name, (_fields, _why) in VARIANTS.items():
    check(Layout(2, ep=2), _why, name=_name, **_fields)(layer_agrees)
    check(Layout(4, ep=2, etp=2), _why, name=_name, slow=True, **_fields)(layer_agrees)
for _name, (_fields, _why) in BIASES.items():  # with expert TP Megatron has none
    check(Layout(2, ep=2), _why, name=_name, **_fields)(layer_agrees)
    check(Layout(4, ep=2, tp=2), _why, name=_name, slow=_name != "gpt-oss", **_fields)(layer_agrees)
    check(Layout(4, ep=2), _why, name=_name, slow=True, **_fields)(layer_agrees)


@check(Layout(4, ep=2, tp=2), "ranks of TP have other experts, whose gradients get mixed")
@check(Layout(2, ep=1, tp=2), "ranks of TP have the same experts, whose gradients get doubled")
def megatron_sums_biases_over_tp(layout: Layout) -> None:
    """What docs/megatron.md says of Megatron's own experts; ours are reduced once."""
    from megatron.core import parallel_state

    stock, ours = pair_of_layers(layout, sums_biases=True, **m.GPT_OSS)
    theirs, found = (layer.run(*batch()) for layer in (stock, ours))
    assert off(found.pop("norm"), theirs.pop("norm")) > 0.01
    for name in theirs:
        if name.startswith("linear_fc2 bias"):
            assert off(found[name], theirs[name]) > 0.1
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(found[name], group=group)
        assert off(found[name], theirs[name]) <= BOUND, name
    assert_norm_counts_parameters(ours, layout)


@check(Layout(2, ep=2), "the plain case", slow=True)
@check(Layout(2, ep=1, etp=2, tp=2), "TP with sequence parallelism", slow=True)
@check(Layout(4, ep=2, tp=2), "TP with sequence parallelism, which no whole model runs here")
@check(Layout(4, ep=2, tp=2), "biases under Adam", name="gpt-oss", slow=True, **m.GPT_OSS)
@check(Layout(4, ep=2, cp=2), "CP, likewise", **AUX)
@check(Layout(4, ep=2, etp=2), "expert TP")
@check(Layout(8, ep=2, etp=2, tp=2, cp=2), "tokens split by TP and CP", slow=True, **AUX)
@check(Layout(8, ep=4, etp=2, tp=2), "no copies of experts: two of data", slow=True)
@check(Layout(8, ep=4, tp=4), "ETP smaller than TP", slow=True, **AUX)
@check(Layout(8, ep=8, cp=2), "one expert a rank", slow=True)
def layer_trains_as_alltoall(layout: Layout, **fields: Any) -> None:
    """20 steps of Adam: losses and gradient norms to 1e-5 and 1e-4, and the loss falls."""
    stock, ours = pair_of_layers(layout, **fields)
    batches = [batch(seed) for seed in range(4)]
    theirs, found = (
        torch.stack([layer.step(*batches[step % 4]) for step in range(20)])
        for layer in (stock, ours)
    )
    assert (found - theirs).abs().le(torch.tensor([1e-5, 1e-4]) * theirs.abs()).all(), found
    assert found[16:, 0].sum() < found[:4, 0].sum()


def assert_norm_counts_parameters(layer: Layer, layout: Layout) -> None:
    """Gradients of one everywhere: their norm is the root of the number of parameters (fault 8)."""
    layer.zero()
    for weight in layer.moe.parameters():
        weight.main_grad.fill_(1.0)
    layer.optimizer.prepare_grads()
    halves = 2 if layer.moe.config.gated_linear_unit else 1
    number = (halves + 1) * m.E * m.F * m.H + m.E * m.H
    if layer.moe.config.add_bias_linear:  # of fc1, fc2 and the router
        number += m.E * (halves * m.F + m.H + 1)
    if layer.moe.shared_experts is not None:
        number += sum(weight.numel() for weight in layer.moe.shared_experts.parameters())
    norm = float(layer.optimizer.get_grad_norm())
    assert abs(norm - number**0.5) < 1e-4 * norm, (norm, number**0.5)


@check(Layout(2, ep=2), "router in fp32 beside bf16 tokens")
@check(Layout(2, ep=2), "biases of bf16", name="gpt-oss", **m.GPT_OSS)
@check(Layout(2, ep=1, etp=2), "expert TP sums in bf16", slow=True)
@check(Layout(2, ep=2, tp=2), "sequence-parallel tokens", slow=True)
@check(Layout(4, ep=4), "more ranks", slow=True)
@check(Layout(4, ep=2, etp=2, tp=2), "all three", slow=True)
@check(Layout(8, ep=8), "one expert a rank", slow=True)
@check(Layout(8, ep=4, etp=2, tp=2), "all three", slow=True)
def bf16_loses_no_more(layout: Layout, **fields: Any) -> None:
    """Against fp64, no further off than twice alltoall, and half an ulp."""
    bf16 = {"params_dtype": torch.bfloat16, "bf16": True, "moe_router_dtype": "fp32"}
    rows = batch(3, dtype=torch.bfloat16)
    layers = pair_of_layers(layout, **bf16, **fields)
    wide = Layer("alltoall", layout, params_dtype=torch.float64, **fields)
    source = layers[0].moe.state_dict()
    wide.moe.load_state_dict({k: v.double() if v is not None else v for k, v in source.items()})
    expected = wide.run(*(tensor.double() for tensor in rows))
    stock, ours = (layer.run(*rows) for layer in layers)
    for name, value in expected.items():
        half_ulp = torch.finfo(torch.bfloat16).eps / 2
        assert off(ours[name], value) <= 2 * off(stock[name], value) + half_ulp, name


def avoid_experts(experts: list[int]) -> Callable:
    def change(moe: torch.nn.Module) -> None:
        moe.router.weight[experts] = -100.0

    return change


@check(Layout(2, ep=2), "rank 1 receives no token (fault 1)", empty=range(4, 8))
@check(Layout(2, ep=2), "rank 0 receives no token", name="first", empty=range(4))
@check(Layout(2, ep=2), "biases without rows", name="gpt-oss", empty=range(4, 8), **m.GPT_OSS)
@check(Layout(2, ep=2), "6 bytes a row for prob and id", name="top1", empty=range(4, 8), **TOP1)
@check(Layout(4, ep=2, etp=2), "none of the ranks of an expert receives any", empty=range(4, 8))
@check(Layout(4, ep=4), "all tokens to one rank", empty=range(2, 8))
def rank_without_tokens(layout: Layout, empty: range, **fields: Any) -> None:
    """Equal results, and every gradient of an expert without tokens exists and is 0."""
    stock, ours = pair_of_layers(layout, avoid_experts(list(empty)), **fields)
    hidden_states, grad_output = batch(4)
    # As with the router fixture of one process, all positive: the empty experts' scores are low.
    results = ours.run(hidden_states.abs(), grad_output)
    assert_equal(results, stock.run(hidden_states.abs(), grad_output))
    per_rank = 8 // layout.ep
    first = ours.moe.local_expert_indices[0]
    for name in m.expert_tensors(ours.moe.experts):
        for e in range(per_rank):
            if first + e in empty:
                assert results[f"{name}[{e}]"].count_nonzero() == 0


@check(Layout(2, ep=2), "each rank has tokens of another number")
@check(Layout(4, ep=4), "the same on four ranks, one of them slow (fault 30)", slow_rank=3)
def uneven_ranks(layout: Layout, slow_rank: int | None = None) -> None:
    def wait() -> None:
        if dist.get_rank() == slow_rank:
            time.sleep(0.5)

    stock, ours = pair_of_layers(layout)
    hidden_states, grad_output = batch(5, tokens=2 + 3 * dist.get_rank())
    expected = stock.run(hidden_states, grad_output)
    ours.zero()
    leaf = hidden_states.clone().requires_grad_()
    wait()
    output, _ = ours.ddp(leaf)
    wait()
    torch.autograd.backward(output, grad_output)
    assert_equal({"output": output, "hidden_states": leaf.grad, **ours.grads()}, expected)


@check(Layout(2, ep=2), "the router, too, runs again inside backward", **AUX)
@check(Layout(4, ep=2, etp=2), "with expert TP", slow=True, **AUX)
def recompute_changes_nothing(layout: Layout, **fields: Any) -> None:
    plain, again = (Layer("moeblaze", layout, **fields, **extra) for extra in ({}, RECOMPUTE))
    assert again.moe.moe_layer_recompute
    assert_equal(again.run(*batch(6)), plain.run(*batch(6)), bound=0.0)
    counters = [layer.moe.token_dispatcher.counter for layer in (plain, again)]
    assert counters[1].rows == 2 * counters[0].rows


@check(Layout(2, ep=2), "fc1 alone runs again, on received rows with probs by slot")
def recompute_fc1_changes_nothing(layout: Layout) -> None:
    plain, again = (Layer("moeblaze", layout) for _ in range(2))
    again.moe.config.moeblaze_recompute_fc1 = True
    assert_equal(again.run(*batch(6)), plain.run(*batch(6)), bound=0.0)


def allocated() -> int:
    """Bytes that malloc has handed out, all arenas and maps together; not what it holds free."""

    class Mallinfo2(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in (
                *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
                *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
            )
        ]

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    gc.collect()
    info = mallinfo2()
    return info.uordblks + info.hblkhd


@check(Layout(2, ep=2), "what a step keeps, with tokens and imbalance of its own (fault 33)")
@check(Layout(4, ep=2, etp=2), "with expert TP", slow=True)
def memory_stays_flat(layout: Layout) -> None:
    """200 steps after 150, in which gloo settles, keep less than the tokens of four of them."""
    layer = Layer("moeblaze", layout)
    generator = torch.Generator().manual_seed(dist.get_rank())
    hidden = layer.moe.config.hidden_size
    for step in range(350):
        with torch.no_grad():
            layer.moe.router.weight.normal_(generator=generator)
        tokens = int(torch.randint(300, 700, (), generator=generator))
        hidden_states = torch.randn(tokens, B, hidden, generator=generator)
        layer.run(hidden_states, hidden_states)
        if step == 149:
            before = allocated()
    grown = allocated() - before
    assert grown < 4 * 500 * B * hidden * 4, grown


@check(Layout(2, ep=2), "as a pipeline stage runs")
@check(Layout(4, ep=2, etp=2), "with expert TP")
def two_batches_in_flight(layout: Layout) -> None:
    """Two forward passes, then their backward passes in the same order."""
    layer = Layer("moeblaze", layout)
    batches = [batch(seed) for seed in (7, 8)]
    alone = [layer.run(*rows) for rows in batches]
    layer.zero()
    leaves = [hidden_states.clone().requires_grad_() for hidden_states, _ in batches]
    outputs = [layer.ddp(leaf)[0] for leaf in leaves]
    for output, (_, grad_output) in zip(outputs, batches, strict=True):
        torch.autograd.backward(output, grad_output)
    for leaf, expected in zip(leaves, alone, strict=True):
        assert torch.equal(leaf.grad, expected["hidden_states"])
    grads = layer.grads()
    for name in grads.keys() - {"norm"}:
        assert off(grads[name], alone[0][name] + alone[1][name]) < BOUND, name


@check(Layout(2, ep=2), "Megatron's router cannot view zero tokens, so from dispatch on")
@check(Layout(4, ep=2, etp=2), "with expert TP")
def rank_that_sends_nothing(layout: Layout) -> None:
    """Rank 0 has no tokens, the others have; then no rank has; then rank 0's are all dropped."""
    moe = m.layer(**layout.fields()).cuda()
    first = dist.get_rank() == 0
    for tokens, dropped in ((0 if first else S, False), (0, False), (S, first)):
        hidden_states = torch.randn(tokens, B, m.H).cuda().requires_grad_()
        chosen = torch.rand(tokens * B, m.E).cuda().topk(2).indices
        routing_map = (
            torch.zeros(tokens * B, m.E, dtype=torch.bool).cuda().scatter_(1, chosen, not dropped)
        )
        probs = (torch.rand(tokens * B, m.E).cuda() * routing_map).requires_grad_()
        x, probs_in = moe.preprocess(hidden_states, probs, routing_map)
        output, _ = moe.routed_experts_compute(*moe.dispatch(x, probs_in))
        output = moe.postprocess(moe.combine(output), None)
        torch.autograd.backward(output, torch.ones_like(output))
        assert output.shape == hidden_states.grad.shape == hidden_states.shape
        assert probs.grad.shape == probs.shape and (probs.grad[~routing_map] == 0).all()
        for grad in m.expert_tensors(moe.experts, "grad").values():
            assert grad is not None and grad.isfinite().all()


def expert_groups() -> Any:
    from megatron.core import parallel_state

    from moeblaze_megatron.expert_parallel import ExpertGroups

    return ExpertGroups(
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
    )


@check(Layout(2, ep=2), "few ranks: most tokens go to both")
@check(Layout(4, ep=4), "half of the rows by expert")
@check(Layout(8, ep=8), "as docs/scaling.md tabulates", slow=True)
def rows_follow_the_model(layout: Layout) -> None:
    """Rows of random routing to 64 experts are counted as they are, and T*D within a percent."""
    from moeblaze_megatron.expert_parallel import RowCounter, combine, dispatch, start_dispatch
    from moeblaze_megatron.scaling import ranks_per_token

    T, K, experts, counter = 4096, 8, 64, RowCounter()
    chosen = torch.rand(T, experts, generator=torch.Generator().manual_seed(dist.get_rank())).topk(
        K
    )
    routing_map = torch.zeros(T, experts, dtype=torch.bool).scatter_(1, chosen.indices, True)
    routing_map = routing_map.cuda()
    x, probs = torch.ones(T, 4).cuda(), routing_map / K
    pending = start_dispatch(x, probs, routing_map, K, expert_groups(), counters=(counter,))
    rows, topk_probs, _, route = dispatch(x, probs, pending)
    output = combine(rows * topk_probs.sum(1, keepdim=True), route)
    torch.testing.assert_close(output, x)
    by_rank = routing_map.view(T, layout.ep, -1).any(2).sum(0)
    assert counter.rows == int(by_rank.sum())
    assert counter.rows_away == counter.rows - int(by_rank[dist.get_rank()])
    assert (counter.tokens, counter.pairs, counter.dispatches) == (T, T * K, 1)
    assert abs(counter.rows / T / ranks_per_token(layout.ep, K, experts) - 1) < 0.01
    assert f"by expert: {T * K} ({1 - counter.rows / T / K:.0%} saved)" in str(counter)


@check(Layout(2, ep=1, etp=2), "lists alone are made")
@check(Layout(2, ep=2), "rows are gathered and summed too")
def launches_are_on_the_gpu_of_the_tensors(layout: Layout) -> None:
    """Triton launches on the current GPU: `torch.cuda.device_of` surrounds each in forward."""
    from moeblaze_megatron.expert_parallel import combine, dispatch, start_dispatch
    from moeblaze_megatron.ops import reference

    module = importlib.import_module("moeblaze_megatron.expert_parallel.dispatch")
    exchange = importlib.import_module("moeblaze_megatron.expert_parallel.exchange")
    current, launched = [], {}

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor):
        current.append(tensor.device)
        yield
        current.pop()

    class Noted:
        def __getattr__(self, name: str) -> Callable:
            launched.setdefault(name, []).extend(current[-1:])
            return getattr(reference, name)

    x, routing_map = torch.randn(5, 16).cuda(), torch.ones(5, 4, dtype=torch.bool).cuda()
    with (
        patch.object(torch.cuda, "device_of", device_of),
        patch.object(module, "kernels_for", return_value=Noted()),
        patch.object(exchange, "kernels_for", return_value=Noted()),
    ):
        pending = start_dispatch(x, routing_map.float(), routing_map, 4, expert_groups())
        rows, _, _, route = dispatch(x, routing_map.float(), pending)
        combine(rows, route)
    names = ["ranks_from_routing_map", "split_sizes", "pack_routing", "gather", "combine"]
    names = names if layout.ep > 1 else ["pack_routing"]
    assert launched == {name: [x.device] for name in names}, launched


@check(Layout(2, ep=2), "ranks set up otherwise: told on both, and nobody waits")
def disagreement_is_told(layout: Layout) -> None:
    from moeblaze_megatron.expert_parallel import dispatch, start_dispatch
    from moeblaze_megatron.expert_parallel.exchange import SplitExchange

    groups = expert_groups()
    x, rank = torch.randn(5, 16), dist.get_rank()
    routing_map = torch.zeros(5, 8, dtype=torch.bool)
    routing_map[:, 1 + rank] = True
    probs = routing_map.to(torch.float32 if rank else torch.float64)
    message = told(lambda: dispatch(x, probs, start_dispatch(x, probs, routing_map, 1, groups)))
    here, there = 64 + 2 + (8, 4)[rank], 64 + 2 + (4, 8)[rank]
    expected = f"rank {1 - rank} sends rows of {there} bytes (hidden states, probs and expert ids)"
    assert expected in message and f"this rank, {rank}, of {here}" in message, message

    rows, pairs = torch.tensor([3, 2]), torch.tensor([[4], [1 if rank else 2]])
    exchange = SplitExchange(rows, pairs, 64, groups)
    if rank == 1:  # rank 1 sends itself 2 rows for 1 pair
        assert "rank 1 announces 2 rows for 1 (token, expert) pairs" in told(exchange.wait)
    else:
        exchange.wait()

    three = torch.ones(5, 7, dtype=torch.bool)
    message = told(lambda: start_dispatch(x, three.float(), three, 7, groups))
    assert "7 experts do not divide by 2 expert-parallel ranks" in message


@check(Layout(2, ep=2), "gloo takes a message that is too short without a word")
def rows_that_do_not_arrive_are_told(layout: Layout) -> None:
    """Rank 1 announces its rows, all plausible, and sends rank 0 one row less."""
    from moeblaze_megatron.expert_parallel import dispatch, start_dispatch
    from moeblaze_megatron.expert_parallel.exchange import SplitExchange

    x, routing_map = torch.randn(5, 16), torch.zeros(5, 8, dtype=torch.bool)
    routing_map[:, 1::4] = True
    pending = start_dispatch(x, routing_map.float(), routing_map, 2, expert_groups())
    wait = SplitExchange.wait
    if dist.get_rank() == 0:
        message = told(lambda: dispatch(x, routing_map.float(), pending))
        expected = "rank 1 announced 5 rows for 5 (token, expert) pairs, but 4 arrived"
        assert expected in message, message
        return
    SplitExchange.wait = lambda self: dataclasses.replace(wait(self), send=[4, 5])
    try:
        dispatch(x, routing_map.float(), pending)
    finally:
        SplitExchange.wait = wait


@check(Layout(2, ep=1, etp=2), "nobody is told sizes here, and collectives would differ in theirs")
def unequal_tokens_are_told(layout: Layout) -> None:
    from moeblaze_megatron.expert_parallel import dispatch, start_dispatch

    groups, tokens = expert_groups(), 5 + dist.get_rank()
    x, routing_map = torch.randn(tokens, 16).cuda(), torch.ones(tokens, 4, dtype=torch.bool).cuda()
    pending = start_dispatch(x, routing_map.float(), routing_map, 4, groups, check=True)
    message = told(lambda: dispatch(x, routing_map.float(), pending))
    assert "share each expert have [5, 6] tokens" in message, message


def told(function: Callable) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    raise AssertionError("no ValueError")


@check(Layout(2, ep=2), "a router that gives a token more experts than topk")
def more_experts_than_topk_are_refused(layout: Layout) -> None:

    moe = m.layer(**layout.fields())
    moe.token_dispatcher.topk = 1
    assert "2 experts, but topk=1" in told(lambda: moe(batch()[0]))


@check(Layout(2, ep=2), "gradients go to main_grad, tokens or not")
def gradient_accumulation_fusion(layout: Layout) -> None:

    change = avoid_experts([4, 5, 6, 7])
    plain, fused = (
        m.layer(**layout.fields(), gradient_accumulation_fusion=fusion) for fusion in (False, True)
    )
    rows = [tensor.abs() for tensor in batch(9)]
    before = {}
    for moe in (plain, fused):
        with torch.no_grad():
            change(moe)
    for name in ("linear_fc1", "linear_fc2"):
        weight = getattr(fused.experts, name).weight
        before[name] = torch.randn_like(weight)
        weight.main_grad, weight.grad_added_to_main_grad = before[name].clone(), False
    m.forward_backward(plain, *rows)
    m.forward_backward(fused, *rows)
    for name, grad in m.expert_tensors(plain.experts, "grad").items():
        weight = getattr(fused.experts, name).weight
        assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
        assert torch.equal(weight.main_grad, before[name] + grad)


def whole_experts(trainer: Any, layout: Layout) -> list[torch.Tensor]:
    """Every expert weight of the model in full, on every rank: [experts, 2F, H] and [.., H, F]."""
    from megatron.core import parallel_state

    def gathered(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return parts

    tp_group = parallel_state.get_expert_tensor_parallel_group()
    ep_group = parallel_state.get_expert_model_parallel_group()
    found = []
    for layer in trainer.gpt.decoder.layers:
        weights = m.expert_tensors(layer.mlp.experts)
        gate, up = weights["linear_fc1"].chunk(2, 1)
        pieces = [torch.cat(gathered(half, tp_group), 1) for half in (gate, up)]
        fc1, fc2 = torch.cat(pieces, 1), torch.cat(gathered(weights["linear_fc2"], tp_group), 2)
        found += [torch.cat(gathered(weight, ep_group)) for weight in (fc1, fc2)]
    return found


def shared_folder() -> Path:
    """A new folder that all ranks see."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]
IN_CI = [
    ("moeblaze", (2, 1), "alltoall", (1, 2)),
    ("alltoall", (2, 2), "moeblaze", (2, 1)),
    ("moeblaze", (2, 2), "moeblaze", (1, 1)),
    ("alltoall", (1, 1), "moeblaze", (2, 2)),
]


@check(Layout(4, ep=2), "experts numbered by rank")
@check(Layout(4, ep=1, etp=2), "halves of a gated fc1 sliced apart")
@check(Layout(4, ep=2, etp=2), "both")
@check(Layout(4, ep=4), "ranks without a copy", slow=True)
@check(Layout(4, ep=1), "four copies", slow=True)
@check(Layout(4, ep=2), "biases", name="bias", add_bias_linear=True)
def same_shards(layout: Layout, **fields: Any) -> None:
    """This rank saves and loads what Megatron's own experts would, TEGroupedMLP's included."""
    from test_mcore_checkpoint import assert_same_shards

    for theirs in ("SequentialMLP", "TEGroupedMLP"):
        for singleton in (False, True):
            assert_same_shards(theirs, singleton=singleton, **layout.fields(), **fields)


def checkpoint_interchanges(layout: Layout, saver: str, loader: str, loads: Layout) -> None:
    """Weights and moments arrive at another (EP, ETP), and training goes on with equal losses.

    Weights alone where one side has no experts of their own to reduce (EP = ETP = 1): Megatron
    keeps one optimizer there and two elsewhere, and refuses to load one's state into the other.
    """
    from test_mcore_checkpoint import Trainer

    def trainer(dispatcher: str, sizes: Layout, seed: int = 1234) -> Any:
        sizes.initialize()
        return Trainer(dispatcher, seed=seed, **sizes.fields())

    path = shared_folder() / "checkpoint"
    first = trainer(saver, layout)
    first.steps(0, 2)
    first.save(path)
    saved = whole_experts(first, layout)
    goes_on = torch.stack(first.steps(2, 4))
    trained = whole_experts(first, layout)
    dist.barrier()
    second = trainer(loader, loads, seed=99)
    alone = (layout.ep * layout.etp == 1) != (loads.ep * loads.etp == 1)
    second.load(path, weights_only=alone)
    for ours, theirs in zip(whole_experts(second, loads), saved, strict=True):
        assert torch.equal(ours, theirs)
    resumed = torch.stack(second.steps(2, 4))
    if alone:
        resumed, goes_on = resumed[:1], goes_on[:1]
    bound = torch.tensor([1e-4, 1e-3]) * goes_on.abs()
    assert ((resumed - goes_on).abs() <= bound).all(), (resumed, goes_on)
    if alone:
        return
    # Adam divides by the second moment: had it not arrived, steps would be of another size.
    for ours, theirs in zip(whole_experts(second, loads), trained, strict=True):
        assert off(ours, theirs) < 1e-3


for _saver, _loader in [("moeblaze", "alltoall"), ("alltoall", "moeblaze"), ("moeblaze",) * 2]:
    for _from in SIZES:
        for _to in SIZES:
            check(
                Layout(4, *_from),
                "keys and slices of the other experts, at another size",
                slow=(_saver, _from, _loader, _to) not in IN_CI,
                name=f"{_saver}-{_loader}-ep{_to[0]}-etp{_to[1]}-from",
                saver=_saver,
                loader=_loader,
                loads=Layout(4, *_to),
            )(checkpoint_interchanges)


@check(Layout(2, ep=2), "one optimizer where experts are whole, two elsewhere")
def optimizer_state_is_refused_where_megatron_refuses(layout: Layout) -> None:
    """From experts whole on a rank to spread ones, and back: alltoall itself to alltoall, too."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from test_mcore_checkpoint import Trainer

    whole = Layout(layout.world, ep=1)
    for here, there in ((whole, layout), (layout, whole)):
        here.initialize()
        first = Trainer("alltoall", **here.fields())
        first.steps(0, 1)
        path = shared_folder() / "checkpoint"
        first.save(path)
        there.initialize()
        errors = []
        for loader in ("alltoall", "moeblaze"):
            try:
                Trainer(loader, **there.fields()).load(path)
            except (RuntimeError, ValueError, CheckpointingException) as error:
                errors.append(f"{type(error)}: {error}")
        assert len(errors) == 2 and errors[0] == errors[1], errors


@check(Layout(4, ep=2), "each rank's file has its own experts, numbered from 0")
@check(Layout(4, ep=1, etp=2), "each rank's file has its slices")
@check(Layout(4, ep=2, etp=2), "both", slow=True)
def plain_checkpoint_interchanges(layout: Layout) -> None:
    """A rank's plain state_dict loads on the other side, strictly, and the loss goes on.

    At another size it is refused, strictly or not.
    """
    from test_mcore_checkpoint import Trainer

    for saver, loader in (("moeblaze", "alltoall"), ("alltoall", "moeblaze")):
        first = Trainer(saver, **layout.fields())
        first.steps(0, 2)
        file = io.BytesIO()
        torch.save(first.model.state_dict_for_save_checkpoint(), file)
        file.seek(0)
        second = Trainer(loader, seed=99, **layout.fields())
        second.model.load_state_dict(torch.load(file), strict=True)
        for ours, theirs in zip(second.expert_tensors(), first.expert_tensors(), strict=True):
            assert torch.equal(ours, theirs)
        (resumed,), (goes_on,) = second.steps(2, 3), first.steps(2, 3)
        assert ((resumed - goes_on).abs() <= torch.tensor([1e-4, 1e-3]) * goes_on.abs()).all()
    state = m.layer("alltoall", **layout.fields()).state_dict()
    other = Layout(layout.world, ep=4)
    other.initialize()
    try:
        m.layer(**other.fields()).load_state_dict(state, strict=False)
    except RuntimeError as error:
        assert "not the parameters of 2 experts, but" in str(error), error
    else:
        raise AssertionError("no RuntimeError")


# Why a check runs only where it is named, on the CPU.
CPU_ONLY = {
    "memory_stays_flat": "asks the allocator of the host",
    "disagreement_is_told": "is about numbers on the host",
    "rows_that_do_not_arrive_are_told": "a message that is too short would be waited for",
    "more_experts_than_topk_are_refused": "looked at on the CPU only, or on demand",
    "gradient_accumulation_fusion": "bit-equal where gradients are added after their GEMM",
    "same_shards": "exchanges nothing",
    "checkpoint_interchanges": "a model of Megatron's training, on the CPU",
    "optimizer_state_is_refused_where_megatron_refuses": "the same",
    "plain_checkpoint_interchanges": "the same",
}


def on_cuda(world: int, shared: bool = False) -> list[str]:
    """The checks for NCCL or, `shared`, those that gloo can do: of the plain layer first."""
    variants = {why for _, why in VARIANTS.values()}
    found = [
        check
        for check in CHECKS.values()
        if check.world == world and check.name.split("[")[0] not in CPU_ONLY
    ]
    if shared:
        layouts = {check.name: check.run.args[0] for check in found}
        found = [check for check in found if layouts[check.name].tp * layouts[check.name].etp == 1]
    return [check.name for check in sorted(found, key=lambda check: check.why in variants)]


def start(cuda: bool) -> dist.ProcessGroup:
    """Process groups: the default one, and one of gloo's to tell outcomes."""
    backend, patience = "gloo", 60
    if cuda:
        gpus = torch.cuda.device_count()
        if not gpus:
            sys.exit("--cuda: torch sees no GPU")
        if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]):
            backend, patience = "nccl", 20
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
        torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))


def forget_moe_metrics() -> None:
    """Megatron makes their table for one number of layers."""
    from megatron.core.transformer.moe import moe_utils

    try:
        from megatron.core.transformer.moe import moe_logging
    except ImportError:  # up to 0.17
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        moe_logging.destroy_moe_metrics_tracker()


def failure(check: Check, group: dist.ProcessGroup) -> str:
    """Runs it; the assertions that failed on any rank, or nothing."""
    wrong = ""
    try:
        check.run()
    except AssertionError:
        wrong = f"rank {dist.get_rank()}: {traceback.format_exc()}"
        print(wrong, file=sys.stderr, flush=True)
    torch.cuda.synchronize()
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, wrong, group=group)
    return "\n".join(filter(None, found))


def main() -> None:
    from moeblaze_megatron.mcore import install
    from moeblaze_megatron.mcore.cpu_mode import install_cpu_mode

    cuda = sys.argv[1] == "--cuda"
    results, *names = sys.argv[1 + cuda :]
    group = start(cuda)
    if not cuda:
        install_cpu_mode()
    install()
    logging.disable(logging.INFO)  # Megatron prints every config and bucket

    def record(**line: Any) -> None:
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)
            with open(results, "a") as file:
                print(json.dumps(line), file=file)

    shared = dist.get_backend() == "gloo"
    for name in names or on_cuda(dist.get_world_size(), shared):
        begin = time.perf_counter()
        record(started=name)
        layout = CHECKS[name].run.args[0]
        layout.initialize()
        forget_moe_metrics()
        wrong = failure(CHECKS[name], group)
        seconds = round(time.perf_counter() - begin, 2)
        if wrong:
            record(failed=name, seconds=seconds, why=wrong)
        else:
            record(passed=name, seconds=seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.modules["ep_worker"] = sys.modules["__main__"]
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    main()
