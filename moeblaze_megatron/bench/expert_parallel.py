"""One layer's dispatch, experts and combine over N ranks: ours beside Megatron's own.

    torchrun --nproc-per-node 2 -m moeblaze_megatron.bench expert_parallel qwen3-30b

Dispatcher and experts are called as Megatron's `MoELayer` calls them, with a routing given. Beside
alltoall, and beside flex where DeepEP is installed, stand the strongest experts that torch has: its
grouped GEMM, and between the two the fused activation of Megatron's grouped experts.

T tokens of one rank, K experts per token, E experts of all ranks, EP ranks, H hidden size, F ffn
hidden size of one expert.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moeblaze_megatron.bench.measure import (
    ERROR_LIMIT,
    MODES,
    measure_memory,
    time_layers,
)
from moeblaze_megatron.bench.peers import grouped_gemm
from moeblaze_megatron.bench.shapes import DEVICE, Shape, choices
from moeblaze_megatron.processes import NO_MULTICAST, torchrun_command

STOCK = "alltoall"
FLEX = "flex"  # over DeepEP, which sends bf16
ABOUT = (
    "alltoall: Megatron's all-to-all dispatcher (no permute fusion, which is Transformer "
    "Engine's), torch grouped_mm and Megatron's fused swiglu; flex: the same with DeepEP, in bf16 "
    "where it is installed"
)


def check_ranks(shapes: list[tuple[str, Shape]]) -> None:
    """Raises a ValueError, naming what to do, outside torchrun and where E does not divide."""
    if "RANK" not in os.environ:
        raise ValueError(
            "expert_parallel runs on several ranks: "
            "torchrun --nproc-per-node N -m moeblaze_megatron.bench expert_parallel"
        )
    EP = int(os.environ["WORLD_SIZE"])
    for text, shape in shapes:
        if shape.E % EP:
            raise ValueError(f"shape {text!r}: {shape.E} experts do not divide by {EP} ranks")


def start() -> str:
    """Takes this rank's GPU and makes process groups, all ranks expert-parallel; describes both."""
    from moeblaze_megatron.mcore import install
    from moeblaze_megatron.mcore.cpu_mode import install_cpu_mode

    gpus, here = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    # NCCL takes one GPU for each rank.
    backend = "nccl" if gpus >= here else "gloo"
    shared = " by ranks that share a GPU, which measures nothing" * (0 < gpus < here)
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
    install_cpu_mode()
    install()
    from megatron.core import parallel_state
    from megatron.core.package_info import __version__ as version

    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(),
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=1,
    )
    version = version.partition("+")[0]  # Megatron adds the commit of the folder's repository
    return f"{backend}{shared}, EP {dist.get_world_size()}, megatron-core {version}"


@dataclass(frozen=True)
class Tokens:
    """What one rank's layer gets, as leaves that take gradients, and an upstream gradient."""

    x: torch.Tensor  # [T, H]
    probs: torch.Tensor  # [T, E] fp32, 0 where a token does not choose an expert
    routing_map: torch.Tensor  # [T, E] bool
    grad_output: torch.Tensor  # [T, H]
    weights: tuple[torch.nn.Parameter, ...]  # [E/EP, 2F, H], [E/EP, H, F]

    def clear_grads(self) -> None:
        for leaf in (self.x, self.probs, *self.weights):
            leaf.grad = None


def tokens_for(shape: Shape, routing: str, seed: int, weights: tuple) -> Tokens:
    """This rank's part of a routing of all ranks' tokens: all find the same experts popular."""
    T, EP, rank = shape.T, dist.get_world_size(), dist.get_rank()
    g = torch.Generator(DEVICE).manual_seed(seed)
    mine = slice(rank * T, (rank + 1) * T)
    topk_probs, ids = (t[mine] for t in choices(replace(shape, T=T * EP), routing, g))
    g.manual_seed(1000 * (seed + 1) + rank)
    x, grad_output = torch.randn(
        2, T, shape.H, generator=g, device=DEVICE, dtype=weights[0].dtype
    ).unbind()
    probs = topk_probs.new_zeros(T, shape.E).scatter_(1, ids, topk_probs)
    routing_map = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, ids, True)
    return Tokens(x.requires_grad_(), probs.requires_grad_(), routing_map, grad_output, weights)


def systems(shape: Shape, dtype: torch.dtype) -> tuple[dict[str, Callable], tuple]:
    """{system: layer from `Tokens` to output [T, H]}, and the weights that all of them use."""
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moeblaze_megatron.mcore.dispatcher import MoEBlazeTokenDispatcher
    from moeblaze_megatron.mcore.experts import MoEBlazeExperts

    groups, EP, rank = get_default_pg_collection(), dist.get_world_size(), dist.get_rank()
    number = shape.E // EP
    local = list(range(rank * number, (rank + 1) * number))
    dispatchers = {
        "moeblaze": MoEBlazeTokenDispatcher,
        STOCK: token_dispatcher.MoEAlltoAllTokenDispatcher,
    }
    # Megatron has no `fused_dispatch` without DeepEP.
    if EP > 1 and dtype is torch.bfloat16 and token_dispatcher.fused_dispatch is not None:
        dispatchers[FLEX] = token_dispatcher.MoEFlexTokenDispatcher
    configs = {
        name: TransformerConfig(
            num_layers=1,
            hidden_size=shape.H,
            num_attention_heads=1,
            num_moe_experts=shape.E,
            moe_router_topk=shape.K,
            moe_router_pre_softmax=shape.K == 1,  # else Megatron refuses K = 1; no router runs
            moe_ffn_hidden_size=shape.F,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type=name,
            expert_model_parallel_size=EP,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            perform_initialization=False,
        )
        for name in dispatchers
    }
    ours = MoEBlazeExperts(number, configs["moeblaze"], pg_collection=groups)
    weights = fc1_weight, fc2_weight = ours.linear_fc1.weight, ours.linear_fc2.weight
    g = torch.Generator(DEVICE).manual_seed(rank)
    for weight in weights:
        weight.data.normal_(std=weight.shape[2] ** -0.5, generator=g)

    def grouped(rows, tokens_per_expert, probs):
        offs = tokens_per_expert.to(rows.device, torch.int32, non_blocking=True).cumsum(0)
        offs = offs.to(torch.int32)
        fc1_output = grouped_gemm(rows, fc1_weight.mT, offs=offs)
        act = weighted_bias_swiglu_impl(fc1_output, None, probs[:, None])
        return grouped_gemm(act, fc2_weight.mT, offs=offs), None

    return {
        name: layer(
            dispatcher(number, local, configs[name], groups),
            ours if name == "moeblaze" else grouped,
        )
        for name, dispatcher in dispatchers.items()
    }, weights


def layer(dispatcher, experts: Callable) -> Callable[[Tokens], torch.Tensor]:
    """The steps of Megatron's `MoELayer` after its router."""

    def run(tokens: Tokens) -> torch.Tensor:
        rows, probs = dispatcher.dispatch_preprocess(
            tokens.x[:, None], tokens.routing_map, tokens.probs
        )
        rows, probs = dispatcher.token_dispatch(rows, probs)
        output, _ = experts(*dispatcher.dispatch_postprocess(rows, probs))
        output = dispatcher.token_combine(dispatcher.combine_preprocess(output))
        return dispatcher.combine_postprocess(output)[:, 0]

    return run


@contextmanager
def counted_exchanges() -> Iterator[list[tuple[int, int]]]:
    """(rows, bytes) that leave this rank in each all-to-all inside, in order."""
    found, exchange = [], dist.all_to_all_single

    def counting(output, input, output_split_sizes=None, input_split_sizes=None, group=None, **kw):
        ranks, me = dist.get_world_size(group), dist.get_rank(group)
        splits = input_split_sizes
        if splits is None:
            splits = [input.shape[0] // ranks] * ranks
        away = int(sum(splits)) - int(splits[me])
        found.append((away, away * input[:1].numel() * input.element_size()))
        return exchange(output, input, output_split_sizes, input_split_sizes, group, **kw)

    dist.all_to_all_single = counting
    try:
        yield found
    finally:
        dist.all_to_all_single = exchange


def rows_to_others(name: str, tokens: Tokens) -> int:
    """What dispatch has to send: a row for each rank that holds any of a token's experts, or one
    for each expert."""
    EP, rank = dist.get_world_size(), dist.get_rank()
    by_rank = tokens.routing_map.unflatten(1, (EP, -1))
    rows = by_rank.sum((0, 2)) if name == STOCK else by_rank.any(2).sum(0)
    return int(rows.sum() - rows[rank])


def traffic(name: str, layer: Callable, tokens: Tokens) -> dict[str, int | None]:
    """Rows that dispatch sends to other ranks, and bytes of forward and backward.

    DeepEP's are not seen: its rows are those that the routing asks for, its bytes None.

    Raises:
        ValueError: not one exchange in the forward pass has as many rows as the routing says. (A
            single rank exchanges nothing.)
    """
    if name == FLEX:
        return {"rows": rows_to_others(name, tokens), "bytes": None}
    tokens.clear_grads()
    with counted_exchanges() as exchanges:
        output = layer(tokens)
        forward = len(exchanges)
        output.backward(tokens.grad_output)
    tokens.clear_grads()
    rows = rows_to_others(name, tokens)
    row = tokens.x.shape[1] * tokens.x.element_size()
    if dist.get_world_size() > 1 and (rows, rows * row) not in exchanges[:forward]:
        raise ValueError(f"{name} sent {exchanges[:forward]} (rows, bytes), not {rows} rows")
    return {"rows": rows, "bytes": sum(nbytes for _, nbytes in exchanges)}


def results(layer: Callable, tokens: Tokens) -> dict[str, torch.Tensor]:
    tokens.clear_grads()
    output = layer(tokens)
    output.backward(tokens.grad_output)
    leaves = (tokens.x, tokens.probs, *tokens.weights)
    names = ("grad_x", "grad_probs", "grad_fc1_weight", "grad_fc2_weight")
    found = {"output": output.detach()} | {
        name: leaf.grad for name, leaf in zip(names, leaves, strict=True)
    }
    tokens.clear_grads()
    return found


def difference(name: str, found: dict, expected: dict) -> float:
    """The largest relative norm of a difference among output and gradients to `STOCK`'s.

    Raises:
        ValueError: when it is beyond what two results of this dtype can differ by.
    """
    least = torch.finfo(torch.float32).tiny  # experts without tokens have gradients of 0
    off = {}
    for key, value in found.items():
        right = expected[key].float()
        off[key] = ((value.float() - right).norm() / right.norm().clamp(min=least)).item()
    limit = 2 * ERROR_LIMIT[found["output"].dtype]
    if not all(value <= limit for value in off.values()):
        raise ValueError(f"{name} and {STOCK} differ by {off}, so they are not timed")
    return max(off.values())


def largest(values: list[float]) -> list[float]:
    """Each value's maximum over ranks."""
    out = torch.tensor(values, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(out, dist.ReduceOp.MAX)
    return out.tolist()


def together() -> None:
    """On a GPU, the next kernel of all ranks begins at the same time."""
    dist.all_reduce(torch.zeros(1, device=DEVICE))


def bench(title: str, shape: Shape, arguments, progress: Callable[[str], None]) -> dict:
    """{system: row}; times, memory, rows and bytes are the largest over ranks."""
    torch.compiler.reset()
    progress(f"{title}: making inputs and weights")
    layers, weights = systems(shape, getattr(torch, arguments.dtype))
    sets = [tokens_for(shape, arguments.routing, seed, weights) for seed in range(arguments.sets)]
    rows, found = {}, {}
    for name, run in layers.items():
        progress(f"{title}: checking {name}, which compiles at first use")
        found[name] = results(run, sets[0])
        rows[name] = traffic(name, run, sets[0])
    for name in layers:
        if name != STOCK:
            rows[name]["error"] = difference(name, found[name], found[STOCK])
    del found
    for name, run in layers.items():
        rows[name] |= measure_memory(run, sets[0])
        keys = [key for key, value in rows[name].items() if value is not None]
        rows[name] |= zip(keys, largest([rows[name][key] for key in keys]), strict=True)
    progress(f"{title}: timing {', '.join(layers)}")
    timed = time_layers(
        {name: (run, sets) for name, run in layers.items()},
        arguments.steps,
        ready=together,
        agree=largest,
    )
    for name, times in timed.items():
        for mode, ms in times.items():
            flops = shape.forward_flops * (1 if mode == "forward" else 3)
            rows[name][mode] = {**ms, "tflops": flops / ms["p50"] / 1e9}
    return rows


def megabytes(row: dict, cell: Callable) -> str:
    return cell(None if row["bytes"] is None else row["bytes"] / 1e6, 9, ".1f")


def print_rows(title: str, shape: Shape, rows: dict, cell: Callable) -> None:
    """Prints the table, and how much faster ours is."""
    EP = dist.get_world_size()
    print(
        f"\n{title}: T, H, F, E, K = {shape}; {shape.T} tokens and {shape.E // EP} experts a rank\n"
        f"{'system':9} {'forward ms':>10} {'p20..p80':>17} {'fwd+bwd ms':>11} {'p20..p80':>17} "
        f"{'TFLOP/s':>8} {'held MiB':>9} {'peak MiB':>9} {'rows sent':>10} {'MB sent':>9} "
        f"{'differs':>8}"
    )
    for name, row in rows.items():
        line = f"{name:9}"
        for mode, width in (("forward", 10), ("forward+backward", 11)):
            ms = row[mode]
            line += f" {ms['p50']:{width}.3f} {ms['p20']:8.3f}-{ms['p80']:<8.3f}"
        print(
            f"{line} {row['forward+backward']['tflops']:8.0f} {cell(row['held'], 9)} "
            f"{cell(row['peak'], 9)} {row['rows']:10.0f} {megabytes(row, cell)} "
            f"{cell(row.get('error'), 8, '.1e')}"
        )
    for name in list(rows)[1:]:
        ratios = [rows[name][mode]["p50"] / rows["moeblaze"][mode]["p50"] for mode in MODES]
        print(f"{name} / moeblaze: forward {ratios[0]:.2f}, fwd+bwd {ratios[1]:.2f}", flush=True)


def check_scaling(arguments) -> None:
    """Settles `ranks`: as given, else 1, 2, 4, ... up to the GPUs there are.

    Raises:
        ValueError: naming what these ranks or shapes cannot do.
    """
    gpus = torch.cuda.device_count()
    usual = [2**i for i in range(max(gpus, 2).bit_length()) if 2**i <= max(gpus, 2)]
    ranks = arguments.ranks = sorted(set(arguments.ranks or usual))
    if ranks[0] < 1 or len(ranks) < 2:
        raise ValueError(
            f"--ranks takes two or more numbers, different and each 1 or more; got {ranks}"
        )
    wrong = [
        f"shape {text!r}: {shape.E} experts do not divide by {number} ranks"
        for text, shape in arguments.shapes
        for number in ranks
        if shape.E % number
    ]
    if 0 < gpus < ranks[-1]:
        wrong.append(f"--ranks {ranks[-1]}: here are {gpus} GPUs, one for each rank")
    if wrong:
        raise ValueError("; ".join(wrong))


def run_ranks(number: int, arguments, progress: Callable[[str], None]) -> dict:
    """{shape: {system: row}} of `bench expert_parallel` with `number` ranks, in a fresh torchrun.

    Exits with the end of what it printed where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [*torchrun_command(number), "-m", "moeblaze_megatron.bench", "expert_parallel"]
        command += [text for text, _ in arguments.shapes]
        for name in ("dtype", "routing", "steps", "sets"):
            command += [f"--{name}", str(getattr(arguments, name))]
        progress(f"{number} ranks: {', '.join(text for text, _ in arguments.shapes)}")
        done = subprocess.run(
            [*command, "--json", str(report)],
            env=NO_MULTICAST | os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{done.stdout[-3000:]}\nbench: {number} ranks failed")
        return json.loads(report.read_text())


def print_scaling(title: str, shape: Shape, found: dict[int, dict], cell: Callable) -> None:
    """Prints {ranks: {system: row}} of one shape, efficiency beside the fewest ranks."""
    print(
        f"\n{title}: T, H, F, E, K = {shape}; {shape.T} tokens a rank, all share the experts\n"
        f"{'ranks':>5} {'system':9} {'forward ms':>10} {'efficiency':>10} {'fwd+bwd ms':>11} "
        f"{'efficiency':>10} {'rows sent':>10} {'MB sent':>9} {'peak MiB':>9}"
    )
    first = found[min(found)]
    for number, rows in found.items():
        for name, row in rows.items():
            line = f"{number:5} {name:9}"
            for mode, width in zip(MODES, (10, 11), strict=True):
                ms = row[mode]["p50"]
                whole = first[name][mode]["p50"] / ms if name in first else None
                line += f" {ms:{width}.3f} {cell(whole, 10, '.1%')}"
            print(f"{line} {row['rows']:10.0f} {megabytes(row, cell)} {cell(row['peak'], 9)}")
