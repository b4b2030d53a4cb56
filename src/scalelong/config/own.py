"""What a recipe takes from the user's own files: the code of a network (`kind: python`), and weights to start from.

Nothing here decides whether code may run: a recipe that the user named is the user's, and `Run.config` asks for the
code of any other.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import inspect
import json
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..diffusion.guidance import noise_predictor
from ..skips import SkipSite, find_skips
from ..skips.pretrained import describe_sites
from ..skips.record import unchanged
from ..utils.atomic import Damaged, atomic_write, read_tensors, sha256_of
from .sections import NetworkConfig, PythonConfig

Described = tuple[dict[str, Any], ...]

noted: dict[str, Described | None] = {}
"""The skips of networks that were looked at in this process: a comparison has many runs of the same one."""


def is_file(place: str) -> bool:
    """Whether what stands before the colon of a factory is a file, and not a package.

    >>> is_file("nets/mine.py"), is_file("monai.networks.nets")
    (True, False)
    """
    return place.endswith(".py") or "/" in place or "\\" in place


def anchored(text: str, folder: Path) -> str:
    """A path made absolute: seen from a folder, else from the working directory."""
    path = Path(text).expanduser()
    beside = folder / path
    return str((beside if beside.exists() else path).resolve())


def anchored_factory(text: str, folder: Path) -> str:
    """A factory with the path of its file made absolute; one in a package is left as it is."""
    place, colon, name = text.rpartition(":")
    return f"{anchored(place, folder)}{colon}{name}" if is_file(place) else text


def build_own(model: PythonConfig) -> nn.Module:
    """The network as its factory makes it, on the CPU."""
    factory = load_factory(model)
    with explained(model), importable(model), torch.device("cpu"):
        network = factory(**copy.deepcopy(model.options))
    if not isinstance(network, nn.Module):
        raise ValueError(f"{model.factory} returned a {type(network).__name__}, not a torch.nn.Module")
    return network


def load_factory(model: PythonConfig) -> Any:
    """The function that builds the network; raises if its code is not that of the run."""
    place, _, name = model.factory.rpartition(":")
    if is_file(place):
        source = read_source(Path(place))
        refuse_other_code(model, hashlib.sha256(source).hexdigest())
        with explained(model), importable(model):
            return find_attribute(load_file(Path(place), source), name, model)
    with explained(model), importable(model):
        factory = find_attribute(importlib.import_module(place), name, model)
    if model.code_sha256 is not None:
        refuse_other_code(model, sha256_of(source_file(factory)))
    return factory


def code_digest(model: PythonConfig) -> str:
    """SHA-256 of the file that holds the factory."""
    place = model.factory.rpartition(":")[0]
    if is_file(place):
        return hashlib.sha256(read_source(Path(place))).hexdigest()
    return sha256_of(source_file(load_factory(model.model_copy(update={"code_sha256": None}))))


def read_source(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"model.factory: cannot read the code in {path}: {error.strerror}") from error


def refuse_other_code(model: PythonConfig, found: str) -> None:
    if model.code_sha256 is not None and model.code_sha256 != found:
        raise ValueError(
            f"{model.factory} is not the code that this run began with (sha256 {model.code_sha256[:12]}…, now "
            f"{found[:12]}…): put it back as it was, from the copy in the run's folder code/, or begin another run "
            "with the new code"
        )


def with_code_at_hand(model: PythonConfig, kept: Path) -> PythonConfig:
    """The network with the copy of its code in a run's folder, where the file itself is no longer in its place."""
    place, _, name = model.factory.rpartition(":")
    copied = kept / Path(place).name
    if not is_file(place) or Path(place).exists() or not copied.is_file():
        return model
    return model.model_copy(update={"factory": f"{copied.resolve()}:{name}"})


def keep_code(model: PythonConfig, folder: Path) -> None:
    """Copy the file with the factory into the folder of a run, where it can be put back from."""
    place = model.factory.rpartition(":")[0]
    file = Path(place) if is_file(place) else source_file(load_factory(model))
    folder.mkdir(exist_ok=True)
    atomic_write(folder / file.name, lambda temporary: shutil.copyfile(file, temporary))


def load_file(path: Path, source: bytes) -> ModuleType:
    """The module of a file, loaded from the bytes that were compared; once for as long as they stay the same."""
    name = f"scalelong_own_{hashlib.sha256(str(path).encode() + source).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} ends with .py"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def find_attribute(module: ModuleType, name: str, model: PythonConfig) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[:1] != "_"]
        raise ValueError(f"{model.factory}: there is no function {name}; the file has {', '.join(functions) or 'none'}")
    return found


def source_file(factory: Any) -> Path:
    file = inspect.getsourcefile(inspect.unwrap(factory))
    assert file is not None, "what was imported from a file knows it"
    return Path(file)


@contextmanager
def importable(model: PythonConfig) -> Iterator[None]:
    """While entered, code may import what lies beside it, or in the working directory if it is named as a package."""
    place = model.factory.rpartition(":")[0]
    # At the end, so that no file of the user takes the place of a module of another package.
    folder = str(Path(place).parent if is_file(place) else Path.cwd())
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


@contextmanager
def explained(model: PythonConfig) -> Iterator[None]:
    """An error in the user's code as one line with its place; the traceback stays behind it."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(model.factory):
            raise
        raise own_error(model, error) from error
    except Exception as error:
        raise own_error(model, error) from error


def own_error(model: PythonConfig, error: Exception) -> ValueError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if last.filename == __file__ else f" ({Path(last.filename).name}:{last.lineno})"
    options = ", ".join(f"{name}={value!r}" for name, value in model.options.items())
    return ValueError(f"{model.factory}({options}) failed: {type(error).__name__}: {error}{place}")


def inspect_own(
    factory: str, shape: tuple[int, ...] | None, options: dict[str, Any]
) -> tuple[nn.Module, list[SkipSite]]:
    """A network and its skips; without a shape none can be traced, and only a known family is recognised."""
    place, image_shape = anchored_factory(factory, Path()), shape or (1, 1, 1)
    model = PythonConfig(kind="python", factory=place, options=options, image_shape=image_shape)  # pyright: ignore
    with torch.random.fork_rng(devices=[]):
        network = build_own(model)
    if shape is None:
        return network, known_family(network)
    inputs = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 500])
    check_output(network, model, inputs)
    return network, find_skips(network, inputs)


# The long skips, found or traced once.


def known_family(network: nn.Module) -> list[SkipSite]:
    try:
        return find_skips(network)
    except ValueError as error:
        raise ValueError(f"{type(network).__name__} is of no known family: give --shape C,H,W to trace it") from error


def note_own(
    model: PythonConfig, before: NetworkConfig | None, inputs: tuple[Tensor, ...], *, needed: bool
) -> dict[str, Any]:
    """What the recipe of a run notes of the network: the digest of its code, and its skips, as it began `before`."""
    digest, noted = model.code_sha256 or code_digest(model), {}
    if model.code_sha256 is None:
        noted["code_sha256"] = digest
    begun = before if isinstance(before, PythonConfig) else None
    if begun is not None and begun.factory == model.factory:
        refuse_other_code(begun, digest)
    if model.skips is None:
        noted["skips"] = note_skips(model, inputs, needed=needed) if begun is None else begun.skips
    return noted


def note_skips(model: PythonConfig, inputs: tuple[Tensor, ...], *, needed: bool) -> Described | None:
    """The skips for the recipe of a run, of a network that is called once; None where none are found, nor needed."""
    key = f"{model.model_dump_json()} {code_digest(model)} {[tuple(tensor.shape) for tensor in inputs]}"
    if noted.get(key) is None:
        with torch.random.fork_rng(devices=[]):
            network = build_own(model)
        check_output(network, model, inputs)
        noted[key] = find_noted(network, model, inputs, needed=needed)
    return noted[key]


def find_noted(
    network: nn.Module, model: PythonConfig, inputs: tuple[Tensor, ...], *, needed: bool
) -> Described | None:
    try:
        found = describe_sites(model.sites or find_skips(network, inputs))
    except ValueError:
        if needed:
            raise
        return None
    return tuple(json.loads(json.dumps(found)))


def check_output(network: nn.Module, model: PythonConfig, inputs: tuple[Tensor, ...]) -> None:
    """Call the network once; raises unless it gives as many numbers as it was given."""
    x, t, *condition = inputs
    with explained(model), unchanged(network), torch.no_grad():
        output = noise_predictor(lambda x, t: network(x, t, *condition))(x, t)
    given, shape = ("×".join(map(str, tensor.shape)) for tensor in (x, output))
    if given != shape:
        raise ValueError(
            f"{model.factory}: the network gives {shape} for images of {given}, and must give as many numbers"
        )


# The weights that training starts from.


def start_digest(model: NetworkConfig) -> str:
    """SHA-256 of the file of weights."""
    try:
        return sha256_of(Path(str(model.weights)))
    except OSError as error:
        raise ValueError(f"model.weights: cannot read {model.weights}: {error.strerror}") from error


def read_start(model: NetworkConfig) -> dict[str, Tensor]:
    """The tensors of that file, which must be the one that was noted."""
    found = start_digest(model)
    if model.weights_sha256 is not None and model.weights_sha256 != found:
        raise ValueError(
            f"{model.weights} is not the file that this run begins with (sha256 {model.weights_sha256[:12]}…, now "
            f"{found[:12]}…): put it back as it was, or begin another run with the new weights"
        )
    try:
        return read_tensors(Path(str(model.weights)))
    except Damaged as damage:
        raise ValueError(f"model.weights: {damage}") from damage


def load_start(network: nn.Module, model: NetworkConfig, weights: Mapping[str, Tensor]) -> nn.Module:
    """The network with these weights, all of them and no others; the same object."""
    theirs, ours = (
        {key: tuple(value.shape) for key, value in tensors.items()} for tensors in (weights, network.state_dict())
    )
    name = next((name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), None)
    if name is not None:
        raise ValueError(
            f"model.weights: {model.weights} is of another network: {name} is {theirs.get(name, 'absent')} there and "
            f"{ours.get(name, 'absent')} here"
        )
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"model.weights: {model.weights}: {error}") from error
    return network
