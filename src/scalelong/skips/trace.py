"""Discover the long skips of any model by watching one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from torch import Tensor, nn

from .crossing import describe, long_skips
from .discover import Join
from .entries import Found, call_values, find_entry
from .reading import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    arrives_unchanged,
    find_readings,
    normalised_between,
    only_joined,
    readers_of,
)
from .record import Call, Record, record_forward
from .site import Argument, Entry, Inline, SkipSite, is_norm, number_from_innermost

ExampleInputs = Tensor | Sequence[Any] | Mapping[str, Any]


def trace_skips(model: nn.Module, example_inputs: ExampleInputs) -> list[SkipSite]:
    """The long skips that one forward pass shows, outermost first; empty if there are none.

    `example_inputs` is a tensor, a tuple of positional or a dict of keyword arguments. The model runs in evaluation
    mode without gradients; it and the random state are left as they were. Raises if some of the skips, but not all of
    them, can be scaled.
    """
    record = record_pass(model, example_inputs)
    found = reachable(record, long_skips(record))
    return number_from_innermost([site_of(record, join, *entry) for join, entry in found])


def record_pass(model: nn.Module, example_inputs: ExampleInputs) -> Record:
    if not isinstance(example_inputs, (Tensor, tuple, list, Mapping)):
        raise ValueError(
            f"example_inputs is a {type(example_inputs).__name__}. "
            "Pass a tensor, a tuple of positional arguments or a dict of keyword arguments."
        )
    args = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    by_name = isinstance(example_inputs, Mapping)
    return record_forward(model, () if by_name else args, example_inputs if by_name else {})


def refuse_uncalled(model: nn.Module, sites: Sequence[SkipSite], example_inputs: ExampleInputs) -> None:
    """Raise if a forward pass never calls a module through which a skip should enter, where no hook would run."""
    called = {call.module for call in record_pass(model, example_inputs).calls}
    for site in sites:
        if model.get_submodule(site.consumer) not in called:
            raise ValueError(
                f"skip {site.index} should enter {site.consumer!r}, but a forward pass never calls that module. "
                "Pass sites=[SkipSite(...)] with the module that is called instead; see docs/models.md."
            )


def reachable(record: Record, joins: list[Join]) -> list[tuple[Join, Found]]:
    """The joins with where a hook reaches their skips, once for those that are reached there together."""
    places: dict[tuple[nn.Module, Any], tuple[Join, Found]] = {}
    for join in joins:
        if any(is_scaled_with(record, join, *found) for _, found in places.values()):
            continue
        call, entry = find_entry(record, join)
        places.setdefault((call.module, entry), (join, (call, entry)))
    found = list(places.values())
    refuse_branches(record, [join for join, _ in found])
    return found


def is_scaled_with(record: Record, join: Join, call: Call, entry: Entry) -> bool:
    """Whether what is joined was made, inside the call, of the argument that is scaled there."""
    if not isinstance(entry, Argument) or not call.start <= join.result < call.end:
        return False
    value = call_values(call)[entry]
    return join.skip == value or next(record.way_between(value, join.skip), -1) >= call.start


def refuse_branches(record: Record, joins: list[Join]) -> None:
    """Raise if the skips do not lie around one another, or if one tensor is joined with others in between."""
    for inner, outer in pairwise(joins):
        if inner.result != outer.result and not record.depends(outer.trunk, on=inner.result):
            raise ValueError(
                "two long skips do not lie around one another, as in networks side by side: "
                f"{describe(record, inner)}, and {describe(record, outer)}. "
                "Say which to scale by sites=[SkipSite(...)]; see docs/models.md."
            )
    last: dict[int, int] = {}
    for number, join in enumerate(joins):
        if last.get(join.source, number - 1) != number - 1 or joined_at_once(joins, join):
            times = sum(other.source == join.source for other in joins)
            raise ValueError(
                f"one tensor is joined {times} times past the bottleneck, last by {describe(record, join)}: it is no "
                "skip of one level. Say which joins to scale by sites=[SkipSite(...)]; see docs/models.md."
            )
        last[join.source] = number


def joined_at_once(joins: list[Join], join: Join) -> bool:
    return sum((other.source, other.result) == (join.source, join.result) for other in joins) > 1


def site_of(record: Record, join: Join, consumer: Any, entry: Any) -> dict[str, Any]:
    """Fields of the join's `SkipSite`, without its index."""
    paths = record.paths()
    value = call_values(consumer)[entry] if isinstance(entry, Argument) else join.skip
    reading = find_readings(record, join)
    unchanged = arrives_unchanged(record, value, join)
    alone = not isinstance(entry, Argument) or only_joined(record, consumer, value, join)
    readers = readers_of(record, join, reading) if unchanged and alone else []
    # What joins inline may pass the result to a module that it also calls with others.
    if isinstance(entry, Inline) and any(call.module in readers and call not in reading for call in record.calls):
        readers = []
    joined = join.channels if unchanged else None
    last = channels_last(record, value) if joined is None else None
    return {
        "consumer": paths[consumer.module],
        "entry": entry,
        "width": record.values[value].shape[1],
        "absorbed": any(is_norm(call.module) for call in reading) or normalised_between(record, value, join.skip),
        "readers": tuple(paths[reader] for reader in readers),
        "joined": joined,
        "last": last,
        "varies": (last is not None or (joined is not None and joined.dim == -1)) and varies(record, value),
        "factor": factor_of(record, join),
    }


def channels_last(record: Record, value: int) -> int | None:
    """The size of the last dimension, if the layers that read features of this shape have their channels there."""
    shape, first, last = record.values[value].shape, 0, 0
    for call in record.calls:
        if any(record.values[given.value].shape == shape for given in call.given):
            first, last = first + isinstance(call.module, CHANNELS_FIRST), last + isinstance(call.module, CHANNELS_LAST)
    return shape[-1] if last > first and len(shape) > 2 else None


def varies(record: Record, value: int) -> bool:
    """Whether nothing in the model has one row for each of the skip's tokens, as learned positions do."""
    shape = record.values[value].shape
    held = (*record.model.parameters(), *record.model.buffers())
    return len(shape) != 3 or all(tensor.shape[-2:] != shape[-2:] for tensor in held)


def factor_of(record: Record, join: Join) -> float:
    """The product of the numbers that the skip alone is multiplied by before the join; 1 if the trunk is, too."""
    steps = list(record.way_between(join.source, join.skip))
    if record.values[join.trunk].factor is not None:
        return 1.0
    return prod((factor for n in steps if (factor := record.values[n].factor) is not None), start=1.0)
