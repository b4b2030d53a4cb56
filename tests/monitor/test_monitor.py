"""A run does not notice that it is monitored, and its readings go to files and checkpoints."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from monitor_cases import loss_of, read_one_step, scaled, skips_of, train_step, uvit
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from scalelong import AbsorbedScalingWarning
from scalelong.monitor import SkipMonitor, oscillation_index

pytestmark = pytest.mark.filterwarnings(f"ignore::{AbsorbedScalingWarning.__module__}.AbsorbedScalingWarning")


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
