"""What the monitor reads is what is there, and a run does not notice that it is watched."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from pathlib import Path

import pytest
import torch
from monitor_cases import NETWORKS, Joins, batch, loss_of, train_step, uvit
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from scalelong import AbsorbedScalingWarning, scale_skips, unscale_skips
from scalelong.monitor import SkipMonitor, oscillation_index
from scalelong.monitor.hooks import Call
from scalelong.monitor.oscillation import swing_index
from scalelong.monitor.processes import Processes
from scalelong.monitor.readings import Sums
from scalelong.monitor.robustness import SIZE, disturbance_of, output_change

METHODS = ("none", "cs", "ls")
pytestmark = pytest.mark.filterwarnings(f"ignore::{AbsorbedScalingWarning.__module__}.AbsorbedScalingWarning")


def scaled(kind: str, method: str, **options: object) -> nn.Module:
    model = NETWORKS[kind](**options).train()
    return scale_skips(model, method)


def read_one_step(model: nn.Module, optimizer: torch.optim.Optimizer, probe: int | None = None) -> dict[str, float]:
    with SkipMonitor(model, every=1, probe_every=probe) as monitor:
        train_step(model, optimizer, seed=0)
        assert monitor.step()
    (reading,) = monitor.readings()
    return reading


def skips_of(reading: dict[str, float]) -> list[int]:
    return [int(name[4:-8]) for name in reading if re.fullmatch(r"skip\d+/feature", name)]


def blocks_in(reading: dict[str, float]) -> list[str]:
    return [name[6:-8] for name in reading if re.fullmatch("block/.*/feature", name)]


def number(tensor: Tensor) -> float:
    return tensor.detach().float().item()


def per_image(features: Tensor) -> float:
    return number(features.detach().norm() / math.sqrt(len(features)))


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


@pytest.mark.parametrize(("kind", "method"), [("uvit", "ls"), ("uvit", "none"), ("unet", "cs"), ("unet", "none")])
def test_a_monitored_run_is_the_same_to_the_bit(kind: str, method: str) -> None:
    options = {"dropout": 0.2} if kind == "unet" else {"use_checkpoint": True}
    model = scaled(kind, method, **options)
    twin = copy.deepcopy(model)
    losses, states = [], []
    for network, watched in ((model, True), (twin, False)):
        torch.manual_seed(7)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        monitor = SkipMonitor(network, every=1, probe_every=2).start() if watched else None
        for seed in range(4):
            losses.append(train_step(network, optimizer, seed))
            if monitor is not None:
                monitor.step()
        if monitor is not None:
            monitor.stop()
        states.append((torch.get_rng_state(), [p.grad for p in network.parameters()], network.state_dict()))
    assert losses[:4] == losses[4:]
    (random, gradients, weights), (other_random, other_gradients, other_weights) = states
    assert torch.equal(random, other_random)
    assert all(map(torch.equal, gradients, other_gradients))
    assert all(torch.equal(value, other_weights[name]) for name, value in weights.items())


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


def test_a_wrapped_network_is_read_through_its_wrapper() -> None:
    model = scaled("uvit", "cs")
    twin = copy.deepcopy(model)
    reading = read_one_step(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        read = read_one_step(wrapped, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        torch.distributed.destroy_process_group()
    assert skips_of(read) and read == reading


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


def test_steps_between_readings_carry_no_hooks_and_none_are_left_behind() -> None:
    def hooks(model: nn.Module) -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    model = uvit()
    optimizer, counts = torch.optim.SGD(model.parameters(), lr=0.1), []
    with SkipMonitor(model, every=3, probe_every=None) as monitor:
        for seed in range(7):
            counts.append(hooks(model) > 0)
            train_step(model, optimizer, seed)
            assert monitor.step() == counts[-1]
    assert counts == [False, False, True, False, False, True, False]
    assert [reading["step"] for reading in monitor.readings()] == [3, 6]
    assert hooks(model) == 0
    assert not _global_optimizer_pre_hooks and not _global_optimizer_post_hooks
    with pytest.raises(RuntimeError, match="not watching: use `with SkipMonitor"):
        monitor.step()


def test_copies_of_a_monitored_model_are_not_monitored() -> None:
    model = uvit()
    with SkipMonitor(model, every=1, probe_every=None) as monitor:
        copied, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for network in (copied, stored):
            loss_of(network, 0).backward()
        assert monitor.hooks.values() == {}


class NoReading(TorchDispatchMode):
    """Fails at any number that is brought from the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert "_local_scalar_dense" not in str(func), "a number was brought from the device"
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_until_numbers_are_asked_for() -> None:
    model = scaled("uvit", "ls")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SkipMonitor(model, every=1, probe_every=2) as monitor, NoReading():
        for seed in range(2):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            optimizer.step()
            monitor.step()
        assert len(monitor.pending) == 2
        with pytest.raises(AssertionError, match="brought from the device"):
            torch.ones(()).item()
    assert len(monitor.readings()) == 2 and not monitor.pending


def test_the_latest_numbers_are_flat_and_the_file_has_one_line_per_reading(tmp_path: Path) -> None:
    model, path = scaled("uvit", "cs"), tmp_path / "readings.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SkipMonitor(model, every=1, probe_every=6, window=6) as monitor:
        assert monitor.latest == {} and monitor.write(path) == 0
        for seed in range(6):
            train_step(model, optimizer, seed)
            monitor.step()
            assert monitor.write(path) == 1
    lines, latest, reading = path.read_text().splitlines(), monitor.latest, monitor.readings()[-1]
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(isinstance(value, float) and not math.isnan(value) for value in latest.values())
    assert latest["skip2/coefficient"] == pytest.approx(0.7)
    assert reading == {"step": 6, **latest} == json.loads(lines[-1])
    series = torch.tensor([[reading["skip1/gradient"]] for reading in monitor.readings()], dtype=torch.float64)
    assert latest["skip1/gradient_oscillation"] == oscillation_index(series).item()
    assert "robustness" not in json.loads(lines[0]) and json.loads(lines[-1])["robustness"] > 0


def test_a_resumed_monitor_reads_on_as_if_it_had_never_stopped() -> None:
    model = scaled("uvit", "ls")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    whole, state = SkipMonitor(model, every=2, probe_every=4, window=4), None
    with whole:
        for seed in range(16):
            if seed == 9:
                state = json.loads(json.dumps(whole.state_dict()))
                saved = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
            train_step(model, optimizer, seed)
            whole.step()
    resumed = SkipMonitor(saved[0], every=2, probe_every=4, window=4)
    optimizer = torch.optim.AdamW(saved[0].parameters(), lr=1e-2)
    optimizer.load_state_dict(saved[1])
    resumed.load_state_dict(state)
    with resumed:
        for seed in range(9, 16):
            train_step(saved[0], optimizer, seed)
            resumed.step()
    assert resumed.readings() == whole.readings()[4:]
    assert resumed.diagnosis() == whole.diagnosis()


def test_windows_of_a_version_that_read_other_numbers_are_begun_anew() -> None:
    model = scaled("uvit", "cs")
    monitor = SkipMonitor(model, every=1)
    monitor.load_state_dict({**monitor.state_dict(), "step": 3, "history": [[1.0, 2.0], [1.0, 3.0]]})
    assert monitor.count == 3 and not monitor.table.rows


def test_a_compiled_model_is_refused_and_one_that_is_not_trained_is_told_of() -> None:
    model = uvit()
    with SkipMonitor(model, every=1) as monitor, pytest.warns(UserWarning, match="saw no training pass through UViT"):
        assert not monitor.step()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="UViT is compiled, and compiled code calls no hooks"):
        SkipMonitor(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"every": 0}, "every must be at least 1"), ({"every": 10, "probe_every": 15}, "must be a multiple of every=10")],
)
def test_intervals_that_make_no_sense_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SkipMonitor(uvit(), **options)


def test_a_model_without_long_skips_is_refused() -> None:
    with pytest.raises(ValueError, match="no long skip connections found in Linear"):
        SkipMonitor(nn.Linear(2, 2))


def test_the_index_is_the_relative_total_variation_and_growth_is_no_swing() -> None:
    noise = torch.rand(20, 5, dtype=torch.float64) + 1
    by_hand = (noise[1:] - noise[:-1]).abs().mean(dim=0) / noise.mean(dim=0)
    assert torch.allclose(oscillation_index(noise), by_hand)
    assert torch.allclose(oscillation_index(8 * noise), oscillation_index(noise))
    growth = noise.cumsum(dim=0)
    assert (oscillation_index(growth) > 0).all() and swing_index(growth).abs().max() < 1e-12
    assert oscillation_index(torch.ones(9, 1)).item() == 0 == swing_index(torch.zeros(9, 1)).item()
    assert oscillation_index(torch.tensor([[1.0], [torch.inf]])).isnan().all()
