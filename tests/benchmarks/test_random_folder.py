"""A random model's folder for benchmarks can be served."""

from dataclasses import replace
from pathlib import Path

from benchmarks.random_folder import MAX_POSITIONS, write_random_folder
from mbd_core.checkpoint.folder import read_folder
from mbd_core.models.shapes import SDAR_50M

SMALL = replace(SDAR_50M, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32)


def test_the_folder_passes_the_check_of_every_served_model(tmp_path: Path) -> None:
    write_random_folder(SMALL, tmp_path / "random")
    folder = read_folder(tmp_path / "random")
    assert (folder.config.mask_token_id, folder.config.eos_token_ids) == (SMALL.mask_token_id, SMALL.eos_token_ids)
    assert folder.config.max_positions == MAX_POSITIONS < SMALL.max_positions
    assert len(folder.tokenizer) == SMALL.vocab_size
    assert (folder.defaults["tokens_per_step"], folder.defaults["block_size"]) == (4, 32)
