"""The build backend: setuptools', with its intermediate files in a temporary folder.

In build/ they would stay after `pip wheel .`, and what an older version left there would go into the next wheel.
"""

import os
import tempfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  # hooks of PEP 517 and 660
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

CONFIGURATION = "DIST_EXTRA_CONFIG"  # the variable that names one more file of options for setuptools


def build_wheel(
    wheel_directory: str, config_settings: dict[str, object] | None = None, metadata_directory: str | None = None
) -> str:
    """As setuptools' hook. If `CONFIGURATION` names a file already, this build does not read it."""
    before = os.environ.get(CONFIGURATION)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "setup.cfg")
        file.write_text(f"[build]\nbuild_base = {folder}\n")
        os.environ[CONFIGURATION] = str(file)
        try:
            return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
        finally:
            del os.environ[CONFIGURATION]
            if before is not None:
                os.environ[CONFIGURATION] = before
