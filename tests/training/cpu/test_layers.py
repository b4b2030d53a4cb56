"""Which layers of a network are replaced, and that it stays the network that it was."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from scalelong.models import UViT
from scalelong.training.cpu import take_cpu_layers
from scalelong.training.cpu.attention import AttentionInParts
from scalelong.training.cpu.dropout import QuickDropout
from scalelong.training.cpu.linear import TokenLinear, TokenMLP


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def network() -> UViT:
    found = UViT(8, 2, embed_dim=16, depth=2, num_heads=2)
    found.extra, found.dropout = Doubled(4, 4), nn.Dropout(0.1)
    return found


def test_a_network_keeps_its_names_and_values_and_layers_that_are_something_else() -> None:
    ours = network()
    before = copy.deepcopy(ours.state_dict())
    assert take_cpu_layers(ours, torch.device("cpu")) is ours
    assert ours.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    kinds = [type(module) for module in (ours.extra, ours.dropout, ours.decoder_pred, ours.mid_block.attn)]
    kinds.append(type(ours.mid_block.mlp))
    assert kinds == [Doubled, QuickDropout, TokenLinear, AttentionInParts, TokenMLP]


def test_on_other_devices_layers_stay_as_they_are() -> None:
    ours = network()
    before = [type(module) for module in ours.modules()]
    take_cpu_layers(ours, torch.device("cuda"))
    assert [type(module) for module in ours.modules()] == before
