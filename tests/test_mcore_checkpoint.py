"""Checkpoints between moeblaze and Megatron's own experts, optimizer state included."""

from importlib.util import find_spec
from unittest import mock

import mcore_worker as m
import pytest
import torch
from mcore_worker import in_megatron

LAYERS, VOCABULARY, S, B = 2, 64, 8, 2
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class Trainer:
    """A GPT of two MoE layers with Megatron's DDP and optimizer, on random tokens."""

    def __init__(self, dispatcher, distributed=False, seed=1234, **fields):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        config = m.config(
            dispatcher,
            num_layers=LAYERS,
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=1e-2,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            **fields,
        )
        m.seed(seed)
        gpt = GPTModel(
            config, get_gpt_layer_local_spec(num_experts=m.E), VOCABULARY, S, pre_process=True
        )
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=distributed,
            overlap_param_gather=distributed,
        )
        for layer in gpt.decoder.layers:
            m.let_biases_train(layer.mlp.experts)
        self.gpt = gpt
        model = Float16Module(config, gpt) if config.bf16 else gpt
        self.model = DistributedDataParallel(config, ddp, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                clip_grad=1.0,
                use_distributed_optimizer=distributed,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
            ),
            [self.model],
        )

    def steps(self, first, last):
        """Trains on batches first .. last - 1; the losses and gradient norms."""
        return [self.step(batch) for batch in range(first, last)]

    def step(self, batch):
        generator = torch.Generator().manual_seed(batch)
        tokens = torch.randint(VOCABULARY, (B, S + 1), generator=generator)
        mask = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(
            tokens[:, :-1], torch.arange(S).expand(B, S), mask, labels=tokens[:, 1:]
        ).mean()
        torch.autograd.backward(loss)
        self.model.finish_grad_sync()
        successful, grad_norm, _ = self.optimizer.step()
        assert successful
        return torch.tensor([loss.item(), grad_norm])

    def sharded(self, is_loading, weights_only=False):
        metadata = dict(METADATA)
        model = self.gpt.sharded_state_dict(metadata=metadata)
        if weights_only:
            return {"model": model}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def save(self, path):
        from megatron.core import dist_checkpointing

        path.mkdir(exist_ok=True)
        dist_checkpointing.save(self.sharded(is_loading=False), path)

    def load(self, path, weights_only=False):
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self.sharded(True, weights_only), path)
        self.gpt.load_state_dict(state["model"])
        if not weights_only:
            self.optimizer.load_state_dict(state["optimizer"])

    def expert_tensors(self):
        layers = self.gpt.decoder.layers
        return [
            tensor for layer in layers for tensor in m.expert_tensors(layer.mlp.experts).values()
        ]


def assert_trains_alike(runs, expected, dtype):
    """Losses to 1e-4 and gradient norms to 1e-3 in fp32; a few roundings in bf16."""
    bounds = torch.tensor([1e-4, 1e-3])
    if dtype is torch.bfloat16:
        bounds = torch.full_like(bounds, 4 * torch.finfo(dtype).eps)
    assert ((runs - expected).abs() <= bounds * expected.abs()).all(), (runs, expected)


PAIRS = [("alltoall", "moeblaze"), ("moeblaze", "alltoall"), ("moeblaze", "moeblaze")]


@pytest.mark.parametrize(
    ("dtype", "bias"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["fp32", "bf16", "bf16, bias"],
)
@pytest.mark.parametrize(("saver", "loader"), PAIRS)
@in_megatron
def test_training_continues_from_a_checkpoint(saver, loader, dtype, bias, tmp_path):
    """Weights, master weights and moments arrive, and the losses go on as without a stop."""
    fields = {"params_dtype": dtype, "bf16": dtype is torch.bfloat16, "add_bias_linear": bias}
    trainer = Trainer(saver, **fields)
    trainer.steps(0, 3)
    trainer.save(tmp_path / "checkpoint")
    resumed = Trainer(loader, seed=99, **fields)
    resumed.load(tmp_path / "checkpoint")
    for ours, theirs in zip(resumed.expert_tensors(), trainer.expert_tensors(), strict=True):
        assert torch.equal(ours, theirs) and theirs.count_nonzero() > 0
    goes_on = torch.stack(resumed.steps(3, 6))
    expected = torch.stack(trainer.steps(3, 6))
    if saver == loader:
        assert torch.equal(goes_on, expected)
    else:
        assert_trains_alike(goes_on, expected, dtype)


class GroupedLinear(torch.nn.Module):
    """TEColumnParallelGroupedLinear's or TERowParallelGroupedLinear's parameters and their shards.

    In the place of the real ones, which need Transformer Engine: a weight and perhaps a bias for
    each expert, each with an extra state, in Megatron's format of a checkpoint without an expert
    axis in front.
    """

    def __init__(self, tensors, axes, experts):
        super().__init__()
        self.axes, self.ep, self.tp = axes, experts.ep_group, experts.tp_group
        self.dp = experts.dp_group
        self.local = experts.num_local_experts
        for kind, tensor in tensors.items():
            for e, value in enumerate(tensor):
                self.register_parameter(f"{kind}{e}", torch.nn.Parameter(value.clone()))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        entries, local = {}, self.local
        for e in range(local):
            own = {
                key.removesuffix(str(e)): parameter
                for key, parameter in self.named_parameters()
                if key in (f"weight{e}", f"bias{e}")
            }
            expert, head, offsets = self.ep.rank() * local + e, "", sharded_offsets
            if metadata.get("singleton_local_shards"):
                head = f"{expert}."
            else:
                axis = (len(sharded_offsets), expert, self.ep.size() * local)
                offsets = (*sharded_offsets, axis)
            found = make_sharded_tensors_for_checkpoint(
                own | {"_extra_state": None},
                f"{head}{prefix}",
                self.axes,
                offsets,
                tp_group=self.tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            for key, shard in found.items():
                shard.replica_id = (*shard.replica_id[:2], self.dp.rank())
                number = e or "" if key.endswith("_extra_state") else e
                entries[f"{prefix}{key.removeprefix(head + prefix)}{number}"] = shard
        return entries


def te_grouped_mlp(moe):
    """Megatron's TEGroupedMLP around such linears, with the weights of an MoE layer of ours."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    grouped, ours = TEGroupedMLP.__new__(TEGroupedMLP), moe.experts
    torch.nn.Module.__init__(grouped)
    grouped.config, grouped.num_local_experts = ours.config, ours.num_local_experts
    grouped.ep_group, grouped.tp_group = ours.ep_group, ours.tp_group
    tensors = m.expert_tensors(ours)
    for name, axes in (("linear_fc1", {"weight": 0, "bias": 0}), ("linear_fc2", {"weight": 1})):
        own = {"weight": tensors[name]}
        if f"{name} bias" in tensors:
            own["bias"] = tensors[f"{name} bias"]
        setattr(grouped, name, GroupedLinear(own, axes, ours))
    return grouped


def assert_same_shards(theirs, gate=True, singleton=False, **fields):
    """Every shard that "SequentialMLP" or "TEGroupedMLP" has, at the same place, and no other."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        apply_factories,
    )

    def shards(experts):
        metadata = {"singleton_local_shards": singleton}
        state = experts.sharded_state_dict("mlp.experts.", ((0, 1, 3),), metadata)
        apply_factories(state)
        found = {}
        for value in nested_values(state):
            place = (value.key, tuple(value.global_offset), tuple(value.global_shape))
            if isinstance(value, ShardedTensor):
                found[place] = (value.replica_id, tuple(value.local_shape), value.data)
            else:
                assert isinstance(value, ShardedObject) and value.data is None
                found[place] = (value.replica_id, None, None)
        return found

    def layer(dispatcher):
        moe = m.layer(dispatcher, gated_linear_unit=gate, **fields)
        return m.draw_biases(moe) if fields.get("add_bias_linear") else moe

    moe = layer("moeblaze")
    stock = te_grouped_mlp(moe) if theirs == "TEGroupedMLP" else layer("alltoall").experts
    ours, expected = shards(moe.experts), shards(stock)
    assert ours.keys() == expected.keys()
    for place, (replica_id, shape, data) in expected.items():
        assert ours[place][:2] == (replica_id, shape), place
        assert data is None or torch.equal(ours[place][2], data), place


@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("singleton", [False, True], ids=["expert axis", "expert in key"])
@pytest.mark.parametrize("theirs", ["SequentialMLP", "TEGroupedMLP"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@in_megatron
def test_same_keys_and_shapes(theirs, gate, singleton, bias):
    assert_same_shards(theirs, gate, singleton, add_bias_linear=bias)


@pytest.mark.parametrize(("saver", "loader"), PAIRS)
@in_megatron
def test_distributed_optimizer_goes_on_from_a_checkpoint(saver, loader, tmp_path):
    """Its state arrives where it belongs, saved as a tensor for each parameter.

    Megatron restores it with Apex's or Transformer Engine's Adam only. What it lacks with torch's,
    state before the first step and a step number for each parameter, is done here.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_all_but_step(self, parameter, tensors):
        set_states(self, parameter, {"step": None, **tensors})

    trainer = Trainer(saver, distributed=True)
    trainer.steps(0, 3)
    trainer.save(tmp_path / "checkpoint")
    resumed = Trainer(loader, distributed=True, seed=99)
    resumed.steps(0, 1)
    name = "_set_main_param_and_optimizer_states"
    with torch.no_grad(), mock.patch.object(DistributedOptimizer, name, set_all_but_step):
        resumed.load(tmp_path / "checkpoint")
    for optimizer in resumed.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            state["step"] = torch.tensor(3.0)
    goes_on, expected = (torch.stack(each.steps(3, 6)) for each in (resumed, trainer))
    assert_trains_alike(goes_on, expected, torch.float32)


@in_megatron
def test_distributed_optimizer_trains_and_saves(tmp_path):
    """With both overlaps, as alltoall does; its state lands under the same keys."""
    losses, keys = [], []
    for dispatcher in ("alltoall", "moeblaze"):
        from megatron.core import dist_checkpointing

        trainer = Trainer(dispatcher, distributed=True)
        losses.append(torch.stack(trainer.steps(0, 4)))
        trainer.save(tmp_path / dispatcher)
        tensors = dist_checkpointing.load_tensors_metadata(tmp_path / dispatcher)
        keys.append({key: tuple(tensor.global_shape) for key, tensor in tensors.items()})
    assert_trains_alike(*losses, torch.float32)
    assert keys[0] == keys[1]
    moment = "optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert keys[0][moment] == (LAYERS, m.E, 2 * m.F, m.H)


def te_layer(dispatcher, seed, **fields):
    """The MoE layer of Transformer Engine's spec. Its modules need a GPU to run, not to be made."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    config = m.config(dispatcher, moe_grouped_gemm=True, **fields)
    build = get_moe_module_spec(use_te=True, num_experts=m.E, moe_grouped_gemm=True)
    m.seed(seed)
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        moe = build(config=config)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_()
    return moe


@pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="needs Transformer Engine's own linears"
)
@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@in_megatron
def test_checkpoints_of_transformer_engine(tmp_path, gate, bias):
    """Distributed and plain, both ways, in the layer that its spec builds."""
    from megatron.core import dist_checkpointing

    fields = {"gated_linear_unit": gate, "add_bias_linear": bias}
    for names in (("alltoall", "moeblaze"), ("moeblaze", "alltoall")):
        source, *targets = (te_layer(names[i > 0], i, **fields) for i in range(3))
        want = m.expert_tensors(source.experts)
        (tmp_path / names[0]).mkdir()
        dist_checkpointing.save(source.sharded_state_dict("mlp."), tmp_path / names[0])
        found = dist_checkpointing.load(targets[0].sharded_state_dict("mlp."), tmp_path / names[0])
        states = (
            {key.removeprefix("mlp."): value for key, value in found.items()},
            source.state_dict(),
        )
        for target, state in zip(targets, states, strict=True):
            assert target.state_dict().keys() == source.state_dict().keys()
            target.load_state_dict(state, strict=True)
            got = m.expert_tensors(target.experts)
            assert got.keys() == want.keys()
            for name, weight in got.items():
                assert torch.equal(weight, want[name]), name


LAYOUTS = {
    "SequentialMLP": "local_experts.{}.{}.weight",
    "TEGroupedMLP": "{1}.weight{0}",
    "moeblaze": "{1}.weight",
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
@in_megatron
def test_plain_state_dict_of_any_layout_loads(layout, bias):
    source, target = (m.layer(add_bias_linear=bias).experts for _ in range(2))
    state = {"linear_fc1._extra_state": None, "local_experts.3.linear_fc2._extra_state": b""}
    for name, weight in m.expert_tensors(source).items():
        for e in range(m.E):
            value = weight if layout == "moeblaze" else weight[e]
            linear, _, kind = name.partition(" ")
            key = LAYOUTS[layout].format(e, linear)
            state[key.replace("weight", kind or "weight")] = value + 1
    target.load_state_dict(state)
    for name, weight in m.expert_tensors(target).items():
        assert torch.equal(weight, m.expert_tensors(source)[name] + 1)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@in_megatron
def test_plain_state_dict_is_sequential_mlps_both_ways(bias):
    """Its keys, its tensors; each loads the other's, strictly, in the whole layer."""
    ours, theirs = (m.layer(name, add_bias_linear=bias) for name in ("moeblaze", "alltoall"))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        loaded = ours.state_dict()[key]
        assert loaded is None if value is None else torch.equal(loaded, value), key
    for source, target in ((ours, theirs), (theirs, ours)):
        with torch.no_grad():
            for number, weight in enumerate(source.parameters()):
                weight.add_(1 + number)
        target.load_state_dict(source.state_dict(), strict=True)
        expected = m.expert_tensors(source.experts)
        for name, weight in m.expert_tensors(target.experts).items():
            assert torch.equal(weight, expected[name])


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@in_megatron
def test_plain_state_dict_in_the_place_of_te_grouped_mlp(bias):
    """Where Transformer Engine's spec would build TEGroupedMLP: the keys of its two linears."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from moeblaze_megatron.mcore import experts_class

    def experts():
        m.seed()
        grouped = experts_class(TEGroupedMLP)
        config = m.config(add_bias_linear=bias)
        return grouped(m.E, config, pg_collection=get_default_pg_collection())

    source, target = experts(), experts()
    state = {
        key: value if value is None else value + 1 for key, value in source.state_dict().items()
    }
    assert state.keys() == {
        f"{name}.{key}"
        for name in ("linear_fc1", "linear_fc2")
        for key in ("_extra_state", *(f"weight{e}" for e in range(m.E)))
    } | {f"linear_fc{i}.bias{e}" for i in (1, 2) for e in range(m.E) if bias}
    target.load_state_dict(state, strict=True)
    for name, weight in m.expert_tensors(target).items():
        assert torch.equal(weight, m.expert_tensors(source)[name] + 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("experts", [m.E - 1, m.E + 1])
@in_megatron
def test_plain_state_dict_with_another_number_of_experts_is_refused(layout, experts):
    """Not strictly either: Megatron repeats a failed load so, and trains what was not found."""
    moe = m.layer()
    state = {
        f"experts.{LAYOUTS[layout].format(e, name)}": weight[:1].expand(experts, -1, -1)
        if layout == "moeblaze"
        else weight[0]
        for name, weight in m.expert_tensors(moe.experts).items()
        for e in range(experts)
    }
    message = "size mismatch" if layout == "moeblaze" else f"not the parameters of {m.E} experts"
    with pytest.raises(RuntimeError, match=message):
        moe.load_state_dict(state, strict=False)


@pytest.mark.parametrize("bias", [False, True], ids=["lost", "missing"])
@in_megatron
def test_plain_state_dict_with_or_without_biases_is_refused(bias):
    """Biases that a checkpoint has and the model not, or the other way round."""
    source, target = (m.layer(add_bias_linear=has) for has in (not bias, bias))
    with pytest.raises(RuntimeError, match=f"not the parameters of {m.E} experts"):
        target.load_state_dict(source.state_dict(), strict=False)


@in_megatron
def test_plain_state_dict_without_experts_is_for_the_caller_to_allow():
    moe = m.layer()
    state = {"router.weight": moe.router.weight.detach()}
    assert "experts.linear_fc1.weight" in moe.load_state_dict(state, strict=False).missing_keys
    with pytest.raises(RuntimeError, match=r"Missing.*experts\.linear_fc1\.weight"):
        moe.load_state_dict(state)
