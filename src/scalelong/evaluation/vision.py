"""Vision models of transformers as feature networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.errors import DataError, first_line
from ..data.pretrained import check_whole, fingerprint_of, load_partly, locate, quietly
from ..utils.device import own_device
from .feature_network import KNOWN, FeatureError, FeatureNetwork, Resize

# Vision parts of models that `AutoModel` would load together with what reads text.
VISION_PARTS = {"clip": "CLIPVisionModel", "siglip": "SiglipVisionModel"}
KEY, POOLER = "the feature network", "pooler"


def load_transformers(name: str) -> FeatureNetwork:
    """A vision model of transformers, a folder or `owner/name` on the hub: its pooled output, if that was trained.

    Else it is the mean over its tokens, and the distance's name ends with -tokens: checkpoints of classifiers have no
    weights of what pools, and random ones would be others in every process.
    """
    folder = find_model(name)
    network, pools = load_vision(folder)
    resize = read_resize(folder)
    pooled = pools and output_of(network, resize, blank(resize), folder).pooler_output is not None

    def forward(images: Tensor) -> Tensor:
        found = output_of(network, resize, images, folder)
        return found.pooler_output if pooled else mean_of_tokens(found.last_hidden_state)

    # As the folder is called, however it was reached: the same weights have one name.
    called = Path(name).expanduser().resolve().name if Path(name).expanduser().is_dir() else name.split("/")[-1]
    label = f"FD-{called}" if pooled else f"FD-{called}-tokens"
    return FeatureNetwork(called, fingerprint_of(folder)[:16], resize.in_full, label, forward)


def find_model(name: str) -> Path:
    try:
        return locate(name, KEY)
    except DataError as error:
        raise FeatureError(f"{error}. It may be {KNOWN}") from error


def load_vision(folder: Path) -> tuple[Any, bool]:
    """The network, and whether the weights of what pools its tokens are in the folder, if it has any."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError('a transformers model needs transformers: pip install "scalelong[train]"') from error
    with quietly(transformers):
        kind = transformers.AutoConfig.from_pretrained(str(folder)).model_type
        part = getattr(transformers, VISION_PARTS.get(kind, "AutoModel"))
        network, missing = load_partly(part, folder, KEY)
    check_whole(part, folder, KEY, [weight for weight in missing if POOLER not in weight])
    return network.to(own_device()), not missing


def output_of(network: Any, resize: Resize, images: Tensor, folder: Path) -> Any:
    """What a model returns for images. Shape: (B, 3, H, W), uint8."""
    try:
        with torch.inference_mode():
            found = network(pixel_values=resize(images))
    except (RuntimeError, ValueError, TypeError) as error:
        raise FeatureError(f"{folder} does not take images of {resize.size} px: {first_line(error)}") from error
    if not hasattr(found, "last_hidden_state"):
        raise FeatureError(f"{folder} gives {type(found).__name__}, which has no features of images")
    return found


def blank(resize: Resize) -> Tensor:
    side = resize.size or 1
    return torch.zeros(1, 3, side, side, dtype=torch.uint8, device=own_device())


def mean_of_tokens(states: Tensor) -> Tensor:
    """Shape: (B, L, D), or a map (B, D, h, w) → (B, D)."""
    return states.mean(1) if states.ndim == 3 else states.mean((2, 3))


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
