"""The table of refused settings, and what install() does to Megatron's parser and config."""

import argparse
import contextlib
import io
from pathlib import Path

import mcore_worker as m
import pytest
import torch
from mcore_worker import in_megatron

from moeblaze_megatron.mcore import unsupported_reasons
from moeblaze_megatron.mcore.config import (
    ARGUMENTS,
    SETTINGS,
    unsupported_arguments,
    unsupported_checkpoint,
)
from moeblaze_megatron.ops import table

REFUSED = {
    "expert_gtp_weight_remat_size": 2,
    "moe_extended_tp": True,
    "moe_mlp_glu_interleave_size": 32,
    "use_te_activation_func": True,
    "fp8": "hybrid",
    "fp4": "e2m1",
    "use_kitchen": True,
    "quant_recipe": "recipe",
    "moe_router_padding_for_quantization": True,
    "moe_router_padding_for_fp8": True,
    "transformer_impl": "inference_optimized",
    "use_transformer_engine_op_fuser": True,
    "moe_single_grouped_weight": True,
    "moe_single_grouped_bias": True,
    "moe_use_grouped_tensor": True,
    "moe_use_legacy_grouped_gemm": True,
    "batch_invariant_mode": True,
    "moe_pad_experts_for_cuda_graph_inference": True,
    "moe_expert_rank_capacity_factor": 1.5,
    "overlap_moe_expert_parallel_comm": True,
    "ep_overlap_early_attn_memory_release": True,
    "delay_wgrad_compute": True,
    "overlap_dispatch_backward_with_experts_wgrad": True,
    "moe_paged_stash": True,
}
REFUSED_TOGETHER = {
    "activation": {"activation_func": len},
    "activation, gate": {"gated_linear_unit": False, "activation_func": "quick_gelu"},
    "clamp": {"activation_func_clamp_value": -7.0},
    "endless clamp": {"activation_func_clamp_value": float("inf")},
    "offset that is no number": {"glu_linear_offset": float("nan")},
    "probs on input": {"moe_apply_probs_on_input": True, "moe_router_topk": 2},
    "bias, expert TP": {"add_bias_linear": True, "expert_tensor_parallel_size": 2},
    "bias on padded rows": {
        "add_bias_linear": True,
        "moe_apply_probs_on_input": True,
        "moe_pad_expert_input_to_capacity": True,
        "moe_router_topk": 1,
    },
    "experts": {"num_moe_experts": 1025},
    "topk": {"moe_router_topk": 33},
    "topk above experts": {"moe_router_topk": 32},
    "workspace": {"moeblaze_workspace_mb": 0},
    "experts by rank": {"expert_model_parallel_size": 3},
    "ffn by rank": {"expert_tensor_parallel_size": 5},
    "uneven sequences, expert TP": {"expert_tensor_parallel_size": 2, "variable_seq_lengths": True},
    "whole-layer graph": {"cuda_graph_impl": "local", "cuda_graph_modules": []},
    "full-iteration graph": {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []},
    "router graph": {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe_router"]},
    "overlap, recompute": {
        "moe_shared_expert_overlap": True,
        "moe_shared_expert_intermediate_size": 32,
        "recompute_granularity": "selective",
        "recompute_modules": ["shared_experts"],
    },
    "store, recompute": {
        "activation_func_fp8_input_store": True,
        "moeblaze_recompute_fc1": True,
    },
    "offload": {"fine_grained_activation_offloading": True, "offload_modules": ["expert_fc1"]},
}
ACCEPTED = {
    "plain": {},
    "moe_act recompute": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
        "moe_grouped_gemm": True,
    },
    "fp8 input store beside moe_act recompute": {
        "activation_func_fp8_input_store": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
        "moe_grouped_gemm": True,
    },
    "moe recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "capacity": {"moe_expert_capacity_factor": 1.0},
    "padded capacity": {
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
    },
    "attention graph": {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
    "offload outside": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["mlp_norm"],
    },
    "uneven sequences": {"variable_seq_lengths": True, "expert_model_parallel_size": 2},
    "expert parallel": {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2},
    "router of its own dtype": {"moe_router_dtype": "fp64"},
    "bias": {"add_bias_linear": True},
    "probs on input": {
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    },
    "clamp": {"activation_func_clamp_value": 7.0},
    "shared expert": {"moe_shared_expert_intermediate_size": 32},
    "shared expert, overlapped": {
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_overlap": True,
    },
}


def test_every_row_has_a_refused_value():
    assert sorted(REFUSED) == sorted(setting.field for setting in SETTINGS)


def test_documentation_lists_every_row():
    documentation = (Path(__file__).parents[1] / "docs" / "megatron.md").read_text()
    for field, _, do in (*SETTINGS, *ARGUMENTS):
        assert f"\n| `{field}` | {do} |\n" in documentation


@pytest.mark.parametrize("field", REFUSED)
@in_megatron
def test_refused_alone(field):
    config = m.config()
    setattr(config, field, REFUSED[field])
    (reason,) = unsupported_reasons(config)
    assert reason.startswith(f"{field}={REFUSED[field]!r}: ")


@pytest.mark.parametrize("case", REFUSED_TOGETHER)
@in_megatron
def test_refused_combination(case):
    config = m.config()
    for field, value in REFUSED_TOGETHER[case].items():
        setattr(config, field, value)
    (reason,) = unsupported_reasons(config)
    named = REFUSED_TOGETHER[case].keys() - {
        "fine_grained_activation_offloading",
        "moe_shared_expert_intermediate_size",
        "recompute_granularity",
    }
    if case == "bias on padded rows":
        named -= {"moe_router_topk"}
    assert all(field in reason for field in named)


@pytest.mark.parametrize("case", ACCEPTED)
@in_megatron
def test_accepted(case):
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = dict(ACCEPTED[case])
    known = TransformerConfig.__dataclass_fields__
    if "cuda_graph_modules" in fields and "cuda_graph_modules" not in known:
        fields["cuda_graph_scope"] = fields.pop("cuda_graph_modules")  # its name up to 0.17
    try:
        config = m.config(**fields)
    except AssertionError:  # Megatron wants more of the machine for it than a test has
        config = m.config()
        for field, value in fields.items():
            setattr(config, field, value)
    assert unsupported_reasons(config) == []


@in_megatron
def test_every_activation_has_its_name():
    import torch.nn.functional as F
    from megatron.core import activations
    from megatron.core.fusions import fused_bias_geglu

    from moeblaze_megatron import ACTIVATIONS
    from moeblaze_megatron.mcore.config import activation_of

    cases = [(F.silu, True), (F.gelu, True), (F.silu, False), (F.gelu, False)]
    cases.append((activations.squared_relu, False))
    cases += [(activations.quick_gelu, True), (fused_bias_geglu.quick_gelu, True)]
    configs = [m.config(activation_func=func, gated_linear_unit=gate) for func, gate in cases]
    names = [activation_of(config).name for config in configs]
    assert names == ["swiglu", "geglu", "silu", "gelu", "squared_relu", *["quick_geglu"] * 2]
    assert set(names) == set(ACTIVATIONS)
    for config in configs:
        config.activation_func_clamp_value, config.glu_linear_offset = 7, 1
        found = activation_of(config)
        numbers = (7.0, 1.0) if config.gated_linear_unit else (None, 0.0)
        assert (found.clamp, found.offset) == numbers


@in_megatron
def test_all_reasons_come_at_once():
    with pytest.raises(ValueError) as error:
        m.config(
            activation_func=torch.nn.functional.relu,
            moe_apply_probs_on_input=True,
            use_te_activation_func=True,
        )
    lines = str(error.value).splitlines()
    assert lines[0] == "moeblaze does not support:"
    assert [line.split("=")[0].strip() for line in lines[1:]] == [
        "use_te_activation_func",
        "activation_func",
        "moe_apply_probs_on_input",
    ]
    assert "--use-te-activation-func" in lines[1]


@in_megatron
def test_what_megatron_itself_refuses_hides_no_reason():
    """Its advice for one setting may be another that is not supported."""
    wrong = {"num_attention_heads": 3, "tensor_model_parallel_size": 2}
    with pytest.raises(ValueError) as error:
        m.config(glu_linear_offset=float("inf"), moe_apply_probs_on_input=True, **wrong)
    lines = [line.strip() for line in str(error.value).splitlines()]
    assert lines[0] == "moeblaze does not support:" and len(lines) == 4
    assert lines[1].startswith("glu_linear_offset=inf") and "on_input=True" in lines[2]
    assert lines[3].startswith("Megatron: num_attention_heads (3) must be a multiple of")
    for dispatcher in ("moeblaze", "alltoall"):  # nothing to add
        with pytest.raises(ValueError, match=r"^num_attention_heads"):
            m.config(dispatcher, **wrong)


@in_megatron
def test_experts_that_do_not_divide_by_ranks_are_refused_at_start_up():
    with pytest.raises(ValueError, match="num_moe_experts=8, expert_model_parallel_size=3: each"):
        m.config(expert_model_parallel_size=3)


@in_megatron
def test_other_dispatchers_and_dense_models_are_not_checked():
    m.config("alltoall", moe_apply_probs_on_input=True)
    m.config(num_moe_experts=None, moe_ffn_hidden_size=None, moe_apply_probs_on_input=True)


@in_megatron
def test_layer_checks_a_config_changed_later():
    from moeblaze_megatron.mcore.experts import MoEBlazeExperts

    config = m.config()
    config.moe_apply_probs_on_input = True
    with pytest.raises(ValueError, match="moe_apply_probs_on_input=True"):
        MoEBlazeExperts(m.E, config)


def test_refused_arguments():
    args = argparse.Namespace(use_megatron_fsdp=True, use_torch_fsdp2=True, moe_use_upcycling=True)
    args.optimizer = "muon"
    reasons = unsupported_arguments(args)
    assert [reason.split("=")[0] for reason in reasons] == [row.field for row in ARGUMENTS]
    assert unsupported_arguments(argparse.Namespace(optimizer="adam")) == []


FLAT = {"use_distributed_optimizer": True, "no_save_optim": None, "ckpt_format": "torch_dist"}
RESHARDABLE = {"dist_ckpt_optim_fully_reshardable": True}


@pytest.mark.parametrize(
    ("run", "saved", "refused"),
    [
        ({}, FLAT, True),
        ({}, FLAT | RESHARDABLE, False),
        ({}, FLAT | RESHARDABLE | {"ckpt_format": "torch"}, True),
        ({}, FLAT | {"no_save_optim": True}, False),
        ({}, FLAT | {"use_distributed_optimizer": False}, False),
        ({}, FLAT | {"moe_token_dispatcher_type": "alltoall"}, True),
        ({"no_load_optim": True}, FLAT, False),
        ({"use_distributed_optimizer": False}, FLAT, False),
        ({"num_experts": None}, FLAT, False),
        ({}, {}, False),
    ],
)
def test_flat_optimizer_state_of_other_experts_is_refused(run, saved, refused):
    """Megatron loads it without a word: of as many numbers, in other places."""
    defaults = {"num_experts": 8, "use_distributed_optimizer": True, "no_load_optim": None}
    saved = argparse.Namespace(**{"moe_token_dispatcher_type": "allgather"} | saved)
    for name in ("moeblaze", "alltoall", "allgather"):
        args = argparse.Namespace(**defaults | {"moe_token_dispatcher_type": name} | run)
        for ours, theirs in ((args, saved), (saved, args)):
            both = {"moe_token_dispatcher_type": ours.moe_token_dispatcher_type}
            there = {"moe_token_dispatcher_type": theirs.moe_token_dispatcher_type}
            reasons = unsupported_checkpoint(
                argparse.Namespace(**vars(args) | both), argparse.Namespace(**vars(saved) | there)
            )
            assert bool(reasons) == (refused and name == "moeblaze"), reasons
            assert not reasons or "--dist-ckpt-optim-fully-reshardable" in reasons[0]


@in_megatron
def test_install_again_changes_nothing():
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training import argument_utils, arguments

    from moeblaze_megatron.mcore import install

    name = "core_transformer_config_from_args"

    def taught():
        yield from (TransformerConfig.__post_init__, MoELayer.__init__)
        yield arguments.add_megatron_arguments
        # Up to 0.17 one module has it.
        yield from (getattr(x, name) for x in (arguments, argument_utils) if hasattr(x, name))

    before = list(taught())
    install.cache_clear()
    install()
    assert list(taught()) == before
    assert not any(hasattr(function.__wrapped__, "__wrapped__") for function in before)


@in_megatron
def test_untested_version_is_named():
    import megatron.core.package_info as info

    from moeblaze_megatron.mcore import install

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(info, "__version__", "0.99.1")
        install.cache_clear()
        with pytest.warns(UserWarning, match=r"megatron-core 0\.99\.1 .*0\.19"):
            install()


COMMAND_LINE = """
    --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1
    --max-position-embeddings 16 --num-experts 8 --swiglu --transformer-impl local
    --eval-interval 1 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 63
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-rope-fusion
    --no-masked-softmax-fusion --distributed-backend gloo --use-cpu-initialization
    --moe-token-dispatcher-type
"""


def parse(line):
    from megatron.training.arguments import parse_args, validate_args

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["pretrain", *COMMAND_LINE.split(), *line.split()])
        args = parse_args()
    validate_args(args)
    return args


@in_megatron
def test_command_line_reaches_the_config():
    from megatron.training.arguments import core_transformer_config_from_args

    args = parse("moeblaze --disable-bias-linear --moeblaze-workspace-mb 64")
    args.moeblaze_kernel_table = str(table.SHIPPED)
    config = core_transformer_config_from_args(args)
    table._named = None
    assert config.moe_token_dispatcher_type == "moeblaze"
    assert config.moeblaze_recompute_fc1 is config.moeblaze_check_routing is False
    assert config.activation_func_fp8_input_store is False
    assert config.moeblaze_workspace_mb == 64
    assert config.moeblaze_kernel_table == str(table.SHIPPED)
    args = parse("moeblaze --disable-bias-linear --moeblaze-recompute-fc1 --moeblaze-check-routing")
    config = core_transformer_config_from_args(args)
    assert config.moeblaze_recompute_fc1 is config.moeblaze_check_routing is True
    assert config.moeblaze_workspace_mb is config.moeblaze_kernel_table is None


@in_megatron
def test_flags_without_effect_are_named_once():
    """With a dispatcher that does not read them; the fp8 store is Megatron's own setting."""
    from megatron.training.arguments import core_transformer_config_from_args

    flags = "--moeblaze-recompute-fc1 --moeblaze-workspace-mb 9 --activation-func-fp8-input-store"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for dispatcher in ("alltoall", "moeblaze --moe-router-topk 2"):
            args = parse(f"{dispatcher} --disable-bias-linear {flags}")
            args.activation_func_fp8_input_store &= dispatcher == "alltoall"
            for _ in range(2):
                core_transformer_config_from_args(args)
    found = [line for line in said.getvalue().splitlines() if "without effect" in line]
    names = "--moeblaze-workspace-mb, --moeblaze-recompute-fc1"
    assert found == [f"without effect with alltoall: {names}"]


@pytest.mark.parametrize("dispatcher", ["moeblaze", "alltoall"])
@in_megatron
def test_flag_of_the_fp8_input_store(dispatcher):
    """Megatron's setting, which has no flag of Megatron's; it is for SwiGLU, as Megatron says."""
    from megatron.core.activations import squared_relu
    from megatron.training.arguments import core_transformer_config_from_args

    args = parse(f"{dispatcher} --disable-bias-linear --activation-func-fp8-input-store")
    assert core_transformer_config_from_args(args).activation_func_fp8_input_store is True
    with pytest.raises(ValueError, match="only for SwiGLU"):
        m.config(
            dispatcher,
            activation_func_fp8_input_store=True,
            activation_func=squared_relu,
            gated_linear_unit=False,
        )


@in_megatron
def test_fp8_input_store_and_recompute_are_refused_together():
    from megatron.training.arguments import core_transformer_config_from_args

    args = parse(
        "moeblaze --disable-bias-linear --activation-func-fp8-input-store --moeblaze-recompute-fc1"
    )
    with pytest.raises(ValueError, match=r"moeblaze_recompute_fc1=True: .* leave one of the two"):
        core_transformer_config_from_args(args)


@in_megatron
def test_command_line_reports_config_and_arguments_together():
    from megatron.training.arguments import core_transformer_config_from_args

    args = parse("moeblaze --moe-apply-probs-on-input --moeblaze-kernel-table none.json")
    args.optimizer = "muon"
    with pytest.raises(ValueError) as error:
        core_transformer_config_from_args(args)
    found = [line.strip() for line in str(error.value).splitlines()[1:]]
    starts = ("moe_apply_probs_on_input=", "optimizer=", "kernel table none.json: ")
    assert len(found) == 3 and all(map(str.startswith, found, starts)), found


@pytest.mark.parametrize("line", ["moeblase", "moeblaze --moeblaze-workspace-mb 0"])
@in_megatron
def test_command_line_refuses(line):
    with pytest.raises(SystemExit):
        parse(line)
