"""An imported torch.export program answers like PyTorch."""

# pyright: reportAttributeAccessIssue=false

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support.pt2_models import answers, changed, path
from support.server import Serve
from typer.testing import CliRunner, Result

from xlaserve.artifact import manifest
from xlaserve.cli import application
from xlaserve.errors import InvalidModel, InvalidRequest
from xlaserve.row_proofs.verdict import Independence


def imported(*arguments: object) -> Result:
    result = CliRunner().invoke(application(), ["import", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("mlp", ["output"]),
        pytest.param("transformer", ["logits", "pooled"], marks=pytest.mark.slow),
    ],
)
async def test_an_imported_program_answers_over_grpc_as_pytorch_did(
    tmp_path: Path, serve: Serve, name: str, outputs: list[str]
) -> None:
    """Batches of one row, of the example's size, and larger."""
    sized = ["--dim", f"{archive_symbol('transformer')}=7"] if name == "transformer" else []
    imported(path(name), tmp_path / "models" / name, *sized)
    described = manifest.read(tmp_path / "models" / name / "1")
    assert described.verdict is not None
    assert Independence.PROVED is described.verdict.independence
    given, expected = answers(name)
    async with (
        serve(tmp_path / "models", model_control_mode="none") as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        for rows in ([0, 1], [1], [1, 0, 1]):
            inputs = []
            for spec, values in zip(described.inputs, given, strict=True):
                shape = [len(rows), *values.shape[1:]]
                inputs.append(triton.InferInput(spec.name, shape, spec.datatype.name))
                inputs[-1].set_data_from_numpy(values[rows])
            answer: Any = await client.infer(name, inputs)
            for output, values in zip(outputs, expected, strict=True):
                found = answer.as_numpy(output)
                assert found is not None
                np.testing.assert_allclose(found, values[rows], rtol=1e-4, atol=1e-5)


def archive_symbol(name: str) -> str:
    """Return the name that PyTorch chose for the symbolic number of tokens."""
    from xlaserve.importers.pt2 import archive

    program = archive.open_file(path(name)).program
    return str(program.graph.tensors["ids"].sizes[1])


def test_the_largest_batch_is_the_one_that_was_exported_for(tmp_path: Path) -> None:
    imported(path("mlp"), tmp_path / "m")

    assert 8 == manifest.read(tmp_path / "m/1").max_batch_size


def test_a_program_of_fixed_shapes_has_no_batch(tmp_path: Path) -> None:
    imported(path("fixed"), tmp_path / "m", "--version", "3")

    described = manifest.read(tmp_path / "m/3")
    assert (0, ["FP32[4,6]"]) == (described.max_batch_size, list(map(str, described.inputs)))


@pytest.mark.parametrize(
    ("name", "arguments", "error", "text"),
    [
        ("fixed", ["--const", "x=1"], InvalidRequest, "--const is for ONNX files"),
        ("fixed", ["--no-check"], InvalidRequest, "--check is for ONNX files"),
        ("fixed", ["--output", "z"], InvalidModel, "unknown output 'z', the model has output"),
        ("fixed", ["--dim", "n=3"], InvalidModel, "no dimension 'n', it has none"),
        ("fixed", ["--max-batch-size", "4"], InvalidModel, "--max-batch-size 4: expected a"),
        ("fixed", ["--limit-bytes", "100"], InvalidModel, "more than the 100 allowed"),
        ("mlp", ["--max-batch-size", "9"], InvalidModel, "exported for 8 rows at most"),
        (
            "transformer",
            [],
            InvalidModel,
            "is dynamic, but only the leading dimension of every input may be: set a size with",
        ),
        ("transformer", ["--dim", "{}=13"], InvalidModel, "was exported for 2 to 12"),
    ],
)
def test_what_an_import_cannot_obey_is_refused(
    tmp_path: Path, name: str, arguments: list[str], error: type[Exception], text: str
) -> None:
    """A failed import leaves no files."""
    given = [text.format(archive_symbol("transformer")) for text in arguments]
    with pytest.raises(error, match=text):
        imported(path(name), tmp_path / "models/m", *given)

    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("target", "torch.ops.aten.nonzero.default", "depends on data"),
        ("target", "torch.ops.aten.linears.default", "is not one of the .*; did you mean linear"),
        ("target", "torch.ops.quantized.linear.default", "; only aten operators are supported"),
        ("target", "os.system", "; only aten operators are supported"),
        ("target", "torch.ops.aten.relu.default", "argument 'self' is missing"),
        ("outputs", [], "reads 'linear', which no earlier node computes"),
    ],
)
def test_a_node_that_is_unknown_is_named(
    tmp_path: Path, field: str, value: object, text: str
) -> None:
    file = tmp_path / "m.pt2"
    nodes = "nodes"
    file.write_bytes(
        changed("mlp", lambda t: t["graph_module"]["graph"][nodes][0].update({field: value}))
    )

    with pytest.raises(InvalidModel, match=rf"node '.*' \(.*\).*{text}"):
        imported(file, tmp_path / "models/m")
