"""Laws of saving: what is loaded computes the same to the bit; what does not know the scaling refuses the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoModel, HunyuanDiT2DModel, UNet1DModel, UNet2DConditionModel, UNet2DModel
from safetensors.torch import load_file
from torch import Tensor, nn

from families.unknown import InlineCat
from scalelong import METHODS, SkipScaling, from_pretrained, save_pretrained, scale_skips, unscale_skips
from scalelong.skips.pretrained import OWN_CARD, README, replace_files

pytestmark = pytest.mark.filterwarnings("ignore::scalelong.AbsorbedScalingWarning")

SMALL: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
HUNYUAN = dict.fromkeys(("hidden_size", "num_layers", "cross_attention_dim", "cross_attention_dim_t5"), 8)
HUNYUAN |= {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 4, "sample_size": 8, "text_len": 4}
HUNYUAN |= {"text_len_t5": 4, "pooled_projection_dim": 8, "in_channels": 4, "patch_size": 2}


def unet() -> UNet2DModel:
    kinds: dict[str, Any] = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    return UNet2DModel(8, 1, 1, **kinds, **SMALL, add_attention=False).eval()


def text_unet() -> UNet2DConditionModel:
    kinds: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    return UNet2DConditionModel(8, **kinds, **SMALL, cross_attention_dim=8, attention_head_dim=2)


def hunyuan() -> HunyuanDiT2DModel:
    return HunyuanDiT2DModel(**HUNYUAN)


def unet_1d() -> UNet1DModel:
    return UNet1DModel(sample_size=32, block_out_channels=(8, 8, 16), layers_per_block=1)


@torch.no_grad()
def output(model: Any) -> Tensor:
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return model.eval()(x, torch.tensor([3, 900])).sample


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(value) for name, value in theirs.items())


@pytest.mark.parametrize("where", ["input", "after-norm"])
@pytest.mark.parametrize("method", [name for name, kind in METHODS.items() if kind is not None])
def test_a_scaled_network_is_loaded_as_it_was_saved(method: str, where: str, tmp_path: Path) -> None:
    model = scale_skips(unet(), method, where=where)
    with torch.no_grad():
        for parameter in model.skip_scaling.parameters():
            parameter.add_(0.1)  # As if trained: not the start of the method.
    save_pretrained(model, tmp_path / "unet")
    state = torch.get_rng_state()
    loaded = from_pretrained(UNet2DModel, tmp_path / "unet")
    assert torch.get_rng_state().equal(state)
    assert_same_weights(loaded, model)
    assert output(loaded).equal(output(model))
    assert not output(loaded).equal(output(unscale_skips(model)))


@pytest.mark.parametrize("options", [{"kappa": 0.5, "sites": [1, 3]}, {"kappa": 0.5, "preserve": True}])
def test_the_chosen_skips_and_what_preserve_divided_are_known_after_loading(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = scale_skips(unet(), "cs", where="after-norm", **options)
    scaled = output(model)
    save_pretrained(model, tmp_path / "unet")
    loaded = from_pretrained(UNet2DModel, tmp_path / "unet")
    assert output(loaded).equal(scaled)
    # 1e-5: weights that were divided by a coefficient and multiplied by it again.
    torch.testing.assert_close(output(unscale_skips(loaded)), output(unscale_skips(model)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("build", [unet, text_unet, hunyuan, unet_1d])
@pytest.mark.parametrize("method", ["cs", "ls"])
def test_plain_diffusers_refuses_the_folder_of_a_scaled_network(build: Any, method: str, tmp_path: Path) -> None:
    model = scale_skips(build(), method)
    save_pretrained(model, tmp_path / "model")
    kind = type(model)
    for load in (
        lambda: kind.from_pretrained(tmp_path / "model"),
        lambda: kind.from_pretrained(tmp_path / "model", low_cpu_mem_usage=False),
        lambda: AutoModel.from_pretrained(tmp_path / "model"),
    ):
        with pytest.raises(ValueError, match="changed by scalelong|no class `ScaleLong"):
            load()
    assert_same_weights(from_pretrained(kind, tmp_path / "model"), model)


def test_a_fused_folder_is_plain_and_the_model_that_was_saved_stays_scaled(tmp_path: Path) -> None:
    model = scale_skips(unet(), "cs", kappa=0.5, where="after-norm")
    save_pretrained(model, tmp_path / "unet", fuse=True)
    assert hasattr(model, "skip_scaling")
    # 1e-5: a product in another order.
    for loaded in (UNet2DModel.from_pretrained(tmp_path / "unet"), from_pretrained(UNet2DModel, tmp_path / "unet")):
        torch.testing.assert_close(output(loaded), output(model), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="cannot be folded into weights: the coefficients of LS depend on the input"):
        save_pretrained(scale_skips(unet(), "ls"), tmp_path / "other", fuse=True)
    assert not (tmp_path / "other").exists()


def test_a_network_without_scaling_is_saved_as_diffusers_does(tmp_path: Path) -> None:
    model = unet()
    save_pretrained(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    for file in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes()
    assert_same_weights(from_pretrained(UNet2DModel, tmp_path / "ours"), model)


def test_a_folder_that_diffusers_wrote_of_a_scaled_network_is_refused_and_not_loaded_without_it(tmp_path: Path) -> None:
    scale_skips(unet(), "cs").save_pretrained(tmp_path / "unet")
    with pytest.raises(ValueError, match=r"nothing says how it was changed: save the network with scalelong\.save_pre"):
        from_pretrained(UNet2DModel, tmp_path / "unet")


def test_a_later_save_replaces_an_earlier_one_whole(tmp_path: Path) -> None:
    folder, model = tmp_path / "unet", unet()
    save_pretrained(model, folder)
    (folder / "notes.txt").write_text("mine")
    save_pretrained(scale_skips(model, "ls"), folder)
    assert_same_weights(from_pretrained(UNet2DModel, folder), model)
    assert OWN_CARD in (folder / README).read_text()
    save_pretrained(unscale_skips(model), folder)
    assert_same_weights(UNet2DModel.from_pretrained(folder), model)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
        "notes.txt",
    ]
    (folder / README).write_text("# My own card\n")
    save_pretrained(scale_skips(model, "cs"), folder)
    assert (folder / README).read_text() == "# My own card\n"


def test_a_save_that_is_cut_off_leaves_no_folder_that_loads_without_its_scaling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = tmp_path / "unet", unet()
    save_pretrained(model, folder)
    moved: list[str] = []

    def stop_at_the_second(source: Path, target: Path) -> None:
        moved.append(Path(source).name)
        if len(moved) == 2:
            raise OSError("cut off")
        Path(source).rename(target)

    monkeypatch.setattr("scalelong.skips.pretrained.os.replace", stop_at_the_second)
    with pytest.raises(OSError, match="cut off"):
        save_pretrained(scale_skips(model, "cs"), folder)
    monkeypatch.undo()
    with pytest.raises(OSError, match=r"config\.json"):
        UNet2DModel.from_pretrained(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["unet"]


def test_a_folder_is_never_laid_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "new").mkdir()
    with pytest.raises(ValueError, match="is a file: choose another folder"):
        replace_files(tmp_path / "new", tmp_path / "file")


def test_any_other_network_is_saved_with_its_scaling_and_loaded_by_what_builds_it(tmp_path: Path) -> None:
    inputs = torch.randn(2, 3, 16, 16)
    model = scale_skips(InlineCat(), "cs", kappa=0.5, example_inputs=inputs)
    save_pretrained(model, tmp_path / "net")
    loaded = from_pretrained(InlineCat, tmp_path / "net")
    assert_same_weights(loaded, model)
    with torch.no_grad():
        assert loaded(inputs).equal(model.eval()(inputs))
    with pytest.raises(RuntimeError, match="skip_scaling"):
        InlineCat().load_state_dict(load_file(tmp_path / "net" / "model.safetensors"))
    save_pretrained(unscale_skips(model), tmp_path / "plain")
    assert_same_weights(from_pretrained(InlineCat, tmp_path / "plain"), model)


def test_a_compiled_network_is_saved_as_the_one_inside(tmp_path: Path) -> None:
    model = scale_skips(unet(), "cs")
    save_pretrained(torch.compile(model), tmp_path / "unet")  # pyright: ignore[reportArgumentType]
    assert_same_weights(from_pretrained(UNet2DModel, tmp_path / "unet"), model)


def test_what_a_folder_cannot_say_is_refused_with_what_to_do(tmp_path: Path) -> None:
    class Mine(SkipScaling):
        def coefficient(self, index: int, skip: Tensor) -> float:
            return 0.5

    with pytest.raises(ValueError, match="Mine is a method of your own, which a folder cannot name: use fuse=True"):
        save_pretrained(scale_skips(unet(), Mine), tmp_path / "unet")
    adapted = unet()
    adapted.conv_in.base_layer = nn.Identity()
    with pytest.raises(ValueError, match="conv_in of this UNet2DModel still has an adapter .* merge it first"):
        save_pretrained(adapted, tmp_path / "unet")
    with pytest.raises(ValueError, match=r"config\.json cannot be read \(there is none\)"):
        from_pretrained(UNet2DModel, tmp_path)
    save_pretrained(scale_skips(unet(), "cs"), tmp_path / "unet")
    with pytest.raises(ValueError, match="holds a UNet2DModel, not a UNet2DConditionModel"):
        from_pretrained(UNet2DConditionModel, tmp_path / "unet")
    assert list(tmp_path.iterdir()) == [tmp_path / "unet"]
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").write_text("no tensors")
    with pytest.raises(ValueError, match="is no safetensors file"):
        from_pretrained(UNet2DModel, tmp_path / "unet")


def test_what_is_pushed_to_the_hub_is_the_folder_and_is_loaded_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded: dict[str, Path] = {}

    class Hub:
        def create_repo(self, name: str, **options: Any) -> None:
            assert options == {"private": True, "exist_ok": True}

        def upload_folder(self, *, repo_id: str, folder_path: Path) -> None:
            uploaded[repo_id] = folder_path

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(uploaded[name]))
    model = scale_skips(unet(), "ls")
    save_pretrained(model, tmp_path / "unet", push_to_hub="me/digits", private=True)
    assert json.loads((uploaded["me/digits"] / "config.json").read_text())["_class_name"] == "ScaleLongUNet2DModel"
    assert_same_weights(from_pretrained(UNet2DModel, "me/digits"), model)
