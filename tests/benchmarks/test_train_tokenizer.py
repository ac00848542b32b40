"""The script that trains the small tokenizer of the package."""

import filecmp

import train_tokenizer

from gtpo_jax.data.chat import TOKENIZER_DIR


def test_the_script_trains_the_shipped_files(tmp_path, capsys):
  train_tokenizer.main(tmp_path)
  names = sorted(file.name for file in tmp_path.iterdir())
  assert names == sorted(file.name for file in TOKENIZER_DIR.iterdir())
  assert filecmp.cmpfiles(tmp_path, TOKENIZER_DIR, names, shallow=False) == (names, [], [])
