"""The experts of a Megatron MoE layer: two 3-D weights, their biases, one call of the operator.

E experts on this rank, H hidden size (or latent size), F ffn hidden size of one expert on this
rank, W = 2F with a gate (gate half first), else F.
"""

from collections.abc import Callable

import torch
from megatron.core.package_info import __version__ as megatron_version
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size
from packaging.version import Version

from moeblaze_megatron import IndexLists, moeblaze_experts
from moeblaze_megatron.mcore.checkpoint import (
    GROUPED,
    SEQUENTIAL,
    collect_expert_weights,
    extra_states,
    sharded_expert_parameter,
    spread_expert_weights,
)
from moeblaze_megatron.mcore.config import activation_of, check_config
from moeblaze_megatron.ops import table


def reduced_with_experts(config: TransformerConfig) -> bool:
    """Whether Megatron reduces expert gradients over the expert-data-parallel group.

    Its linears mark a weight `allreduce = False` then. Expert TP that differs from TP counts from
    0.19 on.
    """
    if config.expert_model_parallel_size > 1:
        return True
    if Version(megatron_version).release < (0, 19):
        return False
    return config.expert_tensor_parallel_size != config.tensor_model_parallel_size


class ExpertLinear(torch.nn.Module):
    """Owner of one linear's weight and bias of all local experts; calling it returns both.

    Megatron's DDP waits for a parameter that is still being gathered (--overlap-param-gather) in
    a forward pre-hook of the module that owns it, so the owner has to be called.

    Both have the attributes of Megatron's own expert linears. `partition_dim` counts the
    dimensions of this weight, the expert dimension included, since its readers (resharding)
    index the weight's shape with it; the optimizer, clipping and the parameter count read only
    `tensor_model_parallel` and `allreduce`. The bias, [E, rows of a weight] and zero at first,
    counts as partitioned in fc2 too, since with biases expert TP is 1, and none is a duplicate: up
    to 0.18 the gradient norm would have those of the first TP rank only. It lacks the
    `sequence_parallel` that Megatron's RowParallelLinear gives it, by which expert gradients are
    summed over TP a second time.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        partition_dim: int,
        partition_stride: int,
        init_method: Callable[[torch.Tensor], None],
        config: TransformerConfig,
        tp_group: torch.distributed.ProcessGroup,
    ):
        super().__init__()
        self.config = config
        self.init_method = init_method
        self.tp_group = tp_group
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(shape, device=device, dtype=config.params_dtype)
        )
        set_tensor_model_parallel_attributes(self.weight, True, partition_dim, partition_stride)
        self.weight.allreduce = not reduced_with_experts(config)
        self.bias = None
        if config.add_bias_linear:
            make = torch.zeros if config.perform_initialization else torch.empty
            self.bias = torch.nn.Parameter(
                make(shape[:2], device=device, dtype=config.params_dtype)
            )
            set_tensor_model_parallel_attributes(self.bias, True, 1, partition_stride)
            self.bias.allreduce = self.weight.allreduce

    def initialize(self, expert: int) -> None:
        """Fills one expert's slice as Megatron's linear of that shape fills its weight."""
        weight = self.weight.data[expert]
        dim, stride = self.weight.partition_dim - 1, self.weight.partition_stride
        if not self.config.use_cpu_initialization:
            _initialize_affine_weight_gpu(weight, self.init_method, dim, stride, is_expert=True)
            return
        world_size = get_pg_size(self.tp_group)
        full = [size * world_size if i == dim else size for i, size in enumerate(weight.shape)]
        _initialize_affine_weight_cpu(
            weight,
            *full,
            weight.shape[dim],
            dim,
            self.init_method,
            stride,
            params_dtype=self.config.params_dtype,
            rank=get_pg_rank(self.tp_group),
            world_size=world_size,
        )

    def forward(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.weight, self.bias


def probs_on_input(
    x: torch.Tensor, probs: torch.Tensor, index_lists: IndexLists, dense: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """x times the probability of its one expert, rounded to x's dtype, and ones [T, 1].

    Args:
        probs: [T, E] if `dense`, else [T, 1] beside `index_lists.token_expert_indices`.
    """
    if dense:
        expert = index_lists.token_expert_indices.clamp(min=0).long()
        probs = probs.gather(1, expert)
    return (probs * x).to(x.dtype), torch.ones_like(probs)


class MoEBlazeExperts(MegatronModule):
    """Drop-in for the experts of `MoELayer`, fed by `MoEBlazeTokenDispatcher`.

    With one seed the weights start bit-equal to SequentialMLP's.

    Args:
        num_local_experts: E.
        config: the layer's TransformerConfig. Beside Megatron's fields, attributes are read:
            `moeblaze_workspace_mb`, the bound of the operator's [R, H] transient in MiB, and
            `moeblaze_recompute_fc1`, to save nothing but x and index lists; a third one,
            `moeblaze_kernel_table`, names a file for all layers of the process (`ops.table`).
        pg_collection: process groups; expt_tp, expt_dp and ep are used.
        submodules, name: what builders of Megatron 0.16 and from 0.18 on pass too; not used.

    Raises:
        UnsupportedSettings: a ValueError naming every setting of `config` not supported.
        ValueError: naming everything that is wrong with a kernel table.
    """

    # Megatron's order of initialisation: fc1 and fc2 of the first expert, of the second, ...
    expert_by_expert = True
    # Its plain state_dict too, so that a checkpoint in torch's format loads on either side.
    layout = SEQUENTIAL

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: object = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ):
        check_config(config)
        table.use(getattr(config, "moeblaze_kernel_table", None))
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.activation = activation_of(config)
        self.ep_group = pg_collection.ep
        self.tp_group = pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        self.receives = get_pg_size(self.ep_group) * get_pg_size(self.tp_group) > 1

        H = getattr(config, "moe_latent_size", None) or config.hidden_size
        F = config.moe_ffn_hidden_size // get_pg_size(self.tp_group)
        halves = 2 if self.activation.gated else 1
        self.linear_fc1 = ExpertLinear(
            (num_local_experts, halves * F, H), 1, halves, config.init_method, config, self.tp_group
        )
        self.linear_fc2 = ExpertLinear(
            (num_local_experts, H, F), 2, 1, config.output_layer_init_method, config, self.tp_group
        )
        if config.perform_initialization:
            linears, experts = (self.linear_fc1, self.linear_fc2), range(num_local_experts)
            if self.expert_by_expert:
                order = [(linear, expert) for expert in experts for linear in linears]
            else:
                order = [(linear, expert) for linear in linears for expert in experts]
            for linear, expert in order:
                linear.initialize(expert)
        self.register_state_dict_post_hook(spread_expert_weights)
        self.register_load_state_dict_pre_hook(collect_expert_weights)

    def forward(
        self, x: torch.Tensor, index_lists: IndexLists, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """x [T, H] -> output [T, H] summed over the experts of this rank, bias and all, and None.

        probs [T, E] are the router's own or, of tokens from other ranks, [T, K] beside
        `index_lists.token_expert_indices`; with expert TP, output is this rank's part of the sum.
        """
        workspace = getattr(self.config, "moeblaze_workspace_mb", None)
        fc1_weight, fc1_bias = self.linear_fc1()
        fc2_weight, fc2_bias = self.linear_fc2()
        form = "topk_probs" if self.receives else "probs"
        if self.config.moe_apply_probs_on_input:
            x, probs = probs_on_input(x, probs, index_lists, dense=not self.receives)
            form = "topk_probs"
        output = moeblaze_experts(
            x,
            fc1_weight,
            fc2_weight,
            fc1_bias=fc1_bias,
            fc2_bias=fc2_bias,
            **{form: probs},
            index_lists=index_lists,
            activation=self.activation,
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
            recompute_fc1=bool(getattr(self.config, "moeblaze_recompute_fc1", False)),
            fp8_store=self.config.activation_func_fp8_input_store,
            **({} if workspace is None else {"workspace_bytes": workspace << 20}),
        )
        return output, None

    def backward_dw(self) -> None:
        """Weight gradients are never delayed; Megatron calls this after every backward."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Keys and global shapes of SequentialMLP and TEGroupedMLP, for either to load or save."""
        entries = {}
        for name, linear in self.named_children():
            place = (name, prefix, sharded_offsets, metadata or {}, self)
            for kind, parameter in linear.named_parameters():
                key = f"{prefix}{name}.{kind}"
                entries[key] = sharded_expert_parameter(
                    parameter, kind, linear.weight.partition_stride, *place
                )
            entries |= extra_states(*place)
        return entries


class MoEBlazeGroupedExperts(MoEBlazeExperts):
    """The same in TEGroupedMLP's place.

    Its weights start bit-equal, all fc1, then all fc2, and its plain state_dict has the same keys.
    """

    expert_by_expert = False
    layout = GROUPED


def experts_class(builder: object) -> type[MoEBlazeExperts]:
    """The class that starts with the weights of the experts `builder` would build.

    Args:
        builder: `MoESubmodules.experts`: a class, a functools.partial of one or, up to 0.16, a
            ModuleSpec.
    """
    stock = getattr(builder, "func", getattr(builder, "module", builder))
    grouped = isinstance(stock, type) and issubclass(stock, TEGroupedMLP)
    return MoEBlazeGroupedExperts if grouped else MoEBlazeExperts
