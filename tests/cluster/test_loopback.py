"""A Ray that `ray.init` starts for us listens on loopback alone: its metrics agent asks nobody for a token."""

from typing import Any

from session_processes import check_loopback_only


def test_the_tests_own_ray_listens_on_loopback_alone(ray_cluster: Any) -> None:
    check_loopback_only(ray_cluster._private.worker._global_node.get_session_dir_path())
