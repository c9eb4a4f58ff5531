"""The memory that a host has left: a container's limit counts, and what only caches files is free."""

from pathlib import Path

import pytest

from mbd_core.ops import machine as host_memory


def test_files_that_a_container_caches_leave_their_memory_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in {
        "memory.max": "1000000\n",
        "memory.current": "990000\n",
        "memory.stat": "anon 90000\ninactive_file 600000\nactive_file 300000\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    assert host_memory.free_host_memory() == 610_000
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.free_host_memory() > 610_000
