"""Laws of conditions: what the network is told, what it is not told, and how both are weighed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import assert_same_run, run_tiny, tiny
from torch import Tensor

from scalelong.config import RecipeError, build_model, load_recipe
from scalelong.config.build import build_process, check_width, conditioning_of, spread_labels
from scalelong.data import Batch
from scalelong.diffusion.guidance import MOST_TOGETHER, NOTHING, Condition, Conditioning
from scalelong.sampling import SampleRequest, sample_run
from scalelong.training.loss import DiffusionLoss

BY_CLASS = ("data.label_column=label", "labels.classes=10", "labels.drop=0.25")


def by_class(*overrides: str) -> Any:
    return tiny(*BY_CLASS, *overrides)


def inputs(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.full((count,), 500.0)


@pytest.mark.parametrize("drop", [-0.1, 1.0, 10.0, float("nan")])
def test_a_condition_is_dropped_with_a_probability(drop: float) -> None:
    with pytest.raises(ValueError, match="drop must be a probability below 1"):
        Conditioning(("y", "context"), takes_labels=True, no_label=7, drop=drop)


def test_a_condition_is_dropped_exactly_where_chosen() -> None:
    conditioning = conditioning_of(by_class())
    chosen = torch.tensor([True, False, True])
    assert conditioning.drop_condition(Condition(labels=torch.tensor([3, 4, 5])), chosen).labels.tolist() == [10, 4, 10]
    config = load_recipe("flickr-tiny")
    text, empty = torch.randn(3, 24, 384), torch.randn(24, 384)
    found = conditioning_of(config, empty).drop_condition(Condition(text=text), chosen).text
    assert torch.equal(found, torch.stack([empty, text[1], empty]))


def test_guidance_weighs_the_prediction_with_and_without_the_condition() -> None:
    config = by_class()
    model, conditioning, condition = build_model(config).eval(), conditioning_of(config), Condition(torch.arange(4))
    x, t = inputs(4)
    with torch.no_grad():
        bound = conditioning.predictor(model, condition)(x, t)
        free = conditioning.predictor(model, Condition(torch.full((4,), 10)))(x, t)
        assert not torch.equal(bound, free)
        assert torch.equal(conditioning.guided(model, condition, 1.0)(x, t), bound)
        assert torch.equal(conditioning.guided(model, condition, 0.0)(x, t), free)
        # 1e-5: one batch of eight instead of two of four, times the weight.
        torch.testing.assert_close(
            conditioning.guided(model, condition, 3.0)(x, t), free + 3 * (bound - free), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(("count", "passes"), [(MOST_TOGETHER, 1), (MOST_TOGETHER + 1, 2)])
def test_guidance_takes_one_pass_for_few_images_on_the_cpu_and_two_for_many(count: int, passes: int) -> None:
    conditioning, sizes = Conditioning(("y", "context"), takes_labels=True, no_label=7), []

    def model(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x))
        return x + y.view(-1, 1, 1, 1)

    labels, x = torch.arange(count) % 7, torch.randn(count, 1, 2, 2)
    found = conditioning.guided(model, Condition(labels), 2.0)(x, torch.zeros(count))
    assert sizes == [2 * count // passes] * passes
    torch.testing.assert_close(found, x + (2 * labels - 7).view(-1, 1, 1, 1), rtol=0, atol=1e-5)


def test_without_a_condition_guidance_changes_nothing() -> None:
    config = tiny()
    model, conditioning = build_model(config).eval(), conditioning_of(config)
    with torch.no_grad():
        assert torch.equal(conditioning.guided(model, NOTHING, 5.0)(*inputs(2)), model(*inputs(2)))


def test_conditions_are_dropped_by_seed_and_step_alike_in_any_number_of_processes() -> None:
    config = by_class()
    process, conditioning = build_process(config.diffusion), conditioning_of(config)

    def labels(step: int, own: slice, seed: int = 0) -> Tensor:
        objective = DiffusionLoss(process, conditioning, seed, 400, own)
        batch = Batch(torch.zeros(400, 1, 8, 8)[own], (torch.arange(400) % 10)[own], step=step)
        found = objective.sample_noise(batch).condition.labels
        assert found is not None
        return found

    whole = labels(5, slice(0, 400))
    assert torch.equal(torch.cat([labels(5, slice(0, 200)), labels(5, slice(200, 400))]), whole)
    assert not torch.equal(labels(6, slice(0, 400)), whole)
    assert not torch.equal(labels(5, slice(0, 400), seed=1), whole)
    kept = whole != 10
    assert torch.equal(whole[kept], (torch.arange(400) % 10)[kept])
    # 0.25 of 400, give or take five standard deviations.
    assert abs(int((~kept).sum()) - 100) < 5 * (400 * 0.25 * 0.75) ** 0.5


def test_a_run_by_class_samples_the_class_it_is_asked_for(tmp_path: Path) -> None:
    run_tiny(tmp_path, *BY_CLASS, "training.steps=2", "training.sample_every=2")
    one, other = (
        (sample_run(tmp_path, 2, steps=2, request=SampleRequest(label=label)) / "grid.png").read_bytes()
        for label in (1, 2)
    )
    assert one != other
    with pytest.raises(ValueError, match="classes 0 to 9, not 10"):
        sample_run(tmp_path, 2, request=SampleRequest(label=10))
    with pytest.raises(ValueError, match="knows no text"):
        sample_run(tmp_path, 2, request=SampleRequest(prompt="a dog"))


def test_labels_go_round_the_classes() -> None:
    assert spread_labels(by_class(), 12).labels.tolist() == [*range(10), 0, 1]
    assert spread_labels(tiny(), 12) == NOTHING


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["labels.classes=10"], "labels: needs data.label_column"),
        (["text={encoder: x, width: 8}"], "text: needs data.caption_column"),
        (["sampling.guidance=0.0"], "guidance other than 1 needs labels.drop or text.drop above 0"),
        (
            ["sampling.guidance=0.0", "labels.classes=10", "data.label_column=label"],
            "guidance other than 1 needs labels.drop or text.drop above 0",
        ),
        (["sampling.guidance=2.0"], "guidance other than 1 needs labels.drop or text.drop above 0"),
        (["labels.clases=10", "data.label_column=label"], "did you mean 'labels.classes'"),
        (["sampling.sampler=dimm"], "'ddim'"),
        (["training.parallel=fsdp", "training.compile=true"], "parallel: fsdp works without compile only"),
    ],
)
def test_a_condition_that_cannot_be_used_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("digits", overrides)


def test_labels_beyond_the_classes_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="label"):
        run_tiny(tmp_path / "run", "data.label_column=label", "labels.classes=7")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_run_from_the_image_cache_that_was_stopped_ends_as_one_from_memory_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    run_tiny(tmp_path / "whole", "training.checkpoint_every=2")
    assert not (tmp_path / "cache").exists()
    run_tiny(tmp_path / "parts", "training.checkpoint_every=2", "data.memory_gb=0", "training.steps=5")
    assert (tmp_path / "cache").exists()
    run_tiny(tmp_path / "parts", "training.checkpoint_every=2", "data.memory_gb=0")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_text_encoder_of_another_width_than_stated_is_refused() -> None:
    config = load_recipe("flickr-tiny")
    check_width(config, torch.zeros(24, 384))
    with pytest.raises(ValueError, match="text.width: .* gives 16 numbers for a token, not 384"):
        check_width(config, torch.zeros(24, 16))
