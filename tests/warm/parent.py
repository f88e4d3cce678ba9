"""A process that has imported torch and Lightning, and forks one that goes on as a script's own.

    python tests/warm/parent.py PREFIX      its socket is PREFIX and the numbers of its namespaces

To import torch takes 5 s of a slow machine, to fork takes milliseconds, and the tests start Python
about a thousand times. conftest.py starts this process and puts sitecustomize.py, beside it, on
PYTHONPATH: a start of Python anywhere below the tests (torchrun, its ranks, mp.spawn) sends here
its command line, environment, open files and folder. A pretended node has a parent of its own.
What is as in a start of its own: all of these, the signals that it gets, its exit code, its
death when the first process dies. What is not: it is another process, with another parent, and
torch has read its environment already. Tests that are about these are marked `cold`.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import random
import runpy
import select
import selectors
import signal
import socket
import sys
import threading
import types

import warm_place

HIGH = 400  # numbers that no file of a script has


def prepare():
    names = ["lightning", "numpy", "torch", "torch._dynamo", "torch.distributed.run", "tqdm"]
    for name in (*names, "torch.distributed.elastic.multiprocessing", "torchvision"):
        importlib.import_module(name)


def take(connection):
    """Return a request and the files that came with it."""
    head, files, _, _ = socket.recv_fds(connection, 8, 253)
    size, text = int.from_bytes(head, "big"), b""
    while len(text) < size:
        text += connection.recv(size - len(text))
    return json.loads(text), files


def become(request, files, connection):
    """In the fork: have the files, the folder, the environment and the signals of the start."""
    # From now on, whoever handed this start over and dies, takes this process with it.
    control = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, HIGH)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) | os.O_ASYNC)
    connection.close()
    files = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH) for file in files]
    os.closerange(0, HIGH)
    os.setsid()
    here, *files = files
    os.fchdir(here)
    for file, number in zip(files, request["numbers"], strict=True):
        os.dup2(file, number)
    os.closerange(control + 1, HIGH + 300)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(request["environ"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(number, "w", closefd=False) if number in request["numbers"] else None  # noqa: SIM115
        if stream and (number == 2 or request["unbuffered"]):
            stream.reconfigure(line_buffering=number == 2, write_through=request["unbuffered"])
        setattr(sys, name, stream)
    if 0 in request["numbers"]:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115


def as_new():
    """What a new interpreter would have found in the environment, or drawn."""
    import numpy
    import torch
    import torch.distributed as dist

    random.seed()
    numpy.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    dist.set_debug_level_from_env()
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # where a spawned process looks for a file


def run(kind, what, arguments):
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main
    extra = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    first = os.path.dirname(os.path.abspath(what)) if kind == "file" else ""
    sys.path[:] = [os.getcwd() if kind == "-m" else first, *extra, *BASE]
    sys.argv = [what if kind == "file" else kind, *arguments]
    if kind == "-m":
        sys.modules.pop(what, None)  # what it imports stays
        return runpy._run_module_as_main(what)
    if kind == "-c":
        return exec(compile(what, "<string>", "exec"), main.__dict__)
    main.__file__ = os.path.abspath(what)
    with open(what, "rb") as file:
        code = compile(file.read(), what, "exec")
    exec(code, main.__dict__)


def listen(address):
    """Return a socket to listen on, once there is a first start: to import takes seconds."""
    listener = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(address)  # of a node that is gone: the numbers of namespaces come again
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:  # the tests are over
        sys.exit()
    return listener


def serve(listener):
    """Return in a fork only, with its request."""
    ends, tells = socket.socketpair()
    tells.setblocking(False)
    signal.set_wakeup_fd(tells.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    for source in (listener, ends, sys.stdin):
        selector.register(source, selectors.EVENT_READ)
    workers = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:  # the tests are over
                sys.exit()
            if key.fileobj is ends:
                ends.recv(4096)
                with contextlib.suppress(ChildProcessError):
                    while (done := os.waitpid(-1, os.WNOHANG))[0]:
                        pid, status = done
                        with contextlib.suppress(OSError):  # who handed it over was killed
                            workers[pid].sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                        workers.pop(pid).close()
                continue
            connection, _ = listener.accept()
            request, files = take(connection)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for each in (selector, listener, ends, tells, *workers.values()):
                    each.close()  # later it would close a file of the script
                become(request, files, connection)
                return request
            for file in files:
                os.close(file)
            workers[pid] = connection
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % pid)


if __name__ == "__main__":
    BASE = sys.path[1:]
    first = listen(warm_place.here(sys.argv[1]))
    prepare()
    gc.freeze()  # the collector of a fork need not walk through, and so copy, what is imported
    wanted = serve(first)
    as_new()
    code = 0
    try:
        run(wanted["kind"], wanted["what"], wanted["arguments"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        shown = error.__traceback__.tb_next.tb_next  # without the two frames of this file
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    # What an interpreter does at its end, but for taking all modules apart: that takes 2 s.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)
