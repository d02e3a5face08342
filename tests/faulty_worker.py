"""A worker that goes wrong as it is told; ``python -m faulty_worker`` with tests/ on the path."""

import os
import signal
import sys
import time
from typing import Any

from tvmpaged.tuning.child import serve


def handle(request: dict[str, Any]) -> dict[str, Any]:
    fault = request.get("fault")
    if fault == "crash":
        print("the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hang":
        time.sleep(1000)
    if fault == "exit":
        os._exit(3)
    if fault == "eat":
        bytearray(2 << 30)
    if fault == "raise":
        raise ValueError("no such thing")
    if fault == "noise":
        print('{"reply": "a library prints to stdout"}', flush=True)
        os.write(1, b"and another one\n")
    return {"pid": os.getpid(), "size": "x" * request.get("size", 0), "index": request.get("index")}


if __name__ == "__main__":
    serve(handle)
