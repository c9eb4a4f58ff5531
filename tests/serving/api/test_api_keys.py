"""API keys: who is let in, what is wrong with a file, and a file that changes."""

import logging
import os
from pathlib import Path

import pytest

from mbd_core.serving.api.access import ApiKeys, read_keys
from mbd_core.serving.api.errors import ApiError

ONE, TWO, THREE = "one-0123456789abcdef", "two-0123456789abcdef", "three-0123456789abc"


def refused(keys: ApiKeys, header: str) -> bool:
    with pytest.raises(ApiError) as caught:
        keys.client(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"}
    return True


def test_a_client_is_known_by_its_key_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who may ask\nann {ONE}\n\nben {TWO}  # since May\n")
    keys = ApiKeys(file)
    assert [keys.client(f"Bearer {key}") for key in (ONE, TWO)] == ["ann", "ben"]
    assert [keys.client(f"{scheme}{ONE}") for scheme in ("bearer ", "BEARER  ")] == ["ann"] * 2, "a scheme has no case"
    for header in (
        "",
        "Bearer",
        "Bearer ",
        ONE,
        f"Basic {ONE}",
        f"Bearer {ONE}x",
        f"Bearer {ONE[:-1]}",
        "Bearer \u2603",
    ):
        assert refused(keys, header)


def test_only_who_is_marked_administers(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"ann {ONE} administrator\nben {TWO}\n")
    keys = ApiKeys(file)
    assert keys.client(f"Bearer {ONE}") == keys.administrator(f"Bearer {ONE}") == "ann"
    for header, status in ((f"Bearer {TWO}", 403), ("", 401), (f"Bearer {THREE}", 401)):
        with pytest.raises(ApiError) as caught:
            keys.administrator(header)
        assert caught.value.status == status
    file.write_text(f"ann {ONE}\nben {TWO}   administrator\n")
    assert keys.administrator(f"Bearer {TWO}") == "ben"
    with pytest.raises(ApiError):
        keys.administrator(f"Bearer {ONE}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key"),
        ("ann", "line 1: 1 words"),
        (f"ann {ONE} x", "line 1: 3 words.* 'administrator' after the key"),
        (f"ann {ONE} administrator x", "line 1: 4 words"),
        (f"ann {ONE}\nann {TWO}", "line 2: client 'ann' stands there twice"),
        ("ann short-0123", "line 1: the key has 10 characters"),
    ],
)
def test_a_wrong_file_names_its_line_and_no_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_keys(file)
    assert not any(word in str(caught.value) for word in (ONE, TWO, "short-0123"))
    with pytest.raises(ValueError, match=r"nowhere cannot be read: No such file or directory$"):
        read_keys(tmp_path / "nowhere")


def test_keys_change_with_the_file_and_hold_while_it_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"ann {ONE}\nben {TWO}\n")
    keys = ApiKeys(file)
    changed = tmp_path / "changed"
    changed.write_text(f"cat {THREE}\n")
    os.replace(changed, file)
    assert keys.client(f"Bearer {THREE}") == "cat" and refused(keys, f"Bearer {ONE}")
    with caplog.at_level(logging.ERROR):
        file.write_text("cat\n")
        assert keys.client(f"Bearer {THREE}") == "cat"
        file.unlink()
        assert keys.client(f"Bearer {THREE}") == "cat"
    assert "line 1: 1 words" in caplog.text and "cannot be read" in caplog.text and THREE not in caplog.text
    file.write_text(f"ben {TWO}\n")
    assert keys.client(f"Bearer {TWO}") == "ben" and refused(keys, f"Bearer {THREE}")
