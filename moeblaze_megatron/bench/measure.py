"""How the benchmark measures: times with systems interleaved, memory, error against fp32."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import torch

from moeblaze_megatron.bench.peers import Layer, Peer
from moeblaze_megatron.bench.shapes import DEVICE, Inputs, Shape
from moeblaze_megatron.ops.reference import moe_reference

MIB = 2**20
ERROR_LIMIT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
SPIN = 4_000_000  # clock cycles, about two milliseconds


def forward(layer: Layer, inputs: Inputs) -> None:
    layer(inputs)


def forward_backward(layer: Layer, inputs: Inputs) -> None:
    layer(inputs).backward(inputs.grad_output)
    inputs.clear_grads()


MODES = {"forward": forward, "forward+backward": forward_backward}


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def release() -> None:
    """Give cached memory back, between shapes."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def start(call: Callable[[], object], ready: Callable[[], object]) -> Callable[[], float]:
    """Runs the call; returns how to read, after `synchronize`, the milliseconds that it took.

    `ready` runs before, and is not timed.

    The GPU spins first, so that the host is ahead of it when the call's first kernel begins: a
    peer that waits for the GPU in its midst would otherwise slow down whoever comes after it.
    """
    if DEVICE == "cpu":
        ready()
        begin = time.perf_counter()
        call()
        ms = 1e3 * (time.perf_counter() - begin)
        return lambda: ms
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN)
    ready()
    begin.record()
    call()
    end.record()
    return lambda: begin.elapsed_time(end)


def percentiles(ms: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(ms, n=10)
    return {"p20": cuts[1], "p50": statistics.median(ms), "p80": cuts[7]}


def time_calls(
    calls: dict,
    steps: int,
    ready: Callable[[], object] = lambda: None,
    agree: Callable[[list[float]], list[float]] = list,
) -> dict:
    """{name: percentiles in milliseconds} of the calls in {name: call}.

    With several ranks `ready` lets them begin each call together, and `agree` makes one time of
    each call's times on all ranks.

    One call of each to warm up; then in every step all of them, in another order each time, so
    that clock, power and cache are the same for all.
    """
    for call in calls.values():
        call()
    taken = {name: [] for name in calls}
    for step in range(steps):
        for name in random.Random(step).sample(list(calls), len(calls)):
            taken[name].append(start(calls[name], ready))
    synchronize()
    return {name: percentiles(agree([read() for read in reads])) for name, reads in taken.items()}


def time_layers(layers: dict, steps: int, **ranks: Callable) -> dict[str, dict]:
    """{name: {mode of `MODES`: percentiles}} of the layers in {name: (layer, input sets)}.

    Each rotates its input sets; `ranks` are `ready` and `agree` of `time_calls`.
    """
    times = {name: {} for name in layers}
    for mode, run in MODES.items():
        for layer, sets in layers.values():
            for inputs in sets:
                run(layer, inputs)
        turns = {name: cycle(sets) for name, (_, sets) in layers.items()}
        calls = {
            name: lambda layer=layer, turn=turns[name], run=run: run(layer, next(turn))
            for name, (layer, _) in layers.items()
        }
        for name, ms in time_calls(calls, steps, **ranks).items():
            times[name][mode] = ms
    return times


def host_microseconds(layer: Layer, stack: list[Inputs], backward: bool, steps: int = 3) -> float:
    """What each layer of a stack costs the host, with the GPU idle before: the launches alone.

    Each has the inputs of its own, but for x, which is the output of the one before.
    """
    times = []
    for _ in range(steps):
        x = stack[0].x  # and the graph of the step before is gone
        synchronize()
        begin = time.perf_counter()
        for inputs in stack:
            x = layer(replace(inputs, x=x))
        if backward:
            x.backward(inputs.grad_output)
        times.append(1e6 * (time.perf_counter() - begin) / len(stack))
        for inputs in stack:
            inputs.clear_grads()
    return statistics.median(times)


def measure_memory(layer: Layer, inputs: Inputs) -> dict[str, float | None]:
    """MiB beyond inputs and weights; None on a CPU, which does not count them.

    "held": between forward and backward, without the output. "peak": of forward and backward,
    with the output and the gradients of input and weights.
    """
    if DEVICE == "cpu":
        return {"held": None, "peak": None}
    inputs.clear_grads()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = layer(inputs)
    held = torch.cuda.memory_allocated() - before - output.nbytes
    output.backward(inputs.grad_output)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    inputs.clear_grads()
    return {"held": held / MIB, "peak": peak / MIB}


def results(layer: Layer, inputs: Inputs, unlay: Callable) -> dict[str, torch.Tensor]:
    inputs.clear_grads()
    output = layer(inputs)
    output.backward(inputs.grad_output)
    grad_fc1_weight, grad_fc2_weight = unlay(*(w.grad for w in inputs.weights))
    out = {
        "output": output.detach(),
        "grad_x": inputs.x.grad,
        "grad_fc1_weight": grad_fc1_weight,
        "grad_fc2_weight": grad_fc2_weight,
        "grad_probs": inputs.topk_probs.grad,
    }
    inputs.clear_grads()
    return out


def reference_results(shape: Shape, inputs: Inputs) -> dict[str, torch.Tensor]:
    def layer(wide: Inputs) -> torch.Tensor:
        return moe_reference(
            wide.x, *wide.weights, wide.topk_indices, wide.topk_probs, shape.activation
        )

    wide = Inputs(
        inputs.x.detach().float().requires_grad_(),
        tuple(w.detach().float().requires_grad_() for w in inputs.weights),
        inputs.topk_indices,
        inputs.topk_probs.detach().requires_grad_(),
        inputs.grad_output.float(),
    )
    return results(layer, wide, lambda *grads: grads)


def check(name: str, peer: Peer, layer: Layer, inputs: Inputs, want: dict) -> float:
    """The largest relative norm error among output and gradients.

    Raises:
        ValueError: when it is beyond what dtype and `peer.rounding` can explain; such a system is
            not timed.
    """
    errors = {
        key: ((got.float() - want[key]).norm() / want[key].norm()).item()
        for key, got in results(layer, inputs, peer.unlay).items()
    }
    worst = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
    if not errors[worst] <= max(ERROR_LIMIT[inputs.x.dtype], peer.rounding):
        raise ValueError(f"{name}: {worst} is off by {errors[worst]:.2e}, so it is not timed")
    return errors[worst]
