"""What a scaled model goes through besides training: averages, files, adapters, other devices, and its end."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from families.small import images, uvit
from scalelong import METHODS, scale_blocks, scale_skips, unscale_skips
from scalelong.models import UViT
from scalelong.skips.methods import ConstantScaling, text_of

METHOD_NAMES = [name for name in METHODS if name != "none"]
CONSTANT_METHODS = [name for name, kind in METHODS.items() if kind is not None and issubclass(kind, ConstantScaling)]


@pytest.mark.parametrize("method", ["ls", "learnable"])
def test_a_scaling_that_peft_is_told_to_save_is_trained(method: str) -> None:
    from peft import LoraConfig, get_peft_model

    model, inputs = scale_skips(uvit(), method, init=0.5), images()
    plain = unscale_skips(copy.deepcopy(model))(*inputs)
    adapted = get_peft_model(model, LoraConfig(target_modules=["qkv"], modules_to_save=["skip_scaling"]))
    trained = {name: p for name, p in adapted.named_parameters() if "skip_scaling" in name and p.requires_grad}
    optimiser = torch.optim.SGD(trained.values(), lr=0.1)
    adapted(*inputs).square().mean().backward()
    assert trained and all(parameter.grad is not None for parameter in trained.values())
    optimiser.step()
    after = adapted(*inputs)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(*inputs), after)
    assert torch.equal(unscale_skips(merged)(*inputs), plain)


def test_a_scaled_model_is_freed_as_soon_as_it_is_no_longer_used() -> None:
    model = scale_skips(uvit(), "cs")
    freed = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert freed() is None
    finally:
        gc.enable()


# Hooks are numbered anew in every process; these get the numbers that the model's own ones had, if they are free.
LOAD_AND_HOOK = """
import sys, torch
from torch.utils.hooks import RemovableHandle

model, inputs, expected = torch.load(sys.argv[1], weights_only=False)
tables = [(block._forward_pre_hooks, block.register_forward_pre_hook) for block in model.out_blocks]
tables += [(block.mlp._forward_hooks, block.mlp.register_forward_hook) for block in model.out_blocks]
for number, register in sorted(((max(hooks), register) for hooks, register in tables), key=lambda pair: pair[0]):
    while RemovableHandle.next_id < number:
        torch.nn.Identity().register_forward_hook(print)
    register(lambda *_: None)
assert torch.equal(model(*inputs), expected)
"""


def test_a_saved_model_keeps_its_scaling_whatever_hooks_another_process_adds(tmp_path: Path) -> None:
    model, inputs = scale_blocks(scale_skips(uvit(), "uniform", value=0.5), "stable", tau=0.1), images()
    torch.save((model, inputs, model(*inputs)), tmp_path / "model.pt")
    done = subprocess.run([sys.executable, "-c", LOAD_AND_HOOK, str(tmp_path / "model.pt")])
    assert done.returncode == 0


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_scaled_model_runs_on_the_meta_device(method: str) -> None:
    with torch.device("meta"):
        model = scale_skips(uvit(), method)
    # Moved there: transformers replaces torch.linspace for a while, and a device context may remember that for good.
    x, t = (value.to("meta") for value in images())
    assert model(x, t).shape == x.shape


AVERAGES = [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"avg_fn": get_ema_avg_fn(0.9)}]


@pytest.mark.parametrize("options", AVERAGES, ids=["swa", "ema, all at once", "ema, one by one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_of_weights_and_buffers_remains_a_checkpoint_of_the_same_scaling(options: Any, dtype: Any) -> None:
    model = scale_skips(uvit().to(dtype), "cs")
    average = AveragedModel(model, use_buffers=True, **options)
    for _ in range(5):
        average.update_parameters(model)
    assert text_of(average.module.skip_scaling.signature) == model.skip_scaling.signed_as
    model.load_state_dict(average.module.state_dict())


def uvit_on_meta(method: str) -> UViT:
    with torch.device("meta"):
        return scale_skips(uvit(), method)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_model_that_was_scaled_on_the_meta_device_loads_a_checkpoint_of_the_same_scaling(method: str) -> None:
    trained, inputs = scale_skips(uvit(), method), images()
    for model in (uvit_on_meta(method), copy.deepcopy(uvit_on_meta(method))):
        model.to_empty(device="cpu").eval().load_state_dict(trained.state_dict())
        assert torch.equal(model(*inputs), trained(*inputs))


@pytest.mark.parametrize("method", CONSTANT_METHODS)
def test_constants_come_back_from_the_meta_device(method: str) -> None:
    expected = scale_skips(uvit(), method).skip_scaling
    for model in (uvit_on_meta(method).half(), scale_skips(uvit(), method).to("meta")):
        found = copy.deepcopy(model).to_empty(device="cpu").skip_scaling
        torch.testing.assert_close(found.coefficients.float(), expected.coefficients, rtol=1e-3, atol=0)
        assert torch.equal(found.signature, expected.signature.to(found.signature))


def test_the_constant_of_stable_blocks_comes_back_from_the_meta_device() -> None:
    with torch.device("meta"):
        model = scale_blocks(uvit(), "stable", tau=0.1)
    assert torch.equal(model.to_empty(device="cpu").block_scaling.factors, torch.full((14,), 0.1))
