"""The MoEBlaze paper's evaluation (arXiv 2601.05296): configurations, claims, our figures."""

from pathlib import Path

CONFIGURATIONS = tuple(f"conf{i}" for i in range(1, 8))
# What its text claims against MegaBlocks on an H100; the other bars have no printed numbers.
CLAIMS = {
    "silu": "1.4x to 3.7x faster (most at conf4), 3.6x less memory at conf4",
    "swiglu": "2x to 6.2x faster, 4x less memory at conf3",
}
BASELINE, OURS = "grouped_mm", "moeblaze"


def ratios(rows: dict) -> dict[str, float]:
    """Baseline over ours: how many times faster, and how much less memory."""
    base, ours = rows[BASELINE], rows[OURS]
    return {
        "forward": base["forward"]["p50"] / ours["forward"]["p50"],
        "forward+backward": base["forward+backward"]["p50"] / ours["forward+backward"]["p50"],
        "held": base["held"] / ours["held"],
        "peak": base["peak"] / ours["peak"],
    }


def table(report: dict) -> str:
    """One block for each activation: times, memory and ratios, with the paper's claims beside."""
    lines = []
    for activation, configurations in report.items():
        lines += [
            "",
            f"{activation}. The paper, against MegaBlocks on an H100: {CLAIMS[activation]}",
            f"{'':6} {'fwd+bwd ms':>22} {'':>9} {'held MiB':>16} {'':>6} {'peak MiB':>16}",
            f"{'':6} {BASELINE:>11} {OURS:>10} {'speedup':>9} {BASELINE:>9} {OURS:>6} {'less':>6} "
            f"{BASELINE:>9} {OURS:>6} {'less':>6}",
        ]
        for name, rows in configurations.items():
            base, ours, ratio = rows[BASELINE], rows[OURS], ratios(rows)
            lines.append(
                f"{name:6} {base['forward+backward']['p50']:11.2f} "
                f"{ours['forward+backward']['p50']:10.2f} {ratio['forward+backward']:8.2f}x "
                f"{base['held']:9.0f} {ours['held']:6.0f} {ratio['held']:5.2f}x "
                f"{base['peak']:9.0f} {ours['peak']:6.0f} {ratio['peak']:5.2f}x"
            )
    return "\n".join(lines)


def plot(report: dict, folder: Path) -> list[Path]:
    """The paper's four figures as PNGs: memory and speed, for each activation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for activation, configurations in report.items():
        for what, unit, value in (
            ("time", "forward + backward, ms", lambda row: row["forward+backward"]["p50"]),
            ("memory", "held for backward, MiB", lambda row: row["held"]),
        ):
            figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
            for shift, system in ((-0.2, BASELINE), (0.2, OURS)):
                bars = [value(rows[system]) for rows in configurations.values()]
                positions = [i + shift for i in range(len(bars))]
                axes.bar_label(axes.bar(positions, bars, 0.4, label=system), fmt="%.0f", fontsize=7)
            axes.set_xticks(range(len(configurations)), list(configurations))
            axes.set_ylabel(unit)
            axes.set_title(f"{activation}: {unit}")
            axes.legend()
            paths.append(folder / f"paper_{activation}_{what}.png")
            figure.savefig(paths[-1], dpi=150)
            pyplot.close(figure)
    return paths
