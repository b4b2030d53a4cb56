"""Every recipe that comes with the package: its network has the stated size, takes a step and samples an image."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from scalelong.config import Config, RecipeError, load_recipe, parse_recipe, recipe_names, summarise, to_yaml
from scalelong.config.build import prepared_place
from scalelong.data.prepare import Job, prepare
from scalelong.models.presets import find_preset
from scalelong.runs import Run
from scalelong.sampling import SampleRequest, sample_run
from scalelong.training import train

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))

from prepare_cases import TEXT_WIDTH, save_all

PARAMETERS = {
    "celeba64-unet": 78_700_803,
    "celeba64-uvit-s4": 44_292_228,
    "cifar10-unet": 35_746_307,
    "cifar10-uvit-s2": 44_255_328,
    "coco-unet": 52_968_964,
    "coco-uvit-s2": 44_692_644,
    "coco-uvit-s2-deep": 58_345_636,
    "imagenet64-unet": 144_395_363,
    "imagenet64-uvit-l4": 286_827_652,
    "imagenet64-uvit-m4": 130_940_292,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_recipe_of_the_paper_has_exactly_its_number_of_parameters(name: str) -> None:
    assert summarise(load_recipe(name)).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name not in ("coco-unet", "imagenet64-unet")])
def test_the_networks_of_recipe_and_preset_have_the_same_tensors(name: str) -> None:
    from scalelong.config.build import build_network

    with torch.device("meta"):
        ours, preset = build_network(load_recipe(name)).state_dict(), find_preset(name).builder().state_dict()
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in preset.items()}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_all(tmp_path_factory.mktemp("material"))


def shrink(name: str, material: Path) -> list[str]:
    """Overrides that keep what a recipe is about and make it tiny."""
    config = load_recipe(name)
    sets = ["training.steps=1", "training.batch_size=4", "training.sample_every=null", "sampling.steps=2"]
    if config.data.source != "sklearn:digits":
        sets += [f"data.source={material / 'pictures.parquet'}", "data.image_column=image", "data.train_split=train"]
        sets += ["data.validation_split=null", "data.validation_count=6", "data.fit=crop", "data.box=null"]
    if config.text is not None:
        sets += [f"text.encoder={material / 'bert'}", "text.max_length=8", f"text.width={TEXT_WIDTH}"]
        sets += ["data.caption_column=captions"]
    if config.model.kind == "uvit":
        sets += ["model.embed_dim=32", "model.num_heads=2", "model.depth=2"]
    else:
        widths = [8] * len(config.model.block_out_channels)
        sets += [f"model.block_out_channels={widths}", "model.depth=1", "model.norm_num_groups=4"]
        sets += ["model.attention_head_dim=8"]
    return sets + shrink_latents(config, material)


def shrink_latents(config: Config, material: Path) -> list[str]:
    """Two channels of 8×8 from 16×16 pixels."""
    if config.latents is None:
        return []
    sets = [f"latents.autoencoder={material / 'autoencoder'}", "latents.channels=2", "latents.factor=2"]
    if config.model.kind == "uvit":
        return [*sets, "data.image_size=16", "model.img_size=8", "model.in_chans=2"]
    return [*sets, "data.image_size=16", "model.sample_size=8", "model.in_channels=2", "model.attention=[4, 2]"]


@pytest.mark.filterwarnings("ignore::scalelong.AbsorbedScalingWarning")
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_takes_a_step_and_samples_guided_images(
    name: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_recipe(name, shrink(name, material))
    if config.text is not None or config.latents is not None:
        classes = None if config.labels is None else config.labels.classes
        prepare(Job(config.data, config.text, config.latents, prepared_place(config), classes))
    train(config, "run")
    first, last = (Run(Path("run")).checkpoints().load(Path(f"run/checkpoints/step-{step:06d}")) for step in (0, 1))
    before, after = first.tensors("model"), last.tensors("model")
    moved = [key for key, value in after.items() if not torch.equal(value, before[key])]
    trained = [key for key in after if not key.startswith("skip_scaling.")]
    # Attention does not see a constant added to all keys, nor queries and keys where there is a single position.
    # What lies before a layer that starts at zero has no gradient yet.
    before_zero = ("self_conditioning.norm.", "self_conditioning.hidden.")
    still = [key for key in trained if key not in moved and not key.startswith(before_zero)]
    assert all(key.endswith("to_k.bias") or ("mid_block" in key and "attn1.to_" in key) for key in still)

    wish = SampleRequest(prompt="the red dog runs") if config.text is not None else SampleRequest()
    folder = sample_run("run", 2, guidance=2.0 if config.can_guide else None, request=wish)
    assert sorted(path.name for path in folder.iterdir()) == ["000000.png", "000001.png", "grid.png"]


def test_without_its_warm_up_the_average_keeps_its_decay_from_the_first_step(tmp_path: Path) -> None:
    tiny = ["model.embed_dim=16", "model.depth=2", "model.num_heads=2", "training.steps=1", "training.batch_size=4"]
    quiet = ["training.sample_every=null", "training.validate_every=null", "optim.ema_decay=0.75"]
    moved = {}
    for warmup in (True, False):
        folder = tmp_path / str(warmup)
        train(load_recipe("digits", [*tiny, *quiet, f"optim.ema_warmup={str(warmup).lower()}"]), folder)
        saved = Run(folder).checkpoints()
        first, last = (saved.load(folder / "checkpoints" / f"step-{step:06d}") for step in (0, 1))
        before, after, average = first.tensors("model"), last.tensors("model"), last.tensors("ema")
        name = "pos_embed"
        moved[warmup] = ((average[name] - before[name]).norm() / (after[name] - before[name]).norm()).item()
    # Update 0 decays by (1 + 0)/(10 + 0), or by 0.75.
    assert moved == pytest.approx({True: 0.9, False: 0.25}, rel=1e-3)


def test_a_section_that_a_resolved_recipe_leaves_out_can_be_filled_by_overrides() -> None:
    resolved = to_yaml(load_recipe("digits"))
    assert "labels: null" in resolved
    config = parse_recipe(resolved, ["labels.classes=10", "data.label_column=label"])
    assert config.labels is not None and config.labels.classes == 10
    with pytest.raises(RecipeError, match=r"override 'labels.clases=10': labels.clases: unknown key"):
        parse_recipe(resolved, ["labels.clases=10"])
