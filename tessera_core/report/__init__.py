"""Showing results to people: tables and timelines made from artifacts, without running anything."""
