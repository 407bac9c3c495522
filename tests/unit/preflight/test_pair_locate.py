"""Where a model argument points: a folder, the hub cache, or nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_sglang.preflight.pair import Where, check_pair, locate
from tests.support.pair_builder import small_pair

COMMIT = "0123456789abcdef"


def _cache(cache: Path, snapshot: Path, name: str) -> Path:
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / COMMIT).symlink_to(snapshot, target_is_directory=True)
    return cache


def test_a_folder(tmp_path: Path) -> None:
    assert locate(str(tmp_path)) == (str(tmp_path), Where.FOLDER, tmp_path)


@pytest.mark.parametrize(
    "given", ["/no/such", "./no/such", "~/no/such", "no-such", "a/b/c", "a b/c"]
)
def test_a_path_that_is_not_there(given: str) -> None:
    assert locate(given, None, Path("/no/cache")).where is Where.MISSING


@pytest.mark.parametrize("given", ["Qwen/Qwen3-8B", "s3://bucket/model"])
def test_what_may_be_fetched_is_left_to_sglang(given: str) -> None:
    assert locate(given, None, Path("/no/cache")) == (given, Where.REMOTE, None)


def test_a_single_file_is_left_to_sglang(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert locate(str(file)).where is Where.REMOTE


def test_a_cached_snapshot(tmp_path: Path) -> None:
    verifier, draft = small_pair().write(tmp_path / "pair")
    cache = _cache(tmp_path / "cache", draft, "z-lab/tiny-DFlash")
    found = locate("z-lab/tiny-DFlash", None, cache)
    assert found.where is Where.CACHED
    report = check_pair(verifier, "z-lab/tiny-DFlash", 17, hub_cache=cache)
    assert [finding.code for finding in report.errors] == ["run_block_large"]


def test_the_hubs_own_cache_and_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    _, draft = small_pair().write(tmp_path / "pair")
    # HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME end here, when huggingface_hub is imported.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(_cache(tmp_path / "hub", draft, "a/b")))
    assert locate("a/b", COMMIT).where is Where.CACHED
    assert locate("a/b", "other").where is Where.REMOTE


def test_weights_missing_from_a_snapshot_are_unchecked(tmp_path: Path) -> None:
    """SGLang fetches them; it does not complete a folder that the user named."""
    verifier, draft = small_pair().write(tmp_path / "pair")
    (draft / "model.safetensors").unlink()
    cache = _cache(tmp_path / "cache", draft, "z-lab/tiny-DFlash")
    report = check_pair(verifier, "z-lab/tiny-DFlash", hub_cache=cache)
    assert report.ok
    assert any("weights of the drafter" in text for text in report.unchecked)


def test_an_unfetched_verifier_leaves_the_rules_about_the_drafter(tmp_path: Path) -> None:
    pair = small_pair()
    del pair.dflash["target_layer_ids"]
    _, draft = pair.write(tmp_path)
    report = check_pair("Qwen/Qwen3-30B-A3B", draft, hub_cache=Path("/no/cache"))
    assert [finding.code for finding in report.errors] == ["taps_missing"]
    assert any("Qwen/Qwen3-30B-A3B" in text for text in report.unchecked)
