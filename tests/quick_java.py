"""Start Spark for less: most of its drivers live for one small job, and spend it on loading and compiling classes.

`python -m tests.quick_java`, which `make` runs once, keeps Spark's classes as Java has read them, in a file of the
virtual environment. A driver then takes a third of the processor time, and does the same.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from postbus.spark.launch import BRIEF

KEPT: Final = Path(sys.prefix) / "spark.jsa"
FLAGS: Final = f"-Xlog:disable {BRIEF}"
VARIABLE: Final = "SPARK_SUBMIT_OPTS"
LONGEST: Final = 120.0


def start_quickly() -> None:
    """Have every Spark that this process and its children start begin with what was kept, if anything was."""
    kept = f" -XX:SharedArchiveFile={KEPT}" if KEPT.exists() else ""
    os.environ.setdefault(VARIABLE, FLAGS + kept)


def keep() -> None:
    """Run a small job, and have its Java write down at its end what it has loaded."""
    from pyspark import SparkContext  # noqa: PLC0415  most tests start no Spark

    from postbus import EventBus  # noqa: PLC0415
    from postbus.spark import Lake, session  # noqa: PLC0415
    from postbus.spark.lake import ingest  # noqa: PLC0415

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
    keep()
