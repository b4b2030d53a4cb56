"""What the monitor reads is what is there."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from monitor_cases import (
    NETWORKS,
    Joins,
    blocks_in,
    loss_of,
    number,
    per_image,
    read_one_step,
    scaled,
    skips_of,
    train_step,
    uvit,
)
from torch import Tensor

from scalelong import AbsorbedScalingWarning, unscale_skips
from scalelong.monitor import SkipMonitor
from scalelong.monitor.readings import Processes, Sums

METHODS = ("none", "cs", "ls")
pytestmark = pytest.mark.filterwarnings(f"ignore::{AbsorbedScalingWarning.__module__}.AbsorbedScalingWarning")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", NETWORKS)
def test_features_gradients_and_shares_of_skips_are_those_at_the_join(kind: str, method: str) -> None:
    model = scaled(kind, method)
    twin = copy.deepcopy(model)
    reading = read_one_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with Joins() as joins:
        loss_of(twin, seed=0).backward()
    assert len(skips_of(reading)) == len(joins.skips) > 1
    for skip in skips_of(reading):
        trunk, joined = joins.of(skip)
        assert reading[f"skip{skip}/feature"] == pytest.approx(per_image(joined), rel=1e-6)
        # A sum in another order: the gradient is laid out differently where it is kept.
        assert reading[f"skip{skip}/gradient"] == pytest.approx(number(joined.grad.norm()), rel=1e-6)
        energy, other = joined.detach().square().sum(), trunk.detach().square().sum()
        assert reading[f"skip{skip}/share"] == pytest.approx(number(energy / (energy + other)), rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", NETWORKS)
def test_coefficients_are_those_of_the_scaling_over_the_batch(kind: str, method: str) -> None:
    model = scaled(kind, method)
    plain = unscale_skips(copy.deepcopy(model))
    scaling = copy.deepcopy(model._modules.get("skip_scaling"))
    reading = read_one_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad(), Joins() as joins:
        loss_of(plain, seed=0)
    assert skips_of(reading)
    for skip in skips_of(reading):
        if scaling is None:
            assert f"skip{skip}/coefficient" not in reading
            continue
        # The encoder does not know of the scaling, so its features are those of the unscaled network.
        values = torch.as_tensor(scaling(skip, joins.of(skip)[1])).detach().flatten()
        expected = {"": number(values.mean()), "_std": number(values.std(correction=0))}
        levels = {"_low": 0.05, "_median": 0.5, "_high": 0.95}
        expected |= {name: number(values.quantile(level)) for name, level in levels.items()}
        assert {name: reading[f"skip{skip}/coefficient{name}"] for name in expected} == expected
        assert (expected["_std"] > 0) == (method == "ls")


@pytest.mark.parametrize("kind", NETWORKS)
def test_features_gradients_and_updates_of_blocks_are_those_of_their_outputs_and_weights(kind: str) -> None:
    model = scaled(kind, "cs")
    twin, features = copy.deepcopy(model), {}
    reading = read_one_step(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    names = blocks_in(reading)
    assert {"mid_block", "skip_scaling"} & set(names) == {"mid_block"}
    for name in names:
        keep = lambda module, args, output, name=name: features.setdefault(name, output)  # noqa: E731
        twin.get_submodule(name).register_forward_hook(keep)
    before = copy.deepcopy(twin)
    train_step(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), seed=0)
    for name in names:
        output = features[name]
        expected = per_image(output[0] if isinstance(output, tuple) else output)
        assert reading[f"block/{name}/feature"] == pytest.approx(expected, rel=1e-6)
        old = torch.cat([p.flatten() for p in before.get_submodule(name).parameters()]).detach()
        new = torch.cat([p.flatten() for p in twin.get_submodule(name).parameters()]).detach()
        gradient = torch.cat([p.grad.flatten() for p in twin.get_submodule(name).parameters()])
        assert reading[f"block/{name}/update"] == pytest.approx(number((new - old).norm() / old.norm()), rel=1e-4)
        assert reading[f"block/{name}/gradient"] == pytest.approx(number(gradient.norm()), rel=1e-5)


def test_under_autocast_norms_are_taken_in_float32_of_the_features_as_they_are() -> None:
    model = scaled("unet", "ls")
    twin = copy.deepcopy(model)
    with SkipMonitor(model, every=1, probe_every=1) as monitor, torch.autocast("cpu", dtype=torch.bfloat16):
        loss_of(model, 0).backward()
        monitor.step()
    with Joins() as joins, torch.autocast("cpu", dtype=torch.bfloat16):
        loss_of(twin, 0).backward()
    (reading,) = monitor.readings()
    assert joins.of(1)[1].dtype == torch.bfloat16
    for skip in skips_of(reading):
        joined = joins.of(skip)[1]
        feature = torch.linalg.vector_norm(joined.detach(), dtype=torch.float32) / math.sqrt(3)
        assert reading[f"skip{skip}/feature"] == pytest.approx(number(feature), rel=1e-6)
        gradient = torch.linalg.vector_norm(joined.grad, dtype=torch.float32)
        assert reading[f"skip{skip}/gradient"] == pytest.approx(number(gradient), rel=1e-6)
    assert skips_of(reading) and math.isfinite(reading["robustness"])
    assert not [name for name in reading if name.endswith("/update")], "there was no update to compare"


@pytest.mark.parametrize("size", [2, 16])
def test_noise_is_how_far_the_norm_moves_from_one_batch_to_another(size: int) -> None:
    """Energies from a known distribution, whose mean and variance are 1: the root of a mean of n has 1/(2·sqrt(n))."""
    energies = torch.empty(4000, size).exponential_(generator=torch.Generator().manual_seed(0))

    def noise_of(energies: Tensor) -> float:
        sums = Sums()
        sums.add_features("block/a/feature", energies)
        return sums.values(["block/a/feature"], Processes())["block/a/feature_noise"].item()

    assert noise_of(energies.flatten()) == pytest.approx(1 / (2 * math.sqrt(energies.numel())), rel=0.05)
    by_hand = [row.std() / row.mean() / (2 * math.sqrt(size)) for row in energies[:50]]
    # 1e-2: the variance is a difference of sums in float32.
    assert [noise_of(row) for row in energies[:50]] == pytest.approx([number(value) for value in by_hand], rel=1e-2)


def test_gradients_under_a_scaler_are_those_of_the_loss() -> None:
    model = scaled("uvit", "none")
    twin = copy.deepcopy(model)
    unscaled = read_one_step(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.SGD(model.parameters(), lr=0.1)
    with SkipMonitor(model, every=1, probe_every=None, scaler=scaler) as monitor:
        scaler.scale(loss_of(model, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step()
    (reading,) = monitor.readings()
    gradients = {name: value for name, value in unscaled.items() if name.endswith("/gradient")}
    assert len(gradients) > 2 and {name: reading[name] for name in gradients} == pytest.approx(gradients, rel=1e-5)


def test_passes_without_gradients_are_not_read() -> None:
    model = scaled("uvit", "none")
    with SkipMonitor(model, every=1, probe_every=None) as monitor:
        loss_of(model, 0).backward()
        monitor.step()
        loss_of(model, 0).backward()
        with torch.no_grad():
            loss_of(model, 1)
        monitor.step()
    first, second = monitor.readings()
    assert skips_of(first) and first | {"step": 2} == second


def test_copies_of_a_monitored_model_are_not_monitored() -> None:
    model = uvit()
    with SkipMonitor(model, every=1, probe_every=None) as monitor:
        copied, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for network in (copied, stored):
            loss_of(network, 0).backward()
        assert monitor.hooks.values() == {}
