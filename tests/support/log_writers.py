"""Whatever can print in a server, beside the server: code that prints, and a mark to find it by."""

from collections.abc import Mapping
from dataclasses import dataclass

MARK = "the-mark"


@dataclass(frozen=True)
class Writer:
    """Code that prints `MARK`."""

    code: str
    alone: bool = False
    """Whether it ends its process, or forks it as it is: nothing for a server with threads."""
    lasts: bool = False
    """Whether it prints so much that what comes later within a second is left out."""


_RAW = "import ctypes, os; libc = ctypes.CDLL(None); "
_STDIO = "libc.fflush(None)"

WRITERS: Mapping[str, Writer] = {
    "a library that logs": Writer("logging.getLogger('lib').warning('two\\nthe-mark')"),
    "a library with a handler of its own": Writer(
        "own = logging.getLogger('own'); own.propagate = False; "
        "own.addHandler(logging.StreamHandler()); own.error('two\\nthe-mark')"
    ),
    "a library that sets up logging": Writer(
        "logging.basicConfig(format='PLAIN %(message)s'); logging.getLogger('l').error('the-mark')"
    ),
    "structlog": Writer("import structlog; structlog.get_logger().warning('the-mark')"),
    "a warning": Writer("warnings.warn('two\\nthe-mark', stacklevel=1)"),
    "a deprecation": Writer(
        "warnings.simplefilter('always'); warnings.warn('the-mark', DeprecationWarning)"
    ),
    "a line": Writer("print('the-mark', file=sys.stderr)"),
    "a line on stdout": Writer("print('the-mark')"),
    "a part of a line": Writer("sys.stderr.write('a '); sys.stderr.write('the-mark\\n')"),
    "a line where the interpreter began": Writer("print('the-mark', file=sys.__stderr__)"),
    "bytes of Python": Writer("sys.stdout.buffer.write(b'the-mark\\n'); sys.stdout.flush()"),
    "a process that is forked": Writer(
        "import multiprocessing as m; p = m.get_context('fork').Process("
        "target=print, args=('the-mark',)); p.start(); p.join()",
        alone=True,
    ),
    "a process that is forked and fails": Writer(
        "import multiprocessing as m; p = m.get_context('fork').Process("
        "target=int, args=('the-mark',)); p.start(); p.join()",
        alone=True,
    ),
    "a record that cannot be formatted": Writer(
        "logging.getLogger('lib').error('the-mark %d', '')"
    ),
    "a traceback": Writer("import traceback; traceback.print_exception(ValueError('the-mark'))"),
    "a thread": Writer("t = threading.Thread(target=int, args=('the-mark',)); t.start(); t.join()"),
    "a finalizer": Writer("A = type('A', (), {'__del__': lambda self: int('the-mark')}); A()"),
    "a task": Writer(
        "import asyncio\n"
        "async def forgotten():\n"
        "    asyncio.ensure_future(failing())\n"
        "    await asyncio.sleep(0)\n"
        "    await asyncio.sleep(0)\n"
        "    gc.collect()\n"
        "async def failing():\n"
        "    raise ValueError('the-mark')\n"
        "asyncio.run(forgotten())",
    ),
    "nobody": Writer("int('the-mark')", alone=True),
    "the end of the interpreter": Writer(
        "import atexit; atexit.register(int, 'the-mark')", alone=True
    ),
    "a crash": Writer(
        "import faulthandler, os; faulthandler.enable(sys.stderr); "
        "os.write(2, b'the-mark, then '); os.abort()",
        alone=True,
    ),
    "faulthandler": Writer(
        "import faulthandler; code = compile('faulthandler.dump_traceback(file=2)', 'the-mark', "
        "'exec'); exec(code, {'faulthandler': faulthandler})"
    ),
    "write(2)": Writer(_RAW + "data = b'the-mark\\n'; libc.write(2, data, len(data))"),
    "write(1)": Writer(_RAW + "data = b'the-mark\\n'; libc.write(1, data, len(data))"),
    "printf": Writer(_RAW + "libc.printf(b'the-mark\\n'); " + _STDIO),
    "fprintf(stderr)": Writer(
        _RAW + "libc.fprintf(ctypes.c_void_p.in_dll(libc, 'stderr'), b'the-mark\\n')"
    ),
    "perror": Writer(_RAW + "libc.perror(b'the-mark')"),
    "a native line without its end": Writer(_RAW + "os.write(2, b'the-mark')"),
    "native bytes that are not UTF-8": Writer(
        _RAW + "os.write(1, b'\\xff\\x00\\x1b[2J\\r\\xe2\\x80 the-mark\\n')"
    ),
    "a native line that looks like a record": Writer(
        _RAW + 'os.write(2, b\'{"event": "the-mark"}\\n\')'
    ),
    "a process": Writer("import subprocess; subprocess.run(['echo', 'the-mark'], check=True)"),
    "a process that complains": Writer(
        "import subprocess; subprocess.run(['ls', '/the-mark'], check=False)"
    ),
    "a long line": Writer("print('the-mark' + 'x' * (1 << 20))", lasts=True),
    "a long native line": Writer(
        _RAW + "os.write(2, b'the-mark' + b'x' * (1 << 20) + b'\\n')", lasts=True
    ),
    "a long native line of hostile bytes": Writer(
        _RAW + "os.write(2, b'the-mark' + b'\\xff' * (1 << 20) + b'\\n')", lasts=True
    ),
}

TOGETHER = tuple(name for name, writer in WRITERS.items() if not writer.alone)
"""Those that one process can be asked for, one after the other."""


def mark(name: str) -> str:
    """Return what a writer prints where several do."""
    return f"{MARK}-{list(WRITERS).index(name)}-"


def code(name: str) -> str:
    """Return its code."""
    return WRITERS[name].code.replace(MARK, mark(name))
