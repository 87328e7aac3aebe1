"""Memory of one GPU in a Megatron MoE run, with both dispatchers, before anything is started.

    python -m moeblaze_megatron.estimate --processes N [Megatron's flags]

Closed forms from the flags, for even routing and the first pipeline stage, which holds most
micro-batches; no Megatron and no GPU needed. What allocators, NCCL and CUDA hold comes on top.

T tokens, K experts per token, E experts, H hidden size, F ffn hidden size of one expert.
"""

import argparse
import ast
import difflib
import sys
from dataclasses import dataclass

from moeblaze_megatron import command
from moeblaze_megatron.ops.index_lists import MAX_EXPERTS, MAX_TOPK
from moeblaze_megatron.ops.memory import LayerBytes

GIB = 2**30
DISPATCHERS = ("moeblaze", "alltoall")
POSITIVE = {  # the other numbers may be 0
    *("processes", "num_layers", "hidden_size", "num_attention_heads", "num_experts"),
    *("moe_ffn_hidden_size", "seq_length", "micro_batch_size", "global_batch_size"),
    *("moe_router_topk", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
}
ROTARY = ("rope", "mrope", "yarn")  # values of --position-embedding-type
OWN = (
    "--moeblaze-workspace-mb",
    "--moeblaze-report-rows",
    "--moeblaze-check-routing",
    "--moeblaze-kernel-table",
)


def parser() -> argparse.ArgumentParser:
    """The flags that the estimate reads; others of Megatron's may stand beside them."""
    flags = argparse.ArgumentParser(
        prog="python -m moeblaze_megatron.estimate",
        usage="%(prog)s --processes N [Megatron's flags]",
        description="Estimate the memory of each GPU from Megatron's flags, for both dispatchers.",
        allow_abbrev=False,
    )
    about = "GPUs of the whole run (default: 1)"
    flags.add_argument("--processes", type=int, default=1, help=about)
    for name in (
        *("num-layers", "hidden-size", "num-attention-heads", "num-experts", "moe-ffn-hidden-size"),
        *("seq-length", "micro-batch-size", "global-batch-size"),
    ):
        flags.add_argument(f"--{name}", type=int, required=True)
    for name, default in (
        *(("ffn-hidden-size", None), ("kv-channels", None), ("num-query-groups", 1)),
        *(("moe-router-topk", 2), ("moe-shared-expert-intermediate-size", 0), ("vocab-size", 0)),
        *(("tensor-model-parallel-size", 1), ("pipeline-model-parallel-size", 1)),
        *(("context-parallel-size", 1), ("expert-model-parallel-size", 1)),
        *(("expert-tensor-parallel-size", None), ("q-lora-rank", None), ("kv-lora-rank", 512)),
        *(("qk-head-dim", 128), ("qk-pos-emb-head-dim", 64), ("v-head-dim", 128)),
    ):
        flags.add_argument(f"--{name}", type=int, default=default)
    flags.add_argument("--moe-layer-freq", type=str, default="1")
    flags.add_argument("--position-embedding-type", type=str, default="learned_absolute")
    flags.add_argument("--recompute-granularity", choices=("full", "selective"))
    for name in (
        *("swiglu", "quick-geglu", "disable-bias-linear", "bf16", "fp16"),
        *("use-distributed-optimizer", "group-query-attention", "use-rotary-position-embeddings"),
        *("untie-embeddings-and-output-weights", "multi-latent-attention"),
        *("moeblaze-recompute-fc1", "activation-func-fp8-input-store"),
    ):
        flags.add_argument(f"--{name}", action="store_true")
    return flags


@dataclass(frozen=True)
class Estimate:
    """Bytes on one GPU, by what they are for; `moe` and `transient` by dispatcher."""

    parameters: int  # numbers, not bytes, of the whole model
    weights: float  # with their gradients
    optimizer: float
    other_layers: float  # kept for backward of attention, norms and dense layers
    logits: float
    moe: dict[str, float]  # kept for backward of the experts
    transient: dict[str, float]  # at the worst moment of one layer's backward

    def total(self, dispatcher: str) -> float:
        fixed = self.weights + self.optimizer + self.other_layers + self.logits
        return fixed + self.moe[dispatcher] + self.transient[dispatcher]


def _pattern(node: ast.AST) -> list[int]:
    """What an expression of lists of numbers, + and * makes; raises ValueError."""
    match node:
        case ast.List(elts):
            values = [getattr(element, "value", None) for element in elts]
            if all(type(value) is int for value in values):
                return values
        case ast.BinOp(left, ast.Add(), right):
            return _pattern(left) + _pattern(right)
        case ast.BinOp(ast.Constant(int(times)), ast.Mult(), part):
            return times * _pattern(part)
        case ast.BinOp(part, ast.Mult(), ast.Constant(int(times))):
            return times * _pattern(part)
    raise ValueError(ast.unparse(node))


def moe_layers(freq: str, layers: int) -> int:
    """How many of `layers` are MoE layers, as --moe-layer-freq says: N, or a list in Python.

    Raises:
        ValueError: it says neither, or is a list of another length.
    """
    if freq.isdecimal() and int(freq):
        return sum(i % int(freq) == 0 for i in range(layers))
    try:
        pattern = _pattern(ast.parse(freq.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        raise ValueError(
            f"--moe-layer-freq {freq} is neither a number above 0 nor a list as ([0]*3+[1]*58)"
        ) from None
    if len(pattern) != layers:
        raise ValueError(f"--moe-layer-freq {freq} has {len(pattern)} layers, not {layers}")
    return sum(pattern)


def check(flags: argparse.Namespace, others: list[str]) -> None:
    """Ends with all that no run could have; `others` are words that the estimate does not read."""
    wrong = [
        f"--{name.replace('_', '-')} {value} is not positive"
        for name, value in vars(flags).items()
        if isinstance(value, int) and not isinstance(value, bool) and value < (name in POSITIVE)
    ]
    E, ep = flags.num_experts, flags.expert_model_parallel_size
    if flags.moe_router_topk > E:
        wrong.append(f"--moe-router-topk {flags.moe_router_topk} of --num-experts {E}")
    for name, most in (("num_experts", MAX_EXPERTS), ("moe_router_topk", MAX_TOPK)):
        if getattr(flags, name) > most:
            wrong.append(f"--{name.replace('_', '-')} is at most {most} with moeblaze")
    if ep > 0 and E % ep:
        wrong.append(f"--expert-model-parallel-size {ep} does not divide --num-experts {E}")
    if flags.moeblaze_recompute_fc1 and flags.activation_func_fp8_input_store:
        wrong.append("--moeblaze-recompute-fc1 keeps nothing for --activation-func-fp8-input-store")
    try:
        moe_layers(flags.moe_layer_freq, flags.num_layers)
    except ValueError as error:
        wrong.append(str(error))
    known = [f"--{name.replace('_', '-')}" for name in vars(flags)]
    for word in (other.partition("=")[0] for other in others if other.startswith("--")):
        near = difflib.get_close_matches(word, known, 1, 0.9)
        if near and word not in OWN:
            wrong.append(f"{word} is not known; did you mean {near[0]}?")
        elif word.startswith("--moeblaze-") and word not in OWN:
            wrong.append(f"{word} is not known")
    if wrong:
        sys.exit("estimate: " + "; ".join(wrong))


def kept_by_experts(
    K: int, H: int, F: int, halves: int, size: int, received: float, fc1_size: dict[str, float]
) -> dict[str, float]:
    """Bytes per token that the experts keep for backward, beside the layer's input.

    Args:
        halves: 2 with a gate, else 1.
        size: bytes of an element.
        received: rows of x per token that came from other ranks and are kept; 0 without.
        fc1_size: bytes kept of an element of fc1_output, by dispatcher.
    """
    return {
        "moeblaze": halves * fc1_size["moeblaze"] * K * F + 16 * K + received * size * H,
        # Permuted x, fc1_output, act.
        "alltoall": K * (size * H + halves * fc1_size["alltoall"] * F + size * F),
    }


def estimate(flags: argparse.Namespace) -> Estimate:
    H, F, E, K = (
        flags.hidden_size,
        flags.moe_ffn_hidden_size,
        flags.num_experts,
        flags.moe_router_topk,
    )
    tp, pp, cp = (
        flags.tensor_model_parallel_size,
        flags.pipeline_model_parallel_size,
        flags.context_parallel_size,
    )
    ep = flags.expert_model_parallel_size
    etp = flags.expert_tensor_parallel_size or tp
    wrong = [
        f"{flags.processes} processes are no multiple of {size}, the {kinds} parallel size"
        for size, kinds in (
            (tp * pp * cp, "tensor x pipeline x context"),
            (ep * etp * pp, "expert x expert-tensor x pipeline"),
        )
        if flags.processes % size
    ]
    if not (flags.kv_channels or flags.multi_latent_attention) and H % flags.num_attention_heads:
        wrong.append(
            f"--num-attention-heads {flags.num_attention_heads} does not divide --hidden-size {H}, "
            "which needs --kv-channels then"
        )
    if wrong:
        sys.exit("estimate: " + "; ".join(wrong))
    dp, edp = flags.processes // (tp * pp * cp), flags.processes // (ep * etp * pp)
    half = flags.bf16 or flags.fp16
    size, halves = (2 if half else 4), (2 if flags.swiglu or flags.quick_geglu else 1)
    biases = 0 if flags.disable_bias_linear else 1

    head = flags.kv_channels or H // flags.num_attention_heads
    query = flags.num_attention_heads * head
    groups = flags.num_query_groups if flags.group_query_attention else flags.num_attention_heads
    if flags.multi_latent_attention:
        qk = flags.qk_head_dim + flags.qk_pos_emb_head_dim
        query = flags.num_attention_heads * qk
        value = flags.num_attention_heads * flags.v_head_dim
        down = flags.q_lora_rank or H
        attention = (H * down if flags.q_lora_rank else 0) + down * query + value * H
        attention += H * (flags.kv_lora_rank + flags.qk_pos_emb_head_dim)
        attention += flags.kv_lora_rank * flags.num_attention_heads * flags.qk_head_dim
        attention += flags.kv_lora_rank * value
        heads = 2 * query + 2 * value  # q, k, v and what attention returns
    else:
        attention = H * (2 * query + 2 * groups * head)
        attention += biases * (query + 2 * groups * head + H)
        heads = 2 * query + 2 * groups * head
        # q, k and v are of one tensor, which v keeps. Beside it stand q and k turned, or without
        # that q, which Megatron copies where a rank has several groups of several heads.
        if flags.use_rotary_position_embeddings or flags.position_embedding_type in ROTARY:
            heads += query + groups * head
        elif tp < groups < flags.num_attention_heads:
            heads += query
    sparse = moe_layers(flags.moe_layer_freq, flags.num_layers)
    dense = flags.num_layers - sparse
    # Megatron's own sizes where none is given.
    ffn = flags.ffn_hidden_size or (8 * H // 3 // 64 * 64 if flags.swiglu else 4 * H)
    expert = (halves + 1) * H * F + biases * (halves * F + H)
    shared = (halves + 1) * H * flags.moe_shared_expert_intermediate_size + H * E
    embeddings = H * flags.vocab_size * (2 if flags.untie_embeddings_and_output_weights else 1)
    every = flags.num_layers * (attention + 2 * H) + sparse * shared
    every += dense * (halves + 1) * H * ffn
    # The first of several stages holds its share of the layers and the input's embeddings.
    own = every / pp / tp + embeddings / tp / min(pp, 2)
    own_experts = sparse * E * expert / pp / ep / etp

    weight = size + 4  # the gradient is fp32
    state = 12 if half else 8  # fp32 master weight where weights are not, and two moments
    spread = (dp * cp, edp) if flags.use_distributed_optimizer else (1, 1)
    optimizer = state * (own / spread[0] + own_experts / spread[1])

    T = flags.seq_length * flags.micro_batch_size // cp // tp  # tokens at a MoE layer
    in_flight = min(pp, max(1, flags.global_batch_size // (flags.micro_batch_size * dp)))
    batches = T * in_flight
    # Ranks of one expert-TP group have the same rows, those of all its tokens, and a slice of F.
    rows = T * K * etp
    # With expert parallelism a token is received once by each rank that holds one of its experts.
    received = etp * ep * (1 - (1 - 1 / ep) ** K) if ep * etp > 1 else 0.0
    fc1_size = {"moeblaze": 0.0 if flags.moeblaze_recompute_fc1 else size, "alltoall": size}
    if flags.activation_func_fp8_input_store:
        fc1_size = {"moeblaze": 33 / 32, "alltoall": 1.0}  # MXFP8: a scale for each 32
    kept = kept_by_experts(K * etp, H, F / etp, halves, size, received, fc1_size)
    layer = LayerBytes(
        output=T * H * size,
        fc1_output=int(rows * halves * F / etp) * size,
        act=int(rows * F / etp) * size,
        fc1_weight=int(E / ep * halves * H * F / etp) * size,
        fc2_weight=int(E / ep * H * F / etp) * size,
    )
    transient = {
        "moeblaze": float(layer.peak - layer.fc1_output * fc1_size["moeblaze"] / size),
        # Gradients of permuted x and fc1_output, of the output by row, and of the larger weight.
        "alltoall": float(2 * rows * H * size + layer.fc1_output + layer.fc1_weight),
    }
    # Inputs of both norms, their outputs, and what attention's linears and kernel keep. Tensor
    # parallelism splits norms by token, and the rest by head or column, which is as much.
    attended = 4 * H * size + heads * size
    other = batches * flags.num_layers / pp * attended
    other += batches * dense / pp * (halves + 1) * ffn * size
    other += batches * sparse / pp * (halves + 1) * flags.moe_shared_expert_intermediate_size * size
    experts = {name: batches * sparse / pp * kept[name] for name in DISPATCHERS}
    if (
        flags.recompute_granularity == "full"
    ):  # the layers' inputs stay, and one layer is made again
        for name in DISPATCHERS:
            transient[name] += T * kept[name]
        other = batches * flags.num_layers / pp * H * size + T * attended
        experts = dict.fromkeys(DISPATCHERS, 0.0)
    logits = 0.0 if pp > 1 else flags.seq_length * flags.micro_batch_size / cp
    return Estimate(
        parameters=every + embeddings + sparse * E * expert,
        weights=weight * (own + own_experts),
        optimizer=optimizer,
        other_layers=other,
        logits=logits * flags.vocab_size / tp * (size + 4),
        moe=experts,
        transient=transient,
    )


def totals(words: list[str], processes: int) -> dict[str, float] | None:
    """Bytes on one GPU by dispatcher, from flags that Megatron has accepted.

    None where they lack one that the estimate needs.
    """
    flags = parser()
    given = {word.partition("=")[0] for word in words}
    if not all(given.intersection(a.option_strings) for a in flags._actions if a.required):
        return None
    known, _ = flags.parse_known_args([*words, "--processes", str(processes)])
    check(known, [])
    found = estimate(known)
    return {name: found.total(name) for name in DISPATCHERS}


def report(found: Estimate, processes: int) -> str:
    rows = [
        ("weights and gradients", *[found.weights] * 2),
        ("optimizer", *[found.optimizer] * 2),
        ("kept of attention, norms, dense", *[found.other_layers] * 2),
        ("kept of the experts", *(found.moe[name] for name in DISPATCHERS)),
        ("logits", *[found.logits] * 2),
        ("one layer's backward", *(found.transient[name] for name in DISPATCHERS)),
        ("together", *(found.total(name) for name in DISPATCHERS)),
    ]
    lines = [
        f"{found.parameters / 1e9:.2f} B parameters on {processes} GPU{'s' * (processes > 1)}; GiB "
        "on each, estimated"
    ]
    lines.append(f"{'':<33}" + "".join(f"{name:>10}" for name in DISPATCHERS))
    lines += [f"{label:<33}" + "".join(f"{v / GIB:>10.2f}" for v in vs) for label, *vs in rows]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    # Recipes and compare have Megatron's flags behind a --, so here one may stand, too.
    flags, others = parser().parse_known_args([word for word in words if word != "--"])
    check(flags, others)
    print(report(estimate(flags), flags.processes))


if __name__ == "__main__":
    command.run(main)
