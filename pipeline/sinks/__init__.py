"""Sinks: events out to people and files."""

from pipeline.sinks.console import Console
from pipeline.sinks.event_log import EventLog

__all__ = ["Console", "EventLog"]
