"""Where a hook can reach a skip: an argument of a module, channels of one, or the join in a module's own forward."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .discover import Join
from .reading import COPIES, copies_of, receivers_of
from .record import Call, Record, Value
from .site import Argument, Channels, Entry, Inline, as_argument

Found = tuple[Call, Entry]


def find_entry(record: Record, join: Join) -> Found:
    """The call through which the skip can be reached by a static hook, and where in its input."""
    entries = [*argument_entries(record, join, {join.skip}), *channel_entries(record, join)]
    # A skip that was cropped or projected next to the join can be scaled before that.
    entries += argument_entries(record, join, {join.origin, *record.way_between(join.origin, join.skip)})
    entries += inline_entries(record, join)
    for call, entry in entries:
        if len(entering(record, call.module, entry)) == 1:
            return call, entry
    raise out_of_reach(record, join, entries)


def entering(record: Record, module: nn.Module, entry: Entry) -> set[int | None]:
    """The values that enter the module there in its calls; None for a call without that argument."""
    if isinstance(entry, Inline):
        return {value.place.parts[entry.part] for value in record.values if value.place and meets(value, module, entry)}
    argument = as_argument(module, 0) if isinstance(entry, Channels) else entry
    return {call_values(call).get(argument) for call in record.calls if call.module is module}


def call_values(call: Call) -> dict[Argument, int]:
    return {as_argument(call.module, given.key, given.item): given.value for given in call.given}


def argument_entries(record: Record, join: Join, wanted: set[int]) -> Iterator[Found]:
    """Calls around the join that received one of the wanted values, innermost first."""
    for outer in record.call_of(join.result).outward():
        for given in outer.given:
            # Where the trunk starts from the same argument, scaling it would scale the trunk as well.
            if given.value in wanted and not feeds(record, given.value, join.trunk, outer):
                yield outer, as_argument(outer.module, given.key, given.item)


def feeds(record: Record, value: int, target: int, call: Call) -> bool:
    """Whether `target` was made from `value` by operations inside the call."""
    lineage = record.lineage(target)
    made_inside = (n for n in range(call.start, target + 1) if lineage >> n & 1)
    return target == value or any(value in record.values[n].inputs for n in made_inside)


def channel_entries(record: Record, join: Join) -> Iterator[Found]:
    """The call that alone receives the concatenated features, as its first argument."""
    features = copies_of(record, join.result, COPIES)
    receiver, *others = receivers_of(record, features) or [None]
    if join.channels is None or receiver is None or others:
        return
    if call_values(receiver).get(as_argument(receiver.module, 0)) in features:
        yield receiver, join.channels


def inline_entries(record: Record, join: Join) -> Iterator[Found]:
    """The join itself, in the forward of the module that makes it."""
    value, call = record.values[join.result], record.call_of(join.result)
    if value.place is None:
        return
    kind, ndim = value.place.key
    # The function may cast what it joins.
    if value.place.parts[join.part] in {join.skip, join.source, *record.way_between(join.source, join.skip)}:
        yield call, Inline(kind, join.part, value.place.number, call.joins[kind, ndim], ndim)


def meets(value: Value, module: nn.Module, entry: Inline) -> bool:
    """Whether the value was made by that join of the module's forward."""
    place, call = value.place, value.call
    if place is None or call is None or call.module is not module:
        return False
    return place.key == (entry.kind, entry.ndim) and place.number == entry.number


def out_of_reach(record: Record, join: Join, entries: list[Found]) -> ValueError:
    """An error that says why no hook reaches the skip, or why it cannot be at one of these entries."""
    if entries:
        consumer, entry = entries[0]
        times = sum(call.module is consumer.module for call in record.calls)
        return ValueError(
            f"a long skip enters {record.describe(consumer.module)} through {entry}, but that module is called "
            f"{times} times in one forward pass with different inputs, which one hook cannot tell apart. "
            "Give every join a module of its own, or scale the part that runs once."
        )
    place = record.describe(record.call_of(join.result).module)
    receivers = receivers_of(record, copies_of(record, join.result, COPIES))
    modules = [record.describe(call.module) for call in receivers if call is not None]
    if join.channels is None:
        reason = "adds a long skip inline, and a part of a sum cannot be scaled afterwards"
    elif None in receivers or not receivers:
        reason = "concatenates a long skip inline and reads the result with an operation, not with a module"
    elif len(modules) > 1:
        reason = f"concatenates a long skip inline and {len(modules)} modules read the result: {', '.join(modules)}"
    else:
        reason = "concatenates a long skip inline and does not pass the result as a module's first argument"
    return ValueError(
        f"{place} {reason}. Move the join into a module that receives the skip as an argument, as in "
        "`x = self.decoder[i](x, skip)`, or pass sites=[SkipSite(...)]; see docs/models.md."
    )
