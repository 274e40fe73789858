"""Exporters: trainers' own types."""
