"""Searching choices for a spec on a device. One noun per file."""
