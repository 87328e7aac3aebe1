"""The MoEBlaze paper's evaluation (arXiv 2601.05296): configurations, its figures, ours."""

from pathlib import Path

from moeblaze_megatron.bench import plots

CONFIGURATIONS = tuple(f"conf{i}" for i in range(1, 8))
ACTIVATIONS = ("silu", "swiglu")
OURS, BASELINES = "moeblaze", ("megablocks", "grouped_mm")
# What its text says, against MegaBlocks on an H100; its bars have no printed numbers.
CLAIMS = {
    ("silu", "time"): "1.4x to 3.7x faster, most at conf4",
    ("silu", "memory"): "3.6x less at conf4",
    ("swiglu", "time"): "2x to 6.2x faster",
    ("swiglu", "memory"): "4x less at conf3",
}
PAPER = {
    ("silu", "conf4"): {"forward+backward": 3.7, "held": 3.6},
    ("swiglu", "conf3"): {"held": 4.0},
}


def time_and_memory(row: dict) -> dict[str, float | None]:
    """Milliseconds of forward + backward, MiB; None where not measured."""
    ms = row.get("forward+backward", {}).get("p50")
    return {"forward+backward": ms, "held": row.get("held"), "peak": row.get("peak")}


def _cell(value: float | None, width: int, digits: int, unit: str = "") -> str:
    return f"{'-' if value is None else f'{value:.{digits}f}{unit}':>{width}}"


def table(report: dict) -> str:
    """One block for each activation and baseline: ours, the baseline, ratio, the paper's ratio.

    Args:
        report: {activation: {configuration: {system: row of the layer's table}}}
    """
    lines = []
    for activation, configurations in report.items():
        claims = [CLAIMS[activation, what] for what in ("time", "memory")]
        for baseline in BASELINES:
            if not any(baseline in rows for rows in configurations.values()):
                continue
            lines += [
                "",
                f"{activation}, against {baseline}. The paper, against MegaBlocks on an H100: "
                f"{claims[0]}; memory {claims[1]}.",
                f"{'':8} {'forward + backward, ms':^37} {'held for backward, MiB':^37} "
                f"{'peak, MiB':^28}",
                " ".join(
                    [f"{'':8}"]
                    + [f"{baseline:>10} {OURS:>9} {'ratio':>7} {'paper':>8}"] * 2
                    + [f"{baseline:>10} {OURS:>9} {'ratio':>7}"]
                ),
            ]
            for name, rows in configurations.items():
                base, ours = (time_and_memory(rows[system]) for system in (baseline, OURS))
                line = f"{name:8}"
                for what, digits in (("forward+backward", 2), ("held", 0), ("peak", 0)):
                    known = None not in (base[what], ours[what])
                    ratio = base[what] / ours[what] if known else None
                    line += f" {_cell(base[what], 10, digits)} {_cell(ours[what], 9, digits)}"
                    line += f" {_cell(ratio, 7, 2, 'x')}"
                    if what != "peak":
                        claim = PAPER.get((activation, name), {}).get(what)
                        line += f" {_cell(claim, 8, 1, 'x')}"
                lines.append(line)
    return "\n".join(lines)


def plot(report: dict, folder: Path) -> list[Path]:
    """The paper's four figures as PNGs: memory and speed, for each activation."""
    paths = []
    for activation, configurations in report.items():
        systems = [s for s in (*BASELINES, OURS) if any(s in r for r in configurations.values())]
        for what, key, label in (
            ("time", "forward+backward", "forward + backward, ms"),
            ("memory", "held", "held for backward, MiB"),
        ):
            series = {
                system: {
                    name: time_and_memory(rows[system])[key]
                    for name, rows in configurations.items()
                }
                for system in systems
            }
            title = f"{activation}; the paper, against MegaBlocks: {CLAIMS[activation, what]}"
            path = folder / f"paper_{activation}_{what}.png"
            paths.append(plots.bars(path, title, {label: series}))
    return paths
