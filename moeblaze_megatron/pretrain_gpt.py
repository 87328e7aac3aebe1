"""Pretrain a causal GPT with Megatron, from the wheel of megatron-core alone.

The wheel has megatron.training but no pretraining script; this is a small one with the same
command line. It trains on Megatron's indexed datasets (`--data-path`, `--train-data-path`, ...) or
on `--mock-data`, with tensor, pipeline, context, expert and data parallelism and with multi-token
prediction. What Megatron-LM's own pretrain_gpt.py can do beyond that is refused by name.

    torchrun --nproc-per-node 1 -m moeblaze_megatron --moe-token-dispatcher-type moeblaze ...
"""

import dataclasses
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, pretrain, print_rank_0
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")

# Flags of other objectives and data layouts, by the attribute of Megatron's arguments.
UNSUPPORTED = {
    "sft": "--sft",
    "fim_data": "--fim-data",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "per_dataset_sequences_path": "--per-dataset-sequences-path",
    "logits_load_dir": "--logits-load-dir",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "perform_rl_step": "--perform-rl-step",
    "check_for_spiky_loss": "--check-for-spiky-loss",
}


def check_supported(args: Namespace) -> None:
    """Raise ValueError naming every flag in `args` that this script cannot honour, or needs."""
    flags = [flag for name, flag in UNSUPPORTED.items() if getattr(args, name, None)]
    if args.num_experts and args.moe_token_dispatcher_type == "moeblaze":  # refuses it itself
        flags = [flag for flag in flags if flag != UNSUPPORTED["overlap_moe_expert_parallel_comm"]]
    if flags:
        raise ValueError(
            f"this pretraining script does not support: {', '.join(flags)}; leave them out, or "
            "give the launcher the path of Megatron-LM's own pretrain_gpt.py"
        )
    if not args.mock_data and get_blend_and_blend_per_split(args) == (None, None):
        raise ValueError("no data: give --data-path (or --train-data-path, ...) or --mock-data")
    if "MASTER_ADDR" not in os.environ:
        raise ValueError(
            "torch.distributed is not set up: start with torchrun, for one process "
            "`torchrun --nproc-per-node 1 -m moeblaze_megatron ...`"
        )


def predicts_further_tokens(vp_stage: int | None) -> bool:
    """Whether this pipeline stage holds multi-token prediction layers."""
    args = get_args()
    return mtp_on_this_rank(
        layout=core_transformer_config_from_args(args).pipeline_model_parallel_layout,
        mtp_num_layers=args.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def reads_data(vp_stage: int | None) -> bool:
    """Whether this pipeline stage needs tokens or labels."""
    return is_first_or_last_pipeline_stage(vp_stage) or predicts_further_tokens(vp_stage)


def get_batch(
    data_iterator: Iterator[dict] | None, vp_stage: int | None
) -> dict[str, torch.Tensor | None]:
    """The next micro-batch of this rank, {key: [B, S / context parallel size] or None}."""
    args = get_args()
    if not reads_data(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        batch = dict.fromkeys(BATCH_KEYS)
        batch |= {key: sample[key].cuda(non_blocking=True) for key in BATCH_KEYS if key in sample}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_further_tokens(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )


@lru_cache
def report_moe_layers(model: torch.nn.Module) -> None:
    """Print, once for each model, what its MoE layers were built from."""
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    for dispatcher, experts in sorted(
        {(type(layer.token_dispatcher).__name__, type(layer.experts).__name__) for layer in layers}
    ):
        print_rank_0(
            f"> MoE layers on rank 0: {len(layers)}, built with {dispatcher} and {experts}"
        )
    if not layers:
        print_rank_0("> MoE layers on rank 0: none")


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses [B, S] that `loss_mask` [B, S] keeps, their number, both to report."""
    loss_mask = loss_mask.view(-1).float()
    loss = (losses.view(-1).float() * loss_mask).sum()
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"{name} in the local loss",
                tolerance=0.0,
                fatal=True,
            )
    num_tokens = loss_mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(
    data_iterator: Iterator[dict] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable]:
    """Run `model` on the next micro-batch; returns its output and the loss function to apply."""
    report_moe_layers(model)
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """The GPTDatasetConfig that Megatron's `args` describe."""
    fields = {field.name for field in dataclasses.fields(GPTDatasetConfig)}
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        **{name: value for name, value in vars(args).items() if name in fields},
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        create_attention_mask=args.create_attention_mask_in_dataloader,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> list:
    """The train, validation and test datasets with the given numbers of samples."""
    args = get_args()

    def is_built_on_rank() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and reads_data(vp_stage)

    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        is_built_on_rank,
        dataset_config(args),
    ).build()


datasets_provider.is_distributed = True  # called on every rank; is_built_on_rank chooses


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Those of the pipeline ranks `pp_ranks` that hold a copy of the word embeddings."""
    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def main() -> None:
    """Parse Megatron's command line and pretrain."""
    args = parse_and_validate_args()
    check_supported(args)
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
    )


if __name__ == "__main__":
    main()
