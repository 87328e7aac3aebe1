"""examples/recipes: memory estimates, flags that Megatron and moeblaze accept, a small run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mcore_worker import in_megatron, seed
from pretraining import TINY, example, needs_megatron_on_cpu
from pretraining import run as run_process

from moeblaze_megatron import estimate

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"
# Parameters in billions, as their authors publish them.
SIZES = {
    "moe_1b": "1.02",
    "mixtral_8x7b": "46.70",
    "qwen3_30b_a3b": "30.53",
    "gpt_oss_like": "20.91",
    "deepseek_v3_like": "671.03",
}


def run(name, *arguments, **env):
    """Run a recipe where `torchrun` and `scontrol` print what they are asked for."""
    result = subprocess.run(
        [RECIPES / f"{name}.sh", *arguments],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return result.returncode, result.stdout


@pytest.fixture
def path(tmp_path):
    for tool, script in (("torchrun", 'printf "%s\\n" "$@"'), ("scontrol", "echo node7; echo b")):
        (tmp_path / tool).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / tool).chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


def test_every_recipe_is_here():
    found = {file.stem for file in RECIPES.glob("*.sh")} - {"launch"}
    assert found == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_dry_run_estimates_memory(name, path, plain_env):
    """Under the python of PATH, which is that of the tests here."""
    python = f"{Path(os.sys.executable).parent}{os.pathsep}{path}"
    code, output = run(name, "--dry-run", "--micro-batch-size", "1", PATH=python)
    assert code == 0, output
    assert output.splitlines()[-9].startswith(f"{SIZES[name]} B parameters on "), output
    ours, stock = map(float, output.splitlines()[-1].split()[1:])
    assert 5 < ours < stock < 141


@pytest.mark.parametrize("name", SIZES)
def test_flags_are_accepted(name, path):
    code, output = run(name, PATH=path, NODE_RANK="0", MASTER_ADDR="node0")
    assert code == 0, output
    words = output.splitlines()
    script = words.index("moeblaze_megatron")
    processes = int(words[words.index("--nproc-per-node") + 1])
    if "--nnodes" in words:
        processes *= int(words[words.index("--nnodes") + 1])
    accept(words=words[script + 1 :], processes=processes)


@in_megatron
def accept(words, processes):
    from megatron.training.arguments import (
        core_transformer_config_from_args,
        parse_args,
        validate_args,
    )

    from moeblaze_megatron.mcore import unsupported_reasons
    from moeblaze_megatron.mcore.config import unsupported_arguments

    # Its own check wants Transformer Engine's fusions and a GPU.
    off = "--transformer-impl local --no-gradient-accumulation-fusion --no-rope-fusion"
    off += " --no-persist-layer-norm --no-masked-softmax-fusion"
    words = [word for word in words if word != "--moe-grouped-gemm"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["pretrain", *words, *off.split()])
        patch.setenv("WORLD_SIZE", str(processes))
        args = parse_args()
    validate_args(args)
    assert args.moe_token_dispatcher_type == "moeblaze"
    assert unsupported_arguments(args) == []
    assert unsupported_reasons(core_transformer_config_from_args(args)) == []


@pytest.fixture
def files(tmp_path):
    """What DATA and SCRIPT may name."""
    for name in ("x.bin", "x.idx", "pre.py"):
        (tmp_path / name).touch()
    return {"DATA": f"{tmp_path}/x", "SCRIPT": f"{tmp_path}/pre.py"}


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_launch_on_one_node_by_hand_and_in_slurm(path, files, dashes):
    code, output = run("moe_1b", *dashes, "--lr", "1", PATH=path, GPUS="4", **files)
    words = output.splitlines()
    assert code == 0 and words[:3] == ["--nproc-per-node", "4", "--standalone"]
    assert words[3:6] == ["-m", "moeblaze_megatron", files["SCRIPT"]]
    assert words[-6:] == ["--data-path", files["DATA"], "--split", "98,2,0", "--lr", "1"]

    code, output = run("moe_1b", PATH=path, NODES="2")
    assert code != 0 and "NODE_RANK: the number of this node" in output
    code, output = run("moe_1b", PATH=path, NODES="2", NODE_RANK="1", MASTER_ADDR="a")
    assert "--node-rank\n1\n--master-addr\na\n" in output

    slurm = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2"}
    code, output = run("moe_1b", PATH=path, DISPATCHER="alltoall", **slurm)
    assert "--rdzv-endpoint\nnode7:29500\n" in output and "--nnodes\n2\n" in output
    assert "--moe-token-dispatcher-type\nalltoall\n" in output


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "eight"])
@pytest.mark.parametrize("name", ["GPUS", "NODES"])
def test_numbers_of_gpus_and_nodes_are_checked(name, number, path):
    for words in ((), ("--dry-run",), ("--compare",)):
        code, output = run("moe_1b", *words, PATH=path, **{name: number})
        assert code == 2 and output.endswith(f"{name}={number} is not a number of 1 or more\n")


def test_what_no_run_has_is_named_at_once(path):
    wrong = {"GPUS": "0", "DISPATCHER": "foo", "SCRIPT": "/no.py", "DATA": "/no/data"}
    code, output = run("moe_1b", "--lr", "1", "--dry-run", PATH=path, **wrong)
    data = "DATA=/no/data: there are no /no/data.bin and"
    for words in ("GPUS=0 is", "DISPATCHER=foo is", "SCRIPT=/no.py is", data):
        assert code == 2 and f"moe_1b.sh: {words}" in output
    assert "--dry-run has to be the first argument" in output
    code, output = run("moe_1b", "--dry-run", "--compare", PATH=path)
    assert code == 2 and "--compare has to be the first argument, and the only one" in output


@pytest.mark.parametrize("name", SIZES)
def test_recipes_explain_themselves(name, path):
    for flag in ("-h", "--help"):
        code, output = run(name, flag, PATH=path)
        assert code == 0 and "Layout: " in output and "DISPATCHER=NAME   moeblaze" in output
        assert "#" not in output and "FLAGS=(" not in output


def test_a_script_without_data_says_where_data_comes_from(tmp_path):
    script = RECIPES.parent / "pretrain_one_gpu.sh"
    for words in ((), ("--lr", "1")):
        result = subprocess.run([script, *words], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 2 and "before Megatron's flags; `python -m" in result.stderr


def test_compare_names_its_dispatchers_itself(path):
    code, output = run("moe_1b", "--compare", PATH=path, DISPATCHER="alltoall")
    assert code == 2 and "leave DISPATCHER=alltoall out" in output and "--dispatchers" in output


def test_compare_runs_on_one_node(path):
    code, output = run("deepseek_v3_like", "--compare", PATH=path)
    assert code == 2 and "not on NODES=64: set NODES=1" in output


def test_compare_takes_the_recipe_with_its_options(tmp_path, files):
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    options = ("--compare", "--out", "x", "--", "--lr", "1")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    code, output = run("moe_1b", *options, PATH=path, DATA=files["DATA"], GPUS="2")
    words = output.splitlines()
    assert code == 0 and words[:2] == ["-m", "moeblaze_megatron.compare"]
    assert words[2:7] == ["--processes", "2", "--out", "x", "--"]
    assert words[-6:] == ["--data-path", files["DATA"], "--split", "98,2,0", "--lr", "1"]
    env = {"SCRIPT": files["SCRIPT"], "IMPL": "transformer_engine"}
    code, output = run("moe_1b", "--compare", PATH=path, **env)
    words = output.splitlines()
    assert (
        words[4] == files["SCRIPT"] and words[-1] == "--mock-data" and "--moe-grouped-gemm" in words
    )
    assert words[words.index("--transformer-impl") + 1] == "transformer_engine"


def test_totals_are_those_of_the_report():
    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 8".split()
    words += "--moe-ffn-hidden-size 32 --seq-length 64 --micro-batch-size 2".split()
    assert estimate.totals(words, 1) is None
    words += ["--global-batch-size", "4", "--lr", "1e-3"]
    found = estimate.estimate(estimate.parser().parse_known_args(words)[0])
    assert estimate.totals(words, 1) == {n: found.total(n) for n in estimate.DISPATCHERS}


@needs_megatron_on_cpu
def test_smallest_recipe_trains(plain_env):
    small = "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --moe-ffn-hidden-size 32"
    small += " --seq-length 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 3"
    small += " --lr-warmup-iters 1 --eval-iters 0 --log-interval 1 --num-workers 0"
    output = example("recipes/moe_1b.sh", *small.split(), env=plain_env)
    assert output.count(" lm loss: ") == 3
    assert "MoEBlazeTokenDispatcher and MoEBlazeExperts" in output


def test_turned_queries_and_keys_are_kept_beside_the_plain_ones():
    """Peaks that `compare` measured with alltoall at two micro-batches (`docs/results.md`)."""
    recipe = (RECIPES / "moe_1b.sh").read_text()
    words = re.search(r"FLAGS=\((.*?)--transformer-impl", recipe, re.DOTALL)[1].split()

    def total(batch):
        sizes = ["--micro-batch-size", str(batch), "--global-batch-size", str(batch)]
        return estimate.totals([*words, *sizes], 1)["alltoall"]

    assert total(136) - total(16) == pytest.approx(137_497_328_128 - 32_613_515_264, rel=1e-3)


@pytest.mark.parametrize("dispatcher", estimate.DISPATCHERS)
@in_megatron
def test_what_experts_keep_is_what_autograd_keeps(dispatcher):
    """Beside the layer's input; what the router keeps is the rest, at most 5 percent."""
    from moeblaze_megatron import quickstart

    sizes = quickstart.CPU_SIZES | {"hidden_size": 256, "moe_ffn_hidden_size": 192}
    H, F, K = 256, 192, sizes["moe_router_topk"]
    measured, _ = quickstart.saved_bytes_per_token(sizes, dispatcher)
    kept = estimate.kept_by_experts(K, H, F, 2, 4, 0, dict.fromkeys(estimate.DISPATCHERS, 4))[
        dispatcher
    ]
    assert kept + 4 * H <= measured <= 1.05 * (kept + 4 * H)


@pytest.mark.parametrize("groups", [8, 2, 1])
@pytest.mark.parametrize(
    "flags",
    [[], ["--position-embedding-type", "rope"], ["--use-rotary-position-embeddings"]],
    ids=["plain", "rope", "deprecated"],
)
@in_megatron
def test_what_attention_keeps_is_what_autograd_keeps(flags, groups):
    """All but the core, which selective recomputation makes again; within 1 percent."""
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moeblaze_megatron.record import kept_storages

    seed(1)
    H, heads, S, B = 64, 8, 16, 64
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=heads,
        num_query_groups=groups,
        add_bias_linear=False,
        use_cpu_initialization=True,
        recompute_granularity="selective",
    )
    spec = get_gpt_layer_local_spec().submodules.self_attention
    attention = build_module(spec, config=config, layer_number=1)
    turns = RotaryEmbedding(H // heads, 1.0, use_cpu_initialization=True)(S) if flags else None
    x = torch.randn(S, B, H, requires_grad=True)
    mask = torch.ones(1, 1, S, S).triu(1).bool()
    with kept_storages(attention) as kept:
        output, _ = attention(x, mask, rotary_pos_emb=turns)
    del output

    words = f"--num-layers 1 --hidden-size {H} --num-attention-heads {heads} --seq-length {S}"
    words += f" --num-experts 1 --moe-router-topk 1 --moe-ffn-hidden-size 8 --micro-batch-size {B}"
    words += f" --global-batch-size {B} --group-query-attention --num-query-groups {groups}"
    found = estimate.estimate(estimate.parser().parse_args([*words.split(), *flags]))
    norms = 3 * S * B * H * 4  # both norms' inputs, and the second one's output
    assert sum(kept.values()) == pytest.approx(found.other_layers - norms, rel=1e-2)


def test_tensor_parallelism_splits_what_layers_keep():
    """By token, head or column; only whole rows of x, and lists, are held on each rank of it."""
    words = [*MODEL, "--moe-layer-freq", "[0,1]"]
    flags = [*words, "--processes", "4", "--tensor-model-parallel-size", "4", "--sequence-parallel"]
    found = [estimate.estimate(estimate.parser().parse_known_args(w)[0]) for w in (words, flags)]
    assert found[1].other_layers == found[0].other_layers / 4
    T, H, K = 64 // 4, 64, 2
    more = {"moeblaze": T * (4 * H * 2 + 16 * K * 3), "alltoall": T * 3 * K * H * 2}
    for name in estimate.DISPATCHERS:
        assert found[1].moe[name] == found[0].moe[name] / 4 + more[name]


@needs_megatron_on_cpu
def test_what_experts_keep_with_expert_tensor_parallelism(plain_env, tmp_path):
    command = [sys.executable, "-m", "moeblaze_megatron.compare", "--only", "baseline", "--only"]
    command += ["other", "--out", tmp_path, "--processes", "2", "--", *TINY, "--train-iters", "2"]
    more = ["--expert-tensor-parallel-size", "2"]
    code, output = run_process(*command, *more, env=plain_env | {"CUDA_VISIBLE_DEVICES": ""})
    assert code == 0, output[-6000:]
    words = [*TINY, *more, "--processes", "2"]
    found = estimate.estimate(estimate.parser().parse_known_args(words)[0])
    layers, T, H = 2, 128, 64
    for name in estimate.DISPATCHERS:
        record = json.loads((tmp_path / f"{name}-seed1234" / "rank0.json").read_text())
        kept = found.moe[name] / layers / T + 4 * H
        assert kept <= record["held_bytes_per_token"] <= 1.05 * kept


def test_moe_layers_of_a_model():
    assert estimate.moe_layers("1", 5) == 5
    assert estimate.moe_layers("2", 5) == 3
    assert estimate.moe_layers("([0]*3+[1]*58)", 61) == 58
    assert estimate.moe_layers("([1]*3+[0]*1)*3", 12) == 9, "an example of Megatron's help"
    assert estimate.moe_layers("2*[0, 1]", 4) == 2
    with pytest.raises(ValueError, match="has 61 layers, not 60"):
        estimate.moe_layers("([0]*3+[1]*58)", 60)


def test_layouts_that_do_not_fit_are_refused():
    command = "--processes 6 --num-layers 1 --hidden-size 8 --num-attention-heads 1 --num-experts 4"
    command += " --moe-ffn-hidden-size 8 --seq-length 8 --micro-batch-size 1 --global-batch-size 1"
    with pytest.raises(SystemExit) as ended:
        layout = ["--expert-model-parallel-size", "4", "--num-attention-heads", "3"]
        estimate.main([*command.split(), *layout])
    said = str(ended.value)
    assert "6 processes are no multiple of 4, the expert x expert-tensor x pipel" in said
    assert "; --num-attention-heads 3 does not divide --hidden-size 8" in said
    assert "tensor x pipeline x context" not in said


MODEL = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 8
    --moe-ffn-hidden-size 32 --seq-length 64 --micro-batch-size 1 --global-batch-size 8
    --bf16 --swiglu --disable-bias-linear""".split()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--moeblaze-recompute-fc2", "did you mean --moeblaze-recompute-fc1?"),
        ("--moeblaze-magic", "--moeblaze-magic is not known"),
        ("--expert-model-paralel-size 8", "did you mean --expert-model-parallel-size?"),
        ("--expert-model-parallel-size 3 --processes 3", "3 does not divide --num-experts 8"),
        ("--moe-router-topk 9 --num-layers -2", "--num-layers -2 is not positive; --moe-router-"),
        *(
            (f"--moe-layer-freq {freq}", f"--moe-layer-freq {freq} is neither")
            for freq in ("abc", "0", "[1,0", "3+1", "[1,[0]]", "[1]*[2]", "[1,-1]")
        ),
        ("--moe-layer-freq [1] --num-layers -2", "--num-layers -2 is not positive; --moe-layer-fr"),
        ("--num-layres 3", "--num-layres is not known; did you mean --num-layers?"),
        ("-- --num-layers -2", "--num-layers -2 is not positive"),
        ("--moeblaze-recompute-fc1 --activation-func-fp8-input-store", "keeps nothing for"),
    ],
)
def test_impossible_runs_and_typos_are_refused(words, said):
    with pytest.raises(SystemExit, match="estimate: ") as error:
        estimate.main([*MODEL, *words.split()])
    assert said in str(error.value)


def test_biases_and_quick_geglu_are_counted():
    """Of fc1 and fc2 of each expert, and of attention's two linears; a gate like SwiGLU's."""
    plain, _ = estimate.parser().parse_known_args(MODEL)
    words = [word for word in MODEL if word not in ("--swiglu", "--disable-bias-linear")]
    biased, _ = estimate.parser().parse_known_args([*words, "--quick-geglu"])
    more = estimate.estimate(biased).parameters - estimate.estimate(plain).parameters
    assert more == 2 * (8 * (2 * 32 + 64) + 3 * 64 + 64)


def test_sizes_that_are_left_out_are_megatrons():
    def parameters(*words):
        flags, _ = estimate.parser().parse_known_args([*MODEL, *words])
        return estimate.estimate(flags).parameters

    grouped = ("--group-query-attention", "--num-query-groups")
    assert parameters(*grouped[:1]) == parameters(*grouped, "1") < parameters(*grouped, "2")
    # With SwiGLU, two thirds of 4H in whole 64s.
    dense = ("--moe-layer-freq", "[0,1]")
    assert parameters(*dense) == parameters(*dense, "--ffn-hidden-size", "128")


def test_fp8_store_keeps_half():
    """33/32 bytes for 2 of each fc1_output element, and 16 bytes of lists for each row."""
    kept = []
    for words in ([], ["--activation-func-fp8-input-store", "--moeblaze-report-rows"]):
        flags, _ = estimate.parser().parse_known_args([*MODEL, *words])
        kept.append(estimate.estimate(flags).moe)
    rows = 2 * 64 * 2  # layers, tokens, top-k
    assert kept[0]["moeblaze"] - kept[1]["moeblaze"] == rows * 64 * (2 - 33 / 32)
    assert kept[0]["alltoall"] - kept[1]["alltoall"] == rows * 64
