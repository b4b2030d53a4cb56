"""Tell the long skips among all joins of a recorded forward pass: those that are nested around the bottleneck."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import inf, prod
from operator import and_

from .record import Call, Record
from .site import Channels


@dataclass(frozen=True)
class Join:
    """Where a value meets a later one that was made from the same origin, the latest that both were made from.

    `scope` is the innermost call around the join that contains the trunk's whole way from the origin: a residual block
    for its own sum, the UNet for a long skip.
    """

    origin: int
    skip: int
    trunk: int
    result: int
    channels: Channels | None
    scope: Call


Chain = tuple[Join, ...]
"""Joins that enclose each other, innermost first."""


def long_skips(record: Record) -> Chain:
    """The joins that are long skips, innermost first: concatenations if there are any, else sums; else empty."""
    joins = list(all_joins(record))
    concatenations = drop_reused(record, [join for join in joins if join.channels is not None])
    # x + net(x) corrects the input; it leads past the first encoder block, too.
    sums = [join for join in joins if join.channels is None and join.origin != main_input(record)]
    return best_chain(record, concatenations, at_least=1) or best_chain(record, sums, at_least=2)


def all_joins(record: Record) -> Iterator[Join]:
    for result, value in enumerate(record.values):
        if len(value.parts) < 2:
            continue
        parts = [part.value for part in value.parts]
        shared = reduce(and_, map(record.lineage, parts))
        trunk = max(parts, key=lambda part: trunk_likeness(record, part, shared))
        for part in value.parts:
            origin = latest_common(record, part.value, trunk)
            if part.value != trunk and origin is not None:
                first = next(record.way_between(origin, trunk))
                scope = next(outer for outer in record.call_of(result).outward() if outer.start <= first)
                yield Join(origin, part.value, trunk, result, part.channels, scope)


def trunk_likeness(record: Record, part: int, shared: int) -> tuple[float, int]:
    """How much a part looks like the trunk: it came through the lowest resolution, else more has happened to it.

    `shared` is what all parts were made from. A skip may be projected, gated or refined on its way, but keeps its size.
    """
    lineage, dims = record.lineage(part), len(record.values[part].shape)
    own = (record.values[n].shape for n in range(part + 1) if (lineage & ~shared) >> n & 1)
    sizes = [prod(shape[2:]) for shape in own if len(shape) == dims > 3 and prod(shape[2:]) > 1]
    return -min(sizes, default=inf), lineage.bit_count()


def latest_common(record: Record, skip: int, trunk: int) -> int | None:
    """The latest value that both were made from and that carries the model's main input."""
    common, main = record.lineage(skip) & record.lineage(trunk), main_input(record)
    # Skip and trunk may share an embedding of the time or a text as well; that is not what was skipped.
    shared = (n for n in reversed(range(common.bit_length())) if common >> n & 1 and record.depends(n, on=main))
    return next(shared, None)


def main_input(record: Record) -> int:
    """The input that is denoised, not a condition: the first of those that look most like the output."""

    def likeness(number: int) -> tuple[bool, int, int]:
        shape = record.values[number].shape
        equal = sum(size == other for size, other in zip(shape[::-1], record.output[::-1], strict=False))
        return len(shape) == len(record.output), len(shape), equal

    return max((n for n, value in enumerate(record.values) if value.operation == "input"), key=likeness)


def drop_reused(record: Record, joins: list[Join]) -> list[Join]:
    """Without origins that are joined again and again, as in a DenseNet; repeating the same block is no new join."""
    places: dict[tuple[Call, int], dict[int, Call]] = defaultdict(dict)
    for join in joins:
        places[join.scope, join.origin][join.result] = record.call_of(join.result)

    def joined_once(join: Join) -> bool:
        calls = places[join.scope, join.origin].values()
        return len({call.module for call in calls}) == 1 and len(set(calls)) == len(calls)

    return [join for join in joins if joined_once(join)]


def best_chain(record: Record, joins: list[Join], at_least: int) -> Chain:
    """The chain of the outermost module that has one of two or more joins; else one that stands alone."""

    def rank(chain: Chain) -> tuple[bool, int, int, int]:
        depth = len(list(chain[-1].scope.outward()))
        return len(chain) > 1, -depth, *size(chain)

    # For each join the longest chain that it encloses, itself included.
    chains: list[Chain] = []
    for outer in sorted(joins, key=lambda join: (join.result, -join.origin)):
        inner = (chain for chain in chains if encloses(record, outer, chain[-1]))
        chains.append((*max(inner, key=size, default=()), outer))
    long = (chain for chain in chains if len(chain) >= at_least and spans_the_model(record, chain))
    return max(long, key=rank, default=())


def size(chain: Chain) -> tuple[int, int]:
    return len(chain), sum(join.result - join.origin for join in chain)


def encloses(record: Record, outer: Join, inner: Join) -> bool:
    """Whether the inner skip starts after the outer one on the same trunk, and is joined before it."""
    if outer.origin == inner.origin or not record.depends(inner.origin, on=outer.origin):
        return False
    if outer.result != inner.result and not record.depends(outer.trunk, on=inner.result):
        return False
    # The join of a block inside the outer skip's trunk, such as a residual sum, is over when that block returns.
    if inner.scope.start <= outer.result < inner.scope.end:
        return True
    recursive = outer.channels is not None and type(outer.scope.module) is type(inner.scope.module)
    return recursive and outer.scope.start <= inner.scope.start


def spans_the_model(record: Record, chain: Chain) -> bool:
    """Whether the outermost skip goes past most of the modules, or at least past a part of lower resolution."""
    outermost = chain[-1]
    leaves = [call for call in record.calls if not any(call.module.children())]
    passed = sum(outermost.origin < call.start <= outermost.result for call in leaves)
    if 2 * passed > len(leaves):
        return True
    return (len(chain) > 1 or 4 * passed > len(leaves)) and dips(record, outermost)


def dips(record: Record, join: Join) -> bool:
    """Whether the trunk had fewer positions on its way than it has at the join."""
    shape = record.values[join.result].shape
    last = join.channels is not None and join.channels.dim == -1
    place = slice(1, -1) if last else slice(2, None)
    way = (record.values[n].shape for n in record.way_between(join.origin, join.trunk))
    return any(len(seen) == len(shape) and prod(seen[place]) < prod(shape[place]) for seen in way)
