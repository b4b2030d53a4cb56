"""Linear probes: they find where the class is, choose on images of their own, and keep what they computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run as command
from run_cases import UNET, run_tiny, tiny
from torch import Tensor, nn

from scalelong import condition_on_self, save_pretrained
from scalelong.config import build_model, load_recipe
from scalelong.data import ImageSet
from scalelong.diffusion import DiffusionProcess
from scalelong.diffusion.guidance import Conditioning
from scalelong.evaluation.probe import (
    Images,
    ProbePlan,
    Subject,
    accuracy,
    labelled,
    probe,
    probe_recipe,
    probe_run,
    ridge,
)

PLAN = ProbePlan(images=600, held_out=200, times=(0.0, 0.5))
LABELS = "data.label_column=label"


class Planted(nn.Module):
    """Its second block alone tells bright images from dark ones, where noise has not drowned them; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(1, 2, 1) for _ in range(3))
        self.calls = 0
        for number, block in enumerate(self.blocks):
            nn.init.zeros_(block.bias)
            nn.init.constant_(block.weight, 1.0 if number == 1 else 0.0)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        return torch.stack([block(x)[:, :1] for block in self.blocks]).sum(dim=0)


def shades(count: int) -> ImageSet:
    labels = torch.arange(count) % 2
    images = (labels * 30 + 110).view(-1, 1, 1, 1).expand(count, 1, 4, 4).to(torch.uint8)
    return ImageSet(images.contiguous(), labels)


def subject(network: nn.Module) -> Subject:
    return Subject(network.eval(), DiffusionProcess(), Conditioning(None), {"network": "planted"})


def test_the_cell_that_knows_the_class_is_found_and_confirmed_on_held_out_images(tmp_path: Path) -> None:
    plan = ProbePlan(images=400, held_out=120, times=(0.0, 0.9))
    found = probe(subject(Planted()), Images.of(shades(400), shades(120), plan), plan, {}, tmp_path)
    assert (found.block, found.time, found.blocks) == ("blocks.1", 0.0, ["blocks.0", "blocks.1", "blocks.2"])
    assert (found.correct, found.held_out, found.accuracy) == (120, 120, 1.0)
    assert found.chance == 0.5
    blind, knowing, _ = found.accuracies
    assert knowing[0] == 1.0 and max(blind) < 0.7 and knowing[1] < 0.8


def test_ridge_regression_is_that_of_its_equation() -> None:
    x, labels, others = torch.randn(50, 4).double(), torch.arange(50) % 3, torch.randn(7, 4).double()
    mean, std = x.mean(dim=0), x.std(dim=0)
    z, y = (x - mean) / std, nn.functional.one_hot(labels).double()
    weights = torch.linalg.solve(z.T @ z / 50 + 0.1 * torch.eye(4), z.T @ (y - y.mean(dim=0)) / 50)
    expected = (others - mean) / std @ weights + y.mean(dim=0)
    torch.testing.assert_close(ridge(x, labels, others, (0.1,))[0.1], expected)
    # A feature that is the same for all images says nothing, and breaks nothing.
    flat = torch.cat([x, torch.ones(50, 1)], dim=1), labels, torch.cat([others, torch.ones(7, 1)], dim=1)
    torch.testing.assert_close(ridge(*flat, (0.1,))[0.1], expected)
    assert accuracy(torch.eye(3), torch.tensor([0, 1, 0])) == pytest.approx(2 / 3)


def test_what_was_computed_before_a_kill_is_not_computed_again(tmp_path: Path) -> None:
    plan, network = ProbePlan(images=600, held_out=100, times=(0.0, 0.3)), Planted()
    images = Images.of(shades(600), shades(100), plan)

    def stop(what: str, done: float, count: int) -> None:
        if what == "images at t = 0.3" and done > 256:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(subject(network), images, plan, {}, tmp_path, stop)
    before = network.calls
    killed = probe(subject(network), images, plan, {}, tmp_path)
    resumed = network.calls - before
    whole = Planted()
    assert probe(subject(whole), images, plan, {}, tmp_path / "anew") == killed
    assert resumed < whole.calls / 2
    before = network.calls
    assert probe(subject(network), images, plan, {}, tmp_path) == killed
    assert network.calls - before == 1  # The widths of the blocks.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probed") / "run"
    run_tiny(folder, "training.steps=60", "data.validation_count=200", LABELS, "model.self_conditioning=true")
    return folder


def test_a_run_is_probed_block_by_block_far_above_chance(trained: Path) -> None:
    found = probe_run(trained, PLAN)
    assert found.blocks == ["in_blocks.0", "mid_block", "out_blocks.0"]
    assert [len(row) for row in found.accuracies] == [2, 2, 2]
    assert found.accuracy > 0.3 > 2 * found.chance
    assert found.accuracies[0][0] > found.accuracies[0][1], "noise hides the class"
    assert found == probe_run(trained, PLAN)
    assert found.fingerprint != probe_run(trained, PLAN, weights="raw").fingerprint
    assert len(list((trained / "probe").iterdir())) == 2


@pytest.mark.parametrize("time", ["discrete", "continuous"])
def test_both_ends_of_the_schedule_can_be_asked_for(time: str, tmp_path: Path) -> None:
    config = labelled(tiny(f"diffusion.time={time}"), "label", PLAN)
    plan = ProbePlan(images=100, held_out=50, times=(0.0, 1.0))
    found = probe_recipe(build_model(config).eval(), config, {}, plan, tmp_path)
    assert torch.tensor(found.accuracies).isfinite().all()


def test_a_network_with_classes_is_asked_without_them(tmp_path: Path) -> None:
    options = (LABELS, "labels.classes=10", "labels.drop=0.1")
    config = tiny(*options)
    network = build_model(config).eval()
    seen: list[Tensor] = []
    network.label_emb.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    probe_recipe(network, labelled(config, None, PLAN), {}, PLAN, tmp_path)
    assert torch.cat(seen).unique().tolist() == [10]
    told = tiny(LABELS, "labels.classes=10")
    with pytest.raises(
        ValueError, match=r"told the labels of each image and never learned to do without \(labels\.drop is 0\)"
    ):
        probe_recipe(network, told, {}, PLAN, tmp_path)


# The command.


def test_the_command_prints_the_table_and_writes_figures(trained: Path, tmp_path: Path) -> None:
    result = command("probe", trained, "--images", 600, "--held-out", 200, "--times", "0.5,0", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "probe.json").read_text())
    assert content["times"] == [0.0, 0.5] and content["blocks"][1] == "mid_block"
    low, high = content["interval"]
    assert low < content["correct"] / content["held_out"] < high
    assert f"best: {content['block']} at t = {content['time']:g}; held out: " in result.stdout
    assert "in_blocks.0" in (tmp_path / "probe.svg").read_text() and (tmp_path / "probe.png").stat().st_size > 1000


@pytest.mark.filterwarnings("ignore::scalelong.AbsorbedScalingWarning")
@pytest.mark.parametrize("guided", [False, True])
def test_a_diffusers_unet_is_probed_by_its_path(guided: bool, tmp_path: Path) -> None:
    sets = [*UNET, "scaling.method=none", "scaling.kappa=null", "data.label_column=label"]
    network = build_model(load_recipe("cifar10-tiny-unet", sets)).eval()
    save_pretrained(condition_on_self(network) if guided else network, tmp_path / "net")
    options = [word for setting in sets for word in ("--set", setting)]
    few = ("--images", 200, "--held-out", 50, "--times", "0.1", "--out", tmp_path / "found")
    result = command("probe", "--model", tmp_path / "net", "--data", "cifar10-tiny-unet", *options, *few)
    assert result.exit_code == 0, result.output
    assert "mid_block" in result.stdout and "up_blocks.0" in result.stdout
    alone = command("probe", "--model", tmp_path / "net", "--data", "sklearn:digits", "--labels", "label", *few)
    assert alone.exit_code == 0, alone.output


def fails(*arguments: Any) -> str:
    result = command("probe", *arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    return result.stderr


def test_bad_input_is_one_line(trained: Path, tmp_path: Path) -> None:
    run_tiny(tmp_path / "plain", "training.steps=1", "data.label_column=null", "labels=null")
    assert "there are no labels to probe for: name their column with --labels" in fails(tmp_path / "plain")
    assert "there is no column 'clas'" in fails(tmp_path / "plain", "--labels", "clas")
    assert "name either a run, or a diffusers UNet and images" in fails()
    assert "name either a run, or a diffusers UNet and images" in fails("--model", tmp_path)
    assert "--times are shares of the schedule between 0 and 1" in fails(trained, "--times", "1,7")
    assert "--set changes the recipe of --data" in fails(trained, "--set", "seed=1")
    assert "is no folder of a diffusers network" in fails("--model", tmp_path, "--data", "digits")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    (tmp_path / "old" / "diffusion_pytorch_model.bin").write_bytes(b"")
    assert "holds no safetensors file; weights in other formats" in fails(
        "--model", tmp_path / "old", "--data", "digits"
    )
