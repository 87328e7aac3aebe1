"""One process for the tests that run Megatron, and what they share.

Megatron wants process groups and, without a GPU, the CPU mode, which changes torch for a whole
process; the tests' own process runs Triton's interpreter. So a test of Megatron is decorated with
`in_megatron`, and its body runs in a worker that has both and that all test files share; with
`in_megatron_on_gpu` in another worker that sees the GPU.

S sequence length, B batch, E experts, H hidden size, F ffn hidden size of one expert.
"""

import functools
import importlib
import multiprocessing
import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

E, H, F = 8, 32, 48
# fc1_output is about 0.1 here, so the clamp is, too.
GPT_OSS = {
    "activation_func": "quick_gelu",
    "activation_func_clamp_value": 0.1,
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
}


@functools.cache
def _pool(gpu: bool) -> ProcessPoolExecutor:
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=_start)
    # The worker inherits the environment of the moment it is spawned in.
    with mock.patch.dict(os.environ, {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}):
        os.environ.pop("TRITON_INTERPRET", None)
        pool.submit(os.getpid).result()
    return pool


def _start() -> None:
    from moeblaze_megatron.mcore import install
    from moeblaze_megatron.mcore.cpu_mode import install_cpu_mode

    install_cpu_mode(training=True)
    install()
    from megatron.core import parallel_state

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, init_method=address, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def _call(module: str, name: str, kwargs: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**kwargs)


def in_megatron(test: Callable, gpu: bool = False) -> Callable:
    """Runs the body of a test in the worker; its arguments have to survive pickling."""

    @functools.wraps(test)
    def run(**kwargs: Any) -> None:
        _pool(gpu).submit(_call, test.__module__, test.__name__, kwargs).result()

    return run


def in_megatron_on_gpu(test: Callable) -> Callable:
    """The same with the GPU in sight; the test is skipped without one."""
    return pytest.mark.gpu(in_megatron(test, gpu=True))


def config(dispatcher: str = "moeblaze", **fields: Any) -> Any:
    """A TransformerConfig of small sizes: 8 experts, top 2, SwiGLU, fp32.

    An activation that is Megatron's own is given by its name.
    """
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.transformer_config import TransformerConfig

    named = {function.__name__: function for function in (squared_relu, quick_gelu)}

    defaults = {
        "num_layers": 1,
        "hidden_size": H,
        "num_attention_heads": 4,
        "num_moe_experts": E,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": F,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": dispatcher,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "use_cpu_initialization": True,
    }
    fields = {**defaults, **fields}
    activation = fields["activation_func"]
    return TransformerConfig(**fields | {"activation_func": named.get(activation, activation)})


def seed(value: int = 1234) -> None:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(value)
    model_parallel_cuda_manual_seed(value, force_reset_rng=True)


def layer(dispatcher: str = "moeblaze", **fields: Any) -> torch.nn.Module:
    """The MoE layer of Megatron's local GPT spec, from a fixed seed."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    seed()
    mlp = get_gpt_layer_local_spec(num_experts=E).submodules.mlp
    build = functools.partial(build_module, mlp) if isinstance(mlp, ModuleSpec) else mlp
    moe = build(config=config(dispatcher, **fields))
    moe.set_layer_number(1)
    return moe


def expert_tensors(experts: torch.nn.Module, attribute: str = "data") -> dict[str, torch.Tensor]:
    """linear_fc1 [E, 2F, H] and linear_fc2 [E, H, F], or their `grad`, of any experts module.

    And "linear_fc1 bias" [E, 2F] and "linear_fc2 bias" [E, H], if it has them.
    """
    owners = getattr(experts, "local_experts", [experts])
    one_by_one = owners != [experts] or hasattr(experts.linear_fc1, "weight0")
    tensors = {}
    for name in ("linear_fc1", "linear_fc2"):
        parameters = [
            (key.rstrip("0123456789"), getattr(parameter, attribute))
            for owner in owners
            for key, parameter in getattr(owner, name).named_parameters()
        ]
        for kind, key in (("weight", name), ("bias", f"{name} bias")):
            if values := [value for of, value in parameters if of == kind]:
                tensors[key] = torch.stack(values) if one_by_one else values[0]
    return tensors


def let_biases_train(experts: torch.nn.Module) -> None:
    """Lets SequentialMLP's fc2 return its output as it does with expert parallelism.

    Without expert parallelism Megatron, 0.16 to 0.19, adds fc2's bias into a view, in place, which
    autograd refuses.
    """
    for expert in getattr(experts, "local_experts", ()):
        expert.linear_fc2.explicit_expert_comm = True


def draw_biases(moe: torch.nn.Module) -> torch.nn.Module:
    """Gives a layer's router and experts biases that are not zero, the same for any experts."""
    let_biases_train(moe.experts)
    generator = torch.Generator().manual_seed(99)
    owners = getattr(moe.experts, "local_experts", [moe.experts])
    with torch.no_grad():
        moe.router.bias.copy_(torch.randn(E, generator=generator) / 10)
        for name, bias in list(expert_tensors(moe.experts).items()):
            if name.endswith("bias"):
                values = torch.randn(bias.shape, generator=generator) / 10
                values = values.unbind() if len(owners) > 1 else [values]
                for owner, value in zip(owners, values, strict=True):
                    getattr(owner, name.removesuffix(" bias")).bias.copy_(value)
    return moe


def forward_backward(
    moe: torch.nn.Module, hidden_states: torch.Tensor, grad_output: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The layer's output and every gradient. hidden_states and grad_output are [S, B, H]."""
    leaf = hidden_states.clone().requires_grad_()
    output, bias = moe(leaf)
    assert bias is None
    torch.autograd.backward(output, grad_output)
    results = {"output": output.detach(), "hidden_states": leaf.grad}
    results["router"] = moe.router.weight.grad
    for name, grad in expert_tensors(moe.experts, "grad").items():
        results.update({f"{name}[{e}]": grad[e] for e in range(grad.shape[0])})
    return results
