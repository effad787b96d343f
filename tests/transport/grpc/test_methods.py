"""The method table: it has a row for every method of the contracts, and accepts custom rows."""

from pathlib import Path
from typing import Any

import pytest
from support import echo_service

from xlaserve.app.server import Application
from xlaserve.grpc.methods import ALIASES, ROWS, methods_of
from xlaserve.grpc.services.model_runtime import ModelRuntimeService
from xlaserve.serving.call import Operation
from xlaserve.settings import Settings

SERVICE = "/inference.GRPCInferenceService/"
INFER = f"{SERVICE}ModelInfer"


async def test_every_method_of_the_contracts_has_a_row(tmp_path: Path) -> None:
    """The row names fields that the request type of the method has."""
    settings = Settings(
        repository=tmp_path, grpc_endpoint="port:0", http_endpoint="none", modelmesh=True
    )
    application = Application(settings)
    async with application.running():
        served = application.grpc._runner.methods

    assert {*ROWS, *ALIASES} == set(served)
    assert {path: served[path].row for path in ALIASES} == {
        path: ROWS[other] for path, other in ALIASES.items()
    }
    assert Operation.SERVICE not in {row.operation for row in ROWS.values()}
    for path, row in ROWS.items():
        fields = set(served[path].handler.request_type.__dataclass_fields__)

        assert {row.model, row.version} - {""} <= fields, path
        if row.id_path:
            # A mesh writes its id into the field of the model name, and manages no models by
            # methods.
            field = served[path].handler.request_type.__dataclass_fields__[row.model]
            assert (field.metadata["betterproto"].number,) == row.id_path, path
            assert row.operation is not Operation.MANAGE, path


async def test_a_mesh_is_told_the_paths_that_rows_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that are spliced are those reported to the mesh: there is no second list."""
    told = []
    original = ModelRuntimeService.__init__

    def noting(self: ModelRuntimeService, *given: Any, **options: Any) -> None:
        told.append(options["paths"])
        original(self, *given, **options)

    monkeypatch.setattr(ModelRuntimeService, "__init__", noting)
    settings = Settings(
        repository=tmp_path, grpc_endpoint="port:0", http_endpoint="none", modelmesh=True
    )
    application = Application(settings)
    async with application.running():
        spliced = application.grpc._runner._injection._by_method

    wanted = {path: row.id_path for path, row in ROWS.items() if row.id_path}
    assert [wanted] == [{path: where.numbers for path, where in paths.items()} for paths in told]
    assert set(wanted) == set(spliced)
    assert {INFER, f"{SERVICE}ModelMetadata", f"{SERVICE}ModelReady"} <= set(wanted)


def test_a_method_without_a_row_is_of_a_service_of_ones_own() -> None:
    methods = methods_of([echo_service.Echo()])

    assert {Operation.SERVICE} == {method.row.operation for method in methods.values()}
