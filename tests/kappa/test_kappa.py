"""Laws of the κ advisor: exact bands, what is measured on data, and what is recommended."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from scalelong import find_skips, scale_skips
from scalelong.cli.app import app
from scalelong.config import load_recipe
from scalelong.diffusion import CosineSchedule, DiffusionProcess, LinearSchedule
from scalelong.diffusion.guidance import Condition
from scalelong.kappa.advisor import (
    LOWEST,
    KappaAdvice,
    KappaBand,
    choose,
    kappa_band,
    solve_kappa,
    suggest_kappa,
)
from scalelong.kappa.block_gain import BlockGain
from scalelong.kappa.start import is_here, own_images, recipe_start, repeated, stand_ins
from scalelong.models import UViT
from scalelong.theory import TheoryUNet, measure_inputs
from scalelong.theory.input_norms import cifar10_images
from scalelong.theory.laws import sum_of_squares
from scalelong.theory.verify import verify_inputs

TINY = (
    *("model.embed_dim=16", "model.depth=4", "model.num_heads=2", "data.validation_count=10"),
    *("training.batch_size=8", "training.validate_every=null", "training.sample_every=null"),
)
SETS = [part for override in TINY for part in ("--set", override)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="scalelong")


@pytest.mark.parametrize(
    ("num_skips", "low", "high"), [(6, 0.425, 0.963), (8, 0.425, 0.927), (12, 0.425, 0.904), (16, 0.425, 0.898)]
)
def test_the_bands_for_the_papers_targets_are_exact(num_skips: int, low: float, high: float) -> None:
    band = kappa_band(num_skips, 1.22, 5)
    assert (round(band.low, 3), round(band.high, 3)) == (low, high)


@pytest.mark.parametrize("num_skips", [2, 6, 16])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.99])
def test_the_solved_kappa_has_the_wanted_sum_of_squares(num_skips: int, share: float) -> None:
    total = 1 + share * (num_skips - 1)
    assert sum_of_squares(num_skips, solve_kappa(num_skips, total)) == pytest.approx(total, rel=1e-13)


def test_a_target_that_no_kappa_reaches_gives_the_nearer_end() -> None:
    assert kappa_band(4, 0.9, 7.0) == KappaBand(0.0, 1.0)


@pytest.mark.parametrize("arguments", [(0, 1.2, 5), (4, 5, 1.2), (4, 0, 5)])
def test_a_band_that_cannot_be_meant_is_refused(arguments: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="needs num_skips ≥ 1 and 0 < low ≤ high"):
        kappa_band(*arguments)


def test_the_ratios_of_cifar10_with_the_linear_schedule_are_the_known_ones(shared_data: Path) -> None:
    images = cifar10_images(shared_data / "cifar10")
    norms = measure_inputs(images, LinearSchedule(), generator=seeded())
    assert len(images) == 10_000
    assert norms.share_below(5) == pytest.approx(0.97, rel=0.03)
    assert norms.mean_of_ratios == pytest.approx(1.60, rel=0.03)
    assert norms.ratio_of_means == pytest.approx(1.25, rel=0.03)
    assert norms.lemma == pytest.approx(1.225, rel=0.001)
    (check,) = verify_inputs({"CIFAR-10": norms})
    assert check.passed
    assert check.measured == pytest.approx(0.8163, rel=0.03)


def test_of_black_images_the_ratio_is_one_over_the_noise_that_is_left() -> None:
    """With x_0 = 0, x_t = sqrt(1−ᾱ)·ε: the ratio is 1/(1−ᾱ) for every image."""
    schedule = LinearSchedule()
    norms = measure_inputs(torch.zeros(300, 3, 4, 4), schedule, generator=seeded())
    expected = -1 / torch.expm1(schedule.log_alpha_bar(norms.times).double())
    torch.testing.assert_close(norms.ratios, expected, rtol=1e-4, atol=0)
    assert norms.mean_of_ratios == pytest.approx(expected.mean().item(), rel=1e-4)


@pytest.mark.parametrize("schedule", [LinearSchedule(), CosineSchedule(), LinearSchedule(time="continuous")])
def test_the_ratio_of_means_of_uniform_images_is_lemma_3_2s(schedule: Any) -> None:
    images = torch.rand(2000, 256, generator=seeded()) * 2 - 1
    norms = measure_inputs(images, schedule, generator=seeded(1))
    assert norms.ratio_of_means == pytest.approx(norms.lemma, rel=0.01)


@pytest.mark.parametrize("prediction", ["epsilon", "x0", "v"])
def test_the_target_is_what_the_network_predicts(prediction: Any) -> None:
    images = torch.rand(2000, 256, generator=seeded()) * 2 - 1
    norms = measure_inputs(images, LinearSchedule(), prediction=prediction, generator=seeded(1))
    assert norms.ratio_of_means == pytest.approx(norms.lemma, rel=0.02)


def test_images_that_are_no_floats_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs images as floats.*in \[-1, 1\], got \(2, 3\) of torch.uint8"):
        measure_inputs(torch.zeros(2, 3, dtype=torch.uint8), LinearSchedule(), generator=seeded())


def unet_of_gain(gain: float, num_skips: int = 6) -> TheoryUNet:
    model = TheoryUNet(16, num_skips, block_depth=1, generator=seeded())
    for pair in zip(model.encoders, model.decoders, strict=True):
        for block in pair:
            nn.init.orthogonal_(next(block.parameters()), gain=math.sqrt(gain), generator=seeded())
    return model


def uniform_images(count: int = 2000) -> Tensor:
    return torch.rand(count, 16, generator=seeded()) * 2 - 1


def advice_for(model: TheoryUNet, **options: Any) -> KappaAdvice:
    return suggest_kappa(model, uniform_images(), LinearSchedule(), predict=lambda x, t: model(x), **options)


def test_a_gain_of_1_leaves_kappa_in_the_middle_of_the_band_of_the_measured_ratios() -> None:
    advice = advice_for(unet_of_gain(1.0))
    assert advice.band == kappa_band(6, advice.norms.ratio_of_means, advice.norms.ratios.quantile(0.97).item())
    assert advice.kappa == round((advice.band.low + advice.band.high) / 2, 2)
    assert (advice.where, advice.surviving, advice.num_skips) == ("input", 1.0, 6)


def test_a_larger_gain_lowers_kappa_to_keep_kappa_times_the_gain_at_1() -> None:
    advice = advice_for(unet_of_gain(1.7))
    assert advice.gain.gain == pytest.approx(1.7, rel=0.02)
    assert advice.kappa == pytest.approx(1 / 1.7, abs=0.01)
    assert any("1/M_0 = 0.588" in reason for reason in advice.reasons)


def test_a_gain_that_asks_for_less_than_the_band_gives_its_lower_end() -> None:
    advice = advice_for(unet_of_gain(9.0))
    assert advice.band.low <= advice.kappa < advice.band.low + 0.01
    assert any("which the band does not reach" in reason for reason in advice.reasons)


def test_targets_below_1_set_no_lower_end_and_kappa_stays_above_the_papers_lowest() -> None:
    advice = advice_for(unet_of_gain(1.0), prediction="x0")
    assert advice.low < 1 and advice.band.low == 0
    assert advice.kappa == max(LOWEST, round(advice.band.high, 2))
    assert any("set no lower end" in reason for reason in advice.reasons)


def test_a_single_skip_keeps_its_coefficient() -> None:
    advice = advice_for(unet_of_gain(1.0, num_skips=1))
    assert advice.kappa == 1
    assert any("one skip" in reason for reason in advice.reasons)


def test_data_may_come_in_batches_and_the_model_is_left_as_it_was() -> None:
    model = scale_skips(UViT(img_size=8, patch_size=4, in_chans=1, embed_dim=32, depth=4, num_heads=2), "cs", kappa=0.5)
    images = torch.rand(12, 1, 8, 8, generator=seeded()) * 2 - 1
    before = {name: value.clone() for name, value in model.state_dict().items()}
    whole = suggest_kappa(model, images, LinearSchedule())
    assert suggest_kappa(model, images.split(4), LinearSchedule()).summary() == whole.summary()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and len(find_skips(model)) == whole.num_skips == 2


def test_where_norms_absorb_constants_it_says_so_and_recommends_after_norm_or_ls() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        add_attention=False,
    )
    advice = suggest_kappa(model, torch.rand(40, 3, 8, 8, generator=seeded()) * 2 - 1, LinearSchedule())
    assert advice.where == "after-norm" and advice.surviving < 0.5
    assert "scaling.where=after-norm" in advice.reasons[-1] and "LS" in advice.reasons[-1]


def test_the_summary_is_complete_and_survives_a_file() -> None:
    advice = advice_for(unet_of_gain(1.7))
    summary = advice.summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert (summary["kappa"], summary["where"], summary["num_skips"]) == (advice.kappa, "input", 6)
    assert summary["band"] == [advice.band.low, advice.band.high] and summary["reasons"] == list(advice.reasons)
    assert (summary["block_gain"], summary["path_gains"]) == (advice.gain.gain, advice.gain.path_gains)


def test_the_command_prints_the_value_the_band_the_reasons_and_what_to_run() -> None:
    result = run("kappa", "digits", *SETS, "--set", "diffusion.prediction=epsilon")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"digits: κ = [\d.]+ \(band [\d.]+ to [\d.]+\)", lines[0])
    assert lines[1].startswith("- ‖ε‖²/‖x_t‖² over 10,000 noised images: ratio of means")
    own = " ".join([*SETS, "--set", "diffusion.prediction=epsilon"])
    found = re.fullmatch(r"to use it: scalelong train digits (.*) --set scaling.method=cs .*kappa=[\d.]+", lines[-2])
    assert found is not None and found[1] == own
    assert lines[-1].startswith("to compare values of κ: scalelong compare digits --methods none,cs:kappa=")
    assert lines[-1].endswith(own)


def test_the_command_gives_json_and_draws_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "kappa.png"
    options = ("--json", "--figure", figure)
    result = run("kappa", "digits", *SETS, *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["num_skips"] == 2 and len(found["path_gains"]) == 2
    assert found["band"][0] <= found["band"][1]
    assert figure.stat().st_size > 10_000


def test_a_figure_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("kappa", "digits", *SETS, "--figure", tmp_path / "kappa.png")
    assert result.exit_code == 2
    assert result.stderr == 'error: this command needs matplotlib: pip install "scalelong[report]"\n'


def test_the_process_that_is_measured_is_the_one_that_trains() -> None:
    """Times as the trainer draws them, all of the schedule: their mean ᾱ is that of Lemma 3.2."""
    schedule = LinearSchedule()
    norms = measure_inputs(torch.zeros(5000, 2), schedule, generator=seeded())
    process = DiffusionProcess(schedule)
    assert norms.times.min() >= 0 and norms.times.max() < schedule.num_steps
    assert round(norms.mean_alpha_bar, 4) == 0.2755
    mean = process.schedule.log_alpha_bar(norms.times).exp().mean().item()
    assert mean == pytest.approx(norms.mean_alpha_bar, rel=0.01)


class OnGPU(Tensor):
    """Stands for images on a GPU: they do not mix with floats of the CPU until `.cpu()` brings them there."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cpu:
            return args[0].as_subclass(Tensor)
        if any(type(one) is Tensor and one.is_floating_point() for one in args):
            raise RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_images_on_a_gpu_are_measured_as_those_on_the_cpu() -> None:
    model, images = unet_of_gain(1.7), uniform_images(20)
    there = suggest_kappa(model, images.as_subclass(OnGPU), LinearSchedule(), predict=lambda x, t: model(x))
    here = suggest_kappa(model, images, LinearSchedule(), predict=lambda x, t: model(x))
    assert there.summary() == here.summary()


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_conditional_recipe_is_measured_with_its_images_labels_whatever_the_batch_size(batch_size: int) -> None:
    labelled = ("labels.classes=10", "data.label_column=label")
    _, images, predict, _ = recipe_start(
        load_recipe("digits", [*TINY, f"training.batch_size={batch_size}", *labelled]), most=6
    )
    assert predict(images[:2].repeat(3, 1, 1, 1), torch.zeros(6)).shape == (6, 1, 8, 8)
    labels = Condition(labels=torch.tensor([5])).followed_by(Condition(labels=torch.tensor([7])))
    assert repeated(labels, 5).labels.tolist() == [5, 7, 5, 7, 5]  # type: ignore[union-attr]


def test_the_band_is_told_before_the_block_gain_is_measured() -> None:
    told: list[str] = []
    advice = advice_for(
        unet_of_gain(1.0), show_band=told.append, progress=lambda done, most: told.append(f"step {done}")
    )
    assert told[0] in advice.reasons and told[0].startswith("The output matches the target's size")
    assert told[1] == "step 0"


def test_a_network_too_large_for_the_time_keeps_its_band_and_says_that_no_gain_was_measured() -> None:
    advice = advice_for(unet_of_gain(9.0), seconds=0.0)
    assert advice.gain.path_gains == [] and advice.summary()["block_gain"] is None
    assert advice.kappa == round((advice.band.low + advice.band.high) / 2, 2)
    assert any(reason.startswith("The block gain was not measured: one step") for reason in advice.reasons)


def test_a_kappa_lies_in_the_band_that_is_printed_or_the_reasons_say_why_not() -> None:
    for low, high in ((0.4249, 0.4251), (0.421, 0.429), (0.3, 0.9), (0.0, 0.339)):
        kappa = choose(KappaBand(low, high), BlockGain([1.0, 9.0, 81.0]), 3)
        assert low <= kappa <= high or low == 0.0
    result = run("kappa", "digits", *SETS)
    (first, *_), found = (
        result.stdout.splitlines(),
        re.search(r"κ = ([\d.]+) .*band ([\d.]+) to ([\d.]+)", result.stdout),
    )
    assert found is not None, first
    kappa, low, high = map(float, found.groups())
    assert low <= kappa <= high or f"κ = {kappa} lies above this band" in " ".join(result.stdout.split())


@pytest.mark.parametrize("recipe", ["cifar10-unet", "coco-uvit-s2", "imagenet64-uvit-m4"])
def test_data_that_is_not_here_is_replaced_by_stand_ins_of_its_shape_and_said_so(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    config = load_recipe(recipe)
    missing = stand_ins(config, "not here") if not is_here(config) else own_images(config, 4)
    images, condition, said = missing
    assert images.shape[1:] == config.sample_shape and images.isfinite().all()
    assert (condition.labels is not None) == (config.labels is not None)
    assert (condition.text is not None) == (config.text is not None)
    assert said.startswith("The recipe's data is not ")
