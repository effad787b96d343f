"""fsspec stores, with its in-memory file system."""

from collections.abc import Iterator
from typing import Any

import pytest

from xlaserve.storage import fsspec_store
from xlaserve.storage.fsspec_store import FsspecStore
from xlaserve.storage.objects import Checksum, ObjectChanged, StoreProblem

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def filesystem() -> Iterator[Any]:
    made = fsspec.filesystem("memory", skip_instance_cache=True)
    made.pipe({"/bucket/models/m/1/w": b"0123456789", "/bucket/models/m/config.json": b"{}"})
    made.pipe({"/bucket/models/other/1/w": b"x", "/bucket/models-of-others/m/1/w": b"x"})
    yield made
    made.rm("/bucket", recursive=True)


def store(filesystem: Any, max_objects: int = 100) -> FsspecStore:
    return FsspecStore(filesystem, "bucket/models", seconds=5, max_objects=max_objects)


def test_objects_are_named_relative_to_the_root(filesystem: Any) -> None:
    names = {(found.name, found.size_bytes) for found in store(filesystem).objects()}

    assert {("m/1/w", 10), ("m/config.json", 2), ("other/1/w", 1)} == names
    assert ["m/1/w", "m/config.json"] == [one.name for one in store(filesystem).objects("m")]


def test_a_part_is_read_in_pieces(filesystem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_store, "_PIECE_BYTES", 3)
    made = store(filesystem)
    found = made.objects("m")[0]

    assert [b"234", b"567", b"8"] == list(made.read(found, 2, 9))


def test_a_changed_object_is_noticed(filesystem: Any) -> None:
    made = store(filesystem)
    found = made.objects("m")[0]
    made.confirm(found)
    filesystem.pipe("/bucket/models/m/1/w", b"abcdefghij")

    with pytest.raises(ObjectChanged):
        made.confirm(found)


def test_an_object_is_found_by_its_name_and_written_whole(filesystem: Any) -> None:
    """A directory is not an object."""
    made = store(filesystem)
    missing = [made.find(name) for name in ("m", "m/2/w", "nothing")]
    made.write("m/2/w", b"01234")
    found = made.find("m/2/w")

    assert [None] * 3 == missing
    assert found is not None
    assert ("m/2/w", 5) == (found.name, found.size_bytes)
    assert b"01234" == b"".join(made.read(found, 0, 5))


def test_what_cannot_be_found_out_is_a_problem(
    filesystem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **more: object) -> None:
        raise PermissionError

    monkeypatch.setattr(filesystem, "info", fails)
    with pytest.raises(StoreProblem, match="access is denied"):
        store(filesystem).find("m/1/w")


def test_too_many_objects_are_refused(filesystem: Any) -> None:
    with pytest.raises(StoreProblem, match=r"3 objects, more than remote_max_objects \(2\)"):
        store(filesystem, max_objects=2).objects()


def test_an_answer_that_is_longer_than_asked_is_refused(
    filesystem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = store(filesystem)
    found = made.objects("m")[0]
    monkeypatch.setattr(filesystem, "cat_file", lambda *args, **more: b"x" * 11)

    with pytest.raises(StoreProblem, match="sent 11 bytes, expected 10"):
        list(made.read(found, 0, 10))


class NoCredentialsError(Exception):
    """Has the name of botocore's class."""


@pytest.mark.parametrize(
    ("error", "reason", "is_transient"),
    [
        (PermissionError("key AKIA123 secret"), "access is denied", False),
        (FileNotFoundError("bucket"), "it does not exist", False),
        (NoCredentialsError("secret"), "the SDK found no credentials in its environment", False),
        (ValueError("https://host/?sig=secret"), "its SDK failed with ValueError", True),
        (TimeoutError("secret"), "no answer within 5 seconds (remote_stall_seconds)", True),
    ],
)
def test_a_problem_never_repeats_what_an_sdk_says(
    filesystem: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    reason: str,
    is_transient: bool,
) -> None:
    def fails(*args: object, **more: object) -> None:
        raise error

    made = store(filesystem)
    found = made.objects("m")[0]
    monkeypatch.setattr(filesystem, "cat_file", fails)

    with pytest.raises(StoreProblem) as raised:
        list(made.read(found, 0, 10))
    assert (reason, is_transient) == (str(raised.value), raised.value.is_transient)
    assert raised.value.__suppress_context__


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"ETag": '"abc"'}, ("abc", None)),
        ({"generation": "17", "etag": "x", "md5Hash": "AAEC"}, ("17", Checksum("md5", "000102"))),
        (
            {"blob_id": "b", "lfs": {"sha256": "AB", "size": 1}},
            ("b", Checksum("sha256", "ab")),
        ),
        ({"mtime": 3.5}, ("3.5", None)),
        ({}, ("", None)),
    ],
)
def test_each_store_has_its_marks(info: dict[str, Any], expected: object) -> None:
    found = fsspec_store._object("w", {"size": 1, **info})

    assert expected == (found.mark, found.checksum)


def test_an_object_without_a_size_is_refused() -> None:
    with pytest.raises(StoreProblem, match="'w' has no size"):
        fsspec_store._object("w", {"size": None})
