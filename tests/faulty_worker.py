"""A worker that goes wrong as it is told; ``python -m faulty_worker`` with tests/ on the path."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tvmpaged.tuning.child import serve

#: Longer than any test waits, and short enough that one whose time-out is broken ends red.
HANG_S = 45.0
#: By its own fault, and by the system's hand when memory runs out.
DEATHS = {"crash": signal.SIGSEGV, "killed": signal.SIGKILL}


def handle(request: dict[str, Any]) -> dict[str, Any]:
    fault = request.get("fault") or request.get("choices", {}).get("fault")
    if fault in DEATHS:
        print("the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), DEATHS[fault])
    if fault == "hang":
        time.sleep(HANG_S)
    if fault == "child":
        started = subprocess.Popen(["sleep", "60"])
        return {"pid": started.pid}
    if fault == "exit":
        os._exit(3)
    if fault == "eat":
        bytearray(2 << 30)
    if fault == "eat in C++":
        print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr)
        print("  what():  std::bad_alloc", file=sys.stderr, flush=True)
        os.abort()
    if fault == "garbage":
        # Over the pipe that holds the answers, as a stray write would.
        for each in Path("/proc/self/fd").iterdir():
            if int(each.name) > 2 and str(each.readlink()).startswith("pipe:"):
                os.write(int(each.name), b"\xff\xfe\x00 no JSON\n")
                break
    if fault == "raise":
        raise ValueError("no such thing")
    if fault == "noise":
        print('{"reply": "a library prints to stdout"}', flush=True)
        os.write(1, b"and another one\n")
    return {"pid": os.getpid(), "size": "x" * request.get("size", 0), "index": request.get("index")}


if __name__ == "__main__":
    time.sleep(float(os.environ.get("FAULTY_START_S", "0")))
    serve(handle)
