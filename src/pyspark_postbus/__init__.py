"""Spark looks for data sources in modules named like this one: `format("postbus")` is found without registering it."""

from postbus.spark.source import PostbusSource as DefaultSource

__all__ = ["DefaultSource"]
