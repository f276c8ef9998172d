"""A proxy before a server, whose connections can be cut, and which remembers what was asked through it.

with CutProxy(port) as proxy:
    ...                        # a client talks to proxy.port
    proxy.cut()                # all connections end; new ones are let through
    proxy.open = False         # ... or are not
    proxy.to = other_port      # ... or lead to another server
    proxy.heads                # the first bytes of each connection, as text
"""

import socket
import threading
from contextlib import suppress


class CutProxy:
    def __init__(self, port):
        self.heads, self.open, self.to, self._pairs = [], True, port, []
        self._asked = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.open = False
        self._listener.close()
        self.cut()

    def cut(self, but=None):
        """`but`: how what was asked last begins, of connections that stay."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            if but is not None and self._asked.get(pair[0], "").startswith(but):
                self._pairs.append(pair)
                continue
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if not self.open:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self.to))
                self._pairs.append((client, server))
                for pair, asks in (((client, server), True), ((server, client), False)):
                    threading.Thread(target=self._pump, args=(*pair, asks), daemon=True).start()

    def _pump(self, source, to, asks):
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                if asks:
                    self._asked[source] = piece.decode("latin-1")
                    self.heads.append(self._asked[source])
                to.sendall(piece)
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
