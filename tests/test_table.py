"""The table of kernel configurations: what is looked up, what is refused, what each computes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import Case, assert_as_close_as_torch, expected, layer_of, operands, routing, run

from moeblaze_megatron import aot, doctor
from moeblaze_megatron.aot import MAX_SHARED
from moeblaze_megatron.ops import hopper, table
from moeblaze_megatron.ops.table import Copy, Key, Ring, Tile

ROOT = Path(__file__).parents[1]
SHIPPED = table.load(table.SHIPPED)
H200 = ("NVIDIA H200", "sm_90", "any")
RING = Ring(stages=3, group=8, multiply_registers=168, load_registers=176, finish_registers=None)
TILE = Tile(rows=128, cols=64, depth=32, num_warps=8, num_stages=3, group=8)


@pytest.fixture
def users_table(tmp_path, monkeypatch):
    """Writes a table and names it as a user does; afterwards the package's is alone again."""

    def write(entries: dict[Key, object]) -> Path:
        path = tmp_path / "kernel_table.json"
        table.save(entries, path, "a test")
        monkeypatch.setenv(table.VARIABLE, str(path))
        table.use(None)
        return path

    yield write
    monkeypatch.delenv(table.VARIABLE, raising=False)
    table.use(None)


@pytest.mark.parametrize("gpus", [H200, ("NVIDIA A100-SXM4-80GB", "sm_80", "any"), ("a", "any")])
def test_every_gpu_finds_every_kernel_it_runs(gpus):
    for kernel, kind in table.KERNELS.items():
        if kind is not Ring or "sm_90" in gpus:
            for bits in (16,) if kind is Ring else (16, 32):
                assert isinstance(table._find(kernel, bits, (1024, 512), gpus), kind)


def test_the_most_specific_entry_wins(tmp_path, monkeypatch):
    rings = [replace(RING, group=group) for group in range(1, 7)]
    keys = [
        Key("fc1_hopper", "sm_90", 16),
        Key("fc1_hopper", "sm_90", 16, (512, None)),
        Key("fc1_hopper", "sm_90", 16, (None, 2048)),
        Key("fc1_hopper", "sm_90", 16, (512, 2048)),
        Key("fc1_hopper", "NVIDIA H200", 16),
        Key("fc1_hopper", "NVIDIA H200", 16, (512, 2048)),
    ]
    for count, ring in enumerate(rings, 1):
        path = tmp_path / "kernel_table.json"
        table.save(dict(zip(keys[:count], rings, strict=False)), path, "a test")
        monkeypatch.setattr(
            table,
            "_tables",
            lambda gpus, path=path: [(path, table.load(path)), (table.SHIPPED, SHIPPED)],
        )
        table._find.cache_clear()
        assert table._find("fc1_hopper", 16, (512, 2048), H200) == ring
    assert table._find("fc1_hopper", 16, (256, 2048), H200) == rings[4]
    assert table._find("fc1_hopper", 16, (512, 2048), ("sm_90", "any")) == rings[3]
    assert table._find("fc1_hopper", 16, (256, 2048), ("sm_90", "any")) == rings[2]
    assert table._find("fc1_hopper", 16, (512, 1024), ("sm_90", "any")) == rings[1]
    assert table._find("fc1_hopper", 16, (256, 1024), ("sm_90", "any")) == rings[0]
    assert (
        table._find("rows_hopper", 16, (512, 2048), H200)
        == SHIPPED[Key("rows_hopper", "sm_90", 16)]
    )
    table._find.cache_clear()


def test_sizes_are_rounded_down_to_their_class(users_table):
    gpu = table.gpus_of(torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu"))[0]
    copy = Copy(ffn=7, width=None, slices=2)
    users_table({Key("copy", gpu, 16, (512, 2048)): copy})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.empty(1, dtype=torch.float16, device=device)
    assert table.configuration("copy", x, 768, 2048) == copy
    assert table.configuration("copy", x, 1023, 4095) == copy
    assert table.configuration("copy", x, 1024, 2048) != copy
    assert table.configuration("copy", x.float(), 768, 2048) != copy


def test_a_table_is_read_back_as_it_was_written(tmp_path):
    table.save(SHIPPED, tmp_path / "copy.json", "a 'test' with \"quotes\"")
    assert table.load(tmp_path / "copy.json") == SHIPPED


def test_a_table_from_before_sixteen_warps_is_taken(tmp_path):
    use = {name: value for name, value in vars(RING).items() if name != "finish_registers"}
    (tmp_path / "old.json").write_text(
        json.dumps({"format": 1, "configurations": [entry(use=use)]})
    )
    assert list(table.load(tmp_path / "old.json").values()) == [RING]


def entry(kernel="fc1_hopper", gpu="sm_90", bits=16, use=None, **others) -> dict:
    use = vars(RING) if use is None else use
    return {"kernel": kernel, "gpu": gpu, "bits": bits, "class": None, "use": use} | others


BAD = [
    (entry(kernel="fc3"), "kernel 'fc3' is not one of fc1, rows"),
    (entry(kernel=["fc1"]), r"kernel \['fc1'\] is not one of fc1, rows"),
    (entry(colour="red"), "an entry has kernel, gpu, bits, class, use"),
    (entry(gpu=""), "gpu='' is not a name"),
    (entry(gpu="sm_80"), "gpu='sm_80' does not run this kernel, sm_90 does"),
    (entry(bits=32), "bits=32 has no such kernel"),
    (entry("copy", bits=16.0, use=vars(Copy(0, 0, 4))), "bits=16.0 has no such kernel"),
    (entry(**{"class": [True, 512]}), r"class=\[true, 512\] is neither two powers of two"),
    (entry(**{"class": [700, 512]}), r"class=\[700, 512\] is neither two powers of two"),
    (entry(**{"class": [None, 700]}), r"class=\[null, 700\] is neither two powers of two"),
    (entry(**{"class": [None, None]}), r"class=\[null, null\] is neither two powers of two"),
    (entry(use={"group": 8}), "use has stages, group, multiply_registers, load_registers"),
    (entry(use=vars(RING) | {"stages": 5}), "stages=5 is not in 2..3"),
    (entry(use=vars(RING) | {"group": 0}), "group=0 is not in 1..256"),
    (entry(use=vars(RING) | {"group": True}), "group=True is not in 1..256"),
    (entry(use=vars(RING) | {"multiply_registers": 170}), "170/176 are not multiples of 8"),
    (entry(use=vars(RING) | {"load_registers": 184}), "168/184 are more than"),
    (entry(use=vars(RING) | {"finish_registers": 104}), "168/176/104 are more than"),
    (
        entry("wgrad_hopper", use=vars(RING) | {"load_registers": 120, "finish_registers": 24}),
        "finish_registers=24 is not null",
    ),
    (entry("fc1", use=vars(TILE) | {"rows": 64}), "rows=64 is not 128"),
    (entry("wgrad", use=vars(TILE) | {"cols": 96}), "cols=96 is not a power of two in 16..256"),
    (entry("rows", use=vars(TILE) | {"num_stages": "3"}), "num_stages='3' is not in 1..8"),
    (entry("copy", use={"ffn": -1, "width": None, "slices": 4}), "ffn=-1 is neither a size nor"),
    (entry("rows", use=vars(TILE) | {"num_stages": True}), "num_stages=True is not in 1..8"),
    (entry("rows", use=vars(TILE) | {"num_warps": True}), "num_warps=True is not a power of two"),
    (entry("copy", use={"ffn": True, "width": None, "slices": 4}), "ffn=True is neither a size"),
    (entry("copy", use={"ffn": 0, "width": None, "slices": 0}), "slices=0 is not 1 or more"),
]


def test_a_bad_table_is_refused_with_all_reasons(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"format": 1, "configurations": [bad for bad, _ in BAD]}))
    with pytest.raises(ValueError) as error:
        table.load(path)
    lines = str(error.value).splitlines()
    assert str(path) in lines[0]
    assert len(lines) == 1 + len(BAD)
    for number, (_, reason) in enumerate(BAD):
        with pytest.raises(ValueError, match=f"entry {number}: .*{reason}"):
            raise error.value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("{", "kernel table .*: Expecting"),
        ("[]", "not a table that moeblaze_megatron.tune has written"),
        ('{"format": 2, "configurations": []}', "format=2 is not 1"),
        ('{"format": true, "configurations": []}', "format=True is not 1"),
        (json.dumps({"format": 1, "configurations": [entry()] * 2}), "entry 1: .* is there twice"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, text, reason):
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        table.load(path)


def test_a_table_for_another_gpu_is_refused(users_table, device):
    """By `use`, which is called at start-up, and by the first launch."""
    with pytest.raises(ValueError, match=r"is for another GPU, not for this .*tune` here"):
        users_table({Key("copy", "another GPU", 16): Copy(0, 0, 4)})
    with pytest.raises(ValueError, match="is for another GPU"):
        table.configuration("copy", torch.empty(1, device=device), 64, 64)


def test_a_table_for_a_gpu_is_not_used_on_a_cpu(tmp_path, monkeypatch):
    """And says so: the same command line trains on both."""
    path = tmp_path / "kernel_table.json"
    table.save({Key("copy", "NVIDIA H200", 16): Copy(0, 0, 4)}, path, "a test")
    with monkeypatch.context() as on_a_cpu:
        on_a_cpu.setattr(table, "_named", None)
        on_a_cpu.setattr(table, "interpreting", lambda: False)
        on_a_cpu.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.warns(
            UserWarning, match=r"json is for NVIDIA H200; on this CPU it is not used"
        ):
            table.use(path)
        on_a_cpu.setenv(table.VARIABLE, str(path))
        assert "NVIDIA H200; on this CPU it is not used" in doctor.kernel_table().found
    table.use(None)


TOO_LARGE = """
import sys
from unittest.mock import patch

import torch
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from moeblaze_megatron import aot
from moeblaze_megatron.ops import table

def launch(kernel, *arguments, **options):
    if kernel.__name__ == "_rows_kernel":
        raise OutOfResources(262144, 166912, "shared memory")

table.use(sys.argv[1] if len(sys.argv) > 1 else None)
with aot.launching_nothing(80), aot.on_meta(), patch.object(JITFunction, "run", launch):
    try:
        aot.step(torch.bfloat16, "swiglu", False, None)
    except ValueError as error:
        print(error)
    tile = table.Tile(128, 256, 64, 8, 4, 8)
    try:
        with table.override("rows", tile):
            aot.step(torch.bfloat16, "swiglu", False, None)
    except OutOfResources as error:
        print("as it is")
"""


def test_an_entry_that_does_not_fit_the_gpu_is_named(tmp_path, plain_env):
    """Where Triton refuses the launch; as it is where the tile is in no table."""
    path = tmp_path / "kernel_table.json"
    table.save({Key("rows", "any", 16): replace(TILE, cols=256, depth=128)}, path, "a test")
    need = "num_stages=3, group=8 need 262144 of shared memory, but this GPU has 166912: run"
    for arguments, named, remedy in (
        ((path,), f"{path}, rows all sizes, 16 bits, any: rows=128, cols=256, ", "leave the table"),
        ((), f"{table.SHIPPED}, rows all sizes, 16 bits, any: rows=128, cols=128, ", "smaller\n"),
    ):
        result = subprocess.run(
            [sys.executable, "-c", TOO_LARGE, *arguments],
            env=plain_env,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        for words in (f"kernel table {named}", need, remedy, "\nas it is\n"):
            assert words in result.stdout, (words, result.stdout)


def test_kernels_compile_ahead_with_entries_for_the_gpu_at_hand(monkeypatch):
    """So that `doctor` tells of one that does not fit before a launch fails."""
    names = ("NVIDIA H200", "sm_90", "any")
    monkeypatch.setattr(table, "interpreting", lambda: False)
    monkeypatch.setattr(table, "_gpus_of_device", lambda device: names)
    for found, arch, gpus in ((True, 90, names), (True, 80, ("sm_80", "any")),
                              (False, 90, ("sm_90", "any"))):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        with aot.launching_nothing(arch):
            assert table.gpus_of(torch.empty(0, device="meta")) == gpus


def test_kernels_run_with_the_users_table(users_table, device):
    gpu = table.gpus_of(torch.empty(0, device=device))[0]
    tile = table.configuration("rows", torch.empty(1, device=device), 32, 32)
    users_table({Key("rows", gpu, 32): replace(tile, cols=16, group=1)})
    with table.recording() as notes:
        numbers(Case(40, 64, 32, 4, 2, "a table"), device, torch.float32)
    assert {value for key, value in notes.items() if key.kernel == "rows"} == {
        replace(tile, cols=16, group=1)
    }


def numbers(case: Case, device: str, dtype: torch.dtype) -> None:
    """The layer's output and gradients against plain torch."""
    ids, probs = routing(case, device)
    tensors = operands(case, device, dtype)
    exact = expected(case, tensors, ids, probs, torch.float64)
    eager = expected(case, tensors, ids, probs, dtype)
    assert_as_close_as_torch(run(layer_of(ids), tensors, probs), eager, exact)


LOOKS_AT_F = ("fc1", "fc2_dgrad", "copy")  # whose first size is F and second H


def layer_sizes(key: Key) -> tuple[int, int]:
    """H and F of a layer that has a GEMM of the entry's class."""
    first, second = key.shape_class or (None, None)
    first, second = first or 384, second or 512
    return (second, first) if key.kernel.startswith(LOOKS_AT_F) else (first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("key", [key for key in SHIPPED if key.gpu != "interpreter"], ids=str)
def test_numbers_of_every_entry(key, nan_filled, monkeypatch):
    """Each configuration on its own, in a layer that runs its kernel."""
    if key.gpu not in table.gpus_of(torch.empty(0, device="cuda")):
        pytest.skip(f"is for {key.gpu}")
    if not key.kernel.endswith("_hopper"):
        monkeypatch.setattr(hopper, "fits", lambda tensor: False)
    H, F = layer_sizes(key)
    case = Case(900, H, F, 4, 2, "a configuration")
    width = 0 if key.kernel == "wgrad" else None  # whether weight gradients read copied rows
    with (
        table.override("copy", Copy(ffn=None, width=width, slices=4)),
        table.override(key.kernel, SHIPPED[key]),
        table.recording() as notes,
    ):
        numbers(case, "cuda", torch.bfloat16 if key.bits == 16 else torch.float32)
    assert SHIPPED[key] in {value for found, value in notes.items() if found.kernel == key.kernel}


COMPILE = """
import dataclasses, json, sys, torch
from moeblaze_megatron import aot
from moeblaze_megatron.ops import table
from moeblaze_megatron.ops.activation import ACTIVATIONS
seen = {}
for key, value in table.load(table.SHIPPED).items():
    if key.gpu == "interpreter" or key.kernel == "copy" or (key.kernel, key.bits, value) in seen:
        continue
    arch = 90 if key.kernel.endswith("_hopper") else 80
    dtype = torch.bfloat16 if key.bits == 16 else torch.float32
    activations = ACTIVATIONS if key.kernel in ("fc1_hopper", "fc2_dgrad_hopper") else ("swiglu",)
    with table.override(key.kernel, value):
        rows = aot.compile_step(arch, dtype, activations)
    name = key.kernel.removesuffix("_gather")
    step = name.removesuffix("_hopper") if name in ("fc1_hopper", "fc2_dgrad_hopper") else ""
    name = "_rows_hopper_kernel" if step else f"_{name}_kernel"  # the one kernel of three steps
    seen[key.kernel, key.bits, value] = [
        dataclasses.astuple(r) for r in rows if r.kernel == name and step in r.variant
    ]
    print(json.dumps([str(key), arch, seen[key.kernel, key.bits, value]]), flush=True)
"""


def test_every_entry_compiles_and_fits(plain_env):
    """On the smallest GPU that runs it; without spills on the one whose kernels they are."""
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=plain_env, check=True, stdout=subprocess.PIPE
    )
    entries = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(entries) >= 11
    for name, arch, rows in entries:
        assert rows, f"{name}: nothing was compiled"
        for row in rows:
            *_, spilled, shared = row
            assert shared <= MAX_SHARED[arch], f"{name}: {row}"
            assert not (arch == 90 and spilled), f"{name}: {row}"
