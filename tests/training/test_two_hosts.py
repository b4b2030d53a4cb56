"""Two hosts: each with its network namespace, `torchrun --nnodes 2`, and a cable between them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import sets
from run_cases import TINY, losses, run_tiny
from two_hosts import TwoHosts, why_not

from scalelong.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

TRAIN = ["train", "digits", *sets(*TINY)]
LONG = [*TRAIN, *sets("training.steps=5000", "training.checkpoint_every=5000"), "--out", "run"]
SECONDS = 6
"""How long a process is waited for in which nothing happens."""
END = SECONDS + 40
"""In which time the launcher has ended, too, on a machine that does other things."""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as both:
        yield both


def start(hosts: TwoHosts, command: list[str], one: Path, other: Path | None = None, **environment: str) -> None:
    hosts.start([command] * 2, [one, other or one], **environment)


def test_two_hosts_that_share_a_folder_train_as_one_process_and_sample_together(
    tmp_path: Path, hosts: TwoHosts
) -> None:
    start(hosts, [*TRAIN, "--out", "run"], tmp_path)
    assert [hosts.wait(host, 120).code for host in range(2)] == [0, 0]
    run_tiny(tmp_path / "alone")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6, abs=1e-6)
    start(hosts, ["sample", "run", "-n", "6", "--batch", "2"], tmp_path)
    assert [hosts.wait(host, 120).code for host in range(2)] == [0, 0]
    assert "6 images" in hosts.said(0) and "images" not in hosts.said(1)


def test_folders_that_are_not_shared_are_refused_on_both_hosts_and_say_what_is_in_them(
    tmp_path: Path, hosts: TwoHosts
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    run_tiny(one / "run")
    shutil.copytree(one / "run", other / "run")
    shutil.rmtree(other / "run" / "checkpoints" / "step-000008")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    start(hosts, [*TRAIN, *sets("training.steps=12"), "--out", "run"], one, other)
    for host in range(2):
        said = hosts.wait(host, 60).text
        assert "error: " + "process 1: " * host + "the run folder must be shared: process 0 on host-a" in said
        assert "(checkpoint of step 8)" in said and "process 1 on host-b" in said and "(checkpoint of step 6)" in said
        assert "exitcode  : 2" in said
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_new_run_in_folders_that_are_not_shared_leaves_nothing(tmp_path: Path, hosts: TwoHosts) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(), other.mkdir()
    start(hosts, [*TRAIN, "--out", "run"], one, other)
    assert all("the run folder must be shared" in hosts.wait(host, 60).text for host in range(2))
    assert not [*one.iterdir(), *other.iterdir()]


def test_a_cable_that_is_cut_ends_the_training_of_both_hosts(tmp_path: Path, hosts: TwoHosts) -> None:
    start(hosts, LONG, tmp_path, SCALELONG_TIMEOUT=str(SECONDS))
    hosts.wait_for("step 20/", 0)
    hosts.cut()
    ended = hosts.wait(0, END)
    assert ended.code and "error: another process of this run (1 on host-b) was not heard of for 6 s" in ended.text
    # The launcher that has lost the other's store takes its own time; the process under it has ended.
    assert "another process of this run" in hosts.wait_for("error: process 1: ", 1, END)


def test_a_host_without_power_ends_the_training_of_the_other(tmp_path: Path, hosts: TwoHosts) -> None:
    start(hosts, LONG, tmp_path, SCALELONG_TIMEOUT=str(SECONDS))
    hosts.wait_for("step 20/", 0)
    hosts.power_off(1)
    ended = hosts.wait(0, END)
    assert ended.code and "error: another process of this run (1 on host-b) was not heard of for 6 s" in ended.text
    assert (tmp_path / "run" / "checkpoints" / "step-000000").is_dir()


@pytest.mark.parametrize("lost", [0, 1])
def test_sampling_ends_with_what_it_waited_for_when_a_host_is_lost(lost: int, tmp_path: Path, hosts: TwoHosts) -> None:
    run_tiny(tmp_path / "run", "training.steps=1")
    # Each has some seconds of work, in which the other loses its power.
    command = ["sample", "run", "-n", "3", "--batch", "2", "--steps", "1000", "--sampler", "ddpm"]
    start(hosts, command, tmp_path, SCALELONG_TIMEOUT=str(SECONDS))
    hosts.until(lambda: bool(list(Run(tmp_path / "run").samples.glob("*.partial/index.json"))))
    hosts.power_off(lost)
    ended = hosts.wait_for("error: ", 1 - lost, END)
    assert f"another process of this run ({lost} on host-{'ab'[lost]}) was not heard of for 6 s" in ended
    assert f"waited for {'the images' if lost == 0 else 'the parts of the others in'} run/samples/" in ended


def test_a_mistyped_interface_is_named(tmp_path: Path, hosts: TwoHosts) -> None:
    start(hosts, LONG, tmp_path, GLOO_SOCKET_IFNAME="eth7")
    for host in range(2):
        said = hosts.wait(host, 60).text
        assert (
            "could not be connected (GLOO_SOCKET_IFNAME=eth7, " in said and "Unable to find address for: eth7" in said
        )
