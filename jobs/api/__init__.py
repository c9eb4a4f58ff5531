"""The functions that a script or a notebook calls. `mbd_core` exports them: `from mbd_core import LLM`."""
