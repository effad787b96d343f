import os
import subprocess

from xlaserve.python_models.process.running import RunningProcess


def test_a_process_that_another_thread_has_waited_for_has_ended() -> None:
    """The kernel has reported the exit, but Python has not recorded it yet."""
    running = RunningProcess.__new__(RunningProcess)
    running._process = subprocess.Popen(["true"])
    os.waitpid(running._process.pid, 0)

    assert running._process.returncode is None
    assert running.has_ended

    running._process.wait()
