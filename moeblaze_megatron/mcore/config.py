"""Which Megatron settings moeblaze trains with, and what to change about the others.

Several of Megatron's own guards name the dispatchers they apply to and so pass over a value they
do not know; what they protect is checked here again.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.nn.functional as F

from moeblaze_megatron.ops.activation import Activation
from moeblaze_megatron.ops.index_lists import MAX_EXPERTS, MAX_TOPK


class Setting(NamedTuple):
    """A field, the values of it that moeblaze accepts, and what to do about any other."""

    field: str
    accepted: tuple
    do: str


OFF = (False, None)

SETTINGS = (
    # Parallelism.
    Setting(
        "expert_gtp_weight_remat_size",
        (None, 0, 1),
        "sharded expert weights are not supported, set "
        "--expert-tensor-parallel-num-weight-shards 1",
    ),
    Setting("moe_extended_tp", OFF, "leave out --moe-extended-tp"),
    # What an expert computes; activation, bias and probs: _activation_reasons, _bias_reasons.
    Setting(
        "moe_mlp_glu_interleave_size",
        (None,),
        "fc1 holds the gate half, then the other, leave out --moe-mlp-glu-interleave-size",
    ),
    Setting(
        "use_te_activation_func",
        OFF,
        "the activation is part of a kernel, leave out --use-te-activation-func",
    ),
    # Quantisation.
    Setting("fp8", OFF, "experts train in fp32, bf16 or fp16, leave out --fp8-format"),
    Setting("fp4", OFF, "experts train in fp32, bf16 or fp16, leave out --fp4-format"),
    Setting("use_kitchen", OFF, "experts are not quantised, set use_kitchen=False"),
    Setting(
        "quant_recipe",
        (None,),
        "experts are not quantised, leave out --te-precision-config-file",
    ),
    Setting(
        "moe_router_padding_for_quantization",
        OFF,
        "experts are not quantised, leave out --moe-router-padding-for-quantization",
    ),
    Setting(
        "moe_router_padding_for_fp8",
        OFF,
        "experts are not quantised, leave out --moe-router-padding-for-fp8",
    ),
    # Other implementations of the experts.
    Setting(
        "transformer_impl",
        (None, "local", "transformer_engine"),
        "set --transformer-impl local or transformer_engine",
    ),
    Setting(
        "use_transformer_engine_op_fuser",
        OFF,
        "it fuses other experts, leave out --use-transformer-engine-op-fuser",
    ),
    Setting(
        "moe_single_grouped_weight",
        OFF,
        "each linear is one weight already, leave out --moe-single-grouped-weight",
    ),
    Setting(
        "moe_single_grouped_bias",
        OFF,
        "each linear has one bias already, leave out --moe-single-grouped-bias",
    ),
    Setting(
        "moe_use_grouped_tensor",
        OFF,
        "each linear is one weight already, leave out --moe-use-grouped-tensor",
    ),
    Setting("moe_use_legacy_grouped_gemm", OFF, "leave out --moe-use-legacy-grouped-gemm"),
    Setting(
        "batch_invariant_mode",
        OFF,
        "sums depend on the tile sizes, leave out --batch-invariant-mode",
    ),
    # Capacity. A factor only leaves rows out, and padding adds none.
    Setting(
        "moe_pad_experts_for_cuda_graph_inference",
        OFF,
        "it pads to capacity, leave out --moe-pad-experts-for-cuda-graph-inference",
    ),
    Setting(
        "moe_expert_rank_capacity_factor",
        (None,),
        "it is the flex dispatcher's, leave out --moe-expert-rank-capacity-factor",
    ),
    # Overlap of whole batches. Of shared experts: _overlap_reasons.
    Setting(
        "overlap_moe_expert_parallel_comm",
        OFF,
        "communication is not overlapped yet, leave out --overlap-moe-expert-parallel-comm",
    ),
    Setting(
        "ep_overlap_early_attn_memory_release",
        OFF,
        "communication is not overlapped yet, leave out --ep-overlap-early-attn-memory-release",
    ),
    Setting(
        "delay_wgrad_compute",
        OFF,
        "weight gradients are not delayed, leave out --delay-wgrad-compute",
    ),
    Setting(
        "overlap_dispatch_backward_with_experts_wgrad",
        OFF,
        "weight gradients are not delayed, leave out "
        "--overlap-dispatch-backward-with-experts-wgrad",
    ),
    # Memory. CUDA graphs and offload modules: _graph_reasons, _offload_reasons. "moe_act" of
    # recompute_modules is accepted: it promises that the activation is not kept, and it never is.
    # activation_func_fp8_input_store: _store_reasons; Megatron has it for SwiGLU only.
    Setting(
        "moe_paged_stash",
        OFF,
        "it stashes activations of other experts, leave out --moe-paged-stash",
    ),
)

# Command-line arguments that do not reach the TransformerConfig.
ARGUMENTS = (
    Setting("use_megatron_fsdp", OFF, "use --use-distributed-optimizer in its place"),
    Setting("use_torch_fsdp2", OFF, "use --use-distributed-optimizer in its place"),
    Setting(
        "moe_use_upcycling",
        OFF,
        "upcycle with another dispatcher, then load that checkpoint",
    ),
    Setting(
        "optimizer",
        (None, "adam", "sgd", "lion"),
        "optimizers of 2-D weights pass over the 3-D weights of the experts, use --optimizer adam",
    ),
)

OFFLOAD_INSIDE_EXPERTS = {"expert_fc1", "moe_act", "fused_group_mlp"}
GRAPHS_OUTSIDE_MOE = {"attn", "mlp", "mamba"}


class UnsupportedSettings(ValueError):
    """Settings that moeblaze does not train with.

    Attributes:
        reasons: one line for each, "field=value: why, what to do".
    """

    def __init__(self, reasons: list[str]):
        self.reasons = reasons
        super().__init__("moeblaze does not support:\n  " + "\n  ".join(reasons))


def activation_of(config: Any) -> Activation | None:
    """The operator's activation for the config's; None if it has none.

    Clamp and offset are of gated activations, and without a gate of no effect, as in Megatron.
    """
    from megatron.core import activations
    from megatron.core.activations import squared_relu
    from megatron.core.fusions import fused_bias_geglu

    names = {
        (F.silu, True): "swiglu",
        (F.gelu, True): "geglu",
        (activations.quick_gelu, True): "quick_geglu",
        (fused_bias_geglu.quick_gelu, True): "quick_geglu",  # what --quick-geglu sets
        (F.silu, False): "silu",
        (F.gelu, False): "gelu",
        (squared_relu, False): "squared_relu",
    }
    name = names.get((config.activation_func, bool(config.gated_linear_unit)))
    if name is None or not config.gated_linear_unit:
        return name and Activation(name)
    clamp = config.activation_func_clamp_value
    return Activation(
        name, None if clamp is None else float(clamp), float(config.glu_linear_offset)
    )


def _table_reasons(settings: Any, table: tuple[Setting, ...]) -> Iterator[str]:
    for field, accepted, do in table:
        value = getattr(settings, field, accepted[0])
        if value not in accepted:
            yield f"{field}={value!r}: {do}"


def _size_reasons(config: Any) -> Iterator[str]:
    experts = getattr(config, "num_moe_experts", None) or MAX_EXPERTS
    for field, low, high in (
        ("num_moe_experts", 1, MAX_EXPERTS),
        ("moe_router_topk", 1, min(MAX_TOPK, experts)),
        ("moeblaze_workspace_mb", 1, float("inf")),
    ):
        value = getattr(config, field, None)
        if value is not None and not low <= value <= high:
            yield f"{field}={value}: use {low} to {high}"


def _parallel_reasons(config: Any) -> Iterator[str]:
    ep = getattr(config, "expert_model_parallel_size", None) or 1
    etp = getattr(config, "expert_tensor_parallel_size", None) or 1
    experts, ffn = config.num_moe_experts, config.moe_ffn_hidden_size
    if experts and experts % ep:
        yield (
            f"num_moe_experts={experts}, expert_model_parallel_size={ep}: each rank holds equally "
            "many experts, set --expert-model-parallel-size to a divisor of --num-experts"
        )
    if ffn and ffn % etp:
        yield (
            f"moe_ffn_hidden_size={ffn}, expert_tensor_parallel_size={etp}: each rank holds an "
            "equal slice, set --expert-tensor-parallel-size to a divisor of --moe-ffn-hidden-size"
        )
    if ep == 1 and etp > 1 and getattr(config, "variable_seq_lengths", False):
        yield (
            f"variable_seq_lengths=True, expert_tensor_parallel_size={etp}: without expert "
            "parallelism the ranks that share an expert have equally many tokens, set "
            "--expert-tensor-parallel-size 1"
        )


def _activation_reasons(config: Any) -> Iterator[str]:
    activation = activation_of(config)
    if activation is None:
        func = getattr(config.activation_func, "__name__", repr(config.activation_func))
        yield (
            f"activation_func={func}, gated_linear_unit={config.gated_linear_unit}: use silu or "
            "gelu with or without a gate (--swiglu), --quick-geglu, or --squared-relu"
        )
        return
    if not math.isfinite(activation.offset):
        yield f"glu_linear_offset={activation.offset}: set --glu-linear-offset to a finite number"
    if activation.clamp is not None and not 0 < activation.clamp < math.inf:
        yield (
            f"activation_func_clamp_value={activation.clamp}: set --activation-func-clamp-value "
            "above 0 and finite, or leave it out"
        )


def _bias_reasons(config: Any) -> Iterator[str]:
    """Of biases and of probabilities on the input; the rest of what Megatron itself refuses."""
    on_input, topk = config.moe_apply_probs_on_input, config.moe_router_topk
    if on_input and topk != 1:
        yield (
            f"moe_apply_probs_on_input=True, moe_router_topk={topk}: a token has one input, set "
            "--moe-router-topk 1 or leave out --moe-apply-probs-on-input"
        )
    if not config.add_bias_linear:
        return
    etp = getattr(config, "expert_tensor_parallel_size", None) or 1
    if etp > 1:
        yield (
            f"add_bias_linear=True, expert_tensor_parallel_size={etp}: every rank would add the "
            "bias, set --expert-tensor-parallel-size 1 or add --disable-bias-linear"
        )
    if on_input and config.moe_pad_expert_input_to_capacity:
        yield (
            "add_bias_linear=True, moe_apply_probs_on_input=True, moe_pad_expert_input_to_capacity="
            "True: the bias is added to padded rows, leave out one of the three"
        )


def _store_reasons(settings: Any) -> Iterator[str]:
    """Of a config, or of the arguments, which hold both before a config does."""
    stored = getattr(settings, "activation_func_fp8_input_store", False)
    if stored and getattr(settings, "moeblaze_recompute_fc1", False):
        yield (
            "activation_func_fp8_input_store=True, moeblaze_recompute_fc1=True: what is recomputed "
            "is not stored, leave one of the two out"
        )


def _graph_reasons(config: Any) -> Iterator[str]:
    impl = getattr(config, "cuda_graph_impl", "none")
    modules = getattr(config, "cuda_graph_modules", None)
    if modules is None:
        modules = getattr(config, "cuda_graph_scope", None)  # its name up to 0.17
    modules = modules if isinstance(modules, list | tuple) else [modules]
    names = [getattr(module, "name", module) for module in modules]
    if impl != "none" and not (names and GRAPHS_OUTSIDE_MOE.issuperset(names)):
        yield (
            f"cuda_graph_impl={impl!r}, cuda_graph_modules={names}: an MoE layer cannot be "
            f"captured yet, name the modules to capture, of {sorted(GRAPHS_OUTSIDE_MOE)}"
        )


def _overlap_reasons(config: Any) -> Iterator[str]:
    recomputed = getattr(config, "recompute_granularity", None) == "selective" and (
        "shared_experts" in (getattr(config, "recompute_modules", None) or ())
    )
    shared = getattr(config, "moe_shared_expert_intermediate_size", None)
    if recomputed and shared and config.moe_shared_expert_overlap:
        yield (
            "moe_shared_expert_overlap=True, recompute_modules=['shared_experts', ...]: shared "
            "experts that run beside the exchange cannot be recomputed, leave out one of the two"
        )


def _offload_reasons(config: Any) -> Iterator[str]:
    inside = OFFLOAD_INSIDE_EXPERTS.intersection(getattr(config, "offload_modules", None) or ())
    if inside and getattr(config, "fine_grained_activation_offloading", False):
        yield f"offload_modules={sorted(inside)}: they are parts of other experts, leave them out"


def unsupported_reasons(config: Any) -> list[str]:
    """Everything in a TransformerConfig that moeblaze does not support, and what to do about it.

    A field that this version of Megatron does not have counts as left out.
    """
    return [
        *_table_reasons(config, SETTINGS),
        *_size_reasons(config),
        *_parallel_reasons(config),
        *_activation_reasons(config),
        *_bias_reasons(config),
        *_store_reasons(config),
        *_graph_reasons(config),
        *_overlap_reasons(config),
        *_offload_reasons(config),
    ]


def unsupported_arguments(args: Any) -> list[str]:
    """The same for Megatron's command-line arguments that do not reach the TransformerConfig."""
    return [*_table_reasons(args, ARGUMENTS), *_store_reasons(args)]


def unsupported_checkpoint(args: Any, saved: Any) -> list[str]:
    """The same for a run's arguments and those that the checkpoint was saved with that it loads.

    Megatron's distributed optimizer saves its flat buffers as they are, unless told to save a
    tensor for each parameter (`fully_reshardable`). Weights lie in them in the order of the
    parameters: one for each expert with Megatron's experts, one of all experts here. The sizes are
    the same, so that each would load the other's, in the wrong places.
    """
    names = [getattr(each, "moe_token_dispatcher_type", None) for each in (args, saved)]
    has = {name for name, value in vars(saved).items() if value}  # an older Megatron's lack some
    flat = "use_distributed_optimizer" in has and (
        getattr(saved, "ckpt_format", "torch") == "torch"
        or "dist_ckpt_optim_fully_reshardable" not in has
    )
    loads = args.use_distributed_optimizer and not (args.no_load_optim or "no_save_optim" in has)
    if not (args.num_experts and flat and loads) or names.count("moeblaze") != 1:
        return []
    return [
        f"moe_token_dispatcher_type={names[0]!r}, and {names[1]!r} in the checkpoint: its "
        "distributed optimizer's state lies in the order of other experts' parameters, load "
        "with --no-load-optim, or save it as torch_dist with --dist-ckpt-optim-fully-reshardable"
    ]


def check_config(config: Any) -> None:
    """Raises UnsupportedSettings, a ValueError that names every setting not supported."""
    reasons = unsupported_reasons(config)
    if reasons:
        raise UnsupportedSettings(reasons)
