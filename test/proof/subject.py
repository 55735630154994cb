"""The subject of the demo and of the proofs: a program that keeps state wherever a process can.

It holds a random heap, a counter, a private file open at an offset, a journal on a volume, and one
established TCP connection inside the sandbox. Then it is quiet until it is asked. Each answer
counts on, goes once over the TCP stream and moves the file offset, so that two answers show whether
the same process gave both.

    subject.py serve [HEAP_MIB] [VOLUME_DIR]    hold the state, answer on 127.0.0.1:7000
    subject.py ask                              print one answer as JSON
"""
import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time

PORT = 7000
PRIVATE = "/var/tmp/subject.private"


def start_ticks():
    """Field 22 of /proc/self/stat: when the kernel says this process began."""
    with open("/proc/self/stat") as f:
        return f.read().rsplit(")", 1)[1].split()[19]


def send_frame(sock, payload):
    sock.sendall(struct.pack(">I", len(payload)) + payload)


def recv_frame(sock):
    head = recv_all(sock, 4)
    return recv_all(sock, struct.unpack(">I", head)[0])


def recv_all(sock, n):
    out = b""
    while len(out) < n:
        piece = sock.recv(n - len(out))
        if not piece:
            raise ConnectionError("the stream ended")
        out += piece
    return out


class Echo(threading.Thread):
    """The far end of the framed stream: answers each frame with its own count and the frame's digest."""

    def __init__(self):
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))

    def run(self):
        conn, _ = self.listener.accept()
        count = 0
        while True:
            payload = recv_frame(conn)
            count += 1
            send_frame(conn, json.dumps({"count": count, "sha256": hashlib.sha256(payload).hexdigest()}).encode())


class Subject:
    def __init__(self, heap_mib, volume):
        self.nonce = os.urandom(16).hex()
        self.heap = bytearray(os.urandom(heap_mib << 20))
        self.counter = 0
        self.volume = volume
        self.born = time.time()
        with open(PRIVATE, "wb") as f:
            f.write(os.urandom(1 << 20))
        self.private = open(PRIVATE, "rb", buffering=0)
        self.private.seek(4096)
        echo = Echo()
        echo.start()
        self.stream = socket.create_connection(echo.listener.getsockname())
        self.journal = open(os.path.join(volume, "journal"), "ab", buffering=0) if volume else None

    def answer(self):
        self.counter += 1
        payload = b"%s %d" % (self.nonce.encode(), self.counter)
        send_frame(self.stream, payload)
        echoed = json.loads(recv_frame(self.stream))
        if echoed["sha256"] != hashlib.sha256(payload).hexdigest():
            raise ValueError("the stream gave back something else")
        self.private.read(100)
        out = {
            "pid": os.getpid(),
            "start_ticks": start_ticks(),
            "born": self.born,
            "nonce": self.nonce,
            "counter": self.counter,
            "heap_bytes": len(self.heap),
            "heap_sha256": hashlib.sha256(self.heap).hexdigest(),
            "file_offset": self.private.tell(),
            "file_sha256": file_sha256(PRIVATE),
            "tcp_frames": echoed["count"],
            "tcp_port": self.stream.getsockname()[1],
            "hostname": socket.gethostname(),
            "identity": identity(),
            "urandom": os.urandom(8).hex(),
        }
        if self.journal:
            self.journal.write(b"%s %d\n" % (self.nonce.encode(), self.counter))
            out["journal_lines"] = open(self.journal.name, "rb").read().count(b"\n")
            out["journal_offset"] = self.journal.tell()
            out["volume_uid"] = open(os.path.join(self.volume, "volume-uid")).read().strip()
        return out


def identity():
    """What guest init says of who we are now; it changes with a restore or a fork."""
    try:
        with open("/run/dormouse/identity.json") as f:
            return json.load(f)
    except OSError:
        return None


def file_sha256(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def serve(heap_mib, volume):
    subject = Subject(heap_mib, volume)
    listener = socket.create_server(("127.0.0.1", PORT))
    print("ready", subject.nonce, flush=True)
    while True:
        conn, _ = listener.accept()
        with conn:
            try:
                reply = subject.answer()
            except Exception as e:  # the asker must hear of it: a proof that fails in silence proves nothing
                reply = {"error": repr(e)}
            conn.sendall(json.dumps(reply).encode())
        print("answered", subject.counter, flush=True)


def ask():
    with socket.create_connection(("127.0.0.1", PORT), timeout=30) as conn:
        out = b""
        while piece := conn.recv(65536):
            out += piece
    print(out.decode())


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]) if len(sys.argv) > 2 else 8, sys.argv[3] if len(sys.argv) > 3 else "")
    else:
        ask()
