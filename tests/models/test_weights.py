import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file

from xlaserve.artifact import weights
from xlaserve.artifact.weights import DTYPES, read, read_entries, write
from xlaserve.errors import InvalidModel
from xlaserve.files.files import FileRecord
from xlaserve.tensors import ALIGNMENT, Tensor

NAME = "params.safetensors"


def _read(directory: Path) -> dict[str, Tensor]:
    return dict(read(directory, NAME))


def _file(directory: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / NAME).write_bytes(struct.pack("<Q", len(text)) + text + data)
    return directory


def _tensor(
    dtype: str = "F32", shape: tuple[int, ...] = (1,), offsets: tuple[int, int] = (0, 4)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("dtype", "octets", "expected"),
    [
        ("F8_E4M3", "38 7e 7f 80 01", [1.0, 448.0, np.nan, -0.0, 2.0**-9]),
        ("F8_E5M2", "3c 7b 7c fc 01", [1.0, 57344.0, np.inf, -np.inf, 2.0**-16]),
        ("BF16", "803f 7f7f c07f 0080 0100", [1.0, 3.3895314e38, np.nan, -0.0, 2.0**-133]),
        ("F16", "003c ff7b 007e 0080 0100", [1.0, 65504.0, np.nan, -0.0, 2.0**-24]),
    ],
)
def test_floats_of_few_bits_are_those_of_safetensors(
    tmp_path: Path, dtype: str, octets: str, expected: list[float]
) -> None:
    """There are others of the same size, with other values for the same bits."""
    data = bytes.fromhex(octets)
    _file(tmp_path, {"t": _tensor(dtype, (5,), (0, len(data)))}, data)
    found = _read(tmp_path)["t"].astype(np.float64)

    np.testing.assert_allclose(expected, found, rtol=1e-7)
    assert np.signbit(found[3]) == np.signbit(expected[3])


def _tensors() -> dict[str, Tensor]:
    return {
        "layers/0/weight": np.arange(64, dtype=np.float32).reshape(4, 16),
        "layers/0/bias": np.arange(3, dtype=np.float32),
        "scalar": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 3), np.float16),
        "Größe \U0001f600": np.array([True, False]),
        "big": np.ones((33, 64), ml_dtypes.bfloat16),
    }


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(tmp_path: Path, name: str) -> None:
    tensor = np.array([[0, 1], [1, 0]]).astype(DTYPES[name])
    write(tmp_path / NAME, {"t": tensor})

    (found,) = _read(tmp_path).values()

    assert tensor.dtype == found.dtype
    assert np.array_equal(tensor, found)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=9),
        hnp.arrays(
            st.sampled_from([np.float32, np.int8, np.uint64, np.bool_]),
            hnp.array_shapes(min_dims=0, min_side=0, max_side=5),
        ),
        max_size=5,
    )
)
def test_reading_gives_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, "np.ndarray[Any, Any]"]
) -> None:
    directory = tmp_path_factory.mktemp("weights")
    write(directory / NAME, tensors)

    found = _read(directory)

    assert tensors.keys() == found.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (found[name].dtype, found[name].shape)
        assert tensor.tobytes() == found[name].tobytes()


def test_file_is_one_that_the_safetensors_library_reads(tmp_path: Path) -> None:
    write(tmp_path / NAME, _tensors())

    found = load_file(tmp_path / NAME)

    assert _tensors().keys() == found.keys()
    assert all(np.array_equal(tensor, found[name]) for name, tensor in _tensors().items())


def test_file_of_the_safetensors_library_is_read(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in _tensors().items() if tensor.dtype.kind != "V"}
    save_file(tensors, tmp_path / NAME, metadata={"made by": "someone"})

    found = _read(tmp_path)

    assert tensors.keys() == found.keys()
    assert all(np.array_equal(tensor, found[name]) for name, tensor in tensors.items())


def test_large_tensors_are_aligned_in_the_file(tmp_path: Path) -> None:
    """A multiple of 64 lets XLA use the bytes of the file in place; safetensors allows no gaps."""
    write(tmp_path / NAME, _tensors())
    content = (tmp_path / NAME).read_bytes()
    data_start = 8 + int.from_bytes(content[:8], "little")

    starts = {e.name: data_start + e.start for e in read_entries(tmp_path, NAME)}

    assert 0 == data_start % ALIGNMENT
    assert 0 == starts["big"] % ALIGNMENT
    assert 0 == starts["layers/0/weight"] % ALIGNMENT


def test_tensors_are_aligned_in_memory(tmp_path: Path) -> None:
    write(tmp_path / NAME, _tensors())

    assert all(t.ctypes.data % ALIGNMENT == 0 for t in _read(tmp_path).values() if t.size)


def test_same_tensors_are_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    first = write(tmp_path / NAME, _tensors())
    again = write(tmp_path / "again" / NAME, dict(reversed(_tensors().items())))

    assert first == again


def test_row_major_is_written_whatever_the_memory_is(tmp_path: Path) -> None:
    tensor = np.arange(6).reshape(2, 3).T
    write(tmp_path / NAME, {"t": tensor})

    assert np.array_equal(tensor, _read(tmp_path)["t"])


def test_header_alone_tells_sizes(tmp_path: Path) -> None:
    write(tmp_path / NAME, _tensors())

    sizes = {entry.name: entry.nbytes for entry in read_entries(tmp_path, NAME)}

    assert {name: tensor.nbytes for name, tensor in _tensors().items()} == sizes


def test_tensors_are_read_one_by_one(tmp_path: Path) -> None:
    write(tmp_path / NAME, _tensors())
    tensors = read(tmp_path, NAME)
    next(tensors)
    (tmp_path / NAME).write_bytes(b"")

    with pytest.raises(InvalidModel, match=f"^{NAME} is truncated by .* bytes$"):
        list(tensors)


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    record = write(tmp_path / NAME, _tensors())
    content = bytearray((tmp_path / NAME).read_bytes())
    content[-1] ^= 1
    (tmp_path / NAME).write_bytes(content)

    with pytest.raises(InvalidModel, match=f"{NAME} changed after the export: its sha256 is"):
        list(read(tmp_path, NAME, record))


def test_other_length_is_noticed_before_reading(tmp_path: Path) -> None:
    write(tmp_path / NAME, _tensors())

    with pytest.raises(InvalidModel, match="the manifest says 7"):
        next(read(tmp_path, NAME, FileRecord(7, "")))


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        ([], b"", "its header is not a JSON object"),
        (b" {}", b"", "its header is not a JSON object"),
        (b"{", b"", "a header that is not valid"),
        (b'{"\xff":1}', b"", "a header that is not valid"),
        (b'{"a":' + b"[" * 9999 + b"]" * 9999 + b"}", b"", "a header that is not valid"),
        ({"a": 1}, b"", "a header that is not valid"),
        ({"a": {**_tensor(), "x": 1}}, b"1234", "a header that is not valid"),
        ({"a": _tensor(shape=(1.5,))}, b"1234", "a header that is not valid"),  # type: ignore[arg-type]
        ({"__metadata__": {"a": 1}}, b"", "a header that is not valid"),
        ({"a": _tensor("C64")}, b"1234", "'a' has the unknown dtype 'C64'"),
        ({"": _tensor()}, b"1234", "expected tensor names of 1 to 1024 characters, got 0"),
        ({"a": _tensor(shape=(-1,))}, b"1234", "'a' has an invalid shape"),
        ({"a": _tensor(shape=(1,) * 33)}, b"1234", "'a' has an invalid shape"),
        ({"a": _tensor(shape=(0, 1 << 63), offsets=(0, 0))}, b"", "'a' has an invalid shape"),
        ({"a": _tensor(shape=(2,))}, b"1234", "'a' needs 8 bytes, its offsets are 0 and 4"),
        ({"a": _tensor(offsets=(4, 0))}, b"1234", "'a' needs 4 bytes, its offsets are 4 and 0"),
        ({"a": _tensor(offsets=(-4, 0))}, b"1234", "'a' needs 4 bytes, its offsets are -4 and 0"),
        ({"a": _tensor(offsets=(4, 8))}, b"12345678", "data of 'a' starts at 4, expected 0"),
        ({"a": _tensor(), "b": _tensor()}, b"1234", "data of 'b' starts at 0, expected 4"),
        ({"a": _tensor()}, b"12345", "has 5 bytes of data, its header says 4"),
        ({"a": _tensor()}, b"123", "has 3 bytes of data, its header says 4"),
        ({"a": _tensor("BOOL", (4,))}, b"\0\1\2\0", "'a' is BOOL but has bytes other than"),
    ],
)
def test_bad_header_is_refused(tmp_path: Path, header: object, data: bytes, expected: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        _read(_file(tmp_path, header, data))
    assert expected in str(caught.value)


@pytest.mark.parametrize("length", [9, weights.MAX_HEADER_BYTES + 1, (1 << 64) - 1])
def test_header_longer_than_the_file_or_the_limit_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / NAME).write_bytes(struct.pack("<Q", length) + b"{}")

    with pytest.raises(InvalidModel, match=f"it has 10 bytes, its header {length}"):
        _read(tmp_path)


def test_number_of_tensors_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_TENSORS", 5)
    write(tmp_path / NAME, _tensors())

    with pytest.raises(InvalidModel, match="6 tensors, more than 5"):
        _read(tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("w", np.complex64, "parameter 'w' has dtype complex64, expected one of bool, uint8"),
        ("w", ml_dtypes.int4, "parameter 'w' has dtype int4"),
        ("__metadata__", np.float32, "'__metadata__' cannot be stored under this name"),
        ("", np.float32, "'' cannot be stored under this name"),
    ],
)
def test_tensor_without_a_place_in_the_format_is_refused(
    tmp_path: Path, name: str, dtype: Any, expected: str
) -> None:
    with pytest.raises(InvalidModel) as caught:
        write(tmp_path / NAME, {name: np.zeros(2, dtype)})
    assert expected in str(caught.value)
    assert [] == list(tmp_path.iterdir())


@given(st.data())
def test_flipped_bits_and_cuts_are_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Reading any bytes returns tensors or raises InvalidModel."""
    directory = tmp_path_factory.mktemp("weights")
    write(directory / NAME, _tensors())
    content = bytearray((directory / NAME).read_bytes())
    for position in data.draw(st.lists(st.integers(0, len(content) * 8 - 1), max_size=4)):
        content[position // 8] ^= 1 << position % 8
    (directory / NAME).write_bytes(content[: data.draw(st.integers(0, len(content)))])

    try:
        found = _read(directory)
    except InvalidModel:
        return
    assert len(content) == (directory / NAME).stat().st_size
    assert len(_tensors()) == len(found)


# --- mapped ------------------------------------------------------------------------------------


def _mappings(path: Path) -> list[range]:
    """Return the address ranges at which a file is mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    places = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return [range(int(start, 16), int(end, 16)) for start, end in places]


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="/proc/self/maps does not exist"
)


def test_mapped_tensors_are_those_that_are_read(tmp_path: Path) -> None:
    tensors = {
        "w": np.arange(64, dtype=np.float32).reshape(4, 16),
        "flags": np.array([True, False, True]),
        "none": np.zeros((0, 4), np.int64),
        "one": np.array(7, np.int8),
    }
    record = write(tmp_path / NAME, tensors)

    found = dict(weights.read_mapped(tmp_path, NAME, record))

    assert tensors.keys() == found.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (found[name].dtype, found[name].shape)
        assert np.array_equal(tensor, found[name])
        assert not found[name].flags.writeable


@needs_proc
def test_mapped_tensors_are_the_file_and_go_with_the_last_of_them(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write(path, {"w": np.ones((64, 64), np.float32), "v": np.ones(16, np.float32)})

    found = dict(weights.read_mapped(tmp_path, path.name))
    (mapping,) = _mappings(path)

    assert all(tensor.ctypes.data in mapping for tensor in found.values())
    assert 0 == found["w"].ctypes.data % ALIGNMENT
    del found["w"]
    assert [mapping] == _mappings(path)
    del found["v"]
    assert [] == _mappings(path)


@pytest.mark.parametrize("position", [9, -1])
def test_changed_file_is_not_mapped(tmp_path: Path, position: int) -> None:
    """Before the first tensor, unlike one that is read: its pages are looked at in any case."""
    path = tmp_path / NAME
    record = write(path, {"w": np.ones(16, np.float32)})
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)

    with pytest.raises(InvalidModel, match=f"^{NAME} "):
        next(weights.read_mapped(tmp_path, path.name, record))
    assert [] == _mappings(path)
