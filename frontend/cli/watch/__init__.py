"""Screens and tables of the fleet: status, top, traces and experts."""
