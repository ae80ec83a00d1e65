"""The dashboard: what the bus is doing, at a glance, and what an operator does about it."""

from postbus.dashboard.app import create_dashboard
from postbus.dashboard.room import Board, Coverage

__all__ = ["Board", "Coverage", "create_dashboard"]
