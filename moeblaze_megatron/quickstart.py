"""From text to a trained mixture-of-experts GPT in one command.

    python -m moeblaze_megatron.quickstart

Tokenises text byte by byte into Megatron's indexed dataset, pretrains a small GPT with
`--moe-token-dispatcher-type moeblaze` through torchrun and the launcher, on a GPU in bf16 where
there is one and else on the CPU in fp32, and sums the run up on one screen.

Letters: T tokens, H hidden size, F ffn hidden size of one expert.
"""

import argparse
import re
import shutil
import statistics
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from moeblaze_megatron.processes import ITERATION, Failed, launcher_command, train
from moeblaze_megatron.record import kept_storages

EOD = 256  # the token after the last byte of a file
VOCAB_SIZE = 257
PIECE = 2048  # bytes in one document; every VALID_EVERY-th is kept for validation
VALID_EVERY = 16
MIN_BYTES = 2 * PIECE * VALID_EVERY
MAX_BYTES = 64 << 20
OUR_FILES = ("data", "checkpoint", "train.log")
MARK = ".moeblaze-quickstart"  # a file in the directories whose OUR_FILES --force may delete

# Megatron's names for the sizes of the model and of a step.
CPU_SIZES = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "seq_length": 128,
    "micro_batch_size": 8,
    "global_batch_size": 8,
}
GPU_SIZES = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_experts": 16,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 512,
    "seq_length": 512,
    "micro_batch_size": 16,
    "global_batch_size": 16,
}
TOKENS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)]
# Those of the third and fourth line do without Transformer Engine and Apex, on a GPU too.
FLAGS = """
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-rope-fusion --no-persist-layer-norm
    --num-workers 1
    --lr 2e-3 --lr-decay-style constant --override-opt-param-scheduler
    --clip-grad 1.0 --adam-beta2 0.95 --weight-decay 0.1 --eval-iters 8 --log-interval 1
""".split()
VALIDATION = re.compile(r"validation loss at iteration \d+ on validation.* lm loss value: (\S+)")
MOE_LAYERS = re.compile(r"> MoE layers on rank 0: (.*)")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m moeblaze_megatron.quickstart",
        description="Pretrain a small mixture-of-experts GPT on text with Megatron-Core.",
        epilog="With no --text it uses text that is on every machine with Python: the reference "
        "documentation and the sources of the standard library. It downloads nothing.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        metavar="FILE_OR_DIR",
        help="text files, or directories of them, to train on",
    )
    parser.add_argument(
        "--iters", type=int, default=300, metavar="N", help="iterations to train (default: 300)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/quickstart"),
        metavar="DIR",
        help="where dataset, log and checkpoint go (default: runs/quickstart)",
    )
    parser.add_argument(
        "--data-only", action="store_true", help="write the dataset to DIR/data and train nothing"
    )
    parser.add_argument(
        "--dispatcher",
        default="moeblaze",
        choices=("moeblaze", "alltoall", "allgather"),
        help="Megatron's --moe-token-dispatcher-type (default: moeblaze)",
    )
    again = parser.add_mutually_exclusive_group()
    again.add_argument(
        "--resume", action="store_true", help="train N more iterations from DIR's checkpoint"
    )
    again.add_argument(
        "--force", action="store_true", help="replace what an earlier quickstart left in DIR"
    )
    arguments = parser.parse_args(argv)
    if arguments.iters < 1:
        parser.error(f"--iters must be 1 or more, got {arguments.iters}")
    if arguments.resume and arguments.text:
        parser.error("--resume goes on with the text of the earlier run: leave --text out")
    if arguments.resume and arguments.data_only:
        parser.error("--resume trains on, --data-only trains nothing: leave one of them out")
    return arguments


def reached(out: Path) -> int:
    """The iteration that the checkpoint in `out` has reached, or 0."""
    latest = out / "checkpoint" / "latest_checkpointed_iteration.txt"
    return int(latest.read_text()) if latest.is_file() else 0


def prepare_output(out: Path, resume: bool, force: bool) -> int:
    """Make `out` ready for a run; returns the iteration that its checkpoint has reached, or 0."""
    if resume:
        if not reached(out):
            sys.exit(
                f"quickstart: --resume found no checkpoint in {out}; run without it first, with "
                "--force where an earlier run stopped before its first checkpoint"
            )
        return reached(out)
    try:
        if out.exists() and not out.is_dir():
            sys.exit(f"quickstart: --out {out} is a file; name a directory")
        if force:
            found = [name for name in OUR_FILES if (out / name).exists()]
            if found and not (out / MARK).exists():
                sys.exit(
                    f"quickstart: --force would delete {', '.join(found)} in {out}, which no "
                    "quickstart has written; name another directory with --out"
                )
            for name in OUR_FILES:
                path = out / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        elif out.exists() and any(out.iterdir()):
            further = "--resume trains on from its checkpoint, " if reached(out) else ""
            sys.exit(
                f"quickstart: {out} is not empty; {further}--force replaces an earlier run, "
                "--out DIR writes elsewhere"
            )
        (out / "data").mkdir(parents=True, exist_ok=True)
        (out / "train.log").touch()
        (out / MARK).touch()
    except OSError as error:
        sys.exit(f"quickstart: cannot write to {out} ({error}); name another directory with --out")
    return 0


def default_text() -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of the standard library's reference documentation and sources."""
    from pydoc_data.topics import topics

    yield "pydoc topics", "\n".join(topics[name] for name in sorted(topics)).encode()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield str(path), path.read_bytes()


def text_of(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of every text file in `paths`; a file with a zero byte is no text."""
    for path in paths:
        if not path.exists():
            sys.exit(f"quickstart: --text {path} does not exist")
        files = (
            sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        )
        for file in files:
            try:
                content = file.read_bytes()
            except OSError as error:
                sys.exit(f"quickstart: cannot read --text {file} ({error})")
            if b"\0" not in content:
                yield str(file), content


def collect_text(paths: list[Path] | None) -> tuple[list[bytes], str]:
    """The texts of `paths`, or of the standard library, up to MAX_BYTES; and a line about them."""
    texts, size = [], 0
    for name, content in text_of(paths) if paths else default_text():
        content = content[: MAX_BYTES - size]
        if content:
            texts.append((name, content))
            size += len(content)
        if size == MAX_BYTES:
            break
    where = ", ".join(map(str, paths)) if paths else "Python's documentation and standard library"
    if not texts:
        sys.exit(f"quickstart: no text in {where}: every file is empty or binary")
    if size < MIN_BYTES:
        sys.exit(
            f"quickstart: too little text in {where}: {size:,} bytes, at least {MIN_BYTES:,} needed"
        )
    number = f"{len(texts)} texts, {texts[0][0]} ... {texts[-1][0]}" if texts[1:] else texts[0][0]
    more = " (no more is read)" if size == MAX_BYTES else ""
    return [content for _, content in texts], f"{size:,} bytes{more} from {where}: {number}"


def write_dataset(texts: list[bytes], data: Path) -> None:
    """Write the bytes of `texts` as `data`/train and `data`/valid for Megatron."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builders = {
        name: IndexedDatasetBuilder(str(data / f"{name}.bin"), dtype=np.uint16)
        for name in ("train", "valid")
    }
    count = 0
    for text in texts:
        tokens = np.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), np.uint16(EOD))
        for start in range(0, len(tokens), PIECE):
            piece = torch.from_numpy(tokens[start : start + PIECE])
            count += 1
            builder = builders["valid" if count % VALID_EVERY == 0 else "train"]
            builder.add_document(piece, [len(piece)])
    for name, builder in builders.items():
        builder.finalize(str(data / f"{name}.idx"))


def training_flags(sizes: dict[str, int], data: Path, last: int) -> list[str]:
    """Megatron's flags that train a model of `sizes` on the dataset `data` to iteration `last`."""
    settings = {
        **sizes,
        "max_position_embeddings": sizes["seq_length"],
        "train_data_path": data / "train",
        "valid_data_path": data / "valid",
        "test_data_path": data / "valid",
        "data_cache_path": data / "cache",
        "train_iters": last,
        "lr_warmup_iters": min(10, last - 1),
        "eval_interval": last + 1,  # once, after training
    }
    flags = [word for k, v in settings.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    return [*flags, *(["--bf16"] if torch.cuda.is_available() else []), *TOKENS, *FLAGS]


def training_command(
    sizes: dict[str, int], out: Path, dispatcher: str, done: int, iters: int
) -> list[str]:
    """The torchrun command that trains from iteration `done` for `iters` more."""
    last, checkpoint = done + iters, out / "checkpoint"
    return [
        *launcher_command(),
        *("--moe-token-dispatcher-type", dispatcher),
        *("--save", str(checkpoint), "--save-interval", str(max(1000, last // 10))),
        *(["--load", str(checkpoint)] if done else []),
        *training_flags(sizes, out / "data", last),
    ]


def shown_losses(iters: int) -> Callable[[str], None]:
    """Shows about twenty of the `iters` iterations that Megatron logs, but a hundredth at least."""
    seen = 0

    def show(line: str) -> None:
        nonlocal seen
        if found := ITERATION.search(line):
            if seen % max(1, min(iters // 20, 100)) == 0 or seen == iters - 1:
                print(
                    f"iteration {found['iteration']:>6}  lm loss {float(found['loss']):.4f}  "
                    f"grad norm {found['grad_norm']}  {float(found['ms']):.0f} ms",
                    flush=True,
                )
            seen += 1

    return show


def saved_bytes_per_token(sizes: dict[str, int], dispatcher: str) -> tuple[float, str]:
    """Bytes per token that one MoE layer keeps for its backward pass, and what it is built from."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig

    cuda = torch.cuda.is_available()
    names = ("num_layers", "hidden_size", "num_attention_heads")
    names += ("moe_router_topk", "moe_ffn_hidden_size")
    config = TransformerConfig(
        **{name: sizes[name] for name in names},
        num_moe_experts=sizes["num_experts"],
        moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type="aux_loss",  # as FLAGS: its router keeps more
        moe_aux_loss_coeff=1e-2,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,  # as in the training run, where it is Megatron's default
        add_bias_linear=False,
        use_cpu_initialization=not cuda,
        bf16=cuda,
        params_dtype=torch.bfloat16 if cuda else torch.float32,
    )
    layer = get_moe_module_spec(use_te=False, num_experts=sizes["num_experts"])(config)
    layer = layer.cuda().train()
    T = sizes["seq_length"] * sizes["micro_batch_size"]
    hidden_states = torch.randn(
        *(sizes["seq_length"], sizes["micro_batch_size"], sizes["hidden_size"]),
        dtype=config.params_dtype,
        device="cuda" if cuda else "cpu",
        requires_grad=True,
    )
    # What is kept does not depend on compiling Megatron's fusions, which takes its time.
    with torch.compiler.set_stance("force_eager"), kept_storages(layer) as kept:
        output, _ = layer(hidden_states)
    del output  # alive until here, and with it everything kept
    built = f"{type(layer.token_dispatcher).__name__} and {type(layer.experts).__name__}"
    return sum(kept.values()) / T, built


def prepare_megatron() -> None:
    """Teach this process's Megatron the new value and start it on one rank."""
    from moeblaze_megatron.mcore.cpu_mode import install_cpu_mode

    install_cpu_mode()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from moeblaze_megatron.mcore import install

    install()
    torch.distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)


def main(argv: list[str] | None = None) -> None:
    """Tokenise, train, measure, sum up."""
    arguments = parse_arguments(argv)
    texts, description = (None, None) if arguments.resume else collect_text(arguments.text)
    out, iters = arguments.out, arguments.iters
    done = prepare_output(out, arguments.resume, arguments.force)
    # On packages that this run does without.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    if texts:
        write_dataset(texts, out / "data")
        print(f"text: {description}")
    if arguments.data_only:
        print(f"for Megatron: --data-path {out / 'data' / 'train'} {' '.join(TOKENS)}")
        return
    prepare_megatron()
    cuda = torch.cuda.is_available()
    sizes = GPU_SIZES if cuda else CPU_SIZES
    print(
        f"training {iters} iterations on "
        f"{torch.cuda.get_device_name() + ' in bf16' if cuda else 'the CPU in fp32'}; "
        f"all output in {out / 'train.log'}",
        flush=True,
    )
    command = training_command(sizes, out, arguments.dispatcher, done, iters)
    try:
        log = train(command, out / "train.log", shown_losses(iters))
    except Failed as failure:
        sys.exit(f"quickstart: {failure}")
    except KeyboardInterrupt:
        saved = reached(out)
        how = f"--resume trains on from iteration {saved}" if saved else "--force starts again"
        sys.exit(f"quickstart: interrupted; {how}")

    steps = list(ITERATION.finditer(log))
    ms = statistics.median(float(step["ms"]) for step in steps)
    tokens = sizes["global_batch_size"] * sizes["seq_length"]
    saved = {name: saved_bytes_per_token(sizes, name) for name in ("moeblaze", "alltoall")}
    rows = [
        ("model", f"{sizes['num_layers']} layers, hidden size {sizes['hidden_size']}, "
         f"{sizes['num_experts']} experts of {sizes['moe_ffn_hidden_size']}, "
         f"{sizes['moe_router_topk']} per token"),
        ("MoE layers", MOE_LAYERS.search(log)[1]),
        ("trained", f"iterations {done + 1} to {done + iters}, {iters * tokens:,} tokens, "
         f"{tokens / ms * 1e3:,.0f} tokens/s"),
        ("lm loss", f"{float(steps[0]['loss']):.3f} at the start, "
         f"{float(steps[-1]['loss']):.3f} at the end, {float(VALIDATION.search(log)[1]):.3f} "
         "on text held back"),
        ("checkpoint", out / "checkpoint" / f"iter_{done + iters:07d}"),
        ("log", out / "train.log"),
    ]  # fmt: skip
    print("\n" + "\n".join(f"{name:<12}{value}" for name, value in rows))
    print("bytes per token that one MoE layer keeps for its backward pass:")
    for name, (size, built) in saved.items():
        print(f"  {name:<10}{size:>10,.0f}  {built}")
    torch.distributed.destroy_process_group()  # NCCL warns at exit without it


if __name__ == "__main__":
    main()
