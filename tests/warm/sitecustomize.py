"""Python imports this before a script, if it is on PYTHONPATH: hands the start to parent.py.

This process stays as the one that its parent sees: it passes signals on, and it ends as the
process that does the work ends. Starts that parent.py could not imitate go on as they are.
"""

import os
import sys


def command(words):
    """Return (kind, what, arguments) of python's own command line, or None: not for us."""
    words = words[1:]
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    while words and words[0] in ("-u", "-B"):
        unbuffered, words = unbuffered or words[0] == "-u", words[1:]
    if words[:1] == ["-m"] and words[1].startswith(("torch.distributed.", "topics.")):
        return "-m", words[1], words[2:], unbuffered
    if words[:1] == ["-c"] and "multiprocessing.spawn" in words[1]:
        return "-c", words[1], words[2:], unbuffered
    if words and words[0].endswith((".py", "/torchrun")) and os.path.isfile(words[0]):
        return "file", words[0], words[1:], unbuffered
    return None


def hand_over(address, kind, what, arguments, unbuffered):
    import contextlib
    import json
    import signal
    import socket

    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        return connection.close()  # there is none here, or the tests are over
    here = os.open(".", os.O_RDONLY)
    own = {here, connection.fileno()}
    numbers = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            os.fstat(number)
        except OSError:
            continue  # it was that of listdir
        if number not in own:
            numbers.append(number)
    catchable = [s for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP)]
    ignored = [int(s) for s in catchable if signal.getsignal(s) == signal.SIG_IGN]
    request = {"kind": kind, "what": what, "arguments": arguments, "unbuffered": unbuffered}
    request |= {"environ": dict(os.environ), "numbers": numbers, "ignored": ignored}
    text = json.dumps(request).encode()
    signal.pthread_sigmask(signal.SIG_BLOCK, catchable)
    socket.send_fds(connection, [len(text).to_bytes(8, "big")], [here, *numbers])
    connection.sendall(text)
    answers = connection.makefile()
    worker = int(answers.readline())
    for number in numbers:  # a pipe's other end sees who has it open
        os.close(number)

    def pass_on(number, frame):
        with contextlib.suppress(ProcessLookupError):  # it has ended: its code is about to come
            os.kill(worker, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        if number not in ignored:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, catchable)
    code = int(answers.readline() or 1)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


_address = os.environ.get("WARM")
_observed = {"CHECK_DIR", "OBSERVE"} & set(os.environ)  # has to see how the script imports torch
if _address and not _observed and (_command := command(sys.orig_argv)):
    import warm_place

    hand_over(warm_place.here(_address), *_command)
