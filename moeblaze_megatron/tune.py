"""Finds the kernel configurations that are fastest on this GPU: `python -m moeblaze_megatron.tune`.

One setting after another is tried, from the configuration in use on: first where rows are copied,
by the time of the whole layer; then those of every kernel, on the very calls that a forward and
backward pass made of it. A candidate is first compared with the eager twins. What is found is
written as a table for MOEBLAZE_KERNEL_TABLE or `--moeblaze-kernel-table`; training tunes nothing.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from triton.errors import TritonError

from moeblaze_megatron import aot, command
from moeblaze_megatron.bench.measure import (
    ERROR_LIMIT,
    check,
    forward_backward,
    reference_results,
    release,
    synchronize,
    time_calls,
)
from moeblaze_megatron.bench.peers import PEERS, versions
from moeblaze_megatron.bench.shapes import (
    DEVICE,
    ROUTINGS,
    SHAPES,
    Inputs,
    Shape,
    inputs_for,
    shapes_from,
)
from moeblaze_megatron.ops import experts, kernels, reference, table
from moeblaze_megatron.ops.activation import ACTIVATIONS
from moeblaze_megatron.ops.table import Configuration, Copy, Key, Ring, Table, Tile
from moeblaze_megatron.ops.tiles import interpreting
from moeblaze_megatron.version import __version__

# Settings to try together, one group after the other; each setting is part of a candidate.
KNOBS = {
    Copy: (
        [{"ffn": 0}, {"ffn": None}],
        [{"width": 0}, {"width": None}],
    ),
    Ring: (
        [
            {"multiply_registers": 168, "load_registers": 176, "finish_registers": None},
            {"multiply_registers": 160, "load_registers": 96, "finish_registers": 96},
        ],
        [{"group": group} for group in (2, 4, 8, 16, 32)],
    ),
    Tile: (
        [{"cols": cols, "depth": depth} for cols in (64, 128, 256) for depth in (32, 64)],
        [{"num_warps": warps} for warps in (4, 8)],
        [{"num_stages": stages} for stages in (2, 3, 4)],
        [{"group": group} for group in (4, 8, 16)],
    ),
}
PROCESSES = 16  # that compile, at most
GAIN = 0.01  # of the time, below which a configuration stays as it is
# What a kernel fails with that does not compile, does not fit the GPU or computes something else.
FAILURES = (TritonError, RuntimeError, ValueError, AssertionError)


@dataclass(frozen=True)
class Call:
    """A kernel launch of the layer: the launcher's name in `kernels`, and what it was given."""

    name: str
    arguments: tuple
    options: dict

    def run(self, ops=kernels) -> object:
        return getattr(ops, self.name)(*self.arguments, **self.options)

    def results(self, ops) -> list[torch.Tensor]:
        """All tensors afterwards, its arguments too, of which it runs on a copy."""
        arguments = [a.clone() if torch.is_tensor(a) else a for a in self.arguments]
        options = {k: a.clone() if torch.is_tensor(a) else a for k, a in self.options.items()}
        returned = getattr(ops, self.name)(*arguments, **options)
        returned = returned if isinstance(returned, tuple) else (returned,)
        everything = (*arguments, *options.values(), *returned)
        return [tensor for tensor in everything if torch.is_tensor(tensor)]


def layer_of(shape: Shape) -> Callable[[Inputs], torch.Tensor]:
    return PEERS["moeblaze"].make(shape)


def meta_inputs(shape: Shape, dtype: torch.dtype) -> Inputs:
    """Shapes without data, to see what a layer launches, or to compile it."""

    def tensor(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        grad = dtype.is_floating_point
        return torch.empty(size, dtype=dtype, device="meta", requires_grad=grad)

    return Inputs(
        x=tensor(shape.T, shape.H),
        weights=(tensor(shape.E, shape.fc1_width, shape.H), tensor(shape.E, shape.H, shape.F)),
        topk_indices=tensor(shape.T, shape.K, dtype=torch.int32),
        topk_probs=tensor(shape.T, shape.K, dtype=torch.float32),
        grad_output=tensor(shape.T, shape.H).detach(),
    )


def copy_key(shape: Shape, inputs: Inputs) -> Key:
    with table.recording() as notes:
        table.configuration("copy", inputs.x, shape.F, shape.H)
    return next(iter(notes))


def calls_of(shape: Shape, inputs: Inputs) -> dict[Key, list[Call]]:
    """Runs the layer forward and backward; its launches, by the entry that they look up."""
    calls: dict[Key, list[Call]] = {}

    def noted(name: str) -> Callable:
        def launch(*arguments, **options):
            with table.recording() as notes:
                result = getattr(kernels, name)(*arguments, **options)
            for key in notes:
                calls.setdefault(key, []).append(Call(name, arguments, options))
            return result

        return launch

    ops = SimpleNamespace(**{name: noted(name) for name in kernels.__all__})
    with patch.object(experts, "kernels_for", return_value=ops):
        forward_backward(layer_of(shape), inputs)
    return calls


def planned(shape: Shape, dtype: torch.dtype, arch: int) -> list[Key]:
    """The entries that decide how the shape's layer runs; launches nothing."""
    inputs = meta_inputs(shape, dtype)
    with aot.launching_nothing(arch), aot.on_meta():
        return [copy_key(shape, inputs), *calls_of(shape, inputs)]


def candidates(key: Key, base: Configuration, knob: int) -> list[Configuration]:
    """The base first, then what differs from it in the knob and fits."""
    knobs = KNOBS[type(base)]
    changes = knobs[knob] if knob < len(knobs) else []
    if key.kernel == "wgrad_hopper":  # finishes nothing
        changes = [change for change in changes if "finish_registers" not in change]
    changed = [replace(base, **change) for change in changes]
    fitting = [other for other in changed if not list(other.reasons(key.kernel, key.gpu))]
    return list(dict.fromkeys([base, *fitting]))


def difference(base: Configuration | None, other: Configuration) -> str:
    """The settings that `other` does not share with `base`."""
    shared = vars(base).items() if base else ()
    settings = [
        f"{name}={value}" for name, value in vars(other).items() if (name, value) not in shared
    ]
    return " ".join(settings) or "in use"


def row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error of a row, by its norm or, where that is less, the root mean square of all.

    Over the whole tensor, a tile of wrong rows would vanish among so many right ones.
    """
    got, want = (each.float().reshape(-1, each.shape[-1]) for each in (got, want))
    norms = want.norm(dim=1)
    mean = norms.square().mean().sqrt().clamp(min=1e-30)
    return ((got - want).norm(dim=1) / norms.clamp(min=mean)).max().item()


def verify_calls(calls: list[Call]) -> None:
    """Raises ValueError if a call is further from its eager twin than the dtype explains."""
    for call in calls:
        for got, want in zip(call.results(kernels), call.results(reference), strict=True):
            if want.is_floating_point() and want.numel():
                error = row_error(got, want)
                limit = ERROR_LIMIT.get(want.dtype, 1e-4)
                if not error <= limit:
                    raise ValueError(f"{call.name} is off by {error:.1e}")


def run_calls(calls: list[Call]) -> None:
    for call in calls:
        call.run()


def compile_layer(
    shape: Shape, dtype: torch.dtype, arch: int, copy: Copy, kernel: str, choice: Configuration
) -> None:
    """Fills Triton's cache: the layer's kernels with one candidate, for `sm_<arch>`."""
    with (
        aot.compiling(arch),
        aot.on_meta(),
        table.override("copy", copy),
        table.override(kernel, choice),
    ):
        try:
            forward_backward(layer_of(shape), meta_inputs(shape, dtype))
        except FAILURES:
            pass  # it fails where it is run, too, and is skipped there with the reason


class Compilers:
    """Processes that compile what is going to be tried, while something else is timed."""

    def __init__(self, dtype: torch.dtype, arch: int):
        self.dtype, self.arch, self.jobs = dtype, arch, {}
        self.pool = ProcessPoolExecutor(
            min(PROCESSES, os.cpu_count()),
            multiprocessing.get_context("spawn"),
            initializer=signal.signal,  # an interrupt is ours to handle
            initargs=(signal.SIGINT, signal.SIG_IGN),
        )

    def start(
        self, shape: Shape, copy: Copy, kernel: str, choices: list[Configuration]
    ) -> list[Future]:
        """Of a layer that copies rows as `copy` says."""
        started = []
        for choice in choices:
            job = (shape, self.dtype, self.arch, copy, kernel, choice)
            if job not in self.jobs:
                self.jobs[job] = self.pool.submit(compile_layer, *job)
            started.append(self.jobs[job])
        return started

    def stop(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


class Tuner:
    """Tries candidates on this GPU; `found` is the table so far.

    Args:
        deadline: of `time.monotonic`, after which nothing more is tried.
        compilers: None where nothing is compiled.
        time_calls: as in `bench.measure`.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        routing: str,
        steps: int,
        deadline: float,
        compilers: Compilers | None,
        time_calls: Callable,
    ):
        self.dtype, self.routing, self.steps, self.deadline = dtype, routing, steps, deadline
        self.compilers, self.time_calls = compilers, time_calls
        self.found: Table = {}
        self.gains: dict[Key, float] = {}
        self.done = self.total = 0
        self.gpu = table.gpus_of(torch.empty(0, device=DEVICE))[0]

    def progress(self, text: str) -> None:
        filled = min(20, 20 * self.done // max(1, self.total))
        print(f"[{'#' * filled:.<20}] {text}", file=sys.stderr, flush=True)

    def expect(self, shapes: list[tuple[str, Shape]], arch: int) -> None:
        """Counts what there is to do, and has the first of it compiled."""
        for _, shape in shapes:
            keys = [replace(key, gpu=self.gpu) for key in planned(shape, self.dtype, arch)]
            copy = table.lookup(keys[0])
            for key in keys:
                base = table.lookup(key)
                knobs = range(len(KNOBS[type(base)]))
                self.total += sum(len(candidates(key, base, knob)) > 1 for knob in knobs)
                if self.compilers:
                    self.compilers.start(shape, copy, key.kernel, candidates(key, base, 0))

    def tune(self, title: str, shape: Shape) -> None:
        """Finds the entries of one shape; those found for an earlier one stay."""
        inputs = inputs_for(shape, self.dtype, self.routing)
        key = copy_key(shape, inputs)
        if key not in self.found:
            layer, want = layer_of(shape), reference_results(shape, inputs)
            verify = partial(check, "moeblaze", PEERS["moeblaze"], layer, inputs, want)
            tasks = {key: (partial(forward_backward, layer, inputs), verify)}
            self.improve(title, shape, table.lookup(key), tasks)
            del want, verify, tasks
        copy = self.found.get(key) or table.lookup(key)
        with table.override("copy", copy):
            calls = calls_of(shape, inputs)
        tasks = {
            key: (partial(run_calls, made), partial(verify_calls, made))
            for key, made in calls.items()
            if key not in self.found
        }
        self.improve(title, shape, copy, tasks)

    def improve(
        self,
        title: str,
        shape: Shape,
        copy: Copy,
        tasks: dict[Key, tuple[Callable, Callable]],
    ) -> None:
        """{key: (what to time, what to verify before)}, knob by knob."""
        for knob in range(max(len(knobs) for knobs in KNOBS.values())):
            choices_of = {}
            for key in tasks:
                choices = candidates(key, self.found.get(key) or table.lookup(key), knob)
                jobs = ()
                if self.compilers:
                    jobs = self.compilers.start(shape, copy, key.kernel, choices)
                if len(choices) > 1:
                    choices_of[key] = choices, jobs
            for key, (choices, jobs) in choices_of.items():
                if time.monotonic() > self.deadline:
                    raise TimeoutError
                wait(jobs)
                run, verify = tasks[key]
                self.done += 1
                self.found[key] = self.fastest(f"{title}, {key}", key, choices, run, verify)

    def fastest(
        self,
        name: str,
        key: Key,
        choices: list[Configuration],
        run: Callable[[], object],
        verify: Callable[[], object],
    ) -> Configuration:
        """Of the choices that pass; the first, in use so far, unless another gains by GAIN."""
        base, calls = choices[0], {}
        for choice in choices:
            try:
                with table.override(key.kernel, choice):
                    verify()
                synchronize()
            except FAILURES as error:
                if choice is base:
                    raise
                synchronize()  # raises once more where the GPU itself is in error
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                self.progress(f"{name}: skipped {difference(base, choice)}: {reason}")
            else:
                calls[choice] = partial(run_with, key.kernel, choice, run)
        ms = {choice: times["p50"] for choice, times in self.time_calls(calls, self.steps).items()}
        best = min(ms, key=ms.get)
        if ms[best] > (1 - GAIN) * ms[base]:
            best = base
        self.gains[key] = self.gains.get(key, 1.0) * ms[base] / ms[best]
        timed = ", ".join(f"{difference(base, choice)}: {ms[choice]:.3f}" for choice in ms)
        self.progress(f"{name}: {timed} ms -> {difference(base, best)}")
        return best


def run_with(kernel: str, choice: Configuration, run: Callable[[], object]) -> None:
    with table.override(kernel, choice):
        run()


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m moeblaze_megatron.tune",
        description="Find the kernel configurations that are fastest on this GPU for the shapes of "
        "a model's MoE layers, on one rank, and write them as a table. Every candidate is compared "
        "with eager torch before it is timed. Kernels compile in other processes, up to "
        f"{PROCESSES}, as cores allow. To train with the table: export {table.VARIABLE}=FILE, or "
        "add --moeblaze-kernel-table FILE.",
    )
    add = out.add_argument
    names = "; ".join(f"{known} = {shape}" for known, shape in SHAPES.items())
    add("shapes", nargs="+", metavar="SHAPE", help=f"T,H,F,E,K of a rank, or a name: {names}")
    add("--activation", choices=ACTIVATIONS, default="swiglu")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--routing", choices=ROUTINGS, default="uneven",
        help="how tokens choose experts (default: %(default)s)")  # fmt: skip
    add("--output", type=Path, default=Path("kernel_table.json"), metavar="FILE",
        help="the table; what it has for other sizes stays (default: %(default)s)")  # fmt: skip
    add("--budget", type=float, default=600, metavar="SECONDS",
        help="begin nothing later, and keep what was found (default: %(default)s)")  # fmt: skip
    add("--steps", type=int, default=10, help="timed runs of a candidate (default: %(default)s)")
    about = "list what would be tried, and stop; without a GPU as on sm_90"
    add("--dry-run", action="store_true", help=about)
    return out


def list_plan(shapes: list[tuple[str, Shape]], dtype: torch.dtype, arch: int) -> None:
    for title, shape in shapes:
        print(f"{title}: T, H, F, E, K = {shape}")
        for key in planned(shape, dtype, arch):
            base = table.lookup(key)
            print(f"  {key}\n    in use: {difference(None, base)}")
            for knob in range(len(KNOBS[type(base)])):
                if others := candidates(key, base, knob)[1:]:
                    print(f"    try: {'; '.join(difference(base, other) for other in others)}")


def main() -> None:
    p = parser()
    arguments = p.parse_args()
    dtype = getattr(torch, arguments.dtype)
    has_gpu = torch.cuda.is_available()
    arch = 90
    if has_gpu:
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
    try:
        shapes = shapes_from(arguments.shapes, arguments.activation)
        if arguments.steps < 2:
            raise ValueError("--steps is at least 2")
        if not arguments.budget > 0:
            raise ValueError(f"--budget is above 0 seconds, got {arguments.budget}")
        if not (has_gpu or interpreting() or arguments.dry_run):
            raise ValueError("no CUDA GPU was found; --dry-run lists what would be tried on one")
        if not command.can_write(arguments.output):
            raise ValueError(f"--output {arguments.output} cannot be written; name another file")
        try:
            before = table.load(arguments.output) if arguments.output.exists() else {}
        except ValueError as error:
            reason = str(error).partition(": ")[2].partition(": make it with")[0]
            raise ValueError(
                f"--output {arguments.output} is there and no kernel table ({reason}); delete it, "
                "or name another file"
            ) from None
        table.use(None)
    except ValueError as error:
        p.error(str(error))
    if arguments.dry_run:
        list_plan(shapes, dtype, arch)
        return
    compilers = None if interpreting() else Compilers(dtype, arch)
    tuner = Tuner(
        dtype,
        arguments.routing,
        arguments.steps,
        time.monotonic() + arguments.budget,
        compilers,
        time_calls,
    )
    where = torch.cuda.get_device_name() if has_gpu else "Triton's interpreter"
    made_by = f"{where}, {versions([])}, moeblaze-megatron {__version__}: {' '.join(sys.argv[1:])}"
    status = None
    try:
        tuner.expect(shapes, arch)
        for title, shape in shapes:
            tuner.tune(title, shape)
            release()
    except TimeoutError:
        tuner.progress(f"--budget {arguments.budget:g} is spent: the rest stays as it is")
    except KeyboardInterrupt:
        status = "tune: interrupted, the rest stays as it is"
    finally:
        if compilers:
            compilers.stop()
        if tuner.found:
            table.save(before | tuner.found, arguments.output, made_by)
    for key, value in tuner.found.items():
        print(f"{key}: {tuner.gains[key]:.3f}x with {difference(None, value)}")
    if tuner.found:
        print(f"wrote {arguments.output}: export {table.VARIABLE}={arguments.output.resolve()}")
    if status:
        sys.exit(status)


if __name__ == "__main__":
    command.run(main)
