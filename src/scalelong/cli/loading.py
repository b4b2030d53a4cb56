"""From a name on the command line to a model without weights: a preset, a diffusers folder, or an id on the Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models import preset, preset_names
from ..skips import SkipSite

FACTORY = r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*"
NETWORKS = ("unet", "transformer", "decoder", "prior")
"""Parts of a diffusers pipeline that may have long skips; each is also the name of its subfolder."""

Config = dict[str, Any]


def load_target(name: str, shape: str | None, settings: Sequence[str]) -> tuple[nn.Module, list[SkipSite] | None]:
    """What `inspect` is given, and its skips if it is a network of the user's own, or a recipe's."""
    from ..config.build import build_network, condition, known_sites
    from ..config.load import load_recipe, yaml_with_lines
    from ..config.own import inspect_own

    if Path(name).suffix in (".yaml", ".yml"):
        config = load_recipe(name, settings)
        network = condition(build_network(config), config)
        return network, known_sites(network, config)
    if re.fullmatch(FACTORY, name):
        options = {key.strip(): yaml_with_lines(text)[0] for key, _, text in (each.partition("=") for each in settings)}
        return inspect_own(name, read_shape(shape), options)
    if shape is not None or settings:
        raise ValueError(f"--shape and --set are for PATH.py:FUNCTION or a recipe, not for {name!r}")
    return load_model(name), None


def read_shape(text: str | None) -> tuple[int, ...] | None:
    """
    >>> read_shape("3,32,32")
    (3, 32, 32)
    """
    if text is None:
        return None
    if not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*){2}", text):
        raise ValueError(f"--shape is channels, height and width, such as 3,32,32, not {text!r}")
    return tuple(map(int, text.split(",")))


def load_model(name: str) -> nn.Module:
    """The model that a preset, a folder or a Hub id names, on the meta device: all shapes and no weights.

    >>> next(load_model("imagenet64-uvit-l4").parameters()).device
    device(type='meta')
    """
    try:
        if name not in preset_names() and ("/" in name or Path(name).exists()):
            return build_diffusers_model(load_config(name), name)
        with torch.device("meta"):
            return preset(name)
    except ImportError as error:
        reason = error.__cause__ or error
        raise ImportError(
            f'{name!r} needs a package that could not be imported ({reason}): pip install "scalelong[train]"'
        ) from error


def load_config(name: str) -> Config:
    """The config of a diffusers model, or of the network of a diffusers pipeline, in a folder or on the Hub."""
    folder = Path(name)
    if folder.is_dir():
        config = find_config(lambda file: path if (path := folder / file).is_file() else None)
    elif not folder.exists() and re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        config = load_hub_config(name)
    else:
        raise ValueError(f"{name!r} is not a folder; give the diffusers folder that holds config.json")
    if config is None:
        networks = f"{', '.join(NETWORKS[:-1])} or {NETWORKS[-1]}"
        raise ValueError(f"{name!r} has no config.json of a diffusers model, and no pipeline with a {networks}")
    return config


def load_hub_config(repository: str) -> Config | None:
    """The config in a repository on the Hub; once that could not be reached, only the cache is asked."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

    failures: list[BaseException] = []
    no_folder = f"there is no folder {repository!r}"

    def find(file: str) -> Path | None:
        try:
            return Path(hf_hub_download(repository, file, local_files_only=bool(failures)))
        except LocalEntryNotFoundError as error:
            failures.append(error.__cause__ or error)
        except EntryNotFoundError:
            pass
        except RepositoryNotFoundError as error:
            check = "check the name, or log in with `hf auth login`"
            raise ValueError(
                f"{no_folder}, and no model of that name on the Hugging Face Hub that you may read; {check}"
            ) from error
        return None

    config = find_config(find)
    if config is None and failures:
        asked = f"the Hugging Face Hub could not be asked: {failures[0]}"
        raise ConnectionError(f"{no_folder}, no config of that name in the cache, and {asked}")
    return config


def find_config(find: Callable[[str], Path | None]) -> Config | None:
    """The config at the root, else that of a pipeline's network; None if there is none of diffusers."""
    config = read_json(find("config.json"))
    if "_class_name" in config:
        return config
    pipeline = read_json(find("model_index.json"))
    configs = (read_json(find(f"{network}/config.json")) for network in NETWORKS if network in pipeline)
    return next((config for config in configs if "_class_name" in config), None)


def read_json(path: Path | None) -> Config:
    try:
        content = json.loads("{}" if path is None else path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def build_diffusers_model(config: Config, name: str) -> nn.Module:
    import diffusers

    class_name = str(config["_class_name"])
    kind: Any = getattr(diffusers, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(f"{name!r} is a {class_name}, which is no network of diffusers {diffusers.__version__}")
    try:
        with torch.device("meta"):
            return kind.from_config(config)  # pyright: ignore[reportAttributeAccessIssue]
    except Exception as error:  # Whatever a constructor makes of a config that does not fit it.
        raise ValueError(f"{class_name} cannot be built from the config of {name!r}: {error}") from error


def load_local(folder: Path) -> tuple[Any, list[Path]]:
    """The UNet of a diffusers folder, or of a pipeline's, in eval mode, and the safetensors files of its weights."""
    import diffusers

    from ..skips.pretrained import OWN_CLASS, from_pretrained

    place = folder / "unet" if (folder / "unet" / "config.json").is_file() else folder
    if not (place / "config.json").is_file():
        raise ValueError(f"{str(folder)!r} is no folder of a diffusers network: there is no config.json in it")
    name = str(read_json(place / "config.json").get("_class_name"))
    kind: Any = getattr(diffusers, name.removeprefix(OWN_CLASS), None)
    if not hasattr(kind, "from_pretrained"):
        raise ValueError(f"{place / 'config.json'} names {name!r}, which is no network of diffusers")
    if not (files := sorted(place.glob("*.safetensors"))):
        raise ValueError(
            f"{place} holds no safetensors file; weights in other formats, which may hold code, are not read"
        )
    if name.startswith(OWN_CLASS):
        return from_pretrained(kind, place), files
    return kind.from_pretrained(place, use_safetensors=True, local_files_only=True).eval(), files
