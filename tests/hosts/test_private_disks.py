"""Hosts that share no disk, with an object store beside them."""

import subprocess
from pathlib import Path

import pytest
from host_cluster import NoNamespaces, connected_hosts

pytestmark = pytest.mark.slow


def test_a_host_sees_its_own_files_alone() -> None:
    try:
        with connected_hosts(["one", "two"], disks="private") as ([one, two], _):
            assert one.disk is not None
            for path in (Path("/tmp/mark"), one.disk / "home" / "mark"):
                subprocess.run(one.command("sh", "-c", f"echo one > {path}"), check=True)
                assert one.outside(path).read_text() == "one\n"
                assert not path.exists() and not two.outside(path).exists()
                two.outside(path).write_text("two\n")
                read = subprocess.run(two.command("cat", str(path)), capture_output=True, text=True, check=True)
                assert read.stdout == "two\n" and one.outside(path).read_text() == "one\n"
    except NoNamespaces as error:
        pytest.skip(f"no hosts can be made on this machine: {error}")
