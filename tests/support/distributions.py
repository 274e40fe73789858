"""Distributions of third parties, as an installer writes them."""

from __future__ import annotations

from pathlib import Path


def write_distribution(site: Path, module: str, source: str, points: str) -> Path:
    """Write a module and the metadata of its package, version 1.0, to a folder for `sys.path`.

    Args:
        site: The folder.
        module: Name of the module; the package has hyphens in place of its underscores.
        source: Text of the module.
        points: Text of the package's entry_points.txt.
    """
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    (site / f"{module}.py").write_text(source)
    return site
