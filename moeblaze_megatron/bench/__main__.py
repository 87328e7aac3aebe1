"""`python -m moeblaze_megatron.bench`: time and memory of the MoE layer beside its peers.

All systems run in one process on the same inputs, in turn, so that the GPU's clock is the same for
all; every system's output and gradients are first compared with an fp32 reference.
"""

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import torch

from moeblaze_megatron.bench.peers import PEERS, versions
from moeblaze_megatron.bench.shapes import ROUTINGS, SHAPES, Inputs, Shape, inputs_for, shape_from
from moeblaze_megatron.ops.reference import moe_reference
from moeblaze_megatron.version import __version__

MIB = 2**20
ERROR_LIMIT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}


def forward_backward(layer, inputs: Inputs) -> None:
    inputs.clear_grads()
    layer(inputs).backward(inputs.grad_output)


def events(run) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    return start, end


def time_layers(layers: dict, sets: list[Inputs], steps: int) -> dict:
    """Milliseconds {system: {"forward": [...], "forward+backward": [...]}}, systems interleaved."""
    modes = {
        "forward": lambda layer, inputs: layer(inputs),
        "forward+backward": forward_backward,
    }
    times = {name: {mode: [] for mode in modes} for name in layers}
    for mode, run in modes.items():
        for layer in layers.values():
            for inputs in sets:
                run(layer, inputs)
        recorded = []
        for step in range(steps):
            for name, layer in layers.items():
                recorded.append((name, events(partial(run, layer, sets[step % len(sets)]))))
        torch.cuda.synchronize()
        for name, (start, end) in recorded:
            times[name][mode].append(start.elapsed_time(end))
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


def bench_layer(shape: Shape, arguments) -> dict:
    """Times, memory and errors of every system at one shape."""
    torch.compiler.reset()  # a peer compiles its activation anew for each shape
    dtype = getattr(torch, arguments.dtype)
    sets = [inputs_for(shape, dtype, arguments.routing, seed) for seed in range(arguments.sets)]
    layers = {name: PEERS[name](shape) for name in arguments.peers}
    want = reference_results(shape, sets[0])
    errors = {
        name: check(name, layer, shape, sets[0], want)
        for name, layer in layers.items()
        if name != "dense"
    }
    del want
    memory = {
        name: measure_memory(layer, sets[0]) for name, layer in layers.items() if name != "dense"
    }
    times = time_layers(layers, sets, arguments.steps)
    rows = {}
    for name in layers:
        rows[name] = {"error": errors.get(name), **memory.get(name, {})}
        for mode, ms in times[name].items():
            p20, p50, p80 = (
                statistics.quantiles(ms, n=10)[1],
                statistics.median(ms),
                statistics.quantiles(ms, n=10)[7],
            )
            flops = shape.forward_flops * (1 if mode == "forward" else 3)
            rows[name][mode] = {"p20": p20, "p50": p50, "p80": p80, "tflops": flops / p50 / 1e9}
    return rows


def print_table(title: str, rows: dict) -> None:
    print(f"\n{title}")
    print(
        f"{'system':12} {'forward ms':>10} {'p20..p80':>15} {'TFLOP/s':>8} {'fwd+bwd ms':>11} "
        f"{'p20..p80':>15} {'TFLOP/s':>8} {'held MiB':>9} {'peak MiB':>9} {'error':>8}"
    )
    for name, row in rows.items():
        f, b = row["forward"], row["forward+backward"]
        memory = (
            f"{row['held']:9.0f} {row['peak']:9.0f} {row['error']:8.1e}"
            if row["error"] is not None
            else f"{'-':>9} {'-':>9} {'-':>8}"
        )
        print(
            f"{name:12} {f['p50']:10.3f} {f['p20']:7.3f}-{f['p80']:<7.3f} {f['tflops']:8.0f} "
            f"{b['p50']:11.3f} {b['p20']:7.3f}-{b['p80']:<7.3f} {b['tflops']:8.0f} {memory}",
            flush=True,
        )


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m moeblaze_megatron.bench",
        description="Forward, and forward + backward, of one MoE layer's routed experts: time, "
        "memory beyond inputs and weights, and error against fp32, for this package beside a "
        "dense GEMM chain of the same FLOPs (the ceiling) and a permute + grouped GEMM + unpermute "
        "layer.",
        epilog="Named shapes (T, H, F, E, K): "
        + "; ".join(f"{name} {shape}" for name, shape in SHAPES.items()),
    )
    out.add_argument(
        "shapes",
        nargs="*",
        default=["qwen3-30b", "conf4"],
        help="names, or T,H,F,E,K (default: %(default)s)",
    )
    out.add_argument(
        "--peers", nargs="+", choices=PEERS, default=list(PEERS), help="systems to run"
    )
    out.add_argument("--activation", choices=("swiglu", "silu"), default="swiglu")
    out.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    out.add_argument(
        "--routing", choices=ROUTINGS, default="uneven", help="how tokens choose experts"
    )
    out.add_argument(
        "--steps", type=int, default=30, help="timed steps a system (default: %(default)s)"
    )
    out.add_argument(
        "--sets", type=int, default=2, help="input sets to rotate (default: %(default)s)"
    )
    out.add_argument("--json", type=Path, help="write all figures there")
    return out


def main() -> None:
    p = parser()
    arguments = p.parse_args()
    if arguments.steps < 10 or arguments.sets < 1:
        p.error("--steps is at least 10 and --sets at least 1")
    try:
        shapes = {text: shape_from(text, arguments.activation) for text in arguments.shapes}
    except ValueError as error:
        p.error(str(error))
    if not torch.cuda.is_available():
        sys.exit("moeblaze_megatron.bench: needs a CUDA GPU; none was found")
    header = (
        f"{torch.cuda.get_device_name()}, {versions()}, moeblaze-megatron {__version__}, "
        f"{arguments.dtype}, {arguments.activation}, {arguments.routing} routing, median of "
        f"{arguments.steps} steps"
    )
    print(header)
    report = {"header": header, "shapes": {}}
    for text, shape in shapes.items():
        rows = bench_layer(shape, arguments)
        report["shapes"][text] = rows
        print_table(f"{text}: T, H, F, E, K = {shape}", rows)
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
