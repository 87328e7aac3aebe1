"""Train one model with two dispatchers and put the runs side by side.

    python -m moeblaze_megatron.compare [options] [SCRIPT.py | --] [Megatron's flags]

Each run is a fresh process under torchrun and the launcher, with the same data and seed; one more
of the baseline with another seed shows how far two equal runs lie apart. Without a script and flags
the quickstart's own small model trains on text that is on the machine. What is finished stays in
the output folder and is not run again; with Megatron's `--save-interval` an interrupted run goes on
from its last checkpoint.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from moeblaze_megatron import command, estimate, quickstart
from moeblaze_megatron.processes import ITERATION, Failed, launcher_command, train
from moeblaze_megatron.record import PHASES, TIMED_UNTIL

# Flags that compare sets itself, or that would let the runs meet, and what to do about them.
OWN_FLAGS = {
    "--moe-token-dispatcher-type": "the dispatchers are compare's --dispatchers",
    "--save": "the runs would write over each other's checkpoints; with --save-interval alone each "
    "has its own",
    "--exit-duration-in-mins": "the runs would stop at different iterations",
}
# Flags for the checkpoint that a user names, which are not for a run's own.
FIRST_START = ("--finetune", "--no-load-optim", "--no-load-rng", "--ckpt-step")
# Flags that leave out of a checkpoint what an interrupted run goes on from.
INCOMPLETE = dict.fromkeys(
    ("--no-save-optim", "--no-save-rng"),
    "with --save-interval an interrupted run goes on from its checkpoint, which has to hold all of "
    "it",
)
OUT_OF_MEMORY = (
    *("OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory"),
    "Failed to CUDA calloc",  # NCCL's
)
CHECKPOINT = "checkpoint/latest_checkpointed_iteration.txt"  # there once a run has saved
RUNS = ("baseline", "other", "noise")  # the last with the next seed
TRY_ITERATIONS = 4  # of --find-max-batch; the optimizer's state is there from the second on


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m moeblaze_megatron.compare",
        usage="%(prog)s [options] [SCRIPT.py | --] [Megatron's flags]",
        description="Run the same Megatron pretraining with moeblaze and with another dispatcher, "
        "and report losses, speed and memory side by side.",
        epilog="Options of compare come first. From the path of a script on, or after --, all "
        "arguments are that run's; after -- the package's own script runs. Without either the "
        "quickstart's model is compared, a few minutes on a CPU. Interrupted, the same command "
        "goes on with the runs that are not finished, from their checkpoints given "
        "--save-interval.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/compare"),
        metavar="DIR",
        help="where runs and report go (default: runs/compare); runs that it holds are kept",
    )
    parser.add_argument(
        "--dispatchers",
        nargs=2,
        default=("alltoall", "moeblaze"),
        choices=("alltoall", "allgather", "flex", "moeblaze"),
        metavar=("BASELINE", "OTHER"),
        help="two of alltoall, allgather, flex, moeblaze (default: alltoall moeblaze)",
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="one for each GPU (default: 1)"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=RUNS,
        metavar="RUN",
        help=f"train one of {', '.join(RUNS)} and report nothing, so that runs can be jobs of "
        "their own; may be repeated; the same command without it reports",
    )
    parser.add_argument(
        "--iters", type=int, metavar="N", help="without flags of yours (default: 60)"
    )
    parser.add_argument(
        "--find-max-batch",
        action="store_true",
        help="find the largest micro-batch that fits the GPU with each dispatcher, instead",
    )
    parser.add_argument(
        "--batch-step",
        type=int,
        metavar="N",
        help="with --find-max-batch: try multiples of N alone, fewer then (default: 1)",
    )
    parser.add_argument("training", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)}; flags of Megatron follow -- or the path "
            "of a script"
        )
    if arguments.training[:1] == ["--"]:
        del arguments.training[0]
        if not arguments.training:
            parser.error(
                "nothing follows --: give Megatron's flags there, or leave -- out to compare the "
                "quickstart's model"
            )
    given = {word.partition("=")[0] for word in arguments.training}
    refused = OWN_FLAGS | (INCOMPLETE if saves(arguments.training) else {})
    wrong = [f"leave out {flag}: {why}" for flag, why in refused.items() if flag in given]
    for name, least in (("processes", 1), ("batch_step", 1), ("iters", 2 * TIMED_UNTIL)):
        if (value := getattr(arguments, name)) is not None and value < least:
            wrong.append(f"--{name.replace('_', '-')} must be {least} or more, got {value}")
    if arguments.find_max_batch and arguments.only:
        wrong.append("--only names runs to compare; --find-max-batch has none")
    if arguments.batch_step is not None and not arguments.find_max_batch:
        wrong.append(f"--batch-step {arguments.batch_step} needs --find-max-batch; add it")
    if arguments.iters is not None and arguments.find_max_batch:
        wrong.append(
            f"leave out --iters {arguments.iters}: --find-max-batch trains {TRY_ITERATIONS} "
            "iterations each time"
        )
    elif arguments.iters is not None and arguments.training:
        wrong.append(
            f"leave out --iters {arguments.iters}: with flags of yours --train-iters says it"
        )
    script = arguments.training[0] if arguments.training else "--"
    if not script.startswith("-") and not os.path.isfile(script):
        wrong.append(
            f"no pretraining script at {script!r}; give the path of one, or -- in its place for "
            "the package's own"
        )
    if len(set(arguments.dispatchers)) < 2:
        wrong.append(f"--dispatchers names {arguments.dispatchers[0]} twice; name another")
    if arguments.out.exists() and not arguments.out.is_dir():
        wrong.append(f"--out {arguments.out} is not a folder")
    if wrong:
        parser.error("; ".join(wrong))
    return arguments


def value_of(training: list[str], flag: str, default: int) -> int:
    """The number that `flag` has in a command line, the last one as in argparse."""
    given = [
        word.partition("=")[2] if "=" in word else following
        for word, following in zip(training, [*training[1:], ""], strict=False)
        if word.partition("=")[0] == flag
    ]
    try:
        return int(given[-1]) if given else default
    except ValueError:
        sys.exit(f"compare: {flag} needs a number, got {given[-1] or 'nothing'}")


def saves(training: list[str]) -> bool:
    """Whether runs save, each in its own folder."""
    return value_of(training, "--save-interval", 0) != 0


def without(training: list[str], flag: str) -> list[str]:
    """The command line without `flag` and its values."""
    kept, skip = [], False
    for word in training:
        if word.startswith("--"):
            skip = word == flag or word.startswith(f"{flag}=")
        if not skip:
            kept.append(word)
    return kept


def default_training(out: Path, iters: int) -> list[str]:
    """Flags of the quickstart's model, on the data of `write_data`."""
    sizes = quickstart.GPU_SIZES if torch.cuda.is_available() else quickstart.CPU_SIZES
    return quickstart.training_flags(sizes, out / "data", iters)


def write_data(out: Path) -> None:
    """The quickstart's data, where `out` lacks it."""
    data = out / "data"
    if not (data / "train.idx").exists():
        texts, _ = quickstart.collect_text(None)
        data.mkdir(parents=True, exist_ok=True)
        quickstart.write_dataset(texts, data)


def run(training: list[str], processes: int, folder: Path, show: Callable[[str], None]) -> None:
    """Train in a fresh process, recording into `folder`, from its checkpoint on; raises Failed.

    A folder without a checkpoint is emptied first; `finished` has seen whose it is.
    """
    checkpoint, flags = folder / "checkpoint", training
    if (folder / CHECKPOINT).exists():
        for flag in FIRST_START:
            flags = without(flags, flag)
        flags = [*flags, "--load", str(checkpoint)]
    else:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        write_mark(folder / "started.json", training, processes)
    if saves(training):
        flags = [*flags, "--save", str(checkpoint)]
    command = [*launcher_command(processes), *flags]
    train(command, folder / "train.log", show, {"MOEBLAZE_RECORD": str(folder.resolve())})


def progress(name: str, iters: int) -> Callable[[str], None]:
    """Shows about ten of the iterations that Megatron logs, of an unknown number every tenth."""
    shown = 0

    def show(line: str) -> None:
        nonlocal shown
        if found := ITERATION.search(line):
            shown += 1
            if (shown - 1) % (max(1, iters // 10) if iters else 10) == 0:
                print(
                    f"  {name:<24} iteration {found['iteration']:>6}  lm loss "
                    f"{float(found['loss']):.4f}  {float(found['ms']):.0f} ms",
                    flush=True,
                )

    return show


@contextmanager
def results_of(folder: Path) -> Iterator[None]:
    """Inside, exits where what a finished run has recorded is damaged."""
    try:
        yield
    except (FileNotFoundError, LookupError, TypeError, ValueError) as error:
        sys.exit(
            f"compare: cannot read steps.jsonl and rank*.json in {folder} ({error!r}); delete it"
        )


def read(folder: Path) -> dict:
    """Steps and figures of a finished run; times where it has iterations after TIMED_UNTIL."""
    with results_of(folder):
        path = folder / "steps.jsonl"
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
        steps = list({step["iteration"]: step for step in lines}.values())  # some twice, if resumed
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
        first = ranks[0]
        if len(ranks) != first["world_size"]:
            raise ValueError(f"{len(ranks)} of {first['world_size']} ranks")
        if not steps:
            sys.exit(
                f"compare: {folder} has no iterations: train longer, or delete it if steps.jsonl "
                "was lost"
            )
        times = [float(step["ms"]) for step in steps[TIMED_UNTIL:] if step["ms"] is not None]
        seconds = statistics.median(times) / 1e3 if times else None
        peaks = [rank["peak_bytes"] for rank in ranks if rank["peak_bytes"]]
        held = next((rank for rank in ranks if rank["held_bytes_per_token"] is not None), first)
        rows = [rank["rows_per_dispatch"] for rank in ranks if rank["rows_per_dispatch"]]
        flops = first["flops_per_iteration"] / 1e12 / first["world_size"]
        norms = [step["grad_norm"] for step in steps]
        return {
            "versions": first["versions"],
            "iterations": [int(step["iteration"]) for step in steps],
            "losses": [float(step["loss"]) for step in steps],
            "grad_norms": [None if norm is None else float(norm) for norm in norms],
            "ms_per_iteration": seconds and 1e3 * seconds,
            "tokens_per_s": seconds and first["tokens_per_iteration"] / seconds,
            "tflops_per_gpu": seconds and flops / seconds,
            "peak_bytes": max(peaks) if peaks else None,
            "held_bytes_per_token": held["held_bytes_per_token"],
            "layer": held["layer"],
            "phase_ms": held["phase_ms"],
            "rows_per_dispatch": statistics.mean(rows) if rows else None,
        }


def write_mark(mark: Path, training: list[str], processes: int) -> None:
    """Writes down what runs in the folder of `mark`, whole or not at all."""
    unfinished = mark.with_suffix(".part")
    unfinished.write_text(json.dumps({"processes": processes, "flags": training}))
    unfinished.replace(mark)


def same_run(mark: Path, training: list[str], processes: int) -> None:
    """Exits where `mark` is of another run, or of none."""
    try:
        found = json.loads(mark.read_text())
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"compare: cannot tell which run {mark.parent} holds ({error}); delete it")
    if found != {"processes": processes, "flags": training}:
        sys.exit(
            f"compare: {mark.parent} holds a run with other flags or --processes; name another "
            "folder with --out, or delete it"
        )


def finished(folder: Path, training: list[str], processes: int) -> bool:
    """Whether `folder` holds this very run, complete; exits where it holds or began another."""
    mark = folder / "finished.json"
    if mark.exists():
        same_run(mark, training, processes)
    elif (folder / CHECKPOINT).exists():
        same_run(folder / "started.json", training, processes)
    return mark.exists()


def gaps_between(losses: list[float], base: list[float]) -> list[float]:
    """By iteration, up to where the shorter run ends."""
    return [abs(a - b) for a, b in zip(losses, base, strict=False)]


def differences(report: dict) -> dict:
    """How far losses lie apart: the other dispatcher, and the baseline's other seed."""
    base, other, noise = (report["runs"][name]["losses"] for name in report["names"])

    def apart(losses: list[float]) -> dict:
        gaps = gaps_between(losses, base)
        tail = gaps[len(gaps) // 2 :]
        return {"mean": statistics.mean(gaps), "mean_second_half": statistics.mean(tail)}

    return {"dispatchers": apart(other), "seeds": apart(noise)}


def table(report: dict) -> str:
    """The report as text, without rows that no run has."""
    names = report["names"]
    runs = [report["runs"][name] for name in names]

    def row(
        label: str, key: Callable[[dict], float | None], form: str, timed: bool = False
    ) -> list[str]:
        values = [key(run) for run in runs]
        cells = ["-" if value is None else format(value, form) for value in values]
        comparable = values[0] and values[1] is not None and not (timed and report["cpu"])
        return [label, *cells, f"{values[1] / values[0]:.2f}" if comparable else ""]

    lines = [
        ["", *names, f"{report['dispatchers'][1]} / {report['dispatchers'][0]}"],
        row("lm loss, first", lambda run: run["losses"][0], ".4f"),
        row("lm loss, last", lambda run: run["losses"][-1], ".4f"),
        row("grad norm, last", lambda run: run["grad_norms"][-1], ".4f"),
        row("ms per iteration", lambda run: run["ms_per_iteration"], ".1f", True),
        row("tokens/s", lambda run: run["tokens_per_s"], ",.0f", True),
        row("TFLOP/s per GPU", lambda run: run["tflops_per_gpu"], ".4g", True),
        row("peak memory, GiB", lambda run: (run["peak_bytes"] or 0) / 2**30 or None, ".2f"),
        row(
            "estimated memory, GiB",
            lambda run: (run["estimated_bytes"] or 0) / 2**30 or None,
            ".2f",
        ),
        row("held per MoE layer, bytes/token", lambda run: run["held_bytes_per_token"], ",.0f"),
        row("rows sent per dispatch and rank", lambda run: run["rows_per_dispatch"], ",.0f"),
    ]
    phases = [phase for phase in PHASES if any(phase in run["phase_ms"] for run in runs)]
    lines += [
        row(f"forward {phase}, ms", lambda run, p=phase: run["phase_ms"].get(p), ".2f", True)
        for phase in phases
    ]
    lines = [cells for cells in lines if cells[1 : 1 + len(runs)] != ["-"] * len(runs)]
    widths = [max(len(cells[i]) for cells in lines) for i in range(len(lines[0]))]
    text = "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    )
    gaps = report["differences"]
    ours, noise = (gaps[key]["mean_second_half"] for key in ("dispatchers", "seeds"))
    verdict = "within" if ours <= noise else "OUTSIDE"
    built = "".join(
        f"{name}: {run['layer']['dispatcher']} and {run['layer']['experts']}\n"
        for name, run in zip(names[:2], runs, strict=False)
        if run["layer"]
    )
    cpu = "Times on a CPU say nothing about a GPU.\n" if report["cpu"] else ""
    timed = all(run["ms_per_iteration"] for run in runs)
    short = "" if timed else f"Speed is taken after iteration {TIMED_UNTIL}: train longer.\n"
    return (
        f"{text}\n\nmean difference of the losses in the second half of the run: "
        f"{ours:.6f} between the dispatchers, {noise:.6f} between two seeds: "
        f"{verdict} the noise\n{cpu}{short}{built}{said(report['versions'])}"
    )


def plot(report: dict, path: Path) -> None:
    """Loss curves, their differences, and bars of speed and memory, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    base, other, noise = report["names"]
    runs = report["runs"]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for name, style in zip(report["names"], ("-", "--", ":"), strict=True):
        left.plot(runs[name]["iterations"], runs[name]["losses"], style, label=name)
    left.set(title="lm loss", xlabel="iteration")
    left.legend()
    for name in (other, noise):
        gaps = gaps_between(runs[name]["losses"], runs[base]["losses"])
        middle.plot(runs[name]["iterations"][: len(gaps)], gaps, label=f"{name} against {base}")
    middle.set(title="difference of the losses", xlabel="iteration", yscale="log")
    middle.legend()
    figures = {"held per MoE layer": "held_bytes_per_token", "peak memory": "peak_bytes"}
    if not report["cpu"]:
        figures["tokens/s"] = "tokens_per_s"
    figures = {k: v for k, v in figures.items() if runs[base][v] and runs[other][v]}
    ratios = [runs[other][key] / runs[base][key] for key in figures.values()]
    right.bar(list(figures), ratios)
    right.axhline(1, color="black", linewidth=0.8)
    right.set(title=f"{other} / {base}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def said(versions: dict[str, str]) -> str:
    return ", ".join(
        value if name == "device" else f"{name} {value}" for name, value in versions.items()
    )


def compare(arguments: argparse.Namespace) -> None:
    out, (baseline, other) = arguments.out, arguments.dispatchers
    training = arguments.training or default_training(out, arguments.iters or 60)
    seed = value_of(training, "--seed", 1234)
    iters = value_of(training, "--train-iters", 0)
    runs = {
        baseline: (baseline, seed),
        other: (other, seed),
        f"{baseline}, seed {seed + 1}": (baseline, seed + 1),
    }
    report = {"names": list(runs), "dispatchers": [baseline, other], "runs": {}}
    # All that needs no training is read and checked before anything trains or is written.
    estimated = estimate.totals(training, arguments.processes) or {}
    to_train = {}
    for which, (name, (dispatcher, number)) in zip(RUNS, runs.items(), strict=True):
        if arguments.only and which not in arguments.only:
            continue
        folder = out / f"{dispatcher}-seed{number}"
        # Behind the flags given, so that these values hold.
        own = ["--moe-token-dispatcher-type", dispatcher, "--seed", str(number)]
        command = [*training, *own, "--log-interval", "1"]
        if finished(folder, command, arguments.processes):
            print(f"{name}: finished before, in {folder}", flush=True)
            shutil.rmtree(folder / "checkpoint", ignore_errors=True)
            report["runs"][name] = read(folder)
        else:
            to_train[name] = folder, command
    if to_train and not arguments.training:
        write_data(out)
    # moeblaze, which refuses more than the others do, comes first, so that it does so in the first
    # seconds. To parse the flags here would be no sooner: scripts have arguments of their own.
    for name in sorted(to_train, key=lambda name: name != "moeblaze"):
        folder, command = to_train[name]
        print(f"{name}: training, all output in {folder / 'train.log'}", flush=True)
        run(command, arguments.processes, folder, progress(name, iters))
        write_mark(folder / "finished.json", command, arguments.processes)
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        report["runs"][name] = read(folder)
    for name, figures in report["runs"].items():
        figures["estimated_bytes"] = estimated.get(runs[name][0])
    if len(report["runs"]) < len(runs):
        print(
            f"no report yet: the same command without --only, once {', '.join(runs)} are finished"
        )
        return
    report["differences"] = differences(report)
    report["versions"] = report["runs"][baseline].pop("versions")
    report["cpu"] = report["versions"]["device"] == "CPU"
    text = table(report)
    (out / "report.json").write_text(json.dumps(report, indent=1))
    (out / "report.txt").write_text(text + "\n")
    written = [out / "report.txt", out / "report.json"]
    if importlib.util.find_spec("matplotlib"):
        plot(report, out / "report.png")
        written.append(out / "report.png")
    else:
        print("no plots: matplotlib is not installed (pip install 'moeblaze-megatron[plots]')")
    print(f"\n{text}\n\nwritten: {', '.join(map(str, written))}")


def largest(fits: Callable[[int], bool], start: int, step: int) -> int:
    """The largest multiple n of `step` for which `fits(n)`; 0 if none.

    From `start` up or down in strides that double, then bisection.
    """
    low, stride = max(1, start // step), 1
    if fits(step * low):
        while fits(step * (low + stride)):
            low, stride = low + stride, 2 * stride
        high = low + stride
    else:
        high, low = low, low - 1
        while low > 0 and not fits(step * low):
            stride *= 2
            high, low = low, max(0, low - stride)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(step * middle) else (low, middle)
    return step * low


def likely(training: list[str], dispatcher: str, processes: int) -> int:
    """The micro-batch whose estimate fills the GPU; the flags' own where there is no estimate."""

    def estimated(batch: int) -> float | None:
        # One micro-batch in an iteration, as in the tries.
        sizes = ["--micro-batch-size", str(batch), "--global-batch-size", str(batch)]
        return (estimate.totals([*training, *sizes], processes) or {}).get(dispatcher)

    sizes = [estimated(1), estimated(2)]
    if None in sizes:
        return max(1, value_of(training, "--micro-batch-size", 1))
    memory = torch.cuda.get_device_properties(0).total_memory
    return 1 + max(0, int((memory - sizes[0]) / (sizes[1] - sizes[0])))


def find_max_batch(arguments: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        sys.exit(
            "compare: --find-max-batch needs a GPU: on a CPU no micro-batch is too large for its "
            "memory, only slow"
        )
    training = arguments.training or default_training(arguments.out, TRY_ITERATIONS)
    if not arguments.training:
        write_data(arguments.out)
    starts = [likely(training, name, arguments.processes) for name in arguments.dispatchers]
    # The global batch follows the micro-batch then, one for each data-parallel rank; tries save
    # nothing.
    for flag in (
        *("--micro-batch-size", "--global-batch-size", "--rampup-batch-size", "--train-samples"),
        *("--lr-warmup-samples", "--lr-decay-samples", "--lr-warmup-fraction", "--save-interval"),
    ):
        training = without(training, flag)
    found, versions = {}, {}
    share = 1.0  # of its start that the dispatcher before fits; both are estimates, or neither
    alike = len({name in estimate.DISPATCHERS for name in arguments.dispatchers}) == 1
    for dispatcher, start in zip(arguments.dispatchers, starts, strict=True):

        def fits(batch: int, dispatcher: str = dispatcher) -> bool:
            folder = arguments.out / f"{dispatcher}-batch{batch}"
            own = ["--moe-token-dispatcher-type", dispatcher, "--micro-batch-size", str(batch)]
            own += ["--train-iters", str(TRY_ITERATIONS), "--lr-warmup-iters", "0"]
            command = [*training, *own, "--eval-iters", "0", "--log-interval", "1"]
            if finished(folder, command, arguments.processes):
                result = (folder / "fits").exists()
            else:
                try:
                    run(command, arguments.processes, folder, lambda line: None)
                    (folder / "fits").touch()
                    result = True
                except Failed as failure:
                    if not any(words in failure.output for words in OUT_OF_MEMORY):
                        raise
                    result = False
                write_mark(folder / "finished.json", command, arguments.processes)
            if result:
                with results_of(folder):
                    versions.update(json.loads((folder / "rank0.json").read_text())["versions"])
            outcome = "fits" if result else "out of memory"
            print(f"  {dispatcher:<10} micro-batch {batch:>5}: {outcome}", flush=True)
            return result

        found[dispatcher] = largest(fits, round(share * start), arguments.batch_step or 1)
        if alike:
            share = found[dispatcher] / start or share
    report = {"largest_micro_batch": found, "versions": versions}
    (arguments.out / "max_batch.json").write_text(json.dumps(report, indent=1))
    for dispatcher, batch in found.items():
        print(f"largest micro-batch with {dispatcher}: {batch}")
    print(said(versions))


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    try:
        find_max_batch(arguments) if arguments.find_max_batch else compare(arguments)
    except BrokenPipeError:  # nobody reads on
        raise
    except Failed as failure:
        sys.exit(f"compare: {failure}")
    except OSError as error:
        sys.exit(f"compare: --out {arguments.out}: {error}; name a folder that can be written")
    except KeyboardInterrupt:
        sys.exit(
            textwrap.fill(
                f"compare: interrupted; the same command keeps what is finished in {arguments.out} "
                "and goes on with the rest, from a checkpoint given --save-interval",
                100,
            )
        )


if __name__ == "__main__":
    command.run(main)
