"""One model as JSON, for its page."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

import msgspec

from xlaserve.concurrency.others import NOBODY, About, Others, Question
from xlaserve.http.dashboard.permits import Permits, models_shown, permit_everything
from xlaserve.http.messages import HttpRequest, HttpResponse
from xlaserve.http.routing import Body, Route
from xlaserve.http.v2.statistics import ModelStatistics, statistics_json
from xlaserve.residence.catalog import Catalog
from xlaserve.residence.reports.fold_model import fold_model
from xlaserve.residence.reports.model_board import (
    LoadedReading,
    ModelBoard,
    ModelReading,
    VersionReading,
    executed_rows,
    of_model_in_sight,
)
from xlaserve.serving.access.sight import everything
from xlaserve.serving.call import Call, Operation
from xlaserve.serving.observability.events import MAX_NAME, Origin, cut
from xlaserve.serving.observability.failures import FailedCall

_FRESH = MappingProxyType({"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})


class Permissions(msgspec.Struct):
    """Operations on the model that the client is permitted."""

    infer: bool
    metadata: bool
    manage: Annotated[
        bool, msgspec.Meta(description="Whether the client may load and unload the model.")
    ]


class VersionOfPage(msgspec.Struct):
    """One version of a model, as on the model's page."""

    version: str
    state: str
    reason: str
    loads: int
    load_failures: int
    unloads: int
    load_seconds: float
    origin: Annotated[
        Origin | None, msgspec.Meta(description="Who requested the last load, and when.")
    ]
    loaded: LoadedReading | None
    statistics: ModelStatistics
    failures: Annotated[
        Mapping[str, int], msgspec.Meta(description="Number of failed requests, by reason.")
    ]
    bucket_executions: Annotated[
        Mapping[str, int], msgspec.Meta(description="Number of executions, by batch size.")
    ]
    executed_rows: Annotated[int, msgspec.Meta(description="Rows computed, including padding.")]
    padding_rows: int


class ModelOfPage(msgspec.Struct):
    """One model with its versions, as on its page."""

    name: str
    may: Permissions
    in_progress: Annotated[
        int, msgspec.Meta(description="Requests in progress, over all versions.")
    ]
    dependents: Annotated[
        list[str], msgspec.Meta(description="Loaded ensembles that use this model.")
    ]
    reason: Annotated[
        str, msgspec.Meta(description="Why the model is not loaded, if it has no versions.")
    ]
    versions: list[VersionOfPage]
    errors: Annotated[
        Sequence[FailedCall],
        msgspec.Meta(description="This model's failures among the server's last 50."),
    ]
    grpc_endpoint: Annotated[
        str, msgspec.Meta(description="The gRPC endpoint in the settings: `port:8001`.")
    ]
    missing: Annotated[
        Mapping[str, str],
        msgspec.Meta(description="Server processes whose data is missing, each with the reason."),
    ]


class ModelPageRoutes:
    """The handler of the model page's data."""

    def __init__(
        self,
        board: ModelBoard,
        catalog: Catalog,
        others: Others = NOBODY,
        *,
        permits: Permits = permit_everything,
        controllable: bool = True,
        grpc_endpoint: str = "",
    ) -> None:
        """`controllable` tells whether clients may load and unload models at all."""
        self._board = board
        self._catalog = catalog
        self._others = others
        self._permits = permits
        self._controllable = controllable
        self._grpc_endpoint = grpc_endpoint
        others.answer(Question.MODEL, self._own)

    def table(self) -> list[Route]:
        """Return the route of the model page's data."""
        return [
            Route(
                "GET",
                "/page/models/{model}",
                Operation.PAGE,
                self.show,
                "Data of the page of a model",
                "people",
                Body(ModelOfPage),
                errors=(404,),
            )
        ]

    async def show(self, request: HttpRequest) -> HttpResponse:
        """Return one model; raises ModelNotFound or StillStarting for a missing one."""
        about = {"model": request.names["model"]}
        sees = models_shown(self._permits, request.call)
        if not sees(about["model"]):
            raise self._catalog.absent(about["model"])
        own = await self._own(about)
        replies = await self._others.ask(Question.MODEL, about, own, ModelReading)
        reading = fold_model(replies.answers) if self._others.are_there else own
        if not reading.is_known and not await self._catalog.could_load(reading.name):
            raise self._catalog.absent(reading.name)
        if sees is not everything:
            reading = of_model_in_sight(reading, sees, cut(request.call.owner, MAX_NAME))
        may = self._may(request.call, reading.name)
        reason = reading.reason or self._catalog.why_not_loaded(reading.name)
        missing = replies.missing if sees is everything else {}
        answer = _page(reading, may, self._grpc_endpoint, missing, reason)
        return HttpResponse(parts=[msgspec.json.encode(answer)], headers=_FRESH)

    async def _own(self, about: About) -> ModelReading:
        return self._board.read(about["model"])

    def _may(self, call: Call, model: str) -> Permissions:
        def may(operation: Operation) -> bool:
            return self._permits(call, operation)(model)

        return Permissions(
            may(Operation.INFER),
            may(Operation.METADATA),
            self._controllable and may(Operation.MANAGE),
        )


def _page(
    reading: ModelReading,
    may: Permissions,
    grpc_endpoint: str,
    missing: Mapping[str, str],
    reason: str,
) -> ModelOfPage:
    return ModelOfPage(
        reading.name,
        may,
        reading.in_progress,
        list(reading.dependents),
        "" if reading.versions else reason,
        [_version(version) for version in reading.versions],
        reading.failures,
        grpc_endpoint,
        dict(missing),
    )


def _version(version: VersionReading) -> VersionOfPage:
    executions: dict[str, int] = {}
    computed = padding = 0
    if version.loaded is not None:
        for bucket, count, rows in executed_rows(version.report):
            executions[str(bucket)] = executions.get(str(bucket), 0) + count
            computed += bucket * count
            padding += (bucket - rows) * count
    return VersionOfPage(
        version.version,
        version.state,
        version.reason,
        version.loads,
        version.load_failures,
        version.unloads,
        version.load_seconds,
        version.origin,
        version.loaded,
        statistics_json([version.report]).model_stats[0],
        {reason.value: count for reason, count in version.report.totals.failures.items() if count},
        executions,
        computed,
        padding,
    )
