"""Serving: everything a decode step needs, without a compiler."""
