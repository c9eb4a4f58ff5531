"""What a script or a notebook calls. `mbd_core` hands these names on: `from mbd_core import LLM`."""
