"""The checks of ep_worker.py over NCCL, a GPU for each rank: one job for each number of ranks."""

import pytest
import torch
from ep_worker import CHECKS, CPU_ONLY, on_cuda
from test_expert_parallel import in_one_job

from moeblaze_megatron.processes import NO_MULTICAST

WORLDS = (2, 4, 8)


@pytest.fixture(scope="session")
def outcomes(request, plain_env, tmp_path_factory):
    pytest.importorskip("megatron.core")
    env = plain_env | NO_MULTICAST
    return in_one_job(test_over_nccl, request.session, tmp_path_factory, env, cpu=False)


def needs(world):
    return pytest.mark.skipif(torch.cuda.device_count() < world, reason=f"needs {world} GPUs")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs(world)) for world in WORLDS for name in on_cuda(world)],
)
def test_over_nccl(name, outcomes):
    failure = outcomes(name)
    assert failure is None, f"{name}, here because: {CHECKS[name].why}\n{failure}"


def test_every_check_is_run_or_left_out_by_name():
    names = {name.split("[")[0] for world in WORLDS for name in on_cuda(world)}
    assert names | CPU_ONLY.keys() == {name.split("[")[0] for name in CHECKS}
    assert not names & CPU_ONLY.keys()
