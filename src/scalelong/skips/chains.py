"""Joins that are nested around a common middle: the chains among which the long skips are."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod

from torch import nn

from .discover import Join, main_input
from .record import Call, Record

Chain = tuple[Join, ...]
"""Joins that enclose each other, innermost first."""


def nested_joins(record: Record, joins: list[Join]) -> Chain:
    """A chain of long skips: concatenations if there are any, with the sums inside of them, else sums; else empty."""
    concatenations = drop_reused(record, [join for join in joins if join.channels is not None])
    # x + net(x) corrects the input; it leads past the first encoder block, too.
    sums = [join for join in joins if join.channels is None and join.origin != main_input(record)]
    chain = best_chain(record, concatenations, at_least=1)
    if not chain:
        return best_chain(record, sums, at_least=2)
    # A sum within the innermost skip's trunk may be that of a residual block, unless the trunk goes down and up in it.
    inner = [join for join in sums if encloses(record, chain[0], join) and goes_down(record, join)]
    chain = longest_chain(record, inner) + chain
    return (*twins_of(record, concatenations, chain[0]), *chain)


def twins_of(record: Record, joins: list[Join], innermost: Join) -> list[Join]:
    """The earlier join of the tensor that the innermost one joins, if it was put twice onto the stack of skips."""
    earlier = (join for join in joins if join.source == innermost.source and join.result != innermost.result)
    return [join for join in earlier if record.depends(innermost.trunk, on=join.result)]


def drop_reused(record: Record, joins: list[Join]) -> list[Join]:
    """Without tensors that are joined again and again, as in a DenseNet; repeating the same block is no new join."""
    places: dict[tuple[Call, int], dict[int, Join]] = defaultdict(dict)
    skips = Counter(join.result for join in joins)
    for join in joins:
        places[join.scope, join.source][join.result] = join

    def joined_once(join: Join) -> bool:
        again = list(places[join.scope, join.source].values())
        calls = [record.call_of(other.result) for other in again]
        if len({call.module for call in calls}) == 1 and len(set(calls)) == len(calls):
            return True
        # A tensor that was put twice onto a stack of skips, since nothing came in between.
        return len(again) == 2 and all(skips[other.result] == 1 for other in again)

    return [join for join in joins if joined_once(join)]


def best_chain(record: Record, joins: list[Join], at_least: int) -> Chain:
    """The chain of the outermost module that has one of two or more joins; else one that stands alone."""

    def rank(chain: Chain) -> tuple[bool, int, int, int]:
        depth = len(list(chain[-1].scope.outward()))
        return len(chain) > 1, -depth, *size(chain)

    chains = chains_of(record, joins)
    long = (chain for chain in chains if len(chain) >= at_least and spans_the_model(record, chain))
    return max(long, key=rank, default=())


def longest_chain(record: Record, joins: list[Join]) -> Chain:
    return max(chains_of(record, joins), key=size, default=())


def chains_of(record: Record, joins: list[Join]) -> list[Chain]:
    """For each join the longest chain that it encloses, itself included."""
    chains: list[Chain] = []
    for outer in sorted(joins, key=lambda join: (join.result, -join.origin)):
        inner = (chain for chain in chains if encloses(record, outer, chain[-1]))
        chains.append((*max(inner, key=size, default=()), outer))
    return chains


def size(chain: Chain) -> tuple[int, int]:
    return len(chain), sum(join.result - join.origin for join in chain)


def encloses(record: Record, outer: Join, inner: Join) -> bool:
    """Whether the inner skip starts after the outer one on the same trunk, and is joined before it."""
    if not starts_before(record, outer, inner):
        return False
    if outer.result != inner.result and not record.depends(outer.trunk, on=inner.result):
        return False
    # The join of a block inside the outer skip's trunk, such as a residual sum, is over when that block returns.
    if inner.scope.start <= outer.result < inner.scope.end:
        return True
    recursive = type(outer.scope.module) is type(inner.scope.module) and outer.scope.start <= inner.scope.start
    # Residual sums of residual sums are as deep, but do not go down at each level.
    return recursive and (outer.channels is not None or is_smaller(record, inner.result, outer.result))


def starts_before(record: Record, outer: Join, inner: Join) -> bool:
    if not record.depends(inner.origin, on=outer.origin):
        return False
    if outer.origin != inner.origin:
        return True
    # Nested skips that are made from shallower and deeper features have the deepest of them as their origin.
    both = outer.channels is not None and inner.channels is not None
    return both and outer.result != inner.result and outer.source != inner.source


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


def goes_down(record: Record, join: Join) -> bool:
    """Whether layers with weights work on the trunk at a lower resolution, which attention's own shapes are not."""
    way = set(record.way_between(join.origin, join.trunk))
    layers = (call for call in record.calls if has_weights(call.module))
    seen = {given.value for layer in layers for given in layer.given}
    return any(is_smaller(record, number, join.result) for number in seen & way)


def has_weights(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def is_smaller(record: Record, number: int, than: int) -> bool:
    """Whether a value has fewer positions than another, with as many dimensions; a single one is a pooled value."""
    shape, other = record.values[number].shape, record.values[than].shape
    return len(shape) == len(other) > 2 and 1 < prod(shape[2:]) < prod(other[2:])
