"""A run that was stopped ends as one that never was, to the bit; test_processes.py kills them."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from checkpoint_cases import contents, flip_bit
from run_cases import SignalAt, assert_same_run, final_tensors, lasting_metrics, make_trainer, run_tiny, tiny

from scalelong.runs import Run, RunError
from scalelong.training import Lines
from scalelong.training.parallel import StopSignals
from scalelong.utils.atomic import Busy

KINDS = {
    "plain": (),
    "learned scaling, accumulated": ("scaling.method=ls", "training.grad_accumulation=2"),
    "evaluated and sampled": ("training.validate_every=2", "training.sample_every=4", "training.log_every=3"),
}

UNET = (
    "model={kind: unet, sample_size: 8, in_channels: 1, block_out_channels: [8, 16], depth: 1, norm_num_groups: 4, "
    "dropout: 0.3}",
    "scaling.where=after-norm",
    "training.channels_last=true",
    "data.flip=true",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped, not to be written to."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_tiny(folder)
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(number: int, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    result = run_tiny(tmp_path / "run", display=SignalAt(4, number))
    assert (result.step, result.signal, result.finished) == (4, number, False)
    assert Run(tmp_path / "run").checkpoints().steps()[-1] == 4
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("kind", [*KINDS, "unet with dropout"])
def test_a_run_stopped_by_a_signal_goes_on_as_if_it_had_not_been(kind: str, tmp_path: Path) -> None:
    overrides = KINDS.get(kind, UNET)
    stopped = run_tiny(tmp_path / "stopped", *overrides, display=SignalAt(4, signal.SIGTERM))
    assert stopped.step == 4
    assert run_tiny(tmp_path / "stopped", *overrides).trained == 4
    run_tiny(tmp_path / "whole", *overrides)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("scalelong.training.parallel.os._exit", codes.append)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert (signals.received, codes) == (signal.SIGINT, [])
        signal.raise_signal(signal.SIGINT)
    assert codes == [130]


def test_a_signal_that_a_launcher_passes_on_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    clock = iter([100.0, 100.5, 103.0])
    monkeypatch.setattr("scalelong.training.parallel.os._exit", codes.append)
    monkeypatch.setattr("scalelong.training.parallel.monotonic", lambda: next(clock))
    with StopSignals(several=True):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert codes == []
        signal.raise_signal(signal.SIGTERM)
    assert codes == [143]


def test_a_damaged_newest_checkpoint_is_left_for_the_one_before(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_tiny(tmp_path / "run", "training.steps=6")
    flip_bit(tmp_path / "run" / "checkpoints" / "step-000006" / "model.safetensors", 500)
    assert run_tiny(tmp_path / "run").trained == 8 - 3
    assert "step-000006 is damaged" in caplog.text
    assert_same_run(tmp_path / "run", whole)


def test_a_damaged_checkpoint_does_not_count_among_the_last_ones_that_are_kept(tmp_path: Path) -> None:
    run_tiny(tmp_path, "training.keep_last=2", display=SignalAt(5, signal.SIGTERM))
    flip_bit(tmp_path / "checkpoints" / "step-000005" / "model.safetensors", 500)
    run_tiny(tmp_path, "training.keep_last=2", "training.steps=6")
    assert Run(tmp_path).checkpoints().steps() == [3, 5, 6]


def test_a_finished_run_is_left_as_it_is(whole: Path) -> None:
    before = contents(whole)
    result = run_tiny(whole)
    assert (result.finished, result.trained) == (True, 0)
    assert contents(whole) == before


def test_a_named_checkpoint_is_where_a_run_goes_on(whole: Path, tmp_path: Path) -> None:
    run_tiny(tmp_path / "run", "training.steps=6")
    assert run_tiny(tmp_path / "run", resume=tmp_path / "run" / "checkpoints" / "step-000003").trained == 8 - 3
    assert_same_run(tmp_path / "run", whole)


def test_a_run_interrupted_while_it_goes_back_to_a_named_checkpoint_ends_as_one_never_stopped(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    run_tiny(tmp_path / "run", "training.steps=6")
    for moment in ("scalelong.runs.CheckpointStore.discard_after", "scalelong.runs.run_dir.MetricsLog.cut"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(moment, interrupt)
            run_tiny(tmp_path / "run", resume=tmp_path / "run" / "checkpoints" / "step-000003")
    run_tiny(tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


def test_a_run_begins_in_a_new_folder_at_a_checkpoint_of_another(whole: Path, tmp_path: Path) -> None:
    run_tiny(tmp_path, resume=whole / "checkpoints" / "step-000006")
    assert [line["step"] for line in lasting_metrics(tmp_path)] == [7, 8]
    ours, theirs = final_tensors(tmp_path), final_tensors(whole)
    assert all(tensor.equal(ours[name]) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("overrides", "resume", "message"),
    [
        (["scaling.kappa=0.5"], "auto", "run with other settings .scaling.kappa 0.7 → 0.5"),
        ([], "never", "holds a run already"),
    ],
)
def test_a_folder_of_another_run_is_refused_and_unchanged(
    overrides: list[str], resume: str, message: str, tmp_path: Path
) -> None:
    run_tiny(tmp_path, "training.steps=1")
    before = contents(tmp_path)
    with pytest.raises(RunError, match=message):
        run_tiny(tmp_path, *overrides, resume=resume)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("resume", ["auto", "foreign"])
def test_a_run_whose_checkpoints_were_removed_is_refused_and_keeps_its_log(
    resume: str, whole: Path, tmp_path: Path
) -> None:
    run_tiny(tmp_path, "training.steps=2")
    shutil.rmtree(tmp_path / "checkpoints")
    before = contents(tmp_path)
    with pytest.raises(RunError, match="has lost its checkpoints.*choose another --out"):
        run_tiny(tmp_path, resume=whole / "checkpoints" / "step-000003" if resume == "foreign" else resume)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("left", [[".lock", ".tmp-7-config.yaml"], ["config.yaml", ".tmp-7-environment.json"]])
def test_a_run_that_was_killed_while_it_began_can_be_begun_again(left: list[str], whole: Path, tmp_path: Path) -> None:
    for name in left:
        kept = (whole / name).read_text() if name == "config.yaml" else ""
        (tmp_path / name).write_text(kept)
    run_tiny(tmp_path)
    assert_same_run(tmp_path, whole)


def test_another_precision_than_before_is_noted(tmp_path: Path) -> None:
    said: list[str] = []
    run_tiny(tmp_path, "training.steps=2")
    environment = Run(tmp_path).environment_file
    environment.write_text(environment.read_text().replace('"precision": "fp32"', '"precision": "bf16"'))
    run_tiny(tmp_path, display=Lines(said.append))
    assert any("another precision than before (bf16)" in line for line in said)


def test_two_processes_do_not_train_in_the_same_folder(tmp_path: Path) -> None:
    with Run(tmp_path).locked(), pytest.raises(Busy, match="another process is training"):
        run_tiny(tmp_path)
    assert run_tiny(tmp_path).finished


def test_a_run_that_another_process_took_further_meanwhile_is_not_trained_twice(whole: Path, tmp_path: Path) -> None:
    run_tiny(tmp_path / "run", "training.steps=4")
    late = make_trainer(tmp_path / "run")
    run_tiny(tmp_path / "run")
    with pytest.raises(RunError, match="another process has just trained in .*: give the command again"):
        late.train()
    assert_same_run(tmp_path / "run", whole)


def test_the_folder_says_what_ran(tmp_path: Path) -> None:
    run_tiny(tmp_path, "training.steps=1", "training.sample_every=1")
    assert Run(tmp_path).config() == tiny("training.steps=1", "training.sample_every=1")
    facts = (tmp_path / "environment.json").read_text()
    assert all(f'"{key}"' in facts for key in ("seed", "command", "commit", "torch", "device", "precision"))
    assert (tmp_path / "samples" / "step-000001.png").read_bytes().startswith(b"\x89PNG")
