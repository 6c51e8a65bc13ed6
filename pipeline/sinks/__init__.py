"""Sinks: events out to people, files and callbacks."""

from pipeline.sinks.callbacks import Callbacks
from pipeline.sinks.console import Console
from pipeline.sinks.event_log import EventLog

__all__ = ["Callbacks", "Console", "EventLog"]
