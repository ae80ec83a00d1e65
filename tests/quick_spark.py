"""Start Spark for less: most of its drivers live for one small job, and spend it on loading and compiling.

`python -m tests.quick_spark`, which `make` runs once, keeps Spark's classes as Java has read them, in a file of the
virtual environment: a driver then takes a third of the processor time. And it has Spark's Python processes import
PySpark from where it is installed, and compiled, rather than compile anew the copy in a zip that Spark hands to each:
one starts in a third of the time. Both do the same.
"""

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

from postbus.spark.launch import BRIEF

KEPT: Final = Path(sys.prefix) / "spark.jsa"
FLAGS: Final = f"-Xlog:disable {BRIEF}"
VARIABLE: Final = "SPARK_SUBMIT_OPTS"
LONGEST: Final = 120.0
INSTALLED: Final = Path(sysconfig.get_path("purelib"))
ZIPPED: Final = str(INSTALLED / "pyspark" / "python" / "lib")
UNZIPPED: Final = f"import sys; sys.path[:] = [each for each in sys.path if not each.startswith({ZIPPED!r})]\n"


def start_quickly() -> None:
    """Have every Spark that this process and its children start begin with what was kept, if anything was."""
    os.environ.setdefault(VARIABLE, options())


def options() -> str:
    """Return what to start Java with for that."""
    return FLAGS + (f" -XX:SharedArchiveFile={KEPT}" if KEPT.exists() else "")


def keep() -> None:
    """Run a small job, and have its Java write down at its end what it has loaded."""
    from pyspark import SparkContext  # noqa: PLC0415  most tests start no Spark

    from postbus import EventBus  # noqa: PLC0415
    from postbus.spark import Lake, session  # noqa: PLC0415
    from postbus.spark.lake import ingest  # noqa: PLC0415

    (INSTALLED / "unzipped_pyspark.pth").write_text(UNZIPPED)
    KEPT.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT.parent) as folder:
        made = Path(folder) / KEPT.name
        os.environ[VARIABLE] = f"{FLAGS} -XX:ArchiveClassesAtExit={made}"
        with EventBus(f"sqlite:///{folder}/bus.db") as bus:
            bus.publish("warm.up", {})
            spark = session("local[2]")
            ingest(spark, bus.settings.url, Lake(f"{folder}/lake"))
            spark.stop()
        java: Any = SparkContext._gateway
        java.proc.stdin.close()
        java.proc.wait(LONGEST)
        made.replace(KEPT)


if __name__ == "__main__":
    if sys.argv[1:] == ["--options"]:
        sys.stdout.write(options())
    else:
        keep()
