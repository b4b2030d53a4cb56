"""Networks with scaled skips on the disk and on the Hub: saved and loaded with their scaling, or not loaded at all.

A folder holds `config.json`, the weights as safetensors, and `scalelong.json`, which says how the skips are scaled, and
whether the network is conditioned on itself. What does not know the latter refuses the folder: without them the network
would draw other images, and nobody would be told. Any other network is saved as its library saves it, also one with
constants folded into its weights.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor, nn

from ..utils.atomic import Damaged, Files, import_safetensors, read_tensors
from .apply import NAME, attached_hooks, choose_sites, fuse_skips, make_scaling, scale_skips, scaled_networks
from .methods import METHODS, SkipScaling
from .readers import AbsorbedScalingWarning
from .self_conditioning import NAME as CONDITIONING
from .self_conditioning import condition_on_self, conditioned_networks
from .site import SkipSite

Network = TypeVar("Network", bound=nn.Module)
Described = dict[str, Any]

CONFIG, SCALING, WEIGHTS, README = "config.json", "scalelong.json", "model.safetensors", "README.md"
# diffusers has neither such a class nor such blocks, and does not ask for the class when it loads a single network.
OWN_CLASS, OWN_BLOCK = "ScaleLong", " changed by scalelong (see its README.md)"
# For diffusers' networks that name no blocks: it refuses to load weights of a kind that it does not know.
REFUSED = {"quant_method": f"none, but{OWN_BLOCK}"}

OWN_CARD = "**This network is one of scalelong"
CARD = """# {kind}, {changes}

{first} ({changes}): load it as below.** Without that it samples other images.

```python
import scalelong
{lines}
```
"""


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    fuse: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
) -> Path:
    """Save a network with its scaling; returns the folder. `scalelong.from_pretrained` loads it, diffusers refuses it.

    `fuse=True` folds the constants into a copy of the weights, which any library loads, and raises, with the reason,
    where that is not exact, as with self-conditioning. `push_to_hub="owner/name"` uploads the folder as well.
    """
    model, place = unwrap(model), Path(folder).expanduser()
    refuse_adapters(model)
    described = describe(model)
    if fuse and CONDITIONING in described:
        raise ValueError("a network that is conditioned on itself cannot be folded into plain weights: fuse=False")
    if fuse and described:
        model, described = fuse_skips(copy.deepcopy(model)), {}
    temporary = place.with_name(f".tmp-{place.name}-{os.getpid()}")
    try:
        write_network(model, temporary)
        if described:
            claim(temporary, type(model).__name__, described)
        replace_files(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if push_to_hub is not None:
        push(place, push_to_hub, private=private)
    return place


def from_pretrained(
    kind: type[Network] | Callable[[], Network],
    source: str | Path,
    *,
    subfolder: str | None = None,
    revision: str | None = None,
) -> Network:
    """The network of a folder, or of a repository on the Hub, with its scaling and in eval mode.

    `kind` is its diffusers class, or for any other network a function without arguments that builds it.
    """
    place = find_folder(source, revision) / (subfolder or "")
    content = read_json(place / CONFIG)
    name = str(content.get("_class_name", ""))
    plain = name.removeprefix(OWN_CLASS)
    if hasattr(kind, "from_config") and plain != getattr(kind, "__name__", plain):
        raise ValueError(f"{place} holds a {plain}, not a {getattr(kind, '__name__', kind)}: load it as that class")
    if plain == name:
        return load_plain(kind, place)
    content = {key: value for key, value in content.items() if value != REFUSED} | {"_class_name": plain}
    if content.get("up_block_types"):
        content["up_block_types"] = [block.removesuffix(OWN_BLOCK) for block in content["up_block_types"]]
    build: Any = kind
    with torch.random.fork_rng(devices=[]):  # What is drawn here is loaded over.
        network = build.from_config(content) if hasattr(kind, "from_config") else build()
        return load_scaled(network, read_json(place / SCALING), read_weights(place)).eval()


def unwrap(model: Any) -> nn.Module:
    """The network inside torch.compile and DistributedDataParallel."""
    while type(model).__name__ in ("OptimizedModule", "DistributedDataParallel"):
        model = getattr(model, "_orig_mod", None) or model.module
    return model


def refuse_adapters(model: nn.Module) -> None:
    if name := next((name for name, module in model.named_modules() if hasattr(module, "base_layer")), None):
        raise ValueError(
            f"{name} of this {type(model).__name__} still has an adapter beside its weights: merge it first "
            "(merge_and_unload of peft, fuse_lora and unload_lora of diffusers), or save the adapter alone"
        )


# How a network is scaled, as JSON.


def describe(model: nn.Module) -> Described:
    """All that changing another network of the same kind alike takes, besides the weights; empty if it is as it was."""
    return describe_scaling(model) | ({CONDITIONING: True} if conditioned_networks(model) else {})


def describe_scaling(model: nn.Module) -> Described:
    networks = scaled_networks(model)
    if not networks:
        return {}
    if len(networks) > 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(networks)} scaled networks: save each in a folder of its own"
        )
    (network, scaling), hooks = networks[0], [hook for _, hook in attached_hooks(model)]
    where = re.search(r" (input|after-norm) skips ", scaling.signed_as)
    assert where is not None, f"a scaling in use is signed, not {scaling.signed_as!r}"
    return {
        "method": method_name(scaling),
        "where": where[1],
        "options": options_of(scaling),
        "preserve": any(hook.preserved for hook in hooks),
        "network": next(name for name, module in model.named_modules() if module is network),
        "skips": describe_sites({hook.site.index: hook.site for hook in hooks}.values()),
    }


def method_name(scaling: SkipScaling) -> str:
    name = next((name for name, kind in METHODS.items() if kind is type(scaling)), None)
    if name is None:
        raise ValueError(
            f"{type(scaling).__name__} is a method of your own, which a folder cannot name: use fuse=True if it is "
            "constant, else save model.state_dict() and scale again before loading it"
        )
    return name


def options_of(scaling: SkipScaling) -> dict[str, Any]:
    """The method's options that no tensor of its state holds."""
    kept = {name: getattr(scaling, name, None) for name in inspect.signature(type(scaling)).parameters}
    return {name: value for name, value in kept.items() if isinstance(value, (int, float, str))}


def describe_sites(sites: Any) -> list[Described]:
    """Skips as JSON, outermost first; `read_sites` reads them."""
    ordered = sorted(sites, key=lambda site: site.index)
    return [asdict(site) | {"entry": {"kind": type(site.entry).__name__, **asdict(site.entry)}} for site in ordered]


def read_sites(described: Any) -> list[SkipSite]:
    """
    >>> from .site import Argument
    >>> site = SkipSite(1, "decoder.1", Argument(1, "skip"), width=8)
    >>> read_sites(describe_sites([site])) == [site]
    True
    """
    kinds = get_type_hints(SkipSite)
    entries = {kind.__name__: kind for kind in get_args(kinds["entry"])}
    joined = next(kind for kind in get_args(kinds["joined"]) if kind is not type(None))
    found = []
    for fields in described:
        entry, lies = dict(fields["entry"]), fields.get("joined")
        entry = entries[entry.pop("kind")](**entry)
        given = {"readers": tuple(fields.get("readers", ())), "joined": None if lies is None else joined(**lies)}
        found.append(SkipSite(**{**fields, **given, "entry": entry}))
    return found


def load_scaled(model: Network, described: Mapping[str, Any], weights: dict[str, Tensor]) -> Network:
    """The network scaled and conditioned as described, with these weights."""
    if described.get(CONDITIONING):
        condition_on_self(model)
    if "method" not in described:
        model.load_state_dict(weights)
        return model
    sites, network = read_sites(described["skips"]), model.get_submodule(described["network"])
    prefix = f"{described['network']}.{NAME}.".removeprefix(".")
    scaling = make_scaling(described["method"], choose_sites(network, sites, None)[1], dict(described["options"]))
    assert scaling is not None, "a network that is not scaled has no description"
    # Before the network is scaled: what its skips are multiplied by decides what `preserve` divides, and can be undone.
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    scaling.load_state_dict({name: value for name, value in own.items() if name != "signature"}, strict=False)
    with warnings.catch_warnings():
        # That a norm cancels the scaling was said when the network was trained.
        warnings.simplefilter("ignore", AbsorbedScalingWarning)
        scale_skips(network, scaling, sites=sites, where=described["where"], preserve=described["preserve"])
    model.load_state_dict(weights)
    for part in (part for _, hook in attached_hooks(network) for part in hook.preserved):
        part.before = part.of(network) * part.coefficient
    return model


# The folder.


def write_network(model: Any, folder: Path) -> None:
    """As its own library saves it, or else its weights beside its class's name."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
        return
    folder.mkdir(parents=True)
    Files().write_tensors(folder / WEIGHTS, model.state_dict())
    (folder / CONFIG).write_text(to_text({"_class_name": type(model).__name__}), encoding="utf-8")


def claim(folder: Path, kind: str, described: Described) -> None:
    """Name the network's class and blocks after this package, so that it alone loads them, and say what it changed."""
    file, is_diffusers = folder / CONFIG, not (folder / WEIGHTS).is_file()
    content = json.loads(file.read_bytes())
    content["_class_name"] = OWN_CLASS + content["_class_name"]
    if content.get("up_block_types"):
        content["up_block_types"] = [block + OWN_BLOCK for block in content["up_block_types"]]
    elif is_diffusers:
        content["quantization_config"] = REFUSED
    file.write_text(to_text(content), encoding="utf-8")
    (folder / SCALING).write_text(to_text(described), encoding="utf-8")
    lines = f'model = scalelong.from_pretrained({kind}, "FOLDER")'
    lines = f"from diffusers import {kind}\n\n{lines}" if is_diffusers else f"\n{lines}  # {kind}: what builds it"
    changes = [f"long skips scaled by {described['method']}"] if "method" in described else []
    changes = " and ".join([*changes, *(["conditioned on itself"] if CONDITIONING in described else [])])
    card = CARD.format(kind=kind, first=OWN_CARD, changes=changes, lines=lines)
    (folder / README).write_text(card, encoding="utf-8")


def replace_files(source: Path, target: Path) -> None:
    """Move new files over those of an earlier save; at no time is there a config of one and weights of the other."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(source, target)
        return
    if not target.is_dir():
        raise ValueError(f"{target} is a file: choose another folder")
    for name in (CONFIG, SCALING):
        (target / name).unlink(missing_ok=True)
    for old in target.iterdir():
        if re.fullmatch(r"(model|diffusion_pytorch_model).*\.(safetensors|bin|index\.json)", old.name):
            old.unlink()
    card = target / README
    if card.is_file() and OWN_CARD in card.read_text(encoding="utf-8", errors="replace"):
        card.unlink()
    for new in sorted(source.iterdir(), key=lambda path: path.name == CONFIG):
        if new.name != README or not card.exists():
            os.replace(new, target / new.name)


def find_folder(source: str | Path, revision: str | None) -> Path:
    """A folder on the disk, else the copy of a repository on the Hub."""
    folder = Path(source).expanduser()
    if folder.is_dir() or isinstance(source, Path) or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", source):
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, revision=revision, allow_patterns=["*.json", "*.safetensors"]))


def read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        reason = "there is none" if isinstance(error, FileNotFoundError) else str(error)
        raise ValueError(f"{file} cannot be read ({reason}): scalelong.save_pretrained writes it") from error


def load_plain(kind: Any, place: Path) -> Any:
    """A network that was saved without scaling, or with constants folded into its weights."""
    for file in place.glob("*.safetensors"):
        if any({NAME, CONDITIONING} & set(name.split(".")) for name in tensor_names(file)):
            raise ValueError(
                f"{file} holds the weights of a network with scaled skips, or conditioned on itself, but nothing says "
                "how it was changed: save the network with scalelong.save_pretrained instead of its own save_pretrained"
            )
    if hasattr(kind, "from_pretrained"):
        return kind.from_pretrained(place)
    network = kind()
    network.load_state_dict(read_weights(place))
    return network.eval()


def tensor_names(file: Path) -> list[str]:
    library = import_safetensors()
    try:
        with library.safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except library.SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file ({error})") from error


def read_weights(place: Path) -> dict[str, Tensor]:
    """All tensors of a folder; large networks have several files."""
    try:
        weights = {name: value for file in place.glob("*.safetensors") for name, value in read_tensors(file).items()}
    except Damaged as damage:
        raise ValueError(f"{place}: {damage}") from damage
    if not weights:
        raise ValueError(f"{place} holds no safetensors file")
    return weights


def push(folder: Path, repository: str, *, private: bool = False) -> str:
    """Upload a folder to the Hugging Face hub; returns its address."""
    from huggingface_hub import HfApi

    hub = HfApi()
    hub.create_repo(repository, private=private, exist_ok=True)
    hub.upload_folder(repo_id=repository, folder_path=folder)
    return f"https://huggingface.co/{repository}"


def to_text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
