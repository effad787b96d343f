"""The table of methods: every one of the contracts has a row, and others are of one's own."""

from pathlib import Path

from support import echo_service

from xlaserve.app import Application
from xlaserve.core.serving.call import Operation
from xlaserve.settings import Settings
from xlaserve.transport.grpc.methods import ROWS, methods_of


async def test_every_method_of_the_contracts_has_a_row(tmp_path: Path) -> None:
    """And it names fields that the request of the method has."""
    settings = Settings(
        repository=tmp_path, grpc_endpoint="port:0", http_endpoint="none", modelmesh=True
    )
    application = Application(settings)
    async with application.running():
        served = application.grpc._runner.methods

    assert set(ROWS) == set(served)
    assert Operation.SERVICE not in {row.operation for row in ROWS.values()}
    for path, row in ROWS.items():
        fields = set(served[path].handler.request_type.__dataclass_fields__)

        assert {row.model, row.version} - {""} <= fields, path


def test_a_method_without_a_row_is_of_a_service_of_ones_own() -> None:
    methods = methods_of([echo_service.Echo()])

    assert {Operation.SERVICE} == {method.row.operation for method in methods.values()}
