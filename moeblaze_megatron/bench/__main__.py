"""`python -m moeblaze_megatron.bench`: time and memory of the MoE layer beside its peers.

All systems run in one process on the same inputs, in turn, so that the GPU's clock is the same for
all; every system's output and gradients are first compared with an fp32 reference.
"""

import argparse
import difflib
import json
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from moeblaze_megatron import command
from moeblaze_megatron.bench import expert_parallel, paper, plots
from moeblaze_megatron.bench.kernels import KERNELS, kernel_calls
from moeblaze_megatron.bench.measure import (
    MIB,
    MODES,
    check,
    host_microseconds,
    measure_memory,
    reference_results,
    release,
    synchronize,
    time_calls,
    time_layers,
)
from moeblaze_megatron.bench.peers import CEILING, OURS, PEERS, chosen, installed, versions
from moeblaze_megatron.bench.shapes import (
    DEVICE,
    ROUTINGS,
    SHAPES,
    Inputs,
    Shape,
    inputs_for,
    shapes_from,
)
from moeblaze_megatron.ops import table
from moeblaze_megatron.ops.activation import ACTIVATIONS
from moeblaze_megatron.ops.memory import LayerBytes
from moeblaze_megatron.processes import signals_interrupt
from moeblaze_megatron.version import __version__

# What another project's code may end with; such a peer is left out of the table, with the reason.
FOREIGN = (ImportError, RuntimeError, ValueError, TypeError, AssertionError)
CPU_FLOPS = 5e9  # of a forward pass: seconds on a CPU
RANK = int(os.environ.get("RANK", 0))  # of torchrun; the first does the talking


def progress(text: str) -> None:
    if RANK == 0:
        print(text, file=sys.stderr, flush=True)


def input_sets(shape: Shape, arguments) -> list[Inputs]:
    dtype = getattr(torch, arguments.dtype)
    return [inputs_for(shape, dtype, arguments.routing, seed) for seed in range(arguments.sets)]


def prepare(title: str, shape: Shape, sets: list[Inputs], peers: list[str]) -> tuple[dict, dict]:
    """Every system built, checked and its memory measured, but not timed yet.

    Returns:
        {system: (layer, its input sets)} of those that can be timed, and {system: row}, where a
        row has "error", "held" and "peak", or "failed", the reason why it is not timed.
    """
    layers, rows = {}, {name: {} for name in peers}
    want = reference_results(shape, sets[0])
    for name in peers:
        peer = PEERS[name]
        if shape.activation not in peer.activations:
            rows[name]["failed"] = f"has {', '.join(peer.activations)}, not {shape.activation}"
            continue
        progress(f"{title}: checking {name}{', which compiles at first use' * bool(peer.imports)}")
        try:
            layer, own = peer.make(shape), [peer.inputs(inputs) for inputs in sets]
            if name != CEILING:
                rows[name]["error"] = check(name, peer, layer, own[0], want)
                rows[name] |= measure_memory(layer, own[0])
        except FOREIGN as error:
            if name in OURS:
                raise
            synchronize()  # raises once more where the GPU itself is in error
            rows[name] = {"failed": f"{type(error).__name__}: {error}"}
        else:
            layers[name] = layer, own
    return layers, rows


def bench_layer(title: str, shape: Shape, arguments) -> dict:
    """{system: row}: error, memory, and for each mode its times, TFLOP/s and share of `dense`."""
    torch.compiler.reset()  # a peer compiles its activation anew for each shape
    sets = input_sets(shape, arguments)
    busiest = sets[0].tokens_per_expert(shape.E).max().item() * shape.E / (shape.T * shape.K)
    layers, rows = prepare(title, shape, sets, arguments.peers)
    progress(f"{title}: timing {', '.join(layers)}")
    for name, times in time_layers(layers, arguments.steps).items():
        for mode, ms in times.items():
            flops = shape.forward_flops * (1 if mode == "forward" else 3)
            rows[name][mode] = {**ms, "tflops": flops / ms["p50"] / 1e9}
    for row in rows.values():
        for mode in MODES if CEILING in layers and "failed" not in row else ():
            row[mode]["of_dense"] = rows[CEILING][mode]["p50"] / row[mode]["p50"]
    del sets, layers
    release()
    print(f"\n{title}: T, H, F, E, K = {shape}; the busiest expert has {busiest:.1f}x the mean")
    return rows


def cell(value: float | None, width: int, form: str = ".0f") -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


def failure(name: str, row: dict) -> str:
    return f"{name:13} not timed: {' '.join(row['failed'].split())[:120]}"


def print_layer(rows: dict) -> None:
    columns = f"{'p20..p80':>17} {'TFLOP/s':>8} {'of dense':>8}"
    print(
        f"{'system':13} {'forward ms':>10} {columns} {'fwd+bwd ms':>11} {columns} "
        f"{'held MiB':>9} {'peak MiB':>9} {'error':>8}"
    )
    for name, row in rows.items():
        if "failed" in row:
            print(failure(name, row))
            continue
        line = f"{name:13}"
        for mode, width in (("forward", 10), ("forward+backward", 11)):
            ms = row[mode]
            line += f" {ms['p50']:{width}.3f} {ms['p20']:8.3f}-{ms['p80']:<8.3f}"
            line += f" {ms['tflops']:8.0f} {cell(ms.get('of_dense'), 8, '.1%')}"
        held, peak, error = (row.get(key) for key in ("held", "peak", "error"))
        print(f"{line} {cell(held, 9)} {cell(peak, 9)} {cell(error, 8, '.1e')}", flush=True)


def plot_layer(folder: Path, title: str, header: str, rows: dict) -> Path:
    timed = {name: row for name, row in rows.items() if "failed" not in row}
    time = {mode: {name: row[mode]["p50"] for name, row in timed.items()} for mode in MODES}
    memory = {
        what: {name: row[what] for name, row in timed.items() if what in row}
        for what in ("held", "peak")
    }
    panels = {"milliseconds": time, "MiB beyond inputs and weights": memory}
    path = folder / f"layer_{title.replace(',', '_')}.png"
    return plots.bars(path, f"{title}\n{header}", panels)


def run_layer(arguments, report: dict) -> None:
    for title, shape in arguments.shapes:
        rows = report[title] = bench_layer(title, shape, arguments)
        print_layer(rows)
        if arguments.plot:
            print(f"wrote {plot_layer(arguments.plot, title, report['header'], rows)}")


def closed_form(shape: Shape, element_size: int) -> dict[str, float]:
    """MiB of what a layer without permuted buffers has to hold, and of its peak.

    peak = output + fc1_output + max(act + grad_fc2_weight,
                                     grad_fc1_weight + grad_fc2_weight + grad_x)
    """
    rows, weights = shape.T * shape.K, shape.E * shape.H
    form = LayerBytes(
        output=shape.T * shape.H * element_size,
        fc1_output=rows * shape.fc1_width * element_size,
        act=rows * shape.F * element_size,
        fc1_weight=weights * shape.fc1_width * element_size,
        fc2_weight=weights * shape.F * element_size,
    )
    return {"held": form.fc1_output / MIB, "peak": form.peak / MIB}


def print_memory(shape: Shape, rows: dict, form: dict) -> None:
    print(
        f"{'system':13} {'held MiB':>9} {'of form':>8} {'bytes/token':>12} {'peak MiB':>9} "
        f"{'of form':>8} {'fwd+bwd ms':>11} {'error':>8}"
    )
    print(
        f"{'closed form':13} {form['held']:9.0f} {'':8} {form['held'] * MIB / shape.T:12.0f} "
        f"{form['peak']:9.0f}"
    )
    for name, row in rows.items():
        if "failed" in row:
            print(failure(name, row))
            continue
        held, peak = row["held"], row["peak"]
        shares = [row[what] and row[what] / form[what] for what in ("held", "peak")]
        print(
            f"{name:13} {cell(held, 9)} {cell(shares[0], 8, '.3f')} "
            f"{cell(held and held * MIB / shape.T, 12)} {cell(peak, 9)} "
            f"{cell(shares[1], 8, '.3f')} {row['forward+backward']['p50']:11.3f} "
            f"{row['error']:8.1e}",
            flush=True,
        )


def run_memory(arguments, report: dict) -> None:
    for title, shape in arguments.shapes:
        rows = report[title] = bench_layer(title, shape, arguments)
        form = closed_form(shape, getattr(torch, arguments.dtype).itemsize)
        print_memory(shape, rows, form)
        rows["closed form"] = form


def run_kernels(arguments, report: dict) -> None:
    for title, shape in arguments.shapes:
        inputs = inputs_for(shape, getattr(torch, arguments.dtype), arguments.routing)
        work, calls, restore = kernel_calls(shape, inputs)
        if arguments.kernels:
            calls = {name: calls[name] for name in calls if name in arguments.kernels}
        report[title] = time_calls(calls, arguments.steps, restore)
        print(f"\n{title}: T, H, F, E, K = {shape}")
        print(f"{'kernel':20} {'ms':>8} {'p20..p80':>15} {'rate':>16} {'of dense':>9}")
        for name, ms in report[title].items():
            amount, unit = work[name]
            rate = f"{amount / ms['p50'] / 1e9:8.{0 if unit == 'TFLOP/s' else 2}f} {unit:7}"
            ceiling = report[title].get(name.split(",")[0] + ", dense")
            share = f"{ceiling['p50'] / ms['p50']:9.1%}" if ceiling else ""
            spread = f"{ms['p20']:7.3f}-{ms['p80']:<7.3f}"
            print(f"{name:20} {ms['p50']:8.3f} {spread} {rate} {share}".rstrip(), flush=True)
        del inputs, calls, restore
        release()


def run_host(arguments, report: dict) -> None:
    print(f"\n{'host time of a layer, us':24} {'':13}{'alone':>22}{f'of {arguments.sets}':>22}")
    print(f"{'':24} {'system':13}" + 2 * f"{'forward':>11}{'fwd+bwd':>11}")
    for title, shape in arguments.shapes:
        layers, rows = prepare(title, shape, input_sets(shape, arguments), arguments.peers)
        report[title] = rows
        for name, (layer, sets) in layers.items():
            for kind, stack in (("alone", sets[:1]), ("stacked", sets)):
                for mode in MODES:
                    backward = mode != "forward"
                    host_microseconds(layer, stack, backward)  # compiles
                    us = host_microseconds(layer, stack, backward, arguments.steps)
                    rows[name][f"{mode}, {kind}"] = us
        for name, row in rows.items():
            if "failed" in row:
                print(f"{title:24} {failure(name, row)}")
            else:
                keys = [f"{mode}, {kind}" for kind in ("alone", "stacked") for mode in MODES]
                us = "".join(f"{row[key]:11.0f}" for key in keys)
                print(f"{title:24} {name:13}{us}", flush=True)


def run_scaling(arguments, report: dict) -> None:
    """Doubling T, E (at the same T*K) and K, each from the shape on, all in one interleaved run."""
    _, base = arguments.shapes[0]
    print(
        f"\nfrom T, H, F, E, K = {base}\n{'':7} {'system':13} {'forward ms':>10} {'ratio':>6} "
        f"{'fwd+bwd ms':>11} {'ratio':>6} {'peak MiB':>9} {'ratio':>6}"
    )
    panels = {}
    for letter in "TEK":
        torch.compiler.reset()
        layers, rows = {}, {}
        for size in (getattr(base, letter) * factor for factor in (1, 2, 4)):
            shape = replace(base, **{letter: size})
            sets = input_sets(shape, arguments)
            made, found = prepare(f"{letter}={size}", shape, sets, arguments.peers)
            layers |= {(name, size): layer for name, layer in made.items()}
            rows |= {(name, size): row for name, row in found.items()}
        progress(f"{letter}: timing {', '.join(arguments.peers)}")
        for key, times in time_layers(layers, arguments.steps).items():
            rows[key] |= times
        report[letter] = {f"{name} {size}": row for (name, size), row in rows.items()}
        panels[letter] = print_scaling(letter, rows)
        del layers, made, sets
        release()
    if arguments.plot:
        title = f"from T, H, F, E, K = {base}\n{report['header']}"
        print(f"wrote {plots.curves(arguments.plot / 'scaling.png', title, panels)}")


def print_scaling(letter: str, rows: dict) -> dict[str, dict[int, float]]:
    """Prints {(system, size): row}; returns {system: {size: milliseconds}}."""
    curves, first = {}, {}
    for (name, size), row in sorted(rows.items(), key=lambda item: list(PEERS).index(item[0][0])):
        label = f"{letter}={size}"
        if "failed" in row:
            print(f"{label:7} {failure(name, row)}")
            continue
        values = {mode: row[mode]["p50"] for mode in MODES} | {"peak": row.get("peak")}
        base = first.setdefault(name, values)
        line = f"{label:7} {name:13}"
        for what, value in values.items():
            width, form = (9, ".0f") if what == "peak" else (9 + len(what) // 8, ".3f")
            ratio = value and base[what] and value / base[what]
            line += f" {cell(value, width, form)} {cell(ratio, 6, '.2f')}"
        print(line, flush=True)
        curves.setdefault(name, {})[size] = values["forward+backward"]
    return curves


def run_paper(arguments, report: dict) -> None:
    """The paper's figures: seven configurations, memory and speed, for both its activations."""
    rows = {activation: {} for activation in paper.ACTIVATIONS}
    report["paper"] = rows
    try:
        for activation in paper.ACTIVATIONS:
            for title, shape in arguments.shapes:
                shape = replace(shape, activation=activation)
                rows[activation][title] = bench_layer(title, shape, arguments)
                print_layer(rows[activation][title])
    finally:  # of what was measured before an interrupt
        print(paper.table(rows), flush=True)
    if arguments.plot:
        for path in paper.plot(rows, arguments.plot):
            print(f"wrote {path}")


def run_expert_parallel(arguments, report: dict) -> None:
    for title, shape in arguments.shapes:
        rows = report[title] = expert_parallel.bench(title, shape, arguments, progress)
        if RANK == 0:
            expert_parallel.print_rows(title, shape, rows, cell)
        release()
    torch.distributed.destroy_process_group()


def run_weak_scaling(arguments, report: dict) -> None:
    """More ranks, each with as many tokens and fewer experts: the same time would be 100 %."""
    found = {n: expert_parallel.run_ranks(n, arguments, progress) for n in arguments.ranks}
    report["weak_scaling"] = {f"{n} ranks": rows for n, rows in found.items()}
    print(f"versions and systems: {found[arguments.ranks[-1]]['header']}")
    for title, shape in arguments.shapes:
        by_ranks = {number: rows[title] for number, rows in found.items()}
        expert_parallel.print_scaling(title, shape, by_ranks, cell)


COMMANDS = {
    "layer": (run_layer, "forward and forward + backward, memory and error (the default)"),
    "memory": (run_memory, "bytes held for backward and peak, against their closed form"),
    "scaling": (run_scaling, "how time and peak grow when T, E and K double, twice"),
    "kernels": (run_kernels, "every kernel of this package alone, in TFLOP/s or TB/s"),
    "host": (
        run_host,
        "what launching a layer costs the host, alone and in a stack, beside the peers",
    ),
    "paper": (run_paper, "the MoEBlaze paper's seven configurations, its figures beside ours"),
    "expert_parallel": (
        run_expert_parallel,
        "dispatch, experts and combine over the ranks of torchrun, beside Megatron's own",
    ),
    "weak_scaling": (
        run_weak_scaling,
        "expert_parallel with 1, 2, 4, ... ranks of this machine, as many tokens on each",
    ),
}
ALONE = ("kernels", "expert_parallel", "weak_scaling")  # commands without other packages
NO_CEILING = ("memory", "host")  # commands that time or weigh whole layers
DEFAULT_SHAPES = {
    "paper": paper.CONFIGURATIONS,
    "scaling": ("8192,2048,1024,32,4",),
    "host": ("2048,1024,512,32,4",),
    "expert_parallel": ("qwen3-30b", "conf4", "mixtral-8x7b", "conf2"),  # K = 8, 4, 2, 2
    "weak_scaling": ("qwen3-30b", "mixtral-8x7b"),
}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m moeblaze_megatron.bench",
        description="One MoE layer's routed experts: time, memory beyond inputs and weights, and "
        "error against fp32, for this package beside a dense GEMM chain of the same FLOPs (the "
        "ceiling), a permute + grouped GEMM + unpermute layer, and other packages where installed. "
        "COMMAND --help lists the options of one.",
    )
    commands = out.add_subparsers(dest="command", metavar="COMMAND")
    names = "; names: " + "; ".join(f"{known} = {shape}" for known, shape in SHAPES.items())
    for name, (_, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        add = command.add_argument
        default = list(DEFAULT_SHAPES.get(name, ("qwen3-30b", "conf4")))
        if name == "paper":
            command.set_defaults(shapes=default, activation="swiglu", peers=None)
        else:
            about_shapes = "T,H,F,E,K or a name (default: %(default)s)" + names
            add("shapes", nargs="*" if name != "scaling" else "?", default=default,
                help=about_shapes)  # fmt: skip
            if name in ("expert_parallel", "weak_scaling"):
                command.set_defaults(activation="swiglu")
            else:
                add("--activation", choices=ACTIVATIONS, default="swiglu")
        if name == "weak_scaling":
            add("--ranks", nargs="+", type=int, metavar="N",
                help="numbers of ranks (default: 1, 2, 4, ... up to all GPUs)")  # fmt: skip
        if name not in ("paper", *ALONE):
            usual = "moeblaze grouped_mm" if name == "scaling" else "all that are installed"
            usual += f" but {CEILING}" * (name in NO_CEILING)
            add("--peers", nargs="+", metavar="PEER",
                help=f"systems to run (default: {usual}); of {', '.join(PEERS)}; installed here: "
                + ", ".join(installed()))  # fmt: skip
        if name == "kernels":
            add("--kernels", nargs="+", choices=KERNELS, metavar="KERNEL",
                help=f"which (default: all); of {'; '.join(KERNELS)}")  # fmt: skip
        if name in ("layer", "scaling", "paper"):
            add("--plot", type=Path, metavar="DIR", help="write PNGs there; needs matplotlib")
        add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
        add("--routing", choices=ROUTINGS, default="uneven",
            help="how tokens choose experts (default: %(default)s)")  # fmt: skip
        add("--steps", type=int, default=30, help="timed steps a system (default: %(default)s)")
        if name == "host":
            add("--layers", dest="sets", metavar="N", type=int, default=8,
                help="how many are stacked, as in a model (default: %(default)s)")  # fmt: skip
        else:
            add("--sets", type=int, default=2, help="input sets to rotate (default: %(default)s)")
        add("--json", type=Path, metavar="FILE", help="write all figures there")
    return out


def usual_peers(command: str) -> list[str]:
    """What runs without --peers."""
    if command == "scaling":
        return ["moeblaze", "grouped_mm"]
    if command == "paper":
        return [name for name in installed() if name in (paper.OURS, *paper.BASELINES)]
    return [name for name in installed() if name != CEILING or command not in NO_CEILING]


def settle(arguments) -> None:
    """Shapes and peers by name become what they mean.

    Raises:
        ValueError: naming what is wrong, and what to do.
    """
    table.use(None)
    reasons, plot = [], getattr(arguments, "plot", None)
    if arguments.steps < 10 or arguments.sets < 1:
        sets = "--layers" if arguments.command == "host" else "--sets"
        reasons.append(f"--steps is at least 10 and {sets} at least 1")
    if arguments.json and not command.can_write(arguments.json):
        reasons.append(f"--json {arguments.json} cannot be written; name another file")
    if plot and plot.exists() and not plot.is_dir():
        reasons.append(f"--plot {plot} is no folder; name another")
    if plot and not find_spec("matplotlib"):
        reasons.append("--plot needs matplotlib: pip install matplotlib")
    texts = [arguments.shapes] if isinstance(arguments.shapes, str) else arguments.shapes
    try:
        arguments.shapes = shapes_from(texts, arguments.activation)
    except ValueError as error:
        reasons.append(str(error))
    if reasons:
        raise ValueError("; ".join(reasons))
    if arguments.command == "scaling":
        text, shape = arguments.shapes[0]
        if shape.K * 4 > shape.E:
            raise ValueError(f"shape {text!r}: scaling makes K four times as large, so that "
                             "E is at least 4*K")  # fmt: skip
    if arguments.command == "expert_parallel":
        expert_parallel.check_ranks(arguments.shapes)
    if arguments.command == "weak_scaling":
        expert_parallel.check_scaling(arguments)
    if arguments.command not in ALONE:
        arguments.peers = chosen(arguments.peers or usual_peers(arguments.command))
    if arguments.command in NO_CEILING and CEILING in arguments.peers:
        raise ValueError(
            f"--peers: {arguments.command} does not run {CEILING}, which is GEMMs and no layer; "
            "leave it out"
        )
    for text, shape in arguments.shapes if DEVICE == "cpu" else ():
        if shape.forward_flops > CPU_FLOPS:
            raise ValueError(
                f"no CUDA GPU was found, and {text} is too large for a CPU"
                + ("" if arguments.command == "paper" else ": try 512,256,128,8,2")
            )


def main() -> None:
    words, p = sys.argv[1:], parser()
    if not words or (words[0] not in COMMANDS and words[0] not in ("-h", "--help")):
        if words and words[0].isidentifier() and words[0] not in SHAPES:
            near = difflib.get_close_matches(words[0], [*COMMANDS, *SHAPES])
            p.error(
                f"{words[0]!r} is neither a command ({', '.join(COMMANDS)}) nor a shape "
                f"({', '.join(SHAPES)})" + f"; did you mean {' or '.join(near)}?" * bool(near)
            )
        words = ["layer", *words]
    arguments = p.parse_args(words)
    try:
        settle(arguments)
    except ValueError as error:
        p.error(str(error))
    ranks = expert_parallel.start() if arguments.command == "expert_parallel" else ""
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU (memory is not measured)"
    activation = "silu and swiglu" if arguments.command == "paper" else arguments.activation
    header = (
        f"{where}, {versions(getattr(arguments, 'peers', []))}, moeblaze-megatron {__version__}, "
        f"{arguments.dtype}, {activation}, {arguments.routing} routing, median of "
        f"{arguments.steps} steps"
    )
    if arguments.command == "expert_parallel":
        header += f", {ranks}; {expert_parallel.ABOUT}"
    if RANK == 0:
        print(header, flush=True)
    report = {"header": header}
    try:
        with signals_interrupt():
            COMMANDS[arguments.command][0](arguments, report)
    except KeyboardInterrupt:
        sys.exit("bench: interrupted")
    finally:  # what was measured before an error or an interrupt is kept
        if arguments.json and RANK == 0 and len(report) > 1:
            arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    command.run(main)
