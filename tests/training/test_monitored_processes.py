"""What the monitor reads is of the whole batch: with one process, two, shards, or accumulated micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_cases import assert_same_run, in_processes, lasting_metrics

MONITORED = ["training.monitor_every=1", "training.steps=10", "scaling.method=ls"]
SHARDED = [*MONITORED, "training.parallel=fsdp"]
PARTS = [*MONITORED, "training.grad_accumulation=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same recipe by `one` process, by two (`ddp`, `fsdp`), killed on the way (`…-killed`), and in `parts`."""
    folder = tmp_path_factory.mktemp("monitored")
    two = {"ddp": MONITORED, "fsdp": SHARDED}
    whole = [{"out": folder / name, "processes": 2, "overrides": sets, "readings": True} for name, sets in two.items()]
    killed = [
        {"out": folder / f"{name}-killed", "processes": 2, "overrides": sets, "kills": 1, "seed": 2}
        for name, sets in two.items()
    ]
    in_processes(
        {"out": folder / "one", "overrides": MONITORED},
        {"out": folder / "parts", "processes": 2, "overrides": PARTS},
        *whole,
        *killed,
    )
    return folder


def assert_read_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """To 1e-5, because of sums in another order, and what ten steps of Adam make of that."""
    noise = {key for key in expected if key.endswith("feature_noise")}
    for keys, rounding in ((expected.keys() - noise, 1e-7), (noise, 2e-4)):
        # A noise is the root of a difference of sums: where images have the same norm, as after a LayerNorm, it is 0.
        wanted = {key: expected[key] for key in keys}
        assert {key: found[key] for key in keys} == pytest.approx(wanted, rel=1e-5, abs=rounding)


def readings(run: Path) -> list[dict[str, Any]]:
    return [line for line in lasting_metrics(run) if "skip1/feature" in line]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_read_what_one_reads(runs: Path, kind: str) -> None:
    alone, together = readings(runs / "one"), readings(runs / kind)
    assert [line["step"] for line in together] == list(range(1, 11))
    assert "robustness_max" in together[-1] and "skip1/coefficient_low" in together[0]
    for one, two in zip(alone, together, strict=True):
        assert two.keys() == one.keys()
        assert_read_alike(two, one)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_process_reads_the_same_to_the_bit_and_one_writes(runs: Path, kind: str) -> None:
    first, second = ((runs / kind / f"readings-{rank}.json").read_text() for rank in range(2))
    assert first == second
    assert len(readings(runs / kind)) == 10


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_monitored_run_that_was_killed_resumes_with_its_windows(runs: Path, kind: str) -> None:
    assert_same_run(runs / f"{kind}-killed", runs / kind)


def test_accumulated_micro_batches_are_read_as_one_batch(runs: Path) -> None:
    # The probe is of the last part, which is all of the batch that is still there.
    wanted = [{key: value for key, value in line.items() if "robust" not in key} for line in readings(runs / "one")]
    for one, parts in zip(wanted, readings(runs / "parts"), strict=True):
        assert_read_alike(parts, one)
