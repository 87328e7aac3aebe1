"""`python -m moeblaze_megatron`: what it says, refuses and passes on; the CPU mode's switch."""

import json
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mcore_worker import in_megatron
from pretraining import TINY, launch, needs_megatron_on_cpu

from moeblaze_megatron import __main__ as launcher
from moeblaze_megatron.mcore import cpu_mode


def test_help_without_megatron_or_gpu(plain_env):
    code, output = launch("--help", env=plain_env)
    assert code == 0
    for word in ("--moe-token-dispatcher-type moeblaze", "torchrun", "--megatron-help", "CPU mode"):
        assert word in output


def test_missing_script_is_named(plain_env):
    code, output = launch("no/such/pretrain_gpt.py", "--num-layers", 2, env=plain_env)
    assert code == 1
    assert "no pretraining script at 'no/such/pretrain_gpt.py'" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("content", [b"torchrun pretrain\n", b"\x7fELF\x02\x00\x00", b"\xff\xfe="])
def test_what_is_not_python_is_refused(plain_env, tmp_path, content):
    path = tmp_path / "launch.sh"
    path.write_bytes(content)
    code, output = launch(path, "--num-layers", 2, env=plain_env)
    assert code == 1
    assert f"'{path}' is not a Python script (" in output and "Traceback" not in output


def test_no_flags_at_all(plain_env):
    code, output = launch(env=plain_env)
    assert code == 1
    assert "nothing to train" in output and "--help" in output and "Traceback" not in output


def test_missing_packages_are_named_together(monkeypatch):
    def find(name):
        if name.startswith("megatron"):
            raise ModuleNotFoundError(name)
        return None if name == "yaml" else SimpleNamespace()

    monkeypatch.setattr(launcher.importlib.util, "find_spec", find)
    with pytest.raises(SystemExit, match=r"megatron\.core, megatron\.training, yaml\. .*pip inst"):
        launcher.check_packages()


@in_megatron
def test_own_script_is_refused_on_an_older_megatron():
    from megatron.training import argument_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(argument_utils, "gpt_config_from_args", raising=False)
        with pytest.raises(SystemExit, match=r"needs Megatron-Core 0\.19 .* path of pretrain_gpt"):
            launcher.check_own_script()
        patch.setattr(argument_utils, "gpt_config_from_args", None, raising=False)
        launcher.check_own_script()


@needs_megatron_on_cpu
def test_typos_are_named(plain_env):
    code, output = launch(
        *TINY, "--moe-token-dispacher-type", "moeblaze", "--top-k=3", "--zzz", env=plain_env
    )
    assert code == 2
    assert "unrecognized arguments: --moe-token-dispacher-type moeblaze --top-k=3 --zzz" in output
    assert "--moe-token-dispacher-type: did you mean --moe-token-dispatcher-type" in output
    assert "usage:" not in output


@needs_megatron_on_cpu
def test_dashes_alone_are_named(plain_env):
    code, output = launch(*TINY, "--", "--lr", "1e-3", env=plain_env)
    assert code == 2 and output.endswith(
        "\n--: leave it out, what follows it is taken for no flag\n"
    )


@needs_megatron_on_cpu
def test_unsupported_settings_end_the_output(plain_env):
    """All of them, on one of the ranks, without the traceback of a fault."""
    flags = "--moe-token-dispatcher-type moeblaze --moe-apply-probs-on-input --optimizer muon"
    code, output = launch(*TINY, *flags.split(), env=plain_env, processes=2)
    assert code == 1 and output.count("ValueError: moeblaze does not support:\n  moe_apply_p") == 1
    assert output.count("\n  optimizer='muon'") == 1
    assert "mcore/install.py" not in output


@needs_megatron_on_cpu
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mock-data"], "start with torchrun"),
        ([], "no data: give --data-path"),
    ],
)
def test_what_a_run_lacks_is_named(plain_env, arguments, message):
    tiny = [word for word in TINY if word != "--mock-data"]
    code, output = launch(*tiny, *arguments, env=plain_env)
    assert code == 1
    assert message in output.splitlines()[-1]


def test_cpu_mode_without_arguments():
    assert cpu_mode.cpu_arguments([])[:2] == ["--distributed-backend", "gloo"]


@needs_megatron_on_cpu
def test_wrong_dispatcher_is_answered_with_the_choices(plain_env):
    code, output = launch(*TINY, "--moe-token-dispatcher-type", "moeblase", env=plain_env)
    assert code == 2
    assert "invalid choice: 'moeblase'" in output and "moeblaze" in output.replace("'", "")


@needs_megatron_on_cpu
def test_megatron_help_lists_our_value(plain_env):
    code, output = launch("--megatron-help", env=plain_env)
    assert code == 0
    assert "--moe-token-dispatcher-type {allgather,alltoall,flex,moeblaze}" in output


@needs_megatron_on_cpu
def test_script_runs_as_main_with_its_own_folder_and_flags(plain_env, tmp_path):
    """Versions are printed, and a `megatron` put together from two places is pointed out."""
    (tmp_path / "sibling.py").write_text("VALUE = 'from beside the script'\n")
    (tmp_path / "script.py").write_text(
        "import json, sys, sibling\n"
        "from megatron.core.transformer import TransformerConfig\n"
        "field = TransformerConfig.__dataclass_fields__['moe_token_dispatcher_type']\n"
        "print(json.dumps([__name__, sys.argv, sibling.VALUE, str(field.type)]))\n"
    )
    (tmp_path / "megatron").mkdir()
    core = Path(find_spec("megatron.core").origin).parent
    (tmp_path / "megatron" / "core").symlink_to(core)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit = ("-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "not Megatron's")
    subprocess.run(["git", "-C", tmp_path, *commit, "--allow-empty"], check=True)
    script = tmp_path / "script.py"
    # A wheel in the virtual environment of a clone lies in that clone's repository, say.
    env = plain_env | {"GIT_DIR": str(tmp_path / ".git")}
    code, output = launch(script, "--lr", "1", "--distributed-backend=gloo", env=env)
    assert code == 0, output
    name, argv, sibling, values = json.loads(output.splitlines()[-1])
    assert name == "__main__" and sibling == "from beside the script" and "moeblaze" in values
    assert argv[:4] == [str(script), "--lr", "1", "--distributed-backend=gloo"]
    assert "--no-rope-fusion" in argv and "--distributed-backend" not in argv
    for line in (
        "moeblaze-megatron ",
        f"megatron.core     {version('megatron-core')} in {tmp_path}",
        f"megatron.training in {core.parent}",
        f"torch {torch.__version__}, triton",
        "WARNING: megatron.core and megatron.training come from different places",
        "CPU mode: no GPU found",
        "CPU mode adds: --transformer-impl local",
    ):
        assert output.count(line) == 1, (line, output)


def test_cpu_arguments_keep_what_is_given():
    given = ["--transformer-impl", "local", "--distributed-backend=gloo", "--no-rope-fusion"]
    added = cpu_mode.cpu_arguments(given)
    assert "--no-persist-layer-norm" in added
    assert not set(added) & {"--transformer-impl", "--distributed-backend", "--no-rope-fusion"}


def test_cpu_arguments_refuse_what_a_cpu_cannot_do():
    with pytest.raises(SystemExit) as refused:
        cpu_mode.cpu_arguments(
            ["--distributed-backend", "nccl", "--transformer-impl=transformer_engine"]
        )
    assert "--distributed-backend nccl (use gloo)" in str(refused.value)
    assert "--transformer-impl transformer_engine (use local)" in str(refused.value)


def test_cpu_mode_is_off_where_a_gpu_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = vars(torch.cuda).copy()
    assert cpu_mode.install_cpu_mode(training=True) == []
    assert vars(torch.cuda) == before
