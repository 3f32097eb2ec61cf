"""Imports the modules of an engine core into a fork server that is not a fork of the worker. See `processes`."""

from .processes import import_core, isolate

isolate()
import_core()
