"""The spare process for an engine, which has imported all that one needs."""

import structlog

from xlaserve.workers.channel import ChannelError
from xlaserve.workers.worker_process import Role, WorkerProcess

_log = structlog.get_logger("processes")


class Spare:
    """Starts processes, and one ahead of its time for one role. Of the event loop."""

    def __init__(self, role: Role | None) -> None:
        """`role` is the one that has a spare; None for none."""
        self._role = role
        self._process: WorkerProcess | None = None
        self._is_starting = self._is_closed = False

    async def started(self, role: Role) -> WorkerProcess:
        """Return a process that was told who it is; raises OSError and ChannelError.

        That is the spare, where it has not ended, and nobody has stopped it.
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
        """Start the spare, unless there is one."""
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
        """End the spare; no other is started."""
        self._is_closed = True
        spare, self._process = self._process, None
        if spare is not None:
            await _ended(spare)


async def _ended(spare: WorkerProcess) -> None:
    spare.kill()
    await spare.ended()
