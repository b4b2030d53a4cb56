"""What reads the joined features of a skip first, and what changes the skip on its way to the join."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .discover import Join
from .record import Call, Record
from .site import LINEAR, is_norm, runs_as

COPIES = ("clone", "_to_copy", "mul", "div")
CROPS = (*COPIES, "slice", "alias")
LAYOUTS = (*COPIES, "permute", "transpose")
# The layers whose channels are the last dimension, and those that have them behind the batch.
CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
CHANNELS_FIRST = (*LINEAR[1:], nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


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
