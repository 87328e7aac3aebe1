"""Which configuration a kernel runs with: a table by GPU, dtype and shape class.

The table of the package is `configurations.json`. One of the user's, written by
`python -m moeblaze_megatron.tune` and named by MOEBLAZE_KERNEL_TABLE or `use`, comes before it. A
table is checked when it is loaded; afterwards launches look up and nothing is tuned.

An entry says of which kernel it is, for which GPU ("NVIDIA H200" as torch names it, "sm_90" for all
of a compute capability, "any", or "interpreter" for TRITON_INTERPRET=1), for operands of 16 or 32
bits, and for which shape class: two sizes, each rounded down to a power of two or null for all, or
null for both. They are columns and depth of a row times a weight, rows and columns of a weight
gradient, and F and H for "copy". The most specific entry wins: the user's first, then GPU before
class, then the second size before the first.
"""

import json
import math
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path

import torch
import triton
from triton.runtime.errors import OutOfResources

from moeblaze_megatron.ops.tiles import interpreting

VARIABLE = "MOEBLAZE_KERNEL_TABLE"
SHIPPED = Path(__file__).with_name("configurations.json")
FORMAT = 1


def _within(value: object, low: int, high: float, power: bool = False) -> bool:
    """Whether it is an int, and where `power` a power of two, of this range."""
    return type(value) is int and low <= value <= high and (not power or value.bit_count() == 1)


def _outside(settings: object, names: str, low: int, high: int, power: bool = False) -> list[str]:
    """What is not `_within` of the settings so named."""
    values = {name: getattr(settings, name) for name in names.split()}
    return [
        f"{name}={value!r} is not {'a power of two ' if power else ''}in {low}..{high}"
        for name, value in values.items()
        if not _within(value, low, high, power)
    ]


@dataclass(frozen=True)
class Tile:
    """Of a plain Triton kernel: output rows x columns, depth of a step, how it is scheduled.

    `group` row tiles walk the columns together, so that a weight tile is reused from L2.
    """

    rows: int
    cols: int
    depth: int
    num_warps: int
    num_stages: int
    group: int

    def fit(self, **limits: int) -> "Tile":
        """The same tile with `rows`, `cols` or `depth` no larger than the problem needs.

        Sizes stay powers of two, 16 at least.
        """
        sizes = {
            name: min(getattr(self, name), max(16, triton.next_power_of_2(limit)))
            for name, limit in limits.items()
        }
        return replace(self, **sizes)

    def reasons(self, kernel: str, gpu: str) -> Iterator[str]:
        """What does not fit."""
        yield from _outside(self, "rows cols depth", 16, 256, power=True)
        yield from _outside(self, "num_warps", 1, 16, power=True)
        yield from _outside(self, "num_stages", 1, 8)
        yield from _outside(self, "group", 1, 256)
        height = 16 if gpu == "interpreter" else 128
        if kernel in ("fc1", "rows") and self.rows != height:
            yield f"rows={self.rows!r} is not {height}, the height of all row tiles"


@dataclass(frozen=True)
class Ring:
    """Of a Hopper kernel: stages of its ring, row tiles that walk the columns together, registers.

    Eight warps multiply with so many registers a thread, four others load, fetch and, of rows times
    a weight, finish (two of them) with so many. Given `finish_registers`, four more warps finish in
    their place, with so many each.
    """

    stages: int
    group: int
    multiply_registers: int
    load_registers: int
    finish_registers: int | None = None

    def reasons(self, kernel: str, gpu: str) -> Iterator[str]:
        most = 4 if kernel == "wgrad_hopper" else 3  # what shared memory holds
        yield from _outside(self, "stages", 2, most)
        yield from _outside(self, "group", 1, 256)
        if kernel == "wgrad_hopper" and self.finish_registers is not None:
            yield f"finish_registers={self.finish_registers!r} is not null: nothing is finished"
        split = [self.multiply_registers, self.load_registers]
        split += [self.finish_registers] * (self.finish_registers is not None)
        words = "/".join(map(str, split))
        if not all(_within(n, 24, 240) and n % 8 == 0 for n in split):
            yield f"registers={words} are not multiples of 8 in 24..240"
        elif 32 * 4 * (split[0] + sum(split)) > 65536:
            yield f"registers={words} are more than a multiprocessor's 65536"


@dataclass(frozen=True)
class Copy:
    """Where rows are copied by index before a GEMM, and not looked up inside it; None is nowhere.

    Once before both gradients of fc2 from this `ffn` on; before a weight gradient from this `width`
    of its other operand on, unless the workspace cuts the copy into more than so many `slices`.
    """

    ffn: int | None
    width: int | None
    slices: int

    def reasons(self, kernel: str, gpu: str) -> Iterator[str]:
        for name in ("ffn", "width"):
            value = getattr(self, name)
            if value is not None and not _within(value, 0, math.inf):
                yield f"{name}={value!r} is neither a size nor null"
        if not _within(self.slices, 1, math.inf):
            yield f"slices={self.slices!r} is not 1 or more"


Configuration = Tile | Ring | Copy
KERNELS = {
    "fc1": Tile,
    "rows": Tile,
    "wgrad": Tile,
    "wgrad_gather": Tile,
    "fc1_hopper": Ring,
    "fc2_dgrad_hopper": Ring,
    "rows_hopper": Ring,
    "wgrad_hopper": Ring,
    "copy": Copy,
}


@dataclass(frozen=True)
class Key:
    """What an entry is for."""

    kernel: str
    gpu: str
    bits: int  # of the operands' dtype
    shape_class: tuple[int | None, int | None] | None = None

    def __str__(self) -> str:
        sizes = "x".join(str(n or "any") for n in self.shape_class or ()) or "all sizes"
        return f"{self.kernel} {sizes}, {self.bits} bits, {self.gpu}"


Table = dict[Key, Configuration]


def _entry(entry: object) -> tuple[Key, Configuration] | list[str]:
    """What an entry of the file says, or why it says nothing."""
    known = ("kernel", "gpu", "bits", "class", "use")
    if not isinstance(entry, dict) or set(entry) != set(known):
        return [f"an entry has {', '.join(known)}"]
    kernel, gpu, use, sizes = (entry[name] for name in ("kernel", "gpu", "use", "class"))
    if not isinstance(kernel, str) or kernel not in KERNELS:
        return [f"kernel {kernel!r} is not one of {', '.join(KERNELS)}"]
    reasons = []
    if not (isinstance(gpu, str) and gpu):
        reasons.append(f"gpu={gpu!r} is not a name")
    elif kernel.endswith("_hopper") and (
        gpu in ("any", "interpreter") or (gpu.startswith("sm_") and gpu != "sm_90")
    ):
        reasons.append(f"gpu={gpu!r} does not run this kernel, sm_90 does")
    bits = entry["bits"]
    if not _within(bits, 16, 32) or bits not in ((16,) if kernel.endswith("_hopper") else (16, 32)):
        reasons.append(f"bits={bits!r} has no such kernel")
    if sizes is not None and not (
        isinstance(sizes, list)
        and len(sizes) == 2
        and all(n is None or _within(n, 1, 2**31, power=True) for n in sizes)
        and any(sizes)
    ):
        reasons.append(
            f"class={json.dumps(sizes)} is neither two powers of two (one may be null) nor null"
        )
    names = {field.name: field.default is MISSING for field in fields(KERNELS[kernel])}
    needed = {name for name, need in names.items() if need}
    if not isinstance(use, dict) or not needed <= set(use) <= set(names):
        reasons.append(f"use has {', '.join(names)}")
    else:
        reasons += KERNELS[kernel](**use).reasons(kernel, str(gpu))
    if reasons:
        return reasons
    key = Key(kernel, gpu, bits, sizes and tuple(sizes))
    return key, KERNELS[kernel](**use)


def load(path: Path) -> Table:
    """The table in a file.

    Raises:
        ValueError: naming everything that is wrong with it.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"kernel table {path}: {error}: make it with `python -m moeblaze_megatron.tune`, or "
            f"leave --moeblaze-kernel-table and {VARIABLE} out"
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get("configurations"), list):
        raise ValueError(
            f"kernel table {path}: not a table that moeblaze_megatron.tune has written"
        )
    if not _within(content.get("format"), FORMAT, FORMAT):
        raise ValueError(f"kernel table {path}: format={content.get('format')!r} is not {FORMAT}")
    table, reasons = {}, []
    for number, entry in enumerate(content["configurations"]):
        found = _entry(entry)
        if isinstance(found, list):
            reasons += [f"entry {number}: {reason}" for reason in found]
        elif found[0] in table:
            reasons.append(f"entry {number}: {found[0]} is there twice")
        else:
            table[found[0]] = found[1]
    if reasons:
        raise ValueError(f"kernel table {path}:\n  " + "\n  ".join(reasons))
    return table


def save(table: Table, path: Path, made_by: str) -> None:
    """Writes a file for `load`, one entry a line."""
    lines = (
        json.dumps(
            {
                "kernel": key.kernel,
                "gpu": key.gpu,
                "bits": key.bits,
                "class": key.shape_class,
                "use": asdict(value),
            }
        )
        for key, value in table.items()
    )
    body = ",\n".join(lines)
    head = f'"format": {FORMAT}, "made_by": {json.dumps(made_by)}'
    path.write_text(f'{{{head}, "configurations": [\n{body}\n]}}\n')


@lru_cache
def _gpus_of_device(device: torch.device) -> tuple[str, ...]:
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), f"sm_{major}{minor}", "any"


def _gpus_here() -> tuple[str, ...]:
    """Names of the current GPU, without a tensor; none on a CPU."""
    return _gpus_of_device(torch.device("cuda")) if torch.cuda.is_available() else ()


def gpus_of(tensor: torch.Tensor) -> tuple[str, ...]:
    """What a table may call the GPU of `tensor`, from the specific to the general."""
    if interpreting():
        return ("interpreter",)
    if tensor.is_cuda:
        return _gpus_of_device(tensor.device)
    if tensor.is_meta:  # `aot` compiles, for the GPU at hand or for another
        arch = f"sm_{triton.runtime.driver.active.get_current_target().arch}"
        here = _gpus_here()
        return here if arch in here else (arch, "any")
    return ("any",)


_named: Path | None = None


def use(path: str | os.PathLike | None) -> None:
    """Lets the table in a file come before the package's own, for the whole process.

    None leaves the one in use, which is MOEBLAZE_KERNEL_TABLE's if none was named, and checks it.

    Raises:
        ValueError: naming everything that is wrong with it, and when it has nothing for this GPU.
    """
    global _named
    before = _named
    _named = Path(path) if path else before
    _tables.cache_clear()
    _find.cache_clear()
    try:
        if interpreting() or not torch.cuda.is_available():
            _tables(gpus_of(torch.empty(0)))
        else:  # without a tensor, which would take this process's first GPU
            _tables(_gpus_of_device(torch.device("cuda")))
    except ValueError:
        _named = before
        raise


@lru_cache
def _tables(gpus: tuple[str, ...]) -> list[tuple[Path, Table]]:
    """The user's, if there is one, and the package's."""
    shipped = SHIPPED, load(SHIPPED)
    named = _named or os.environ.get(VARIABLE)
    if not named:
        return [shipped]
    path = Path(named)
    table = load(path)
    found = [(path, table), shipped]
    gpu = gpus[0]
    if gpu.startswith("sm_"):  # compiling for a GPU that is not there
        return found
    served = {key.gpu for key in table}
    about = f"kernel table {path} is for {', '.join(sorted(served)) or 'no GPU'}"
    if gpu == "any":
        if gpu not in served:
            warnings.warn(f"{about}; on this CPU it is not used", stacklevel=1)
        return found
    if not served & set(gpus):
        raise ValueError(
            f"{about}, not for this {gpu}: run `python -m moeblaze_megatron.tune` here, or leave "
            "the table out"
        )
    wrong = [str(key) for key in table if key.gpu == gpu and key.kernel.endswith("_hopper")]
    if wrong and "sm_90" not in gpus:
        raise ValueError(f"kernel table {path}: this GPU does not run {'; '.join(wrong)}")
    return found


_overrides: dict[str, Configuration] = {}


@contextmanager
def override(kernel: str, value: Configuration) -> Iterator[None]:
    """Inside, `kernel` runs with this configuration at any size. For tuning and tests."""
    before = _overrides.get(kernel)
    _overrides[kernel] = value
    _find.cache_clear()
    try:
        yield
    finally:
        del _overrides[kernel]
        if before is not None:
            _overrides[kernel] = before
        _find.cache_clear()


_notes: dict[Key, Configuration] | None = None


@contextmanager
def recording() -> Iterator[dict[Key, Configuration]]:
    """Inside, what launches look up is noted, with the answers."""
    global _notes
    before, _notes = _notes, {}
    _find.cache_clear()
    try:
        yield _notes
    finally:
        _notes = before


def _entry_for(
    kernel: str, bits: int, shape_class: tuple[int, int], gpus: tuple[str, ...]
) -> tuple[Path, Key, Configuration]:
    """The most specific one, and its table."""
    first, second = shape_class
    classes = (shape_class, (None, second), (first, None), None)
    keys = [Key(kernel, gpu, bits, sizes) for gpu in gpus for sizes in classes]
    return next(
        (path, key, table[key]) for path, table in _tables(gpus) for key in keys if key in table
    )


@cache
def _find(
    kernel: str, bits: int, shape_class: tuple[int, int], gpus: tuple[str, ...]
) -> Configuration:
    found = _overrides.get(kernel) or _entry_for(kernel, bits, shape_class, gpus)[2]
    if _notes is not None:
        _notes[Key(kernel, gpus[0], bits, shape_class)] = found
    return found


def lookup(key: Key) -> Configuration:
    """What a launch finds that asks for `key`, whose `gpu` is one that `gpus_of` puts first."""
    gpus = _gpus_here()
    gpus = gpus if gpus and gpus[0] == key.gpu else tuple(dict.fromkeys((key.gpu, "any")))
    return _find(key.kernel, key.bits, key.shape_class, gpus)


def configuration(kernel: str, tensor: torch.Tensor, first: int, second: int) -> Configuration:
    """What `kernel` runs with on `tensor`'s GPU and dtype, at these two sizes, 1 or more.

    Raises:
        ValueError: at the first call, when the user's table cannot be used.
    """
    bits = 16 if tensor.element_size() == 2 else 32
    sizes = 1 << (first.bit_length() - 1), 1 << (second.bit_length() - 1)
    _thread.asked = asked = kernel, bits, sizes, gpus_of(tensor)
    return _find(*asked)


_thread = threading.local()  # `asked`: what its last launch looked up


def too_large(error: OutOfResources) -> Exception:
    """What a launch fails with that does not fit the GPU: its entry, and what to do about it."""
    asked = getattr(_thread, "asked", None)
    if asked is None or asked[0] in _overrides:  # an override is in no table
        return error
    path, key, found = _entry_for(*asked)
    settings = ", ".join(f"{name}={value}" for name, value in vars(found).items())
    other = "" if path == SHIPPED else ", or leave the table out"
    return ValueError(
        f"kernel table {path}, {key}: {settings} need {error.required} of {error.name}, but this "
        f"GPU has {error.limit}: run `python -m moeblaze_megatron.tune` here, make the entry's "
        f"sizes or stages smaller{other}"
    )
