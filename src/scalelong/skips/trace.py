"""Discover the long skips of any model by watching one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .discover import Join, long_skips
from .record import Call, Record, Value, record_forward
from .site import (
    LINEAR,
    Argument,
    Channels,
    Entry,
    Inline,
    SkipSite,
    as_argument,
    is_norm,
    number_from_innermost,
    runs_as,
)

COPIES = ("clone", "_to_copy", "mul", "div")
CROPS = (*COPIES, "slice", "alias")
LAYOUTS = (*COPIES, "permute", "transpose")
# The layers whose channels are the last dimension, and those that have them behind the batch.
CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
CHANNELS_FIRST = (*LINEAR[1:], nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

ExampleInputs = Tensor | Sequence[Any] | Mapping[str, Any]
Found = tuple[Call, Entry]


def trace_skips(model: nn.Module, example_inputs: ExampleInputs) -> list[SkipSite]:
    """The long skips that one forward pass shows, outermost first; empty if there are none.

    `example_inputs` is a tensor, a tuple of positional or a dict of keyword arguments. The model runs in evaluation
    mode without gradients; it and the random state are left as they were.
    """
    if not isinstance(example_inputs, (Tensor, tuple, list, Mapping)):
        raise ValueError(
            f"example_inputs is a {type(example_inputs).__name__}. "
            "Pass a tensor, a tuple of positional arguments or a dict of keyword arguments."
        )
    args = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    by_name = isinstance(example_inputs, Mapping)
    record = record_forward(model, () if by_name else args, example_inputs if by_name else {})
    return number_from_innermost([site_of(record, join) for join in long_skips(record)])


def site_of(record: Record, join: Join) -> dict[str, Any]:
    """Fields of the join's `SkipSite`, without its index."""
    paths = record.paths()
    consumer, entry = find_entry(record, join)
    value = call_values(consumer)[entry] if isinstance(entry, Argument) else join.skip
    reading = find_readings(record, join)
    unchanged = arrives_unchanged(record, value, join)
    alone = not isinstance(entry, Argument) or only_joined(record, consumer, value, join)
    readers = readers_of(record, join, reading) if unchanged and alone else []
    return {
        "consumer": paths[consumer.module],
        "entry": entry,
        "width": record.values[value].shape[1],
        "absorbed": any(is_norm(call.module) for call in reading) or normalised_between(record, value, join.skip),
        "readers": tuple(paths[reader] for reader in readers),
        "joined": join.channels if unchanged else None,
    }


def arrives_unchanged(record: Record, value: int, join: Join) -> bool:
    """Whether what enters is what is concatenated, at most cropped, cast or multiplied by a constant on its way."""
    if join.channels is None:
        return False
    dim, way = join.channels.dim, [record.values[n] for n in record.way_between(value, join.skip)]
    plain = all(step.operation in CROPS and len(step.inputs) == 1 for step in way)
    return plain and all(step.shape[dim] == record.values[value].shape[dim] for step in way)


def only_joined(record: Record, consumer: Call, value: int, join: Join) -> bool:
    """Whether nothing in the consumer's call reads what enters there beside the join, so that its readers are all."""
    way = {value, *record.way_between(value, join.skip)}
    inside = range(consumer.start, consumer.end)
    return all(n in way or n == join.result or way.isdisjoint(record.values[n].inputs) for n in inside)


def normalised_between(record: Record, value: int, later: int) -> bool:
    """Whether a norm received the value, or what was made of it, on the way to the later one."""
    way = {value, *record.way_between(value, later)}
    calls = {call for n in way - {value} for call in record.call_of(n).outward()}
    return any(normalises(call.module) and call.received(way) for call in calls)


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
    copies = [n for n in (join.skip, *reversed(list(record.way_between(join.origin, join.skip)))) if n is not None]
    (kind, ndim), joined = value.place.key, value.place.parts
    part = next((joined.index(n) for n in copies if n in joined), None)
    if part is not None:
        yield call, Inline(kind, part, value.place.number, call.joins[kind, ndim], ndim)


def meets(value: Value, module: nn.Module, entry: Inline) -> bool:
    """Whether the value was made by that join of the module's forward."""
    place, call = value.place, value.call
    here = place is not None and call is not None and call.module is module
    return here and place.key == (entry.kind, entry.ndim) and place.number == entry.number


def copies_of(record: Record, result: int, operations: tuple[str, ...]) -> set[int]:
    """The joined features and what inline operations made of them alone: a cast, a constant factor, a transpose."""
    found = {result}
    for number, value in enumerate(record.values):
        alone = len(value.inputs) == 1 and value.inputs[0] in found
        if alone and value.operation in operations and reader_in(record.call_of(number), found) is None:
            found.add(number)
    return found


def receivers_of(record: Record, features: set[int]) -> list[Call | None]:
    """The outermost call that received the features, for every operation that reads them; None for an inline one."""
    found: dict[Call | None, None] = {}
    for reading in readings(record, features):
        receiving = [None, *(call for call in reading.outward() if call.received(features))]
        found[receiving[-1]] = None
    return list(found)


def readings(record: Record, features: set[int]) -> Iterator[Call]:
    """The innermost calls of the operations that read the features, and do not just make another copy of them."""
    for number, value in enumerate(record.values):
        if number not in features and not features.isdisjoint(value.inputs):
            yield record.call_of(number)


def find_readings(record: Record, join: Join) -> list[Call]:
    """The calls of leaf modules and norms that read the joined features first; empty if anything else does, too."""
    # What reads a sum reads the trunk as well, in the same channels: no coefficient can be moved there.
    if join.channels is None:
        return []
    features = copies_of(record, join.result, LAYOUTS)
    found = [reader_in(call, features) for call in readings(record, features)]
    return [call for call in found if call is not None] if None not in found else []


def readers_of(record: Record, join: Join, reading: list[Call]) -> list[nn.Module]:
    """The modules that read, in the model's order; empty if the skip does not lie in their channels."""
    features = copies_of(record, join.result, LAYOUTS)
    received = [(call.module, given.value) for call in reading for given in call.given if given.value in features]
    if not all(reads_channels(record, join, module, value) for module, value in received):
        return []
    # A hook on a norm, or on the shortcut beside it, finds the skip where it was joined, not where it was moved.
    moved = any(channel_dim(record, join, value) != channel_dim(record, join, join.result) for _, value in received)
    if moved and any(is_norm(module) for module, _ in received):
        return []
    found = {module for module, _ in received}
    return [module for module in record.model.modules() if module in found]


def reads_channels(record: Record, join: Join, module: nn.Module, value: int) -> bool:
    """Whether the joined channels are those of the layer that reads them; one that torch does not know is believed."""
    dim = channel_dim(record, join, value)
    if runs_as(module, CHANNELS_LAST):
        return dim == len(record.values[value].shape) - 1
    return dim == 1 or not runs_as(module, CHANNELS_FIRST)


def channel_dim(record: Record, join: Join, number: int) -> int:
    """The dimension that holds the joined channels in a copy of the joined features."""
    assert join.channels is not None, "a sum has no channels of its own"
    value = record.values[number]
    if number == join.result:
        return join.channels.dim % len(value.shape)
    before = channel_dim(record, join, value.inputs[0])
    return value.order.index(before) if value.order else before


def reader_in(call: Call, features: set[int]) -> Call | None:
    """The call of the norm, else leaf module, that received the features and reads them in this innermost call."""
    receiving = [outer for outer in call.outward() if outer.received(features)]
    norms = [outer for outer in receiving if normalises(outer.module)]
    if norms:
        return norms[-1]
    return call if call in receiving and not any(call.module.children()) else None


def normalises(module: nn.Module) -> bool:
    # A block with a convolution is more than a norm, whatever its name (ResnetBlockCondNorm2D of diffusers).
    convolves = any(isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for part in module.modules())
    return is_norm(module) and not convolves


def out_of_reach(record: Record, join: Join, entries: list[Found]) -> ValueError:
    """An error that says why no hook reaches the skip, or why it cannot be at one of these entries."""
    if entries:
        consumer, entry = entries[0]
        times = sum(call.module is consumer.module for call in record.calls)
        return ValueError(
            f"a long skip enters {describe(record, consumer.module)} through {entry}, but that module is called "
            f"{times} times in one forward pass with different inputs, which one hook cannot tell apart. "
            "Give every join a module of its own, or scale the part that runs once."
        )
    place = describe(record, record.call_of(join.result).module)
    receivers = receivers_of(record, copies_of(record, join.result, COPIES))
    modules = [describe(record, call.module) for call in receivers if call is not None]
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


def describe(record: Record, module: nn.Module) -> str:
    path = record.paths()[module]
    return f"{path!r} ({type(module).__name__})" if path else f"the forward of {type(module).__name__}"
