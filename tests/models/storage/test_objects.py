import pytest

from xlaserve.errors import InvalidModel
from xlaserve.storage.objects import RemoteObject, check_names


def objects(*names: str) -> list[RemoteObject]:
    return [RemoteObject(name, 1, "mark") for name in names]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["1/../../etc/passwd"], "'..' in its path"),
        (["1/./w"], "'..' in its path"),
        (["1//w"], "an empty name"),
        (["/etc/passwd"], "an absolute name"),
        (["1\\..\\w"], "a backslash in its name"),
        (["1/w\0"], "has an unprintable name"),
        (["1/w\n"], "has an unprintable name"),
        (["1/w", "1/W"], "'1/w' and '1/W' differ only in case"),
        (["A/x", "a/y"], "'A' and 'a' differ only in case"),
        (["1", "1/w"], "'1/w' is nested below another object"),
        (["1/" + "w" * 256], "too long for a file"),
        (["/".join(["w"] * 600)], "too long for a file"),
    ],
)
def test_names_that_are_no_files_of_one_directory_are_refused(
    names: list[str], reason: str
) -> None:
    with pytest.raises(InvalidModel) as raised:
        check_names(objects(*names))

    assert reason in str(raised.value)


def test_ordinary_names_are_taken() -> None:
    check_names(objects("config.pbtxt", "1/model.json", "1/sub/größe.bin", "2/model.json"))
