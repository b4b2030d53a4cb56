"""Numbers are brought to the CPU before they become float64, which some devices (MPS) do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scalelong import find_skips
from scalelong.config import build_model, load_recipe
from scalelong.kappa.block_gain import measure_gain
from scalelong.theory import TheoryUNet
from scalelong.training.loss import open_validation


class WithoutFloat64(TorchFunctionMode):
    """Stands for a device without float64: whatever `.cpu()` did not bring cannot be cast to it."""

    def __init__(self) -> None:
        super().__init__()
        self.brought: list[Tensor] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.double and not any(args[0] is one for one in self.brought):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        found = func(*args, **(kwargs or {}))
        if func is Tensor.cpu:
            self.brought.append(found)
        return found


def test_the_block_gain_is_measured_on_a_device_without_float64() -> None:
    model = TheoryUNet(16, 3, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    with WithoutFloat64():
        assert len(measure_gain(model, model, x, find_skips(model)).path_gains) == 3


def test_validation_losses_are_measured_on_a_device_without_float64() -> None:
    config = load_recipe(
        "digits", ["model.embed_dim=16", "model.depth=4", "model.num_heads=2", "data.validation_count=4"]
    )
    validation, model = open_validation(config), build_model(config)
    with WithoutFloat64():
        assert validation.losses(model, torch.arange(4)).isfinite().all()
