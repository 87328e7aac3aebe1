"""Bytes that expert parallelism moves, by rank (moeblaze) and by expert (alltoall), on paper.

    python -m moeblaze_megatron.scaling

prints the tables of docs/scaling.md, which says what they assume.

T tokens of one rank, K experts per token, E experts on a rank, EP expert-parallel ranks, H hidden
size, D ranks that a token goes to, k = min(K, E).
"""

import argparse
from dataclasses import dataclass
from math import comb

from moeblaze_megatron import command

ELEMENT, PROB, ID = 2, 4, 2  # bytes: bf16 hidden states, fp32 probs, int16 expert ids
NVLINK, INFINIBAND = 450e9, 50e9  # bytes a second out of a GPU: NVLink 4, one 400 Gb/s port
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    experts: int
    topk: int
    layers: int  # those with experts


MODELS = (
    Model("Qwen3-235B-A22B", hidden=4096, experts=128, topk=8, layers=94),
    Model("DeepSeek-V3", hidden=7168, experts=256, topk=8, layers=58),
    Model("Mixtral-8x7B", hidden=4096, experts=8, topk=2, layers=32),
)
SIZES = (8, 16, 32, 64, 128, 256)


def ranks_per_token(ep: int, topk: int, num_experts: int | None = None) -> float:
    """D, the ranks that hold any of a token's K experts, on average over random routing.

    EP (1 - (1 - 1/EP)^K) for independent choices or, given the number of experts, exactly for K
    different ones; the two agree as experts per rank grow.
    """
    if num_experts is None:
        return ep * (1 - (1 - 1 / ep) ** topk)
    local = num_experts // ep
    return ep * (1 - comb(num_experts - local, topk) / comb(num_experts, topk))


@dataclass(frozen=True)
class Traffic:
    """What one rank sends to others in forward and backward of one layer."""

    rows: float  # per token, its own rank included
    nbytes: float
    nvlink: float  # seconds, all ranks on NVLink
    nodes: float  # seconds, on nodes of GPUS_PER_NODE


def traffic(model: Model, ep: int, tokens: int, by_rank: bool) -> Traffic:
    """Four exchanges: rows there and back, and their gradients; routing with the first and last."""
    if by_rank:
        rows = ranks_per_token(ep, model.topk, model.experts)
        slots = min(model.topk, model.experts // ep)
        routing = slots * (PROB + ID + PROB)  # probs and ids there, gradients of probs back
    else:
        rows, routing = float(model.topk), PROB + PROB
    # Every rank of EP is as likely as another: of EP shares one stays at home.
    share = tokens * rows * (4 * model.hidden * ELEMENT + routing) / ep
    here = min(ep, GPUS_PER_NODE)
    nodes = max((here - 1) * share / NVLINK, (ep - here) * share / INFINIBAND)
    return Traffic(rows, (ep - 1) * share, (ep - 1) * share / NVLINK, nodes)


def table(model: Model, tokens: int) -> list[str]:
    """A Markdown table, one line for each EP that the model's experts allow."""
    lines = [
        f"{model.name}: H {model.hidden}, {model.experts} experts, K {model.topk}, "
        f"{model.layers} MoE layers; T {tokens}",
        "",
        "| EP | rows by expert | by rank (D) | saved | MB per layer | GB per step "
        "| NVLink, ms per layer | nodes of 8, ms per layer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for ep in SIZES:
        if model.experts % ep:
            continue
        stock, ours = (traffic(model, ep, tokens, by_rank) for by_rank in (False, True))
        saved = round(1 - ours.nbytes / stock.nbytes, 3) + 0.0  # no -0

        def both(value, digits):
            return f"{value(stock):.{digits}f} -> {value(ours):.{digits}f}"  # noqa: B023

        lines.append(
            f"| {ep} | {stock.rows:.0f} | {ours.rows:.2f} | {saved:.1%} "
            f"| {both(lambda t: t.nbytes / 1e6, 0)} "
            f"| {both(lambda t: t.nbytes * model.layers / 1e9, 1)} "
            f"| {both(lambda t: t.nvlink * 1e3, 2)} | {both(lambda t: t.nodes * 1e3, 2)} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeblaze_megatron.scaling",
        description="Bytes that expert parallelism moves, as docs/scaling.md explains: "
        "alltoall -> moeblaze.",
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a rank (%(default)s)")
    tokens = parser.parse_args().tokens
    if tokens < 1:
        parser.error(f"--tokens is 1 or more, got {tokens}")
    print("\n\n".join("\n".join(table(model, tokens)) for model in MODELS))


if __name__ == "__main__":
    command.run(main)
