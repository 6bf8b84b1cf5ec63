"""What the stages exchange: the schemas of all artifacts, and the only door through which they are read
and written. Every table, document and bundle is checked on the way in and on the way out, so that a
stage can trust what it was given. Needs neither torch nor Triton.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tessera-toolchain")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"
