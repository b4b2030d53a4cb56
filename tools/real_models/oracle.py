"""What scaling must compute, from joins that are named by hand in words of the network's own source.

Nothing here knows how scalelong finds or scales skips. A join such as `UNetModel.forward cat[1]` says: in the method
`forward` of the class `UNetModel`, part 1 of a call of `cat` is a skip. While the oracle runs, those methods are
compiled again with the part wrapped in a function that multiplies it, on a network of its own.

    Class.method cat[1]           part 1 of what every call of `cat` in the method joins
    Class.method cat#2[0]         part 0 of the third call of it, in the order of the source
    Class.method add[1]           the right side of `+` or `+=`; [0] is the left side
    Class.method block[skip]      the keyword `skip` of a call of `block`; an unpacked tuple counts as one part
    Class.method value h          what is assigned to the variable `h`; `value h#1` the second time it is written
    mp_cat cat[1]                 in a function of the module, not in a method
    … at ups.0                    only where the method's module has this path (a regular expression)
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

MARK = "__scaled_skip__"
FORM = re.compile(
    r"(?:(?P<owner>\w+)\.)?(?P<method>\w+) (?:value (?P<variable>\w+)|(?P<call>\w+))"
    r"(?:#(?P<which>\d+))?(?:\[(?P<part>\w+)\])?(?: at (?P<path>\S+))?"
)


@dataclass(frozen=True)
class Join:
    """One place of the source at which a skip is joined."""

    owner: str | None
    method: str
    call: str | None
    variable: str | None
    which: int | None
    part: int | str | None
    path: str | None

    @classmethod
    def read(cls, text: str) -> Join:
        match = FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"a join reads like 'UNetModel.forward cat[1]', not {text!r}")
        found = match.groupdict()
        part, which = found["part"], found["which"]
        number = int(part) if part is not None and part.isdecimal() else part
        return cls(**found | {"part": number, "which": None if which is None else int(which)})


Holder = type | types.ModuleType
Scale = Callable[[int, Tensor], Tensor]
"""What becomes of the skip of the n-th join of a forward pass, counted from 0."""


@contextmanager
def scaled_at(network: nn.Module, joins: Sequence[Join], scale: Scale) -> Iterator[list[Tensor]]:
    """The network with `scale` applied at every join; yields the skips that were joined, in order."""
    paths = {module: path for path, module in network.named_modules()}
    skips: list[Tensor] = []

    def mark(value: Any, path: str | None, *where: Any) -> Any:
        own = paths.get(where[0]) if where else None
        if path is not None and (own is None or re.fullmatch(path, own) is None):
            return value
        if not isinstance(value, Tensor):
            return value
        skips.append(value)
        return scale(len(skips) - 1, value)

    before: list[tuple[Holder, str, Any]] = []
    try:
        for owner, method in {(join.owner, join.method): None for join in joins}:
            chosen = [join for join in joins if (join.owner, join.method) == (owner, method)]
            holders = classes_with(network, owner, method) if owner else modules_with(network, method)
            if not holders:
                raise ValueError(f"the network has nothing that is called {owner or ''}.{method}")
            for holder in holders:
                before.append((holder, method, vars(holder)[method]))
                setattr(holder, method, rewritten(vars(holder)[method], chosen, mark))
        yield skips
    finally:
        for holder, method, function in before:
            setattr(holder, method, function)


def classes_with(network: nn.Module, owner: str, method: str) -> list[Holder]:
    """The classes of this name in the network that define the method themselves."""
    kinds = {kind: None for module in network.modules() for kind in type(module).__mro__}
    return [kind for kind in kinds if kind.__name__ == owner and method in vars(kind)]


def modules_with(network: nn.Module, function: str) -> list[Holder]:
    """The Python modules of the network's classes in which this function can be called by its name."""
    kinds = {kind for module in network.modules() for kind in type(module).__mro__}
    modules = {kind.__module__: sys.modules.get(kind.__module__) for kind in kinds}
    return [module for module in modules.values() if module is not None and callable(vars(module).get(function))]


def rewritten(function: Any, joins: Sequence[Join], mark: Callable[..., Any]) -> Any:
    """The function compiled again with the joins' parts handed through `mark`."""
    plain = inspect.unwrap(function)
    definition = definition_of(inspect.getsource(plain))
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    owner = definition.args.args[0].arg if definition.args.args else None
    for join in joins:
        mark_parts(definition, join, owner)
    free = plain.__code__.co_freevars
    outer = ast.parse(f"def factory({', '.join((*free, MARK))}):\n    return None").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [definition, ast.Return(ast.Name(definition.name, ast.Load()))]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    scope: dict[str, Any] = {}
    exec(compile(module, inspect.getfile(plain), "exec"), plain.__globals__, scope)
    made = scope["factory"](*(cell.cell_contents for cell in plain.__closure__ or ()), mark)
    cells = dict(zip(free, plain.__closure__ or (), strict=True))
    own = dict(zip(made.__code__.co_freevars, made.__closure__ or (), strict=True))
    closure = tuple(cells.get(name, own[name]) for name in made.__code__.co_freevars)
    result = types.FunctionType(made.__code__, plain.__globals__, plain.__name__, plain.__defaults__, closure)
    result.__kwdefaults__ = plain.__kwdefaults__
    return result


def definition_of(source: str) -> ast.stmt:
    if not source[0].isspace():
        return ast.parse(source).body[0]
    block = ast.parse(f"if True:\n{source}").body[0]
    assert isinstance(block, ast.If)
    return block.body[0]


def mark_parts(definition: ast.FunctionDef, join: Join, owner: str | None) -> None:
    places = [node for node in ast.walk(definition) if is_place(node, join)]
    places.sort(key=lambda node: (node.lineno, node.col_offset))
    if join.which is not None:
        places = places[join.which : join.which + 1]
    if not places:
        raise ValueError(f"{join.owner}.{join.method} has no such join: {join}")
    arguments = [ast.Constant(join.path), *([ast.Name(owner, ast.Load())] if owner else [])]
    for node in places:
        holder, key = part_of(node, join)
        value = holder[key] if isinstance(holder, list) else getattr(holder, key)
        call = ast.Call(ast.Name(MARK, ast.Load()), [value, *arguments], [])
        if isinstance(holder, list):
            holder[key] = call
        else:
            setattr(holder, key, call)


def is_place(node: ast.AST, join: Join) -> Any:
    if join.variable is not None:
        return isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == join.variable for target in node.targets
        )
    if join.call == "add":
        return isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Add)
    return isinstance(node, ast.Call) and called(node) == join.call


def called(node: ast.Call) -> str | None:
    """The last name of what is called: `cat` of `torch.cat`, `mix` of `self.mix[i]`."""
    function = node.func
    while isinstance(function, ast.Subscript):
        function = function.value
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def part_of(node: Any, join: Join) -> tuple[Any, Any]:
    """Where the part stands: a list and an index, or a node and a field."""
    if join.variable is not None:
        return node, "value"
    if isinstance(node, ast.BinOp):
        return node, "right" if join.part == 1 else "left"
    if isinstance(node, ast.AugAssign):
        return node, "value"
    if isinstance(join.part, str):
        return next(keyword for keyword in node.keywords if keyword.arg == join.part), "value"
    first = node.args[0] if node.args else None
    parts = first.elts if isinstance(first, (ast.List, ast.Tuple)) else node.args
    return parts, join.part
