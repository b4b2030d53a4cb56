"""All joins that reach past the bottleneck: each of them is a long skip, or named as what it is instead."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from math import prod

from .chains import Chain, best_chain, is_smaller, nested_joins
from .discover import Join, all_joins, joined_with_itself
from .record import Record

PRODUCTS = ("convolution", "mm", "addmm", "bmm", "baddbmm")

logger = logging.getLogger(__name__)


def long_skips(record: Record) -> list[Join]:
    """The long skips of a forward pass, innermost first: every join that reaches past the bottleneck, or none at all.

    Left out are joins of the raw input, and one residual sum around the whole network.
    """
    used = [join for join in all_joins(record) if record.is_used(join.result)]
    joins = [join for join in used if not is_raw_input(record, join)]
    chain = nested_joins(record, joins)
    if not chain:
        return []
    past = [join for join in joins if join in chain or reaches_past(record, join, chain[0])]
    again = [join for join in used if join not in joins and reaches_past(record, join, chain[0])]
    if len(again) > 1:
        logger.warning("the raw input is joined %d times and not scaled: %s", len(again), describe_all(record, again))
    found = [join for join in past if not is_residual_around(record, join, past, chain)]
    found = sorted([*found, *met_in_the_middle(record, found, chain[0])], key=lambda join: (join.result, -join.origin))
    refuse_second_network(record, joins, found, chain)
    refuse_web(record, joins, found)
    return found


def reaches_past(record: Record, join: Join, innermost: Join) -> bool:
    """Whether the skip was made before the innermost one's trunk, and meets what was made of that trunk."""
    before = record.depends(innermost.origin, on=join.origin) and not record.depends(join.skip, on=innermost.trunk)
    return before and record.depends(join.trunk, on=innermost.trunk)


def is_raw_input(record: Record, join: Join) -> bool:
    """Whether the skip is an input of the model, at most resized, or a sum with what was made of the input."""
    if is_learned(record, record.lineage(join.origin)):
        return False
    return join.channels is None or not is_learned(record, record.lineage(join.skip))


def is_learned(record: Record, values: int) -> bool:
    """Whether one of the values, a bit mask, comes out of a layer that multiplies by weights."""
    return any(values >> n & 1 and value.operation in PRODUCTS for n, value in enumerate(record.values))


def is_residual_around(record: Record, join: Join, others: list[Join], chain: Chain) -> bool:
    """Whether the join is a sum around everything, beside the skips: x + net(x) of the first features."""
    rest = [other for other in others if other is not join]
    if join in chain or join.channels is not None:
        return False
    if not all(record.depends(join.trunk, on=other.result) for other in rest):
        return False
    positions = record.values[join.result].shape[2:]
    level_has_one = any(record.values[other.result].shape[2:] == positions for other in rest)
    outside = join.scope is not chain[-1].scope and join.scope in chain[-1].scope.outward()
    return outside or level_has_one


def met_in_the_middle(record: Record, found: list[Join], innermost: Join) -> Iterator[Join]:
    """The skip that is joined with itself, where the network has no middle: its siblings say which part it is."""
    if len({(join.channels is None, join.part, len(record.values[join.result].parts)) for join in found}) > 1:
        return
    for join in joined_with_itself(record, innermost):
        if record.depends(innermost.trunk, on=join.result) and record.depends(join.origin, on=innermost.origin):
            yield join


def refuse_second_network(record: Record, joins: list[Join], found: list[Join], chain: Chain) -> None:
    """Raise if there is another chain of skips, in no part of the network that has those which were found."""
    calls = {record.call_of(join.result) for join in found}
    # A second pass through the same modules is scaled like the first.
    modules = {call.module for call in calls}
    others = [join for join in joins if join not in found]
    others = [join for join in others if chain[-1].scope not in list(join.scope.outward())[1:]]
    others = [join for join in others if (call := record.call_of(join.result)) in calls or call.module not in modules]
    same_kind = [join for join in others if (join.channels is None) == (chain[-1].channels is None)]
    second = best_chain(record, same_kind, at_least=2)
    # One concatenation of what several decoder blocks put out is no network.
    if len({join.result for join in second}) > 1:
        raise ValueError(
            f"there are two networks with long skips: one with {describe_all(record, chain)}, another with "
            f"{describe_all(record, second)}. Scale each by itself, or say which skips by sites=[SkipSite(...)]."
        )


def refuse_web(record: Record, joins: list[Join], found: list[Join]) -> None:
    """Raise if levels are woven into one another: by skips through other levels, or in one join of several levels."""
    middle = bottom(record, found[0])
    others = [join for join in joins if join not in found and join.channels is not None]
    past = [
        join for join in others if record.depends(join.trunk, on=middle) and not record.depends(join.skip, on=middle)
    ]
    sizes = {record.values[join.origin].shape[2:] for join in found}
    if len(found) > 1 and len(sizes) > 1 and len({join.result for join in found}) == 1:
        past += found
    if past:
        raise ValueError(
            f"long skips of several levels are woven into one another: {describe_all(record, past)}. "
            "They have no order from outermost to innermost. "
            "Say which to scale by sites=[SkipSite(...)]; see docs/models.md."
        )


def bottom(record: Record, innermost: Join) -> int:
    """The last value of the lowest resolution on the way around the innermost skip."""
    way = [*record.way_between(innermost.origin, innermost.trunk), innermost.trunk]
    lower = [n for n in way if is_smaller(record, n, innermost.trunk)] or [innermost.trunk]
    return min(lower, key=lambda n: (prod(record.values[n].shape[2:]), -n))


def describe_all(record: Record, joins: Sequence[Join]) -> str:
    return ", ".join(describe(record, join) for join in joins)


def describe(record: Record, join: Join) -> str:
    """Where the join is made, in words."""
    kind, shape = "sum" if join.channels is None else "concatenation", tuple(record.values[join.skip].shape)
    return f"a {kind} of {shape} in {record.describe(record.call_of(join.result).module)}"
