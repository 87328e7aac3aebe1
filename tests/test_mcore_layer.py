"""Megatron's MoE layer with moeblaze beside its own dispatchers: weights, results, gradients."""

from dataclasses import dataclass, field

import mcore_worker as m
import pytest
import torch
import torch.nn.functional as F
from mcore_worker import in_megatron

S, B = 7, 3


@dataclass(frozen=True)
class Case:
    why: str
    fields: dict = field(default_factory=dict)

    def __str__(self):
        return self.why


def squared_relu():
    from megatron.core.activations import squared_relu

    return squared_relu


CASES = [
    Case("plain"),
    Case("one expert per token", {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
    Case("every expert for every token", {"moe_router_topk": m.E}),
    Case(
        "aux loss rides on probs",
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5},
    ),
    Case(
        "aux loss per sequence",
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5},
    ),
    Case("z loss", {"moe_z_loss_coeff": 0.5}),
    Case("shared expert", {"moe_shared_expert_intermediate_size": 32}),
    Case(
        "drops the least likely",
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "probs"},
    ),
    Case(
        "drops the last",
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    ),
    Case("router in fp32", {"moe_router_dtype": "fp32"}),
    Case("router in fp64", {"moe_router_dtype": "fp64"}),
    Case("sigmoid scores", {"moe_router_score_function": "sigmoid"}),
    Case("geglu", {"activation_func": F.gelu}),
    Case("silu", {"gated_linear_unit": False}),
    Case("gelu", {"activation_func": F.gelu, "gated_linear_unit": False}),
    Case("squared relu", {"activation_func": squared_relu, "gated_linear_unit": False}),
    Case("fused activation of the others", {"bias_activation_fusion": True}),
    Case("ffn of its own size", {"ffn_hidden_size": 64}),
]


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, S, B, m.H, generator=generator).unbind()


def closeness(value, reference):
    return (value.double() - reference.double()).norm().item()


def empty_experts(moe, experts):
    """Makes the router avoid experts, for tokens whose hidden states are positive."""
    with torch.no_grad():
        moe.router.weight[experts] = -100.0


def fields_of(case):
    fields = dict(case.fields)
    if fields.get("activation_func") is squared_relu:
        fields["activation_func"] = squared_relu()
    return fields


@pytest.mark.parametrize("case", CASES, ids=str)
@in_megatron
def test_layer_agrees_with_megatron(case):
    """No further from fp64 than twice what Megatron's dispatchers are, and half an ulp."""
    fields = fields_of(case)
    hidden_states, grad_output = inputs()
    layers = {name: m.layer(name, **fields) for name in ("alltoall", "allgather", "moeblaze")}
    stock = m.expert_tensors(layers["alltoall"].experts)
    for name, weight in m.expert_tensors(layers["moeblaze"].experts).items():
        assert torch.equal(weight, stock[name]), f"{name} starts otherwise than Megatron's"
    wide = {**fields, "moe_router_dtype": None, "bias_activation_fusion": False}
    reference = m.forward_backward(
        m.layer("alltoall", **wide).double(), hidden_states.double(), grad_output.double()
    )
    results = {
        name: m.forward_backward(layer, hidden_states, grad_output)
        for name, layer in layers.items()
    }
    for name, expected in reference.items():
        lost = max(closeness(results[d][name], expected) for d in ("alltoall", "allgather"))
        ours = closeness(results["moeblaze"][name], expected)
        half_ulp = expected.norm().item() * torch.finfo(torch.float32).eps / 2
        assert ours <= 2 * lost + half_ulp, f"{name}: off by {ours}, Megatron by {lost}"
        assert results["moeblaze"][name].shape == results["alltoall"][name].shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cpu", [True, False], ids=["cpu init", "device init"])
@in_megatron
def test_weights_start_as_sequential_mlp(dtype, cpu):
    """Cases of the A/B run: the generator is left in the same state too."""
    after = []
    for dispatcher in ("alltoall", "moeblaze"):
        moe = m.layer(dispatcher, params_dtype=dtype, use_cpu_initialization=cpu)
        after.append((m.expert_tensors(moe.experts), torch.rand(4)))
    (stock, stock_rand), (ours, our_rand) = after
    for name, weight in ours.items():
        assert weight.dtype is dtype
        assert torch.equal(weight, stock[name])
        assert weight.float().std() > 0
    assert torch.equal(our_rand, stock_rand)


@in_megatron
def test_weights_start_as_te_grouped_mlp():
    """All fc1, then all fc2, as TEGroupedMLP makes its linears."""
    import functools

    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from moeblaze_megatron.mcore import MoEBlazeExperts, experts_class

    assert experts_class(functools.partial(SequentialMLP, submodules=None)) is MoEBlazeExperts
    config, groups = m.config(), get_default_pg_collection()
    m.seed()
    experts = experts_class(functools.partial(TEGroupedMLP))(
        m.E, config, pg_collection=groups, name="experts"
    )
    m.seed()
    common = {"config": config, "bias": False, "skip_bias_add": True, "is_expert": True}
    common["tp_group"] = groups.expt_tp
    fc1 = [
        ColumnParallelLinear(
            m.H, 2 * m.F, init_method=config.init_method, gather_output=False, stride=2, **common
        ).weight
        for _ in range(m.E)
    ]
    fc2 = [
        RowParallelLinear(
            m.F, m.H, init_method=config.output_layer_init_method, input_is_parallel=True, **common
        ).weight
        for _ in range(m.E)
    ]
    assert torch.equal(experts.linear_fc1.weight, torch.stack(fc1))
    assert torch.equal(experts.linear_fc2.weight, torch.stack(fc2))


@pytest.mark.parametrize("gate", [True, False])
@in_megatron
def test_parameters_are_marked_as_megatrons(gate):
    ours = m.layer("moeblaze", gated_linear_unit=gate).experts
    stock = m.layer("alltoall", gated_linear_unit=gate).experts.local_experts[0]
    for name in ("linear_fc1", "linear_fc2"):
        weight, expected = getattr(ours, name).weight, getattr(stock, name).weight
        for attribute in ("allreduce", "tensor_model_parallel", "partition_stride"):
            assert getattr(weight, attribute) == getattr(expected, attribute), attribute
        assert weight.partition_dim == expected.partition_dim + 1


@pytest.mark.parametrize("dispatcher", ["alltoall", "moeblaze"])
@in_megatron
def test_expert_without_tokens_has_a_zero_gradient(dispatcher):
    """Seven of eight experts empty, on memory that was full of NaN (cases 2, 13 and 14)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        moe = m.layer(dispatcher, moe_router_topk=1, moe_router_pre_softmax=True)
        empty_experts(moe, [0, 1, 2, 4, 5, 6, 7])
        hidden_states, grad_output = inputs()
        results = m.forward_backward(moe, hidden_states.abs(), grad_output)
    finally:
        torch.use_deterministic_algorithms(False)
    for name in ("linear_fc1", "linear_fc2"):
        for e in range(m.E):
            grad = results[f"{name}[{e}]"]
            assert grad.isfinite().all()
            assert (grad.count_nonzero() > 0) == (e == 3)


@in_megatron
def test_no_tokens():
    """From dispatch on, since Megatron's own router cannot view zero tokens as logits."""
    moe = m.layer()
    hidden_states = torch.zeros(0, B, m.H, requires_grad=True)
    probs = torch.zeros(0, m.E, requires_grad=True)
    x, probs_out = moe.preprocess(hidden_states, probs, torch.zeros(0, m.E, dtype=torch.bool))
    output, _ = moe.routed_experts_compute(*moe.dispatch(x, probs_out))
    output = moe.postprocess(moe.combine(output), None)
    torch.autograd.backward(output, torch.zeros_like(output))
    assert output.shape == hidden_states.grad.shape == hidden_states.shape
    assert probs.grad.shape == probs.shape
    for grad in m.expert_tensors(moe.experts, "grad").values():
        assert grad.count_nonzero() == 0


@pytest.mark.parametrize("router", ["fp32", "fp64"])
@in_megatron
def test_probs_keep_their_dtype(router):
    """bf16 tokens beside fp32 or fp64 probs, up to the operator (case 31)."""
    moe = m.layer(moe_router_dtype=router, params_dtype=torch.bfloat16, bf16=True)
    seen = []

    def look(module, arguments):
        x, _, probs = arguments
        seen.append((x.dtype, probs.dtype))
        probs.register_hook(lambda grad: seen.append(grad.dtype))

    moe.experts.register_forward_pre_hook(look)
    hidden_states, grad_output = (tensor.bfloat16() for tensor in inputs())
    results = m.forward_backward(moe, hidden_states, grad_output)
    expected = {"fp32": torch.float32, "fp64": torch.float64}[router]
    assert seen == [(torch.bfloat16, expected), expected]
    assert results["output"].dtype is torch.bfloat16
    assert results["router"].count_nonzero() > 0


@in_megatron
def test_nan_comes_out_as_nan():
    hidden_states, _ = inputs()
    hidden_states[2, 1, 5] = float("nan")
    output, _ = m.layer()(hidden_states)
    expected = torch.zeros(S, B, dtype=torch.bool)
    expected[2, 1] = True
    assert torch.equal(output.isnan().any(-1), expected)


def count_tokens(moe):
    """Megatron's counter of tokens per expert, which its expert-bias update reads."""
    return moe.router.local_tokens_per_expert


@pytest.mark.parametrize("ties", [False, True], ids=["", "all logits equal"])
@in_megatron
def test_recompute_changes_nothing(ties):
    """Same lists, loss and gradients, and experts' load counted once (cases 10 and 19)."""
    fields = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.5,
    }
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    runs = []
    for extra in ({}, recompute):
        moe = m.layer(**fields, **extra)
        assert moe.moe_layer_recompute == bool(extra)
        if ties:
            torch.nn.init.zeros_(moe.router.weight)
        lists, builder = [], moe.token_dispatcher.dispatch_postprocess

        def record(*arguments, lists=lists, builder=builder):
            x, index_lists, probs = builder(*arguments)
            lists.append(index_lists)
            return x, index_lists, probs

        moe.token_dispatcher.dispatch_postprocess = record
        runs.append((m.forward_backward(moe, *inputs()), count_tokens(moe), lists))
    (kept, kept_tokens, _), (again, again_tokens, (first, second)) = runs
    for name, value in kept.items():
        assert torch.equal(value, again[name]), name
    assert torch.equal(kept_tokens, again_tokens)
    assert torch.equal(first.token_index_map, second.token_index_map)
    assert kept_tokens.sum() == S * B * 2


@in_megatron
def test_two_forwards_before_their_backwards():
    """As a pipeline stage runs: the layer must not remember the last forward only."""
    batches = [inputs(seed) for seed in (1, 2)]
    moe = m.layer()
    alone = [m.forward_backward(moe, *batch)["hidden_states"] for batch in batches]
    expected = {name: grad.clone() for name, grad in m.expert_tensors(moe.experts, "grad").items()}
    moe = m.layer()
    leaves = [hidden_states.clone().requires_grad_() for hidden_states, _ in batches]
    outputs = [moe(leaf)[0] for leaf in leaves]
    for output, (_, grad_output) in zip(outputs, batches, strict=True):
        torch.autograd.backward(output, grad_output)
    for leaf, grad in zip(leaves, alone, strict=True):
        assert torch.equal(leaf.grad, grad)
    for name, grad in m.expert_tensors(moe.experts, "grad").items():
        assert torch.equal(grad, expected[name]), name


@in_megatron
def test_gradient_accumulation_fusion():
    """Added into main_grad, with a placeholder for DDP's hooks."""
    plain = m.layer()
    m.forward_backward(plain, *inputs())
    fused = m.layer(gradient_accumulation_fusion=True)
    before = {}
    for name in ("linear_fc1", "linear_fc2"):
        weight = getattr(fused.experts, name).weight
        before[name] = torch.randn_like(weight)
        weight.main_grad, weight.grad_added_to_main_grad = before[name].clone(), False
    m.forward_backward(fused, *inputs())
    for name, grad in m.expert_tensors(plain.experts, "grad").items():
        weight = getattr(fused.experts, name).weight
        assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
        assert torch.equal(weight.main_grad, before[name] + grad)


@in_megatron
def test_owners_of_weights_are_called():
    """DDP waits for a gathered parameter in a forward pre-hook of the module that owns it."""
    experts, called = (moe := m.layer()).experts, []
    for name, module in experts.named_modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda module, args, name=name: called.append(name))
    moe(inputs()[0])
    assert called == ["linear_fc1", "linear_fc2"]


@in_megatron
def test_more_experts_than_topk_are_refused():
    moe = m.layer()
    moe.token_dispatcher.topk = 1
    with pytest.raises(ValueError, match="2 experts, but topk=1"):
        moe(inputs()[0])


@in_megatron
def test_workspace_reaches_the_operator():
    whole, sliced = m.layer(), m.layer()
    sliced.config.moeblaze_workspace_mb = 1
    seen = []
    from moeblaze_megatron.mcore import experts

    with pytest.MonkeyPatch.context() as patch:
        operator = experts.moeblaze_experts

        def spy(*arguments, **keywords):
            seen.append(keywords.get("workspace_bytes"))
            return operator(*arguments, **keywords)

        patch.setattr(experts, "moeblaze_experts", spy)
        outputs = [moe(inputs()[0])[0] for moe in (whole, sliced)]
    assert seen == [None, 2**20]
    assert torch.equal(*outputs)
