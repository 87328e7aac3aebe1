"""The Megatron-Core side: `install()` teaches Megatron `--moe-token-dispatcher-type moeblaze`.

Importing this package does not import Megatron, whose modules must see the CPU mode first.
"""

from typing import Any

from moeblaze_megatron.mcore.config import check_config, unsupported_reasons
from moeblaze_megatron.mcore.install import install

__all__ = [
    "MoEBlazeExperts",
    "MoEBlazeTokenDispatcher",
    "check_config",
    "experts_class",
    "install",
    "unsupported_reasons",
]


def __getattr__(name: str) -> Any:
    if name == "MoEBlazeTokenDispatcher":
        from moeblaze_megatron.mcore.dispatcher import MoEBlazeTokenDispatcher

        return MoEBlazeTokenDispatcher
    if name in ("MoEBlazeExperts", "experts_class"):
        from moeblaze_megatron.mcore import experts

        return getattr(experts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
