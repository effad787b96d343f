"""Errors for a function that cannot be exported: one line, which names the author's line."""

from pathlib import Path

import pytest

from xlaserve.cli.export import export
from xlaserve.errors import InvalidModel

SOURCE = """\
import numpy as np
from xlaserve import Exportable
def raises(params, x):
    raise ValueError("of my\\nown " + "x" * 1000)
def arity(params):
    return {"y": params["w"]}
def branches(params, x):
    return {"y": x if x[0, 0] > 0 else -x}
def factory():
    return {}["none"]
def rows(params, x):
    return {"y": sum(x[i] for i in range(x.shape[0]))}
def silent():
    raise RuntimeError
PARAMS, INPUTS = {"w": np.ones((2, 2), np.float32)}, {"x": ("FP32", [-1, 2])}
raising = Exportable(raises, PARAMS, INPUTS)
few = Exportable(arity, PARAMS, INPUTS)
branching = Exportable(branches, PARAMS, INPUTS)
looping = Exportable(rows, PARAMS, INPUTS)
wrong = Exportable(arity, PARAMS, INPUTS, compiled_shapes=7)
"""

DROPPING = """\
import jax, jax.numpy as jnp
from xlaserve import Exportable
def drops(params, x):
    return {{"y": jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, (4,)), x, 0)}}
model = Exportable(drops, {{}}, {{"x": ("FP32", [-1, 4])}}, training_mode={accepted})
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "author.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("accepted", [False, True])
def test_dropout_in_plain_jax_is_named_as_at_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, accepted: bool
) -> None:
    source = tmp_path / "dropping.py"
    source.write_text(DROPPING.format(accepted=accepted))
    export(f"{source}:model", tmp_path / "m")

    assert accepted is ("jax.random.bernoulli draws" not in capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "where", "text"),
    [
        ("raising", ":4, in raises: `raise ValueError(", "of my own xxx"),
        ("branching", ':8, in branches: `return {"y": x if', "Attempted boolean conversion of"),
        ("looping", ":12, in rows: `return", "replace a loop over rows by jax.vmap"),
        ("factory", ':10, in factory: `return {}["none"]`', ": KeyError: 'none'"),
        ("silent", ":14, in silent: `raise RuntimeError`", ": RuntimeError"),
        ("wrong", ":wrong", ": TypeError: "),
    ],
)
def test_an_exception_is_one_line_that_names_the_authors(
    source: Path, tmp_path: Path, name: str, where: str, text: str
) -> None:
    with pytest.raises(InvalidModel) as caught:
        export(f"{source}:{name}", tmp_path / "m")
    said = str(caught.value)

    assert said.startswith(f"{source}{where}")
    assert text in said
    assert "\n" not in said
    assert len(said) < 800
    assert not (tmp_path / "m").exists()


def test_a_refusal_of_ours_is_as_it_was(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="^the function cannot be exported.*takes 1 positional"):
        export(f"{source}:few", tmp_path / "m")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = (\n", ":1: SyntaxError: '(' was never closed"),
        ("import nothing_there", ":1, in <module>: `import nothing_there`: ModuleNotFoundError: "),
    ],
)
def test_a_file_that_cannot_be_run_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "author.py"
    path.write_text(text)
    with pytest.raises(InvalidModel) as caught:
        export(f"{path}:x", tmp_path / "m")

    assert str(caught.value).startswith(f"{path}{said}")


def test_the_traceback_is_there_for_the_asking(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidModel):
        export(f"{source}:factory", tmp_path / "m")

    assert "" == capsys.readouterr().err

    with pytest.raises(InvalidModel):
        export(f"{source}:factory", tmp_path / "m", with_traceback=True)

    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_what_is_there_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    with pytest.raises(InvalidModel, match="already exists: .* with --overwrite$"):
        export(f"{source}:few", tmp_path / "m")
