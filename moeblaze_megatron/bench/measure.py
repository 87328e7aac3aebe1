"""How the benchmark measures: times with systems interleaved, memory, error against fp32."""

import statistics
import time
from collections.abc import Callable
from itertools import cycle

import torch

from moeblaze_megatron.bench.shapes import Inputs, Shape
from moeblaze_megatron.ops.reference import moe_reference

MIB = 2**20
ERROR_LIMIT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}


def forward(layer, inputs: Inputs) -> None:
    layer(inputs)


def forward_backward(layer, inputs: Inputs) -> None:
    inputs.clear_grads()
    layer(inputs).backward(inputs.grad_output)


def events(run) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    return start, end


def time_layers(layers: dict, sets: list[Inputs], steps: int) -> dict[str, dict]:
    """{system: {"forward": percentiles, "forward+backward": percentiles}} in milliseconds.

    Systems take turns on the same inputs, so that the GPU's clock is the same for all.
    """
    times = {name: {} for name in layers}
    for mode, run in (("forward", forward), ("forward+backward", forward_backward)):
        for inputs in sets:
            for layer in layers.values():
                run(layer, inputs)
        turn = {name: cycle(sets) for name in layers}
        calls = {
            name: lambda layer=layer, turn=turn[name], run=run: run(layer, next(turn))
            for name, layer in layers.items()
        }
        for name, ms in time_calls(calls, steps).items():
            times[name][mode] = ms
    return times


def measure_memory(layer, inputs: Inputs) -> dict[str, float]:
    """MiB beyond inputs and weights.

    "held": between forward and backward, without the output. "peak": of forward and backward,
    with the output and the gradients of input and weights.
    """
    inputs.clear_grads()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = layer(inputs)
    held = torch.cuda.memory_allocated() - before - output.nbytes
    output.backward(inputs.grad_output)
    torch.cuda.synchronize()
    return {"held": held / MIB, "peak": (torch.cuda.max_memory_allocated() - before) / MIB}


def results(layer, inputs: Inputs) -> dict[str, torch.Tensor]:
    inputs.clear_grads()
    output = layer(inputs)
    output.backward(inputs.grad_output)
    names = ("grad_x", "grad_fc1_weight", "grad_fc2_weight", "grad_probs")
    return {
        "output": output.detach(),
        **dict(zip(names, (t.grad for t in inputs.leaves), strict=True)),
    }


def reference_results(shape: Shape, inputs: Inputs) -> dict[str, torch.Tensor]:
    def layer(wide: Inputs) -> torch.Tensor:
        return moe_reference(*wide.leaves[:3], wide.topk_indices, wide.topk_probs, shape.activation)

    wide = Inputs(
        *(t.detach().float().requires_grad_() for t in inputs.leaves[:3]),
        inputs.topk_indices,
        inputs.topk_probs.detach().requires_grad_(),
        inputs.grad_output.float(),
    )
    return results(layer, wide)


def check(name: str, layer, shape: Shape, inputs: Inputs, want: dict) -> float:
    """The largest relative norm error among output and gradients.

    Raises:
        ValueError: when it is beyond what the dtype can explain; such a system is not timed.
    """
    errors = {
        key: ((got.float() - want[key]).norm() / want[key].norm()).item()
        for key, got in results(layer, inputs).items()
    }
    worst = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
    if not errors[worst] <= ERROR_LIMIT[inputs.x.dtype]:
        raise ValueError(f"{name} at {shape}: {worst} is off by {errors[worst]:.2e}, not timed")
    return errors[worst]


def percentiles(ms: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(ms, n=10)
    return {"p20": cuts[1], "p50": statistics.median(ms), "p80": cuts[7]}


def time_calls(calls: dict[str, Callable[[], object]], steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each call, in turn, after one call of each to warm up."""
    for call in calls.values():
        call()
    recorded = [(name, events(call)) for _ in range(steps) for name, call in calls.items()]
    torch.cuda.synchronize()
    times = {name: [] for name in calls}
    for name, (start, end) in recorded:
        times[name].append(start.elapsed_time(end))
    return {name: percentiles(ms) for name, ms in times.items()}


def host_microseconds(call: Callable[[], object], steps: int) -> float:
    """What one call costs the host, with the GPU idle before it: the launches alone."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)
