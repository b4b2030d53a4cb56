"""The probe of the robustness measures the change of the output, and leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from monitor_cases import NETWORKS, batch, number, read_one_step, scaled
from torch import Tensor, nn

from scalelong import AbsorbedScalingWarning
from scalelong.monitor.hooks import SIZE, Call, disturbance_of, output_change

pytestmark = pytest.mark.filterwarnings(f"ignore::{AbsorbedScalingWarning.__module__}.AbsorbedScalingWarning")


class Tripled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.dropout(x) + 0 * self.norm(x) + torch.rand(1)


def test_the_probe_finds_the_gain_of_a_linear_map_and_leaves_no_trace() -> None:
    network, x = Tripled().train(), torch.randn(4, 3, 8, 8)
    buffers, random = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    network.norm.eval()
    network.forward = lambda x: 3 * network.dropout(x) + 0 * network.norm(x)  # type: ignore[method-assign]
    changes = output_change(network, Call((x,), {}, None))
    assert changes is not None and changes.tolist() == pytest.approx([3.0] * 4, rel=1e-5)
    assert network.training and network.dropout.training and not network.norm.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, buffers[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_the_probe_restores_random_states_and_buffers_that_a_network_changes_in_evaluation_too() -> None:
    network, x = Tripled(), torch.randn(4, 3, 8, 8)
    network.norm.register_forward_pre_hook(lambda module, args: module.num_batches_tracked.add_(1) and None)
    random = torch.get_rng_state()
    assert output_change(network, Call((), {"x": x}, None)) is not None
    assert torch.equal(torch.get_rng_state(), random)
    assert network.norm.num_batches_tracked == 0


@pytest.mark.parametrize("kind", NETWORKS)
def test_robustness_is_the_change_of_the_output_over_that_of_the_input(kind: str) -> None:
    model = scaled(kind, "cs")
    reading = read_one_step(model, torch.optim.SGD(model.parameters(), lr=0.01), probe=1)
    images, times, _ = batch(0)
    disturbance = disturbance_of(images, seed=1)
    assert torch.allclose(disturbance.flatten(1).norm(dim=1), SIZE * images.flatten(1).norm(dim=1))
    model.eval()
    with torch.no_grad():
        outputs = [model(x, times) for x in (images, images + disturbance)]
    calm, moved = (output if isinstance(output, Tensor) else output.sample for output in outputs)
    changes = (moved - calm).flatten(1).norm(dim=1) / disturbance.flatten(1).norm(dim=1)
    assert reading["robustness"] == pytest.approx(number(changes.mean()), rel=1e-6)
    assert reading["robustness_max"] == pytest.approx(number(changes.max()), rel=1e-6)
