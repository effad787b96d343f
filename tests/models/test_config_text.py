import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import parse_json, parse_pbtxt, read_config


@pytest.mark.parametrize("text", ['{"name": "\u00e9"}', '{"name": "\u00e9"}'.encode()])
def test_json_is_text_or_utf_8(text: str | bytes) -> None:
    assert "\u00e9" == parse_json(text).name


@pytest.mark.parametrize("text", ['name: "\u00e9"', 'name: "\u00e9"'.encode()])
def test_pbtxt_is_text_or_utf_8(text: str | bytes) -> None:
    assert "\u00e9" == parse_pbtxt(text).name


def test_other_encoding_is_refused() -> None:
    with pytest.raises(InvalidModel, match="config: expected UTF-8, got another byte at 0"):
        parse_json('{"name": "x"}'.encode("utf-16"))
    with pytest.raises(InvalidModel, match="config: expected UTF-8, got another byte at 7"):
        parse_pbtxt(b'name: "\xff"')


def test_fault_starts_with_the_name_of_the_source() -> None:
    with pytest.raises(InvalidModel, match=r"^parameter 'config': max_batch_size: expected 0"):
        parse_json('{"max_batch_size": -1}', source="parameter 'config'")


def test_size_is_bounded_in_bytes() -> None:
    text = '{"name": "\u00e9"}'
    size = len(text.encode())

    assert "\u00e9" == parse_json(text, limit_bytes=size).name
    with pytest.raises(InvalidModel, match=f"expected at most {size - 1} bytes, got {size}"):
        parse_json(text, limit_bytes=size - 1)


@given(st.binary() | st.text())
def test_any_text_is_a_configuration_or_invalid(text: str | bytes) -> None:
    """No text raises anything but InvalidModel."""
    for parse in (parse_json, parse_pbtxt):
        try:
            parse(text)
        except InvalidModel:
            continue


def test_directory_without_configuration_has_the_default_one(tmp_path: Path) -> None:
    assert ModelConfig() == read_config(tmp_path)
    assert read_config(tmp_path).message is None


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.json", '{"maxBatchSize": 4}'), ("config.pbtxt", "max_batch_size: 4")],
)
def test_configuration_is_read_from_the_directory(tmp_path: Path, name: str, text: str) -> None:
    tmp_path.joinpath(name).write_text(text)

    assert 4 == read_config(tmp_path).max_batch_size


def test_two_configurations_are_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text("{}")
    tmp_path.joinpath("config.pbtxt").write_text("")

    with pytest.raises(InvalidModel, match=r"one of config\.json and config\.pbtxt, got both"):
        read_config(tmp_path)


def test_fault_of_a_file_names_the_file_but_not_its_directory(tmp_path: Path) -> None:
    tmp_path.joinpath("config.pbtxt").write_text("name: 1")

    with pytest.raises(InvalidModel) as caught:
        read_config(tmp_path)

    assert 'config.pbtxt: line 1, column 7: expected a string, got "1"' == str(caught.value)


def test_size_of_a_file_is_checked_before_it_is_read(tmp_path: Path) -> None:
    with tmp_path.joinpath("config.json").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(InvalidModel, match=r"config\.json: expected at most 1048576 bytes"):
        read_config(tmp_path)


def test_link_to_a_file_is_followed(tmp_path: Path) -> None:
    """Kubernetes mounts files of a volume as links."""
    tmp_path.joinpath("data").write_text('{"name": "x"}')
    tmp_path.joinpath("config.json").symlink_to("data")

    assert "x" == read_config(tmp_path).name


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    """A FIFO would block, and a device may be endless."""
    config = tmp_path / "config.json"
    os.mkfifo(config)
    with pytest.raises(InvalidModel, match=r"config\.json is not a regular file"):
        read_config(tmp_path)

    config.unlink()
    config.symlink_to("/dev/zero")
    with pytest.raises(InvalidModel, match=r"config\.json is not a regular file"):
        read_config(tmp_path)

    config.unlink()
    config.mkdir()
    with pytest.raises(InvalidModel, match=r"config\.json is not a regular file"):
        read_config(tmp_path)


def test_link_to_nothing_is_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("config.pbtxt").symlink_to("nowhere")

    with pytest.raises(InvalidModel, match=r"config\.pbtxt: cannot be read, No such file"):
        read_config(tmp_path)
