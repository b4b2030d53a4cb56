"""Build a network of a checkout from a description, with placeholders for packages that it imports but does not use."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def load(description: Any) -> Any:
    """What a description in the list of networks stands for: `{new: module:Class, arguments: …}`, a tensor, or itself.

    Tensors are `normal 2 3 8 8`, `uniform 2`, `ones 2 4`, `complex 2 3 8 8`, and `integers 1000 2` (below 1000).
    """
    if isinstance(description, dict):
        if "new" in description:
            return build(description)
        if "namespace" in description:
            return types.SimpleNamespace(**load(description["namespace"]))
        if "tuple" in description:
            return tuple(load(description["tuple"]))
        if "returns" in description:
            return lambda *_, **__: load(description["returns"])
        return {key: load(value) for key, value in description.items()}
    if isinstance(description, list):
        return [load(item) for item in description]
    return tensor_of(description) if isinstance(description, str) else description


KINDS = ("normal", "uniform", "ones", "complex", "integers")


def tensor_of(text: str) -> Tensor | str:
    kind, *rest = text.split()
    if kind not in KINDS or not rest or not all(size.isdecimal() for size in rest):
        return text
    sizes = [int(size) for size in rest]
    if kind == "integers":
        return torch.randint(sizes[0], sizes[1:])
    if kind == "complex":
        return torch.randn(sizes, dtype=torch.complex64)
    return {"normal": torch.randn, "uniform": torch.rand, "ones": torch.ones}[kind](sizes)


def build(description: dict[str, Any]) -> Any:
    """The object that `{new: module:Class, arguments: list or dict}` describes; `take` names a part of it."""
    module, _, name = description["new"].partition(":")
    made = imported(module)
    for part in name.split("."):
        made = getattr(made, part)
    arguments = load(description.get("arguments", {}))
    if arguments != "as it is":
        made = made(**arguments) if isinstance(arguments, dict) else made(*arguments)
    for part in filter(None, description.get("take", "").split(".")):
        made = made[int(part)] if part.isdecimal() else getattr(made, part)
    return tuple(made) if isinstance(made, list) else made


def imported(name: str) -> Any:
    return importlib.import_module(name)


def with_placeholders(make: Callable[[], Any], own: str) -> Any:
    """What `make` makes; a module that it imports, other than its own, and that is not there gets a placeholder."""
    for _ in range(40):
        try:
            return make()
        except ModuleNotFoundError as error:
            if not error.name or error.name == own or error.name in Placeholders.names:
                raise
            Placeholders.names.append(error.name)
            importlib.invalidate_caches()
    raise ImportError(f"too many packages are missing: {', '.join(Placeholders.names)}")


def set_up(settings: dict[str, Any]) -> None:
    """Give names of modules, `module:name.name`, other values before the network is imported."""
    for target, value in settings.items():
        module, _, names = target.partition(":")
        *holders, name = names.split(".")
        holder = with_placeholders(lambda module=module: imported(module), module)
        for part in holders:
            holder = getattr(holder, part)
        setattr(holder, name, load(value))


class PlaceholderType(type):
    """A class that allows whatever happens to a name while a module is imported: calls, decorators, annotations."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # As a decorator it leaves what it decorates.
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return super().__call__() if cls.__dict__.get("stands_in") else super().__call__(*args, **kwargs)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def placeholder(name: str) -> Any:
    return PlaceholderType(name, (Anything,), {"stands_in": True})


class Anything(metaclass=PlaceholderType):
    stands_in = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class PlaceholderModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = nn.Module if name in ("LightningModule", "ModelMixin") else placeholder(name)
        setattr(self, name, made)
        return made


class Placeholders:
    """Finds the packages that were seen to be missing; last in line, after everything that is installed."""

    names: list[str] = []

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not any(f"{name}.".startswith(f"{missing}.") for missing in cls.names):
            return None
        return importlib.machinery.ModuleSpec(name, cls(), is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__all__"] = []


def folder_of(repository: str, repos: Path) -> Path | None:
    """The checkout: `owner+name`, `owner/name` or `name` below the folder that the user named."""
    owner, _, name = repository.partition("/")
    candidates = (repos / f"{owner}+{name}", repos / owner / name, repos / name)
    return next((folder for folder in candidates if folder.is_dir()), None)


def prepare_imports(folder: Path, paths: list[str]) -> None:
    sys.path[:0] = [str(folder / path) for path in (*paths, ".")]
    sys.meta_path.append(Placeholders)  # type: ignore[arg-type]
