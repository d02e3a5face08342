"""Choices: a kernel's options by name, each with its value."""

from __future__ import annotations

from typing import Any

Choices = dict[str, Any]
