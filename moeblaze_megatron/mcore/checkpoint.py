"""Checkpoints interchangeable with Megatron's other experts, from one parameter of all experts.

E experts on this rank, H hidden size, F ffn hidden size of one expert on this rank.
"""

import re

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size

LINEARS = ("linear_fc1", "linear_fc2")
# Keys of an expert's parameters in the plain state_dict of SequentialMLP and of TEGroupedMLP.
SEQUENTIAL, GROUPED = "local_experts.{e}.{name}.{kind}", "{name}.{kind}{e}"


def _place(
    key: str,
    e: int,
    name: str,
    sharded_offsets: tuple,
    metadata: dict,
    experts: torch.nn.Module,
) -> tuple[str, tuple]:
    """Key and leading offsets of local expert e, whose number is in the one or in the other."""
    E = experts.num_local_experts
    first, num_experts = get_pg_rank(experts.ep_group) * E, get_pg_size(experts.ep_group) * E
    if metadata.get("singleton_local_shards", False):
        head, _, tail = key.rpartition(name)
        return f"{head}{first + e}.{name}{tail}", tuple(sharded_offsets)
    return key, (*sharded_offsets, (len(sharded_offsets), first + e, num_experts))


def sharded_expert_parameter(
    parameter: torch.nn.Parameter,
    kind: str,
    stride: int,
    name: str,
    prefix: str,
    sharded_offsets: tuple,
    metadata: dict,
    experts: torch.nn.Module,
) -> ShardedTensorFactory:
    """The entry of a linear's weight or bias in `sharded_state_dict`.

    One factory holds the parameter of all experts, since Megatron's optimizers find their state's
    layout by the parameter's identity; it takes parameter, master copy and moments apart into one
    tensor per expert, and per half of a gated fc1 so that expert TP reshards both.

    Args:
        parameter: [E, 2F, H], [E, F, H] (fc1) or [E, H, F] (fc2); a bias lacks the last.
        kind: "weight" or "bias".
        stride: 2 for a gated fc1, else 1.
        name: "linear_fc1" or "linear_fc2".
        sharded_offsets: (axis, offset, fragments) of the axes in front, as Megatron passes them.
        metadata: Megatron's; `singleton_local_shards` puts experts in keys, not in an axis.
        experts: the MoEBlazeExperts, for its groups.
    """
    tp_rank, tp_size = get_pg_rank(experts.tp_group), get_pg_size(experts.tp_group)
    dp_rank = get_pg_rank(experts.dp_group)
    singleton = metadata.get("singleton_local_shards", False)
    partitioned = getattr(parameter, "tensor_model_parallel", False)

    @torch.no_grad()
    def build(
        key: str, tensor: torch.Tensor, replica_id: tuple, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        """[E, ...] -> one tensor per expert and half."""
        shards = []
        for e in range(experts.num_local_experts):
            expert_key, leading = _place(key, e, name, sharded_offsets, metadata, experts)
            for half, piece in enumerate(tensor[e].chunk(stride)):
                if singleton and stride == 2:
                    piece_key, split = expert_key + ("_w", "_v")[half], (tp_rank, tp_size)
                else:
                    piece_key, split = expert_key, (half * tp_size + tp_rank, stride * tp_size)
                axes = list(leading)
                if partitioned:
                    axes.append((len(leading) + parameter.partition_dim - 1, *split))
                shards.append(
                    ShardedTensor.from_rank_offsets(
                        piece_key,
                        piece,
                        *axes,
                        replica_id=replica_id,
                        prepend_axis_num=len(leading),
                    )
                )
        return shards

    def merge(pieces: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(pieces).view(parameter.shape)

    key = f"{prefix}experts.{name}.{kind}"
    return ShardedTensorFactory(key, parameter, build, merge, (0, 0, dp_rank))


def extra_states(
    name: str, prefix: str, sharded_offsets: tuple, metadata: dict, experts: torch.nn.Module
) -> dict[str, ShardedObject]:
    """`_extra_state` objects, always None here, for which Transformer Engine's linears ask."""
    tp_rank, dp_rank = get_pg_rank(experts.tp_group), get_pg_rank(experts.dp_group)
    entries = {}
    for e in range(experts.num_local_experts):
        key, offsets = _place(
            f"{prefix}experts.{name}._extra_state", e, name, sharded_offsets, metadata, experts
        )
        entries[f"{prefix}{name}._extra_state{e}"] = make_sharded_object_for_checkpoint(
            None, key, offsets, (0, tp_rank, dp_rank)
        )
    return entries


def _keys(layout: str, prefix: str, experts: torch.nn.Module) -> dict[str, list[str]]:
    """{our key of a parameter: one key for each expert}."""
    return {
        f"{prefix}{name}.{kind}": [
            prefix + layout.format(name=name, kind=kind, e=e)
            for e in range(experts.num_local_experts)
        ]
        for name in LINEARS
        for kind, _ in getattr(experts, name).named_parameters()
    }


def spread_expert_weights(
    experts: torch.nn.Module, state_dict: dict, prefix: str, local_metadata: dict
) -> None:
    """state_dict post-hook: weights and biases become keys and tensors of `experts.layout`.

    The tensors are views, so none of it is copied.
    """
    for ours, keys in _keys(experts.layout, prefix, experts).items():
        parameter = state_dict.pop(ours)
        for e, key in enumerate(keys):
            state_dict[key] = parameter[e]
            state_dict[re.sub(r"(weight|bias)\d*$", "_extra_state", key)] = None


def collect_expert_weights(
    experts: torch.nn.Module,
    state_dict: dict,
    prefix: str,
    local_metadata: dict,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """load_state_dict pre-hook: SequentialMLP's and TEGroupedMLP's keys become ours.

    `_extra_state` is dropped. Some other set of keys is an error with `strict=False` too: where a
    strict load fails Megatron tries that, and would train the experts it did not find from new.
    No key at all is left for load_state_dict to report.
    """
    extra = re.compile(re.escape(prefix) + r"(local_experts\.\d+\.)?linear_fc[12]\._extra_state\d*")
    for key in [key for key in state_dict if extra.fullmatch(key)]:
        del state_dict[key]
    found = {key for key in state_dict if key.startswith(prefix)}
    if not found or found == set(_keys(SEQUENTIAL, prefix, experts)):
        return
    for layout in (SEQUENTIAL, GROUPED):
        keys = _keys(layout, prefix, experts)
        if found == {key for of_parameter in keys.values() for key in of_parameter}:
            for ours, of_parameter in keys.items():
                state_dict[ours] = torch.stack([state_dict.pop(key) for key in of_parameter])
            return
    some = sorted(found)[:4]
    error_msgs.append(
        f"{prefix or 'experts'}: not the parameters of {experts.num_local_experts} experts, but "
        f"{len(found)} keys: {', '.join(some)}{', ...' if len(found) > len(some) else ''}. A plain "
        "checkpoint loads at the expert-parallel size it was saved with; a distributed one at any."
    )
