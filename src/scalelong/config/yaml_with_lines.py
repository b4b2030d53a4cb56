"""YAML with the line of every key, and with the numbers of YAML 1.2: 1e-3 is a float, 010 and yes are text."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import yaml

KeyPath = tuple[str | int, ...]

# Of several that match, the first decides. Underscores may group the digits of whole numbers.
SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
)


class Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


class Dumper(yaml.SafeDumper):
    """Quotes whatever a reader of either YAML, 1.1 or 1.2, would take for something other than text."""


for _tag, _pattern, _first in SCALARS:
    for _side in (Loader, Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


class Marked(NamedTuple):
    """A document, and the line on which each of its keys and items stands, counted from 1."""

    value: Any
    lines: dict[KeyPath, int]


class YamlError(ValueError):
    """Not YAML, or YAML that says one thing twice; `line` is counted from 1."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line


def read_yaml(text: str) -> Marked:
    """One document.

    >>> read_yaml("optim:\\n  lr: 1e-3\\n")
    Marked(value={'optim': {'lr': 0.001}}, lines={('optim',): 1, ('optim', 'lr'): 2})
    """
    lines: dict[KeyPath, int] = {}
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        return Marked(None if node is None else _construct(loader, node, (), lines), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(mark.line + 1 if mark else 1, error.problem or "is not YAML") from error
    except yaml.reader.ReaderError as error:
        raise YamlError(text.count("\n", 0, error.position) + 1, f"is not text: {error.reason}") from error


def write_yaml(value: Any) -> str:
    """A document that `read_yaml` reads back to an equal value; keys keep their order."""
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def _construct(loader: Loader, node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {key: _construct(loader, value, (*path, key), lines) for key, value in _items(loader, node, path, lines)}
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            lines[(*path, number)] = item.start_mark.line + 1
        return [_construct(loader, item, (*path, number), lines) for number, item in enumerate(node.value)]
    return loader.construct_object(node)


def _items(
    loader: Loader, node: yaml.MappingNode, path: KeyPath, lines: dict[KeyPath, int]
) -> list[tuple[str, yaml.Node]]:
    """The keys of a mapping with their values' nodes, once each."""
    items: dict[str, yaml.Node] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        key = loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise YamlError(line, "a key must be text")
        if key in items:
            raise YamlError(line, f"{'.'.join(map(str, (*path, key)))} is already set on line {lines[(*path, key)]}")
        items[key] = value
        lines[(*path, key)] = line
    return list(items.items())
