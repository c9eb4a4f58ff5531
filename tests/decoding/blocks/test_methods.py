"""Methods by name: each is a configuration, and fields of it can be changed one by one."""

from mbd_core.decoding.blocks.config import read_decoding
from mbd_core.decoding.blocks.methods import D2F_TABLE_8, METHODS, TABLE_4
from mbd_core.json_text import merge_fields


def test_every_named_method_and_row_is_a_configuration() -> None:
    for name, fields in METHODS.items():
        assert read_decoding({"block_size": 32, **fields}), name
    for fields in D2F_TABLE_8.values():
        assert read_decoding(fields).prompt_attention == "full"
    for model, families in TABLE_4.items():
        size = 4 if model.endswith("b4") else 32
        for rows in families.values():
            single, multi = (read_decoding({"block_size": size, **rows[k]}) for k in ("single", "multi"))
            assert single.buffer_size == 1 < multi.buffer_size
            assert single.tau_m2t == multi.tau_m2t


def test_a_method_has_one_name() -> None:
    fields = list(METHODS.values())
    assert all(fields.index(f) == i for i, f in enumerate(fields))


def test_changes_reach_into_parts_and_leave_the_method_as_it_is() -> None:
    changed = merge_fields(METHODS["fast-dllm-dual"], {"canvas": {"tau": 0.5}, "prefix_cache": False})
    assert changed == {"canvas": {"cache": "dual", "tau": 0.5}, "prefix_cache": False}
    assert METHODS["fast-dllm-dual"] == {"canvas": {"cache": "dual"}}
    assert merge_fields(METHODS["t2t"], {"t2t": None}) == {"tau_m2t": 0.7, "t2t": None}
    assert merge_fields({"t2t": None}, {"t2t": {"tau": 0.5}}) == {"t2t": {"tau": 0.5}}
