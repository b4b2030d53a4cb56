"""Laws of export: another library samples the images that we sample, and the card says what it needs for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import run_tiny, train_unet
from safetensors.torch import load_file

from scalelong import save_pretrained, scale_skips, unscale_skips
from scalelong.config.build import build_process
from scalelong.diffusion import noise_predictor, sample
from scalelong.diffusion.guidance import Condition, Conditioning
from scalelong.models import UViT
from scalelong.runs import Run
from scalelong.runs.export import export_run, load_pipeline, push
from scalelong.runs.model import load_network

SEEDS = [3, 4]

pytestmark = pytest.mark.filterwarnings("ignore::scalelong.AbsorbedScalingWarning")


def ours(run: Path) -> torch.Tensor:
    """Images of the run's EMA weights, by all steps of DDPM, in [0, 1]."""
    config, checkpoint = Run(run).config(), Run(run).checkpoints().latest()
    assert checkpoint is not None
    predict = noise_predictor(load_network(config, checkpoint, "ema"))
    images = sample(predict, build_process(config.diffusion), (1, 8, 8), seeds=SEEDS, steps=20, sampler="ddpm")
    return images / 2 + 0.5


def theirs(pipeline: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    found = pipeline(batch_size=2, generator=generators, num_inference_steps=20, output_type="np").images
    return torch.from_numpy(found).permute(0, 3, 1, 2)


@pytest.mark.parametrize("prediction", ["epsilon", "x0", "v"])
def test_a_folded_unet_samples_in_diffusers_what_it_samples_here(prediction: str, tmp_path: Path) -> None:
    from diffusers import DDPMPipeline

    run = train_unet(tmp_path / "run", f"diffusion.prediction={prediction}", "scaling.where=after-norm")
    done = export_run(run, "diffusers", tmp_path / "out")
    assert done.fused
    pipeline = DDPMPipeline.from_pretrained(tmp_path / "out")
    assert not any("skip_scaling" in name for name in pipeline.unet.state_dict())
    # 1e-4: a product in another order at each of 20 steps.
    torch.testing.assert_close(theirs(pipeline), ours(run), rtol=0, atol=1e-4)


@pytest.mark.parametrize("channels_last", [True, False])
def test_a_network_is_sampled_from_in_the_layout_it_was_trained_in(channels_last: bool, tmp_path: Path) -> None:
    run = Run(train_unet(tmp_path / "run", f"training.channels_last={str(channels_last).lower()}"))
    checkpoint = run.checkpoints().latest()
    assert checkpoint is not None
    weights = load_network(run.config(), checkpoint, "ema").state_dict().values()
    kernels = [weight for weight in weights if weight.ndim == 4 and min(weight.shape) > 1]
    assert kernels
    assert all(weight.is_contiguous(memory_format=torch.channels_last) == channels_last for weight in kernels)


NOT_FOLDED = [["scaling.method=ls"], ["scaling.where=input"]]
LABELS = ("data.label_column=label", "labels.classes=10", "labels.drop=0.2")


@pytest.mark.parametrize("scaling", NOT_FOLDED)
def test_the_lines_of_the_card_put_back_a_scaling_that_cannot_be_folded(scaling: list[str], tmp_path: Path) -> None:
    run = train_unet(tmp_path / "run", *scaling)
    done = export_run(run, "diffusers", tmp_path / "out")
    assert not done.fused
    text = (done.folder / "README.md").read_text()
    assert "must be scaled again after loading" in text
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code.group(1).replace("FOLDER", str(done.folder)), names)  # The card's own lines are what is tested.
    torch.testing.assert_close(theirs(names["pipeline"]), ours(run), rtol=0, atol=1e-4)
    # And it matters: without the scaling the images are others.
    plain = unscale_skips(names["pipeline"].unet)
    names["pipeline"].register_modules(unet=plain)
    assert (theirs(names["pipeline"]) - ours(run)).abs().max() > 1e-3


@pytest.mark.parametrize("scaling", NOT_FOLDED)
def test_plain_diffusers_refuses_a_network_whose_scaling_it_does_not_know(scaling: list[str], tmp_path: Path) -> None:
    import diffusers

    done = export_run(train_unet(tmp_path / "run", *scaling), "diffusers", tmp_path / "out")
    for load in (
        lambda: diffusers.DDPMPipeline.from_pretrained(done.folder),
        lambda: diffusers.DiffusionPipeline.from_pretrained(done.folder),
        lambda: diffusers.UNet2DModel.from_pretrained(done.folder, subfolder="unet"),
        lambda: diffusers.UNet2DModel.from_pretrained(done.folder / "unet", low_cpu_mem_usage=False),
        lambda: diffusers.UNet2DModel.from_config(diffusers.UNet2DModel.load_config(done.folder / "unet")),
    ):
        with pytest.raises(Exception, match="scalelong"):
            load()
    # Nor do the weights fit into a network that somebody has built by hand.
    plain = unscale_skips(load_pipeline(done.folder).unet)
    with pytest.raises(RuntimeError, match="skip_scaling"):
        plain.load_state_dict(load_file(done.folder / "unet" / "diffusion_pytorch_model.safetensors"))
    first, _, title = (done.folder / "README.md").read_text().split("---\n")[2].splitlines()[:3]
    assert first.startswith("**diffusers alone cannot load this network, whose long skips are scaled by scalelong")
    assert "load_pipeline" in first and title.startswith("# ")


@pytest.mark.parametrize("scaling", [["scaling.method=ls"], ["scaling.where=after-norm"]])
def test_a_network_with_classes_is_loaded_with_its_scaling_and_its_card_names_them(
    scaling: list[str], tmp_path: Path
) -> None:
    from diffusers import UNet2DModel

    run = train_unet(tmp_path / "run", *LABELS, *scaling)
    done = export_run(run, "diffusers", tmp_path / "out")
    checkpoint = Run(run).checkpoints().latest()
    assert checkpoint is not None
    expected, found = load_network(Run(run).config(), checkpoint, "ema"), load_pipeline(done.folder).unet
    with torch.no_grad():
        inputs = torch.randn(2, 1, 8, 8), torch.tensor([3, 19]), torch.tensor([4, 10])
        torch.testing.assert_close(found(*inputs).sample, expected(*inputs).sample, rtol=1e-4, atol=1e-5)
    text = (done.folder / "README.md").read_text()
    assert "`num_classes` 11: the labels are 0 to 9, and 10 stands for no class" in text
    assert "ε = ε(∅) + w·(ε(c) − ε(∅)), as diffusers' `guidance_scale`" in text and "w' = w − 1" in text
    if done.fused:
        UNet2DModel.from_pretrained(done.folder, subfolder="unet")
        return
    with pytest.raises(ValueError, match="scalelong"):
        UNet2DModel.from_pretrained(done.folder, subfolder="unet")


def test_a_network_that_takes_text_is_refused_and_loaded_alike(tmp_path: Path) -> None:
    import diffusers

    torch.manual_seed(0)
    kinds: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    small: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    network = diffusers.UNet2DConditionModel(8, **kinds, **small, cross_attention_dim=8, attention_head_dim=2)
    save_pretrained(scale_skips(network, "cs", kappa=0.5), tmp_path / "unet")
    diffusers.DDPMScheduler().save_pretrained(tmp_path / "scheduler")
    with pytest.raises(ValueError, match="CrossAttnUpBlock2D changed by scalelong"):
        diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "unet")
    inputs = torch.randn(2, 4, 8, 8), torch.tensor([3, 19]), torch.randn(2, 5, 8)
    with torch.no_grad():
        found, expected = (one(*inputs).sample for one in (load_pipeline(tmp_path).unet, network.eval()))
    assert torch.equal(found, expected)


def test_the_guidance_of_the_card_is_that_of_the_sampler() -> None:
    """w = 1 is the condition alone, as in diffusers; the other convention is one less."""
    free, bound, w = torch.tensor([1.0]), torch.tensor([3.0]), 2.5

    def network(x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where((y == 10)[:, None], free, bound)

    conditioning = Conditioning(("y", "context"), takes_labels=True, no_label=10)
    guided = conditioning.guided(network, Condition(torch.tensor([4])), w)(torch.zeros(1, 1), torch.zeros(1))
    assert torch.equal(guided[0], free + w * (bound - free))
    assert torch.equal(guided[0], (1 + (w - 1)) * bound - (w - 1) * free)


def test_our_loader_loads_what_is_folded_and_names_what_is_no_export(tmp_path: Path) -> None:
    run = train_unet(tmp_path / "run", "scaling.where=after-norm")
    export_run(run, "diffusers", tmp_path / "out")
    torch.testing.assert_close(theirs(load_pipeline(tmp_path / "out")), ours(run), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="has no unet/config.json: it was not written by scalelong export --to diff"):
        load_pipeline(run)


def test_a_uvit_whose_scaling_cannot_be_folded_is_refused_by_a_plain_one(tmp_path: Path) -> None:
    run_tiny(tmp_path / "run", "scaling.method=ls", "optim.lr=1e-2", "optim.warmup_steps=0", "model.patch_size=2")
    done = export_run(tmp_path / "run", "uvit", tmp_path / "out")
    assert not done.fused
    plain = UViT(8, 2, in_chans=1, embed_dim=16, depth=2, num_heads=2)
    with pytest.raises(RuntimeError, match="skip_scaling"):
        plain.load_state_dict(load_file(done.folder / "nnet.safetensors"))
    code = re.search(r"```python\n(.*?)```", (done.folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    exec(code.group(1).replace("nnet.safetensors", str(done.folder / "nnet.safetensors")), {"nnet": plain})
    checkpoint = Run(tmp_path / "run").checkpoints().latest()
    assert checkpoint is not None
    scaled, inputs = load_network(Run(tmp_path / "run").config(), checkpoint, "ema"), torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(plain.eval()(inputs, torch.tensor([1.0, 9.0])), scaled(inputs, torch.tensor([1.0, 9.0])))


def test_a_folded_uvit_is_a_plain_one_with_the_same_function(tmp_path: Path) -> None:
    run_tiny(tmp_path / "run", "optim.lr=1e-2", "optim.warmup_steps=0", "model.patch_size=2")
    done = export_run(tmp_path / "run", "uvit", tmp_path / "out")
    assert done.fused
    plain = UViT(8, 2, in_chans=1, embed_dim=16, depth=2, num_heads=2)
    plain.load_state_dict(load_file(done.folder / "nnet.safetensors"))
    checkpoint = Run(tmp_path / "run").checkpoints().latest()
    assert checkpoint is not None
    scaled = load_network(Run(tmp_path / "run").config(), checkpoint, "ema")
    inputs = torch.randn(2, 1, 8, 8), torch.tensor([10.0, 900.0])
    with torch.no_grad():
        torch.testing.assert_close(plain(*inputs), scaled(*inputs), rtol=1e-5, atol=1e-6)


def test_the_card_states_data_method_and_metrics(tmp_path: Path) -> None:
    run = train_unet(tmp_path / "run", "scaling.where=after-norm")
    text = (export_run(run, "diffusers", tmp_path / "out").folder / "README.md").read_text()
    for expected in (
        "`sklearn:digits` at 8×8",
        "`cs`, kappa = 0.7, at the after-norm",
        "2 steps of batch 8",
        "at step 2",
    ):
        assert expected in text


@pytest.mark.parametrize("option", ["qk_norm=true", "skip_norm=true", "concat_balance=0.3"])
def test_a_network_that_the_public_code_cannot_compute_is_not_exported(option: str, tmp_path: Path) -> None:
    run_tiny(tmp_path / "run", "training.steps=1", f"model.{option}")
    with pytest.raises(ValueError, match="the public U-ViT code knows no qk_norm, skip_norm or concat_balance"):
        export_run(tmp_path / "run", "uvit", tmp_path / "out")


@pytest.mark.parametrize("kind", ["uvit", "diffusers"])
def test_a_network_conditioned_on_itself_is_not_exported_without_it(kind: str, tmp_path: Path) -> None:
    run, option = tmp_path / "run", "model.self_conditioning=true"
    train_unet(run, option) if kind == "diffusers" else run_tiny(run, "training.steps=1", option)
    with pytest.raises(
        ValueError, match=rf"what reads --to {kind} knows no model\.self_conditioning and would lose it"
    ):
        export_run(run, kind, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_cannot_be_made_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_tiny(tmp_path / "run", "training.steps=1")
    with pytest.raises(ValueError, match="use --to uvit"):
        export_run(tmp_path / "run", "diffusers", tmp_path / "out")
    monkeypatch.setattr("scalelong.runs.export.write_card", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        export_run(tmp_path / "run", "uvit", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        export_run(tmp_path / "run", "uvit", tmp_path / "taken")


def test_a_pushed_folder_is_uploaded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Hub:
        def create_repo(self, name: str, **options: Any) -> None:
            calls.append(("create", name, options))

        def upload_folder(self, **options: Any) -> None:
            calls.append(("upload", options["repo_id"], sorted(path.name for path in options["folder_path"].iterdir())))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    run_tiny(tmp_path / "run", "training.steps=1")
    done = export_run(tmp_path / "run", "uvit", tmp_path / "out")
    assert push(done.folder, "me/model", private=True) == "https://huggingface.co/me/model"
    assert calls == [
        ("create", "me/model", {"private": True, "exist_ok": True}),
        ("upload", "me/model", ["README.md", "nnet.safetensors"]),
    ]
