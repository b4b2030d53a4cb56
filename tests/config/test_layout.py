"""Where networks lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scalelong.config.build import has_channels_last, lay_out
from scalelong.config.schema import TrainingConfig


def config(channels_last: bool | str = "auto") -> TrainingConfig:
    return TrainingConfig.model_validate({"steps": 1, "batch_size": 1, "channels_last": channels_last})


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [("auto", "cpu", False), ("auto", "cuda", True), (True, "cpu", True), (False, "cuda", False)],
)
def test_channels_are_last_on_gpus_unless_the_recipe_says_otherwise(
    setting: bool | str, device: str, expected: bool
) -> None:
    assert has_channels_last(config(setting), torch.device(device)) is expected


@pytest.mark.parametrize("channels_last", [True, False])
def test_kernels_have_the_layout_of_the_recipe(channels_last: bool) -> None:
    network = nn.Sequential(nn.Conv2d(4, 8, 3))
    assert lay_out(network, config(channels_last), "cpu") is network
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last) is channels_last


def test_a_network_is_brought_to_the_device() -> None:
    network = lay_out(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Linear(3, 3)), config(), "meta")
    assert all(parameter.is_meta for parameter in network.parameters())
