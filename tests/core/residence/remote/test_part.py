"""One repository in an object store: its listing, its requests and its downloads."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.memory_store import MemoryStore

from xlaserve.artifact.weights import MAX_HEADER_BYTES
from xlaserve.errors import LoadFailed, ModelNotFound, OutOfSpace
from xlaserve.residence.repository.remote.part import RemoteLimits, RemotePart
from xlaserve.residence.repository.repositories import _reading
from xlaserve.residence.repository.sources import ModelSource
from xlaserve.residence.repository.watching import RepositoryWatch
from xlaserve.settings import Settings
from xlaserve.storage import fetching
from xlaserve.storage.cache import ModelCache
from xlaserve.storage.fetching import FetchControl

MIB = 1 << 20
CONFIG = json.dumps({"backend": "identity", "version_policy": {"latest": {"num_versions": 1}}})
WEIGHTS = (100).to_bytes(8, "little") + b"h" * 100 + b"w" * MIB


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less between attempts."""
    monkeypatch.setattr(fetching, "_FIRST_PAUSE_SECONDS", 0.001)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(
        {
            "m/config.json": CONFIG.encode(),
            "m/1/model.json": b"{1}",
            "m/1/params.safetensors": WEIGHTS,
            "m/2/model.json": b"{2}",
            "m/2/params.safetensors": WEIGHTS,
            "m/2/model.stablehlo": b"s" * MIB,
            "other/1/model.json": b"{}",
            "README.md": b"x",
            ".hidden/1/x": b"x",
        }
    )


Make = Callable[..., RemotePart]


@pytest.fixture
def make(tmp_path: Path, store: MemoryStore) -> Iterator[Make]:
    made: list[tuple[RemotePart, ModelCache]] = []

    def part(max_bytes: int = 64 * MIB, max_models: int = 100) -> RemotePart:
        cache = ModelCache(tmp_path / "cache", max_bytes, 2)
        cache.prepare()
        settings = Settings.read({}, repository=tmp_path)
        limits = RemoteLimits(max_models, 60)
        url = "s3://bucket/models"
        reading = _reading(settings)
        new = RemotePart(Path(url), url, lambda: store, cache=cache, reading=reading, limits=limits)
        made.append((new, cache))
        return new

    yield part
    for new, cache in made:
        new.close()
        cache.close()


def found(part: RemotePart, name: str = "m", text: str | None = None) -> ModelSource:
    part.prepare(name, text)
    return part.find_own(name, text)


def take(source: ModelSource) -> Path:
    remote = source.versions[0].remote
    assert remote is not None
    return remote.take(FetchControl(60)).path


def test_a_listing_fetches_nothing(make: Make, store: MemoryStore) -> None:
    part = make()
    part.refresh()

    listing = part.listing()
    assert ("m", "other") == listing.models
    assert {"README.md": "it is an object, expected a directory"} == listing.skipped
    assert {} == store.read_bytes


def test_models_beyond_the_limit_are_skipped(make: Make) -> None:
    part = make(max_models=1)
    part.refresh()

    assert ("m",) == part.listing().models
    assert "max_models" in part.listing().skipped["other"]


def test_what_a_load_would_do_is_told_from_headers(make: Make, store: MemoryStore) -> None:
    """Sizes are those of the objects: weights and computation are not downloaded."""
    source = found(make())

    (version,) = source.versions
    assert (2, WEIGHTS[:108]) == (
        version.number,
        (version.directory / "params.safetensors").read_bytes()[:108],
    )
    assert len(WEIGHTS) == (version.directory / "params.safetensors").stat().st_size
    assert MIB == (version.directory / "model.stablehlo").stat().st_size
    assert 108 == store.read_bytes["m/2/params.safetensors"]
    assert "m/2/model.stablehlo" not in store.read_bytes
    assert not any(name.startswith("m/1/") for name in store.read_bytes)


def test_a_header_that_lies_about_its_length_is_not_followed(
    make: Make, store: MemoryStore
) -> None:
    store.contents["m/2/params.safetensors"] = b"\xff" * 8 + b"x" * (MAX_HEADER_BYTES + MIB)
    found(make())

    assert 8 + MAX_HEADER_BYTES == store.read_bytes["m/2/params.safetensors"]


def test_only_the_versions_of_the_policy_are_fetched(make: Make, store: MemoryStore) -> None:
    files = take(found(make()))

    there = {str(path.relative_to(files)) for path in files.rglob("*") if path.is_file()}
    expected = {"config.json", "2/model.json", "2/params.safetensors", "2/model.stablehlo"}
    assert expected == there
    assert WEIGHTS == (files / "2" / "params.safetensors").read_bytes()


def test_a_configuration_of_the_request_picks_the_versions(make: Make, store: MemoryStore) -> None:
    text = json.dumps({"backend": "identity", "version_policy": {"specific": {"versions": [1]}}})

    assert [1] == [version.number for version in found(make(), "m", text).versions]


def test_a_load_of_what_is_cached_reads_nothing_of_the_store(
    make: Make, store: MemoryStore
) -> None:
    take(found(make()))
    store.read_bytes.clear()

    take(found(make()))

    assert {} == store.read_bytes


def test_the_same_files_are_the_same_version_after_a_restart(make: Make) -> None:
    """A reload of unchanged files therefore does nothing."""
    first, again = found(make()), found(make())

    assert first.versions[0].fingerprint == again.versions[0].fingerprint


def test_changes_are_seen_by_the_listing_alone(make: Make, store: MemoryStore) -> None:
    part = make()
    watch = RepositoryWatch(part)
    part.refresh()
    assert ("m", "other") == watch.changes().changed

    store.contents["m/2/model.json"] = b"{3}"
    del store.contents["other/1/model.json"]
    part.refresh()
    changes = watch.changes()

    assert (("m",), ("other",)) == (changes.changed, changes.gone)
    assert {} == store.read_bytes


def test_a_store_that_is_away_changes_nothing(make: Make, store: MemoryStore) -> None:
    part = make()
    watch = RepositoryWatch(part)
    part.refresh()
    watch.changes()
    store.is_away = True
    part.refresh()

    changes = watch.changes()
    assert ((), ()) == (changes.changed, changes.gone)
    assert "it cannot be read: the store is away" == watch.problem
    assert "s3://bucket/models" == watch.place
    with pytest.raises(LoadFailed, match="s3://bucket/models/m cannot be read: the store is away"):
        part.prepare("m")


def test_a_listing_is_not_asked_for_again_too_soon(make: Make, store: MemoryStore) -> None:
    part = make()
    part.refresh()
    store.is_away = True

    part.refresh(older_than_seconds=3600)

    assert ("m", "other") == part.listing().models


def test_a_model_that_is_gone_is_not_found(make: Make, store: MemoryStore) -> None:
    part = make()
    found(part)
    store.contents = {}
    part.prepare("m")

    with pytest.raises(ModelNotFound):
        part.find_own("m", None)
    assert not part.is_holder("m")


def test_a_changed_object_is_another_fetch(make: Make, store: MemoryStore) -> None:
    part = make()
    take(found(part))
    store.contents["m/2/model.json"] = b"{new}"

    assert b"{new}" == (take(found(part)) / "2" / "model.json").read_bytes()


def test_a_full_disk_is_said_to_be_full(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On OutOfSpace a platform unloads other models and tries again."""

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    part = make()
    monkeypatch.setattr("xlaserve.storage.skeleton.write_home", full)

    with pytest.raises(OutOfSpace, match="No space left"):
        part.prepare("m")


def test_a_hostile_name_refuses_its_model_alone(make: Make, store: MemoryStore) -> None:
    store.contents["bad/../../escape"] = b"x"
    store.contents["../m/1/x"] = b"x"
    part = make()
    part.refresh()

    assert ("bad", "m", "other") == part.listing().models
    with pytest.raises(LoadFailed, match="'../../escape' has an empty name, '.' or '..'"):
        part.prepare("bad")
    assert found(part).versions
