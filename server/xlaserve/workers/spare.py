"""The spare engine process, which has imported JAX ahead of time."""

import structlog

from xlaserve.workers.channel import ChannelError
from xlaserve.workers.worker_process import Role, WorkerProcess

_log = structlog.get_logger("processes")


class Spare:
    """Starts processes, and keeps one role's replacement ready. Used from the event loop only."""

    def __init__(self, role: Role | None) -> None:
        """`role` is the role to keep a spare for; None disables the spare."""
        self._role = role
        self._process: WorkerProcess | None = None
        self._is_starting = self._is_closed = False

    async def started(self, role: Role) -> WorkerProcess:
        """Return a started and configured process; raises OSError and ChannelError.

        Uses the spare if it exists, is running and is not stopped by a signal.
        """
        spare = self._process
        if role is not self._role or spare is None:
            return await WorkerProcess.start(role)
        self._process = None
        if spare.may_begin:
            try:
                spare.channel.send(spare.begin)
            except ChannelError as error:
                _log.warning("spare engine lost", reason=str(error))
            else:
                return spare
        await _ended(spare)
        return await WorkerProcess.start(role)

    async def prepare(self) -> None:
        """Start the spare, unless there is one already."""
        if self._role is None or self._process or self._is_starting or self._is_closed:
            return
        self._is_starting = True
        try:
            spare = await WorkerProcess.ahead(self._role)
        except OSError as error:
            _log.warning("spare engine not started", reason=str(error))
            return
        finally:
            self._is_starting = False
        if self._is_closed:
            await _ended(spare)
            return
        self._process = spare
        _log.info("spare engine started", pid=spare.process.pid)

    async def close(self) -> None:
        """Kill the spare, and start no other."""
        self._is_closed = True
        spare, self._process = self._process, None
        if spare is not None:
            await _ended(spare)


async def _ended(spare: WorkerProcess) -> None:
    spare.kill()
    await spare.ended()
