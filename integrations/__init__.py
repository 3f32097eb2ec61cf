"""Adapters for published trainers. Each adapter imports its trainer; no other part of rollbus imports the adapter."""
