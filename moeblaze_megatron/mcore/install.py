"""Teaches an installed megatron-core, unmodified, the dispatcher type "moeblaze" at run time."""

import argparse
import dataclasses
import functools
import inspect
import os
import sys
import typing
import warnings
from collections.abc import Callable
from typing import Any

VALUE = "moeblaze"
TESTED_VERSIONS = ("0.16", "0.17", "0.18", "0.19")
# Our own flags; on a config they are attributes of the same names.
FLAGS = (
    "moeblaze_workspace_mb",
    "moeblaze_recompute_fc1",
    "moeblaze_check_routing",
    "moeblaze_kernel_table",
)


def _with_config_check(post_init: Callable) -> Callable:
    @functools.wraps(post_init)
    def wrapped(self: Any) -> None:
        from moeblaze_megatron.mcore.config import UnsupportedSettings, unsupported_reasons

        chosen = self.moe_token_dispatcher_type == VALUE
        overlap = self.moe_shared_expert_overlap
        # Megatron refuses it with dispatchers that it does not know; what follows does the rest.
        self.moe_shared_expert_overlap = overlap and not chosen
        refusal = None
        try:
            post_init(self)
        except (ValueError, AssertionError) as error:  # names one setting, and may advise another
            refusal = error
        self.moe_shared_expert_overlap = overlap
        reasons = unsupported_reasons(self) if chosen and self.num_moe_experts else []
        if refusal is not None:
            if not reasons:
                raise refusal
            reasons.append(f"Megatron: {str(refusal) or repr(refusal)}")
        if reasons:
            raise UnsupportedSettings(reasons) from refusal

    return wrapped


def _with_moeblaze(init: Callable) -> Callable:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

        from moeblaze_megatron.mcore.dispatcher import MoEBlazeTokenDispatcher
        from moeblaze_megatron.mcore.experts import experts_class

        if config.moe_token_dispatcher_type != VALUE:
            return init(self, config, *args, **kwargs)
        call = signature.bind(self, config, *args, **kwargs)
        submodules = call.arguments["submodules"]
        groups = call.arguments.get("pg_collection") or get_default_pg_collection()
        call.arguments["pg_collection"] = groups
        call.arguments["submodules"] = dataclasses.replace(
            submodules, experts=experts_class(submodules.experts)
        )
        # The layer refuses a value it does not know. It keeps nothing of the all-gather
        # dispatcher, which holds no state and no stream, once ours takes its place.
        config.moe_token_dispatcher_type = "allgather"
        try:
            init(*call.args, **call.kwargs)
        finally:
            config.moe_token_dispatcher_type = VALUE
        self.token_dispatcher = MoEBlazeTokenDispatcher(
            self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
        )
        if self.shared_expert_overlap and self.shared_experts is not None:
            self.token_dispatcher.set_shared_experts(self.shared_experts)

    return wrapped


def _megabytes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of MiB, 1 or more, not {text!r}")
    return int(text)


def _with_flags(add_arguments: Callable) -> Callable:
    @functools.wraps(add_arguments)
    def wrapped(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_arguments(parser)
        group = parser.add_argument_group(title=VALUE)
        group.add_argument(
            "--moeblaze-workspace-mb",
            type=_megabytes,
            metavar="MB",
            help="Most memory, in MiB, that moeblaze uses at a time for expert outputs that are "
            "not summed per token yet.",
        )
        group.add_argument(
            "--moeblaze-recompute-fc1",
            action="store_true",
            help="Keep nothing of the experts for backward but the layer's input and index lists, "
            "and run their first GEMM again there: least memory, 22 percent more FLOPs when gated.",
        )
        # Megatron, 0.16 to 0.19, has the setting but no flag for it.
        if parser.get_default("activation_func_fp8_input_store") is None:
            group.add_argument(
                "--activation-func-fp8-input-store",
                action="store_true",
                help="Keep the input of SwiGLU for backward in 8 bits: half the memory. The "
                "experts of moeblaze scale it by blocks (MXFP8); Megatron's own MLPs only cast it.",
            )
        group.add_argument(
            "--moeblaze-report-rows",
            action="store_true",
            help="With expert parallelism, let the launcher print at the end how many rows rank 0 "
            "sent and how many it saved. A token is sent once to each rank that holds any of its "
            "experts, not once for each expert, which pays where ranks are few beside "
            "--moe-router-topk: at top 8 a third of the rows with 8 ranks, 3 percent with 64.",
        )
        group.add_argument(
            "--moeblaze-check-routing",
            action="store_true",
            help="Check on the device that no token has more than --moe-router-topk experts, that "
            "the routing of all rows that other ranks announced arrived and, with expert TP alone, "
            "that its ranks have as many tokens. Each layer waits for the device then; for "
            "debugging a router or a cluster.",
        )
        group.add_argument(
            "--moeblaze-kernel-table",
            metavar="FILE",
            help="Kernel configurations that `python -m moeblaze_megatron.tune` has found on this "
            "kind of GPU, to come before the package's own.",
        )
        return parser

    wrapped.teaches_moeblaze = True
    return wrapped


@functools.cache
def _say_without_effect(flags: tuple[str, ...], what: str) -> None:
    """Once, on rank 0. No error: `compare` trains both dispatchers with the same flags."""
    if flags and os.environ.get("RANK", "0") == "0":
        print(f"without effect with {what}: {', '.join(flags)}", flush=True)


def _with_flags_on_config(config_from_args: Callable) -> Callable:
    @functools.wraps(config_from_args)
    def wrapped(args: Any, *rest: Any, **kwargs: Any) -> Any:
        from moeblaze_megatron.mcore.config import UnsupportedSettings, unsupported_arguments
        from moeblaze_megatron.ops import table

        chosen = args.moe_token_dispatcher_type == VALUE and args.num_experts
        reasons = unsupported_arguments(args) if chosen else []
        if chosen:
            try:
                table.use(getattr(args, "moeblaze_kernel_table", None))
            except ValueError as error:
                reasons.append(str(error))
        else:
            given = (name for name in (*FLAGS, "moeblaze_report_rows") if getattr(args, name, None))
            flags = tuple(f"--{name.replace('_', '-')}" for name in given)
            what = args.moe_token_dispatcher_type if args.num_experts else "a dense model"
            _say_without_effect(flags, what)
        try:
            config = config_from_args(args, *rest, **kwargs)
        except UnsupportedSettings as error:
            raise UnsupportedSettings(error.reasons + reasons) from None
        if reasons:
            raise UnsupportedSettings(reasons)
        for name in FLAGS:
            setattr(config, name, getattr(args, name, None))
        return config

    return wrapped


def _with_checkpoint_check(check_checkpoint_args: Callable) -> Callable:
    @functools.wraps(check_checkpoint_args)
    def wrapped(checkpoint_args: Any, *rest: Any, **kwargs: Any) -> None:
        from megatron.training import get_args

        from moeblaze_megatron.mcore.config import UnsupportedSettings, unsupported_checkpoint

        check_checkpoint_args(checkpoint_args, *rest, **kwargs)
        reasons = unsupported_checkpoint(get_args(), checkpoint_args)
        if reasons:
            raise UnsupportedSettings(reasons)

    return wrapped


def _install_core() -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    # Megatron's argument parser takes its choices from the type of the dataclass field.
    field = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
    values = typing.get_args(field.type)
    if VALUE in values:  # installed before, or native (patches/)
        return
    field.type = typing.Literal[(*values, VALUE)]
    TransformerConfig.__post_init__ = _with_config_check(TransformerConfig.__post_init__)
    # In place: specs made at import, and identity checks up to 0.17, hold this very class.
    MoELayer.__init__ = _with_moeblaze(MoELayer.__init__)


def _install_training() -> None:
    try:
        from megatron.training import arguments, checkpointing
    except ImportError:  # no command line, then: megatron-core 0.16, or megatron.core alone
        return
    if getattr(arguments.add_megatron_arguments, "teaches_moeblaze", False):
        return
    arguments.add_megatron_arguments = _with_flags(arguments.add_megatron_arguments)
    # Megatron calls it at each load but for --finetune, which leaves optimizers alone too, and
    # before it touches the optimizer.
    checkpointing.check_checkpoint_args = _with_checkpoint_check(
        checkpointing.check_checkpoint_args
    )
    # Modules of megatron.training have taken this function by name at their import.
    name = "core_transformer_config_from_args"
    original = getattr(arguments, name)
    wrapped = _with_flags_on_config(original)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, wrapped)


def _warn_if_untested() -> None:
    from megatron.core.package_info import __version__ as version

    if not version.startswith(tuple(f"{tested}." for tested in TESTED_VERSIONS)):
        warnings.warn(
            f"megatron-core {version} is not a version moeblaze was tested with: "
            f"{', '.join(TESTED_VERSIONS)}",
            stacklevel=3,
        )


@functools.cache
def install() -> None:
    """Makes `moe_token_dispatcher_type="moeblaze"` a value that Megatron knows.

    Call it before arguments are parsed and before configs and layers are made. Argument parser,
    TransformerConfig and MoELayer are extended in place; with another dispatcher type they do
    what they did. So is the check of a checkpoint's arguments, which refuses flat optimizer state
    that other experts have saved. Further calls do nothing, nor is anything done to a Megatron
    that knows the value already, but for the `--moeblaze-...` flags and that check. Warns once if
    this version of megatron-core was not tested.
    """
    _warn_if_untested()
    _install_core()
    _install_training()
