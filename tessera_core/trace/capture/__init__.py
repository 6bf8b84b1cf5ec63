"""Capture of a trace's kernels on a CUDA device: launches with relocations, PTX, workspaces and edges."""

from __future__ import annotations
