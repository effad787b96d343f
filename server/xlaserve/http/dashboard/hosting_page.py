"""The models of ModelMesh or SageMaker as JSON, for the status page and other clients."""

from types import MappingProxyType

import msgspec

from xlaserve.concurrency.others import NOBODY, About, Others, Question
from xlaserve.http.dashboard.permits import Permits, models_shown, permit_everything
from xlaserve.http.messages import HttpRequest, HttpResponse
from xlaserve.http.routing import Body, Route
from xlaserve.residence.platforms.hosting import (
    HostingBoard,
    HostingReading,
    fold_hosting,
    hosted_in_sight,
)
from xlaserve.serving.access.sight import everything
from xlaserve.serving.call import Operation

_FRESH = MappingProxyType({"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})


class HostingRoutes:
    """The handler that lists the models loaded by a platform."""

    def __init__(
        self,
        board: HostingBoard,
        others: Others = NOBODY,
        permits: Permits = permit_everything,
    ) -> None:
        self._permits = permits
        self._board = board
        self._others = others
        others.answer(Question.HOSTING, self._own)

    def table(self) -> list[Route]:
        """Return the route of the list of hosted models."""
        return [
            Route(
                "GET",
                "/page/hosting",
                Operation.PAGE,
                self.show,
                "Models that ModelMesh or SageMaker has loaded, with the sizes reported to a mesh",
                "people",
                Body(HostingReading),
            )
        ]

    async def show(self, request: HttpRequest) -> HttpResponse:
        """Return the platform (empty if there is none) and the models loaded on it."""
        own = await self._board.read()
        replies = await self._others.ask(Question.HOSTING, {}, own, HostingReading)
        reading = fold_hosting(replies.answers, replies.missing) if self._others.are_there else own
        sees = models_shown(self._permits, request.call)
        if sees is not everything:
            reading = hosted_in_sight(reading, sees)
        return HttpResponse(parts=[msgspec.json.encode(reading)], headers=_FRESH)

    async def _own(self, about: About) -> HostingReading:
        return await self._board.read()
