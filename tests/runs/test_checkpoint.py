"""What goes into a checkpoint comes out to the bit, and which ones are kept."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import assert_holds, assert_same, contents, filled, flip_bit, groups, state
from torch import Tensor, nn

from scalelong.runs.checkpoint import MANIFEST, CheckpointStore
from scalelong.utils.atomic import to_json


def test_a_checkpoint_comes_back_to_the_bit(tmp_path: Path) -> None:
    assert_holds(filled(tmp_path, 7).latest(), 7)


BASE = torch.arange(24.0).view(6, 4)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
TENSORS = {
    "types and shapes": {
        f"{dtype} {shape}": (100 * torch.randn(shape)).to(dtype) for dtype in DTYPES for shape in [(), (0,), (5, 3)]
    },
    "special numbers": {"odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])},
    "layouts": {
        "transposed": torch.randn(6, 4).t(),
        "strided": torch.randn(6, 4)[::2],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "parameter": nn.Parameter(torch.randn(3)),
    },
    "views that only overlap": {"all": BASE, "head": BASE[:4], "tail": BASE[2:], "other shape": BASE.view(3, 8)},
}


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
def test_every_tensor_comes_back_to_the_bit(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"model": tensors}, {})
    assert_same(store.load(1).tensors("model"), tensors)


def test_special_numbers_of_the_state_come_back_to_the_bit(tmp_path: Path) -> None:
    values = [5e-324, 1 / 3, -0.0, float("inf"), 1.7976931348623157e308]
    store = CheckpointStore(tmp_path)
    store.save(1, {}, {"floats": values})
    assert list(map(float.hex, store.load(1).state()["floats"])) == list(map(float.hex, values))


def test_tied_weights_are_written_once_and_come_back_tied(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(1000, 16), "head": nn.Linear(16, 1000, bias=False)})
    model["head"].weight = model["embed"].weight
    store = CheckpointStore(tmp_path)
    path = store.save(1, {"model": model.state_dict()}, {})
    assert (path / "model.safetensors").stat().st_size < 1.1 * model["embed"].weight.nbytes
    found = store.load(1).tensors("model")
    assert_same(found, model.state_dict())
    assert found["head.weight"] is found["embed.weight"]


def test_what_was_read_does_not_depend_on_the_file(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    found = store.load(1).tensors("model")
    path = tmp_path / "step-000001" / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert_same(found, groups(1)["model"])


def test_a_checkpoint_holds_only_safetensors_and_json(tmp_path: Path) -> None:
    store = filled(tmp_path, 12)
    assert sorted(contents(tmp_path)) == [
        "step-000012/manifest.json",
        "step-000012/model.safetensors",
        "step-000012/rng.safetensors",
        "step-000012/state.json",
    ]
    assert store.load(tmp_path / "step-000012") == store.load(12) == store.latest()


def test_steps_of_more_than_six_digits_are_ordered_by_number(tmp_path: Path) -> None:
    store = filled(tmp_path, 999_999, 1_000_000, keep_last=5)
    assert store.steps() == [999_999, 1_000_000]
    assert_holds(store.latest(), 1_000_000)


def test_an_empty_store_has_no_latest_and_is_not_created_by_asking(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert store.latest() is None and store.best() is None and store.steps() == []
    assert not (tmp_path / "none").exists()


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = filled(tmp_path, 5)
    store.save(5, groups(1), state(1))
    assert store.load(5).state() == state(1)
    assert os.listdir(tmp_path) == ["step-000005"]


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": {"b": (1, 2)}}, "state.a.b is a tuple"),
        ({"a": [0, {1: 2}]}, r"state.a\[1\] has the key 1"),
        ({"lr": torch.tensor(1.0)}, "state.lr is a Tensor"),
        ({"path": Path("x")}, "state.path is a"),
    ],
)
def test_state_that_json_would_change_is_refused_by_name(tmp_path: Path, value: Any, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        CheckpointStore(tmp_path / "store").save(1, {}, value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("group", ["../model", "a/b", "", ".hidden", "a.b"])
def test_a_group_that_is_no_file_name_is_refused(tmp_path: Path, group: str) -> None:
    with pytest.raises(ValueError, match="a group is a file's name"):
        CheckpointStore(tmp_path / "store").save(1, {group: {}}, {})
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_without_plain_values_is_refused_by_name(tmp_path: Path, tensor: Tensor) -> None:
    with pytest.raises(ValueError, match="model: weight is a"):
        CheckpointStore(tmp_path).save(1, {"model": {"weight": tensor}}, {})


def test_a_shard_is_refused_with_the_way_to_gather_it(tmp_path: Path) -> None:
    class Shard(Tensor):
        def full_tensor(self) -> Tensor:
            return self.as_subclass(Tensor)

    with pytest.raises(ValueError, match="model: weight is one process's shard.*full_state_dict=True"):
        CheckpointStore(tmp_path).save(1, {"model": {"weight": torch.zeros(2).as_subclass(Shard)}}, {})


def test_bad_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last must be at least 1, got 0"):
        CheckpointStore(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match="step must not be negative, got -1"):
        CheckpointStore(tmp_path).save(-1, {}, {})


def test_without_safetensors_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r'pip install "scalelong\[train\]"'):
        CheckpointStore(tmp_path).save(1, groups(), {})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("metrics", "kept", "best"),
    [
        ([None] * 6, [5, 6], None),
        ([3.0, 1.0, 2.0, 2.5, 2.2, 2.1], [2, 5, 6], 2),
        ([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], [5, 6], 6),
        ([1.0, 1.0, 2.0, 2.0, 2.0, 2.0], [2, 5, 6], 2),
        ([float("nan"), 2.0, None, float("-inf"), float("nan"), None], [2, 5, 6], 2),
    ],
)
def test_the_last_ones_and_the_best_are_kept(
    tmp_path: Path, metrics: list[float | None], kept: list[int], best: int | None
) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step, metric in enumerate(metrics, start=1):
        store.save(step, groups(step), state(step), metric)
    assert store.steps() == kept
    found = store.best()
    assert (found.step if found else None) == best
    assert all(store.load(step).step == step for step in kept)


def test_the_metric_comes_back_exactly(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {}, {}, metric=0.1 + 0.2)
    assert store.load(1).metric == 0.1 + 0.2


def test_a_damaged_checkpoint_takes_no_place_among_the_last_and_is_left_to_look_at(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2, 3, keep_last=2)
    flip_bit(tmp_path / "step-000003" / "model.safetensors", -1)
    assert_holds(store.latest(), 2)
    store.save(4, groups(4), state(4))
    assert store.steps() == [2, 3, 4]


def test_resuming_from_an_older_step_forgets_the_later_ones_only_when_asked(tmp_path: Path) -> None:
    store = filled(tmp_path, 10, 20, 30, keep_last=2)
    store.save(25, groups(25), state(25))
    assert store.steps() == [20, 25, 30]
    assert store.discard_after(25) == [30]
    assert_holds(store.latest(), 25)


def test_files_of_the_user_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, keep_last=1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-7").mkdir()
    store.save(2, groups(2), state(2))
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-000002", "step-7"]


def test_json_is_readable_by_others(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    manifest = json.loads((tmp_path / "step-000003" / MANIFEST).read_text())
    assert (manifest["format"], manifest["step"], manifest["metric"]) == (1, 3, None)
    assert manifest["files"]["state.json"]["bytes"] == len(to_json(state(3)))
