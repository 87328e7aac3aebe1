"""Checkpoints interchangeable with Megatron's other experts, from one 3-D weight per linear.

E experts on this rank, H hidden size, F ffn hidden size of one expert on this rank.
"""

import re

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size

LINEARS = ("linear_fc1", "linear_fc2")
# Keys of an expert's weight in the plain state_dict of SequentialMLP and of TEGroupedMLP.
SEQUENTIAL, GROUPED = "local_experts.{e}.{name}.weight", "{name}.weight{e}"


def sharded_expert_weights(
    weight: torch.nn.Parameter,
    name: str,
    prefix: str,
    sharded_offsets: tuple,
    metadata: dict,
    experts: torch.nn.Module,
) -> dict[str, ShardedTensorFactory | ShardedObject]:
    """A linear's entries of `sharded_state_dict`.

    One factory holds the 3-D parameter, since Megatron's optimizers find their state's layout by
    the parameter's identity; it takes weight, master weight and moments apart into one tensor per
    expert, and per half of a gated fc1 so that expert TP reshards both. The `_extra_state`
    objects, always None here, are what Transformer Engine's linears ask for on load.

    Args:
        weight: [E, 2F, H], [E, F, H] (fc1) or [E, H, F] (fc2).
        name: "linear_fc1" or "linear_fc2".
        sharded_offsets: (axis, offset, fragments) of the axes in front, as Megatron passes them.
        metadata: Megatron's; `singleton_local_shards` puts experts in keys, not in an axis.
        experts: the MoEBlazeExperts, for its groups.
    """
    E = weight.shape[0]
    first = get_pg_rank(experts.ep_group) * E
    num_experts = get_pg_size(experts.ep_group) * E
    tp_rank, tp_size = get_pg_rank(experts.tp_group), get_pg_size(experts.tp_group)
    dp_rank = get_pg_rank(experts.dp_group)
    halves = weight.partition_stride
    singleton = metadata.get("singleton_local_shards", False)

    def place(key: str, e: int) -> tuple[str, tuple]:
        """Key and leading offsets of local expert e."""
        if singleton:
            head, _, tail = key.rpartition(name)
            return f"{head}{first + e}.{name}{tail}", tuple(sharded_offsets)
        return key, (*sharded_offsets, (len(sharded_offsets), first + e, num_experts))

    @torch.no_grad()
    def build(
        key: str, tensor: torch.Tensor, replica_id: tuple, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        """[E, ...] -> one tensor per expert and half."""
        shards = []
        for e in range(E):
            expert_key, offsets = place(key, e)
            tp_axis = len(offsets) + weight.partition_dim - 1
            for half, piece in enumerate(tensor[e].chunk(halves)):
                if singleton and halves == 2:
                    piece_key, split = expert_key + ("_w", "_v")[half], (tp_rank, tp_size)
                else:
                    piece_key, split = expert_key, (half * tp_size + tp_rank, halves * tp_size)
                shards.append(
                    ShardedTensor.from_rank_offsets(
                        piece_key,
                        piece,
                        *offsets,
                        (tp_axis, *split),
                        replica_id=replica_id,
                        prepend_axis_num=len(offsets),
                    )
                )
        return shards

    def merge(pieces: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(pieces).view(weight.shape)

    factory = ShardedTensorFactory(
        f"{prefix}experts.{name}.weight", weight, build, merge, (0, 0, dp_rank)
    )
    entries = {f"{prefix}{name}.weight": factory}
    for e in range(E):
        key, offsets = place(f"{prefix}experts.{name}._extra_state", e)
        entries[f"{prefix}{name}._extra_state{e}"] = make_sharded_object_for_checkpoint(
            None, key, offsets, (0, tp_rank, dp_rank)
        )
    return entries


def _keys(layout: str, prefix: str, num_experts: int) -> dict[str, list[str]]:
    """{linear: one key for each expert}."""
    return {
        name: [prefix + layout.format(name=name, e=e) for e in range(num_experts)]
        for name in LINEARS
    }


def spread_expert_weights(
    experts: torch.nn.Module, state_dict: dict, prefix: str, local_metadata: dict
) -> None:
    """state_dict post-hook: the 3-D weights become keys and tensors of `experts.layout`.

    The tensors are views, so none of it is copied.
    """
    for name, keys in _keys(experts.layout, prefix, experts.num_local_experts).items():
        weight = state_dict.pop(f"{prefix}{name}.weight")
        for e, key in enumerate(keys):
            state_dict[key] = weight[e]
            state_dict[re.sub(r"weight\d*$", "_extra_state", key)] = None


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
    """load_state_dict pre-hook: SequentialMLP's and TEGroupedMLP's keys become the 3-D weights.

    `_extra_state` is dropped. Some other set of keys is an error with `strict=False` too: where a
    strict load fails Megatron tries that, and would train the experts it did not find from new.
    No key at all is left for load_state_dict to report.
    """
    extra = re.compile(re.escape(prefix) + r"(local_experts\.\d+\.)?linear_fc[12]\._extra_state\d*")
    for key in [key for key in state_dict if extra.fullmatch(key)]:
        del state_dict[key]
    found = {key for key in state_dict if key.startswith(prefix)}
    if not found or found == {f"{prefix}{name}.weight" for name in LINEARS}:
        return
    for layout in (SEQUENTIAL, GROUPED):
        keys = _keys(layout, prefix, experts.num_local_experts)
        if found == {key for of_linear in keys.values() for key in of_linear}:
            for name, of_linear in keys.items():
                weights = [state_dict.pop(key) for key in of_linear]
                state_dict[f"{prefix}{name}.weight"] = torch.stack(weights)
            return
    some = sorted(found)[:4]
    error_msgs.append(
        f"{prefix or 'experts'}: not the weights of {experts.num_local_experts} experts, but "
        f"{len(found)} keys: {', '.join(some)}{', ...' if len(found) > len(some) else ''}. A plain "
        "checkpoint loads at the expert-parallel size it was saved with; a distributed one at any."
    )
