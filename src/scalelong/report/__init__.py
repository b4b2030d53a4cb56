"""Reports: one HTML page about runs and comparisons, made of their files alone."""

from __future__ import annotations

from .page import Content, NotAReport, read_content, render, write_page

__all__ = ["Content", "NotAReport", "read_content", "render", "write_page"]
