"""Statistics and index merged over all processes of the server."""

from dataclasses import replace

from xlaserve.concurrency.others import NOBODY, About, Others, Question
from xlaserve.errors import ModelNotFound, ModelNotReady
from xlaserve.residence.catalog import Catalog, IndexEntry
from xlaserve.residence.lifecycle import State
from xlaserve.residence.reports.fold_models import fold_index, fold_reports
from xlaserve.residence.reports.monitor import VersionReport
from xlaserve.serving.access.sight import seen_now, without_names


class OfAll:
    """Queries the catalogs of all workers, and merges the answers."""

    def __init__(self, catalog: Catalog, others: Others = NOBODY) -> None:
        self._catalog = catalog
        self._others = others
        others.answer(Question.STATISTICS, self._own_statistics)
        others.answer(Question.INDEX, self._own_index)

    async def statistics(self, name: str = "", version: str = "") -> list[VersionReport]:
        """Return the merged statistics of the ready versions; see `Catalog.statistics`.

        Raises WorkersSilent if a worker does not answer, since the counts would be too low.
        """
        own = self._catalog.statistics(name, version)
        if not self._others.are_there:
            return own
        about = {"model": name, "version": version}
        replies = await self._others.ask(Question.STATISTICS, about, own, list[VersionReport])
        sees = seen_now()
        reports = fold_reports(replies.complete().values())
        return [report for report in reports if name or sees(report.name)]

    async def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """Return the merged index; a version is READY if it is ready in every worker.

        Raises WorkersSilent if a worker does not answer.
        """
        own = await self._catalog.index(ready=ready and not self._others.are_there)
        if not self._others.are_there:
            return own
        replies = await self._others.ask(Question.INDEX, {}, own, list[IndexEntry])
        sees = seen_now()
        # Other workers do not know the caller and return every model.
        rows = [
            replace(row, reason=without_names(row.reason, sees))
            for row in fold_index(replies.complete())
            if sees(row.name)
        ]
        return [row for row in rows if row.state == State.READY.public] if ready else rows

    # --- Questions of other workers ---

    async def _own_statistics(self, about: About) -> list[VersionReport]:
        try:
            return self._catalog.statistics(about["model"], about["version"])
        except (ModelNotFound, ModelNotReady):
            return []  # this worker has served no request of the model

    async def _own_index(self, about: About) -> list[IndexEntry]:
        return await self._catalog.index()
