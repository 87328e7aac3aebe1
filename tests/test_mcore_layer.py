"""Megatron's MoE layer with moeblaze beside its own dispatchers: weights, results, gradients."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import mcore_worker as m
import pytest
import torch
import torch.nn.functional as F
from mcore_worker import in_megatron, in_megatron_on_gpu

S, B = 7, 3


@dataclass(frozen=True)
class Case:
    why: str
    fields: dict = field(default_factory=dict)

    def __str__(self):
        return self.why


ON_INPUT = {
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_apply_probs_on_input": True,
}

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
    Case(
        "pads, keeping the most likely",
        {
            "moe_expert_capacity_factor": 0.75,
            "moe_token_drop_policy": "probs",
            "moe_pad_expert_input_to_capacity": True,
        },
    ),
    Case(
        "pads, keeping the first",
        {
            "moe_expert_capacity_factor": 0.75,
            "moe_token_drop_policy": "position",
            "moe_pad_expert_input_to_capacity": True,
        },
    ),
    Case("router in fp32", {"moe_router_dtype": "fp32"}),
    Case("router in fp64", {"moe_router_dtype": "fp64"}),
    Case("sigmoid scores", {"moe_router_score_function": "sigmoid"}),
    Case(
        "expert bias chooses, scores weigh",
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    ),
    Case("groups of experts", {"moe_router_num_groups": 4, "moe_router_group_topk": 1}),
    Case(
        "scaled softmax over all experts",
        {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    ),
    Case("geglu", {"activation_func": F.gelu}),
    Case("silu", {"gated_linear_unit": False}),
    Case("gelu", {"activation_func": F.gelu, "gated_linear_unit": False}),
    Case("squared relu", {"activation_func": "squared_relu", "gated_linear_unit": False}),
    Case("fused activation of the others", {"bias_activation_fusion": True}),
    Case("bias", {"add_bias_linear": True}),
    Case("bias without a gate", {"add_bias_linear": True, "gated_linear_unit": False}),
    Case("quick geglu", {"activation_func": "quick_gelu"}),
    Case("quick geglu, clamp, offset, bias", m.GPT_OSS),
    Case("the same, fused by the others", {**m.GPT_OSS, "bias_activation_fusion": True}),
    Case("clamp of swiglu", {"activation_func_clamp_value": 0.1}),
    Case("offset of geglu", {"activation_func": F.gelu, "glu_linear_offset": 0.5}),
    Case(
        "clamp and offset without a gate",
        {
            "gated_linear_unit": False,
            "activation_func_clamp_value": 0.1,
            "glu_linear_offset": 0.5,
            "activation_func": F.gelu,
        },
    ),
    Case("probs on input", ON_INPUT),
    Case("probs on input, bias", {**ON_INPUT, "add_bias_linear": True}),
    Case(
        "probs on input, drops the last",
        {**ON_INPUT, "moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    ),
    Case(
        "padded capacity, bias",
        {
            "add_bias_linear": True,
            "moe_expert_capacity_factor": 0.75,
            "moe_pad_expert_input_to_capacity": True,
        },
    ),
    Case("ffn of its own size", {"ffn_hidden_size": 64}),
]


def inputs(seed=0, device="cpu", dtype=torch.float32):
    """hidden_states and grad_output [S, B, H]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, S, B, m.H, generator=generator).to(device, dtype).unbind()


def closeness(value, reference):
    return (value.double() - reference.double()).norm().item()


def assert_same_weights(layer, stock):
    expected = m.expert_tensors(stock.experts)
    for name, weight in m.expert_tensors(layer.experts).items():
        assert weight.dtype is expected[name].dtype
        assert torch.equal(weight, expected[name]), f"{name} starts otherwise than Megatron's"


def assert_as_close(ours, stock, reference, dtype):
    """No further from the fp64 reference than twice what Megatron's own are, and half an ulp."""
    for name, expected in reference.items():
        assert ours[name].shape == expected.shape
        off = closeness(ours[name], expected)
        lost = max(closeness(results[name], expected) for results in stock)
        half_ulp = expected.norm().item() * torch.finfo(dtype).eps / 2
        assert off <= 2 * lost + half_ulp, f"{name}: off by {off}, Megatron by {lost}"


def empty_experts(moe, experts):
    """Makes the router avoid experts, for tokens whose hidden states are positive."""
    with torch.no_grad():
        moe.router.weight[experts] = -100.0


def layer_of(dispatcher, fields):
    layer = m.layer(dispatcher, **fields)
    return m.draw_biases(layer) if fields.get("add_bias_linear") else layer


@pytest.mark.parametrize("case", CASES, ids=str)
@in_megatron
def test_layer_agrees_with_megatron(case):
    fields = case.fields
    hidden_states, grad_output = inputs()
    layers = {name: layer_of(name, fields) for name in ("alltoall", "allgather", "moeblaze")}
    assert_same_weights(layers["moeblaze"], layers["alltoall"])
    wide = {**fields, "moe_router_dtype": None, "bias_activation_fusion": False}
    reference = m.forward_backward(
        layer_of("alltoall", wide).double(), hidden_states.double(), grad_output.double()
    )
    results = {
        name: m.forward_backward(layer, hidden_states, grad_output)
        for name, layer in layers.items()
    }
    stock = [results["alltoall"], results["allgather"]]
    assert_as_close(results["moeblaze"], stock, reference, torch.float32)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("gate", [False, True])
@in_megatron
def test_overlapped_shared_experts_change_nothing(gate, recompute):
    """On a CPU nothing runs beside anything: this is the order of the calls, and their sum."""
    fields = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": gate}
    if recompute:
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    layers = [m.layer(**fields, moe_shared_expert_overlap=overlap) for overlap in (False, True)]
    assert [layer.token_dispatcher.shared_experts is not None for layer in layers] == [False, True]
    plain, overlapped = ([m.forward_backward(moe, *inputs())] for moe in layers)
    for moe, results in zip(layers, (plain, overlapped), strict=True):
        results.append({name: p.grad for name, p in moe.shared_experts.named_parameters()})
    for ours, expected in zip(overlapped, plain, strict=True):
        assert ours.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(ours[name], expected[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cpu", [True, False], ids=["cpu init", "device init"])
@in_megatron
def test_weights_start_as_sequential_mlp(dtype, cpu):
    """Bit-equal, and the random generator is left in the same state."""
    layers, after = [], []
    for dispatcher in ("alltoall", "moeblaze"):
        layers.append(m.layer(dispatcher, params_dtype=dtype, use_cpu_initialization=cpu))
        after.append(torch.rand(4))
    assert_same_weights(layers[1], layers[0])
    assert layers[1].experts.linear_fc1.weight.dtype is dtype
    assert torch.equal(*after)


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


@in_megatron
def test_experts_take_the_latent_size():
    """Megatron projects tokens to it before they reach the dispatcher."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from moeblaze_megatron import index_lists_from_routing_map
    from moeblaze_megatron.mcore import MoEBlazeExperts

    config = m.config()
    config.moe_latent_size = m.H // 2
    experts = MoEBlazeExperts(m.E, config, pg_collection=get_default_pg_collection())
    assert experts.linear_fc1.weight.shape == (m.E, 2 * m.F, m.H // 2)
    assert experts.linear_fc2.weight.shape == (m.E, m.H // 2, m.F)
    routing_map = torch.arange(m.E).expand(S, m.E) < 2
    lists = index_lists_from_routing_map(routing_map, 2)
    output, _ = experts(torch.randn(S, m.H // 2), lists, routing_map.float())
    assert output.shape == (S, m.H // 2) and output.count_nonzero() > 0


@in_megatron
def test_biases_start_at_zero():
    """As Megatron's, and the weights beside them start as Megatron's."""
    ours, stock = (m.layer(name, add_bias_linear=True) for name in ("moeblaze", "alltoall"))
    assert_same_weights(ours, stock)
    assert ours.experts.linear_fc1.bias.shape == (m.E, 2 * m.F)
    assert ours.experts.linear_fc2.bias.shape == (m.E, m.H)
    for name in ("linear_fc1", "linear_fc2"):
        assert getattr(ours.experts, name).bias.count_nonzero() == 0


@in_megatron
def test_probs_on_input_of_received_rows():
    """Beside `token_expert_indices`, as expert parallelism has them: the same as of its own."""
    from moeblaze_megatron import index_lists_from_topk
    from moeblaze_megatron.mcore.experts import probs_on_input

    ids = torch.tensor([[2], [-1], [0]])
    x, dense = torch.randn(3, 4).bfloat16(), torch.rand(3, 5)
    lists = index_lists_from_topk(ids, 5)
    topk = dense.gather(1, ids.clamp(min=0))
    for probs, is_dense in ((dense, True), (topk, False)):
        out, ones = probs_on_input(x, probs, lists, dense=is_dense)
        assert out.dtype is x.dtype and torch.equal(out, (topk * x.float()).bfloat16())
        assert torch.equal(ones, torch.ones(3, 1))


@pytest.mark.parametrize("gate", [True, False])
@in_megatron
def test_parameters_are_marked_as_megatrons(gate):
    """All weights, and fc1's bias."""
    fields = {"gated_linear_unit": gate, "add_bias_linear": True}
    ours = m.layer("moeblaze", **fields).experts
    stock = m.layer("alltoall", **fields).experts.local_experts[0]
    for name in ("linear_fc1", "linear_fc2"):
        weight, expected = getattr(ours, name).weight, getattr(stock, name).weight
        for attribute in ("allreduce", "tensor_model_parallel", "partition_stride"):
            assert getattr(weight, attribute) == getattr(expected, attribute), attribute
        assert weight.partition_dim == expected.partition_dim + 1
        bias, expected = getattr(ours, name).bias, getattr(stock, name).bias
        assert bias.allreduce == expected.allreduce
        # Of fc2 too, so that no rank of TP is left out of the norm; and not reduced over TP again.
        assert bias.tensor_model_parallel and not hasattr(bias, "sequence_parallel")
        if name == "linear_fc1":
            assert bias.partition_stride == expected.partition_stride
            assert bias.partition_dim == expected.partition_dim + 1


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
def test_a_kernel_table_is_checked_when_a_layer_is_built():
    config = m.config()
    config.moeblaze_kernel_table = "none.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m, "config", lambda *args, **fields: config)
        with pytest.raises(ValueError, match=r"kernel table none\.json: .*No such file"):
            m.layer()
        config.moeblaze_kernel_table = None
        m.layer()


@in_megatron
def test_a_layer_without_a_kernel_table_leaves_the_one_in_use():
    from moeblaze_megatron.ops import table

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "_named", None)
        file = Path(folder) / "kernel_table.json"
        table.save({table.Key("copy", "any", 32): table.Copy(7, 7, 7)}, file, "a test")
        table.use(file)
        m.layer()
        assert table.configuration("copy", torch.empty(1), 64, 64) == table.Copy(7, 7, 7)
    table.use(None)
    assert table.configuration("copy", torch.empty(1), 64, 64) != table.Copy(7, 7, 7)


@in_megatron
def test_settings_of_its_own_reach_the_operator():
    plain, changed = m.layer(), m.layer()
    changed.config.moeblaze_workspace_mb = 1
    changed.config.moeblaze_recompute_fc1 = True
    seen = []
    from moeblaze_megatron.mcore import experts

    with pytest.MonkeyPatch.context() as patch:
        operator = experts.moeblaze_experts

        def spy(*arguments, **keywords):
            seen.append((keywords.get("workspace_bytes"), keywords["recompute_fc1"]))
            return operator(*arguments, **keywords)

        patch.setattr(experts, "moeblaze_experts", spy)
        ours = [m.forward_backward(moe, *inputs()) for moe in (plain, changed)]
    assert seen == [(None, False), (2**20, True)]
    for name, expected in ours[0].items():
        assert torch.equal(ours[1][name], expected), name


@in_megatron
def test_fp8_input_store_reaches_the_operator():
    """fc1_output [R, 2F] is saved in 8 bits, and in 8 bits only; the output is the same."""
    plain, stored = (m.layer(activation_func_fp8_input_store=on) for on in (False, True))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: (saved.append(s), s)[1], lambda s: s):
        ours = [m.forward_backward(moe, *inputs()) for moe in (plain, stored)]
    wide = [s.dtype for s in saved if s.shape[-1] == 2 * m.F and s.dim() == 2]
    assert wide == [torch.float32, torch.float8_e4m3fn]
    assert torch.equal(ours[1]["output"], ours[0]["output"])
    assert not torch.equal(ours[1]["hidden_states"], ours[0]["hidden_states"])


TENSOR_PARALLEL = """
import torch
import mcore_worker as m
from megatron.core import parallel_state
from moeblaze_megatron.mcore import cpu_mode, install

cpu_mode.install_cpu_mode()
install()
torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(
    tensor_model_parallel_size=2, expert_tensor_parallel_size=1
)
fields = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
fields |= {"sequence_parallel": True, "moe_router_load_balancing_type": "aux_loss"}
fields["moe_aux_loss_coeff"] = 0.5
torch.manual_seed(torch.distributed.get_rank())
batch = torch.randn(2, 6, 3, m.H).unbind()
layers = [m.layer(dispatcher, **fields) for dispatcher in ("alltoall", "moeblaze")]
stock, ours = (m.forward_backward(layer, *batch) for layer in layers)
for name, expected in stock.items():
    torch.testing.assert_close(ours[name], expected)
stock = layers[0].experts.local_experts[0].linear_fc1.weight
assert layers[1].experts.linear_fc1.weight.allreduce == stock.allreduce
"""


def test_tensor_parallel_attention_beside_whole_experts(tmp_path, plain_env):
    """TP 2 with sequence parallelism and expert TP 1: each rank has its tokens, all experts."""
    script = tmp_path / "tensor_parallel.py"
    script.write_text(TENSOR_PARALLEL)
    path = [str(Path(__file__).parent), *(entry for entry in sys.path if entry)]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, "-m", *torchrun, str(script)],
        env={**plain_env, "PYTHONPATH": ":".join(path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@in_megatron_on_gpu
def test_layer_agrees_with_megatron_on_the_gpu():
    """Weights made on the GPU start equal, and bf16 loses no more than twice what Megatron's does.

    Dispatch and experts run without a host synchronisation, and a second run gives the same bits.
    """
    fields = {"use_cpu_initialization": False, "params_dtype": torch.bfloat16, "bf16": True}
    fields |= {"moe_router_dtype": "fp32", "moe_router_load_balancing_type": "aux_loss"}
    fields["moe_aux_loss_coeff"] = 0.5
    batch = inputs(device="cuda", dtype=torch.bfloat16)
    layers = {name: m.layer(name, **fields) for name in ("alltoall", "allgather", "moeblaze")}
    assert_same_weights(layers["moeblaze"], layers["alltoall"])
    wide = m.layer("alltoall", **{**fields, "moe_router_dtype": None}).double()
    reference = m.forward_backward(wide, *(tensor.double() for tensor in batch))
    results = {name: m.forward_backward(layer, *batch) for name, layer in layers.items()}
    stock = [results["alltoall"], results["allgather"]]
    assert_as_close(results["moeblaze"], stock, reference, torch.bfloat16)

    moe = layers["moeblaze"]
    moe.zero_grad()
    hidden_states = batch[0].clone().requires_grad_()
    probs, routing_map = moe.route(hidden_states)
    torch.cuda.set_sync_debug_mode("error")
    try:
        x, probs = moe.preprocess(hidden_states, probs, routing_map)
        output, _ = moe.routed_experts_compute(*moe.dispatch(x, probs))
        output = moe.postprocess(moe.combine(output), None)
        torch.autograd.backward(output, batch[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, grad in m.expert_tensors(moe.experts, "grad").items():
        assert all(torch.equal(grad[e], results["moeblaze"][f"{name}[{e}]"]) for e in range(m.E))


@in_megatron_on_gpu
def test_check_routing_on_the_gpu():
    moe = m.layer(use_cpu_initialization=False)
    moe.token_dispatcher.topk = 1
    moe(inputs(device="cuda")[0])
    moe.config.moeblaze_check_routing = True
    with pytest.raises(ValueError, match="2 experts, but topk=1"):
        moe(inputs(device="cuda")[0])
