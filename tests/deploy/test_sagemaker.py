"""The SageMaker image has the labels the platform needs, and uses supported flags."""

import json
import re
from pathlib import Path

import pytest
from support.images import ROOT, of, stages

from xlaserve.settings import Settings, sagemaker_environment
from xlaserve.settings.description import describe_settings
from xlaserve.settings.reading import ENVIRONMENT_PREFIX

PAGES = (ROOT / "docs/sagemaker.md", ROOT / "deploy/sagemaker/README.md")

_FLAG = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)")
_OURS = re.compile(rf"{ENVIRONMENT_PREFIX}[A-Z_]+")
_THEIRS = re.compile(r"(?<!_)SAGEMAKER_[A-Z_]+")
_FLAGS_OF_OTHERS = {"rm", "data-binary", "target", "build-arg", "mode"}
"""Flags of docker, tar and curl."""


def test_the_labels_of_a_multi_model_container() -> None:
    """Without them the platform assumes neither POST /models nor its own port."""
    capability = "com.amazonaws.sagemaker.capabilities"

    assert [f"{capability}.multi-models=true", f"{capability}.accept-bind-to-port=true"] == of(
        "LABEL"
    )


def test_the_platform_starts_it_with_serve() -> None:
    assert [["xlaserve"]] == [json.loads(argument) for argument in of("ENTRYPOINT")]
    assert [["serve"]] == [json.loads(argument) for argument in of("CMD")]


def test_its_variables_are_settings() -> None:
    environment = dict(argument.split("=", 1) for argument in of("ENV"))
    settings = Settings.read(environment)

    assert {"PATH", "XLASERVE_SAGEMAKER"} == set(environment)
    assert (True, f"port:{of('EXPOSE')[0]}") == (settings.sagemaker, settings.http_endpoint)


def test_the_image_of_no_target_is_the_server() -> None:
    *_, default = stages()

    assert "server" == default
    assert [] == of("CMD", "server")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_pages_name_is_there(page: Path) -> None:
    """Our flags and variables exist, and the platform's variables are read by the server."""
    text = page.read_text()
    settings = describe_settings()
    read = {
        value for value in vars(sagemaker_environment).values() if _THEIRS.fullmatch(str(value))
    }
    told_apart = {"SAGEMAKER_MODEL_SERVER_TIMEOUT", "SAGEMAKER_MODEL_SERVER_WORKERS"}

    assert set(_FLAG.findall(text)) <= {row.name.replace("_", "-") for row in settings} | (
        _FLAGS_OF_OTHERS
    )
    assert set(_OURS.findall(text)) <= {row.variable for row in settings}
    assert set(_THEIRS.findall(text)) <= read | told_apart


def test_every_variable_that_is_read_is_explained() -> None:
    explained = _THEIRS.findall(PAGES[0].read_text())

    assert [] == [
        value
        for value in vars(sagemaker_environment).values()
        if _THEIRS.fullmatch(str(value)) and value not in explained
    ]


def test_the_model_of_the_examples_is_packed_as_it_can_be_loaded() -> None:
    """`tar -C MODEL .` puts the contents of the model directory into the archive."""
    packed = re.search(r"tar -C (\S+) -czf \S+ \.", PAGES[1].read_text())
    assert packed

    assert (ROOT / packed[1] / "1/model.json").is_file()
