"""PNGs of what the benchmark measured; needs matplotlib."""

from pathlib import Path


def save(figure, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _panels(title: str, count: int):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, count, figsize=(6 * count, 4.5), layout="constrained", squeeze=False
    )
    figure.suptitle(title, fontsize=8)
    return figure, axes[0]


def bars(path: Path, title: str, panels: dict[str, dict[str, dict[str, float | None]]]) -> Path:
    """Groups of bars: {label of the axis: {series: {group: value}}}; None leaves a gap."""
    figure, axes = _panels(title, len(panels))
    for axis, (label, series) in zip(axes, panels.items(), strict=True):
        groups = list(dict.fromkeys(group for values in series.values() for group in values))
        width = 0.8 / len(series)
        for i, (name, values) in enumerate(series.items()):
            at = {groups.index(g): value for g, value in values.items() if value is not None}
            places = [place + (i - (len(series) - 1) / 2) * width for place in at]
            drawn = axis.bar(places, list(at.values()), width, label=name)
            axis.bar_label(drawn, fmt="{:.3g}".format, fontsize=6, rotation=90, padding=2)
        axis.set_xticks(range(len(groups)), groups, rotation=30, ha="right", fontsize=8)
        axis.set_ylabel(label)
        axis.margins(y=0.15)
        axis.legend(fontsize=8)
    return save(figure, path)


def curves(path: Path, title: str, panels: dict[str, dict[str, dict[int, float]]]) -> Path:
    """Lines over doublings, both axes in powers of two: {label: {series: {x: value}}}."""
    figure, axes = _panels(title, len(panels))
    for axis, (label, series) in zip(axes, panels.items(), strict=True):
        for name, values in series.items():
            axis.plot(list(values), list(values.values()), marker="o", label=name)
        ticks = sorted({x for values in series.values() for x in values})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(ticks, [str(x) for x in ticks])
        axis.set_xlabel(label)
        axis.set_ylabel("forward + backward, ms")
        axis.legend(fontsize=8)
    return save(figure, path)
