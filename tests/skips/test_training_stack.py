"""Scaled models inside the tools that people train with: compile, export, autocast, checkpointing, DDP, FSDP, LoRA."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from process_cases import WORLD, check_all
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from scalelong import METHODS, find_skips, scale_blocks, scale_skips, unscale_skips
from scalelong.models import UViT

METHOD_NAMES = [name for name in METHODS if name != "none"]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
slow = pytest.mark.slow
ignore_absorption = pytest.mark.filterwarnings("ignore::scalelong.AbsorbedScalingWarning")


def uvit(**options: Any) -> UViT:
    return UViT(**{"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 4, "num_heads": 2} | options)


def images(batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 8, 8), torch.linspace(1, 900, batch)


def unet(**options: Any) -> nn.Module:
    from diffusers import UNet2DConditionModel

    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    blocks["up_block_types"] = ("UpBlock2D", "CrossAttnUpBlock2D")
    sizes = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
    return UNet2DConditionModel(cross_attention_dim=8, attention_head_dim=4, **{**blocks, **sizes, **options})


def text_inputs(size: int = 8) -> dict[str, Tensor]:
    return {
        "sample": torch.randn(2, 4, size, size),
        "timestep": torch.tensor([10, 500]),
        "encoder_hidden_states": torch.randn(2, 3, 8),
    }


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@needs_compiler
@pytest.mark.parametrize("method", [name if name == "ls" else pytest.param(name, marks=slow) for name in METHOD_NAMES])
def test_a_scaled_model_compiles_to_one_graph_with_inductor(method: str) -> None:
    model, inputs = scale_skips(uvit(depth=2), method), images()
    compiled = torch.compile(model, fullgraph=True)
    expected, output = model(*inputs), compiled(*inputs)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    gradient = torch.autograd.grad(expected.sum(), model.mid_block.attn.qkv.weight)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), model.mid_block.attn.qkv.weight), gradient)


# Dynamo makes the graph; aot_eager, which takes longer than that, only hands it on through autograd's tracing.
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=slow)])
@pytest.mark.parametrize("method", METHOD_NAMES)
@torch.no_grad()
def test_every_method_traces_to_one_graph(method: str, backend: str) -> None:
    model, inputs = scale_skips(uvit().eval(), method), images()
    assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(*inputs), model(*inputs))


# The skips of a level without attention are handed over in the same way, and are traced in a fraction of the time.
ONE_LEVEL = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (16,)}


@ignore_absorption
@pytest.mark.parametrize("options", [{**ONE_LEVEL, "mid_block_type": None}, pytest.param({}, marks=slow)])
@pytest.mark.parametrize("method, where", [("cs", "input"), ("ls", "input"), ("ls", "after-norm")])
@torch.no_grad()
def test_a_scaled_diffusers_unet_traces_to_one_graph(method: str, where: str, options: dict[str, Any]) -> None:
    model, inputs = scale_skips(unet(**options).eval(), method, where=where), text_inputs()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**inputs).sample, model(**inputs).sample)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_scaled_model_exports(method: str) -> None:
    model, inputs = scale_skips(uvit().eval(), method), images()
    exported = torch.export.export(model, inputs).module()
    torch.testing.assert_close(exported(*inputs), model(*inputs))


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def compile_one_block(model: Any) -> nn.Module:
    model.out_blocks[0] = torch.compile(model.out_blocks[0], backend="eager")
    return model


def test_scaling_a_model_that_was_given_to_torch_compile_raises_until_the_compiled_one_is_gone() -> None:
    model = uvit()
    compiled = torch.compile(model, backend="eager")
    for verb in (scale_skips, lambda model, _: scale_blocks(model, "rezero")):
        with pytest.raises(ValueError, match="already wrapped by torch.compile"):
            verb(model, "cs")
    del compiled
    scale_skips(model, "cs")


@pytest.mark.parametrize(
    "wrap", [lambda model: torch.compile(model, backend="eager"), compile_in_place, compile_one_block]
)
def test_scaling_a_compiled_model_raises(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(ValueError, match="already wrapped by torch.compile.*Scale the plain model first"):
        scale_skips(wrap(uvit()), "cs")


def test_data_parallel_is_refused_before_and_after_scaling_with_what_works_instead() -> None:
    with pytest.raises(ValueError, match="wrapped by DataParallel.*in DistributedDataParallel instead"):
        scale_skips(nn.DataParallel(uvit()), "cs")
    replica = scale_skips(uvit(), "cs").out_blocks[0]._replicate_for_data_parallel()
    with pytest.raises(ValueError, match="wrapped by DataParallel.*in DistributedDataParallel instead"):
        replica(torch.randn(2, 17, 32), torch.randn(2, 17, 32))


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_autocast_to_bfloat16_changes_no_dtype_and_computes_gates_in_float32(method: str) -> None:
    model, (x, t) = scale_skips(uvit().eval(), method), images()
    plain = model(x, t)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = model(x, t)
        skip = torch.randn(2, 17, 32)
        coefficient = model.skip_scaling.coefficient(2, skip)
    torch.testing.assert_close(lowered.float(), plain, rtol=0.1, atol=0.05)
    assert torch.equal(coefficient, model.skip_scaling.coefficient(2, skip))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_scaled_model_runs_in_the_precision_it_is_moved_to(method: str, dtype: torch.dtype) -> None:
    model, (x, t) = scale_skips(uvit().eval(), method).to(dtype), images()
    output = model(x.to(dtype), t)
    assert output.dtype == dtype and output.isfinite().all()


@pytest.mark.parametrize("method", ["cs", "ls", "learned-kappa"])
def test_gradient_checkpointing_gives_the_same_gradients(method: str) -> None:
    model, inputs = scale_skips(uvit(), method), images()
    twin = copy.deepcopy(model)
    twin.use_checkpoint = True
    for network in (model, twin):
        network(*inputs).square().mean().backward()
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


@ignore_absorption
@pytest.mark.parametrize("where", ["input", "after-norm"])
def test_gradient_checkpointing_of_diffusers_gives_the_same_gradients(where: str) -> None:
    model, inputs = scale_skips(unet(), "cs", where=where).train(), text_inputs()
    twin = copy.deepcopy(model)
    twin.enable_gradient_checkpointing()
    for network in (model, twin):
        network(**inputs).sample.square().mean().backward()
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


@ignore_absorption
def test_controlnet_residuals_are_scaled_together_with_the_skip_they_are_added_to() -> None:
    model, inputs = unet().eval(), text_inputs()
    sizes = [(16, 8), (16, 8), (16, 4), (32, 4)]
    residuals = tuple(torch.randn(2, channels, size, size) for channels, size in sizes)
    received: list[Tensor] = []
    last = model.up_blocks[-1]

    def watch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        received.append(kwargs["res_hidden_states_tuple"][0])

    last.register_forward_pre_hook(watch, with_kwargs=True)
    control = {"mid_block_additional_residual": torch.zeros(2, 32, 4, 4)}
    model(**inputs, **control, down_block_additional_residuals=residuals)
    scale_skips(model, "uniform", value=0.5)
    last.register_forward_pre_hook(watch, with_kwargs=True)  # after ours, so that it sees what the block will
    model(**inputs, **control, down_block_additional_residuals=residuals)
    model(**inputs)
    plain, scaled, without = received[0], received[2], received[4]
    assert torch.equal(scaled, plain * 0.5)
    torch.testing.assert_close(scaled - without, residuals[0] * 0.5)


@ignore_absorption
@pytest.mark.parametrize("scaled_first", [True, False])
def test_lora_adapters_train_inside_a_scaled_model_whatever_the_order(scaled_first: bool) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    model, inputs = unet().eval(), text_inputs()
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    if scaled_first:
        adapted = get_peft_model(scale_skips(model, "uniform", value=0.5), config)
    else:
        adapted = scale_skips(get_peft_model(model, config), "uniform", value=0.5)
    torch.manual_seed(1)
    unscaled = get_peft_model(twin, config)
    assert not torch.equal(adapted(**inputs).sample, unscaled(**inputs).sample)
    adapted(**inputs).sample.mean().backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_" in name)
    adapted.merge_adapter()
    unscale_skips(model if scaled_first else adapted)
    unscaled.merge_adapter()
    assert torch.equal(adapted(**inputs).sample, unscaled(**inputs).sample)


def peak_memory(model: nn.Module, inputs: dict[str, Tensor]) -> float:
    """Bytes of tensors alive at the worst moment of a forward and backward pass."""
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        output = model(**inputs)
        (output if isinstance(output, Tensor) else output.sample).square().mean().backward()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@ignore_absorption
@pytest.mark.parametrize("name", ["uvit", "unet"])
def test_constant_scaling_needs_at_most_one_copy_of_the_largest_skip_more_memory(name: str) -> None:
    model = uvit(img_size=32) if name == "uvit" else unet(sample_size=32)
    inputs = {"x": torch.randn(4, 3, 32, 32), "timesteps": torch.rand(4)} if name == "uvit" else text_inputs(32)
    plain = peak_memory(copy.deepcopy(model), inputs)
    scaled = peak_memory(scale_skips(model, "cs"), inputs)
    largest_skip = (4 * 257 * 32 if name == "uvit" else 2 * 16 * 32 * 32) * 4
    assert scaled - plain <= largest_skip


def test_adapters_of_the_gates_are_trained() -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        scale_skips(uvit(), "ls", activation="elu"), LoraConfig(target_modules=["squeeze", "excite"])
    )
    adapted(*images()).square().mean().backward()
    gradients = [p.grad for name, p in adapted.named_parameters() if "lora_B" in name]
    assert len(gradients) == 2 and all(gradient is not None and gradient.any() for gradient in gradients)


def test_a_wrapped_model_is_found_inside_its_wrapper() -> None:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = uvit()

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return self.network(x, t)

    wrapper, inputs = Denoiser().eval(), images()
    assert [site.consumer for site in find_skips(wrapper)] == ["network.out_blocks.1", "network.out_blocks.0"]
    expected = scale_skips(copy.deepcopy(wrapper.network), "cs")(*inputs)
    assert torch.equal(scale_skips(wrapper, "cs")(*inputs), expected)


def test_two_processes_take_the_same_step_as_one_under_ddp_and_fsdp2(tmp_path: Path) -> None:
    mp.spawn(check_all, (str(tmp_path),), nprocs=WORLD)
