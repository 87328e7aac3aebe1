"""Writes down what a training run measures, for `moeblaze_megatron.compare`.

The launcher calls `record` where $MOEBLAZE_RECORD names a folder, after Megatron was prepared. It
wraps functions of Megatron in memory: `training_log`, which has every iteration's loss, and the
steps of the MoE layer. The last rank writes steps.jsonl, a line for each iteration; each rank
writes rank<r>.json at its end.
"""

import argparse
import functools
import inspect
import json
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton

from moeblaze_megatron.version import __version__

# Forward only. Steps of the MoE layer, as Megatron 0.16 to 0.19 names them.
PHASES = ("route", "preprocess", "dispatch", "routed_experts_compute", "combine", "postprocess")
# Steps 2 to this one are those whose phases are timed; speed is taken from later ones.
TIMED_UNTIL = 6


class Packed:
    """A tensor as autograd holds it, from forward until backward."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()  # an output, and its grad_fn holds this


@contextmanager
def kept_storages(layer: torch.nn.Module) -> Iterator[dict[int, int]]:
    """{address: bytes}, from the end on, of what autograd still keeps of a forward pass inside.

    Every storage once, `layer`'s parameters not; its input, which it keeps for its router, is.
    What was kept only during the forward pass is gone, its address may be another tensor's. What a
    function keeps by itself is not seen: of ours the index lists, 12 bytes for each expert of a
    token, of Megatron's dispatchers lists of their own.
    """
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    packed = weakref.WeakSet()
    kept = {}

    def pack(tensor: torch.Tensor) -> Packed:
        holder = Packed(tensor)
        packed.add(holder)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        yield kept
    storages = [holder.tensor.untyped_storage() for holder in packed]
    kept.update({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in parameters})


class Recorder:
    """What one process has seen."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.step = 1  # of this process; a resumed run begins at a later iteration
        self.last_log = None
        self.held = None
        self.layer = None
        self.events = []
        self.phases = defaultdict(float)
        self.dispatches = self.rows = 0

    @property
    def timing(self) -> bool:
        return 2 <= self.step <= TIMED_UNTIL

    def log(self, call: dict[str, Any]) -> None:
        """One call of Megatron's training_log, on every rank and after every iteration."""
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        loss = call["loss_dict"].get("lm loss")
        loss = None if loss is None else float(loss)  # waits for the device
        now = time.perf_counter()
        if self.events and loss is None:  # not a last pipeline stage: nothing has waited yet
            torch.cuda.synchronize()
        for name, start, end in self.events:
            self.phases[name] += start.elapsed_time(end)
        self.events.clear()
        if rank == ranks - 1:
            norm = call["grad_norm"]
            step = {
                "iteration": call["iteration"],
                "loss": loss,
                "grad_norm": None if norm is None else float(norm),
                "ms": None if self.last_log is None else 1e3 * (now - self.last_log),
            }
            with open(self.folder / "steps.jsonl", "a") as file:
                print(json.dumps(step), file=file)
        self.last_log = now
        self.step += 1

    def call_phase(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Runs one step of an MoE layer, with its time where phases are timed."""
        if not self.timing:
            return function(*args, **kwargs)
        if torch.cuda.is_available():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = function(*args, **kwargs)
            end.record()
            self.events.append((name, start, end))
            return result
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self.phases[name] += 1e3 * (time.perf_counter() - start)
        return result

    def call_layer(self, layer: torch.nn.Module, function: Callable, *args: Any, **kwargs: Any):
        """Runs an MoE layer forward; counts, once, what autograd keeps of it until backward."""
        if self.held is not None or not torch.is_grad_enabled() or not layer.training:
            return function(layer, *args, **kwargs)
        with kept_storages(layer) as kept:
            output = function(layer, *args, **kwargs)
        self.layer = {
            "dispatcher": type(layer.token_dispatcher).__name__,
            "experts": type(layer.experts).__name__,
        }
        hidden_states = args[0] if args else kwargs["hidden_states"]
        self.held = sum(kept.values()) / (hidden_states.numel() / hidden_states.shape[-1])
        return output

    def finish(self) -> None:
        """Writes rank<r>.json; to be called when training is over."""
        import megatron.core
        from megatron.training import get_args
        from megatron.training.training import num_floating_point_operations

        from moeblaze_megatron.mcore import MoEBlazeTokenDispatcher

        args = get_args()
        total = MoEBlazeTokenDispatcher.total
        rows, dispatches = (
            (total.rows, total.dispatches) if total.dispatches else (self.rows, self.dispatches)
        )
        iterations = min(TIMED_UNTIL, self.step - 1) - 1
        versions = {
            "moeblaze-megatron": __version__,
            "megatron-core": megatron.core.__version__.partition("+")[0],
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
        if args.transformer_impl == "transformer_engine":
            versions["transformer-engine"] = version("transformer-engine")
        on_gpu = torch.cuda.is_available()
        versions["device"] = torch.cuda.get_device_name() if on_gpu else "CPU"
        result = {
            "versions": versions,
            "world_size": args.world_size,
            "tokens_per_iteration": args.global_batch_size * args.seq_length,
            "flops_per_iteration": num_floating_point_operations(args, args.global_batch_size),
            "layer": self.layer,
            "held_bytes_per_token": self.held,
            "phase_ms": {
                name: ms / iterations for name, ms in self.phases.items() if iterations > 0
            },
            "rows_per_dispatch": rows / dispatches if dispatches else None,
            "peak_bytes": None,
        }
        if torch.cuda.is_available() and self.step > 1:  # else resumed after the last step
            result["peak_bytes"] = torch.cuda.max_memory_allocated()
        path = self.folder / f"rank{torch.distributed.get_rank()}.json"
        path.write_text(json.dumps(result))


def record(folder: Path) -> Recorder:
    """Begins to record; `finish()` of the result ends it."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.training import training

    recorder = Recorder(folder)
    training_log, signature = training.training_log, inspect.signature(training.training_log)

    @functools.wraps(training_log)
    def log(*args: Any, **kwargs: Any) -> Any:
        recorder.log(signature.bind(*args, **kwargs).arguments)
        return training_log(*args, **kwargs)

    training.training_log = log

    def wrap(name: str) -> None:
        function = getattr(MoELayer, name)

        @functools.wraps(function)
        def phase(self: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "dispatch" and self.config.expert_model_parallel_size > 1:
                recorder.dispatches += 1
                recorder.rows += (args[0] if args else kwargs["hidden_states"]).shape[0]
            return recorder.call_phase(name, function, self, *args, **kwargs)

        setattr(MoELayer, name, phase)

    for name in PHASES:
        wrap(name)
    forward = MoELayer.forward

    @functools.wraps(forward)
    def layer_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_layer(self, forward, *args, **kwargs)

    MoELayer.forward = layer_forward
    return recorder


if __name__ == "__main__":
    summary, _, details = __doc__.partition("\n\n")
    argparse.ArgumentParser(
        prog="MOEBLAZE_RECORD=FOLDER torchrun [...] -m moeblaze_megatron [SCRIPT.py] [flags]",
        usage="%(prog)s\nThis module is no command of its own.",
        description=f"{summary}\n\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
