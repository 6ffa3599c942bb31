"""A way on which large packets vanish: a proxy on the loopback that passes small messages on, and swallows large ones."""

import contextlib
import socket
import threading

MTU = 1400


class Swallowing:
    """Listens at `address` (HOST:PORT), and passes on what comes for HOST:PORT `target`. A direction in which a large message has
    vanished carries nothing more, as TCP would send that one again and again.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._open = (host, int(port)), list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        threading.Thread(target=self._work, daemon=True).start()

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                called = socket.create_connection(self._target)
                self._open += [caller, called]
                for ends in ((caller, called), (called, caller)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                if len(chunk) > MTU:
                    line, end, _ = chunk.partition(b"\n")
                    if end and len(line) < MTU:  # it was sent in a packet of its own
                        target.sendall(line + end)
                    return
                target.sendall(chunk)
            target.shutdown(socket.SHUT_WR)
