"""`python -m moeblaze_megatron.bench`: time and memory of the MoE layer beside its peers.

All systems run in one process on the same inputs, in turn, so that the GPU's clock is the same for
all; every system's output and gradients are first compared with an fp32 reference.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

from moeblaze_megatron.bench import paper
from moeblaze_megatron.bench.kernels import kernel_calls
from moeblaze_megatron.bench.measure import (
    check,
    forward,
    forward_backward,
    host_microseconds,
    measure_memory,
    reference_results,
    time_calls,
    time_layers,
)
from moeblaze_megatron.bench.peers import PEERS, versions
from moeblaze_megatron.bench.shapes import ROUTINGS, SHAPES, Shape, inputs_for, shape_from
from moeblaze_megatron.ops.activation import ACTIVATIONS
from moeblaze_megatron.version import __version__

CEILING = "dense"  # computes no MoE: no error, no memory


def bench_layer(shape: Shape, arguments) -> dict:
    """Times, memory and errors of every system at one shape."""
    torch.compiler.reset()  # a peer compiles its activation anew for each shape
    dtype = getattr(torch, arguments.dtype)
    sets = [inputs_for(shape, dtype, arguments.routing, seed) for seed in range(arguments.sets)]
    layers = {name: PEERS[name](shape) for name in arguments.peers}
    rows = {name: {} for name in layers}
    want = reference_results(shape, sets[0])
    for name, layer in layers.items():
        if name != CEILING:
            rows[name]["error"] = check(name, layer, shape, sets[0], want)
    del want
    for name, layer in layers.items():
        if name != CEILING:
            rows[name] |= measure_memory(layer, sets[0])
    for name, times in time_layers(layers, sets, arguments.steps).items():
        for mode, ms in times.items():
            flops = shape.forward_flops * (1 if mode == "forward" else 3)
            rows[name][mode] = {**ms, "tflops": flops / ms["p50"] / 1e9}
    return rows


def print_layer(title: str, rows: dict) -> None:
    print(f"\n{title}")
    print(
        f"{'system':12} {'forward ms':>10} {'p20..p80':>15} {'TFLOP/s':>8} {'fwd+bwd ms':>11} "
        f"{'p20..p80':>15} {'TFLOP/s':>8} {'held MiB':>9} {'peak MiB':>9} {'error':>8}"
    )
    for name, row in rows.items():
        f, b = row["forward"], row["forward+backward"]
        memory = f"{'-':>9} {'-':>9} {'-':>8}"
        if name != CEILING:
            memory = f"{row['held']:9.0f} {row['peak']:9.0f} {row['error']:8.1e}"
        print(
            f"{name:12} {f['p50']:10.3f} {f['p20']:7.3f}-{f['p80']:<7.3f} {f['tflops']:8.0f} "
            f"{b['p50']:11.3f} {b['p20']:7.3f}-{b['p80']:<7.3f} {b['tflops']:8.0f} {memory}",
            flush=True,
        )


def run_layer(arguments) -> dict:
    shapes = {}
    for text, shape in arguments.shapes:
        shapes[text] = bench_layer(shape, arguments)
        print_layer(f"{text}: T, H, F, E, K = {shape}", shapes[text])
        torch.cuda.empty_cache()
    return {"shapes": shapes}


def run_kernels(arguments) -> dict:
    report = {}
    for text, shape in arguments.shapes:
        inputs = inputs_for(shape, getattr(torch, arguments.dtype), arguments.routing)
        work, calls = kernel_calls(shape, inputs)
        report[text] = time_calls(calls, arguments.steps)
        print(f"\n{text}: T, H, F, E, K = {shape}\n{'kernel':20} {'ms':>8} {'p20..p80':>15}")
        for name, ms in report[text].items():
            amount, unit = work[name]
            rate = f"{amount / ms['p50'] / 1e9:8.{0 if unit == 'TFLOP/s' else 2}f} {unit}"
            print(
                f"{name:20} {ms['p50']:8.3f} {ms['p20']:7.3f}-{ms['p80']:<7.3f} {rate}", flush=True
            )
        del inputs, calls
        torch.cuda.empty_cache()
    return {"kernels": report}


def run_host(arguments) -> dict:
    report = {}
    print(f"\n{'host time of one layer':24} {'system':12} {'forward us':>11} {'fwd+bwd us':>11}")
    for text, shape in arguments.shapes:
        inputs = inputs_for(shape, getattr(torch, arguments.dtype), arguments.routing)
        report[text] = {}
        for name in arguments.peers:
            layer = PEERS[name](shape)
            calls = [partial(run, layer, inputs) for run in (forward, forward_backward)]
            for call in calls:
                host_microseconds(call, 3)  # compiles
            report[text][name] = [host_microseconds(call, arguments.steps) for call in calls]
            forward_us, both_us = report[text][name]
            print(f"{text:24} {name:12} {forward_us:11.0f} {both_us:11.0f}", flush=True)
    return {"host_us": report}


def run_paper(arguments) -> dict:
    """The paper's figures: seven configurations, memory and speed, for both its activations."""
    report = {}
    for activation in ("silu", "swiglu"):
        report[activation] = {}
        for name in paper.CONFIGURATIONS:
            report[activation][name] = bench_layer(shape_from(name, activation), arguments)
            print(f"{activation} {name} done", file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
    print(paper.table(report))
    if arguments.plots:
        for path in paper.plot(report, arguments.plots):
            print(f"wrote {path}")
    return report


COMMANDS = {
    "layer": (run_layer, "forward and forward + backward, memory and error (the default)"),
    "kernels": (run_kernels, "every kernel of this package alone, in TFLOP/s or TB/s"),
    "host": (run_host, "what launching a layer costs the host, beside the peers"),
    "paper": (run_paper, "the MoEBlaze paper's seven configurations, its figures beside ours"),
}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m moeblaze_megatron.bench",
        description="One MoE layer's routed experts: time, memory beyond inputs and weights, and "
        "error against fp32, for this package beside a dense GEMM chain of the same FLOPs (the "
        "ceiling) and a permute + grouped GEMM + unpermute layer.",
    )
    commands = out.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        if name == "paper":
            command.add_argument("--plots", type=Path, metavar="DIR", help="write PNGs there")
            command.set_defaults(
                shapes=paper.CONFIGURATIONS, activation="swiglu", peers=list(PEERS)
            )
        else:
            command.add_argument(
                "shapes",
                nargs="*",
                default=["qwen3-30b", "conf4"],
                help="T,H,F,E,K or a name (default: %(default)s); names: "
                + "; ".join(f"{known} = {shape}" for known, shape in SHAPES.items()),
            )
            command.add_argument("--activation", choices=ACTIVATIONS, default="swiglu")
            if name != "kernels":  # those are this package's alone
                command.add_argument(
                    "--peers", nargs="+", choices=PEERS, default=list(PEERS), help="systems to run"
                )
        command.add_argument(
            "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16"
        )
        command.add_argument(
            "--routing", choices=ROUTINGS, default="uneven", help="how tokens choose experts"
        )
        command.add_argument(
            "--steps", type=int, default=30, help="timed steps a system (default: %(default)s)"
        )
        command.add_argument(
            "--sets", type=int, default=2, help="input sets to rotate (default: %(default)s)"
        )
        command.add_argument("--json", type=Path, help="write all figures there")
    return out


def main() -> None:
    words = sys.argv[1:]
    if not words or (words[0] not in COMMANDS and words[0] not in ("-h", "--help")):
        words = ["layer", *words]
    p = parser()
    arguments = p.parse_args(words)
    if arguments.steps < 10 or arguments.sets < 1:
        p.error("--steps is at least 10 and --sets at least 1")
    try:
        arguments.shapes = [
            (text, shape_from(text, arguments.activation)) for text in arguments.shapes
        ]
    except ValueError as error:
        p.error(str(error))
    if not torch.cuda.is_available():
        sys.exit("moeblaze_megatron.bench: needs a CUDA GPU; none was found")
    activation = "both activations" if arguments.command == "paper" else arguments.activation
    header = (
        f"{torch.cuda.get_device_name()}, {versions()}, moeblaze-megatron {__version__}, "
        f"{arguments.dtype}, {activation}, {arguments.routing} routing, median of "
        f"{arguments.steps} steps"
    )
    print(header)
    report = {"header": header, **COMMANDS[arguments.command][0](arguments)}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
